"""GradientReads: what happens when a script uses a gradient that stands for a sum, before its optimizer steps.

It waits for the sum, as a rule. Where the plan's tensors have owners, norms are known sooner; where updates may be
deferred, a change of the gradient in place waits until the sum is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradlane.live.comm.turn import in_turn
from gradlane.live.session.phases import NotAllowedError, Phase
from gradlane.live.session.script_lines import reader
from gradlane.live.session.tracked import Tracked

if TYPE_CHECKING:
    from gradlane.live.session.guards import InPlace
    from gradlane.live.session.parts import Parts
    from gradlane.live.session.steps import Steps


class GradientReads:
    """The `guards.Reads` of one session. Any thread may read. A thread takes the turn before it changes anything."""

    _parts: Parts
    _steps: Steps

    def connect(self, parts: Parts, steps: Steps) -> None:
        """Belong to the session with these parts. Called before anything is read."""
        self._parts, self._steps = parts, steps

    def read(self, tracked: Tracked, order: float | None = None) -> None:
        if not self._parts.settled:
            self._parts.measuring.gradient_read(order)
        if self._is_late(tracked):
            # it does not count against deferring where a plan may come into force that tells such norms
            self._parts.was_late |= order is None or order != self._parts.planner.clips
            if not self._parts.has_told("read"):
                waits = "such steps wait for all sums" if order is None else "such steps wait for all sums under this plan"
                self._parts.tell("read", f"{reader(of='gradients')} between backward and step: {waits}")
        self._wait(tracked)

    @in_turn
    def norm(self, tracked: Tracked, order: float) -> torch.Tensor | None:
        parts = self._parts
        norms = parts.driver.norms
        if norms is None or norms.order != order or tracked.later or not self._is_late(tracked):
            return None
        if norms.threads != torch.get_num_threads():  # the script has changed it since its backward pass began
            return None
        parts.driver.wait_for_norms(norms)
        if not norms.are_there or tracked.later or not self._is_late(tracked):
            return None  # another thread went on meanwhile
        norm = norms.of(tracked.tensor)
        parts.verifier.told_norm(tracked.param, order, norm)
        return norm

    @in_turn
    def puts_off(self, tracked: Tracked, operation: InPlace) -> bool:
        is_late = self._is_late(tracked)
        if is_late:
            self._parts.verifier.touched(tracked.param)
            self._parts.gradients.change_later(tracked, operation)
        else:
            self._wait(tracked)
        return is_late

    def _is_late(self, tracked: Tracked) -> bool:
        """Whether the sum has not arrived, in a step that may be over before it has."""
        return (
            self._parts.crosses
            and not self._steps.runs_closure  # an optimizer reads gradients after its closure
            and tracked.phase is Phase.AWAITED
            and bool(self._parts.driver.late((tracked.tensor,)))
        )

    def _wait(self, tracked: Tracked) -> None:
        try:
            self._parts.updates.read(tracked, lambda: self._is_there(tracked))
        except NotAllowedError as error:
            self._parts.fail(str(error))

    def _is_there(self, tracked: Tracked) -> None:
        self._parts.verifier.touched(tracked.param)
        self._parts.verifier.arrived(tracked.param, tracked.slot)
        self._parts.gradients.change((tracked,))
