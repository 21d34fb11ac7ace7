"""What one rank knows of a connection of the control channel."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Link:
    """One connection.

    Attributes:
        rank: of the other end, once it has sent its token.
        heard: when something came last, in seconds. Whoever has never been heard is not silent: rank 0 may not have
            come to it yet.
        said_bye: whether it has left in order.
        warned_of: what of it one line has said: that its interpreter did not run for long, or that it said nothing.
        origin: where a stranger has called from.
        is_spared: whether this rank, away itself, has begun to listen anew since `heard`.
    """

    rank: int | None = None
    heard: float = math.inf
    said_bye: bool = False
    warned_of: set[str] = field(default_factory=set)
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
