"""GradientReads: what happens when a script uses a gradient that stands for a sum, before its optimizer steps.

It waits for the sum, as a rule. Where the plan's tensors have owners, norms are known sooner; where updates may be
deferred, a change of the gradient in place waits until the sum is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradlane.live.backends.norm_kernels import Multiplication
from gradlane.live.comm.turn import in_turn
from gradlane.live.session.phases import NotAllowedError, Phase
from gradlane.live.session.script_lines import reader
from gradlane.live.session.tracked import Tracked

if TYPE_CHECKING:
    from gradlane.live.backends.norms import Norms
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
        parts = self._parts
        if not parts.settled:
            parts.measuring.gradient_read(order)
        if self._late_of(several):
            # it does not count against deferring where a plan may come into force that tells such norms
            parts.was_late |= order is None or order != parts.planner.clips
            self._tell("such steps wait for all sums" + (" under this plan" if order is not None else ""))
        self._wait(several)

    @in_turn
    def norms(self, several: Sequence[Tracked], order: float) -> dict[Tracked, torch.Tensor]:
        norms = self._parts.driver.norms
        if norms is None or norms.order != order:
            return {}
        known: dict[Tracked, torch.Tensor] = {}
        for tracked in self._late_with(norms, several):
            factor = _factor_of(tracked.later)
            if factor is not None:
                known[tracked] = self._norm_of(tracked, norms, factor)
        return known

    @in_turn
    def unscales(self, several: Sequence[Tracked], factor: torch.Tensor) -> set[Tracked]:
        parts, norms = self._parts, self._parts.driver.norms
        if not parts.settled:
            parts.measuring.gradients_unscaled()
        if norms is not None:
            known = norms.next_factor = factor.item()  # makes the host wait for a device, so only where owners tell norms
            late = self._late_with(norms, several)
            if late and not any(tracked.later for tracked in late) and norms.are_finite_by(known):
                late = self.puts_off(several, Multiplication(known, factor.device))
                for tracked in late:
                    self._norm_of(tracked, norms, known)  # that it is finite is verified with it
                return late
        if self._late_of(several):
            parts.was_late |= parts.planner.clips is None
            if norms is None:
                self._tell("such steps wait for all sums under this plan")
        self._wait(several)
        return set()

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

    def _late_with(self, norms: Norms, several: Sequence[Tracked]) -> set[Tracked]:
        """Those of `several` whose norms are known and whose sums have not arrived."""
        # the script may have changed the number of threads since its backward pass began
        if not self._late_of(several) or norms.threads != torch.get_num_threads():
            return set()
        self._parts.driver.wait_for_norms(norms)
        return self._late_of(several) if norms.are_there else set()  # another thread may go on meanwhile

    def _norm_of(self, tracked: Tracked, norms: Norms, factor: float) -> torch.Tensor:
        norm = norms.of(tracked.tensor, is_multiplied=factor != 1)
        self._parts.verifier.told_norm(tracked.param, norms.order, norm, tracked.later)
        return norm

    def _tell(self, waits: str) -> None:
        if not self._parts.has_told("read"):
            self._parts.tell("read", f"{reader(of='gradients')} between backward and step: {waits}")

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


def _factor_of(later: Sequence[InPlace]) -> float | None:
    """By what a gradient is multiplied before its norm is taken; None if it is changed otherwise."""
    if not later:
        return 1.0
    only = later[0] if len(later) == 1 else None
    return only.factor if isinstance(only, Multiplication) else None
