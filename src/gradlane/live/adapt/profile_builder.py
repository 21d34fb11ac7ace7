"""ProfileBuilder: makes a profile of what a session has measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from msgspec import UNSET

from gradlane.core.profile import BEFORE_FIRST_USE, UNTIL_BACKWARD, Layer, Profile, TensorProfile, TensorSpec

LEAST_STABLE = 5  # iterations before a profile may count as stable
STABLE = 0.05  # part of the backward pass: times that differ by no more are the same


class ProfileBuilder:
    """Makes a profile from a few iterations: for each tensor the medians over the iterations.

    A gradient's readiness counts from the time at which the gradient of the model's output was
    ready. The forward pass is cut into layers at the first uses of parameters. A layer runs from
    the first use of its module's parameters to the first use of the next one's. A layer without tensors
    comes first, which runs until any is used: a model may prepare its inputs. Another one comes last, from
    the end of the pass to the backward pass: the loss, metrics, and with gradient accumulation the other passes.

    Args:
        specs: the model's tensors, as they travel.
        wire_dtype: as what float32 gradients travel; None if they travel as they are.
    """

    def __init__(self, specs: Sequence[TensorSpec], wire_dtype: str | None = None) -> None:
        self.specs, self._wire_dtype = list(specs), wire_dtype
        self._ready: dict[str, list[int]] = {spec.name: [] for spec in specs}
        self._used: dict[str, list[int]] = {spec.name: [] for spec in specs}
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._until_backward: list[int] = []
        self._update: list[int] = []
        self._between: list[int] = []
        self._uncovered: list[int] = []

    def ready(self, names: Iterable[str], since_backward_ns: int) -> None:
        """Note how long after the start of the backward pass the gradients of `names` were ready."""
        for name in names:
            self._ready[name].append(since_backward_ns)

    def used(self, name: str, since_forward_ns: int) -> None:
        """Note how long after the start of the forward pass parameter `name` was first used."""
        self._used[name].append(since_forward_ns)

    def passed(self, forward_ns: int, backward_ns: int, until_backward_ns: int = 0) -> None:
        """Note how long one iteration's passes took, and what lies between them."""
        self._forward.append(forward_ns)
        self._backward.append(backward_ns)
        self._until_backward.append(until_backward_ns)

    def between(self, uncovered_ns: int) -> None:
        """Note how long the script computed between the backward pass and the first `optimizer.step()`."""
        self._between.append(uncovered_ns)

    def updated(self, update_ns: int, is_first: bool = True) -> None:
        """Note how long one `optimizer.step()` took, the first of an iteration or another one."""
        if is_first:
            self._update.append(0)
        if self._update:
            self._update[-1] += update_ns

    def rested(self, uncovered_ns: int) -> None:
        """Note how long after an `optimizer.step()` the next forward pass began."""
        self._uncovered.append(uncovered_ns)

    def is_stable(self) -> bool:
        """Whether gradients were ready at the same times in the last `LEAST_STABLE` - 1 iterations.

        The times of a gradient are the same if they differ by at most the part `STABLE` of the
        backward pass; nine gradients in ten must have the same times.
        """
        end = _median(self._backward)
        if len(self._backward) < LEAST_STABLE - 1:
            return False
        last = [times[-(LEAST_STABLE - 1) :] for times in self._ready.values() if times]
        spreads = sorted(max(times) - min(times) for times in last)
        return bool(spreads) and spreads[len(spreads) * 9 // 10] <= STABLE * end

    def ready_medians(self) -> list[int]:
        """The readiness of each of `specs`, in ns; without one, the end of the backward pass."""
        end = _median(self._backward)
        return [min(_median(self._ready[spec.name]), end) if self._ready[spec.name] else end for spec in self.specs]

    def build(self, model: str, device: str, ready_ns: Sequence[int]) -> Profile:
        """Make the profile.

        Args:
            model: name of the model.
            device: name of the device.
            ready_ns: the readiness of each of `specs`: `ready_medians`, or its average over ranks.
        """
        order = sorted(range(len(self.specs)), key=lambda index: (ready_ns[index], index))
        layer_of, layers = self._layers()
        tensors = tuple(TensorProfile(self.specs[index], ready_ns[index], layer_of[self.specs[index].name]) for index in order)
        backward_ns = max(_median(self._backward), ready_ns[order[-1]])
        source = f"live, median of {len(self._backward)} iterations"
        uncovered_ns = _median(self._between) + _median(self._uncovered)
        return Profile(model, device, tensors, layers, backward_ns, source, uncovered_ns, self._wire_dtype or UNSET)

    def _layers(self) -> tuple[dict[str, int], tuple[Layer, ...]]:
        # a parameter whose use was never seen counts as used at once
        first_use = {name: _median(times) for name, times in self._used.items()}
        size_of = {spec.name: spec.size_bytes for spec in self.specs}
        layer_of: dict[str, int] = {}
        names: list[str] = []
        starts: list[int] = []
        sizes: list[int] = []
        for name in sorted(first_use, key=lambda name: first_use[name]):
            owner = name.rpartition(".")[0] or "(root)"
            if not names or names[-1] != owner:
                names.append(owner)
                starts.append(first_use[name])
                sizes.append(0)
            layer_of[name] = len(names) - 1
            sizes[-1] += size_of[name]
        ends = [*starts[1:], max(_median(self._forward), starts[-1])]
        update_ns = _median(self._update)
        total_bytes = sum(size_of.values())
        layers = tuple(
            Layer(name, end - start, update_ns * size // total_bytes)
            for name, start, end, size in zip(names, starts, ends, sizes, strict=True)
        )
        until_backward_ns = _median(self._until_backward)
        if until_backward_ns:
            layers = (*layers, Layer(UNTIL_BACKWARD, until_backward_ns))
        if starts[0]:
            layers = (Layer(BEFORE_FIRST_USE, starts[0]), *layers)
            layer_of = {name: layer + 1 for name, layer in layer_of.items()}
        return layer_of, layers


def _median(values: list[int]) -> int:
    return round(median(values)) if values else 0
