"""What ranks run under `auto`, and with plans that change at random."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from msgspec import UNSET
from torch.nn.parallel import DistributedDataParallel

import gradlane
from gradlane.core.plan import Plan
from gradlane.core.records.search_log import SearchLog
from gradlane.errors import JobError
from gradlane.live.adapt.auto import Auto
from gradlane.live.adapt.decisions import ControlDecision, ControlDecisions
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder
from gradlane.live.session.session import Session
from gradlane.planning import catalog
from tests.live.cases import bits_of, differences
from tests.live.loops import GIVEN, log_lines, momentum
from tests.live.models import Turnable
from tests.live.networks import counting_deferred_updates, slow_network
from tests.live.tuned import Trained, beside_ddp, parts, step, under_ddp

AT_MOST = 20_000
LIMIT_S = 60
SIZES = ((8, 32), (32, 1))  # inputs and outputs of a generator and its critic


def train(rank: int, world: int, **attach: Any) -> dict[str, Any]:
    """Train under auto until it has settled and a little longer; what differs from DDP, and what was found."""
    model, optimizer, generator = parts(rank)
    seen = Trained()
    with log_lines() as lines, gradlane.attach(model, optimizer, "auto", timeout=20, **attach) as session:
        seen.until_settled(session, model, optimizer, generator, after=10, at_most=AT_MOST)
        seen.bits = bits_of(model, optimizer)
        chosen, timeline, plan = session.auto, session.timeline(), session.plan
    return {
        **beside_ddp(rank, seen),
        "plan": plan,
        "auto": chosen,
        "switches": [span.iteration for span in timeline.of("switch")],
        "lines": lines,
    }


def killed_while_looking(rank: int, world: int, victim: int, backend: Any) -> tuple[str, float, SearchLog | None]:
    """`victim` kills itself when the third plan is in force; what the other raises, and after how many seconds."""
    model, optimizer, generator = parts(rank)
    session = gradlane.attach(model, optimizer, "auto", backend=backend, timeout=20)
    plans: set[str] = set()
    began = time.monotonic()
    try:
        for _ in range(AT_MOST):
            began = time.monotonic()
            step(model, model.batch, optimizer, generator)
            plans.add(session.plan.fingerprint)
            if rank == victim and len(plans) > 2:
                os.kill(os.getpid(), signal.SIGKILL)
    except JobError as error:
        return type(error).__name__, time.monotonic() - began, session.auto
    finally:
        session.close()
    return "nothing", time.monotonic() - began, session.auto


class AtRandom:
    """Another plan at random boundaries: rank 0 draws, and announces it as `auto` does."""

    over = settled = False

    def __init__(self, rank: int, names: tuple[str, ...], wanted: int) -> None:
        self._rank, self._names, self._wanted = rank, names, wanted
        self._draw = random.Random(5)
        self._decisions = ControlDecisions()
        self.changes = 0

    def start(self, planner: Planner, recorder: Recorder) -> None:
        pass

    def decide(self, planner: Planner, driver: Driver, backend: Backend) -> Plan | None:
        if not self._decisions.is_due(driver):
            return None
        decision = policy = None
        over: Any = UNSET
        if self._rank == 0:
            decision = ControlDecision.SETTLED if self.changes >= self._wanted else ControlDecision.CHANGE
            over = self._draw.choice([place.backend for place in planner.places])
            policy = catalog.get(self._draw.choice([name for name in self._names if name in catalog.names(over)]))
            policy = type(policy)(**{name: 64 * self._draw.randint(16, 200) for name in getattr(policy, "tunable", {})})
        decision = self._decisions.announce(driver, decision, self._draw.choice((1, 1, 1, 2, 3)))
        self.settled = ControlDecision.SETTLED in decision
        if ControlDecision.CHANGE not in decision:
            return None
        self.changes += 1
        return planner.change(policy, backend, driver.failures.collective, over)

    def record(self) -> None:
        return None

    def close(self) -> None:
        pass


def change_at_random(
    rank: int, world: int, names: tuple[str, ...], changes: int, both: bool = False, **attach: Any
) -> dict[str, Any]:
    """Train while plans change so many times, nothing flushed in between; what differs from DDP.

    both: their carriers change too.
    """
    model, optimizer, generator = parts(rank)
    losses: list[float] = []
    plans: set[str] = set()
    carriers: list[Any] = []
    turns = AtRandom(rank, names, changes)
    policy = "auto" if both else "ddp"
    options = {} if both else {"network": GIVEN}
    with (
        counting_deferred_updates() as deferred,
        gradlane.attach(model, optimizer, policy, profile_iterations=1, timeout=20, **options, **attach) as session,
    ):
        put(session, turns)
        while not turns.settled:
            losses.append(step(model, model.batch, optimizer, generator))
            plans.add(session.plan.fingerprint)
            carriers.append(str(session.plan.backend))
        session.flush()
        bits = bits_of(model, optimizer)
    reference = under_ddp(rank, len(losses))
    return {
        "differs": differences(reference.bits, bits),
        "losses": losses == reference.losses,
        "changes": turns.changes,
        "plans": len(plans),
        "deferred": sum(deferred),
        "carriers": carriers,
    }


def put(session: Session, turns: Any) -> None:
    """Let `turns` change the plans of a session that has not begun."""
    assert session._parts.controller is None or isinstance(
        session._parts.controller, Auto
    )  # raises if a session no longer calls it so
    session._parts.controller = turns


def until(done: Callable[[], bool]) -> Iterator[None]:
    """Once for each step that it takes, in bounded time."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() < began + LIMIT_S
        yield


def through_a_change(rank: int, world: int, policy: str, delays_s: tuple[float, float], **attach: Any) -> dict[str, Any]:
    """Train over a network whose messages take longer from some moment on, until the session has answered to that."""
    model, optimizer, generator = parts(rank)
    losses: list[float] = []
    plans: list[str] = []

    def train_until(done: Callable[[], bool]) -> None:
        for _ in until(done):
            losses.append(step(model, model.batch, optimizer, generator))
            plans.append(session.plan.fingerprint)

    with slow_network() as late, log_lines() as lines:
        late.delay_s = delays_s[0]
        with gradlane.attach(model, optimizer, policy, timeout=20, **attach) as session:
            train_until(lambda: session.settled and not session.tuning)
            profiled = session.profile().source
            here = len(losses)
            train_until(lambda: len(losses) > here + 60 and not session.tuning)  # a look before the change is no answer to it
            late.delay_s = delays_s[1]
            believed, looked = session.network.bytes_per_second, len(session.auto.looks) if session.auto else 0

            def sees_it() -> bool:
                if session.auto is None:
                    return session.network.bytes_per_second < believed
                return any("take" in look.why and "times as long" in look.why for look in session.auto.looks[looked:])

            seen, slower_at = torch.zeros(1), len(losses)
            while not seen:
                here = len(losses)
                # Where auto looks for something else just then, such as gradients that a busy machine makes late, it
                # compares plans on the network that is slow already, and what it keeps is right for that.
                if here > slower_at + 80:
                    late.delay_s, slower_at = late.delay_s * 4, here
                    assert late.delay_s < 1
                train_until(lambda here=here: len(losses) > here + 8 and not session.tuning)
                seen.fill_(sees_it())  # which only rank 0 knows
                dist.broadcast(seen, 0)
            session.flush()
            bits, chosen, rate = bits_of(model, optimizer), session.auto, session.network.bytes_per_second
    reference = under_ddp(rank, len(losses))
    return {
        "differs": differences(reference.bits, bits),
        "losses": losses == reference.losses,
        "plans": plans,
        "profiled": profiled,
        "auto": chosen,
        "rate": rate,
        "lines": lines,
    }


def through_another_order(rank: int, world: int) -> dict[str, Any]:
    """Train a model whose layers run in the opposite order from some moment on, until `auto` has looked again for that."""
    model, optimizer, generator = _turnable(rank)
    losses: list[float] = []
    turned_at = 0

    def train_until(done: Callable[[], bool]) -> None:
        for _ in until(done):
            losses.append(step(model, model.batch, optimizer, generator))

    with gradlane.attach(model, optimizer, "auto", network=GIVEN, timeout=20) as session:
        train_until(lambda: session.settled and not session.tuning)
        here = len(losses)
        train_until(lambda: len(losses) > here + 20)
        model.turned, turned_at = True, len(losses)
        told = torch.zeros(1)
        while not told:  # it may look for something else before
            train_until(lambda: session.tuning)
            train_until(lambda: not session.tuning)
            if session.auto is not None:
                told.fill_("gradients are ready" in session.auto.looks[-1].why)
            dist.broadcast(told, 0)
        session.flush()
        bits, chosen, profile = bits_of(model, optimizer), session.auto, session.profile()
    reference, optimizer, generator = _turnable(rank)
    call = DistributedDataParallel(reference)
    expected = []
    for at in range(len(losses)):
        reference.turned = at >= turned_at
        expected.append(step(call, reference.batch, optimizer, generator))
    return {
        "differs": differences(bits_of(reference, optimizer), bits),
        "losses": losses == expected,
        "auto": chosen,
        "profile": profile,
    }


def _turnable(rank: int) -> tuple[Turnable, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(7)
    model = Turnable()
    return model, momentum(model), torch.Generator().manual_seed(rank)


def two_in_turns(rank: int, world: int) -> dict[str, Any]:
    """Train a generator and a critic, whose second backward pass has no step; when rank 0's sessions tried plans."""

    def nets() -> list[Any]:
        torch.manual_seed(5)
        made = [
            torch.nn.Sequential(torch.nn.Linear(size, 64), torch.nn.ReLU(), torch.nn.Linear(64, out)) for size, out in SIZES
        ]
        return [*made, *(torch.optim.SGD(net.parameters(), lr=0.01) for net in made)]

    def step(generator: Any, critic: Any, makes: Any, judges: Any, draw: torch.Generator) -> None:
        fake = generator(torch.randn(16, 8, generator=draw))
        judges.zero_grad()
        (critic(fake.detach()).square().mean() + (critic(torch.ones(16, 32)) - 1).square().mean()).backward()
        judges.step()
        makes.zero_grad()
        (critic(fake) - 1).square().mean().backward()
        makes.step()

    generator, critic, makes, judges = nets()
    draw, steps = torch.Generator().manual_seed(rank), 0
    with gradlane.attach(generator, makes, timeout=20) as first, gradlane.attach(critic, judges, timeout=20) as second:
        while not (first.settled and second.settled) or first.tuning or second.tuning:
            assert steps < AT_MOST
            step(generator, critic, makes, judges, draw)
            steps += 1
        first.flush()
        second.flush()
        bits = [bits_of(generator, makes), bits_of(critic, judges)]
        found = [session.auto for session in (first, second)]
    generator, critic, makes, judges = nets()
    draw, wrapped = torch.Generator().manual_seed(rank), [DistributedDataParallel(net) for net in (generator, critic)]
    for _ in range(steps):
        step(wrapped[0], wrapped[1], makes, judges, draw)
    expected = [bits_of(generator, makes), bits_of(critic, judges)]
    return {"differs": [differences(*pair) for pair in zip(expected, bits, strict=True)], "auto": found}


def clipping(rank: int, world: int, clips: bool) -> dict[str, Any]:
    """Train until auto has settled, gradients clipped before each step or not; whether plans may cross the barrier."""
    model, optimizer, generator = parts(rank)
    losses: list[float] = []
    with gradlane.attach(model, optimizer, network=GIVEN, timeout=20) as session:
        while not session.settled or session.tuning:
            assert len(losses) < AT_MOST
            losses.append(_clipped_step(model, model, optimizer, generator, clips))
        session.flush()
        bits, crosses = bits_of(model, optimizer), session._parts.planner.crosses
    reference, optimizer, generator = parts(rank)
    call = DistributedDataParallel(reference)
    expected = [_clipped_step(call, reference, optimizer, generator, clips) for _ in losses]
    return {"differs": differences(bits_of(reference, optimizer), bits), "losses": losses == expected, "crosses": crosses}


def _clipped_step(call: Any, model: Any, optimizer: Any, generator: torch.Generator, clips: bool) -> float:
    x, y = model.batch(generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(call(x), y)
    loss.backward()
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return float(loss)
