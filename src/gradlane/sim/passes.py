"""The forward pass after communication: when each layer may run, and when the pass ends.

`ForwardPass` is the only walk over the layers. A `SimulatedWorker` runs it part by part as sums
arrive. `forward_ends` runs it at once with all arrival times known, which is how an iteration time
is found without a timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradlane.core.profile import Profile

PPM = 1_000_000


def tensors_by_layer(profile: Profile) -> list[list[int]]:
    """The tensors of each layer.

    Returns:
        For each layer of `profile` the indices of the tensors that it is the first to use.
    """
    tensors: list[list[int]] = [[] for _ in profile.layers]
    for index, tensor in enumerate(profile.tensors):
        tensors[tensor.layer].append(index)
    return tensors


class Observer(Protocol):
    """What a `ForwardPass` tells of its layers, in order of time. All times are in ns."""

    def waited(self, layer: int, start_ns: int, end_ns: int) -> None:
        """The compute thread was blocked until the tensors of `layer` arrived; -1: until all
        tensors did.
        """
        ...

    def updated(self, layer: int, start_ns: int, end_ns: int) -> None:
        """The parameters that `layer` is the first to use were updated."""
        ...

    def ran(self, layer: int, start_ns: int, end_ns: int) -> None:
        """`layer` ran forward."""
        ...


class ForwardPass:
    """The forward pass of one profile, in virtual time.

    A plan that crosses the barrier makes each layer wait for its own tensors alone (Mercury Eq. 4).
    A layer begins when the layer before it has ended and its tensors have arrived; it updates them,
    and runs. Behind the barrier the pass waits for all tensors, then updates all of them, then runs
    all layers. The profile's uncovered time comes before the first layer: after the updates behind
    the barrier, after the backward pass across it.

    The owner runs the pass in parts: `begin` once, then `run` for consecutive layers. `arrived_ns`
    of these methods has, for each layer, when the last of its tensors arrived, or a time before the
    pass for a layer without tensors. Times are in ns on the owner's clock.
    """

    def __init__(self, profile: Profile, crosses_barrier: bool, observer: Observer | None = None) -> None:
        """Prepare passes over `profile`.

        Args:
            profile: the layers and their times.
            crosses_barrier: `Plan.crosses_barrier`.
            observer: is told of each wait, update and layer; None where only the end matters.
        """
        self._layers, self._uncovered_ns = profile.layers, profile.uncovered_ns
        self._crosses_barrier = crosses_barrier
        self._observer = observer

    def begin(self, now_ns: int, arrived_ns: Sequence[int], uncovered_ppm: int = PPM, update_ppm: int = PPM) -> int:
        """Do what comes before the first layer: behind the barrier the wait and all updates, then the
        uncovered time.

        Args:
            now_ns: when the compute thread is free.
            arrived_ns: see the class.
            uncovered_ppm: millionths of the profile's time that the uncovered time takes.
            update_ppm: the same of an update; 0 where servers update.

        Returns:
            When the first layer may begin, as far as this says.
        """
        uncovered_ns = self._uncovered_ns * uncovered_ppm // PPM
        if self._crosses_barrier:
            return now_ns + uncovered_ns
        observer = self._observer
        last_ns = max(arrived_ns)
        if last_ns > now_ns:
            if observer is not None:
                observer.waited(-1, now_ns, last_ns)
            now_ns = last_ns
        for index, layer in enumerate(self._layers):
            begun_ns, now_ns = now_ns, now_ns + layer.update_ns * update_ppm // PPM
            if observer is not None:
                observer.updated(index, begun_ns, now_ns)
        return now_ns + uncovered_ns

    def run(self, layers: range, now_ns: int, arrived_ns: Sequence[int], forward_ppm: int = PPM, update_ppm: int = PPM) -> int:
        """Run consecutive layers, whose tensors have all arrived or will at a known time.

        Args:
            layers: which layers.
            now_ns: when the layer before them has ended.
            arrived_ns: see the class.
            forward_ppm: millionths of the profile's time that a layer takes.
            update_ppm: the same of an update, where the plan crosses the barrier; 0 where servers
                update.

        Returns:
            When the last of `layers` has ended.
        """
        if not self._crosses_barrier:
            return self.run_freely(layers, now_ns, forward_ppm)
        observer = self._observer
        for index in layers:
            layer, arrived = self._layers[index], arrived_ns[index]
            begun_ns = arrived if arrived > now_ns else now_ns
            updated_ns = begun_ns + layer.update_ns * update_ppm // PPM
            ended_ns = updated_ns + layer.forward_ns * forward_ppm // PPM
            if observer is not None:
                if begun_ns > now_ns:
                    observer.waited(index, now_ns, begun_ns)
                observer.updated(index, begun_ns, updated_ns)
                observer.ran(index, updated_ns, ended_ns)
            now_ns = ended_ns
        return now_ns

    def run_freely(self, layers: range, now_ns: int, forward_ppm: int = PPM) -> int:
        """Run consecutive layers that wait for nothing, as in the first iteration.

        Arguments and result are those of `run`.
        """
        observer = self._observer
        for index in layers:
            begun_ns, now_ns = now_ns, now_ns + self._layers[index].forward_ns * forward_ppm // PPM
            if observer is not None:
                observer.ran(index, begun_ns, now_ns)
        return now_ns


def forward_ends(profile: Profile, arrivals: Sequence[int], crosses_barrier: bool, observer: Observer | None = None) -> int:
    """The time of an iteration whose communication is like that of the iteration before it.

    Args:
        profile: the iteration's computation.
        arrivals: for each tensor when its sum arrives, in ns after the start of the backward pass.
        crosses_barrier: `Plan.crosses_barrier`.
        observer: is told of each wait, update and layer.

    Returns:
        Nanoseconds from the start of one backward pass to the start of the next one.
    """
    latest = [0] * len(profile.layers)
    for tensor, arrived in zip(profile.tensors, arrivals, strict=True):
        if arrived > latest[tensor.layer]:
            latest[tensor.layer] = arrived
    forward = ForwardPass(profile, crosses_barrier, observer)
    return forward.run(range(len(latest)), forward.begin(profile.backward_ns, latest), latest)
