"""PyTorch profiler traces (Kineto's Chrome trace JSON), of a device or of the CPU.

A gradient is ready when autograd has accumulated it: on a device, when the last kernel launched
until then ends, NCCL's not counted; on the CPU, when AccumulateGrad ends. Sequence numbers join
each backward operation to the forward operation that made it. A parameter's first use is the
forward operation whose backward ran last before its AccumulateGrad; these operations, outermost
ones, are the layers. If a trace does not tell (no sequence numbers, reentrant checkpointing),
gradients that become ready together are a layer, and forward time is divided as backward time is.
Steps are those of `profiler.step()`; without, each ends with `optimizer.step()`. Times are medians
over the steps.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NAME, MAX_NS, MAX_TENSORS
from gradlane.core.profile import DTYPE_BYTES, Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import FormatError
from gradlane.trace.source import MAX_SHAPE, increasing, named, need_few_objects
from gradlane.units import format_ns

ACCUMULATE = "torch::autograd::AccumulateGrad"
OPTIMIZER_STEP = "Optimizer.step"
_DTYPES = {"float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}
_LAUNCHES = {"Runtime", "cuda_runtime", "cuda_driver"}
_KERNELS = {"Kernel", "kernel"}
_OPERATORS = {"Operator", "cpu_op"}
_ANNOTATIONS_OF_A_DEVICE = "gpu_user_annotation"  # steps a second time, in the device's time
MAX_DIMENSIONS = 64


class _Args(msgspec.Struct):
    correlation: int = -1  # joins a launch to its kernel
    sequence: int = msgspec.field(default=-1, name="Sequence number")  # joins a forward operation to its backward
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")  # 0 except in backward
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b'["float"]'), name="Input type")


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    args: _Args = msgspec.field(default_factory=_Args)

    @property
    def end(self) -> float:
        return self.ts + self.dur


class _Trace(msgspec.Struct):
    trace_events: list[_Event] = msgspec.field(name="traceEvents")


class _Kernels(NamedTuple):
    """Kernels by the time of their launch, in us."""

    launched: list[float]
    started: list[float]
    ended: list[float]  # and no earlier than any launched before

    def start_after(self, launched: float) -> float:
        """When the first kernel launched at `launched` or later starts."""
        place = bisect_left(self.launched, launched)
        return self.started[place] if place < len(self.started) else self.ended[-1]

    def end_before(self, launched: float) -> float:
        """When all kernels launched before `launched` have ended."""
        return self.ended[bisect_left(self.launched, launched) - 1]


class _Uses(NamedTuple):
    """Forward operations that are the first to use parameters, in forward order."""

    names: list[str]
    starts_us: list[float]
    layer_of: list[int]  # of each gradient


class _Step(NamedTuple):
    began_us: float  # its first kernel, or operation
    forward_us: float
    ready_us: list[float]
    backward_us: float
    update_us: float
    sizes: list[tuple[int, str] | None]  # None where the trace has no shapes
    uses: _Uses | None


def is_it(head: bytes) -> bool:
    return b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProperties"' in head)


def read(data: bytes, name: str, tensors: Sequence[TensorSpec] | None = None) -> Profile:
    need_few_objects(data, name)
    try:
        events = msgspec.json.decode(data, type=_Trace).trace_events
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{name}: not a PyTorch profiler trace: {error}") from None
    spans = []
    for place, event in enumerate(events):
        if event.ph != "X" or event.cat == _ANNOTATIONS_OF_A_DEVICE:
            continue
        if not (abs(event.ts) <= MAX_NS and 0 <= event.dur <= MAX_NS / 1e3):
            raise FormatError(
                f"{name}: got ts {event.ts}, dur {event.dur}, expected us, and a length of 0 or more", f"$.traceEvents[{place}]"
            )
        spans.append(event)
    spans.sort(key=lambda event: (event.ts, -event.dur))  # what contains comes before what it contains
    kernels = _kernels(spans)
    if not kernels.launched and any(event.cat in _KERNELS for event in spans):
        raise FormatError(f"{name}: kernels and no launches; profile with activities of the CPU too")
    steps = []
    for label, inside in _steps(spans):
        gradients = [event for event in inside if event.name == ACCUMULATE]
        if gradients:
            steps.append(_step(inside, gradients, kernels, f"{name}: {label}"))
    if not steps:
        raise FormatError(f"{name}: no {ACCUMULATE} in it; profile steps that train, with activities of the CPU too")
    for number, step in enumerate(steps):
        if step.sizes != steps[0].sizes:
            raise FormatError(
                f"{name}: step {number} has {len(step.sizes)} gradients, the first has {len(steps[0].sizes)}, or others; "
                "record steps that are alike"
            )
    return _profile(name, steps, tensors, bool(kernels.launched))


def _steps(spans: list[_Event]) -> Iterator[tuple[str, list[_Event]]]:
    starts = [event.ts for event in spans]
    marks = [event for event in spans if event.name.startswith("ProfilerStep")]
    if marks:
        begins = [*(mark.ts for mark in marks), math.inf]
        windows = [(mark.name, mark.ts, min(mark.end, after)) for mark, after in zip(marks, begins[1:], strict=True)]
    else:
        ends = [event.end for event in spans if event.name.startswith(OPTIMIZER_STEP)] or [math.inf]
        windows = [(f"step {number}", begin, end) for number, (begin, end) in enumerate(pairwise([-math.inf, *ends]))]
    for label, begin, end in windows:
        yield label, spans[bisect_left(starts, begin) : bisect_left(starts, end)]


def _kernels(spans: list[_Event]) -> _Kernels:
    by_correlation = {
        event.args.correlation: event
        for event in spans
        if event.cat in _KERNELS and event.args.correlation >= 0 and not event.name.startswith("nccl")
    }
    launches = [
        (event.ts, by_correlation[event.args.correlation])
        for event in spans
        if event.cat in _LAUNCHES and event.args.correlation in by_correlation
    ]
    ended = accumulate((kernel.end for _, kernel in launches), max)
    return _Kernels([at for at, _ in launches], [kernel.ts for _, kernel in launches], list(ended))


def _step(inside: list[_Event], gradients: list[_Event], kernels: _Kernels, where: str) -> _Step:
    thread = gradients[0].tid
    marks = [event for event in inside if event.name.startswith("autograd::engine::evaluate_function")]
    # older traces do not mark backward operations, but run them in a thread of their own
    backward = marks or [event for event in inside if event.tid == thread and event.cat not in _LAUNCHES]
    begun = min(event.ts for event in (*backward, *gradients))
    optimizer = [event for event in inside if event.name.startswith(OPTIMIZER_STEP)]
    sizes = [_size(event, f"{where}, gradient {index}") for index, event in enumerate(gradients)]
    uses = _uses([event for event in inside if event.args.sequence >= 0 or event.name == ACCUMULATE], begun)
    if not kernels.launched:
        first = min(
            (event.ts for event in inside if event.cat in _OPERATORS and event.name.startswith("aten::")), default=begun
        )
        ready = [event.end - begun for event in gradients]
        update = sum(event.dur for event in optimizer)
        return _Step(first, begun - first, ready, max(ready), update, sizes, _since(first, uses, lambda at: at))
    first_launch = bisect_left(kernels.launched, inside[0].ts)
    if first_launch == bisect_left(kernels.launched, begun):
        raise FormatError(f"{where}: no kernel was launched before backward begins")
    first, forward_ended = kernels.started[first_launch], kernels.end_before(begun)
    ready = [kernels.end_before(event.end) - forward_ended for event in gradients]
    update = 0.0
    for event in optimizer:
        if bisect_left(kernels.launched, event.ts) < bisect_left(kernels.launched, event.end):
            update += kernels.end_before(event.end) - kernels.start_after(event.ts)
    return _Step(first, forward_ended - first, ready, max(ready), update, sizes, _since(first, uses, kernels.start_after))


def _uses(events: list[_Event], begun: float) -> _Uses | None:
    """Each parameter's first use, by the launching thread's time; None if one is unknown."""
    outermost: dict[int, _Event] = {}  # by sequence number
    outer: dict[Any, _Event] = {}  # by thread
    last: dict[Any, int] = {}  # thread of backward -> sequence number of its operation that began last
    firsts: list[_Event] = []
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


def _since(first: float, uses: _Uses | None, start_of: Callable[[float], float]) -> _Uses | None:
    return uses and uses._replace(starts_us=[start_of(at) - first for at in uses.starts_us])


def _size(event: _Event, where: str) -> tuple[int, str] | None:
    if not len(event.args.shapes):
        return None
    if max(len(event.args.shapes), len(event.args.types)) > MAX_SHAPE:
        raise FormatError(f"{where}: a gradient whose shape takes more than {MAX_SHAPE} bytes to describe")
    try:
        shape = msgspec.json.decode(event.args.shapes, type=list[list[int]])[0]
        dtype = _DTYPES[msgspec.json.decode(event.args.types, type=list[str])[0]]
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, KeyError):
        raise FormatError(
            f"{where}: got shapes {bytes(event.args.shapes)!r:.60} of types {bytes(event.args.types)!r:.60}, expected a "
            f"dense tensor of {', '.join(_DTYPES)}"
        ) from None
    if len(shape) > MAX_DIMENSIONS or any(not 0 < length <= MAX_BYTES for length in shape):
        raise FormatError(f"{where}: a gradient of shape {shape!s:.60}, expected at most {MAX_DIMENSIONS} lengths of 1 or more")
    size_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if size_bytes > MAX_BYTES:
        raise FormatError(f"{where}: a gradient of shape {shape}")
    return size_bytes, dtype


def _profile(name: str, steps: list[_Step], tensors: Sequence[TensorSpec] | None, on_device: bool) -> Profile:
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
    # what runs before the first use is the first layer's
    bounds = [0, *(min(start, forward_ns) for start in starts[1:]), forward_ns]
    sizes = [0] * len(names)
    for layer, spec in zip(layer_of, specs, strict=True):
        sizes[layer] += spec.size_bytes
    return Profile(
        Path(name).name.split(".")[0],
        "device" if on_device else "cpu",
        tuple(TensorProfile(spec, at, layer) for spec, at, layer in zip(specs, ready, layer_of, strict=True)),
        tuple(
            Layer(what[:MAX_NAME], end - begin, round(update_ns * size / sum(sizes)))
            for what, size, (begin, end) in zip(names, sizes, pairwise(bounds), strict=True)
        ),
        backward_ns,
        f"{name}: PyTorch profiler, {len(steps)} steps; {how}{_left_out(steps, forward_ns + backward_ns + update_ns)}",
    )


def _left_out(steps: list[_Step], parts_ns: int) -> str:
    """What part of a step is in neither pass nor in the update; in words, or nothing where that is not known.

    The host prepares the next kernel then, inputs are loaded, or, in a job of several ranks, sums are awaited.
    """
    periods = [after.began_us - before.began_us for before, after in pairwise(steps)]
    period_ns = _median_ns(periods) if periods else 0
    if period_ns <= parts_ns:
        return ""
    return f"; {1 - parts_ns / period_ns:.0%} of a step of {format_ns(period_ns)} lies between its parts and is left out"


def _median_ns(values: Sequence[float]) -> int:
    return max(0, round(statistics.median(values) * 1e3))
