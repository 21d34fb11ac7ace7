"""MG-WFBP's authors' logs.

Each row is `[index, parameters, backward us, all-reduce us(, merged us)]`, in forward order.

A layer's weight and bias have one row each, with the same time; they are one tensor here, as the
paper counts. The forward pass takes half of the backward pass, as the authors assume. The file's
last complete listing counts: the first was printed before measuring.
"""

from __future__ import annotations

import re
from pathlib import Path

from gradlane.core.fields import MAX_BYTES, MAX_NS, MAX_TENSORS
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import FormatError
from gradlane.trace.source import lines, load, number_of, time_ns

_ROW = re.compile(r"\[(\d{1,9}), ([^,\]]{1,20}), ([^,\]]{1,20}), [^\]]{1,60}\]\s*$")
_OSU = re.compile(r"\s*(?:\d+,)?(\d{1,18})\s+([0-9.]{1,20})\s*$")


def is_it(head: bytes) -> bool:
    return re.search(rb"\[0, \d{1,20}, [0-9.]{1,20}, [0-9.]", head) is not None


def read(data: bytes, name: str) -> Profile:
    rows: list[tuple[int, int]] = []  # (parameters, backward in ns) in forward order
    complete: list[tuple[int, int]] = []  # of the listing before, which the last one may not reach
    for number, line in lines(data):
        match = _ROW.search(line)
        if match is None:
            if line.strip() and "[" in line and "distributed.cpp" in line:
                raise FormatError(
                    f"{name}: got {line[-60:]!r}, expected [index, parameters, backward us, ...]", f"line {number}"
                )
            continue
        place = f"line {number}"
        index = int(match.group(1))
        if index == 0:
            complete, rows = max(rows, complete, key=len), []  # of equal ones the later
        if index != len(rows):
            raise FormatError(f"{name}: got row {index}, expected row {len(rows)}", place)
        if index >= MAX_TENSORS:
            raise FormatError(f"{name}: more than {MAX_TENSORS} rows", place)
        parameters = number_of(match.group(2), place, "parameters", MAX_BYTES / 4)
        if parameters < 1 or parameters != int(parameters):
            raise FormatError(f"{name}: parameters: got {match.group(2)}, expected a whole number above 0", place)
        rows.append((int(parameters), time_ns(match.group(3), 1e3, place, "backward time")))
    rows = max(rows, complete, key=len)  # a log may be cut short
    if not rows:
        raise FormatError(f"{name}: no rows of [index, parameters, backward us, ...]")
    layers: list[tuple[int, int]] = []
    index = 0
    while index < len(rows):
        parameters, took = rows[index]
        if index + 1 < len(rows) and rows[index + 1][1] == took:
            parameters += rows[index + 1][0]
            index += 1
        layers.append((parameters, took))
        index += 1
    tensors, now = [], 0
    for place_in_forward in range(len(layers) - 1, -1, -1):
        parameters, took = layers[place_in_forward]
        now += took
        if now > MAX_NS:
            raise FormatError(f"{name}: the backward pass takes more than {MAX_NS} ns")
        tensors.append(TensorProfile(TensorSpec(f"layer{place_in_forward}", 4 * parameters), now, place_in_forward))
    forward = tuple(Layer(f"layer{index}", took // 2) for index, (_, took) in enumerate(layers))
    source = f"{name}: a log of MG-WFBP's Caffe; forward taken as half of backward"
    return Profile(Path(name).stem, "unstated", tuple(tensors), forward, now, source)


def read_allreduce(path: str | Path) -> tuple[tuple[int, int], ...]:
    """(size in bytes, time in ns) of each line of an OSU all-reduce latency log, for `fit_network`."""
    data = load(path)
    points = []
    for number, line in lines(data):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _OSU.match(line)
        if match is None:
            raise FormatError(f"{path}: got {line[:60]!r}, expected a size and a latency in us", f"line {number}")
        points.append((int(match.group(1)), time_ns(match.group(2), 1e3, f"line {number}", "latency")))
    if not points:
        raise FormatError(f"{path}: no lines of a size and a latency in us")
    return tuple(points)
