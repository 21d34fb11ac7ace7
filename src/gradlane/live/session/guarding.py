"""Guarding: the part of `updates.Actions` that every session has: its guards, and whether an optimizer runs in a thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from gradlane.live.session import guarded_params
from gradlane.live.session.deferred_step import is_stepping
from gradlane.live.session.tracked import Tracked


class Guarding:
    """The guards of one session's parameters.

    Args:
        tracked: the session's parameters.
        on_use: called with a guarded parameter before its first use.

    Attributes:
        tracked: the session's parameters, in the plan's order.
    """

    as_ordinary = guarded_params.as_ordinary
    unguard = staticmethod(guarded_params.unwatch)

    def __init__(self, tracked: Sequence[Tracked], on_use: Callable[[Tracked], None]) -> None:
        self.tracked, self._on_use = tracked, on_use

    def is_stepping(self, thread: int) -> bool:
        return is_stepping(sys._current_frames().get(thread))

    def guard(self, several: Iterable[Tracked]) -> None:
        guarded_params.watch(several, self._on_use)

    def unguard_all(self) -> None:
        guarded_params.unwatch(self.tracked)

    def is_guarded(self, tracked: Tracked) -> bool:
        return guarded_params.is_watched(tracked.param)
