"""What ranks run with several models attached at a time, beside DDP around each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradlane
from gradlane.errors import UnsupportedError
from gradlane.live.backends.all_reduce import AllReduceBackend
from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.comm.recorder import blocked
from gradlane.live.session.session import Session
from gradlane.live.startup import networks
from tests.live.cases import bits_of, differences
from tests.live.loops import GIVEN, Mlp, log_lines
from tests.live.networks import counting_deferred_updates, slow_network

STEPS = 8
OPTIONS: dict[str, Any] = {"network": GIVEN, "profile_iterations": 1, "timeout": 20}


def _policy() -> Any:
    return gradlane.policies.get("bytescheduler", partition_bytes=2000, credit_bytes=8000)


class _Encoder(Mlp):
    """What `Mlp` takes, from other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = nn.Linear(60, 12)


Use = Callable[[torch.optim.Optimizer, nn.Module, nn.Module, int], dict[str, torch.Tensor]]


def _restart(optimizer: torch.optim.Optimizer, encoder: nn.Module, decoder: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """The momentum is looked at, and put to zero in every third step."""
    seen = {f"momentum {index}": state["momentum_buffer"].clone() for index, state in enumerate(optimizer.state.values())}
    if step % 3 == 2:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
    return seen


def _read_one(optimizer: torch.optim.Optimizer, encoder: nn.Module, decoder: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """All of one model is read first, which leaves updates of the other."""
    first, second = (encoder, decoder) if step % 2 else (decoder, encoder)
    sums = {"first": torch.stack([param.sum() for param in first.parameters()])}
    return {**sums, **_restart(optimizer, first, second, step)}


def _replace(optimizer: torch.optim.Optimizer, encoder: nn.Module, decoder: nn.Module, step: int) -> dict[str, torch.Tensor]:
    optimizer.load_state_dict(optimizer.state_dict())
    return {}


USES: dict[str, Use] = {"restarts": _restart, "reads_one_model_first": _read_one, "state_loaded": _replace}


def one_optimizer(rank: int, world: int, use: str, verify: bool) -> tuple[list[str], int]:
    """What differs from DDP with one optimizer over two models, and how many updates were deferred."""

    def train(wrap: Callable[[nn.Module, Any], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        encoder, decoder = _Encoder(), Mlp()
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.05, momentum=0.9)
        calls = wrap(encoder, optimizer), wrap(decoder, optimizer)
        generator, seen = torch.Generator().manual_seed(1000 + rank), {}
        for step in range(STEPS):
            x, y = decoder.batch(generator)
            optimizer.zero_grad()
            F.cross_entropy(calls[1](calls[0](x)), y).backward()
            optimizer.step()
            seen.update({f"{name} at {step}": value for name, value in USES[use](optimizer, encoder, decoder, step).items()})
        parts = {"encoder": encoder, "decoder": decoder}
        found = {f"{part} {name}": value for part, model in parts.items() for name, value in bits_of(model, optimizer).items()}
        return {**found, **seen}

    reference = train(lambda model, optimizer: TorchDDP(model))
    sessions: list[Session] = []

    def attach(model: nn.Module, optimizer: Any) -> nn.Module:
        sessions.append(gradlane.attach(model, optimizer, _policy(), verify=verify, **OPTIONS))
        return model

    with slow_network(), counting_deferred_updates() as deferred:
        try:
            found = train(attach)
        finally:
            for session in sessions:
                session.close()
    return differences(reference, found), sum(deferred)


def _heads() -> tuple[nn.Module, nn.Module]:
    trunk = nn.Linear(12, 12)
    return nn.Sequential(trunk, Mlp()), nn.Sequential(trunk, nn.Linear(12, 6))


def a_shared_part(rank: int, world: int) -> list[str]:
    """What is said where a second model that shares a part is attached, wrapped, and attached with the part frozen."""
    first, second = _heads()
    said = []
    with gradlane.attach(first, torch.optim.SGD(first.parameters(), lr=0.1), _policy(), **OPTIONS):
        for call in (gradlane.attach, gradlane.DistributedDataParallel):
            try:
                call(second)
            except UnsupportedError as error:
                said.append(str(error))
        second[0].requires_grad_(False)
        trained = torch.optim.SGD(second[1].parameters(), lr=0.1)
        first_again = nn.Sequential(nn.Linear(12, 12), second[1])
        gradlane.attach(first_again, trained, _policy(), **OPTIONS).close()
    second[0].requires_grad_(True)
    gradlane.attach(second, trained, _policy(), **OPTIONS).close()
    return said


def a_shared_part_wrapped(rank: int, world: int, how: str) -> tuple[list[str], list[str]]:
    """What differs from torch's class where two wrapped models share a part, and what is logged.

    Args:
        rank, world: of this process.
        how: "at once"; "late", when the first model has a session; "frozen": the part is trained from step 4 on, when both
            models have sessions; or "frozen, wrapped again": both are wrapped once more then, so that the part is summed.
    """

    def train(wrap: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        models = _heads()
        models[0][0].requires_grad_("frozen" not in how)
        calls = [wrap(models[0])]
        params = {id(param): param for model in models for param in model.parameters()}
        optimizer = torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(1000 + rank)
        for step in range(STEPS):
            if len(calls) == 1 and step == 4 * (how == "late"):
                calls.append(wrap(models[1]))
            if step == 4:
                models[0][0].requires_grad_(True)
                if how == "frozen, wrapped again":
                    calls = [wrap(model) for model in models]
            for call in calls:
                x, y = Mlp.batch(generator)
                optimizer.zero_grad()
                F.cross_entropy(call(x), y).backward()
                optimizer.step()
        return {
            f"{index} {name}": value for index, model in enumerate(models) for name, value in bits_of(model, optimizer).items()
        }

    def wrap(model: nn.Module) -> Any:
        return gradlane.DistributedDataParallel(model, options={"policy": _policy(), **OPTIONS})

    reference = train(TorchDDP)
    with slow_network(), log_lines() as lines:
        found = train(wrap)
    return differences(reference, found), lines


def computes_beside_another(rank: int, world: int, delay_s: float) -> tuple[float, float]:
    """How long the first of two models computes in a step by its profile, and for how long a step of both has waited for sums
    that come so late, in seconds.
    """
    models = Mlp(), _Encoder()
    generator = torch.Generator().manual_seed(rank)
    blocked_ns = []
    options = {**OPTIONS, "profile_iterations": 3}
    with slow_network() as network:
        network.delay_s = delay_s
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        first, second = (gradlane.attach(*pair, "wfbp", **options) for pair in zip(models, optimizers, strict=True))
        with first, second:
            for _ in range(6):
                began_ns = blocked.total_ns
                for model, optimizer in zip(models, optimizers, strict=True):
                    x, _ = model.batch(generator)
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                blocked_ns.append(blocked.total_ns - began_ns)
            return first.profile().compute_ns / 1e9, min(blocked_ns[1:4]) / 1e9


def a_second_session(rank: int, world: int, backend: Any, meanwhile: str) -> tuple[int, bool, list[str]]:
    """Attach, train and close twice, a wider model the second time.

    Args:
        meanwhile: "" for nothing, "too long": more than ten minutes pass on rank 1; "halves": the second model has them.

    Returns:
        How many times this rank measured all-reduces or streams, whether both sessions have the same networks, and in which
        tensors each model differs from DDP's.
    """
    networks._known.clear()
    measured = 0

    def counted(measure: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            nonlocal measured
            measured += 1
            return measure(*args, **options)

        return count

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 24, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
            optimizer.step()

    places, differs = [], []
    dtypes = (torch.float32, torch.bfloat16 if meanwhile == "halves" else torch.float32)
    with (
        patch.object(AllReduceBackend, "measure_sums", counted(AllReduceBackend.measure_sums)),
        patch.object(ParameterServerBackend, "measure_streams", counted(ParameterServerBackend.measure_streams)),
    ):
        for width, dtype in zip((24, 32), dtypes, strict=True):
            torch.manual_seed(0)
            model, beside = (nn.Sequential(nn.Linear(24, width), nn.Linear(width, 8)).to(dtype) for _ in range(2))
            beside.load_state_dict(model.state_dict())
            optimizer, expected = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, beside))
            policy = "bytescheduler" if backend else None
            with gradlane.attach(model, optimizer, policy, backend=backend, profile_iterations=1, timeout=20) as session:
                places.append(session.places)
                steps(model, optimizer)
            steps(TorchDDP(beside), expected)
            differs += differences(bits_of(model, optimizer), bits_of(beside, expected))
            if meanwhile == "too long" and rank == 1:
                for depends_on, known in networks._known.items():
                    networks._known[depends_on] = known._replace(at_s=known.at_s - 601)
    return measured, places[0] == places[1], differs
