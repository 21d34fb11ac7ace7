"""Fluid: parameter servers and workers that are all alike, one worker standing for all.

Bytes flow like water, so that a more urgent message takes over at once: packets are infinitely small, as in the
models of Mercury and ByteScheduler. There are two stages, push and pull. A stage's rate is what the narrowest link
leaves to each worker: its own, or the servers' over all workers; on shared hosts both stages share the links.
Within a stage the most urgent network class goes first, the lanes of a class share evenly, and a lane serves in
the order of hand-over, or on a packet-priority wire by priority.

Work is counted in bytes times 10^9, so that a rate times nanoseconds is work without rounding; an end that falls
within a nanosecond is put at its end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from gradlane.core.cluster import Cluster, Link
from gradlane.core.network import MAX_RATE
from gradlane.sim.fabric import FOREVER, Job, Notice
from gradlane.units import NS_PER_SECOND


class _Flow:
    """One message: work left to push, and work that the servers have and the worker has not."""

    __slots__ = ("backlog", "feed", "key", "message", "pull_rate", "rank", "released", "size_bytes", "stream", "unpushed")

    def __init__(self, rank: int, message: int, size_bytes: int, stream: tuple[int, int, int], key: tuple[int, int]) -> None:
        self.rank, self.message, self.size_bytes, self.stream, self.key = rank, message, size_bytes, stream, key
        self.unpushed = size_bytes * NS_PER_SECOND
        self.backlog = 0
        self.released = False  # whole messages: may be pulled
        self.feed = self.pull_rate = 0


class FluidFabric:
    """Rank r is job r."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster) -> None:
        assert cluster.is_alike
        self.events = 0
        self._jobs, self._cluster = jobs, cluster
        self._now = 0
        self._numbers = 0
        self._sender_free = [0] * len(jobs)
        self._later: list[tuple[int, int, _Flow]] = []  # flows that enter the push or the pull stage at a time
        self._pushing: list[_Flow] = []
        self._pulling: list[_Flow] = []
        worker, server = cluster.hosts[cluster.workers[0].host], cluster.hosts[cluster.servers[0].host]
        self._links = (worker.up, worker.down, server.up, server.down)
        self._shared = cluster.workers[0].host in {place.host for place in cluster.servers}
        self._rates_until = -1

    # -- what the owner calls ------------------------------------------------------------------------------

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        assert now_ns == self._now or not (self._pushing or self._pulling), "run to the time of a hand-over before it"
        self._now = now_ns
        plan = self._jobs[rank].plan
        details = plan.messages[message]
        urgency = details.priority if plan.wire == "packet-priority" else 0
        stream = (plan.lanes[details.lane].network_priority, rank, details.lane)
        flow = _Flow(rank, message, details.size_bytes, stream, (urgency, self._numbers))
        # the sender prepares messages one after another, while others are on the wire
        self._sender_free[rank] = max(self._sender_free[rank], now_ns) + self._cluster.startup_ns
        heapq.heappush(self._later, (self._sender_free[rank], self._numbers, flow))
        self._numbers += 1
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
                _, _, flow = heapq.heappop(self._later)
                if flow.unpushed:
                    self._pushing.append(flow)
                    if self._by_packet(flow):
                        self._pulling.append(flow)
                else:
                    flow.released = True
                    flow.backlog = flow.size_bytes * NS_PER_SECOND
                    self._pulling.append(flow)
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
        ended = False
        for flow in self._pushing:
            pushed = min(flow.unpushed, flow.feed * passed)
            flow.unpushed -= pushed
            if self._by_packet(flow):
                flow.backlog += pushed
            if not flow.unpushed:
                ended = True
                notices.append(Notice(to_ns, flow.rank, flow.message, False))
                self._return(flow)
        for flow in self._pulling:
            flow.backlog = max(0, flow.backlog - flow.pull_rate * passed)
            if flow.released and not flow.backlog:
                ended = True
                notices.append(Notice(to_ns, flow.rank, flow.message, True))
        if ended:
            self._pushing = [flow for flow in self._pushing if flow.unpushed]
            self._pulling = [flow for flow in self._pulling if flow.backlog or not flow.released]
            self._rates_until = -1
        return notices

    def _by_packet(self, flow: _Flow) -> bool:
        return self._jobs[flow.rank].plan.wire != "fifo"

    def _return(self, flow: _Flow) -> None:
        """All of `flow` has been pushed: by packets the last of it follows at once, whole it is summed first."""
        if self._by_packet(flow):
            flow.released = True
            return
        cluster = self._cluster
        delay_ns = cluster.startup_ns
        # each server has its share; those of the other workers were summed as they came
        for rate in (cluster.sum_bytes_per_second, cluster.update_bytes_per_second):
            delay_ns += 0 if rate is None else -(-flow.size_bytes * NS_PER_SECOND // (rate * len(cluster.servers)))
        heapq.heappush(self._later, (self._now + delay_ns, self._numbers, flow))
        self._numbers += 1

    def _share_out(self) -> None:
        """Rates of all flows from now on, and until when they hold."""
        push_rate, pull_rate, shared, changes_ns = self._capacities()
        for flow in self._pushing:
            flow.feed = 0
        if shared is not None and self._pushing:
            # evenly where both want more; packets that come back at once want as much as is pushed
            if any(flow.backlog for flow in self._pulling) or any(self._by_packet(flow) for flow in self._pushing):
                push_rate = min(push_rate, max(shared // 2, shared - pull_rate))
            push_rate = min(push_rate, shared)
        left = _allot(self._pushing, push_rate, by_feed=False)
        if shared is not None:
            pull_rate = min(pull_rate, shared - (push_rate - left))
        for flow in self._pulling:
            flow.pull_rate = 0
        _allot(self._pulling, pull_rate, by_feed=True)
        until_ns = changes_ns if self._pushing or self._pulling else FOREVER
        for flow in self._pushing:
            if flow.feed:
                until_ns = min(until_ns, self._now - -flow.unpushed // flow.feed)
        for flow in self._pulling:
            gain = flow.pull_rate - (flow.feed if flow.unpushed else 0)
            if flow.backlog and gain > 0:
                until_ns = min(until_ns, self._now - -flow.backlog // gain)
            elif flow.released and not flow.backlog:
                until_ns = self._now
        self._rates_until = until_ns

    def _capacities(self) -> tuple[int, int, int | None, int]:
        """Rates of push and pull for each worker, of both together on shared hosts, and when they change."""
        workers, servers = len(self._cluster.workers), len(self._cluster.servers)
        (up, down, server_up, server_down), changes_ns = self._link_rates()
        push, pull, shared = MAX_RATE, MAX_RATE, None
        if not self._shared:
            push, pull = min(up, server_down * servers // workers), min(down, server_up * servers // workers)
        elif workers > 1:
            # a host sends its gradients to the other servers and its server's sums to the other workers
            shared = min(up, down) * workers // (workers - 1)
        cluster = self._cluster
        work = 0.0  # seconds that all servers together need for a byte of every worker
        if cluster.sum_bytes_per_second is not None:
            work += workers / (servers * cluster.sum_bytes_per_second)
        if cluster.update_bytes_per_second is not None:
            work += 1 / (servers * cluster.update_bytes_per_second)
        return max(1, min(push, int(1 / work)) if work else push), max(1, pull), shared, changes_ns

    def _link_rates(self) -> tuple[tuple[int, int, int, int], int]:
        at: list[tuple[int, int | None]] = [_constant(link) or link.at(self._now) for link in self._links]
        up, down, server_up, server_down = (rate for rate, _ in at)
        return (up, down, server_up, server_down), min(FOREVER if change is None else change for _, change in at)


def _constant(link: Link) -> tuple[int, None] | None:
    return None if link.steps else (link.bytes_per_second, None)


def _allot(flows: list[_Flow], capacity: int, *, by_feed: bool) -> int:
    """Give `capacity` to `flows`: to classes in order, evenly to the streams of one, to a stream's flows in order.

    by_feed: the pull stage, where a flow without backlog takes no more than it is fed. Returns what is left.
    """
    classes: dict[int, dict[tuple[int, int, int], list[_Flow]]] = defaultdict(lambda: defaultdict(list))
    for flow in flows:
        classes[flow.stream[0]][flow.stream].append(flow)
    for of_class in sorted(classes):
        # those that want least first, so that what they leave goes to the others
        streams = sorted((_wanted(stream, by_feed, capacity), name) for name, stream in classes[of_class].items())
        for place, (wanted, name) in enumerate(streams):
            given = min(wanted, capacity // (len(streams) - place))
            capacity -= given
            for flow in sorted(classes[of_class][name], key=lambda flow: flow.key):
                if not given:
                    break
                takes = given if not by_feed or flow.backlog else min(given, flow.feed if flow.unpushed else 0)
                if by_feed:
                    flow.pull_rate = takes
                else:
                    flow.feed = takes
                given -= takes
    return capacity


def _wanted(stream: list[_Flow], by_feed: bool, most: int) -> int:
    if not by_feed or any(flow.backlog for flow in stream):
        return most
    return min(most, sum(flow.feed for flow in stream if flow.unpushed))
