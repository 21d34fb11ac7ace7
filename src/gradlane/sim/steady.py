"""The fast path of all-reduce in virtual time: one iteration, without a timeline.

Searches ask thousands of times how long an iteration takes. Nothing of an iteration's communication is left when the
next backward pass begins, so that one iteration stands for all. `iteration_ns` and `planned_ahead` run the Dispatcher
over the messages of one iteration and leave out the simulation's workers and spans. `tests/unit/test_steady.py` holds
both to `gradlane.sim.allreduce`.
"""

from __future__ import annotations

from typing import NamedTuple

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import hidden_part
from gradlane.schedule import NativeDispatcher
from gradlane.sim.collectives import carrier
from gradlane.sim.fabric import FOREVER, Fabric
from gradlane.sim.passes import Observer, forward_ends
from gradlane.sim.starting import delayed


class Sent(NamedTuple):
    """When a message, or half of a two-phase message, is handed over and arrives, in ns after the
    start of backward.
    """

    message: int
    start_ns: int
    end_ns: int
    second_half: bool


class SteadyIteration(NamedTuple):
    """An iteration whose communication is like that of the iterations around it.

    Attributes:
        iteration_ns: from the start of its backward pass to the start of the next one.
        hidden: the fraction of communication that was overlapped with computation, as `Timeline.hidden` of
            `allreduce.simulate`.
    """

    iteration_ns: int
    hidden: float


def iteration_ns(plan: Plan, profile: Profile, network: Network) -> int:
    """The steady-state iteration time of a plan over all-reduce: what the last step of
    `allreduce.simulate` takes.

    Args:
        plan: what to carry out; with its order of messages fixed or not.
        profile: one iteration's computation; has the tensors of the plan.
        network: what messages cost.

    Returns:
        Nanoseconds.

    Raises:
        PlanError: all-reduce cannot carry out the plan.
    """
    return _run(plan, profile, network)[1]


def steady_iteration(plan: Plan, profile: Profile, network: Network) -> SteadyIteration:
    """As `iteration_ns`, with what of the communication was hidden."""
    waits = _Waits()
    sends, took_ns = _run(plan, profile, network, waits)
    return SteadyIteration(took_ns, hidden_part([(each.start_ns, each.end_ns) for each in sends], waits.found))


def _run(plan: Plan, profile: Profile, network: Network, observer: Observer | None = None) -> tuple[list[Sent], int]:
    """Run one iteration; return its messages in order of hand-over, and its time in ns."""
    profile = delayed(plan, profile, network.start_ns)
    sends = _communicate(NativeDispatcher(plan), plan, profile, network)
    return sends, forward_ends(profile, _arrivals(plan, sends), plan.crosses_barrier, observer)


class _Waits:
    """An `Observer` that notes when the compute thread was blocked."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def waited(self, layer: int, start_ns: int, end_ns: int) -> None:
        self.found.append((start_ns, end_ns))

    def updated(self, layer: int, start_ns: int, end_ns: int) -> None: ...

    def ran(self, layer: int, start_ns: int, end_ns: int) -> None: ...


def planned_ahead(plan: Plan, profile: Profile, network: Network) -> Plan:
    """Fix the order in which the messages of a plan start.

    Every rank must issue collectives in one order, and gradients become ready in slightly different
    order on each. So the Dispatcher decides the order once, in virtual time, and the order becomes
    part of the plan.

    Args:
        plan: what to carry out.
        profile: one iteration's computation, which says when gradients are ready; has the tensors
            of the plan.
        network: what messages cost.

    Returns:
        The plan with its `sequence`.

    Raises:
        PlanError: all-reduce cannot carry out the plan.
    """
    sends = _communicate(NativeDispatcher(plan), plan, delayed(plan, profile, network.start_ns), network)
    first_halves = sorted((sent for sent in sends if not sent.second_half), key=lambda sent: sent.start_ns)
    return plan.with_sequence(tuple(sent.message for sent in first_halves))


def _arrivals(plan: Plan, sends: list[Sent]) -> list[int]:
    arrived = [0] * len(plan.tensors)
    for sent in sends:
        for piece in plan.messages[sent.message].slices:
            if arrived[piece.tensor] < sent.end_ns:
                arrived[piece.tensor] = sent.end_ns
    return arrived


def _communicate(dispatcher: NativeDispatcher, plan: Plan, profile: Profile, network: Network) -> list[Sent]:
    """Carry one iteration's messages.

    Returns them in order of hand-over; raises `PlanError` as `iteration_ns` does.
    """
    refuse_what_cannot_be_done(plan, "all-reduce")
    dispatcher.begin()
    fabric = carrier(plan, network, 1, lambda message: message in dispatcher.blocking())
    begun: dict[int, tuple[int, int]] = {}  # a message under way: its number, and since when
    sent: list[Sent | None] = []
    gradient, gradients = 0, len(profile.tensors)
    while gradient < gradients or begun:
        until_ns = profile.tensors[gradient].ready_ns if gradient < gradients else FOREVER - 1
        notices = fabric.run(until_ns)
        for now_ns, _, message, pulled in notices:
            number, start_ns = begun[message]
            two_phase = plan.messages[message].two_phase
            if pulled or two_phase:
                del begun[message]
                sent[number] = Sent(message, start_ns, now_ns, pulled and two_phase)
            if not pulled or two_phase:
                _start(dispatcher.finished(message), now_ns, dispatcher, fabric, begun, sent)
        if not notices:
            _start(dispatcher.ready(gradient), until_ns, dispatcher, fabric, begun, sent)
            gradient += 1
    assert dispatcher.done, dispatcher.describe_state()
    return [one for one in sent if one is not None]


def _start(
    messages: list[int],
    now_ns: int,
    dispatcher: NativeDispatcher,
    fabric: Fabric,
    begun: dict[int, tuple[int, int]],
    sent: list[Sent | None],
) -> None:
    for message in messages:
        begin = fabric.ask if dispatcher.in_second_phase(message) else fabric.hand_over
        begin(now_ns, 0, message)
        begun[message] = len(sent), now_ns
        sent.append(None)
