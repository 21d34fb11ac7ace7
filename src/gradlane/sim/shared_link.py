"""SharedLink: all-reduces that share a network, in virtual time.

Of each lane the `Sharing.max_in_flight` messages that were added first are in flight, the most urgent
first. A message passes in chunks, and each chunk has three stages. Latency delays no other message.
Per-message overhead is what the processor spends on one message at a time, while the link carries
another's bytes. Then come the chunk's bytes. A lane passes its chunks one after another, and lanes share
the link evenly, as their connections do. On a network that serves classes of lanes the most urgent class
has the link and the processor to itself. A message that it interrupts continues where it stopped. Within
a class the processor, and a lane's part of the link, are given to the message that came first. On a
network whose messages do not overlap, the overhead of a message and its bytes keep the link from all
others.

Where somebody waits for the end of a message, the processor has to tell them: the message is in flight
until it has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import accumulate

from gradlane.core.cluster import Link
from gradlane.core.network import Network
from gradlane.sim.fabric import FOREVER


class _Passing:
    """A message in flight, or waiting to be: its chunks, and what is left of the present one."""

    __slots__ = ("_parts", "_turn", "_turns", "handling_ns", "is_told", "key", "lane", "message", "since_ns", "transfer_ns")

    def __init__(self, key: tuple[int, int], lane: int, message: int, turns: int, parts: tuple[int, int, int]) -> None:
        self.key, self.lane, self.message = key, lane, message
        self._turns, self._turn, self._parts = turns, -1, parts
        # when the present chunk can be handled, or since when it waits for the link; FOREVER: not in
        # flight yet
        self.since_ns = FOREVER
        self.handling_ns = self.transfer_ns = 0
        self.is_told = False  # all chunks have passed; what is left is to tell of it

    def next_turn(self, now_ns: int) -> bool:
        """Begin the next chunk. Returns False if there is none."""
        self._turn += 1
        if self._turn == self._turns:
            return False
        latency_ns, self.handling_ns, self.transfer_ns = (
            part * (self._turn + 1) // self._turns - part * self._turn // self._turns for part in self._parts
        )
        self.since_ns = now_ns + latency_ns
        return True

    def tell(self, now_ns: int, takes_ns: int) -> None:
        """All chunks have passed: let the processor report that to the waiting thread."""
        self.is_told, self.since_ns, self.handling_ns = True, now_ns, takes_ns

    @property
    def network_class(self) -> int:
        return self.key[0]

    @property
    def order(self) -> tuple[int, int, int]:
        network_class, number = self.key
        return network_class, self.since_ns, number


class SharedLink:
    """The messages in flight on one network. The times that its owner passes never go back."""

    def __init__(
        self, network: Network, pace: Link | None = None, telling_ns: Callable[[int], int] = lambda message: 0
    ) -> None:
        """Begin at time 0 with nothing in flight.

        Args:
            network: what messages cost, and how they share the link.
            pace: how the network's rate changes over time: a link that carries 10^9 bytes per
                second while the network has its own rate. None: the rate never changes.
            telling_ns: what it takes the processor to tell of the end of a message, asked when its
                last byte has passed.
        """
        self._telling_ns = telling_ns
        self._network, self._pace = network, pace
        self._at_once, self._overlaps = network.sharing.max_in_flight, network.overlaps
        self._lanes: dict[int, list[tuple[tuple[int, int], _Passing]]] = {}
        self._numbers = 0
        self._handled: _Passing | None = None
        self._on_link: list[_Passing] = []  # one of each lane at most, which share it evenly; the next to leave is first
        self._now_ns = 0  # up to which these have been carried
        self._next_ns: int | None = FOREVER  # `next_ns`, as fabrics ask often; None: to be found

    def add(
        self,
        now_ns: int,
        message: int,
        size_bytes: int,
        network_class: int,
        half: int | None = None,
        lane: int = 0,
    ) -> None:
        """Start a message.

        Args:
            now_ns: the time, in ns.
            message: what `run` returns when the message has ended; not in flight now.
            size_bytes: the message's bytes, 1 or more.
            network_class: the class of its lane; 0 is the most urgent.
            half: 0 for the reduce-scatter and 1 for the all-gather of a two-phase message; None for
                a whole all-reduce.
            lane: its lane. Each lane has `Sharing.max_in_flight` messages in flight at a time.
        """
        parts = self._network.parts_ns(size_bytes)
        turns = self._network.sharing.chunks_of(size_bytes) if self._overlaps else 1
        if half is not None:
            parts, turns = half_of(parts, half), -(-turns // 2)
        self._carry(now_ns)
        key = (network_class, self._numbers)
        self._numbers += 1
        insort(self._lanes.setdefault(lane, []), (key, _Passing(key, lane, message, turns, parts)))
        self._settle()

    def next_ns(self) -> int:
        """The time in ns of the next event if nothing is added before; `FOREVER` if none."""
        if self._next_ns is None:
            after = min(self._handling_ends_ns(), self._turn_ends_ns())
            for passing in self._under_way():
                if self._now_ns < passing.since_ns < after:
                    after = passing.since_ns
            self._next_ns = after
        return self._next_ns

    def run(self) -> int | None:
        """Let time pass to `next_ns`.

        Returns:
            The message that has ended then; None if none has.
        """
        next_ns = self.next_ns()
        passing = self._on_link[0] if self._turn_ends_ns() == next_ns else None
        handled = self._handled
        self._carry(next_ns)
        # of all that ends now, each call sees one
        ended = handled if handled is not None and handled.is_told and not handled.handling_ns else None
        if ended is None and passing is not None and not passing.next_turn(next_ns):
            takes_ns = self._telling_ns(passing.message)
            if takes_ns:
                passing.tell(next_ns, takes_ns)
            else:
                ended = passing
        if ended is not None:
            waiting = self._lanes[ended.lane]
            del waiting[bisect_left(waiting, (ended.key,))]
        self._settle()
        return None if ended is None else ended.message

    def _under_way(self) -> Iterator[_Passing]:
        return (passing for waiting in self._lanes.values() for _, passing in waiting[: self._at_once])

    def _handling_ends_ns(self) -> int:
        return FOREVER if self._handled is None else self._now_ns + self._handled.handling_ns

    def _turn_ends_ns(self) -> int:
        if not self._on_link:
            return FOREVER
        left_ns = self._on_link[0].transfer_ns * len(self._on_link)
        if self._pace is None:
            return self._now_ns + left_ns
        return self._pace.finish_ns(self._now_ns, left_ns)

    def _settle(self) -> None:
        """Choose which message is handled and which have the link: of the most urgent class, of each lane the one
        that waits longest.
        """
        self._next_ns = self._handled = None
        waiting: dict[int, _Passing] = {}  # for the link, the first of each lane
        for passing in self._under_way():
            if passing.since_ns == FOREVER:
                passing.next_turn(self._now_ns)
            if passing.since_ns > self._now_ns:
                continue
            if passing.handling_ns or passing.is_told:
                if self._handled is None or passing.order < self._handled.order:
                    self._handled = passing
                continue
            lane = passing.lane if self._overlaps else 0
            if lane not in waiting or passing.order < waiting[lane].order:
                waiting[lane] = passing
        most_urgent = min((passing.network_class for passing in waiting.values()), default=0)
        self._on_link = [passing for passing in waiting.values() if passing.network_class == most_urgent]
        if len(self._on_link) > 1:
            self._on_link.sort(key=lambda passing: passing.transfer_ns)
        if self._handled is not None and self._on_link and not self._overlaps:
            if self._handled.order < self._on_link[0].order:
                self._on_link = []
            else:
                self._handled = None

    def _carry(self, now_ns: int) -> None:
        """Let time pass to `now_ns`.

        Neither the handling nor a chunk on the link ends before that.
        """
        begun_ns, self._now_ns = self._now_ns, now_ns
        if self._handled is not None:
            self._handled.handling_ns -= now_ns - begun_ns
            if not self._handled.handling_ns and self._overlaps:  # otherwise it has the link already
                self._handled.since_ns = now_ns
        if self._on_link:
            # of a link on which a byte is a nanosecond of the nominal rate
            passed_ns = now_ns - begun_ns if self._pace is None else self._pace.carried_bytes(begun_ns, now_ns)
            each_ns = passed_ns // len(self._on_link)
            for passing in self._on_link:
                passing.transfer_ns -= each_ns


def half_of(parts: tuple[int, int, int], half: int) -> tuple[int, int, int]:
    """Half of each part, in whole nanoseconds of their sum, so that two halves take what one
    operation does.
    """
    first, second, third = (end - end // 2 if half else end // 2 for end in accumulate(parts))
    return first, second - first, third - second
