"""PyTorch profiler traces (Kineto's Chrome trace JSON), of a device or of the CPU, of one or more steps.

A gradient is ready when autograd has accumulated it: on a device, at the end of the last kernel launched before its
AccumulateGrad; on the CPU, at the end of AccumulateGrad itself. The trace has the sizes of gradients (record_shapes)
and not their names. It says which kernels ran and not whose parameters they used, so that a layer is what became
ready at once, and the forward pass is shared out among layers as the backward pass is. Steps are those of
`profiler.step()`; each time is the median over them.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gradlane.core.checking import MAX_BYTES, MAX_NS, MAX_TENSORS
from gradlane.core.profile import DTYPE_BYTES, Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import FormatError
from gradlane.trace.source import increasing, named

ACCUMULATE = "torch::autograd::AccumulateGrad"
_DTYPES = {"float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}
_LAUNCHES = {"Runtime", "cuda_runtime", "cuda_driver"}
_KERNELS = {"Kernel", "kernel"}


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: Any = None
    args: dict[str, Any] = {}

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


class _Step(NamedTuple):
    forward_us: float
    ready_us: list[float]
    backward_us: float
    update_us: float
    sizes: list[tuple[int, str]]


def is_it(head: bytes) -> bool:
    return b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProperties"' in head)


def read(data: bytes, name: str, tensors: Sequence[TensorSpec] | None = None) -> Profile:
    try:
        events = msgspec.json.decode(data, type=_Trace).trace_events
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{name}: not a PyTorch profiler trace: {error}") from None
    spans = []
    for place, event in enumerate(events):
        if event.ph != "X":
            continue
        if not (math.isfinite(event.ts) and 0 <= event.dur <= MAX_NS / 1e3):
            raise FormatError(
                f"{name}: ts {event.ts}, dur {event.dur}: expected a length of 0 or more", f"$.traceEvents[{place}]"
            )
        spans.append(event)
    spans.sort(key=lambda event: event.ts)
    windows = [event for event in spans if event.name.startswith("ProfilerStep")]
    kernels = _kernels(spans)
    gradients = [event for event in spans if event.name == ACCUMULATE]
    steps = []
    for begin, end, label in [(w.ts, w.end, w.name) for w in windows] or [(-math.inf, math.inf, "the trace")]:
        mine = [event for event in gradients if begin <= event.ts < end]
        if mine:
            inside = [event for event in spans if begin <= event.ts < end]
            steps.append(_step(inside, mine, kernels, f"{name}: {label}"))
    if not steps:
        raise FormatError(f"{name}: no {ACCUMULATE} in it; profile steps that train, with activities of the CPU too")
    for number, step in enumerate(steps):
        if step.sizes != steps[0].sizes:
            raise FormatError(
                f"{name}: step {number} has {len(step.sizes)} gradients, the first has {len(steps[0].sizes)}, or others; "
                "record steps that are alike"
            )
    return _profile(name, steps, tensors, bool(kernels.launched))


def _kernels(spans: list[_Event]) -> _Kernels:
    by_correlation = {
        event.args.get("correlation"): event for event in spans if event.cat in _KERNELS and "correlation" in event.args
    }
    launches = [
        (event.ts, by_correlation[event.args["correlation"]])
        for event in spans
        if event.cat in _LAUNCHES and event.args.get("correlation") in by_correlation
    ]
    ended: list[float] = []
    for _, kernel in launches:
        ended.append(max(kernel.end, ended[-1]) if ended else kernel.end)
    return _Kernels([at for at, _ in launches], [kernel.ts for _, kernel in launches], ended)


def _step(inside: list[_Event], gradients: list[_Event], kernels: _Kernels, where: str) -> _Step:
    thread = gradients[0].tid
    marks = [event for event in inside if event.name.startswith("autograd::engine::evaluate_function")]
    # before there were marks, backward had a thread of its own
    backward = marks or [event for event in inside if event.tid == thread and event.cat not in _LAUNCHES]
    begun = min(event.ts for event in backward)
    optimizer = [event for event in inside if event.name.startswith("Optimizer.step")]
    sizes = [_size(event, f"{where}, gradient {index}") for index, event in enumerate(gradients)]
    if not kernels.launched:
        first = min(
            (event.ts for event in inside if event.cat in ("cpu_op", "Operator") and event.name.startswith("aten::")),
            default=begun,
        )
        ready = [event.end - begun for event in gradients]
        return _Step(begun - first, ready, max(ready), sum(event.dur for event in optimizer), sizes)
    first_launch = bisect_left(kernels.launched, inside[0].ts)
    at = bisect_left(kernels.launched, begun)  # kernels of the forward pass are launched before this one
    if first_launch == at:
        raise FormatError(f"{where}: no kernel was launched before backward begins")
    forward_ended = kernels.ended[at - 1]
    ready = [kernels.ended[bisect_right(kernels.launched, event.ts) - 1] - forward_ended for event in gradients]
    update = 0.0
    for event in optimizer:
        low, high = bisect_left(kernels.launched, event.ts), bisect_right(kernels.launched, event.end)
        if low < high:
            update += kernels.ended[high - 1] - kernels.started[low]
    return _Step(forward_ended - kernels.started[first_launch], ready, max(ready), update, sizes)


def _size(event: _Event, where: str) -> tuple[int, str]:
    shapes, kinds = event.args.get("Input Dims"), event.args.get("Input type", ["float"])
    try:
        shape = [int(length) for length in shapes[0]]  # type: ignore[index]
        dtype = _DTYPES[kinds[0]]
        size_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    except (TypeError, IndexError, KeyError, ValueError, OverflowError):
        raise FormatError(f"{where}: no shape and type that can be read; profile with record_shapes=True") from None
    if not 0 < size_bytes <= MAX_BYTES or any(length < 1 for length in shape):
        raise FormatError(f"{where}: a gradient of shape {shape}")
    return size_bytes, dtype


def _profile(name: str, steps: list[_Step], tensors: Sequence[TensorSpec] | None, on_device: bool) -> Profile:
    if len(steps[0].sizes) > MAX_TENSORS:
        raise FormatError(f"{name}: more than {MAX_TENSORS} gradients")
    specs = named(steps[0].sizes, tensors, "gradient")

    def median_ns(values: Sequence[float]) -> int:
        return max(0, round(statistics.median(values) * 1e3))

    ready = increasing([median_ns([step.ready_us[index] for step in steps]) for index in range(len(specs))])
    backward_ns = max(ready[-1], median_ns([step.backward_us for step in steps]))
    forward_ns = median_ns([step.forward_us for step in steps])
    update_ns = median_ns([step.update_us for step in steps])
    ends = sorted(set(ready))  # of a layer's backward pass
    if forward_ns > MAX_NS or backward_ns > MAX_NS or not ends[-1]:
        raise FormatError(f"{name}: a forward pass of {forward_ns} ns and a backward pass of {backward_ns} ns")
    size_of: dict[int, int] = dict.fromkeys(ends, 0)
    for at, spec in zip(ready, specs, strict=True):
        size_of[at] += spec.size_bytes
    whole = sum(size_of.values())
    layers, before = [], 0
    for number, end in enumerate(ends):
        share = (end - before) / ends[-1]
        layers.append(
            Layer(f"layer{len(ends) - 1 - number}", round(forward_ns * share), round(update_ns * size_of[end] / whole))
        )
        before = end
    layer_of = {end: len(ends) - 1 - number for number, end in enumerate(ends)}
    return Profile(
        Path(name).name.split(".")[0],
        "device" if on_device else "cpu",
        tuple(TensorProfile(spec, at, layer_of[at]) for spec, at in zip(specs, ready, strict=True)),
        tuple(reversed(layers)),
        backward_ns,
        f"{name}: PyTorch profiler, {len(steps)} steps; forward shared out among layers as backward is",
    )
