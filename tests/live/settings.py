"""What ranks run: a plain loop under what a script may set for all of torch, or of Python."""

from __future__ import annotations

import contextlib
import cProfile
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gradlane
from tests.live.cases import bits_of, differences
from tests.live.loops.job import GIVEN, POLICIES, Mlp
from tests.live.networks import counting_deferred_updates, slow_network

STEPS = 7


class _Functions(TorchFunctionMode):
    """A script's own, which sees all calls of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """A script's own, which sees all operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _set(setter: Callable[[Any], object], value: Any, before: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def setting() -> Iterator[None]:
        setter(value)
        try:
            yield
        finally:
            setter(before)

    return setting


@contextlib.contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def _profiled_by_python() -> Iterator[None]:
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()


def _no_tracing(frame: Any, event: str, arg: Any) -> Any:
    return _no_tracing


def _clones(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    # its tensors have no memory, so that any of gradlane's that lay there would be missed
    "another default device": _set(torch.set_default_device, "meta", None),
    "float64 by default": _set(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic algorithms": _set(torch.use_deterministic_algorithms, True, False),
    "denormals flushed": _set(torch.set_flush_denormal, True, False),
    "parameters swapped when converted": _set(torch.__future__.set_swap_module_params_on_conversion, True, False),
    "anomalies detected": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no kernels of oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "a function mode": _Functions,
    "a dispatch mode": _Operators,
    "operations counted": lambda: FlopCounterMode(display=False),
    "saved tensors elsewhere": lambda: torch.autograd.graph.saved_tensors_hooks(_clones, _clones),
    "a backward pass of one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "torch's profiler": torch.profiler.profile,
    "Python's profiler": _profiled_by_python,
    "Python's tracing": _set(sys.settrace, _no_tracing, None),
    "warnings as errors": _warnings_are_errors,
    "no garbage collected": _set(lambda off: gc.disable() if off else gc.enable(), True, False),
}
MODES = ("a function mode", "a dispatch mode", "operations counted")
"""See what an update does, so that it is made at `step()`."""
SCALES = {"denormals flushed": 1e-38}
"""Of the loss."""
HELD = ("from attach on", "in each step", "at optimizer.step()")
"""While a setting is in force."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.1),
}


def beside_ddp(
    rank: int,
    world: int,
    setting: str,
    policy: str = "bytescheduler",
    backend: str | None = "all-reduce",
    measures: bool = False,
    held: str = HELD[0],
    optimizer: str = "SGD",
    **options: Any,
) -> tuple[list[str], int]:
    """Names that differ from DDP's under the same setting, and how many updates were deferred.

    Args:
        measures: the session measures the network, which is given otherwise.
        held: one of `HELD`.
        optimizer: one of `OPTIMIZERS`.
    """
    reference = _trained(rank, setting, held, optimizer, None)
    if not measures:
        options["network"] = gradlane.Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
    chosen = policy if policy == "auto" else gradlane.policies.get(policy, **POLICIES.get(policy, {}))
    with slow_network(), counting_deferred_updates() as deferred:
        found = _trained(rank, setting, held, optimizer, chosen, backend=backend, **options)
    return differences(reference, found), sum(deferred)


def recorded(rank: int, world: int, policy: str) -> list[str]:
    """Gloo's collectives in the records of a profiler of each step, of a model with buffers and a script that clips."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network = gradlane.Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
    found = []
    with gradlane.attach(model, optimizer, policy, network=network, backend="all-reduce", profile_iterations=1, timeout=20):
        for _ in range(STEPS):
            with torch.profiler.profile() as profiler:
                optimizer.zero_grad()
                model(torch.randn(8, 6)).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            found += [event.key for event in profiler.key_averages() if event.key.startswith("gloo:")]
    return found


def _trained(rank: int, setting: str, held: str, kind: str, policy: Any, **options: Any) -> dict[str, torch.Tensor]:
    def set_at(place: str) -> contextlib.AbstractContextManager[Any]:
        return SETTINGS[setting]() if place == held else contextlib.nullcontext()

    torch.manual_seed(7)
    model = Mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    generator = torch.Generator().manual_seed(rank)
    batches = [Mlp.batch(generator) for _ in range(STEPS)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_at("from attach on"))
        call: Any = model
        if policy is None:
            call = DistributedDataParallel(model)
        else:
            attached = gradlane.attach(model, optimizer, policy, profile_iterations=1, timeout=20, **options)
            session: Any = stack.enter_context(attached)
        for x, y in batches:
            with set_at("in each step"):
                optimizer.zero_grad()
                (torch.nn.functional.cross_entropy(call(x), y) * SCALES.get(setting, 1)).backward()
                with set_at("at optimizer.step()"):
                    optimizer.step()
        if policy is not None:
            session.flush()
    return bits_of(model, optimizer)
