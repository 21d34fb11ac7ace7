"""Recorder: what happened when, at the price of a tuple an event, and the Profile made from it.

Keeps the last `KEEP` iterations. Times are nanoseconds of the monotonic clock, which ranks on one host
share. Written by the training thread and, for messages, by whoever holds the session's lock.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.core.timeline import Kind, Span, Timeline

KEEP = 64

now_ns = time.monotonic_ns


class Recorder:
    """Spans of the last iterations of one session, by iteration."""

    def __init__(self) -> None:
        self._iterations: deque[list[tuple[Kind, int, int, int, int]]] = deque(maxlen=KEEP)
        self._spans: list[tuple[Kind, int, int, int, int]] = []

    def begin(self) -> None:
        """A new iteration's spans follow."""
        self._spans = []
        self._iterations.append(self._spans)

    def add(self, kind: Kind, iteration: int, subject: int, start_ns: int, end_ns: int) -> None:
        self._spans.append((kind, iteration, subject, start_ns, end_ns))

    def forget(self) -> None:
        """Drop everything: the plan changed, and a timeline is of one plan."""
        self._iterations.clear()
        self._spans = []

    def timeline(self, plan: str, rank: int) -> Timeline:
        spans = [Span(*span) for spans in list(self._iterations) for span in list(spans) if span[1] >= 0]
        return Timeline(plan, rank, tuple(sorted(spans, key=lambda span: span.start_ns)))


class ProfileBuilder:
    """Collects a few iterations and makes a Profile: medians over iterations, per tensor.

    Readiness counts from the moment at which the gradient of the model's output was ready. The forward
    pass is cut into layers at the first uses of parameters: a layer runs from the first use of its module's
    parameters to the first use of the next one's, so that the layers together are the whole pass.
    """

    def __init__(self, params: list[tuple[str, TensorSpec]]) -> None:
        self._params = params
        count = len(params)
        self._ready: list[list[int]] = [[] for _ in range(count)]
        self._used: list[list[int]] = [[] for _ in range(count)]
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._update: list[int] = []

    def ready(self, tensor: int, since_backward_ns: int) -> None:
        self._ready[tensor].append(since_backward_ns)

    def used(self, tensor: int, since_forward_ns: int) -> None:
        self._used[tensor].append(since_forward_ns)

    def passed(self, forward_ns: int, backward_ns: int) -> None:
        self._forward.append(forward_ns)
        self._backward.append(backward_ns)

    def updated(self, update_ns: int) -> None:
        self._update.append(update_ns)

    def ready_medians(self) -> list[int]:
        """For each tensor its readiness; the end of the backward pass where it never was ready."""
        end = self._median(self._backward)
        return [min(self._median(times), end) if times else end for times in self._ready]

    def build(self, model: str, device: str, ready_ns: list[int]) -> tuple[Profile, list[int]]:
        """The Profile, and for each of its tensors the index that it had here.

        ready_ns: as `ready_medians`, or the same averaged over ranks.
        """
        order = sorted(range(len(self._params)), key=lambda tensor: (ready_ns[tensor], -tensor))
        layer_of, layers = self._layers()
        tensors = tuple(TensorProfile(self._params[tensor][1], ready_ns[tensor], layer_of[tensor]) for tensor in order)
        backward_ns = max(self._median(self._backward), ready_ns[order[-1]])
        source = f"live, median of {len(self._backward)} iterations"
        return Profile(model, device, tensors, layers, backward_ns, source), order

    def _layers(self) -> tuple[list[int], tuple[Layer, ...]]:
        used = [self._median(times) if times else 0 for times in self._used]  # never seen: needed from the start
        total_bytes = sum(spec.size_bytes for _, spec in self._params)
        update_ns = self._median(self._update)
        layer_of = [0] * len(self._params)
        names: list[str] = []
        starts: list[int] = []
        sizes: list[int] = []
        for tensor in sorted(range(len(used)), key=lambda index: (used[index], index)):
            name, spec = self._params[tensor]
            owner = name.rpartition(".")[0] or "(root)"
            if not names or names[-1] != owner:
                names.append(owner)
                starts.append(used[tensor])
                sizes.append(0)
            layer_of[tensor] = len(names) - 1
            sizes[-1] += spec.size_bytes
        starts[0] = 0
        ends = [*starts[1:], max(self._median(self._forward), starts[-1])]
        layers = tuple(
            Layer(name, end - start, update_ns * size // total_bytes)
            for name, start, end, size in zip(names, starts, ends, sizes, strict=True)
        )
        return layer_of, layers

    @staticmethod
    def _median(values: list[int]) -> int:
        return round(median(values)) if values else 0
