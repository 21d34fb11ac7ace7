"""PipeDream's profile graphs: a line for each module, with forward and backward in ms, then edges.

    node2 -- Conv2d(3, 64, ...) -- forward_compute_time=22.307, backward_compute_time=24.613,
    activation_size=..., ...
    <tab>node1 -- node2

Nodes without incoming edges are inputs; their time is data loading and is dropped. A module's
parameters are one tensor, the finest grain of the format. Modules run in topological order, ties by
number.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from pathlib import Path

from gradlane.core.fields import MAX_BYTES, MAX_NAME, MAX_NS, MAX_TENSORS
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import FormatError
from gradlane.trace.source import lines, number_of, time_ns

# in two parts, of which each can match in few ways: a line that nearly matches one pattern of both takes minutes
_NODE = re.compile(r"node(\d{1,9}) -- (.*)")
_TIMES = " -- forward_compute_time="
_NUMBERS = re.compile(
    r"([^,]+), backward_compute_time=([^,]+), activation_size=.*, parameter_size=([^,\s]+)\s*(?:-- stage_id=\d+\s*)?"
)
_EDGE = re.compile(r"\s+node(\d{1,9}) -- node(\d{1,9})\s*")


def is_it(head: bytes) -> bool:
    return re.search(rb"node\d{1,9} -- .{1,1000} -- forward_compute_time=", head) is not None


def read(data: bytes, name: str) -> Profile:
    nodes: dict[int, tuple[str, int, int, int]] = {}  # what, forward and backward in ns, bytes
    after: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    for number, line in lines(data):
        place = f"line {number}"
        head, _, tail = line.rpartition(_TIMES)
        if (node := _NODE.fullmatch(head)) and (numbers := _NUMBERS.fullmatch(tail)):
            if int(node.group(1)) in nodes:
                raise FormatError(f"{name}: node{node.group(1)} a second time", place)
            if len(nodes) == MAX_TENSORS:
                raise FormatError(f"{name}: more than {MAX_TENSORS} nodes", place)
            nodes[int(node.group(1))] = (
                node.group(2),
                time_ns(numbers.group(1), 1e6, place, "forward time"),
                time_ns(numbers.group(2), 1e6, place, "backward time"),
                _bytes(numbers.group(3), place, name),
            )
        elif edge := _EDGE.fullmatch(line):
            before, behind = int(edge.group(1)), int(edge.group(2))
            for end in (before, behind):
                if end not in nodes:
                    raise FormatError(f"{name}: an edge of node{end}, which is not there", place)
            after.setdefault(before, []).append(behind)
            missing[behind] = missing.get(behind, 0) + 1
        elif line.strip():
            raise FormatError(f"{name}: got {line[:60]!r}, expected a node or an edge", place)
    if len(nodes) > 1 and (alone := nodes.keys() - after.keys() - missing.keys()):
        raise FormatError(f"{name}: node{min(alone)} has no edge; is the file cut short?")
    inputs = {node for node in nodes if node not in missing and not nodes[node][3]}
    order = _topological(nodes.keys(), after, missing, name)
    modules = [nodes[node] for node in order if node not in inputs]
    tensors, now = [], 0
    for index in range(len(modules) - 1, -1, -1):
        what, _, backward_ns, size_bytes = modules[index]
        now += backward_ns
        if now > MAX_NS:
            raise FormatError(f"{name}: the backward pass takes more than {MAX_NS} ns")
        if size_bytes:
            tensors.append(TensorProfile(TensorSpec(f"{index}.{what}"[:MAX_NAME], size_bytes), now, index))
    if not tensors:
        raise FormatError(f"{name}: no node has parameters")
    layers = tuple(Layer(f"{index}.{what}"[:MAX_NAME], forward_ns) for index, (what, forward_ns, _, _) in enumerate(modules))
    return Profile(
        Path(name).stem.removesuffix("_graph"),
        "unstated",
        tuple(tensors),
        layers,
        now,
        f"{name}: a graph of PipeDream's profiler, which names no device; no update times",
    )


def _bytes(text: str, place: str, name: str) -> int:
    size_bytes = number_of(text, place, "parameter size", MAX_BYTES)
    if size_bytes % 4:
        raise FormatError(f"{name}: parameter size: got {text:.40} bytes, expected whole 32-bit elements", place)
    return int(size_bytes)


def _topological(nodes: Iterable[int], after: dict[int, list[int]], missing: dict[int, int], name: str) -> list[int]:
    waits = dict(missing)
    free = [node for node in nodes if node not in waits]
    heapq.heapify(free)
    order = []
    while free:
        node = heapq.heappop(free)
        order.append(node)
        for behind in after.get(node, ()):
            waits[behind] -= 1
            if not waits[behind]:
                heapq.heappush(free, behind)
    if any(waits.values()):
        raise FormatError(f"{name}: the graph has a cycle")
    return order
