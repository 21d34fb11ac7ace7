"""Network: what a message costs between given workers.

A message costs a startup and its bytes at a rate (a + b * size, MG-WFBP Eq. 10), fitted from a
sweep or computed from an algorithm. Small and large messages may use different protocols, so a network has one or
more cost segments by message size. No message costs less than a minimum, since the processor's work on it overlaps
with the transfer of its bytes.

Messages that are in flight together cost less than their sum: `Sharing` says how many are, and in
how many chunks each passes. One part of a startup is latency, which delays no other message. The rest is per-message
overhead, which the processor spends on one message at a time. docs/cost-model.md has the formulas.
"""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction

import msgspec
from msgspec import UNSET, UnsetType

from gradlane.core.bus import Bus, Stage
from gradlane.core.fields import MAX_BYTES, MAX_NS, MAX_RATE, need, need_int, need_name
from gradlane.units import NS_PER_SECOND

MAX_WORKERS = 1_000_000
MAX_SEGMENTS = 16
NETWORK_CLASSES = 8


class CostSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a message of up to `up_to_bytes`: startup_ns + size / bytes_per_second, rounded up.

    Rounded down, a tensor in slices would take less than its bytes' time, and no lower bound would
    hold.

    Attributes:
        startup_ns: the `a` of the papers, whatever part of it is latency.
        bytes_per_second: the 1 / b of the papers.
        up_to_bytes: the largest message of this segment.
        latency_ns: the part of the startup that delays no other message; the rest is per-message
            overhead. It does not shorten a message that is alone.
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
        """The segment's time in ns for a message of `size_bytes`, without the network's minimum."""
        return self.startup_ns - -size_bytes * NS_PER_SECOND // self.bytes_per_second


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How messages in flight share the network; the defaults are most papers': one after another.

    Attributes:
        max_in_flight: messages of a lane in flight at the same time; one uses the processor while
            another uses the link. Later messages wait.
        chunks: number of chunks in which every `chunk_bytes` of a message, or part of them, is
            sent. Chunks of other messages go in between.
        chunk_bytes: see `chunks`.
        network_classes: how many classes of lanes the network serves one before the other; 1 where it
            does not look at them, as where it was measured by one lane.
    """

    max_in_flight: int = msgspec.field(default=1, name="at_once")
    chunks: int = msgspec.field(default=1, name="turns")
    chunk_bytes: int = msgspec.field(default=MAX_BYTES, name="turn_bytes")
    network_classes: int = NETWORK_CLASSES

    def __post_init__(self) -> None:
        need_int("at_once", self.max_in_flight, 1, 1024)
        need_int("turns", self.chunks, 1, 2 * MAX_WORKERS)
        need_int("turn_bytes", self.chunk_bytes, 1, MAX_BYTES)
        need_int("network_classes", self.network_classes, 1, NETWORK_CLASSES)

    def chunks_of(self, size_bytes: int) -> int:
        """The number of chunks in which a message of `size_bytes` is sent."""
        return self.chunks * -(-size_bytes // self.chunk_bytes)


ONE_BY_ONE = Sharing()


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of all-reduce among `workers`.

    With a bus, `segments`, `sharing`, the minimum, `parts_ns` and `stream_ns` describe messages between hosts. `cost_ns`,
    `startup_ns` and `bytes_per_second` describe the whole path.

    Attributes:
        workers: number of workers: devices on all hosts together.
        segments: cost by message size, in ascending order of `up_to_bytes`; the last has no limit.
        algorithm: name of the all-reduce algorithm, for people.
        residual: median relative error of the fit that the segments come from; 0 if they are exact.
        source: where the numbers come from.
        sharing: how messages in flight share the network.
        min_message_ns: the least time of a message, however small.
        min_message_latency_ns: the part of `min_message_ns` that delays no other message, as a
            segment's `latency_ns`.
        start_ns: what starting a message takes from the computing thread. No part of any other time here.
        wakeup_ns: how much later a message starts that waited for another's end, in a window or as a second phase. A
            thread wakes up for the end while another one updates. No part of any other time here. Ignored with a bus,
            whose stages are timed by threads that wake up.
        bus: the devices of each host, among which a message is summed before it goes between hosts,
            and spread afterwards. UNSET, and left out of files: each worker has a host of its own,
            or `segments` are of a path that makes no difference between them.
        own_link: how many times as fast a message crosses its worker's own link as it is summed. It is more than 1 where a
            server's link is slower, or carries the messages of several workers. UNSET, and left out of files: as fast.
    """

    workers: int
    segments: tuple[CostSegment, ...] = msgspec.field(name="pieces")
    algorithm: str = "unstated"
    residual: float = 0.0
    source: str = "unstated"
    sharing: Sharing = ONE_BY_ONE
    min_message_ns: int = msgspec.field(default=0, name="least_ns")
    min_message_latency_ns: int = msgspec.field(default=0, name="least_latency_ns")
    start_ns: int = 0
    wakeup_ns: int = 0
    bus: Bus | UnsetType = UNSET
    own_link: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        need_int("workers", self.workers, 1, MAX_WORKERS)
        need(self.own_link is UNSET or 1 <= self.own_link < 1e6, "own_link", self.own_link, "a factor of 1 or more")
        most = MAX_SEGMENTS if self.bus is UNSET else MAX_SEGMENTS // 3  # so that `path` has no more
        need(0 < len(self.segments) <= most, "pieces", len(self.segments), f"1 to {most} of them")
        need_name("algorithm", self.algorithm)
        need_int("least_ns", self.min_message_ns, 0, MAX_NS)
        need_int("least_latency_ns", self.min_message_latency_ns, 0, self.min_message_ns)
        need_int("start_ns", self.start_ns, 0, MAX_NS)
        need_int("wakeup_ns", self.wakeup_ns, 0, MAX_NS)
        need(0 <= self.residual < 1e6, "residual", self.residual, "a relative error of 0 or more")
        for before, after in itertools.pairwise(self.segments):
            need(before.up_to_bytes < after.up_to_bytes, "pieces", after.up_to_bytes, "ascending up_to_bytes")
        need(self.segments[-1].up_to_bytes == MAX_BYTES, "pieces", self.segments[-1].up_to_bytes, "a last piece without limit")
        if self.bus is not UNSET:
            devices = self.bus.devices
            need(self.workers % devices == 0, "workers", self.workers, f"a multiple of the {devices} devices of a host")

    @staticmethod
    def line(workers: int, startup_ns: int, bytes_per_second: int, source: str = "stated") -> Network:
        """A network of one segment: the a + b * size of most papers."""
        return Network(workers, (CostSegment(startup_ns, bytes_per_second),), source=source)

    @property
    def hosts(self) -> int:
        """Number of hosts: as many as workers, unless there is a bus."""
        return self.workers if self.bus is UNSET else self.workers // self.bus.devices

    @property
    def between(self) -> Network:
        """The network between hosts alone, with one worker for each host; of a bus, without `wakeup_ns`."""
        return self if self.bus is UNSET else msgspec.structs.replace(self, workers=self.hosts, bus=UNSET, wakeup_ns=0)

    @property
    def path(self) -> Network:
        """The cost of a lone message's whole path, as a network without a bus: what policies plan
        with.

        A message of one packet pays for the three stages one after another. A larger one passes all
        of them at once: it pays their startups, one packet in each of the other stages, and its
        bytes at the rate of the slowest.
        """
        return self if self.bus is UNSET else _whole_path(self)

    @property
    def own_links(self) -> Network:
        """What a message costs on its worker's own link alone."""
        if self.own_link is UNSET:
            return self
        segments = tuple(
            msgspec.structs.replace(each, bytes_per_second=min(MAX_RATE, int(each.bytes_per_second * self.own_link)))
            for each in self.segments
        )
        return msgspec.structs.replace(self, segments=segments, own_link=UNSET)

    @property
    def overlaps(self) -> bool:
        """Whether messages in flight together can cost less than their sum, or overtake each other."""
        return self.sharing.max_in_flight > 1

    @property
    def startup_ns(self) -> int:
        """The `a` of MG-WFBP Eq. 10: large messages' startup, or `min_message_ns` if it is more."""
        path = self.path
        return max(path.segments[-1].startup_ns, path.min_message_ns)

    @property
    def bytes_per_second(self) -> int:
        """Rate of large messages: the 1 / b of a + b * size (MG-WFBP Eq. 10)."""
        return self.path.segments[-1].bytes_per_second

    def cost_ns(self, size_bytes: int) -> int:
        """Time of one all-reduce that is alone on the network (MG-WFBP Eq. 10).

        Args:
            size_bytes: bytes of the message on each rank.

        Returns:
            Nanoseconds, rounded up, at least `min_message_ns`.
        """
        if self.bus is not UNSET:
            return self.path.cost_ns(size_bytes)
        for segment in self.segments:  # not `segment_of`: policies call this for every pair of tensors
            if size_bytes <= segment.up_to_bytes:
                return max(self.min_message_ns, segment.cost_ns(size_bytes))
        raise AssertionError("the last segment has no limit")

    def stream_ns(self, size_bytes: int, messages: int) -> int:
        """Time of equal all-reduces that start together, between hosts.

        The largest of three limits counts. The link works on all messages one after another; so does the processor;
        and each message takes its own time, `max_in_flight` at once. Exact for one in flight and for two; for more,
        an incomplete last group may take up to one message's time longer.

        Args:
            size_bytes: bytes of each message.
            messages: how many start together, 1 or more.

        Returns:
            Nanoseconds until the last has ended.
        """
        chunks, alone_ns = self.sharing.chunks_of(size_bytes), self.between.cost_ns(size_bytes)
        if not self.overlaps:
            return messages * alone_ns
        latency_ns, overhead_ns, bytes_ns = self.parts_ns(size_bytes)
        busiest_ns, other_ns = max(overhead_ns, bytes_ns), min(overhead_ns, bytes_ns)
        groups = -(-messages // self.sharing.max_in_flight)
        per_message_ns = groups * alone_ns + (messages - 1) % self.sharing.max_in_flight * busiest_ns // chunks
        return max((latency_ns + other_ns) // chunks + messages * busiest_ns, per_message_ns)

    def parts_ns(self, size_bytes: int) -> tuple[int, int, int]:
        """The parts that `cost_ns` is the sum of.

        As a message grows beyond the size at which its bytes take `min_message_ns`, the latency
        within the minimum shrinks by the difference.

        Returns:
            Nanoseconds of latency, which delays no other message; of per-message overhead, during which the processor serves no
            other; and of bytes, which have the link to themselves.
        """
        segment = self.segment_of(size_bytes)
        alone_ns = segment.cost_ns(size_bytes)
        beside_bytes_ns = segment.startup_ns + max(0, self.min_message_ns - alone_ns)
        hidden_ns = min(beside_bytes_ns, self.min_message_latency_ns - max(0, alone_ns - self.min_message_ns))
        latency_ns = max(segment.latency_ns, hidden_ns) if self.overlaps else 0
        return latency_ns, beside_bytes_ns - latency_ns, alone_ns - segment.startup_ns

    def segment_of(self, size_bytes: int) -> CostSegment:
        """The segment that a message of `size_bytes` belongs to."""
        for segment in self.segments:
            if size_bytes <= segment.up_to_bytes:
                return segment
        raise AssertionError("the last segment has no limit")

    def occupied_ns(self, segment: CostSegment) -> int:
        """The part of a segment's startup, in ns, in which no other message uses the link."""
        return 0 if self.overlaps else segment.startup_ns


def staged(between: Network, enter: Stage, leave: Stage, packet_bytes: int) -> Network:
    """The cost of a lone message's path through three stages (see `Network.path`).

    Exact to rounding, except that a message which costs `between.min_message_ns` between hosts pays
    only the startups within hosts: so few bytes take next to no time there.

    Args:
        between: the second stage; it has no bus.
        enter, leave: the first and the last stage, of one rate.
        packet_bytes: a message passes from stage to stage in packets of this size.

    Returns:
        A network without a bus, with up to three segments for each one of `between`.
    """
    assert enter.bytes_per_second == leave.bytes_per_second
    inside = Fraction(NS_PER_SECOND, enter.bytes_per_second)
    inside_packet_ns = enter.bytes_ns(packet_bytes)
    added_ns = enter.startup_ns + leave.startup_ns
    segments: list[CostSegment] = []
    for segment in between.segments:
        outside = Fraction(NS_PER_SECOND, segment.bytes_per_second)
        begins_ns = enter.startup_ns + segment.startup_ns
        packet_ns = -(-packet_bytes * NS_PER_SECOND // segment.bytes_per_second)
        # of a message larger than a packet, the last stage has the most to do, or the one between hosts
        by_last_ns = begins_ns + inside_packet_ns + packet_ns + leave.startup_ns
        by_middle_ns = begins_ns + 2 * inside_packet_ns
        lines = [(packet_bytes, segment.startup_ns + added_ns, inside + outside + inside)]
        if outside <= inside:
            lines.append((segment.up_to_bytes, by_last_ns, inside))
        else:
            as_much_bytes = max(0, int((by_last_ns - by_middle_ns) / (outside - inside)))
            lines.append((as_much_bytes, by_last_ns, inside))
            lines.append((segment.up_to_bytes, by_middle_ns, outside))
        for most_bytes, startup_ns, byte_ns in lines:
            up_to_bytes = min(most_bytes, segment.up_to_bytes)
            if up_to_bytes > (segments[-1].up_to_bytes if segments else 0):
                rate = min(MAX_RATE, max(1, int(NS_PER_SECOND / byte_ns)))
                latency_ns = segment.latency_ns + startup_ns - segment.startup_ns if between.overlaps else 0
                segments.append(CostSegment(startup_ns, rate, up_to_bytes, latency_ns))
    least: dict[str, int] = {}
    if between.min_message_ns:
        least = {
            "min_message_ns": between.min_message_ns + added_ns,
            "min_message_latency_ns": between.min_message_latency_ns + added_ns if between.overlaps else 0,
        }
    return msgspec.structs.replace(between, segments=tuple(segments), **least)


@functools.lru_cache(maxsize=256)
def _whole_path(network: Network) -> Network:
    assert network.bus is not UNSET
    bus, between = network.bus, msgspec.structs.replace(network, bus=UNSET)
    return staged(between, bus.reduce_scatter, bus.all_gather, bus.packet_bytes)
