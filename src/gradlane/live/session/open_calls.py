"""OpenCalls: calls of the model in training that have not ended, so that an exception in one is noticed by the next."""

from __future__ import annotations

from threading import get_ident


class OpenCalls:
    """The calls of one model that count. What a call that did not end had begun with is due again in the next, as under DDP."""

    def __init__(self) -> None:
        self._by: int | None = None  # thread of such a call; an exception leaves it set
        # a call inside of a backward pass, on any thread: a checkpoint stops its second run early
        self._is_stopped_early = False

    def begin(self, trains: bool) -> bool:
        """A call begins, in training or not. Returns whether the one before did not end."""
        unfinished = self._by == get_ident() or self._is_stopped_early
        self._by, self._is_stopped_early = get_ident() if trains else None, False
        return unfinished

    def begin_within(self, trains: bool) -> bool:
        """As `begin`, of a call inside of a backward pass."""
        unfinished = self.begin(trains=False)
        self._is_stopped_early = trains
        return unfinished

    def end(self) -> None:
        """A call has ended."""
        self._by = None

    def end_within(self) -> None:
        """A call inside of a backward pass has ended."""
        self._is_stopped_early = False
