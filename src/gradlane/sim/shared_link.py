"""SharedLink: all-reduces that share a network, in virtual time.

Of each lane the `Sharing.max_in_flight` messages that were added first are in flight, the most
urgent first. A message passes in chunks, and each chunk has three stages: latency, which delays no
other message; per-message overhead, which the lane's processor spends on one message at a time while
the link carries another's bytes; and the chunk's bytes, which have the link to themselves. Processors
and link are each given to the message that came first; on the link a more urgent message preempts at
once, and the message that it interrupts continues where it stopped. On a network whose messages do not
overlap there is one processor, and the overhead of one message also keeps the link from the messages of
other lanes.

Where somebody waits for the end of a message, its lane's processor has to tell them: the message is in
flight until it has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import accumulate

from gradlane.core.cluster import Link
from gradlane.core.network import Network
from gradlane.sim.fabric import FOREVER
from gradlane.units import NS_PER_SECOND


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
        """All chunks have passed: let the processor tell whoever waits for that."""
        self.is_told, self.since_ns, self.handling_ns = True, now_ns, takes_ns

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
        self._handled: list[_Passing] = []  # one of each lane at most, or one at all
        self._on_link: _Passing | None = None
        self._now_ns = 0  # up to which these two have been carried
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
            parts, turns = _half(parts, half), -(-turns // 2)
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
        passing = self._on_link if self._turn_ends_ns() == next_ns else None
        self._carry(next_ns)
        # of all that ends now, each call sees one
        ended = next((handled for handled in self._handled if handled.is_told and not handled.handling_ns), None)
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
        return self._now_ns + min((handled.handling_ns for handled in self._handled), default=FOREVER)

    def _turn_ends_ns(self) -> int:
        passing = self._on_link
        if passing is None:
            return FOREVER
        if self._pace is None:
            return self._now_ns + passing.transfer_ns
        return self._pace.finish_ns(self._now_ns, passing.transfer_ns)

    def _settle(self) -> None:
        """Choose which messages are handled and which has the link: of the most urgent class, the one
        that waits longest.
        """
        self._on_link = self._next_ns = None
        heads: dict[int, _Passing] = {}
        for passing in self._under_way():
            if passing.since_ns == FOREVER:
                passing.next_turn(self._now_ns)
            if passing.since_ns > self._now_ns:
                continue
            if passing.handling_ns or passing.is_told:
                processor = passing.lane if self._overlaps else 0
                if processor not in heads or passing.order < heads[processor].order:
                    heads[processor] = passing
            elif self._on_link is None or passing.order < self._on_link.order:
                self._on_link = passing
        self._handled = list(heads.values())
        if self._handled and self._on_link is not None and not self._overlaps:
            if self._handled[0].order < self._on_link.order:
                self._on_link = None
            else:
                self._handled = []

    def _carry(self, now_ns: int) -> None:
        """Let time pass to `now_ns`.

        Neither the handling nor the chunk on the link ends before that.
        """
        begun_ns, self._now_ns = self._now_ns, now_ns
        for handled in self._handled:
            handled.handling_ns -= now_ns - begun_ns
            if not handled.handling_ns and self._overlaps:  # otherwise it has the link already
                handled.since_ns = now_ns
        if self._on_link is None:
            return
        if self._pace is None:
            self._on_link.transfer_ns -= now_ns - begun_ns
            return
        while begun_ns < now_ns:
            rate, changes_ns = self._pace.at(begun_ns)
            until_ns = now_ns if changes_ns is None else min(now_ns, changes_ns)
            self._on_link.transfer_ns -= rate * (until_ns - begun_ns) // NS_PER_SECOND
            begun_ns = until_ns


def _half(parts: tuple[int, int, int], half: int) -> tuple[int, int, int]:
    """Half of each part, in whole nanoseconds of their sum, so that two halves take what one
    operation does.
    """
    first, second, third = (end - end // 2 if half else end // 2 for end in accumulate(parts))
    return first, second - first, third - second
