"""Packets: parameter servers with any workers, every packet on every link.

**Links.** A host's uplink takes one packet at a time, and spends `Cluster.packet_startup_ns` before its bytes.
Lanes of a more urgent network class go first; lanes of one class take turns by bytes, as do pushes and
pulls, and jobs, where a host has several. The switch sends on what it has of a packet while the
downlink is free, as frames are small. A packet that has come whole waits otherwise, in a queue for each
class before each downlink.

**Connections.** Each lane has a connection each way to each host. Its packets leave in the order of
`gradlane.schedule.wire_order`. At most two packets' bytes of a connection are in flight, as flow
control would have it. Packets that are not in flight can still be overtaken, connections into one
downlink get equal shares, and one worker's pushes do not delay another worker's sums.

**Servers.** A server adds packets in order of arrival, one after another. It returns a unit (see `sharding`) to all workers
when it has the unit from all of them. If training is not synchronous, it returns a worker's unit to that worker at once.
Packets between a worker and a server on one host pass no link.

**Windows.** A message leaves its window when its last packet has left the worker. Where its lane is acknowledged, it does so
when the worker hears that the servers have it: `Cluster.startup_ns` after the last packet has come, or with its sum.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence

from msgspec import UNSET

from gradlane.core.cluster import Cluster, Link
from gradlane.core.plan import returns_whole
from gradlane.schedule.wire_order import Key, run_key
from gradlane.sim.fabric import FOREVER, Job, Notice
from gradlane.sim.sharding import Sharding
from gradlane.units import NS_PER_SECOND

ENTER, SUMMED, RETURNED, ASKED, ACKNOWLEDGED = -1, -2, -3, -4, -5
UNDER_WAY = 2  # packets of a connection: one on each of the two links

_Item = tuple[Key, int, int, bool]  # (key of its run, packet, rank, is a pull): what goes first is the least


class _Connection:
    """The packets that one job has to send from one host, on one lane and in one direction, to all
    other hosts.

    Attributes:
        items: packets that may be sent, a heap.
        under_way: by receiving host, the bytes in flight.
        held: by receiving host, packets that wait until some of the bytes in flight have arrived, a
            heap.
        served: bytes sent, on the clock that lets connections of one class take turns.
    """

    __slots__ = ("classed", "held", "items", "job", "queued", "served", "under_way")

    def __init__(self, job: int, classed: int) -> None:
        self.job, self.classed = job, classed
        self.items: list[_Item] = []
        self.served = 0  # bytes, on the clock of its uplink
        self.queued = False
        self.under_way: dict[int, int] = defaultdict(int)
        self.held: dict[int, list[_Item]] = defaultdict(list)


class PacketFabric:
    """A `gradlane.sim.fabric.Fabric`. Rank r is (job, worker of the cluster) `ranks[r]`."""

    def __init__(self, jobs: Sequence[Job], cluster: Cluster, ranks: Sequence[tuple[int, int]], staleness: int | None) -> None:
        self.events = 0
        self._jobs, self._cluster, self._ranks = jobs, cluster, ranks
        self._together = staleness == 0
        self._deals = [Sharding(job, cluster) for job in jobs]
        self._host_of = [cluster.workers[worker].host for _, worker in ranks]
        self._server_host = [server.host for server in cluster.servers]
        self._ranks_of = [[r for r, (job, _) in enumerate(ranks) if job == number] for number in range(len(jobs))]
        hosts = len(cluster.hosts)
        self._links: list[Link] = [host.up for host in cluster.hosts] + [host.down for host in cluster.hosts]
        self._carries: list[tuple[_Connection, _Item, int, int] | None] = [None] * (2 * hosts)  # (stream, item, from, to)
        self._since = [0] * (2 * hosts)  # when each uplink began with its packet, and each downlink was done with its last
        self._streams: dict[tuple[int, int, int, bool], _Connection] = {}
        self._ready: list[list[tuple[int, int, int, _Connection]]] = [[] for _ in range(hosts)]
        self._clock = [0] * hosts
        self._ports: list[list[deque[tuple[_Connection, _Item, int, int]]]] = [
            [deque() for _ in range(cluster.network_classes)] for _ in range(hosts)
        ]
        self._acknowledged = [[job.plan.acknowledges(message) for message in job.plan.messages] for job in jobs]
        self._startup_ns = 0 if cluster.packet_startup_ns is UNSET else cluster.packet_startup_ns
        self._most_under_way = UNDER_WAY * cluster.packet_bytes
        self._heap: list[tuple[int, int, int, tuple[int, int, int]]] = []
        self._numbers = 0
        self._sender_free = [0] * len(ranks)
        self._server_free = [0] * len(cluster.servers)
        # for each job the events that each unit still waits for; for each rank's message the packets
        # not yet pushed, or of an acknowledged lane not yet at a server, and those not yet pulled
        self._missing = [[self._wants(j, unit) for unit in range(len(deal.units))] for j, deal in enumerate(self._deals)]
        self._missing_alone = [list(self._missing[job]) if not self._together else [] for job, _ in ranks]
        self._unpushed = [[0] * len(jobs[job].plan.messages) for job, _ in ranks]
        self._unpulled = [[0] * len(jobs[job].plan.messages) for job, _ in ranks]
        self._heard_ns: list[dict[int, int]] = [{} for _ in ranks]  # by message, when its sender hears that servers have it
        self._notices: list[Notice] = []

    # -- what the owner calls ------------------------------------------------------------------------------

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        self._sender_free[rank] = max(self._sender_free[rank], now_ns) + self._cluster.startup_ns
        deal = self._deals[self._ranks[rank][0]]
        self._unpushed[rank][message] = self._unpulled[rank][message] = deal.first[message + 1] - deal.first[message]
        self._at(self._sender_free[rank], ENTER, (rank, message, 0))

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        self._at(now_ns, ASKED, (rank, message, 0))

    def _wants(self, job: int, unit: int) -> int:
        """How many events a unit waits for, from each rank or from one: its packets, and the
        request of a two-phase message.
        """
        deal = self._deals[job]
        split = self._jobs[job].plan.messages[deal.message[deal.units[unit][0]]].two_phase
        return (len(deal.units[unit]) + split) * (len(self._ranks_of[job]) if self._together else 1)

    def next_ns(self) -> int:
        while self._heap and self._is_late(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else FOREVER

    def _is_late(self, event: tuple[int, int, int, tuple[int, int, int]]) -> bool:
        """Whether it is an acknowledgement of what the sum has told its sender already."""
        at_ns, _, what, (rank, message, _) = event
        return what == ACKNOWLEDGED and self._heard_ns[rank].get(message) != at_ns

    def run(self, until_ns: int) -> list[Notice]:
        heap, hosts = self._heap, len(self._cluster.hosts)
        while heap and heap[0][0] <= until_ns:
            now_ns, _, what, payload = heapq.heappop(heap)
            self.events += 1
            if what >= hosts:
                self._downlink_done(now_ns, what - hosts)
            elif what >= 0:
                self._uplink_done(now_ns, what)
            elif what == ENTER:
                self._enter(now_ns, payload[0], payload[1])
            elif what == SUMMED:
                self._one_less(now_ns, payload[0], payload[1])
            elif what == ASKED:
                self._asked(now_ns, payload[0], payload[1])
            elif what == ACKNOWLEDGED:
                rank, message, _ = payload
                if self._heard_ns[rank].get(message) == now_ns:
                    self._hear(now_ns, rank, message)
            else:
                self._return(now_ns, payload[0], payload[1], payload[2])
            if self._notices and (not heap or heap[0][0] > now_ns):
                notices, self._notices = self._notices, []
                return notices
        return []

    def _at(self, time_ns: int, what: int, payload: tuple[int, int, int] = (0, 0, 0)) -> None:
        heapq.heappush(self._heap, (time_ns, self._numbers, what, payload))
        self._numbers += 1

    # -- in the order in which a packet passes -----------------------------------------------------------------

    def _enter(self, now_ns: int, rank: int, message: int) -> None:
        """A message joins its host's queue, cut into packets."""
        job = self._ranks[rank][0]
        deal, host = self._deals[job], self._host_of[rank]
        stream = self._stream(host, job, message, False)
        key = self._key(job, message, is_sum=False)
        for packet in range(deal.first[message], deal.first[message + 1]):
            if self._server_host[deal.server[packet]] == host:
                if not self._acknowledged[job][message]:
                    self._left(now_ns, rank, message)
                self._at_server(now_ns, rank, packet)
            else:
                heapq.heappush(stream.items, (key, packet, rank, False))
        self._queue(host, stream)
        if self._carries[host] is None:
            self._next_up(now_ns, host)

    def _stream(self, host: int, job: int, message: int, is_pull: bool) -> _Connection:
        lane = self._jobs[job].plan.messages[message].lane
        key = (host, job, lane, is_pull)
        if key not in self._streams:
            served = self._jobs[job].plan.lanes[lane].network_class(self._cluster.network_classes)
            self._streams[key] = _Connection(job, served)
        return self._streams[key]

    def _key(self, job: int, message: int, *, is_sum: bool) -> Key:
        """The key of a run of `message`'s packets that is handed over now."""
        self._numbers += 1
        plan = self._jobs[job].plan
        return run_key(plan.wire, plan.messages[message].priority, self._numbers, is_sum=is_sum)

    def _queue(self, host: int, stream: _Connection) -> None:
        if stream.items and not stream.queued:
            stream.queued = True
            stream.served = max(stream.served, self._clock[host])
            self._numbers += 1
            heapq.heappush(self._ready[host], (stream.classed, stream.served, self._numbers, stream))

    def _next_up(self, now_ns: int, host: int) -> None:
        """The uplink is free: take the next packet that may go."""
        ready = self._ready[host]
        while ready:
            _, served, _, stream = heapq.heappop(ready)
            stream.queued = False
            deal = self._deals[stream.job]
            while stream.items:
                item = heapq.heappop(stream.items)
                _, packet, rank, is_pull = item
                to = self._host_of[rank] if is_pull else self._server_host[deal.server[packet]]
                size_bytes = deal.size[packet]
                under_way, held = stream.under_way[to] + size_bytes, stream.held[to]
                if under_way > self._most_under_way or (held and held[0] < item):
                    heapq.heappush(held, item)
                    continue
                stream.under_way[to] = under_way
                self._clock[host] = served
                stream.served = served + size_bytes
                self._queue(host, stream)
                self._carry(now_ns + self._startup_ns, host, (stream, item, host, to), size_bytes, now_ns)
                return

    def _carry(self, begun_ns: int, link: int, load: tuple[_Connection, _Item, int, int], size_bytes: int, now_ns: int) -> None:
        """A link carries a packet, and has done so since `begun_ns`."""
        self._carries[link], self._since[link] = load, begun_ns
        end_ns = self._links[link].finish_ns(begun_ns, size_bytes)
        heapq.heappush(self._heap, (max(end_ns, now_ns), self._numbers, link, (0, 0, 0)))
        self._numbers += 1

    def _uplink_done(self, now_ns: int, host: int) -> None:
        load = self._carries[host]
        assert load is not None
        self._carries[host] = None
        stream, item, _, to = load
        _, packet, rank, is_pull = item
        deal = self._deals[stream.job]
        if not is_pull and not self._acknowledged[stream.job][deal.message[packet]]:
            self._left(now_ns, rank, deal.message[packet])
        port = len(self._ports) + to
        if self._carries[port] is None:
            # while the port was free it sent on what came
            self._carry(max(self._since[host], self._since[port]), port, load, deal.size[packet], now_ns)
        else:
            self._ports[to][stream.classed].append(load)
        self._next_up(now_ns, host)

    def _downlink_done(self, now_ns: int, host: int) -> None:
        port = len(self._ports) + host
        load = self._carries[port]
        assert load is not None
        self._carries[port], self._since[port] = None, now_ns
        for waiting in self._ports[host]:
            if waiting:
                following = waiting.popleft()
                self._carry(now_ns, port, following, self._deals[following[0].job].size[following[1][1]], now_ns)
                break
        stream, (_, packet, rank, is_pull), source, _ = load
        sizes = self._deals[stream.job].size
        stream.under_way[host] -= sizes[packet]
        held, free_bytes = stream.held[host], self._most_under_way - stream.under_way[host]
        while held and sizes[held[0][1]] <= free_bytes:
            # the most urgent first; it takes its turn again
            item = heapq.heappop(held)
            free_bytes -= sizes[item[1]]
            heapq.heappush(stream.items, item)
        self._queue(source, stream)
        if self._carries[source] is None:
            self._next_up(now_ns, source)
        if is_pull:
            self._at_worker(now_ns, rank, packet)
        else:
            self._at_server(now_ns, rank, packet)

    def _left(self, now_ns: int, rank: int, message: int) -> None:
        """A packet has left its worker, or passes no link; where its lane is acknowledged, a server has it.

        With the last packet the message leaves its window, or is acknowledged.
        """
        self._unpushed[rank][message] -= 1
        if self._unpushed[rank][message]:
            return
        if self._acknowledged[self._ranks[rank][0]][message]:
            heard_ns = self._heard_ns[rank][message] = now_ns + self._cluster.startup_ns
            self._at(heard_ns, ACKNOWLEDGED, (rank, message, 0))
        else:
            self._notices.append(Notice(now_ns, rank, message, False))

    def _hear(self, now_ns: int, rank: int, message: int) -> None:
        """The sender of a message hears that servers have it, by an acknowledgement or by the sum."""
        if self._heard_ns[rank].pop(message, None) is not None:
            self._notices.append(Notice(now_ns, rank, message, False))

    def _at_server(self, now_ns: int, rank: int, packet: int) -> None:
        """A server has received a packet, and adds it after those that came before it."""
        job = self._ranks[rank][0]
        deal = self._deals[job]
        if self._acknowledged[job][deal.message[packet]]:
            self._left(now_ns, rank, deal.message[packet])
        rate = self._cluster.sum_bytes_per_second
        if rate is None:
            self._one_less(now_ns, rank, deal.unit[packet])
            return
        server = deal.server[packet]
        took = -(-deal.size[packet] * NS_PER_SECOND // rate)
        self._server_free[server] = max(now_ns, self._server_free[server]) + took
        self._at(self._server_free[server], SUMMED, (rank, deal.unit[packet], 0))

    def _asked(self, now_ns: int, rank: int, message: int) -> None:
        """The servers know that a rank waits for the sum of a two-phase message."""
        deal = self._deals[self._ranks[rank][0]]
        for unit in sorted(set(deal.unit[deal.first[message] : deal.first[message + 1]])):
            self._one_less(now_ns, rank, unit)

    def _one_less(self, now_ns: int, rank: int, unit: int) -> None:
        """One of the events that a unit waits for has happened."""
        job = self._ranks[rank][0]
        deal = self._deals[job]
        missing = self._missing[job] if self._together else self._missing_alone[rank]
        missing[unit] -= 1
        if missing[unit]:
            return
        missing[unit] = self._wants(job, unit)
        ready_ns = now_ns
        rate = self._cluster.update_bytes_per_second
        if rate is not None:
            server = deal.server[deal.units[unit][0]]
            size_bytes = sum(deal.size[part] for part in deal.units[unit])
            ready_ns = self._server_free[server] = max(now_ns, self._server_free[server]) - -size_bytes * NS_PER_SECOND // rate
        if returns_whole(self._jobs[job].plan.wire):
            ready_ns += self._cluster.startup_ns  # the answer is a message too
        to = -1 if self._together else rank
        if ready_ns == now_ns:
            self._return(now_ns, job, unit, to)
        else:
            self._at(ready_ns, RETURNED, (job, unit, to))

    def _return(self, now_ns: int, job: int, unit: int, to: int) -> None:
        """A server returns a unit to all workers of the job (`to` is -1), or to the rank `to`."""
        deal = self._deals[job]
        packets = deal.units[unit]
        host, message = self._server_host[deal.server[packets[0]]], deal.message[packets[0]]
        stream = self._stream(host, job, message, True)
        key = self._key(job, message, is_sum=True)
        for packet in packets:
            for rank in self._ranks_of[job] if to < 0 else (to,):
                if self._host_of[rank] == host:
                    self._at_worker(now_ns, rank, packet)
                else:
                    heapq.heappush(stream.items, (key, packet, rank, True))
        self._queue(host, stream)
        if self._carries[host] is None:
            self._next_up(now_ns, host)

    def _at_worker(self, now_ns: int, rank: int, packet: int) -> None:
        message = self._deals[self._ranks[rank][0]].message[packet]
        self._unpulled[rank][message] -= 1
        if not self._unpulled[rank][message]:
            self._hear(now_ns, rank, message)
            self._notices.append(Notice(now_ns, rank, message, True))
