"""What a loop gets and how it is run, under DDP and under gradlane."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.network import Network
from tests.live.cases import bits_of, differences
from tests.live.networks import counting_deferred_updates, slow_network

STEPS = 7  # iteration 0 counts, 1 is measured, and from 2 on the policy's plan is in force
GIVEN = Network.line(2, startup_ns=20_000, bytes_per_second=10**9)
POLICIES = {
    "bytescheduler": {"partition_bytes": 2000, "credit_bytes": 8000},
    "p3": {"slice_bytes": 4000},
    "blocks": {"least_bytes": 4000, "most_bytes": 8000},
}


class Mlp(nn.Module):
    """Four layers, 30 KB: as many messages as there is time for in a test."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = [(12, 40), (40, 60), (60, 60), (60, 6)]
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=dtype) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 12, generator=generator), torch.randint(6, (8,), generator=generator)


@dataclass
class Job:
    """What a loop trains. `call` is the model as the loop calls it: DDP's wrapper, or the model itself."""

    rank: int
    model: Any
    call: Any
    optimizer: Any
    no_sync: Callable[[], contextlib.AbstractContextManager[None]]
    generator: torch.Generator
    session: gradlane.live.Session | None
    seen: dict[str, torch.Tensor] = field(default_factory=dict)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.batch(self.generator)

    def loss(self, call: Any = None) -> torch.Tensor:
        x, y = self.batch()
        return F.cross_entropy((call or self.call)(x), y)

    def see(self, name: str, value: Any) -> None:
        """`value` (a number, a tensor, or a dict of tensors) must be the same under DDP."""
        if isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, torch.Tensor):
                    self.see(f"{name}.{key}", item)
        else:
            self.seen[f"{len(self.seen)}:{name}"] = torch.as_tensor(value).detach().clone()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


@dataclass(frozen=True)
class Loop:
    """How a loop is to be run, and what is to be expected besides equality.

    defers: whether updates are deferred when sums come late (None: on some ranks in some steps). says: the one line
    that rank 0 logs, or none.
    """

    run: Callable[[Job], None]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Any]
    ddp: dict[str, Any]
    attach: dict[str, Any]
    defers: bool | None
    says: str


LOOPS: dict[str, Loop] = {}


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loop(
    model: Callable[[], nn.Module] = Mlp,
    optimizer: Callable[[nn.Module], Any] = momentum,
    ddp: dict[str, Any] | None = None,
    attach: dict[str, Any] | None = None,
    defers: bool | None = True,
    says: str = "",
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    def register(run: Callable[[Job], None]) -> Callable[[Job], None]:
        LOOPS[run.__name__] = Loop(run, model, optimizer, ddp or {}, attach or {}, defers, says)
        return run

    return register


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """The warnings that gradlane logs meanwhile."""
    handler, logger = _Lines(), logging.getLogger("gradlane")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def compare(rank: int, world: int, name: str) -> dict[str, Any]:
    """Run the loop under DDP, then under gradlane on a slow network and on a fast one."""
    case = LOOPS[name]
    reference = under_ddp(case, rank)
    outcome: dict[str, Any] = {}
    for policy, network in (("bytescheduler", slow_network), ("p3", contextlib.nullcontext), ("blocks", slow_network)):
        with network(), counting_deferred_updates() as deferred, log_lines() as lines:
            bits = under_gradlane(case, rank, world, gradlane.policies.get(policy, **POLICIES[policy]))
        outcome[policy] = {"differs": differences(reference, bits), "deferred": sum(deferred), "lines": lines}
    return outcome


def compare_over_servers(rank: int, world: int, name: str) -> dict[str, list[str]]:
    """Run the loop under DDP, then over servers, where the network is slow and where it is fast."""
    case = LOOPS[name]
    reference = under_ddp(case, rank)
    found = {}
    for policy, network in (("bytescheduler", slow_network), ("mercury", contextlib.nullcontext)):
        chosen = gradlane.policies.get(policy, **POLICIES.get(policy, {}))
        with network():
            found[policy] = differences(reference, under_gradlane(case, rank, world, chosen, backend="server"))
    return found


def under_ddp(case: Loop, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = case.model()
    optimizer = case.optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = DistributedDataParallel(model, **case.ddp)
        job = Job(rank, model, call, optimizer, call.no_sync, torch.Generator().manual_seed(1000 + rank), None)
        case.run(job)
    return {**bits(model, optimizer), **job.seen}


def under_gradlane(case: Loop, rank: int, world: int, policy: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7 + rank)  # attach must make ranks equal to rank 0
    model = case.model()
    optimizer = case.optimizer(model)
    with (
        warnings.catch_warnings(),
        gradlane.attach(
            model,
            optimizer if isinstance(optimizer, (torch.optim.Optimizer, list)) else None,
            policy,
            network=Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second),
            profile_iterations=1,
            timeout=20,
            **case.attach,
            **options,
        ) as session,
    ):
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(1000 + rank)
        job = Job(rank, model, model, optimizer, session.no_sync, generator, session)
        case.run(job)
        session.flush()
        assert session.settled
        return {**bits(model, optimizer), **job.seen}


def bits(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, by optimizer, and every state tensor; where there is no optimizer, the parameters."""
    found = {}
    for index, one in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
        if isinstance(one, torch.optim.Optimizer):
            found.update({f"{index}/{name}": value for name, value in bits_of(model, one).items()})
    return found or {name: value.detach().clone() for name, value in model.named_parameters()}
