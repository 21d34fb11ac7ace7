"""Which packet a connection sends next: the specification, and a reference that the tests hold
every sender to.

A connection here is one direction of one lane between two processes. Three senders follow this
page: the data plane (`native/node/packet_queue.h`) and the two simulated fabrics of parameter
servers (`gradlane.sim.packets` packet by packet, `gradlane.sim.fluid` with infinitely small
packets). `native/wire/wire.md` states the same rule in the same words.

**Runs.** A sender hands packets over to a connection in runs. A run holds the packets of one message that travel on this
connection, in order of their offsets. On the way back from a server it holds the packets of one sum that leave together. A run
has a priority; 0 is the most urgent.

**Key.** Runs are ordered by the pair (urgency, number), the smallest first. The urgency is the
run's priority where the connection is ordered by priority (a plan with the wire "packet-priority";
a tensor that is "urgent first"), and otherwise 0. The number counts the runs of a connection in
order of hand-over.

**Sums alone by priority** (a plan with the wire "pull-priority"; a tensor with "urgent sums"). The urgency is the priority of
a run of sums, and 0 of what workers send. A connection may carry both, since a process may have a worker and a server. Each
packet of a sum then takes a place as a run of urgency 0 would, and in the next such place goes the packet of the sum with the
smallest key. (In the simulated fabrics the two directions are connections of their own, which take turns.)

**Choice.** When the link or the socket can take a packet, the sender takes the next packet of the
run with the smallest key. It chooses anew for each packet.

**Ties.** Among runs of equal urgency the one that was handed over first sends all of its packets
first; packets of equal runs never alternate. Without priorities all runs are equal, and the
connection is first in, first out.

**Preemption.** A more urgent run that is handed over between two packets of another run goes first,
from the next packet on. A packet that was taken is sent to its end. The preempted run keeps its
key, so it continues where it stopped, before every run of equal urgency that was handed over later.

Three things are said elsewhere. Of several connections, lanes of a more urgent network class have
the link first, and lanes of one class have equal shares. The `Dispatcher` says when a message is
handed over. For one call to the kernel the data plane takes up to 16 packets, and stops after the
first one at which they come to 24 KiB or more.

`tests/golden/wire_order.txt` has examples as inputs and expected packets. The command
`python -m tests.unit.wire_vectors` makes the file from `WireOrder`.
"""

from __future__ import annotations

import heapq

from gradlane.core.plan import Wire

Key = tuple[int, int]
"""(urgency, number) of a run; the smallest key goes first."""


def run_key(wire: Wire, priority: int, number: int, *, is_sum: bool) -> Key:
    """The key of a run, as the specification above defines it.

    Args:
        wire: `Plan.wire` of the plan that the run belongs to.
        priority: the message's priority, 0 or more; 0 is the most urgent.
        number: how many runs were handed over before this one. Any number that rises with each
            hand-over will do.
        is_sum: whether a server sends it.

    Returns:
        A pair that sorts runs in the order in which they are sent.
    """
    by_priority = wire == "packet-priority" or (is_sum and wire == "pull-priority")
    return (priority if by_priority else 0, number)


_Waiting = tuple[Key, int, int, int]  # (key, run, its next packet, its end)
PLACES = -1  # in place of a run: what goes there is the most urgent sum


def _take(waiting: list[_Waiting]) -> tuple[int, int]:
    key, run, packet, end = waiting[0]
    if packet + 1 < end:
        heapq.heapreplace(waiting, (key, run, packet + 1, end))
    else:
        heapq.heappop(waiting)
    return run, packet


class WireOrder:
    """One connection's order, by the specification above: runs in, packets out, without sockets or
    clocks.
    """

    def __init__(self, wire: Wire) -> None:
        """Start with nothing to send.

        Args:
            wire: `Plan.wire`, which says whether priorities count.
        """
        self._wire: Wire = wire
        self._runs = 0
        self._waiting: list[_Waiting] = []
        self._sums: list[_Waiting] = []  # if they are ordered among themselves: places in `_waiting` are theirs

    def enqueue(self, priority: int, packets: int, *, is_sum: bool = False) -> int:
        """Hand over a run.

        Args:
            priority: of the run, 0 or more; 0 is the most urgent.
            packets: how many packets the run has, 1 or more.
            is_sum: whether it is of sums, which a server sends.

        Returns:
            The run's number: 0 for the first run, then 1, and so on.
        """
        run = self._runs
        self._runs += 1
        key = run_key(self._wire, priority, run, is_sum=is_sum)
        if is_sum and self._wire == "pull-priority":
            heapq.heappush(self._sums, (key, run, 0, packets))
            heapq.heappush(self._waiting, ((0, run), PLACES, 0, packets))
        else:
            heapq.heappush(self._waiting, (key, run, 0, packets))
        return run

    def take(self) -> tuple[int, int]:
        """Choose the packet to send now.

        Returns:
            The run's number and the packet's place in the run, from 0.

        Raises:
            IndexError: nothing waits.
        """
        run, packet = _take(self._waiting)
        return _take(self._sums) if run == PLACES else (run, packet)

    def __bool__(self) -> bool:
        """Whether a packet waits."""
        return bool(self._waiting)
