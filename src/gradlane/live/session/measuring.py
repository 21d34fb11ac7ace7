"""Measuring: takes the moments of the first iterations that a profile is built of, and learns what the script reads early."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.streams import Streams
from gradlane.live.comm.driver import Driver
from gradlane.live.session.stopwatch import DeviceStopwatch, HostStopwatch, Stopwatch
from gradlane.live.session.tracked import Tracked

_ANY_ORDER = 2.0
"""Of the norms that owners tell to a script that takes none, but asks whether gradients are finite."""


class Measuring:
    """The measurements of one session.

    Args:
        driver, planner: the session's; the planner says which iterations are measured.
        streams: of the device that the model is on; None for the CPU.
        device_waits: the model is on a device, which waits for sums of other ranks too, nobody knows for how long.

    Attributes:
        is_on: the iteration whose backward pass began last is measured.
    """

    def __init__(self, driver: Driver, planner: Planner, streams: Streams | None, device_waits: bool) -> None:
        self._driver, self._planner, self._device_waits = driver, planner, device_waits
        self._stopwatch: Stopwatch = HostStopwatch() if streams is None else DeviceStopwatch(streams)
        self._forward_began = self._backward_began = self._step_began = self._stopwatch.now()
        self._pass_is_first = False  # of the iteration
        self._forward_was_seen = False  # in the iteration: scripts may call methods of the model instead
        self._backward_ended: Any = None  # until the next step
        self._step_ended: Any = None  # until the next forward pass that trains
        self._forward_ns = self._until_backward_ns = 0
        # iterations in which gradients were read before the step, by the order of the norm that was asked for, or None
        self._reads: defaultdict[float | None, set[int]] = defaultdict(set)
        self._unscaled: set[int] = set()  # iterations in which the script called GradScaler.unscale_
        self._watched_iteration = -1  # the last in which all parameters were watched
        self.is_on = False

    @property
    def _measures_next(self) -> bool:
        return self._planner.measures(self._driver.iteration + 1)

    @property
    def _measures_this(self) -> bool:
        return self._planner.measures(self._driver.iteration)

    # -- moments ------------------------------------------------------------------------------------

    def forward_is_due(self) -> None:
        """The model is called to train: what passed since the last step was no computing."""
        if self._step_ended is not None:
            self._stopwatch.report(self._planner.builder.rested, self._step_ended)
            self._step_ended = None

    def forward_begins(self) -> None:
        """The first forward pass of an iteration begins. Other passes count with the time between it and the backward pass."""
        if self._measures_next:
            self._pass_is_first = self._forward_was_seen = True
            self._forward_began = self._stopwatch.now()

    def forward_ended(self) -> None:
        """A forward pass with gradients has ended."""
        if self._pass_is_first:
            self._pass_is_first = False
            self._stopwatch.report(self._forward_took, self._forward_began)

    def _forward_took(self, forward_ns: int) -> None:
        self._forward_ns = self._until_backward_ns = forward_ns

    def _backward_began_after(self, until_backward_ns: int) -> None:
        self._until_backward_ns = until_backward_ns

    def used(self, tracked: Tracked, in_forward: bool) -> None:
        """A parameter was used for the first time in the coming iteration, in its forward pass or before it."""
        if not self._measures_next:
            return
        used, name = self._planner.builder.used, tracked.name
        if in_forward:
            self._stopwatch.report(lambda since_ns: used(name, since_ns), self._forward_began)
        else:
            used(name, 0)

    def backward_begins(self) -> None:
        """A backward pass begins; the driver is in its iteration."""
        self.is_on = self._measures_this
        if self.is_on:
            if self._forward_was_seen:
                self._stopwatch.report(self._backward_began_after, self._forward_began)
            self._backward_began = self._stopwatch.now()
        self._forward_was_seen = False

    def ready(self, several: Sequence[Tracked]) -> None:
        """Gradients are ready, together."""
        if self.is_on:
            names = [tracked.name for tracked in several]
            self._stopwatch.report(lambda since_ns: self._planner.builder.ready(names, since_ns), self._backward_began)

    def backward_ended(self) -> None:
        """The backward pass has ended."""
        if self.is_on:
            passed = self._planner.builder.passed
            self._stopwatch.report(
                lambda backward_ns: passed(self._forward_ns, backward_ns, self._until_backward_ns - self._forward_ns),
                self._backward_began,
            )
            self._backward_ended = self._stopwatch.now()

    def step_begins(self) -> None:
        """An optimizer is about to step; what it needs has arrived.

        Since the backward pass the script computed. Where a device has waited for sums meanwhile, that is not counted.
        """
        if not self._measures_this:
            return
        if self._backward_ended is not None and not self._device_waits:
            self._stopwatch.report(self._planner.builder.between, self._backward_ended)
        self._step_began = self._stopwatch.now()

    def step_ended(self) -> None:
        """An optimizer has stepped."""
        if self._measures_this:
            is_first, updated = self._backward_ended is not None, self._planner.builder.updated
            self._backward_ended = None
            self._stopwatch.report(lambda update_ns: updated(update_ns, is_first), self._step_began)
            self._step_ended = self._stopwatch.now()

    def settle(self) -> None:
        """Wait until all durations are told."""
        self._stopwatch.settle()

    # -- what the script reads ----------------------------------------------------------------------

    def gradient_read(self, order: float | None) -> None:
        """A gradient is read before the step, for its norm of this order, or for anything else."""
        self._reads[order].add(self._driver.iteration)

    def gradients_unscaled(self) -> None:
        """A GradScaler divides gradients by its scale, for which the norm of any order tells enough."""
        self._unscaled.add(self._driver.iteration)

    @property
    def always_read(self) -> bool:
        """Whether gradients were read before the step in every iteration."""
        return self._in_all(self._unscaled.union(*self._reads.values()))

    @property
    def norms_read(self) -> float | None:
        """The order of norms of gradients that were read in every iteration; None if other things were too."""
        orders = [order for order, iterations in self._reads.items() if self._in_all(iterations)]
        if not orders and self._in_all(self._unscaled):
            return _ANY_ORDER
        return orders[0] if len(orders) == 1 else None

    def _in_all(self, iterations: set[int]) -> bool:
        return 0 <= self._driver.iteration < len(iterations)

    def all_are_watched(self) -> None:
        """All parameters are watched in the forward pass that begins."""
        self._watched_iteration = self._driver.iteration + 1

    def unseen(self, tracked: Iterable[Tracked]) -> list[Tracked]:
        """The backward pass has ended: parameters that got a gradient although nobody was seen to use them."""
        found = []
        if self._watched_iteration == self._driver.iteration > 0:
            found = [each for each in tracked if each.fired and not each.was_used]
        for each in tracked:
            each.was_used = False
        return found
