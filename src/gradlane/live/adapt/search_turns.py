"""Search turns: sessions of one process try plans one after another.

Two models that train in turns, as those of a GAN do, share the step of their script and the links. A
plan that one of them tries changes the times that the other measures.
"""

from __future__ import annotations

import threading

_PATIENCE = 8  # rounds that a session waits; if the one with the turn has had no round meanwhile, it trains no more


class SearchTurns:
    """Who may try plans. Sessions are told apart by identity; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trying: object | None = None
        self._waited = 0
        self._changes = 0
        self._changed_by: object | None = None

    def take(self, session: object) -> bool:
        """Ask for the turn, once a round of `session`. Returns whether `session` has it.

        The turn goes over if the session that has it had no round in eight rounds of `session`.
        """
        with self._lock:
            self._waited = self._waited + 1 if self._trying is not None and self._trying is not session else 0
            if self._trying is None or self._waited > _PATIENCE:
                self._trying, self._waited = session, 0
            return self._trying is session

    def leave(self, session: object) -> None:
        """End the turn of `session`, if it has it."""
        with self._lock:
            if self._trying is session:
                self._trying = None

    def note_change(self, session: object) -> None:
        """Another plan of `session` is in force from now on."""
        with self._lock:
            self._changes += 1
            self._changed_by = session

    def changes_of_others(self, session: object, seen: int) -> tuple[int, bool]:
        """Compare the number of changes of plans with an earlier one.

        Args:
            session: who asks.
            seen: the number at its last call, 0 at first.

        Returns:
            The number at present, and whether another session has changed its plan since. If the last change is
            of `session`, earlier ones of other sessions are not reported.
        """
        with self._lock:
            return self._changes, self._changes != seen and self._changed_by is not session


SEARCH_TURNS = SearchTurns()
"""Of the sessions of this process."""
