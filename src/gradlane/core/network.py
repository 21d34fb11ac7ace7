"""Network: what a message costs between given workers.

For all-reduce that is a startup and a rate, as fitted from a sweep or computed from an algorithm. One line
does not always serve (small and large messages may use other protocols), so a network holds one or more
pieces by message size.
"""

from __future__ import annotations

import itertools

import msgspec

from gradlane.core.checking import MAX_BYTES, MAX_NS, need, need_int, need_name
from gradlane.units import NS_PER_SECOND

MAX_WORKERS = 1_000_000
MAX_RATE = 10**13


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a message up to `up_to_bytes`: startup_ns + size / bytes_per_second, rounded up.

    Rounded down, a tensor in pieces would take less than its bytes' time and no lower bound would hold.
    """

    startup_ns: int
    bytes_per_second: int
    up_to_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        need_int("startup_ns", self.startup_ns, 0, MAX_NS)
        need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)
        need_int("up_to_bytes", self.up_to_bytes, 1, MAX_BYTES)

    def cost_ns(self, size_bytes: int) -> int:
        return self.startup_ns - -size_bytes * NS_PER_SECOND // self.bytes_per_second


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduce among `workers`, as pieces in ascending order of `up_to_bytes`.

    `residual` is the median relative error of the fit that the pieces come from (0 where they are exact).
    """

    workers: int
    pieces: tuple[Piece, ...]
    algorithm: str = "unstated"
    residual: float = 0.0
    source: str = "unstated"

    def __post_init__(self) -> None:
        need_int("workers", self.workers, 1, MAX_WORKERS)
        need(0 < len(self.pieces) <= 16, "pieces", len(self.pieces), "1 to 16 of them")
        need_name("algorithm", self.algorithm)
        need(0 <= self.residual < 1e6, "residual", self.residual, "a relative error of 0 or more")
        for before, after in itertools.pairwise(self.pieces):
            need(before.up_to_bytes < after.up_to_bytes, "pieces", after.up_to_bytes, "ascending up_to_bytes")
        need(self.pieces[-1].up_to_bytes == MAX_BYTES, "pieces", self.pieces[-1].up_to_bytes, "a last piece without limit")

    @staticmethod
    def line(workers: int, startup_ns: int, bytes_per_second: int, source: str = "stated") -> Network:
        """A network of one piece: the a + b * size of most papers."""
        return Network(workers, (Piece(startup_ns, bytes_per_second),), source=source)

    @property
    def startup_ns(self) -> int:
        """Startup of large messages: the `a` of a + b * size (MG-WFBP Eq. 10)."""
        return self.pieces[-1].startup_ns

    @property
    def bytes_per_second(self) -> int:
        """Rate of large messages: the 1 / b of a + b * size (MG-WFBP Eq. 10)."""
        return self.pieces[-1].bytes_per_second

    def cost_ns(self, size_bytes: int) -> int:
        """Time of one all-reduce of `size_bytes`, alone on the network."""
        for piece in self.pieces:
            if size_bytes <= piece.up_to_bytes:
                return piece.cost_ns(size_bytes)
        raise AssertionError("the last piece has no limit")
