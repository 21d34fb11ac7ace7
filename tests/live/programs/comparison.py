"""What the ranks run: a program under DDP, then under gradlane, and every bit of the two compared."""

from __future__ import annotations

import contextlib
import copy
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.network import Network
from gradlane.live.session.verification import VerifyOptions
from gradlane.planning.tuning import TuneOptions
from tests.live.cases import differences
from tests.live.networks import counting_deferred_updates
from tests.live.programs import bystanders, gradients, parameters, passes, structure  # noqa: F401  (they fill ACTIONS)
from tests.live.programs.held import counting_values_that_come_later, held_network
from tests.live.programs.hooks import register
from tests.live.programs.models import MODELS, OPTIMIZERS, SERVED, TAKES_ROOTS, UNUSED
from tests.live.programs.program import Program
from tests.live.programs.run import Run, perform
from tests.live.served import near
from tests.live.streams import streams_on_the_host

STARTUP_NS, BYTES_PER_SECOND = 20_000, 10**9
PACKET_BYTES = 1024  # where servers update: several for most parameters
TIMEOUT_S = 4  # of a session: after that a hang has a name
KNOBS = {
    "bytescheduler": {"partition_bytes": 1024, "credit_bytes": 4096},
    "p3": {"slice_bytes": 2048},
    "blocks": {"least_bytes": 2048, "most_bytes": 4096},
    "owners": {"least_bytes": 1024, "most_bytes": 16384},
}
WAYS = (
    "bytescheduler late",
    "bytescheduler mixed",
    "blocks late",
    "blocks mixed",
    "p3 late",
    "owners late",
    "owners mixed",
    "bytescheduler prompt",
    "bytescheduler late coordinator",
    "bytescheduler late tuned",
    "bytescheduler late server",
    "mercury mixed server",
    "dear late server",
    "owners late server",
    "bytescheduler late wrapped",
    "bytescheduler mixed wrapped",
    "blocks late wrapped",
    "owners mixed wrapped",
    "bytescheduler late tuned wrapped",
    "mercury mixed server wrapped",
    "owners mixed server wrapped",
    "bytescheduler mixed verified",
    "bytescheduler mixed verified wrapped",
    "owners mixed verified",
    "mercury mixed server verified wrapped",
    "bytescheduler late checked",
    "bytescheduler mixed checked wrapped",
    "mercury mixed server checked",
    "owners late checked wrapped",
    "mg-wfbp late wrapped",
    "geryon mixed",
    "prophet mixed server wrapped",
)
"""A policy; `late`: every sum is held, `mixed`: every other one, `prompt`: none; backend and order, if not the default ones;
`tuned`: the plan changes in nearly every iteration; `verified`: most steps are compared with DDP's; `checked`: for
gradients that are not finite; `wrapped`: by the drop-in, else attached.
"""
SERVED_WAYS = (
    "mercury late served",
    "mercury mixed served",
    "mercury prompt served",
    "p3 late served",
    "p3 mixed served",
    "bytescheduler late served",
    "bytescheduler mixed served",
    "tictac mixed served",
    "mercury-no-preemption late served",
    "wfbp mixed served",
    "mercury mixed served ranked",
)
"""As `WAYS`. `served`: the update is on the servers (`attach_to_servers`), in step, and what is held are parameters; `ranked`:
servers add in the order of the ranks.
"""


def compare(rank: int, world: int, program: str, device: str = "cpu") -> dict[str, Any]:
    """What came of a program that trains on `device`, which is the default one meanwhile. "early" and "late" are the CPU, which
    a session takes for a device whose streams run as soon or as late as they may.

    One of: {"refused_by_ddp": text}; {"error": (kind, text, traceback), "typed": bool}; {"differs": names}.

    The last two have how many updates were `deferred`, too.
    """
    value = Program.from_json(program)
    if device in ("cpu", "early", "late"):
        return _compared(rank, world, value, "" if device == "cpu" else device)
    torch.set_default_device(device)
    try:
        return _compared(rank, world, value, "")
    finally:
        torch.set_default_device(None)


def _compared(rank: int, world: int, value: Program, streams: str) -> dict[str, Any]:
    at = ["before its first action"]
    try:
        reference = under_ddp(value, rank, at)
    except Exception as error:
        return {"refused_by_ddp": f"{type(error).__name__}: {_first_line(error)} (in {at[0]})"}
    with counting_values_that_come_later() if is_served(value) else counting_deferred_updates() as deferred:
        try:
            with streams_on_the_host(streams == "late") if streams else contextlib.nullcontext():
                result = under_gradlane(value, rank, world, at)
        except Exception as error:
            typed = isinstance(error, gradlane.GradlaneError)
            told = (type(error).__name__, f"{_first_line(error)} (in {at[0]})", traceback.format_exc())
            return {"error": told, "typed": typed, "deferred": sum(deferred)}
    if {"server", "served"} & {*value.way.split()}:  # which NaN comes of two is not defined there
        reference, result = _of_one_nan(reference), _of_one_nan(result)
    if is_served(value):
        reference, result = _without_gradients(reference), _without_gradients(result)
    rounds = is_served(value) and value.optimizer in TAKES_ROOTS
    differs = near(reference, result) if rounds else differences(reference, result)
    if world > 2:
        differs = _unequal_ranks(reference, result, world) + [
            name for name in differs if name not in reference or name not in result or not _close(reference[name], result[name])
        ]
    if differs and torch.get_default_device().type != "cpu":  # where kernels may add in no order
        unsteady = differences(reference, under_ddp(value, rank, at))
        if unsteady:
            return {"refused_by_ddp": "two runs under DDP differ"}
    return {"differs": differs, "deferred": sum(deferred)}


def is_served(program: Program) -> bool:
    return "served" in program.way.split()


def _without_gradients(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Where servers update, `.grad` has the rank's own."""
    return {name: value for name, value in values.items() if not (name.startswith("end/") and name.endswith(".grad"))}


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """But for rounding: where gradients of several passes are added up, more than two ranks add something."""
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-3, atol=1e-6, equal_nan=True)


def _unequal_ranks(reference: dict[str, torch.Tensor], result: dict[str, torch.Tensor], world: int) -> list[str]:
    """What has the same bits on all ranks under DDP alone."""
    told: list[Any] = [None] * world
    digests = [
        {name: crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy()) for name, value in values.items()}
        for values in (reference, result)
    ]
    dist.all_gather_object(told, digests)
    alike = [
        {name for name in told[0][side] if all(one[side].get(name) == told[0][side][name] for one in told)} for side in (0, 1)
    ]
    return sorted(alike[0] - alike[1])


def _of_one_nan(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.where(value.isnan(), torch.nan, value) if value.is_floating_point() else value
        for name, value in values.items()
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).partition("\n")[0][:300]


def under_ddp(program: Program, rank: int, at: list[str]) -> dict[str, torch.Tensor]:
    """`at[0]` is the action that is being done."""
    model, optimizers = _made(program, seed=7)
    run = Run(program, rank, model, model, optimizers, contextlib.nullcontext, _generator(rank))
    with _quietly():
        hooks = [hook for hook in program.hooks if hook.startswith("before")]
        later = [hook for hook in program.hooks if not hook.startswith("before")]
        for hook in hooks:
            register(run, hook)
        options = _ddp_options(program)
        _take_over(run, {name: DistributedDataParallel(part, **options) for name, part in _models(program, model).items()})
        for hook in later:
            register(run, hook)
        return _trained(run, at)


def under_gradlane(program: Program, rank: int, world: int, at: list[str]) -> dict[str, torch.Tensor]:
    policy, network, *options = program.way.split()
    model, optimizers = _made(program, seed=7 + rank)  # attach must make ranks equal to rank 0
    run = Run(program, rank, model, model, optimizers, contextlib.nullcontext, _generator(rank))
    with _quietly(), _network(network, rank):
        for hook in program.hooks:
            if hook.startswith("before"):
                register(run, hook)
        asked: dict[str, Any] = {
            "policy": gradlane.policies.get(policy, **KNOBS.get(policy, {})),
            "backend": "server" if "server" in options else "all-reduce",
            "order": "coordinator" if "coordinator" in options else "planned",
            "network": Network.line(world, STARTUP_NS, BYTES_PER_SECOND),
            "profile_iterations": 1,
            "tune": TuneOptions(trials=6, iterations=1, settle=0) if "tuned" in options else False,
            "verify": VerifyOptions(first=4, every=2) if "verified" in options else False,
            "check_finite": "checked" in options,
            "timeout": TIMEOUT_S,
        }
        with contextlib.ExitStack() as ends:
            if "served" in options:
                served = Served(ends, run, _models(program, model), asked)
                served.attach()
            elif "wrapped" in options:
                wrappers: dict[str, Any] = {}
                for name, part in _models(program, model).items():
                    wrapper = gradlane.DistributedDataParallel(part, options=asked, **_ddp_options(program))
                    ends.push(partial(_end, wrapper))
                    wrappers[name] = wrapper
                _take_over(run, wrappers)
            else:
                asked["broadcast_buffers"] = MODELS[program.model].ddp.get("broadcast_buffers", True)
                sessions: list[Any] = [
                    ends.enter_context(gradlane.attach(part, _with_parameters_of(part, optimizers), **asked))
                    for part in _models(program, model).values()
                ]
                run.no_sync = partial(_no_sync, sessions)
            for hook in program.hooks:
                if not hook.startswith("before"):
                    register(run, hook)
            return _trained(run, at)


class Served:
    """The sessions of a program whose update is on the servers. `ends` ends those that are not closed."""

    def __init__(self, ends: contextlib.ExitStack, run: Run, models: dict[str, nn.Module], asked: dict[str, Any]) -> None:
        self._ends, self._run, self._models = ends, run, models
        self._options = {
            "policy": asked["policy"],
            "packet_bytes": PACKET_BYTES,
            "summation_order": "rank" if "ranked" in run.program.way.split() else None,
            "broadcast_buffers": MODELS[run.program.model].ddp.get("broadcast_buffers", True),
            "timeout": asked["timeout"],
        }
        self._sessions: list[gradlane.live.ServedSession] = []

    def attach(self) -> None:
        optimizers = self._run.optimizers
        self._sessions = [
            self._ends.enter_context(gradlane.attach_to_servers(model, _with_parameters_of(model, optimizers), **self._options))
            for model in self._models.values()
        ]
        self._run.no_sync = partial(_no_sync, self._sessions)
        self._run.fetch_state, self._run.apart = self._fetch_state, self._apart

    def _fetch_state(self) -> None:
        for session in self._sessions:
            session.fetch_optimizer_state()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        for session in self._sessions:
            session.close()
        yield
        self.attach()


def _ddp_options(program: Program) -> dict[str, Any]:
    options = MODELS[program.model].ddp
    freezes = any(action.startswith(("freeze", "unfreeze")) for step in program.steps for action in step)
    return {**options, **UNUSED} if freezes else options


def _models(program: Program, model: nn.Module) -> dict[str, nn.Module]:
    """What gets a wrapper or a session of its own: the whole model, or parts of it by name."""
    known = MODELS[program.model]
    return {name: getattr(model, name) for name in known.parts} if known.are_models else {"": model}


def _take_over(run: Run, wrappers: dict[str, Any]) -> None:
    """The loop calls `wrappers`: the only one, or another form of the model that has them in place of its parts."""
    run.no_sync = partial(_no_sync, [*wrappers.values()])
    if "" in wrappers:
        run.call = wrappers[""]
        return
    run.call = copy.copy(run.model)
    run.call.__dict__["_modules"] = {**run.model._modules, **wrappers}


@contextlib.contextmanager
def _no_sync(all_of: Sequence[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in all_of:
            stack.enter_context(each.no_sync())
        yield


def _with_parameters_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    own = {id(param) for param in model.parameters()}
    return [each for each in optimizers if own & {id(param) for group in each.param_groups for param in group["params"]}]


def _end(wrapper: Any, *error: Any) -> None:
    """End what the drop-in has begun, if anything."""
    if wrapper.session is not None:
        wrapper.session.__exit__(*error)


def _made(program: Program, seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = MODELS[program.model].make()
    return model, (OPTIMIZERS | SERVED)[program.optimizer](model)


def _generator(rank: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(1000 + rank)


def _network(name: str, rank: int) -> contextlib.AbstractContextManager[None]:
    if name == "prompt":
        return contextlib.nullcontext()
    return held_network(lambda message: name == "late" or (message + rank) % 2 == 0)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("gradlane")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _trained(run: Run, at: list[str]) -> dict[str, torch.Tensor]:
    """What was seen and what is there at the end, read as a script reads it."""
    torch.manual_seed(50 + run.rank)  # dropout draws from it
    run.save()
    for at[0] in perform(run):
        pass
    at[0] = "the end"
    run.fetch_state()
    run.see("random state", torch.rand(1))
    for handle in run.handles:
        handle.remove()
    found = dict(run.seen)
    for name, value in [*run.model.named_parameters(), *run.model.named_buffers()]:
        found[f"end/{name}"] = value.detach().clone()
    names = {id(param): name for name, param in run.model.named_parameters()}
    for name, param in run.model.named_parameters():
        if param.grad is not None:
            found[f"end/{name}.grad"] = param.grad.detach().clone()
    for index, optimizer in enumerate(run.optimizers):
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"end/{index}/{names[id(param)]}/{key}"] = value.detach().clone()
    return {**found, **{f"end/average/{name}": value for name, value in run.average.items()}}
