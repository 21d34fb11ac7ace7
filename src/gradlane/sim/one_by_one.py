"""OneByOne: what `SharedLink` says of a network on which messages do not overlap, in fewer steps.

A message has the whole network for its startup and its bytes. So one event a message is enough, its end, where
`SharedLink` also stops where the startup ends. Each lane has its first message in flight. Of these the most urgent
has the network; of equally urgent ones, that which has been first in its lane for longest. A message that a more
urgent one interrupts continues where it stopped. `tests/unit/test_one_by_one.py` compares both.
"""

from __future__ import annotations

from collections import defaultdict, deque

from gradlane.core.network import Network
from gradlane.sim.fabric import FOREVER
from gradlane.sim.shared_link import half_of


class _Waiting:
    """A message of a lane: its rank among the messages in flight, and what is left of it."""

    __slots__ = ("lane", "left_ns", "message", "rank")

    def __init__(self, rank: tuple[int, int, int], lane: int, message: int, left_ns: int) -> None:
        # (network class, since when in flight, number)
        self.rank, self.lane, self.message, self.left_ns = rank, lane, message, left_ns


class OneByOne:
    """The messages in flight on one network. The times that its owner passes never go back."""

    def __init__(self, network: Network) -> None:
        """Begin at time 0 with nothing in flight.

        Args:
            network: what messages cost; it does not overlap them.
        """
        assert not network.overlaps
        self._network = network
        self._costs: dict[tuple[int, int | None], int] = {}  # by size and half: models have few sizes, and slices fewer
        self._lanes: defaultdict[int, deque[_Waiting]] = defaultdict(deque)
        self._numbers = 0
        self._carried: _Waiting | None = None
        self._ends_ns = FOREVER  # when the message ends that has the network

    def add(
        self, now_ns: int, message: int, size_bytes: int, network_class: int, half: int | None = None, lane: int = 0
    ) -> None:
        """Start a message, as `SharedLink.add` does; all messages of a lane have one class."""
        takes_ns = self._costs.get((size_bytes, half))
        if takes_ns is None:
            parts = self._network.parts_ns(size_bytes)
            takes_ns = self._costs[size_bytes, half] = sum(parts if half is None else half_of(parts, half))
        self._numbers += 1
        waiting = _Waiting((network_class, now_ns, self._numbers), lane, message, takes_ns)
        queue = self._lanes[lane]
        queue.append(waiting)
        if len(queue) > 1:
            return
        carried = self._carried
        if carried is None or waiting.rank < carried.rank:
            if carried is not None:
                carried.left_ns = self._ends_ns - now_ns
            self._carried, self._ends_ns = waiting, now_ns + takes_ns

    def next_ns(self) -> int:
        """As `SharedLink.next_ns`: when the next message ends."""
        return self._ends_ns

    def run(self) -> int | None:
        """Let time pass to `next_ns`, and return the message that ends then."""
        ended, now_ns = self._carried, self._ends_ns
        if ended is None:
            return None
        queue = self._lanes[ended.lane]
        queue.popleft()
        if queue:
            first = queue[0]
            first.rank = first.rank[0], now_ns, first.rank[2]
        following = min((each[0] for each in self._lanes.values() if each), key=lambda each: each.rank, default=None)
        self._carried = following
        self._ends_ns = FOREVER if following is None else now_ns + following.left_ns
        return ended.message
