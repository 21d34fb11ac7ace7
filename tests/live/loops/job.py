"""What a loop gets and how it is run, under DDP and under gradlane."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.network import Network
from gradlane.errors import GradlaneError
from gradlane.live.adapt.auto import Auto
from gradlane.live.session.module_buffers import BufferSync
from tests.live.cases import bits_of, differences
from tests.live.loops.hopping import Hopping
from tests.live.networks import counting_deferred_updates, slow_network

HELD = "something else holds the memory"
SHARED = "gradients lie in memory that the script holds too"
STEPS = 7  # iteration 0 counts, 1 is measured, and from 2 on the policy's plan is in force
GIVEN = Network.line(2, startup_ns=20_000, bytes_per_second=10**9)
POLICIES = {
    "bytescheduler": {"partition_bytes": 2000, "credit_bytes": 8000},
    "owners": {"least_bytes": 1024, "most_bytes": 30000},
}
PROBE = torch.linspace(-1, 1, 24).view(2, 12)  # what models of `Mlp`'s shape are evaluated on
_PATIENCE = timedelta(seconds=30)  # longer than a session waits for a sum


@dataclass(frozen=True)
class Arm:
    """What a loop runs under: a policy over a backend.

    hops: in every second iteration another plan takes over, as `auto` changes plans while it tries policies.
    wraps: gradlane's DistributedDataParallel in place of torch's, rather than attach.
    """

    policy: str
    backend: Any = "all-reduce"
    hops: bool = False
    wraps: bool = False


ARMS = {
    "bytescheduler": Arm("bytescheduler"),
    "hopping": Arm("bytescheduler", hops=True),
    # norms before sums: for some loops only (test_clipping)
    "owners": Arm("owners"),
    "mercury over servers": Arm("mercury", backend="server"),
    # plans go over all-reduce and over servers in turns: for some loops only (test_carriers)
    "hopping between carriers": Arm("auto", backend=None, hops=True),
    # the script wraps the model, and gradlane finds its optimizers: for some loops only (test_ddp)
    "drop-in": Arm("bytescheduler", wraps=True),
    # messages over servers, not packets: for some loops only (test_servers)
    "bytescheduler over servers": Arm("bytescheduler", backend="server"),
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
    wrap: Callable[[nn.Module], nn.Module] | None = None
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

    def backward(self, call: Any = None) -> torch.Tensor:
        """A forward and a backward pass over the next batch, whose loss is seen."""
        loss = self.loss(call)
        self.see("loss", loss)
        loss.backward()
        return loss

    def wrap_again(self) -> None:
        """Another DDP, where parameters were converted to another dtype or given other memory by `set_`, since its hooks on
        them are gone, and where they have other strides, since it would take their gradients for transposed ones.
        """
        if self.wrap is not None:
            self.call = self.no_sync = None
            gc.collect()  # what DDP left on the other parameters goes with it
            self.call = self.wrap(self.model)
            self.no_sync = self.call.no_sync

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.backward()
        self.optimizer.step()
        return loss


@dataclass(frozen=True)
class Loop:
    """How a loop is to be run, and what is to be expected besides equality.

    defers: whether updates are deferred when sums come late (None: on some ranks in some steps). says: the one line
    that rank 0 logs, or none (None: one or none, as time will have it). family: the module that the loop is in. refused: the
    loop ends under gradlane, on one rank at least, in a GradlaneError whose text contains this.
    """

    run: Callable[[Job], None]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Any]
    ddp: dict[str, Any]
    attach: dict[str, Any]
    defers: bool | None
    says: str | None
    family: str = ""
    refused: str = ""

    @property
    def arms(self) -> list[str]:
        """A policy over each backend, and plans that change; servers need no coordinator, and refuse one."""
        coordinated = self.attach.get("order") == "coordinator"
        return ["bytescheduler", "hopping", *([] if coordinated else ["mercury over servers"])]


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
    says: str | None = "",
    refused: str = "",
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    def register(run: Callable[[Job], None]) -> Callable[[Job], None]:
        assert run.__name__ not in LOOPS, run.__name__
        family = run.__module__.rpartition(".")[2]
        LOOPS[run.__name__] = Loop(run, model, optimizer, ddp or {}, attach or {}, defers, says, family, refused)
        return run

    return register


def after_steps(job: Job, read: Callable[[], Any]) -> None:
    """Something reads the parameters after each step."""
    for _ in range(STEPS):
        job.step()
        with torch.no_grad():
            job.see("read", read())


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
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


def compare(rank: int, world: int, name: str, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run the loop under DDP, then in each of `arms` until an error that is not gradlane's ends it there on any rank; what
    was found by arm.

    differs: names whose bits differ from DDP's. deferred: how many updates were. lines: that gradlane logged.
    error: what the loop ended in, by type and first line, or nothing. typed: whether that is gradlane's.
    """
    case = LOOPS[name]
    reference = {} if case.refused else under_ddp(case, rank)
    outcome: dict[str, dict[str, Any]] = {}
    for arm in arms:
        outcome[arm] = found = _in_arm(case, rank, world, ARMS[arm], reference)
        if not _ended_in_order_everywhere(rank, world, not found["error"] or found["typed"]):
            break
    return outcome


def compare_with_late_announcements(**case: Any) -> dict[str, dict[str, Any]]:
    """`compare` where what rank 0 announces of buffers reaches the others after rank 0 has gone on."""
    handle, rng = BufferSync.announced, random.Random(7)

    def late(self: BufferSync, forward: int, extra: int) -> None:
        time.sleep(rng.choice([0.0, 0.03, 0.08]))
        handle(self, forward, extra)

    with unittest.mock.patch.object(BufferSync, "announced", late):
        return compare(**case)


def _in_arm(case: Loop, rank: int, world: int, arm: Arm, reference: dict[str, torch.Tensor]) -> dict[str, Any]:
    policy = "auto" if arm.policy == "auto" else gradlane.policies.get(arm.policy, **POLICIES.get(arm.policy, {}))
    differs: list[str] = []
    text, typed = "", False
    with slow_network(), counting_deferred_updates() as deferred, log_lines() as lines:
        try:
            if arm.wraps:
                found = under_drop_in(case, rank, world, policy)
            else:
                found = under_gradlane(case, rank, world, policy, arm.hops, backend=arm.backend)
            differs = differences(reference, found)
        except Exception as error:  # of the loop or of gradlane: a finding
            text, typed = f"{type(error).__name__}: {error}".partition("\n")[0], isinstance(error, GradlaneError)
    return {"differs": differs, "deferred": sum(deferred), "lines": lines, "error": text, "typed": typed}


def _ended_in_order_everywhere(rank: int, world: int, in_order: bool) -> bool:
    """Through the store, since a collective may be stuck where something went wrong."""
    store = dist.distributed_c10d._get_default_store()
    turn = store.add(f"loops/arms of {rank}", 1)  # every rank has had as many arms
    store.set(f"loops/{turn}/{rank}", "in order" if in_order else "error")
    keys = [f"loops/{turn}/{other}" for other in range(world)]
    with contextlib.suppress(dist.DistStoreError):  # a rank that is gone does not say so
        store.wait(keys, _PATIENCE)
    return store.check(keys) and all(store.get(key) == b"in order" for key in keys)


def under_ddp(case: Loop, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = case.model()
    optimizer = case.optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(1000 + rank)
        wrap = partial(DistributedDataParallel, **case.ddp)
        job = Job(rank, model, None, optimizer, contextlib.nullcontext, generator, None, wrap)
        job.wrap_again()
        case.run(job)
    return {**bits(model, job.optimizer), **job.seen}


def under_drop_in(case: Loop, rank: int, world: int, policy: Any) -> dict[str, torch.Tensor]:
    """As `under_ddp`, with gradlane's class in place of torch's."""
    torch.manual_seed(7)
    model = case.model()
    optimizer = case.optimizer(model)
    network = Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
    options = {"policy": policy, "network": network, "profile_iterations": 1, "timeout": 20, **case.attach}
    wrapped: list[gradlane.DistributedDataParallel] = []

    def wrap(module: nn.Module) -> nn.Module:
        wrapped.append(gradlane.DistributedDataParallel(module, options=options, **case.ddp))
        return wrapped[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(1000 + rank)
        job = Job(rank, model, None, optimizer, contextlib.nullcontext, generator, None, wrap)
        job.wrap_again()
        try:
            case.run(job)
            found = {**bits(model, job.optimizer), **job.seen}
        finally:
            for each in wrapped:
                if each.session is not None:
                    each.session.close()
    return found


def under_gradlane(
    case: Loop, rank: int, world: int, policy: Any, hops: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(7 + rank)  # attach must make ranks equal to rank 0
    model = case.model()
    optimizer = case.optimizer(model)
    with (
        warnings.catch_warnings(),
        gradlane.attach(
            model,
            optimizer if isinstance(optimizer, (torch.optim.Optimizer, list)) else None,
            policy,
            network=None if policy == "auto" else Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second),
            profile_iterations=1,
            timeout=20,
            **case.attach,
            **options,
        ) as session,
    ):
        warnings.simplefilter("ignore")
        if hops:
            # raises if a session no longer calls it so
            assert session._parts.controller is None or isinstance(session._parts.controller, Auto)
            session._parts.controller = Hopping(rank)
        generator = torch.Generator().manual_seed(1000 + rank)
        job = Job(rank, model, model, optimizer, session.no_sync, generator, session)
        case.run(job)
        session.flush()
        assert session.settled
        return {**bits(model, job.optimizer), **job.seen}


def bits(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, by optimizer, and every state tensor; where there is no optimizer, the parameters."""
    found = {}
    for index, one in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
        if isinstance(one, torch.optim.Optimizer):
            found.update({f"{index}/{name}": value for name, value in bits_of(model, one).items()})
    return found or {name: value.detach().clone() for name, value in model.named_parameters()}
