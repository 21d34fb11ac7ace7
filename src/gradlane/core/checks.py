"""Checks of plans and of timelines.

`check_plan` checks what a policy returns and what a backend accepts; `check_timeline` checks
simulated and live timelines.
"""

from __future__ import annotations

from collections import defaultdict

from gradlane.core.plan import Plan
from gradlane.core.profile import DTYPE_BYTES, TensorSpec
from gradlane.core.timeline import Span, Timeline
from gradlane.core.wire_dtype import WIRE_DTYPES
from gradlane.errors import PlanError


def check_plan(plan: Plan, tensors: tuple[TensorSpec, ...]) -> None:
    """Check that a plan moves every byte of a model's gradients exactly once.

    Args:
        plan: the plan to check.
        tensors: the model's gradient tensors, in order of readiness.

    Raises:
        PlanError: the plan is for other tensors, moves a byte twice or never, cuts a tensor inside an element, or mixes dtypes
            in one message. A message is one sum and has one dtype.
    """
    if plan.tensors != tensors:
        raise PlanError(_first_difference(plan.tensors, tensors))
    covered: list[list[tuple[int, int]]] = [[] for _ in tensors]
    for index, message in enumerate(plan.messages):
        dtypes = set()
        for piece in message.slices:
            if piece.tensor >= len(tensors):
                raise PlanError(f"messages[{index}]: got tensor {piece.tensor}, expected below {len(tensors)}")
            spec = tensors[piece.tensor]
            dtypes.add(spec.dtype)
            if piece.offset_bytes % DTYPE_BYTES[spec.dtype] or piece.size_bytes % DTYPE_BYTES[spec.dtype]:
                raise PlanError(f"messages[{index}]: {spec.name} is cut inside an element of {spec.dtype}")
            covered[piece.tensor].append((piece.offset_bytes, piece.offset_bytes + piece.size_bytes))
        if len(dtypes) > 1:
            raise PlanError(f"messages[{index}]: mixes {' and '.join(sorted(dtypes))}, expected one dtype a message")
    for spec, ranges in zip(tensors, covered, strict=True):
        position = 0
        for start, end in sorted(ranges):
            if start != position:
                fault = "moved twice" if start < position else "never moved"
                raise PlanError(f"{spec.name}: got bytes from {min(start, position)} {fault}, expected each once")
            position = end
        if position != spec.size_bytes:
            raise PlanError(f"{spec.name}: moves {position} bytes, expected {spec.size_bytes}")


def _first_difference(plan: tuple[TensorSpec, ...], model: tuple[TensorSpec, ...]) -> str:
    advice = "make a new plan from a profile of this model (gradlane profile, gradlane plan)"
    for index, (ours, theirs) in enumerate(zip(plan, model, strict=False)):
        if ours != theirs:
            if any(ours.on_wire(half) == theirs.on_wire(half) for half in set(WIRE_DTYPES.values())):
                advice = "give attach the wire_dtype that the plan was made for, or make a plan with gradlane plan --wire-dtype"
            return (
                f"this plan is for another model: tensor {index} is {ours.name} ({ours.size_bytes} B, {ours.dtype}) in the "
                f"plan and {theirs.name} ({theirs.size_bytes} B, {theirs.dtype}) in the model; {advice}"
            )
    return f"this plan is for another model: it has {len(plan)} tensors, the model {len(model)}; {advice}"


def check_timeline(timeline: Timeline, plan: Plan) -> None:
    """Check that a run did what its plan allows.

    In every iteration:

    - each message was sent once, after all its tensors and its `hold_until` were ready;
    - no lane had more than its window unfinished, unless by one lone message;
    - messages of a plan with a sequence started in that order within each lane;
    - if the timeline has "receive" spans, it has one for each message, and it ends after the send
      did;
    - no tensor was updated before all its bytes had arrived, or used before its update ended.

    Raises:
        AssertionError: the first rule that `timeline` breaks, with the iteration and the message.
    """
    assert timeline.plan == plan.fingerprint, f"timeline of plan {timeline.plan}, checked against {plan.fingerprint}"
    ready = {(s.iteration, s.subject): s.start_ns for s in timeline.of("ready")}
    sends = timeline.of("send")
    received = {(span.iteration, span.subject): span for span in timeline.of("receive")}
    assert not received or len(received) == len(timeline.of("receive")) == len(sends), "a message was received twice or never"
    arrived: dict[tuple[int, int], int] = {}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for send in sends:
        assert 0 <= send.subject < len(plan.messages), f"{_name(send)} is none of the plan's {len(plan.messages)} messages"
        counts[send.iteration, send.subject] += 1
        message = plan.messages[send.subject]
        for tensor in {*message.tensors, *(() if message.hold_until is None else (message.hold_until,))}:
            at = ready.get((send.iteration, tensor))
            assert at is not None, f"{_name(send)} starts and tensor {tensor} never is ready"
            assert at <= send.start_ns, f"{_name(send)} starts before tensor {tensor} is ready"
        end_ns = send.end_ns
        if received:
            receive = received.get((send.iteration, send.subject))
            assert receive is not None, f"{_name(send)} is never received"
            assert receive.start_ns >= send.start_ns, f"{_name(receive)} begins before the message does"
            assert receive.end_ns >= end_ns, f"{_name(receive)} ends before the message was sent"
            end_ns = receive.end_ns
        for tensor in message.tensors:
            key = (send.iteration, tensor)
            arrived[key] = max(arrived.get(key, 0), end_ns)
    iterations = {send.iteration for send in sends}
    for iteration in iterations:
        for index in range(len(plan.messages)):
            times = counts[iteration, index]
            assert times == 1, f"iteration {iteration}: message {index} was sent {times} times"
    _check_windows(sends, plan)
    _check_sequence(sends, plan)
    updated: dict[tuple[int, int], int] = {}
    for update in timeline.of("update"):
        key = (update.iteration, update.subject)
        assert key in arrived, f"{_name(update)} begins and its bytes never arrive"
        assert arrived[key] <= update.start_ns, f"{_name(update)} begins before its bytes arrived"
        updated[key] = update.end_ns
    for use in timeline.of("use"):
        key = (use.iteration - 1, use.subject)
        if key in updated:
            assert updated[key] <= use.start_ns, f"{_name(use)} reads a parameter before its update ended"


def _check_windows(sends: list[Span], plan: Plan) -> None:
    for index, lane in enumerate(plan.lanes):
        if lane.window_bytes is None:
            continue
        events: list[tuple[int, int, int, int]] = []
        for send in sends:
            if plan.messages[send.subject].lane == index:
                size = plan.messages[send.subject].size_bytes
                events.append((send.start_ns, 1, size, 1))
                events.append((send.end_ns, 0, -size, -1))
        in_flight = messages = 0
        for _, _, size, count in sorted(events):
            in_flight += size
            messages += count
            assert messages <= 1 or in_flight <= lane.window_bytes, (
                f"lane {index}: {in_flight} bytes in {messages} messages unfinished, window {lane.window_bytes}"
            )


def _check_sequence(sends: list[Span], plan: Plan) -> None:
    if plan.sequence is None:
        return
    place = {message: position for position, (message, is_second) in enumerate(plan.starts) if not is_second}
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for send in sends:
        key = (send.iteration, plan.messages[send.subject].lane)
        before = latest.get(key, (-1, -1))
        assert before[0] < place[send.subject], f"{_name(send)} starts after message {before[1]}, against the sequence"
        latest[key] = (place[send.subject], send.subject)


def _name(span: Span) -> str:
    return f"iteration {span.iteration}: {span.kind} {span.subject} at {span.start_ns}"
