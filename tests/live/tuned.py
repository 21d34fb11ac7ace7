"""What ranks run whose knobs are tuned while they train."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.records.tuned import Tuned
from gradlane.errors import GradlaneError, JobError
from gradlane.planning.tuning import TuneOptions
from tests.live.cases import bits_of, differences
from tests.live.loops import GIVEN, Mlp, log_lines, momentum
from tests.live.networks import counting_deferred_updates, slow_network

AFTER = 3  # steps after the tuning has ended
AT_MOST = 400


class Trained:
    """What a rank saw: of each step the loss, the plan and, where asked for, the parameters; at the end every bit."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.plans: list[str] = []
        self.params: list[str] = []
        self.bits: dict[str, torch.Tensor] = {}

    def until_settled(
        self, session: Any, model: Mlp, optimizer: Any, generator: Any, *, after: int, at_most: int, flush: bool = True
    ) -> None:
        """Train until nothing is tried any more, and `after` steps longer. flush: see the parameters after each."""
        while after:
            assert len(self.losses) < at_most
            self.losses.append(step(model, model.batch, optimizer, generator))
            self.plans.append(session.plan.fingerprint)
            if flush:
                session.flush()
                self.params.append(digest_of(model))
            after -= not session.tuning


def parts(rank: int) -> tuple[Mlp, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(7)
    model = Mlp()
    return model, momentum(model), torch.Generator().manual_seed(rank)


def step(call: Any, batch: Any, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> float:
    x, y = batch(generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(call(x), y)
    loss.backward()
    optimizer.step()
    return float(loss)


def digest_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in model.parameters())).hexdigest()


def under_ddp(rank: int, steps: int) -> Trained:
    model, optimizer, generator = parts(rank)
    call = DistributedDataParallel(model)
    seen = Trained()
    for _ in range(steps):
        seen.losses.append(step(call, model.batch, optimizer, generator))
        seen.params.append(digest_of(model))
    seen.bits = bits_of(model, optimizer)
    return seen


def beside_ddp(rank: int, seen: Trained) -> dict[str, Any]:
    """What differs from as many steps under DDP, and the plans."""
    reference = under_ddp(rank, len(seen.losses))
    return {
        "differs": differences(reference.bits, seen.bits),
        "losses": seen.losses == reference.losses,
        "params": seen.params == reference.params,
        "plans": seen.plans,
    }


def tune(
    rank: int,
    world: int,
    policy: tuple[str, dict[str, Any]],
    options: TuneOptions,
    slow: bool = False,
    flush: bool = True,
    knobs: Path | None = None,
    **attach: Any,
) -> dict[str, Any]:
    """Train until the tuning has ended and a little longer; what differs from DDP, and what was found.

    flush: look at all parameters after each step; otherwise updates stay owed across steps and changes of plan.
    """
    model, optimizer, generator = parts(rank)
    seen = Trained()
    network = slow_network() if slow else contextlib.nullcontext()
    name, sizes = policy
    chosen = gradlane.policies.get(name, **sizes)
    with (
        network,
        counting_deferred_updates() as deferred,
        log_lines() as lines,
        gradlane.attach(
            model, optimizer, chosen, network=GIVEN, profile_iterations=1, timeout=20, tune=options, knobs=knobs, **attach
        ) as session,
    ):
        seen.until_settled(session, model, optimizer, generator, after=AFTER, at_most=AT_MOST, flush=flush)
        session.flush()
        seen.bits = bits_of(model, optimizer)
        tuned = session.tuned
    return {
        **beside_ddp(rank, seen),
        "tuned": tuned,
        "deferred": sum(deferred),
        "lines": lines,
    }


def use(rank: int, world: int, knobs: Path, policy: str = "bytescheduler", **attach: Any) -> tuple[str, Any]:
    """Attach with tuned knobs from a file; the sizes of the messages, or what was raised."""
    model, optimizer, generator = parts(rank)
    if attach.pop("other_model", False):
        model = torch.nn.Linear(12, 6)  # type: ignore[assignment]
        optimizer = momentum(model)
    try:
        with gradlane.attach(model, optimizer, policy, network=GIVEN, timeout=3, knobs=knobs, **attach) as session:
            for _ in range(6):
                step(model, Mlp.batch, optimizer, generator)
            session.flush()
            return "trained", max(message.size_bytes for message in session.plan.messages)
    except GradlaneError as error:
        return type(error).__name__, str(error)


def killed_in_a_trial(rank: int, world: int, backend: Any) -> tuple[str, float, Tuned | None]:
    """Rank 1 kills itself in the third trial; what rank 0 raises, after how many seconds, and what it had tried."""
    model, optimizer, generator = parts(rank)
    chosen = gradlane.policies.get("bytescheduler", partition_bytes=4000, credit_bytes=8000)
    options = TuneOptions(search="random", trials=100, iterations=4, loss=1e9)
    session = gradlane.attach(
        model, optimizer, chosen, backend=backend, network=GIVEN, profile_iterations=1, timeout=20, tune=options
    )
    plans: set[str] = set()
    began = time.monotonic()
    try:
        while len(plans) < 100:
            began = time.monotonic()
            step(model, model.batch, optimizer, generator)
            plans.add(session.plan.fingerprint)
            if rank == 1 and len(plans) > 4:
                os.kill(os.getpid(), signal.SIGKILL)
    except JobError as error:
        return type(error).__name__, time.monotonic() - began, session.tuned
    finally:
        session.close()
    return "nothing", time.monotonic() - began, session.tuned


def refused(rank: int, world: int, policy: Any, **attach: Any) -> tuple[str, str]:
    model, optimizer, _ = parts(rank)
    try:
        gradlane.attach(model, optimizer, policy, network=GIVEN, timeout=5, **attach)
    except GradlaneError as error:
        return type(error).__name__, str(error)
    return "attached", ""


def only_rank_0_tunes(rank: int, world: int) -> tuple[str, str]:
    return refused(rank, world, "bytescheduler", tune=rank == 0)
