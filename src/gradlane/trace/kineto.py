"""PyTorch profiler traces (Kineto's Chrome trace JSON), of a device or of the CPU.

A gradient is ready when autograd has accumulated it: on a device, when the last work launched until
then ends, NCCL's not counted; on the CPU, when AccumulateGrad ends. Sequence numbers join each
backward operation to the forward operation that made it. A parameter's first use is the forward
operation whose backward ran last before its AccumulateGrad; these operations, outermost ones, are
the layers. If a trace does not tell (no sequence numbers, reentrant checkpointing), gradients that
become ready together are a layer, and forward time is divided as backward time is. A reentrant
checkpoint also accumulates gradients of its inputs, which are no parameters: those have the shapes of
its forward operation's inputs.

The forward pass begins with the first use of a parameter and ends where backward begins on the host. A part takes its busy time
and the gaps that its launches explain (`device`). Steps are those of `profiler.step()`; without, each ends with
`optimizer.step()`, of several optimizers with the last one's. What a closure computes within it is no update. Times are
medians over the steps. The profile's uncovered time is the rest of a step, without the waits for collectives: on the CPU,
those of Gloo beside which no operation runs.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NAME, MAX_NS, MAX_TENSORS
from gradlane.core.profile import BEFORE_FIRST_USE, DTYPE_BYTES, Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import FormatError
from gradlane.trace.device import PAUSE_US, DeviceClock, Intervals, Part, Work
from gradlane.trace.events import ACCUMULATE, DTYPES, KERNELS, MARK, OPTIMIZER_STEP, Event
from gradlane.trace.passes import inputs_of_checkpoints, need_one_pass
from gradlane.trace.source import MAX_SHAPE, increasing, named, need_few_objects
from gradlane.units import format_ns

_COPIES = {"Memcpy", "gpu_memcpy", "Memset", "gpu_memset"}
_HOSTS_COLLECTIVES = "gloo:"
_NO_SUMS = ("SendRecv", "AllToAll", "AllGather", "Broadcast")  # in names of collectives that no schedule of gradients moves
_LOADING = "enumerate(DataLoader)"
_LEGACY_DEVICES = ("CUDA functions", "XPU functions", "PrivateUse1 functions")
_ANNOTATIONS_OF_A_DEVICE = "gpu_user_annotation"  # steps a second time, in the device's time
MAX_DIMENSIONS = 64
_UNLIKE = 0.1  # so much of a step the medians of its parts may be off before a note says so


class _Trace(msgspec.Struct):
    trace_events: list[Event] = msgspec.field(name="traceEvents")


class _Uses(NamedTuple):
    """Forward operations that are the first to use parameters, in forward order."""

    names: list[str]
    starts_us: list[float]
    layer_of: list[int]  # of each gradient


class _Step(NamedTuple):
    """One step, in us."""

    began_us: float  # its forward pass
    part: Part | None  # its forward pass on a device
    forward_us: float
    ready_us: list[float]
    backward_us: float
    update_us: float
    sizes: list[tuple[int, str] | None]  # None where the trace has no shapes
    uses: _Uses | None
    length_us: float  # of the profiler's mark; 0 without one
    left_out: tuple[int, int]  # AccumulateGrad that were given no gradient, and those of inputs of checkpoints


def is_it(head: bytes) -> bool:
    is_object = b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProperties"' in head)
    return is_object or (head.lstrip()[:1] == b"[" and b'"ph"' in head)


def read(data: bytes, name: str, tensors: Sequence[TensorSpec] | None = None) -> Profile:
    need_few_objects(data, name)
    spans = _spans(data, name)
    clock = _clock(spans)
    if not clock and any(event.cat in KERNELS for event in spans):
        raise FormatError(f"{name}: kernels and no launches; profile with activities of the CPU too")
    steps = []
    for label, length_us, inside in _steps(spans):
        accumulated = [event for event in inside if event.name == ACCUMULATE]
        given = [event for event in accumulated if not event.args.has_no_gradient]
        inputs = inputs_of_checkpoints(inside)
        gradients = [event for event in given if id(event) not in inputs]
        if gradients:
            need_one_pass(inside, gradients, f"{name}: {label}")
            step = _step(inside, gradients, clock, f"{name}: {label}")
            left_out = len(accumulated) - len(given), len(given) - len(gradients)
            steps.append(step._replace(length_us=length_us, left_out=left_out))
    if not steps:
        none = "with a gradient " if any(event.name == ACCUMULATE for event in spans) else ""
        raise FormatError(f"{name}: no {ACCUMULATE} {none}in it; profile steps that train, with activities of the CPU too")
    for number, step in enumerate(steps):
        if step.sizes != steps[0].sizes:
            raise FormatError(
                f"{name}: step {number} has {len(step.sizes)} gradients, the first has {len(steps[0].sizes)}, or others; "
                "record steps that are alike"
            )
    of_the_host = not clock and any(event.calls_the_runtime and event.args.correlation >= 0 for event in spans)
    waits = _waits_of_the_host(spans)
    return _profile(name, steps, tensors, clock, waits, ["no kernels in it: times are the host's"] if of_the_host else [])


def _spans(data: bytes, name: str) -> list[Event]:
    """The events that last, by their start; what contains comes before what it contains."""
    is_array = data.lstrip()[:1] == b"["  # Chrome's format: an object with the events, or the events alone
    try:
        events = (
            msgspec.json.decode(data, type=list[Event]) if is_array else msgspec.json.decode(data, type=_Trace).trace_events
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{name}: not a PyTorch profiler trace: {error}") from None
    spans = []
    for place, event in enumerate(events):
        if event.ph != "X" or event.cat == _ANNOTATIONS_OF_A_DEVICE:
            continue
        where = f"$[{place}]" if is_array else f"$.traceEvents[{place}]"
        if not (abs(event.ts) <= MAX_NS and 0 <= event.dur <= MAX_NS / 1e3):
            raise FormatError(f"{name}: got ts {event.ts}, dur {event.dur}, expected us, and a length of 0 or more", where)
        if event.pid in _LEGACY_DEVICES:
            raise FormatError(f"{name}: got kernels without launches, of torch.autograd.profiler; use torch.profiler", where)
        spans.append(event)
    spans.sort(key=lambda event: (event.ts, -event.dur))
    return spans


def _steps(spans: list[Event]) -> Iterator[tuple[str, float, list[Event]]]:
    """The name, the length as marked, or 0, and the events of each step."""
    starts = [event.ts for event in spans]
    marks = [event for event in spans if event.name.startswith("ProfilerStep")]
    if marks:
        begins = [*(mark.ts for mark in marks), math.inf]
        windows = [(mark.name, mark.dur, mark.ts, min(mark.end, after)) for mark, after in zip(marks, begins[1:], strict=True)]
    else:
        ends = _ends_of_steps(spans) or [math.inf]
        windows = [(f"step {number}", 0.0, begin, end) for number, (begin, end) in enumerate(pairwise([-math.inf, *ends]))]
    for label, length, begin, end in windows:
        yield label, length, spans[bisect_left(starts, begin) : bisect_left(starts, end)]


def _ends_of_steps(spans: list[Event]) -> list[float]:
    """The end of each optimizer's step behind which gradients follow, and of the last one."""
    ends: list[float] = []
    has_gradients = True
    for event in spans:
        if event.name == ACCUMULATE:
            has_gradients = True
        elif event.name.startswith(OPTIMIZER_STEP):
            if has_gradients or not ends:
                ends.append(event.end)
            else:
                ends[-1] = max(ends[-1], event.end)  # of a further optimizer, or of one within this one
            has_gradients = False
    return ends


def _waits_of_the_host(spans: Sequence[Event]) -> Intervals:
    """When the host's own collectives ran and no operation did."""
    sums = [event for event in spans if event.name.startswith(_HOSTS_COLLECTIVES)]
    if not sums:
        return Intervals(())
    working = Intervals((event.ts, event.end) for event in spans if event.is_work_of_the_host)
    return Intervals((start, end) for event in sums for start, end in working.outside(event.ts, event.end))


def _clock(spans: list[Event]) -> DeviceClock:
    """What the device did; its copies count if they are in line with kernels, not beside them."""
    kernels = [event for event in spans if event.cat in KERNELS and event.args.correlation >= 0]
    computing = [event for event in kernels if not event.is_collective]
    sums = [event for event in kernels if event.is_collective and not any(what in event.name for what in _NO_SUMS)]
    streams = {event.tid for event in computing}
    copies = [event for event in spans if event.cat in _COPIES and event.args.correlation >= 0 and event.tid in streams]
    wanted = {event.args.correlation for event in (*computing, *copies)}
    launches: dict[int, Event] = {}  # by correlation; one may launch a whole graph of work
    for event in spans:
        if event.args.correlation in wanted and event.calls_the_runtime:
            launches.setdefault(event.args.correlation, event)
    threads = {event.tid for event in launches.values()}
    return DeviceClock(
        (
            Work(launches[event.args.correlation].ts, event.ts, event.end)
            for event in (*computing, *copies)
            if event.args.correlation in launches
        ),
        Intervals((event.ts, event.end) for event in sums),
        Intervals((event.ts, event.end) for event in spans if event.tid in threads and event.is_work_of_the_host),
    )


def _step(inside: list[Event], gradients: list[Event], clock: DeviceClock, where: str) -> _Step:
    thread = gradients[0].tid
    marks = [event for event in inside if event.name.startswith(MARK)]
    # older traces do not mark backward operations, but run them in a thread of their own
    backward = marks or [event for event in inside if event.tid == thread and not event.calls_the_runtime]
    begun = min(event.ts for event in (*backward, *gradients))
    ended = max(event.end for event in gradients)
    sizes = [_size(event, f"{where}, gradient {index}") for index, event in enumerate(gradients)]
    with_gradient = {id(event) for event in gradients}
    uses = _uses([event for event in inside if event.args.sequence >= 0 or id(event) in with_gradient], begun)
    first = uses.starts_us[0] if uses else _first_operation(inside, begun)
    # one within another, where an optimizer is made of several; a closure computes within a step
    steps = Intervals((event.ts, event.end) for event in inside if event.name.startswith(OPTIMIZER_STEP))
    optimizer = Intervals(part for step in steps for part in Intervals(((first, ended),)).outside(*step))
    if not clock:
        pauses = Intervals((event.ts, event.end) for event in inside if event.is_work_of_the_host).gaps(PAUSE_US)

        def passed(since: float, until: float) -> float:
            return until - since - pauses.within(since, until)

        ready = [passed(begun, event.end) for event in gradients]
        update = sum(end - start for start, end in optimizer)
        uses = uses and uses._replace(starts_us=[passed(first, at) for at in uses.starts_us])
        return _Step(first, None, passed(first, begun), ready, max(ready), update, sizes, uses, 0.0, (0, 0))
    forward_part, backward_part = clock.part(first, begun), clock.part(begun, ended)
    if forward_part is None:
        raise FormatError(f"{where}: no kernel was launched before backward begins")
    ready = [0.0 if backward_part is None else clock.took_us(backward_part, event.end) for event in gradients]
    updates = (clock.part(start, end) for start, end in optimizer)
    update = sum(clock.took_us(part) for part in updates if part is not None)
    uses = uses and uses._replace(starts_us=[clock.offset_us(forward_part, at) for at in uses.starts_us])
    forward = clock.took_us(forward_part)
    return _Step(forward_part.began_us, forward_part, forward, ready, max(ready), update, sizes, uses, 0.0, (0, 0))


def _first_operation(inside: list[Event], begun: float) -> float:
    """When the first operation after the loading of inputs begins, if no first use is known."""
    loaded = max((event.end for event in inside if event.name.startswith(_LOADING) and event.ts < begun), default=-math.inf)
    operators = (event.ts for event in inside if event.ts >= loaded and event.is_work_of_the_host)
    return min(next(operators, begun), begun)


def _uses(events: list[Event], begun: float) -> _Uses | None:
    """Each parameter's first use, by the launching thread's time; None if one is unknown."""
    outermost: dict[int, Event] = {}  # by sequence number
    outer: dict[Any, Event] = {}  # by thread
    last: dict[Any, int] = {}  # thread of backward -> sequence number of its operation that began last
    firsts: list[Event] = []
    for event in events:
        if event.name == ACCUMULATE:
            use = outermost.get(last.get(event.tid, -1))
            if use is None:
                return None
            firsts.append(use)
        elif event.args.forward_thread:
            last[event.tid] = event.args.sequence
        elif event.ts < begun:
            if event.tid not in outer or event.ts >= outer[event.tid].end:
                outer[event.tid] = event
            # the number is that of the next node of the graph: the last operation to bear it makes
            # the node
            outermost[event.args.sequence] = outer[event.tid]
    order = sorted({id(use): use for use in firsts}.values(), key=lambda use: use.ts)
    layer_of = {id(use): layer for layer, use in enumerate(order)}
    return _Uses([use.name for use in order], [use.ts for use in order], [layer_of[id(use)] for use in firsts])


def _size(event: Event, where: str) -> tuple[int, str] | None:
    if not len(event.args.shapes):
        return None
    if max(len(event.args.shapes), len(event.args.types)) > MAX_SHAPE:
        raise FormatError(f"{where}: a gradient whose shape takes more than {MAX_SHAPE} bytes to describe")
    try:
        shape = msgspec.json.decode(event.args.shapes, type=list[list[int]])[0]
        dtype = DTYPES[msgspec.json.decode(event.args.types, type=list[str])[0]]
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, KeyError):
        raise FormatError(
            f"{where}: got shapes {bytes(event.args.shapes)!r:.60} of types {bytes(event.args.types)!r:.60}, expected a "
            f"dense tensor of {', '.join(DTYPES)}"
        ) from None
    if len(shape) > MAX_DIMENSIONS or any(not 0 < length <= MAX_BYTES for length in shape):
        raise FormatError(f"{where}: a gradient of shape {shape!s:.60}, expected at most {MAX_DIMENSIONS} lengths of 1 or more")
    size_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if size_bytes > MAX_BYTES:
        raise FormatError(f"{where}: a gradient of shape {shape}")
    return size_bytes, dtype


def _profile(
    name: str,
    steps: list[_Step],
    tensors: Sequence[TensorSpec] | None,
    clock: DeviceClock,
    waits: Intervals,
    notes: Sequence[str],
) -> Profile:
    if len(steps[0].sizes) > MAX_TENSORS:
        raise FormatError(f"{name}: more than {MAX_TENSORS} gradients")
    specs = named(name, steps[0].sizes, tensors)
    ready = increasing([_median_ns([step.ready_us[index] for step in steps]) for index in range(len(specs))])
    backward_ns = max(ready[-1], _median_ns([step.backward_us for step in steps]))
    forward_ns = _median_ns([step.forward_us for step in steps])
    update_ns = _median_ns([step.update_us for step in steps])
    if max(forward_ns, backward_ns, update_ns) > MAX_NS or not ready[-1]:
        raise FormatError(f"{name}: forward of {forward_ns} ns, backward of {backward_ns} ns, update of {update_ns} ns")
    uses = [step.uses for step in steps if step.uses is not None]
    if len(uses) == len(steps) and all(use.layer_of == uses[0].layer_of for use in uses):
        names, layer_of = [f"{layer}.{use}" for layer, use in enumerate(uses[0].names)], uses[0].layer_of
        starts = increasing([_median_ns([use.starts_us[layer] for use in uses]) for layer in range(len(names))])
        how = "layers are operations that use parameters first"
    else:
        ends = sorted(set(ready), reverse=True)
        names, layer_at = [f"layer{layer}" for layer in range(len(ends))], {at: layer for layer, at in enumerate(ends)}
        layer_of = [layer_at[at] for at in ready]
        starts = [forward_ns * (ends[0] - end) // ends[0] for end in ends]
        how = "forward shared out among layers as backward is"
    bounds = [*(min(start, forward_ns) for start in starts), forward_ns]
    if bounds[0]:  # the model prepares its inputs, and no parameter is needed yet
        bounds, names, layer_of = [0, *bounds], [BEFORE_FIRST_USE, *names], [layer + 1 for layer in layer_of]
    sizes = [0] * len(names)
    for layer, spec in zip(layer_of, specs, strict=True):
        sizes[layer] += spec.size_bytes
    layers = tuple(
        Layer(what[:MAX_NAME], end - begin, round(update_ns * size / sum(sizes)))
        for what, size, (begin, end) in zip(names, sizes, pairwise(bounds), strict=True)
    )
    period_ns, waited_ns, uncovered_ns = _between_ns(steps, clock, waits)
    computing_ns = forward_ns + backward_ns + sum(layer.update_ns for layer in layers) + uncovered_ns
    notes = [
        f"PyTorch profiler, {len(steps)} steps", how, *notes, *_notes(steps, period_ns, waited_ns, uncovered_ns, computing_ns)
    ]  # fmt: skip
    return Profile(
        Path(name).name.split(".")[0],
        "device" if clock else "cpu",
        tuple(TensorProfile(spec, at, layer) for spec, at, layer in zip(specs, ready, layer_of, strict=True)),
        layers,
        backward_ns,
        f"{name}: {'; '.join(notes)}"[:MAX_NAME],
        uncovered_ns,
    )


def _between_ns(steps: list[_Step], clock: DeviceClock, waits: Intervals) -> tuple[int, int, int]:
    """The time from one step's forward pass to the next one's, what of it collectives were waited for, and what of it is
    none of these and no part of the step; medians.

    The last is a median over steps: in one step forward is slow, in another backward, so that medians of parts do not add up.
    Of one step alone its time is what the profiler's mark says; 0 where there is none.
    """
    pairs = list(pairwise(steps))
    if not pairs:
        period_us = [steps[0].length_us]
        waited_us = [0.0]
    else:
        period_us = [after.began_us - before.began_us for before, after in pairs]
        waited_us = [
            waits.within(before.began_us, after.began_us)
            if before.part is None or after.part is None
            else clock.waited_us(before.part, after.part)
            for before, after in pairs
        ]
    left_us = [
        period - waited - (step.forward_us + max(step.backward_us, *step.ready_us) + step.update_us)
        for period, waited, step in zip(period_us, waited_us, steps, strict=False)
    ]
    return _median_ns(period_us), _median_ns(waited_us), _median_ns(left_us)


def _notes(steps: list[_Step], period_ns: int, waited_ns: int, uncovered_ns: int, computing_ns: int) -> Iterator[str]:
    if not period_ns:
        yield "the time between steps is not known of one step"
    elif uncovered_ns:
        yield f"{uncovered_ns / period_ns:.0%} of a step of {format_ns(period_ns)} is uncovered time"
    if len(steps) > 1 and abs(computing_ns - (period_ns - waited_ns)) > _UNLIKE * computing_ns:
        yield (
            f"steps differ: their parts' medians add up to {format_ns(computing_ns)}, a step takes "
            f"{format_ns(period_ns - waited_ns)}; record more steps"
        )
    if waited_ns:
        yield f"sums were waited for in {format_ns(waited_ns)} of a step, which are left out"
    without_gradient, inputs = steps[0].left_out
    if without_gradient:
        yield f"{without_gradient} parameters without a gradient are left out"
    if inputs:
        yield f"{inputs} inputs of checkpoints are left out"


def _median_ns(values: Sequence[float]) -> int:
    return max(0, round(statistics.median(values) * 1e3))
