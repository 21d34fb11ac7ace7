"""Fluid: parameter servers with homogeneous workers; one stands for all.

Packets are infinitely small, as in the models of Mercury and ByteScheduler, so that a more urgent
message takes over at once. There are two stages, push and pull. A stage's rate is the least that a
link leaves to each worker: its share of its host's rate, or the servers' rate divided among all
workers.
On shared hosts both stages share the links. Within a stage the most urgent network class goes
first, and the lanes of one class get equal shares. A lane is a connection, and follows the order of
`gradlane.schedule.wire_order`. The key of a sum has the number of its push, or of what asked for it.

Work is counted in bytes times 10^9, so that a rate times nanoseconds is work without rounding. An
event that falls within a nanosecond happens at the end of that nanosecond.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

from msgspec import UNSET

from gradlane.core.cluster import Cluster, Link
from gradlane.core.fields import MAX_RATE
from gradlane.core.plan import returns_whole
from gradlane.schedule.wire_order import Key, run_key
from gradlane.sim.fabric import FOREVER, Job, Notice
from gradlane.units import NS_PER_SECOND


class _Flow:
    """A message: its work left to push, and the work that the servers have and the worker lacks."""

    __slots__ = (
        "backlog",
        "by_packet",
        "feed",
        "key",
        "message",
        "pull_rate",
        "rank",
        "released",
        "size_bytes",
        "unpushed",
        "waits",
    )

    def __init__(self, rank: int, message: int, size_bytes: int, key: Key, by_packet: bool) -> None:
        self.rank, self.message, self.size_bytes, self.key, self.by_packet = rank, message, size_bytes, key, by_packet
        self.unpushed = size_bytes * NS_PER_SECOND
        self.backlog = 0
        self.released = False  # all of it is with the servers, and may be pulled
        self.waits = False  # among its stream's `pulling`
        self.feed = self.pull_rate = 0


class _Connection:
    """One lane of one job: heaps by key of the messages to push, and of those that have work to
    pull.

    Only the first message of each heap moves, so that thousands of others cost nothing while they
    wait. A message that is pushed may be pulled at the same time.
    """

    __slots__ = ("network_class", "pulling", "pushing")

    def __init__(self, network_class: int) -> None:
        self.network_class = network_class
        self.pushing: list[tuple[Key, _Flow]] = []
        self.pulling: list[tuple[Key, _Flow]] = []

    @property
    def fed(self) -> _Flow | None:
        """The message that is being pushed and comes back as fast as it is pushed; None if there is
        none.
        """
        flow = self.pushing[0][1] if self.pushing else None
        return flow if flow is not None and flow.by_packet and flow.feed and not flow.backlog else None

    def moving(self) -> list[_Flow]:
        """The messages that can be pulled now, at most two, in order of their keys."""
        first, fed = self.pulling[0][1] if self.pulling else None, self.fed
        return sorted((flow for flow in (first, fed) if flow is not None), key=lambda flow: flow.key)


class FluidFabric:
    """A `gradlane.sim.fabric.Fabric` with one rank a job: rank r is the worker that stands for all
    workers of job r.
    """

    def __init__(self, jobs: Sequence[Job], cluster: Cluster) -> None:
        assert cluster.is_homogeneous
        assert cluster.packet_startup_ns is UNSET
        assert not any(job.plan.is_acknowledged for job in jobs)
        self.events = 0
        self._jobs, self._cluster = jobs, cluster
        self._now = 0
        self._numbers = 0
        self._sender_free = [0] * len(jobs)
        self._later: list[tuple[int, int, _Connection, _Flow]] = []  # flows that enter the push or the pull stage at a time
        self._streams: dict[tuple[int, int, int], _Connection] = {}  # by class, rank and lane
        self._unasked: dict[tuple[int, int], tuple[_Connection, _Flow]] = {}  # second halves, by rank and message
        self._moving: list[_Flow] = []  # those with a rate
        self._served: list[_Flow] = []  # those with a pull rate
        worker, server = cluster.hosts[cluster.workers[0].host], cluster.hosts[cluster.servers[0].host]
        self._links = (worker.up, worker.down, server.up, server.down)
        self._shared = cluster.workers[0].host in {place.host for place in cluster.servers}
        self._rates_until = -1
        # links without steps have the same rates throughout
        self._fixed = None if any(link.steps for link in self._links) else self._capacities()

    # -- what the owner calls ------------------------------------------------------------------------------

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        assert now_ns == self._now or not any(s.pushing or s.pulling for s in self._streams.values()), (
            "run to the time of a hand-over before it"
        )
        self._now = now_ns
        plan = self._jobs[rank].plan
        details = plan.messages[message]
        network_class = plan.lanes[details.lane].network_class(self._cluster.network_classes)
        name = (network_class, rank, details.lane)
        if name not in self._streams:
            self._streams[name] = _Connection(network_class)
        key = run_key(plan.wire, details.priority, self._numbers, is_sum=False)
        by_packet = not returns_whole(plan.wire) and not details.two_phase
        # where owners share it unevenly, the largest part sets the pace
        flow = _Flow(rank, message, plan.sum_bytes(message, len(self._cluster.workers)), key, by_packet)
        if details.two_phase:
            self._unasked[rank, message] = self._streams[name], flow
        # the sender prepares messages one after another, while others are on the wire
        self._sender_free[rank] = max(self._sender_free[rank], now_ns) + self._cluster.startup_ns
        heapq.heappush(self._later, (self._sender_free[rank], self._numbers, self._streams[name], flow))
        self._numbers += 1
        self._rates_until = -1

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        assert now_ns == self._now, "a second half begins when a first half or another second half ends"
        stream, flow = self._unasked.pop((rank, message))
        # the sum is handed over now: among equals, sums leave in the order in which they were asked for
        self._return(stream, flow, self._numbers)
        self._rates_until = -1

    def next_ns(self) -> int:
        if self._rates_until < self._now:
            self._share_out()
        return min(self._rates_until, self._later[0][0] if self._later else FOREVER)

    def run(self, until_ns: int) -> list[Notice]:
        while True:
            at_ns = self.next_ns()
            if at_ns > until_ns:
                self._advance(until_ns)
                return []
            self.events += 1
            notices = self._advance(at_ns)
            while self._later and self._later[0][0] <= at_ns:
                _, _, stream, flow = heapq.heappop(self._later)
                if flow.unpushed:
                    heapq.heappush(stream.pushing, (flow.key, flow))
                else:
                    flow.released = True
                    flow.backlog = flow.size_bytes * NS_PER_SECOND
                    flow.waits = True
                    heapq.heappush(stream.pulling, (flow.key, flow))
                self._rates_until = -1
            if notices:
                return notices

    # -- how it flows --------------------------------------------------------------------------------------

    def _advance(self, to_ns: int) -> list[Notice]:
        passed = to_ns - self._now
        if to_ns >= self._rates_until:
            self._rates_until = -1
        self._now = to_ns
        notices: list[Notice] = []
        heads = [(stream, stream.pushing[0][1]) for stream in self._streams.values() if stream.pushing]
        for _, flow in heads:
            pushed = min(flow.unpushed, flow.feed * passed)
            flow.unpushed -= pushed
            if flow.by_packet:
                flow.backlog += pushed
        for flow in self._served:
            flow.backlog = max(0, flow.backlog - flow.pull_rate * passed)
        for stream, flow in heads:
            if flow.backlog and not flow.waits:
                flow.waits = True
                heapq.heappush(stream.pulling, (flow.key, flow))
                self._rates_until = -1
            if not flow.unpushed:
                heapq.heappop(stream.pushing)
                self._rates_until = -1
                notices.append(Notice(to_ns, flow.rank, flow.message, False))
                flow.released = flow.by_packet
                if not flow.by_packet and (flow.rank, flow.message) not in self._unasked:
                    self._return(stream, flow, flow.key[1])
        ended = [flow for _, flow in heads if flow.released and not flow.waits]
        for stream in self._streams.values():
            while stream.pulling and not stream.pulling[0][1].backlog:
                flow = heapq.heappop(stream.pulling)[1]
                flow.waits = False
                self._rates_until = -1
                if flow.released:
                    ended.append(flow)
        return notices + [Notice(to_ns, flow.rank, flow.message, True) for flow in ended]

    def _return(self, stream: _Connection, flow: _Flow, number: int) -> None:
        """The servers have all of `flow`, which is returned whole: they sum it, update parameters,
        and return it. `number` is that of its key.
        """
        cluster, plan = self._cluster, self._jobs[flow.rank].plan
        flow.key = run_key(plan.wire, plan.messages[flow.message].priority, number, is_sum=True)
        delay_ns = cluster.startup_ns
        # each server has its share; those of the other workers were summed as they came
        for rate in (cluster.sum_bytes_per_second, cluster.update_bytes_per_second):
            delay_ns += 0 if rate is None else -(-flow.size_bytes * NS_PER_SECOND // (rate * len(cluster.servers)))
        heapq.heappush(self._later, (self._now + delay_ns, self._numbers, stream, flow))
        self._numbers += 1

    def _share_out(self) -> None:
        """Set the rates of all flows from now on, and the time until which they hold."""
        push_rate, pull_rate, shared, changes_ns = self._fixed or self._capacities()
        for flow in self._moving:
            flow.feed = flow.pull_rate = 0
        self._moving.clear()
        self._served.clear()
        pushing = [stream for stream in self._streams.values() if stream.pushing]
        if shared is not None and pushing:
            # evenly where both want more; packets that come back at once want as much as is pushed
            if any(stream.pulling for stream in self._streams.values()) or any(s.pushing[0][1].by_packet for s in pushing):
                push_rate = min(push_rate, max(shared // 2, shared - pull_rate))
            push_rate = min(push_rate, shared)
        until_ns = FOREVER
        left = push_rate
        for stream, given in _allot([(stream, push_rate) for stream in pushing], push_rate):
            flow = stream.pushing[0][1]
            flow.feed = given
            self._moving.append(flow)
            left -= given
            if given:
                until_ns = min(until_ns, self._now - -flow.unpushed // given)
        if shared is not None:
            pull_rate = min(pull_rate, shared - (push_rate - left))
        wants = []
        for stream in self._streams.values():
            if stream.pulling:
                wants.append((stream, pull_rate))
            elif (fed := stream.fed) is not None:
                wants.append((stream, min(pull_rate, fed.feed)))
        for stream, given in _allot(wants, pull_rate):
            for flow in stream.moving():
                flow.pull_rate = given if flow.backlog else min(given, flow.feed)
                given -= flow.pull_rate
                self._served.append(flow)
                self._moving.append(flow)
                gain = flow.pull_rate - (flow.feed if flow.unpushed else 0)
                if flow.backlog and gain > 0:
                    until_ns = min(until_ns, self._now - -flow.backlog // gain)
        self._rates_until = min(until_ns, changes_ns) if pushing or wants else FOREVER

    def _capacities(self) -> tuple[int, int, int | None, int]:
        """Rates of push and of pull for each worker, the rate of both together on shared hosts, and
        when these change.
        """
        workers, servers = len(self._cluster.workers), len(self._cluster.servers)
        hosts = len({worker.host for worker in self._cluster.workers})
        devices = workers // hosts
        (up, down, server_up, server_down), changes_ns = self._link_rates()
        push, pull, shared = MAX_RATE, MAX_RATE, None
        if not self._shared:
            push = min(up // devices, server_down * servers // workers)
            pull = min(down // devices, server_up * servers // workers)
        elif hosts > 1:
            # a host sends its workers' gradients to the other servers and its server's sums to their workers
            shared = min(up, down) * hosts // (devices * (hosts - 1))
        cluster = self._cluster
        work = Fraction(0)  # seconds that all servers together need for a byte of every worker
        if cluster.sum_bytes_per_second is not None:
            work += Fraction(workers, servers * cluster.sum_bytes_per_second)
        if cluster.update_bytes_per_second is not None:
            work += Fraction(1, servers * cluster.update_bytes_per_second)
        return max(1, min(push, int(1 / work)) if work else push), max(1, pull), shared, changes_ns

    def _link_rates(self) -> tuple[tuple[int, int, int, int], int]:
        at: list[tuple[int, int | None]] = [_constant(link) or link.at(self._now) for link in self._links]
        up, down, server_up, server_down = (rate for rate, _ in at)
        return (up, down, server_up, server_down), min(FOREVER if change is None else change for _, change in at)


def _constant(link: Link) -> tuple[int, None] | None:
    return None if link.steps else (link.bytes_per_second, None)


def _allot(wants: list[tuple[_Connection, int]], capacity: int) -> list[tuple[_Connection, int]]:
    """Share `capacity` among streams: by class, equally within a class, to none more than the rate
    that it wants.
    """
    if len(wants) == 1:
        return [(wants[0][0], min(wants[0][1], capacity))]
    given: list[tuple[_Connection, int]] = []
    for network_class in sorted({stream.network_class for stream, _ in wants}):
        # those that want least first, so that what they leave goes to the others
        of_class = sorted((want for want in wants if want[0].network_class == network_class), key=lambda want: want[1])
        for place, (stream, wanted) in enumerate(of_class):
            share = min(wanted, capacity // (len(of_class) - place))
            capacity -= share
            given.append((stream, share))
    return given
