"""Profile: one training iteration of one model on one kind of device, without any network.

Policies plan with it and the simulator replays it. It holds no weights and no code. Tensors stand
in the order in which the backward pass makes their gradients ready, layers in the order in which
the forward pass runs them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gradlane.core.fields import MAX_BYTES, MAX_NAME, MAX_NS, MAX_TENSORS, need, need_int, need_name
from gradlane.core.wire_dtype import WIRE_DTYPES
from gradlane.errors import InputError

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, size and element type of one gradient tensor.

    Attributes:
        name: the parameter's name.
        size_bytes: a multiple of the element size.
        dtype: a key of `DTYPE_BYTES`.
    """

    name: str
    size_bytes: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        need_name("name", self.name)
        need_int("size_bytes", self.size_bytes, 1, MAX_BYTES)
        if self.dtype not in DTYPE_BYTES:
            need(False, "dtype", self.dtype, f"one of {', '.join(DTYPE_BYTES)}")
        if self.size_bytes % DTYPE_BYTES[self.dtype]:
            need(False, "size_bytes", self.size_bytes, f"a multiple of the {DTYPE_BYTES[self.dtype]} bytes of a {self.dtype}")

    def on_wire(self, wire_dtype: str | None) -> TensorSpec:
        """The same tensor as it travels: float32 as `wire_dtype`, anything else as it is.

        Args:
            wire_dtype: "bfloat16" or "float16"; None leaves float32 as it is.
        """
        if wire_dtype is None or self.dtype != "float32":
            return self
        elements = self.size_bytes // DTYPE_BYTES["float32"]
        return TensorSpec(self.name, elements * DTYPE_BYTES[wire_dtype], wire_dtype)


class TensorProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One gradient tensor as profiled.

    Attributes:
        spec: name, size and dtype.
        ready_ns: when the gradient is ready, in ns from the start of the backward pass.
        layer: the layer whose forward pass is the first to use the parameter, as an index into
            `Profile.layers`.
    """

    spec: TensorSpec
    ready_ns: int
    layer: int

    def __post_init__(self) -> None:
        need_int("ready_ns", self.ready_ns, 0, MAX_NS)
        need_int("layer", self.layer, 0, MAX_TENSORS)


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the forward pass.

    Attributes:
        name: the module's name.
        forward_ns: time of its forward pass.
        update_ns: time of the optimizer's update of the parameters that this layer is the first to
            use.
    """

    name: str
    forward_ns: int
    update_ns: int = 0

    def __post_init__(self) -> None:
        need_name("name", self.name)
        need_int("forward_ns", self.forward_ns, 0, MAX_NS)
        need_int("update_ns", self.update_ns, 0, MAX_NS)


BEFORE_FIRST_USE = "(before the first use)"
"""Name of the layer without tensors that a measured profile has for what a forward pass does before it uses any parameter."""
UNTIL_BACKWARD = "(until backward)"
"""Name of the layer without tensors that a measured profile has for what the script does between its passes."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One iteration of a model on a device.

    Sizes and dtypes are those that travel, see `with_wire_dtype`.

    Attributes:
        model, device: names, for people.
        tensors: in order of gradient readiness.
        layers: in forward order.
        backward_ns: length of the whole backward pass; no gradient is ready later.
        source: where the numbers come from.
        uncovered_ns: the rest of an iteration, which neither passes nor updates cover: the host loads
            inputs, clips gradients, logs, or waits for the device. It counts as if all of it lay between the
            updates and the next forward pass; messages travel meanwhile.
        wire_dtype: as what float32 gradients travel; unset if they travel as they are.
    """

    model: str
    device: str
    tensors: tuple[TensorProfile, ...]
    layers: tuple[Layer, ...]
    backward_ns: int
    source: str = "unstated"
    uncovered_ns: int = 0
    wire_dtype: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        need_name("model", self.model)
        need_name("device", self.device)
        need(0 < len(self.tensors) <= MAX_TENSORS, "tensors", len(self.tensors), f"1 to {MAX_TENSORS} of them")
        need(0 < len(self.layers) <= MAX_TENSORS, "layers", len(self.layers), f"1 to {MAX_TENSORS} of them")
        total_bytes = sum(tensor.spec.size_bytes for tensor in self.tensors)
        need(total_bytes <= MAX_BYTES, "tensors", total_bytes, f"at most {MAX_BYTES} bytes together, as one message may have")
        need_int("backward_ns", self.backward_ns, 0, MAX_NS)
        need_int("uncovered_ns", self.uncovered_ns, 0, MAX_NS)
        need(self.wire_dtype in (UNSET, *WIRE_DTYPES.values()), "wire_dtype", self.wire_dtype, "'bfloat16' or 'float16'")
        names = [tensor.spec.name for tensor in self.tensors]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise InputError(f"tensors: got the name {twice!r:.80} twice, expected distinct names")
        # texts are made only where there is a fault: a profile may have a hundred thousand tensors
        for index, tensor in enumerate(self.tensors):
            if tensor.layer >= len(self.layers):
                need(False, f"tensors[{index}].layer", tensor.layer, f"below {len(self.layers)}")
        for index, (before, after) in enumerate(itertools.pairwise(self.tensors)):
            if before.ready_ns > after.ready_ns:
                expected = f"at least the {before.ready_ns} of the tensor before it"
                need(False, f"tensors[{index + 1}].ready_ns", after.ready_ns, expected)
        need(self.tensors[-1].ready_ns <= self.backward_ns, "backward_ns", self.backward_ns, "the last ready_ns or more")

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors' specs, in order of readiness."""
        return tuple(tensor.spec for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(tensor.spec.size_bytes for tensor in self.tensors)

    @property
    def forward_ns(self) -> int:
        """Length of the whole forward pass."""
        return sum(layer.forward_ns for layer in self.layers)

    @property
    def update_ns(self) -> int:
        """Length of all updates together."""
        return sum(layer.update_ns for layer in self.layers)

    @property
    def compute_ns(self) -> int:
        """Forward, backward, updates and uncovered time together: the iteration time on a network without cost."""
        return self.forward_ns + self.backward_ns + self.update_ns + self.uncovered_ns

    def stretched(self, factor: float) -> Profile:
        """The same profile with every time multiplied by `factor`."""

        def at(time_ns: int) -> int:
            return round(time_ns * factor)

        return self._retimed(at, at)

    def lasting(self, step_ns: int) -> Profile:
        """The same profile with every time in proportion, so that a step without communication takes `step_ns`, exactly.

        Args:
            step_ns: 0 or more; the profile's own steps take some time.
        """

        compute_ns = self.compute_ns

        def at(time_ns: int) -> int:
            return time_ns * step_ns // compute_ns

        passed = 0

        def lasts(time_ns: int) -> int:
            nonlocal passed
            began, passed = passed, passed + time_ns
            return at(passed) - at(began)  # rounded where it begins and ends, so that rounding does not add up

        return self._retimed(at, lasts)

    def _retimed(self, at: Callable[[int], int], lasts: Callable[[int], int]) -> Profile:
        """The same profile with other times.

        Args:
            at: from when a gradient is ready to when it is ready instead.
            lasts: the same of durations; called for those of a step in turn.
        """
        tensors = tuple(msgspec.structs.replace(tensor, ready_ns=at(tensor.ready_ns)) for tensor in self.tensors)
        layers = tuple(Layer(each.name, lasts(each.forward_ns), lasts(each.update_ns)) for each in self.layers)
        backward_ns, uncovered_ns = lasts(self.backward_ns), lasts(self.uncovered_ns)
        return msgspec.structs.replace(self, tensors=tensors, layers=layers, backward_ns=backward_ns, uncovered_ns=uncovered_ns)

    def in_order_of(self, specs: Sequence[TensorSpec]) -> Profile:
        """The same profile with its tensors in another order.

        Args:
            specs: all tensors of the profile, in the order wanted.

        Returns:
            A profile in which no tensor is ready before the one ahead of it: where `specs` demands
            it, a tensor's `ready_ns` rises to that of the tensor ahead.

        Raises:
            InputError: the profile is of another model: it has no tensor of one of these names.
        """
        by_name = {tensor.spec.name: tensor for tensor in self.tensors}
        latest = 0
        tensors = []
        for spec in specs:
            seen = by_name.get(spec.name)
            if seen is None:
                raise InputError(
                    f"got a profile of {self.model} without the tensor {spec.name!r:.80}, expected one with all tensors of the "
                    "plan; it is of another model: give one of the plan's model"
                )
            latest = max(latest, seen.ready_ns)
            tensors.append(msgspec.structs.replace(seen, ready_ns=latest))
        return msgspec.structs.replace(self, tensors=tuple(tensors))

    def scaled(self, scale: float) -> Profile:
        """The same times with `scale` times the bytes, each tensor rounded to whole elements, at
        least one.

        On links of `scale` times the rate, every transfer takes as long as before; startups do not
        scale. `source` notes the scale.

        Raises:
            InputError: `scale` is not in (0, 1000].
        """
        need(0 < scale <= 1000, "scale", scale, "more than 0, at most 1000")
        if scale == 1:
            return self
        tensors = []
        for tensor in self.tensors:
            element = DTYPE_BYTES[tensor.spec.dtype]
            size_bytes = max(1, round(tensor.spec.size_bytes * scale / element)) * element
            tensors.append(msgspec.structs.replace(tensor, spec=msgspec.structs.replace(tensor.spec, size_bytes=size_bytes)))
        # `source` may not be longer than MAX_NAME
        source = f"sizes x {scale:g}; {self.source}"[:MAX_NAME]
        return msgspec.structs.replace(self, tensors=tuple(tensors), source=source)

    def with_wire_dtype(self, wire_dtype: str | None) -> Profile:
        """The same times where float32 gradients travel as `wire_dtype`, half of the bytes.

        Args:
            wire_dtype: "bfloat16" or "float16"; None leaves float32 as it is.
        """
        tensors = tuple(msgspec.structs.replace(each, spec=each.spec.on_wire(wire_dtype)) for each in self.tensors)
        if tensors == self.tensors:
            return self
        source = f"{wire_dtype} on the wire; {self.source}"[:MAX_NAME]
        return msgspec.structs.replace(self, tensors=tensors, source=source, wire_dtype=wire_dtype or UNSET)

    def gradient_bytes(self, tensor: int) -> int:
        """Bytes of a gradient as autograd makes it: twice what travels, if it travels as `wire_dtype`.

        A gradient that autograd makes in `wire_dtype` counts as a float32 one.
        """
        spec = self.tensors[tensor].spec
        return (
            spec.size_bytes
            if spec.dtype != self.wire_dtype
            else spec.size_bytes // DTYPE_BYTES[spec.dtype] * DTYPE_BYTES["float32"]
        )

    def urgency(self) -> tuple[int, ...]:
        """Rank the tensors by when the forward pass first needs them.

        Returns:
            For each tensor its rank, 0 for the most urgent. Tensors of one layer rank in reverse
            order of readiness, so that ranks are distinct.
        """
        order = sorted(range(len(self.tensors)), key=lambda t: (self.tensors[t].layer, -t))
        ranks = [0] * len(order)
        for rank, tensor in enumerate(order):
            ranks[tensor] = rank
        return tuple(ranks)
