"""Network: what a message costs between given workers.

For all-reduce that is a startup and a rate, as fitted from a sweep or computed from an algorithm. One line
does not always serve (small and large messages may use other protocols), so a network holds one or more
pieces by message size; and handling a message costs the processor something while its bytes pass, so that none takes less than
that. What messages cost that are under way together is less than the sum, where one's startup
passes behind another's bytes: that is a network's sharing. Of a startup a part is latency, which keeps no other message
waiting, and the rest is handling, of one message at a time.
"""

from __future__ import annotations

import itertools

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NS, need, need_int, need_name
from gradlane.units import NS_PER_SECOND

MAX_WORKERS = 1_000_000
MAX_RATE = 10**13


class CostSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a message up to `up_to_bytes`: startup_ns + size / bytes_per_second, rounded up.

    Rounded down, a tensor in pieces would take less than its bytes' time and no lower bound would hold.
    latency_ns: the part of the startup that keeps no other message waiting; the rest is handling. It shortens no message
    that is alone; `startup_ns` is the `a` of the papers whatever part of it is latency.
    """

    startup_ns: int
    bytes_per_second: int
    up_to_bytes: int = MAX_BYTES
    latency_ns: int = 0

    def __post_init__(self) -> None:
        need_int("startup_ns", self.startup_ns, 0, MAX_NS)
        need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)
        need_int("up_to_bytes", self.up_to_bytes, 1, MAX_BYTES)
        need_int("latency_ns", self.latency_ns, 0, self.startup_ns)

    def cost_ns(self, size_bytes: int) -> int:
        return self.startup_ns - -size_bytes * NS_PER_SECOND // self.bytes_per_second


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How messages that were started share the network; the first values are those of most papers: one after another.

    at_once: so many of a lane are under way, one of them being handled while one's bytes pass; its others wait. turns: a
    message passes in so many equal parts, and as often as that for each `turn_bytes` of it or less; between two of them the
    other messages' parts pass.
    """

    max_in_flight: int = msgspec.field(default=1, name="at_once")
    chunks: int = msgspec.field(default=1, name="turns")
    chunk_bytes: int = msgspec.field(default=MAX_BYTES, name="turn_bytes")

    def __post_init__(self) -> None:
        need_int("at_once", self.max_in_flight, 1, 1024)
        need_int("turns", self.chunks, 1, 2 * MAX_WORKERS)
        need_int("turn_bytes", self.chunk_bytes, 1, MAX_BYTES)

    def chunks_of(self, size_bytes: int) -> int:
        return self.chunks * -(-size_bytes // self.chunk_bytes)


ONE_BY_ONE = Sharing()


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduce among `workers`, as pieces in ascending order of `up_to_bytes`.

    `residual` is the median relative error of the fit that the pieces come from (0 where they are exact).
    least_ns: no message takes less, however small; where its startup and bytes take longer, it costs nothing.
    least_latency_ns: the part of it that keeps no other message waiting, as a piece's `latency_ns`.
    """

    workers: int
    segments: tuple[CostSegment, ...] = msgspec.field(name="pieces")
    algorithm: str = "unstated"
    residual: float = 0.0
    source: str = "unstated"
    sharing: Sharing = ONE_BY_ONE
    min_message_ns: int = msgspec.field(default=0, name="least_ns")
    min_message_latency_ns: int = msgspec.field(default=0, name="least_latency_ns")

    def __post_init__(self) -> None:
        need_int("workers", self.workers, 1, MAX_WORKERS)
        need(0 < len(self.segments) <= 16, "pieces", len(self.segments), "1 to 16 of them")
        need_name("algorithm", self.algorithm)
        need_int("least_ns", self.min_message_ns, 0, MAX_NS)
        need_int("least_latency_ns", self.min_message_latency_ns, 0, self.min_message_ns)
        need(0 <= self.residual < 1e6, "residual", self.residual, "a relative error of 0 or more")
        for before, after in itertools.pairwise(self.segments):
            need(before.up_to_bytes < after.up_to_bytes, "pieces", after.up_to_bytes, "ascending up_to_bytes")
        need(self.segments[-1].up_to_bytes == MAX_BYTES, "pieces", self.segments[-1].up_to_bytes, "a last piece without limit")

    @staticmethod
    def line(workers: int, startup_ns: int, bytes_per_second: int, source: str = "stated") -> Network:
        """A network of one piece: the a + b * size of most papers."""
        return Network(workers, (CostSegment(startup_ns, bytes_per_second),), source=source)

    @property
    def overlaps(self) -> bool:
        """Whether messages that are under way together can cost less than the sum, or end in another order."""
        return self.sharing.max_in_flight > 1

    @property
    def startup_ns(self) -> int:
        """What a message costs beside its bytes: the `a` of a + b * size (MG-WFBP Eq. 10), of large messages, or what the
        smallest costs, where that is more."""
        return max(self.segments[-1].startup_ns, self.min_message_ns)

    @property
    def bytes_per_second(self) -> int:
        """Rate of large messages: the 1 / b of a + b * size (MG-WFBP Eq. 10)."""
        return self.segments[-1].bytes_per_second

    def cost_ns(self, size_bytes: int) -> int:
        """Time of one all-reduce of `size_bytes`, alone on the network."""
        return max(self.min_message_ns, self.segment_of(size_bytes).cost_ns(size_bytes))

    def stream_ns(self, size_bytes: int, messages: int) -> int:
        """Time of so many all-reduces of `size_bytes` that start together.

        Either the link is the limit, or handling is, busy from when the first message comes to it on; or each of those at
        once waits for what it is made of itself, and only the last of them for one another. Exact for one at once and for
        pairs; otherwise a message that is left over may take up to itself longer.
        """
        chunks, alone_ns = self.sharing.chunks_of(size_bytes), self.cost_ns(size_bytes)
        if not self.overlaps:
            return messages * alone_ns
        latency_ns, handling_ns, bytes_ns = self.parts_ns(size_bytes)
        busiest_ns, other_ns = max(handling_ns, bytes_ns), min(handling_ns, bytes_ns)
        groups = -(-messages // self.sharing.max_in_flight)
        by_itself_ns = groups * alone_ns + (messages - 1) % self.sharing.max_in_flight * busiest_ns // chunks
        return max((latency_ns + other_ns) // chunks + messages * busiest_ns, by_itself_ns)

    def parts_ns(self, size_bytes: int) -> tuple[int, int, int]:
        """What `cost_ns` is made of: latency, which keeps no other message waiting; handling, of one message at a time; and
        bytes, which have the link to themselves.

        What is latency of a small message is so of one whose bytes take a little longer too, only less.
        """
        piece = self.segment_of(size_bytes)
        alone_ns = piece.cost_ns(size_bytes)
        beside_bytes_ns = piece.startup_ns + max(0, self.min_message_ns - alone_ns)
        hidden_ns = min(beside_bytes_ns, self.min_message_latency_ns - max(0, alone_ns - self.min_message_ns))
        latency_ns = max(piece.latency_ns, hidden_ns) if self.overlaps else 0
        return latency_ns, beside_bytes_ns - latency_ns, alone_ns - piece.startup_ns

    def segment_of(self, size_bytes: int) -> CostSegment:
        for piece in self.segments:
            if size_bytes <= piece.up_to_bytes:
                return piece
        raise AssertionError("the last piece has no limit")

    def occupied_ns(self, piece: CostSegment) -> int:
        """The part of a piece's startup during which the link can carry no other message's bytes."""
        return 0 if self.overlaps else piece.startup_ns
