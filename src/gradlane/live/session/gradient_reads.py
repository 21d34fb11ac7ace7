"""GradientReads: what happens when a script uses a gradient that stands for a sum, before its optimizer steps.

It waits for the sum, as a rule. Where the plan's tensors have owners, norms are known sooner; where updates may be
deferred, a change of the gradient in place waits until the sum is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradlane.live.comm.turn import in_turn
from gradlane.live.session.phases import NotAllowedError, Phase
from gradlane.live.session.script_lines import reader
from gradlane.live.session.tracked import Tracked

if TYPE_CHECKING:
    from gradlane.live.session.parts import Parts
    from gradlane.live.session.pending_gradient import InPlace
    from gradlane.live.session.steps import Steps


class GradientReads:
    """The `pending_gradient.Reads` of one session. Any thread may read; it takes the turn."""

    _parts: Parts
    _steps: Steps

    def connect(self, parts: Parts, steps: Steps) -> None:
        """Belong to the session with these parts. Called before anything is read."""
        self._parts, self._steps = parts, steps

    @in_turn
    def read(self, several: Sequence[Tracked], order: float | None = None) -> None:
        if not self._parts.settled:
            self._parts.measuring.gradient_read(order)
        if self._late_of(several):
            # it does not count against deferring where a plan may come into force that tells such norms
            self._parts.was_late |= order is None or order != self._parts.planner.clips
            if not self._parts.has_told("read"):
                waits = "such steps wait for all sums" if order is None else "such steps wait for all sums under this plan"
                self._parts.tell("read", f"{reader(of='gradients')} between backward and step: {waits}")
        self._wait(several)

    @in_turn
    def norms(self, several: Sequence[Tracked], order: float) -> dict[Tracked, torch.Tensor]:
        parts = self._parts
        norms = parts.driver.norms
        if norms is None or norms.order != order or not self._late_of(several):
            return {}
        if norms.threads != torch.get_num_threads():  # the script has changed it since its backward pass began
            return {}
        parts.driver.wait_for_norms(norms)
        if not norms.are_there:
            return {}  # another thread went on meanwhile
        known = {tracked: norms.of(tracked.tensor) for tracked in self._late_of(several) if not tracked.later}
        for tracked, norm in known.items():
            parts.verifier.told_norm(tracked.param, order, norm)
        return known

    @in_turn
    def puts_off(self, several: Sequence[Tracked], operation: InPlace) -> set[Tracked]:
        parts, late = self._parts, self._late_of(several)
        for tracked in several:
            if tracked in late:
                parts.verifier.touched(tracked.param)
                parts.gradients.change_later(tracked, operation)
        there = [tracked for tracked in several if tracked not in late]
        if there:
            self._wait(there)
        return late

    def _late_of(self, several: Sequence[Tracked]) -> set[Tracked]:
        """Those whose sums have not arrived, in a step that may be over before they have."""
        if not self._parts.crosses or self._steps.runs_closure:  # an optimizer reads gradients after its closure
            return set()
        awaited = {tracked.tensor: tracked for tracked in several if tracked.phase is Phase.AWAITED}
        return {awaited[tensor] for tensor in self._parts.driver.late(list(awaited))}

    def _wait(self, several: Sequence[Tracked]) -> None:
        try:
            self._parts.updates.read(several, lambda: self._are_there(several))
        except NotAllowedError as error:
            self._parts.fail(str(error))

    def _are_there(self, several: Sequence[Tracked]) -> None:
        verifier = self._parts.verifier
        for tracked in several:
            verifier.touched(tracked.param)
            verifier.arrived(tracked.param, tracked.slot)
        self._parts.gradients.change(several)
