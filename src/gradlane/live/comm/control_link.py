"""What one rank knows of a connection of the control channel."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass
class Link:
    """One connection.

    Attributes:
        rank: of the other end, once it has sent its token.
        heard: when something came last, in seconds. Whoever has never been heard is not silent: rank 0 may not have
            come to it yet.
        said_bye: whether it has left in order.
        was_slow: whether its interpreter did not run for long, and one line has said so.
        was_silent: whether it said nothing for long, and one line has said so.
        origin: where a stranger has called from.
        is_spared: whether this rank, away itself, has begun to listen anew since `heard`.
    """

    rank: int | None = None
    heard: float = math.inf
    said_bye: bool = False
    was_slow: bool = False
    was_silent: bool = False
    is_spared: bool = False
    origin: Hashable = None

    def hear(self, now: float) -> None:
        """Something has come."""
        self.heard, self.is_spared = now, False

    def spare(self, now: float, late_s: float) -> None:
        """Whoever listens was away for `late_s`, which is no silence of the other end.

        Once in a silence it starts to listen anew. After that only its own absence does not count, or somebody who is often
        late would never find out.
        """
        if self.heard < math.inf:
            self.heard, self.is_spared = min(now, self.heard + late_s) if self.is_spared else now, True
