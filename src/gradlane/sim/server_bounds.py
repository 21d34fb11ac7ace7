"""Server bounds: what no plan takes less time for, over parameter servers on a cluster of any shape.

**A group.** Let G be some of the workers, and S bytes of gradients that are ready on worker w at r_w or later. Let m be
the least r_w in G. No push of a worker in G begins before m, and no sum is returned before all workers have begun to
push it. A worker h of G needs the sums of all S bytes at A_h. All pushes of G have passed by then, and the sums for h.
So A_h >= m + (what a link or a server has to carry of these) / (its rate), and a startup, for every link and server.
The workers of G begin their next iteration no sooner than that, each after its own computation. So the least r_w of G
moves on by the cost of the S bytes and the least computation in G, in every iteration, and an iteration takes no less.
What is returned to other workers does not count: they may be behind.

**Where the bytes are.** Messages are spread over the servers by weight, but a small one may be on one server alone. So
the S bytes may be anywhere, except that no host holds more than its share of all bytes and a packet. What a link
carries is linear in the bytes that each host holds. Each `_Line` is the least over all of these placements, or a
combination of two links in which the placement cancels.

**A link.** In the long run each link passes the bytes of all workers in each iteration.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from gradlane.core.cluster import Cluster
from gradlane.sim.sharding import imbalance_bytes
from gradlane.units import NS_PER_SECOND

GROUPS_AT_MOST = 24  # of the workers of a host, and of all workers: each costs as much as the bound of a network


class Group(NamedTuple):
    """Workers that no plan lets begin an iteration sooner.

    Attributes:
        compute_percent: the least of their compute times, in hundredths of the profile's.
        cost_ns: from S, in bytes, to the least time in ns until they have the sums of S bytes.
    """

    compute_percent: int
    cost_ns: Callable[[int], int]


class _Line(NamedTuple):
    """S bytes take (S - free_bytes) * byte_ns, or more."""

    byte_ns: Fraction
    free_bytes: Fraction = Fraction(0)


class ServerBounds:
    """The bounds of one job on one cluster.

    Args:
        cluster: without a bus: each of its workers sends its own messages.
        size_bytes: of all gradients together.
    """

    def __init__(self, cluster: Cluster, size_bytes: int) -> None:
        self._cluster, self._size_bytes = cluster, size_bytes
        self._up = [host.up.fastest for host in cluster.hosts]
        self._down = [host.down.fastest for host in cluster.hosts]
        self._speeds: dict[int, list[int]] = defaultdict(list)  # of the workers of each host, in percent
        for worker in cluster.workers:
            self._speeds[worker.host].append(worker.compute_percent)
        weights = sum(server.weight for server in cluster.servers)
        uneven_bytes = imbalance_bytes(cluster, size_bytes)
        self._holds: dict[int, Fraction] = defaultdict(Fraction)  # by host, the most bytes that its servers hold
        for server in cluster.servers:
            self._holds[server.host] += Fraction(size_bytes * server.weight, weights) + uneven_bytes
        self._into_servers = sum(self._down[host] for host in self._holds)

    def groups(self) -> list[Group]:
        """The groups to take the greatest bound of: the workers of each host, and all workers; and of these the slowest."""
        alike = {
            (self._up[host], self._down[host], self._holds.get(host), tuple(sorted(speeds))): host
            for host, speeds in self._speeds.items()
        }
        found: dict[tuple[int, frozenset[_Line]], Group] = {}
        for hosts in (*((host,) for host in alike.values()), tuple(self._speeds)):
            speeds = sorted({percent for host in hosts for percent in self._speeds[host]}, reverse=True)
            for percent in {*speeds[:: -(-len(speeds) // GROUPS_AT_MOST)], speeds[-1]}:
                slow = {host: sum(each >= percent for each in self._speeds[host]) for host in hosts}
                lines = frozenset(self._lines({host: count for host, count in slow.items() if count}))
                found[percent, lines] = Group(percent, _cost(self._cluster.startup_ns, lines))
        return list(found.values())

    def link_ns(self) -> int:
        """What the busiest link passes in each iteration, in ns."""
        most, workers = Fraction(0), len(self._cluster.workers)
        all_bytes = Fraction(self._size_bytes)
        everywhere = sum(self._holds.values(), Fraction(0))
        for host, (up, down) in enumerate(zip(self._up, self._down, strict=True)):
            here, held = len(self._speeds.get(host, ())), self._holds.get(host, Fraction(0))
            # a host sends to servers elsewhere, and from its servers to workers elsewhere; and receives as much
            passed = min(
                here * (all_bytes - kept) + (workers - here) * kept
                for kept in (max(Fraction(0), all_bytes - (everywhere - held)), min(all_bytes, held))
            )
            most = max(most, passed * NS_PER_SECOND / min(up, down))
        return math.ceil(most)

    def _lines(self, group: Mapping[int, int]) -> Iterator[_Line]:
        """The lines of a group, given as the number of its workers on each host."""
        cluster, members = self._cluster, sum(group.values())
        for host, count in group.items():
            # what the host holds at most need not leave it, nor come
            held = self._holds.get(host, Fraction(0))
            yield _Line(max(_byte_ns(self._up[host], count), _byte_ns(self._down[host])), held)
        # each byte goes to some server, from all members on other hosts: the narrowest links are no narrower than all together
        into_servers, free_bytes = Fraction(self._into_servers, members), Fraction(0)
        for host, count in group.items():
            if host in self._holds:
                into_servers -= Fraction(self._down[host], members)
                if count < members:
                    into_servers += Fraction(self._down[host], members - count)
                else:
                    free_bytes += self._holds[host]
        if into_servers:
            yield _Line(NS_PER_SECOND / into_servers, free_bytes)
        servers = len(cluster.servers)
        of_servers = Fraction(0)
        if cluster.sum_bytes_per_second is not None:
            of_servers += _byte_ns(cluster.sum_bytes_per_second * servers, members)
        if cluster.update_bytes_per_second is not None:
            of_servers += _byte_ns(cluster.update_bytes_per_second * servers)
        if of_servers:
            yield _Line(of_servers)
        if len(group) > 1 and len(set(group.values())) == 1 and group.keys() == self._holds.keys() and cluster.is_homogeneous:
            yield from self._on_shared_hosts(len(group), members)

    def _on_shared_hosts(self, hosts: int, members: int) -> Iterator[_Line]:
        """The lines of members whose hosts are all alike and hold all servers, one each.

        Let x of the S bytes be on the host of a member h, and the others in equal parts on the other hosts. With unequal parts
        some link has more to carry. Then x is S - (hosts - 1) * held or more. Each load is a part of S and a part of x.
        """
        host = next(iter(self._holds))
        here, held, others = members // hosts, self._holds[host], hosts - 1
        up, down = _byte_ns(self._up[host]), _byte_ns(self._down[host])
        # pushes to h's host and the sums for h, on its downlink; pushes from another host and a sum for h, on that uplink
        rising = (
            (down, down * (members - here - 1)),
            (up * (here - Fraction(here - 1, others)), up * Fraction(here - 1, others)),
        )
        # pushes from h's host; and to another host
        falling = ((up * here, up * here), (down * here, down * here))
        for of_size, of_kept in rising:
            yield _Line(of_size)
            yield _Line(of_size + of_kept, of_kept * others * held / (of_size + of_kept))
            for other_size, other_kept in falling:
                part = Fraction(other_kept, of_kept + other_kept)
                yield _Line(part * of_size + (1 - part) * other_size)


def _byte_ns(bytes_per_second: int, times: int = 1) -> Fraction:
    return Fraction(times * NS_PER_SECOND, bytes_per_second)


def _cost(startup_ns: int, lines: Iterable[_Line]) -> Callable[[int], int]:
    # in integers: bounds of large profiles ask for tens of thousands of costs
    whole = []
    for byte_ns, free_bytes in lines:
        free_ns = byte_ns * free_bytes
        divisor = math.lcm(byte_ns.denominator, free_ns.denominator)
        whole.append((int(byte_ns * divisor), int(free_ns * divisor), divisor))

    def cost_ns(size_bytes: int) -> int:
        return startup_ns + max((-((free - per_byte * size_bytes) // divisor) for per_byte, free, divisor in whole), default=0)

    return cost_ns
