"""ServedActions: what the rules of `live/session/updates.py` do where the update is on servers: to make an update is to copy
a parameter's new value, once it has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from gradlane.errors import UnsupportedError
from gradlane.live.comm.turn import given_up
from gradlane.live.remote_update.values import Values
from gradlane.live.session import guarded_params, outdated, torch_patches
from gradlane.live.session.guarding import Guarding
from gradlane.live.session.tracked import Tracked

if TYPE_CHECKING:
    from gradlane.live.remote_update.iterations import ServedIterations


_LOOK_S = 0.5  # between two looks whether the job has failed: nobody wakes a wait for another thread then


class ServedStep:
    """One call of an optimizer's `step`, whose values come from the servers."""

    def __init__(self) -> None:
        self.owes = 0

    def ended(self) -> None:
        """The last value has been copied."""


class ServedActions(Guarding):
    """The `updates.Actions` of one session whose parameters are on servers.

    Args:
        iterations: of the session.
        values: the servers' parameters.
        on_use: called with a guarded parameter before its first use.
        on_leaving: called before anything reads parameters in C++, by the ways that `torch_patches.py` knows.
    """

    def __init__(
        self,
        iterations: ServedIterations,
        values: Values,
        on_use: Callable[[Tracked], None],
        on_leaving: Callable[[], None],
    ) -> None:
        super().__init__(iterations.tracked, on_use)
        self._iterations, self._values, self._on_leaving = iterations, values, on_leaving
        self.check = iterations.check
        self._has_changed = threading.Condition()
        self._hidden: dict[Tracked, torch.Tensor | None] = {}
        self._versions = [tracked.param._version for tracked in self.tracked]

    # -- threads ------------------------------------------------------------------------------------

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        with given_up(), self._has_changed:
            while not (holds() or self._iterations.failed):
                self._has_changed.wait(_LOOK_S)
        self.check()

    def look_at_waits(self) -> None:
        with self._has_changed:
            self._has_changed.notify_all()

    # -- values -------------------------------------------------------------------------------------

    def wait_for(self, several: Sequence[Tracked]) -> None:
        with given_up():
            for tracked in several:
                self._values.wait_for(tracked.tensor)

    def wait_for_all(self) -> None:
        """Values whose steps were not called are waited for by `ServedIterations.wait_for_unstepped`."""

    def arriving_with(self, tracked: Tracked, several: Sequence[Tracked]) -> list[Tracked]:
        late = self._values.late([other.tensor for other in several])
        return [other for other in several if other.tensor not in late]

    def update(self, step: ServedStep, several: Sequence[Tracked]) -> None:
        with guarded_params.as_ordinary():
            self.copy(several)

    def copy(self, several: Iterable[Tracked]) -> None:
        """Copy the values that have arrived to parameters.

        Raises:
            UnsupportedError: the script has written to one of them since; the job fails.
        """
        several = list(several)
        self.refuse_writes(several)
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_(
                [tracked.param for tracked in several], [self._values.slots[tracked.tensor] for tracked in several]
            )
        for tracked in several:
            self._versions[tracked.tensor] = tracked.param._version

    def refuse_writes(self, several: Iterable[Tracked]) -> None:
        """Fail the job if the script has written to one of `several` since its value was copied.

        Raises:
            UnsupportedError: it has.
        """
        for tracked in several:
            if tracked.param._version != self._versions[tracked.tensor]:
                self._iterations.fail(
                    f"the script wrote to {tracked.name}, and its value is the servers': write to it after close(), and "
                    "attach again to train on",
                    UnsupportedError,
                )

    # -- gradients and guards -----------------------------------------------------------------------

    def hide(self, several: Sequence[Tracked]) -> None:
        for tracked in several:
            self._hidden[tracked] = tracked.param.grad
            tracked.param.grad = None

    def show(self, several: Sequence[Tracked]) -> None:
        for tracked in several:
            tracked.param.grad = self._hidden.pop(tracked)

    def refuse(self, tracked: Tracked, why: str) -> None:
        guarded_params.unwatch((tracked,))
        lacks = f"{tracked.name} lacks its last value: the servers had not sent it when the job failed ({why})"
        outdated.refuse_reads(tracked.param, f"{lacks}. {outdated.ADVICE}")

    # -- what is on the servers, or on a device -----------------------------------------------------

    def guard_state(self, step: ServedStep) -> None:
        torch_patches.before_leaving(self, self._on_leaving)

    def unguard_state(self, step: ServedStep) -> None:
        """The servers have the optimizer's state."""

    has_raised = unguard_state  # it has updated nothing, since all gradients are hidden from it

    def all_are_made(self) -> None:
        torch_patches.nothing_is_owed(self)

    def all_are_summed(self) -> None:
        """Nothing was left undone to a gradient."""

    def from_elsewhere(self, makes_updates: Callable[[], None]) -> None:
        """The model is in CPU memory."""
