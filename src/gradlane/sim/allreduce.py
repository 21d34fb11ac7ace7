"""All-reduce in virtual time: the same Dispatcher that runs live, driven by a profile and a network.

What it models: one worker stands for all (they are alike); each message occupies the network alone for
`Network.cost_ns` of its size, in the order of its start; gradients become ready as the profile says; a
layer's forward pass waits for the updates of the tensors that it first uses, or, in a plan that does not
cross the barrier, for all of them. Updates run on the compute thread, just before their layer.
"""

from __future__ import annotations

from collections import deque

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Span, Timeline
from gradlane.dispatch import Dispatcher


def simulate(plan: Plan, profile: Profile, network: Network, iterations: int = 3) -> Timeline:
    """Run `iterations` iterations of `plan` and return what happened, as rank 0 would see it.

    An iteration's "step" span runs from the start of its forward pass to the start of the next one's, so the
    last step span is the steady-state iteration time (the forward pass after it is simulated too).
    """
    dispatcher = Dispatcher(plan)
    tensors_of: list[list[int]] = [[] for _ in profile.layers]
    for index, tensor in enumerate(profile.tensors):
        tensors_of[tensor.layer].append(index)
    spans: list[Span] = []
    arrived = [0] * len(profile.tensors)
    now = 0
    step_start = 0
    for iteration in range(iterations + 1):
        if iteration > 0 and not plan.crosses_barrier:
            blocked_until = max(arrived)
            if blocked_until > now:
                spans.append(Span("wait", iteration - 1, -1, now, blocked_until))
                now = blocked_until
            for layer, used in zip(profile.layers, tensors_of, strict=True):
                now = _update(spans, iteration - 1, used, now, layer.update_ns)
        if iteration > 0:
            spans.append(Span("step", iteration - 1, -1, step_start, now))
        step_start = now
        for index, (layer, used) in enumerate(zip(profile.layers, tensors_of, strict=True)):
            if iteration > 0 and plan.crosses_barrier:
                needed = max((arrived[tensor] for tensor in used), default=0)
                if needed > now:
                    spans.append(Span("wait", iteration, max(used, key=arrived.__getitem__), now, needed))
                    now = needed
                now = _update(spans, iteration - 1, used, now, layer.update_ns)
            spans.extend(Span("use", iteration, tensor, now, now) for tensor in used)
            spans.append(Span("forward", iteration, index, now, now + layer.forward_ns))
            now += layer.forward_ns
        if iteration == iterations:
            break
        spans.append(Span("backward", iteration, -1, now, now + profile.backward_ns))
        sends = _communicate(dispatcher, plan, profile, network, now)
        for gradient, seen in enumerate(profile.tensors):
            spans.append(Span("ready", iteration, gradient, now + seen.ready_ns, now + seen.ready_ns))
        arrived = [0] * len(profile.tensors)
        for message, start, end in sends:
            spans.append(Span("send", iteration, message, start, end))
            for sent in plan.messages[message].tensors:
                arrived[sent] = max(arrived[sent], end)
        now += profile.backward_ns
    spans.sort(key=lambda span: span.start_ns)
    return Timeline(plan.fingerprint, 0, tuple(spans))


def planned_ahead(plan: Plan, profile: Profile, network: Network) -> Plan:
    """`plan` with the order fixed in which its messages start by this profile and network.

    Collectives must be issued in one order by every rank (each rank's own readiness would differ), so
    the order is decided once, here, by the Dispatcher in virtual time, and becomes part of the plan.
    """
    sends = _communicate(Dispatcher(plan), plan, profile, network, 0)
    return plan.with_sequence(tuple(message for message, _, _ in sends))


def _update(spans: list[Span], iteration: int, tensors: list[int], now: int, update_ns: int) -> int:
    spans.extend(Span("update", iteration, tensor, now, now + update_ns) for tensor in tensors)
    return now + update_ns


def _communicate(
    dispatcher: Dispatcher, plan: Plan, profile: Profile, network: Network, backward_start: int
) -> list[tuple[int, int, int]]:
    """One iteration's messages as (message, handed over, arrived), in the order of hand-over."""
    dispatcher.begin()
    sent: list[tuple[int, int, int]] = []
    queue: deque[tuple[int, int]] = deque()  # (message, handed over): the network serves it in order
    serving_ends: int | None = None
    gradients = iter(range(len(profile.tensors)))
    gradient = next(gradients, None)
    while gradient is not None or queue:
        ready_at = None if gradient is None else backward_start + profile.tensors[gradient].ready_ns
        if queue and serving_ends is not None and (ready_at is None or serving_ends <= ready_at):
            now = serving_ends
            message, handed_over = queue.popleft()
            sent.append((message, handed_over, now))
            starts = dispatcher.finished(message)
            serving_ends = None
        else:
            assert gradient is not None
            assert ready_at is not None
            now = ready_at
            starts = dispatcher.ready(gradient)
            gradient = next(gradients, None)
        queue.extend((start, now) for start in starts)
        if queue and serving_ends is None:
            serving_ends = now + network.cost_ns(plan.messages[queue[0][0]].size_bytes)
    assert dispatcher.done, dispatcher.describe_state()
    return sent
