"""Recorder: the times of what happens in a session, and the profile that is made from them.

An event costs one tuple, and the last `KEEP` iterations are kept. Times are nanoseconds of the
monotonic clock, which ranks on one host share. The training thread writes here, and, for messages,
whichever thread holds the session's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Kind, Span, Timeline

KEEP = 64  # iterations
LEAST_STABLE = 5  # iterations before a profile may count as stable
STABLE = 0.05  # part of the backward pass by which times of nine in ten gradients may differ

Row = tuple[Kind, int, int, int, int]
"""A span: kind, iteration, subject (a tensor or message; -1 for none), start and end in ns."""

_Rows = tuple[Kind, int, Sequence[int], int, int]
"""A span of each of several subjects, which differ in nothing else."""

now_ns = time.monotonic_ns


class Waited(threading.local):
    """`total_ns`: for how long the calling thread has waited so far."""

    total_ns = 0


blocked = Waited()
"""For sums, of all sessions."""


class Recorder:
    """Spans of the last iterations of one session."""

    def __init__(self) -> None:
        self._elsewhere: Callable[[bool], list[Row]] = lambda last: []
        self._iterations: deque[list[_Rows]] = deque(maxlen=KEEP)
        self._spans: list[_Rows] = []

    def begin(self) -> None:
        """Begin a new iteration: the spans that follow are kept with it."""
        self._spans = []
        self._iterations.append(self._spans)

    def add(self, kind: Kind, iteration: int, subject: int, start_ns: int, end_ns: int) -> None:
        """Add a span; its fields are those of `Row`."""
        self._spans.append((kind, iteration, (subject,), start_ns, end_ns))

    def add_each(self, kind: Kind, iteration: int, subjects: Sequence[int], start_ns: int, end_ns: int) -> None:
        """Add the same span for each of `subjects`, at the price of one."""
        self._spans.append((kind, iteration, subjects, start_ns, end_ns))

    def note_elsewhere(self, rows: Callable[[bool], list[Row]]) -> None:
        """More spans are kept by somebody else: `rows` gives those of the last iteration (True) or of all."""
        self._elsewhere = rows

    def last(self) -> list[Row]:
        """The spans since the last `begin`, which is at the start of a backward pass."""
        return [*_each(self._spans), *self._elsewhere(True)]

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the last `begin`."""
        return any(kind == "update" for kind, *_ in reversed(self._spans))

    def forget(self, iteration: int) -> None:
        """Drop all spans, since the plan changed before `iteration` and a timeline is of one plan.

        The first span after that is a `switch`, which marks the change.
        """
        now = now_ns()
        self._spans = [("switch", iteration, (-1,), now, now)]
        self._iterations.clear()
        self._iterations.append(self._spans)

    def timeline(self, plan: str, rank: int) -> Timeline:
        """Make a timeline of the kept iterations.

        Args:
            plan: fingerprint of the plan that they ran under.
            rank: of this process.
        """
        rows = [row for rows in list(self._iterations) for row in _each(rows) if row[1] >= 0]
        spans = [Span(*row) for row in (*rows, *self._elsewhere(False))]
        return Timeline(plan, rank, tuple(sorted(spans, key=lambda span: span.start_ns)))


def _each(spans: Sequence[_Rows]) -> list[Row]:
    # of a copy: another thread may add one
    return [(kind, iteration, one, start, end) for kind, iteration, many, start, end in list(spans) for one in many]


class ProfileBuilder:
    """Makes a profile from a few iterations: for each tensor the medians over the iterations.

    A gradient's readiness counts from the time at which the gradient of the model's output was
    ready. The forward pass is cut into layers at the first uses of parameters. A layer runs from
    the first use of its module's parameters to the first use of the next one's, so that the layers
    together are the whole pass.

    Args:
        specs: the model's tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = list(specs)
        self._ready: dict[str, list[int]] = {spec.name: [] for spec in specs}
        self._used: dict[str, list[int]] = {spec.name: [] for spec in specs}
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._update: list[int] = []
        self._uncovered: list[int] = []

    def ready(self, name: str, since_backward_ns: int) -> None:
        """Note how long after the start of the backward pass the gradient of `name` was ready."""
        self._ready[name].append(since_backward_ns)

    def ready_together(self, names: Iterable[str], since_backward_ns: int) -> None:
        """As `ready`, for gradients that are handled together."""
        for name in names:
            self.ready(name, since_backward_ns)

    def used(self, name: str, since_forward_ns: int) -> None:
        """Note how long after the start of the forward pass parameter `name` was first used."""
        self._used[name].append(since_forward_ns)

    def passed(self, forward_ns: int, backward_ns: int) -> None:
        """Note how long one iteration's passes took."""
        self._forward.append(forward_ns)
        self._backward.append(backward_ns)

    def updated(self, update_ns: int) -> None:
        """Note how long one `optimizer.step()` took."""
        self._update.append(update_ns)

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
        return Profile(model, device, tensors, layers, backward_ns, source, _median(self._uncovered))

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
        starts[0] = 0
        ends = [*starts[1:], max(_median(self._forward), starts[-1])]
        update_ns = _median(self._update)
        total_bytes = sum(size_of.values())
        layers = tuple(
            Layer(name, end - start, update_ns * size // total_bytes)
            for name, start, end, size in zip(names, starts, ends, sizes, strict=True)
        )
        return layer_of, layers


def _median(values: list[int]) -> int:
    return round(median(values)) if values else 0
