"""The clock, the network, and processes, of which a seed decides every delay."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class World:
    """Simulated time, in seconds.

    Args:
        seed: of all that is drawn.
        traces: keep `trace`.

    Attributes:
        now: the time.
        rng: for whoever draws.
        trace: what happened, in words, with the time.
    """

    def __init__(self, seed: int, traces: bool = False) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self.trace: list[str] = []
        self._traces = traces
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have `event` called at a time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), event))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Let time pass until nothing is left to happen, or `until`, or until it `is_over`."""
        while self._events and self._events[0][0] <= until and not is_over():
            self.now, _, event = heapq.heappop(self._events)
            event()

    def say(self, who: object, what: str, *values: Any) -> None:
        """Add a line to the trace. `what` is formatted with `values`, as `str.format` does."""
        if self._traces:
            self.trace.append(f"{self.now:9.4f} s  {who}: {what.format(*values)}")


class Process:
    """What runs, is stopped and continues, or ends. What happens to a stopped one happens when it continues."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.lives, self.is_stopped = True, False
        self.ends: list[End[Any]] = []  # of its connections, open ones
        self._later: deque[Callable[[], None]] = deque()

    def __str__(self) -> str:
        return self.name

    def after(self, delay: float, event: Callable[[], None]) -> None:
        """Have this process do something in `delay` seconds, or later if it is stopped then."""
        self.world.at(self.world.now + delay, lambda: self._do(event))

    def _do(self, event: Callable[[], None]) -> None:
        if self.is_stopped:
            self._later.append(event)
        elif self.lives:
            event()

    def stop(self) -> None:
        """As SIGSTOP does: its connections stay open."""
        self.is_stopped = True

    def go_on(self) -> None:
        """As SIGCONT does."""
        self.is_stopped = False
        while self._later and not self.is_stopped:
            self._do(self._later.popleft())

    def end(self, loses: bool = False) -> None:
        """The process is gone, and with it its connections.

        Args:
            loses: what is still on its way on them is lost.
        """
        self.lives, self.is_stopped = False, False
        self._later.clear()
        for end in list(self.ends):
            end.close(loses)


class Network:
    """Connections between processes. Messages of one direction of one connection come in order; all else is drawn.

    Args:
        latency_s: of most messages; some take up to 0.2 s more.
    """

    def __init__(self, world: World, latency_s: float) -> None:
        self._world, self.latency_s = world, latency_s

    def delay(self) -> float:
        """Of one message."""
        rng = self._world.rng
        return self.latency_s * (0.5 + rng.random()) + (rng.random() * 0.2 if rng.random() < 0.02 else 0.0)


class End(Generic[Item]):
    """One process's end of a connection.

    Attributes:
        inbox: what has come and has not been read; None where the other end has closed.
        peer: the other end.
        is_open: whether this end is not closed.
    """

    def __init__(self, network: Network, owner: Process, on_readable: Callable[[End[Item]], None]) -> None:
        self.owner, self._network, self._on_readable = owner, network, on_readable
        self.peer: End[Item]
        self.inbox: deque[Item | None] = deque()
        self.is_open, self.is_severed = True, False
        self._last = 0.0  # when the latest message to the other end arrives
        self._epoch = 0
        owner.ends.append(self)

    def send(self, item: Item | None) -> None:
        """Send something; None says that this end is closed."""
        if self.is_severed or not self.peer.is_open:
            return
        world, epoch, peer = self.owner.world, self._epoch, self.peer
        self._last = max(self._last, world.now + self._network.delay())

        def arrive() -> None:
            if peer.is_open and epoch == self._epoch:
                peer.inbox.append(item)
                peer._on_readable(peer)

        world.at(self._last, arrive)

    def close(self, loses: bool = False) -> None:
        """Close this end; what was sent before still arrives, unless the connection `loses` it."""
        if self.is_open:
            self.is_open = False
            self.owner.ends.remove(self)
            self._epoch += loses
            self.send(None)

    def sever(self) -> None:
        """From now on nothing arrives in either direction, and nobody is told."""
        self.is_severed = self.peer.is_severed = True
        self._epoch += 1
        self.peer._epoch += 1

    def reset(self) -> None:
        """The connection ends for both."""
        for end in (self, self.peer):
            end.send(None)


def connect(
    network: Network, a: Process, b: Process, on_a: Callable[[End[Any]], None], on_b: Callable[[End[Any]], None]
) -> End[Any]:
    """A new connection; returns `a`'s end."""
    one: End[Any] = End(network, a, on_a)
    other: End[Any] = End(network, b, on_b)
    one.peer, other.peer = other, one
    return one
