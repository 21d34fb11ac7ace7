"""PyTorch's execution traces (JSON), Chakra's and those of schema 1.0.1: number, order and sizes of gradients, without times.

The gradients are those of the AccumulateGrad nodes; nodes that were given none are left out. A trace
of several iterations is cut at the optimizer's steps, and its iterations must be equal. The caller
gives forward and backward time together; backward is two thirds of it, divided evenly among the
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NS, MAX_TENSORS, need_int
from gradlane.core.profile import DTYPE_BYTES, Layer, Profile, TensorProfile, TensorSpec
from gradlane.errors import FormatError
from gradlane.trace.events import ACCUMULATE, DTYPES, MARK, OPTIMIZER_STEP
from gradlane.trace.kineto import MAX_DIMENSIONS
from gradlane.trace.passes import SEVERAL_PASSES
from gradlane.trace.source import MAX_SHAPE, named, need_few_objects

_THREAD = "[pytorch|profiler|execution_trace|thread]"
_NO_TENSOR = ("nullptr", "None")  # types of what is given where there is no gradient


class _Node(msgspec.Struct):
    id: int = 0
    name: str = ""
    ctrl_deps: Any = None  # the id of the node that it is within
    parent: Any = None  # the same in 1.0.1
    inputs: msgspec.Raw = msgspec.Raw()  # read for gradients alone
    input_shapes: msgspec.Raw = msgspec.Raw()  # 1.0.1 has them beside the inputs, later schemas within
    input_types: msgspec.Raw = msgspec.Raw()

    @property
    def within(self) -> object:
        return self.ctrl_deps if self.parent is None else self.parent


class _Trace(msgspec.Struct):
    schema: str
    nodes: list[_Node]


def is_it(head: bytes) -> bool:
    return b'"schema"' in head and (b"chakra" in head or b'"nodes"' in head)


def read(data: bytes, name: str, tensors: Sequence[TensorSpec] | None, compute_ns: int | None) -> Profile:
    sizes, collectives, without_gradient = read_sizes(data, name)
    if compute_ns is None:
        raise FormatError(f"{name}: a Chakra trace has no times; give the length of forward and backward (--compute 300ms)")
    need_int("compute_ns", compute_ns, 1, MAX_NS)
    specs = named(name, sizes, tensors)
    backward_ns = compute_ns * 2 // 3
    count = len(specs)
    left_out = f"; {without_gradient} parameters without a gradient are left out" if without_gradient else ""
    bounds = [(compute_ns - backward_ns) * layer // count for layer in range(count + 1)]
    return Profile(
        name.split(".")[0],
        "unstated",
        tuple(TensorProfile(spec, backward_ns * (index + 1) // count, count - 1 - index) for index, spec in enumerate(specs)),
        tuple(Layer(f"layer{index}", end - begin) for index, (begin, end) in enumerate(pairwise(bounds))),
        backward_ns,
        f"{name}: Chakra sizes and order ({collectives} all-reduces in it); times given, shared out evenly{left_out}",
    )


def read_sizes(data: bytes, name: str) -> tuple[list[tuple[int, str]], int, int]:
    """The gradients of one iteration.

    Returns:
        (size_bytes, dtype) of each gradient in order of readiness, the number of all-reduce
        operations, and how many parameters of the first iteration were given no gradient.
    """
    need_few_objects(data, name)
    try:
        nodes = msgspec.json.decode(data, type=_Trace).nodes
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{name}: not a Chakra trace: {error}") from None
    iterations: list[list[tuple[int, str]]] = [[]]
    without_gradient = 0
    numbered = sorted(enumerate(nodes), key=lambda placed: placed[1].id)  # numbered as they begin
    for (_, before), (place, node) in pairwise(numbered):
        if node.id == before.id:
            raise FormatError(f"{name}: a second node {node.id}; give the trace of one rank", f"$.nodes[{place}]")
    # what runs on the script's threads between gradients, outside of backward operations
    scripts, between = _scripts([node for _, node in numbered]), None
    is_cut = any(node.name.startswith(OPTIMIZER_STEP) for node in nodes)
    for place, node in numbered:
        if node.name == ACCUMULATE:
            size = _size(node, f"$.nodes[{place}]", name)
            if size is not None:
                if between is not None:
                    said = SEVERAL_PASSES if is_cut else f"{SEVERAL_PASSES}. Without {OPTIMIZER_STEP} nothing tells steps apart"
                    raise FormatError(f"{name}: iteration {len(iterations) - 1}: {between.name} {said}")
                iterations[-1].append(size)
            elif len(iterations) == 1:
                without_gradient += 1
        elif node.name.startswith(OPTIMIZER_STEP):
            iterations.append([])
            between = None
        elif (
            iterations[-1]
            and isinstance(node.within, int)
            and node.within in scripts
            and "::" in node.name
            and not node.name.startswith(MARK)
        ):
            between = node
    iterations = [sizes for sizes in iterations if sizes]
    if not iterations:
        raise FormatError(f"{name}: no {ACCUMULATE} nodes with a gradient in it; record a training step")
    for number, sizes in enumerate(iterations):
        if sizes != iterations[0]:
            raise FormatError(
                f"{name}: iteration {number} has {len(sizes)} gradients, the first has {len(iterations[0])}, or others; "
                "record whole iterations that are alike"
            )
    if len(iterations[0]) > MAX_TENSORS:
        raise FormatError(f"{name}: more than {MAX_TENSORS} gradients")
    return iterations[0], sum(node.name == "nccl:all_reduce" for node in nodes), without_gradient


def _scripts(nodes: Sequence[_Node]) -> set[int]:
    """The threads, by their nodes, that step optimizers; in a trace without such steps the thread of the first operation.

    Args:
        nodes: in the order in which they begin.
    """
    stepping = {node.within for node in nodes if node.name.startswith(OPTIMIZER_STEP) and isinstance(node.within, int)}
    if stepping:
        return stepping
    threads = {node.id for node in nodes if node.name == _THREAD}
    begun = (node.within for node in nodes if "::" in node.name)
    return set(islice((within for within in begun if isinstance(within, int) and within in threads), 1))


def _size(node: _Node, place: str, name: str) -> tuple[int, str] | None:
    """(size_bytes, dtype) of the gradient of an AccumulateGrad; None if it was given none."""
    if max(len(node.inputs), len(node.input_shapes), len(node.input_types)) > MAX_SHAPE:
        raise FormatError(f"{name}: a gradient whose shape takes more than {MAX_SHAPE} bytes to describe", place)
    try:
        inputs = msgspec.json.decode(node.inputs, type=dict[str, Any] | list[Any])
        if isinstance(inputs, list):
            shapes, types = (msgspec.json.decode(each, type=list[Any]) for each in (node.input_shapes, node.input_types))
            inputs = {"values": inputs, "shapes": shapes, "types": types}
        kind = str(inputs["types"][0])
        if any(missing in kind for missing in _NO_TENSOR):
            return None
        elements, element_bytes = int(inputs["values"][0][3]), int(inputs["values"][0][4])
        shape = [int(length) for length in inputs["shapes"][0]]
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
        TypeError,
        IndexError,
        KeyError,
        ValueError,
        OverflowError,
    ):
        raise FormatError(f"{name}: a gradient whose shape cannot be read", place) from None
    dtype = DTYPES.get(kind.removeprefix("Tensor(").removesuffix(")"))
    if dtype is None or DTYPE_BYTES[dtype] != element_bytes:
        got = f"got a gradient of {kind!r:.60} with {element_bytes!s:.20} bytes an element"
        raise FormatError(f"{name}: {got}, expected a tensor of {', '.join(DTYPES)}", place)
    size_bytes = elements * element_bytes
    lengths_can_be = len(shape) <= MAX_DIMENSIONS and all(0 <= length <= MAX_BYTES for length in shape)
    if not 0 < size_bytes <= MAX_BYTES or not lengths_can_be or math.prod(shape) != elements:
        raise FormatError(f"{name}: a gradient of shape {shape!s:.60} and {elements!s:.30} elements", place)
    return size_bytes, dtype
