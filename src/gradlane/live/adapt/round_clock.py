"""RoundClock: how long a session's rounds take, and how long its thread waits for other ranks in them."""

from __future__ import annotations

from gradlane.live.comm.recorder import blocked, now_ns
from gradlane.planning.rounds import Round, Rounds


class RoundClock:
    """The clock of one session. Used on the training thread."""

    def __init__(self) -> None:
        self._rounds = Rounds()
        self.start()

    def start(self) -> None:
        """An iteration begins."""
        self._since_ns, self._blocked_ns = now_ns(), blocked.total_ns

    @property
    def took_ns(self) -> int:
        """How long the iteration has taken so far, in ns."""
        return now_ns() - self._since_ns

    def ended(self, stepped: bool) -> Round | None:
        """An iteration has ended; `stepped` and the result are those of `Rounds.observe`."""
        return self._rounds.observe(self.took_ns, blocked.total_ns - self._blocked_ns, stepped)
