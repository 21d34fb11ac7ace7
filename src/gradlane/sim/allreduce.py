"""All-reduce in virtual time: the same Dispatcher that runs live, driven by a profile and a network.

What it models: one worker stands for all (they are alike), so that 2048 cost no more than 2. A message takes
`Network.cost_ns` of its size, one after another in the order of their start, or together as the network shares itself
(`turns.py`). A lane of a more urgent network class goes before the others at once, and
what was interrupted goes on where it stopped. A two-phase message's two operations take half of its time each.
Gradients become ready as the profile says; a layer's forward pass waits for the updates of the tensors that it
first uses, or, in a plan that does not cross the barrier, for all of them. Updates run on the compute thread,
just before their layer.
"""

from __future__ import annotations

from typing import NamedTuple

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Span, Timeline
from gradlane.schedule import Dispatcher
from gradlane.sim.passes import forward_ends, tensors_by_layer
from gradlane.sim.shared_link import SharedLink


class Sent(NamedTuple):
    """A message's (or its first or second half's) hand-over and arrival, in ns after the start of backward."""

    message: int
    start_ns: int
    end_ns: int
    second_half: bool


def simulate(plan: Plan, profile: Profile, network: Network, iterations: int = 3) -> Timeline:
    """Run `iterations` iterations of `plan` and return what happened, as rank 0 would see it.

    An iteration's "step" span runs from the start of its forward pass to the start of the next one's, so the
    last step span is the steady-state iteration time (the forward pass after it is simulated too). Raises `PlanError`
    for a plan that all-reduce cannot carry out.
    """
    sends = _communicate(Dispatcher(plan), plan, profile, network)
    arrivals = _arrivals(plan, sends)
    tensors_of = tensors_by_layer(profile)
    spans: list[Span] = []
    now = 0
    step_start = 0
    for iteration in range(iterations + 1):
        if iteration > 0:
            begun = now - profile.backward_ns
            if not plan.crosses_barrier:
                blocked_until = begun + max(arrivals)
                if blocked_until > now:
                    spans.append(Span("wait", iteration - 1, -1, now, blocked_until))
                    now = blocked_until
                for layer, used in zip(profile.layers, tensors_of, strict=True):
                    now = _update(spans, iteration - 1, used, now, layer.update_ns)
            spans.append(Span("step", iteration - 1, -1, step_start, now))
        step_start = now
        for index, (layer, used) in enumerate(zip(profile.layers, tensors_of, strict=True)):
            if iteration > 0 and plan.crosses_barrier:
                needed = begun + max((arrivals[tensor] for tensor in used), default=0)
                if needed > now:
                    spans.append(Span("wait", iteration, max(used, key=arrivals.__getitem__), now, needed))
                    now = needed
                now = _update(spans, iteration - 1, used, now, layer.update_ns)
            spans.extend(Span("use", iteration, tensor, now, now) for tensor in used)
            spans.append(Span("forward", iteration, index, now, now + layer.forward_ns))
            now += layer.forward_ns
        if iteration == iterations:
            break
        # nothing of an iteration is left when the next one's backward pass begins, so that all are the same
        spans.append(Span("backward", iteration, -1, now, now + profile.backward_ns))
        for gradient, seen in enumerate(profile.tensors):
            spans.append(Span("ready", iteration, gradient, now + seen.ready_ns, now + seen.ready_ns))
        whole = {sent.message for sent in sends} - {sent.message for sent in sends if sent.second_half}
        halves = len(whole) < len(plan.messages)
        for message, start, end, second_half in sends:
            spans.append(Span("receive" if second_half else "send", iteration, message, now + start, now + end))
            if halves and message in whole:
                spans.append(Span("receive", iteration, message, now + end, now + end))
        now += profile.backward_ns
    spans.sort(key=lambda span: span.start_ns)
    return Timeline(plan.fingerprint, 0, tuple(spans))


def iteration_ns(plan: Plan, profile: Profile, network: Network) -> int:
    """The steady-state iteration time: what the last step of `simulate` takes, without its timeline."""
    sends = _communicate(Dispatcher(plan), plan, profile, network)
    return forward_ends(profile, _arrivals(plan, sends), plan.crosses_barrier)


def planned_ahead(plan: Plan, profile: Profile, network: Network) -> Plan:
    """`plan` with the order fixed in which its messages start by this profile and network.

    Collectives must be issued in one order by every rank (each rank's own readiness would differ), so
    the order is decided once, here, by the Dispatcher in virtual time, and becomes part of the plan.
    """
    sends = _communicate(Dispatcher(plan), plan, profile, network)
    first_halves = sorted((sent for sent in sends if not sent.second_half), key=lambda sent: sent.start_ns)
    return plan.with_sequence(tuple(sent.message for sent in first_halves))


def _update(spans: list[Span], iteration: int, tensors: list[int], now: int, update_ns: int) -> int:
    spans.extend(Span("update", iteration, tensor, now, now + update_ns) for tensor in tensors)
    return now + update_ns


def _arrivals(plan: Plan, sends: list[Sent]) -> list[int]:
    arrived = [0] * len(plan.tensors)
    for sent in sends:
        for piece in plan.messages[sent.message].slices:
            if arrived[piece.tensor] < sent.end_ns:
                arrived[piece.tensor] = sent.end_ns
    return arrived


def _communicate(dispatcher: Dispatcher, plan: Plan, profile: Profile, network: Network) -> list[Sent]:
    """One iteration's messages in the order of hand-over. Raises `PlanError` for a plan that all-reduce cannot carry."""
    refuse_what_cannot_be_done(plan, "all-reduce")
    dispatcher.begin()
    classes = [lane.network_priority for lane in plan.lanes]
    turns = SharedLink(network)
    handed_over: dict[int, tuple[int, int]] = {}  # a message under way: its number, and since when
    sent: list[Sent | None] = []
    gradient, gradients = 0, len(profile.tensors)
    while gradient < gradients or handed_over:
        now = turns.next_ns()
        if handed_over and (gradient == gradients or now <= profile.tensors[gradient].ready_ns):
            message = turns.run()
            if message is None:
                continue
            number, start_ns = handed_over.pop(message)
            sent[number] = Sent(message, start_ns, now, dispatcher.in_second_phase(message))
            starts = dispatcher.finished(message)
        else:
            now = profile.tensors[gradient].ready_ns
            starts = dispatcher.ready(gradient)
            gradient += 1
        for message in starts:
            details = plan.messages[message]
            half = int(dispatcher.in_second_phase(message)) if details.two_phase else None
            turns.add(now, message, details.size_bytes, classes[details.lane], half, details.lane)
            handed_over[message] = len(sent), now
            sent.append(None)
    assert dispatcher.done, dispatcher.describe_state()
    return [one for one in sent if one is not None]
