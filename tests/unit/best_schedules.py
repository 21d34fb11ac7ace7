"""The best of all schedules over the servers of a small cluster, by looking at every one.

A model has one tensor of some packets, which take one unit of time on a link. In each unit an uplink and a downlink
carry one packet or none; what may be carried is what workers have ready and servers have summed. Nothing else is
prescribed: no order, no priorities, no messages, so that no plan is faster. Every choice of a unit is followed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class _At(NamedTuple):
    """A worker: its iteration, the units that it still computes, and bit by bit the packets pushed and pulled."""

    iteration: int
    computes: int
    pushed: int = 0
    pulled: int = 0


State = tuple[_At, ...]


class Best:
    """All schedules of one cluster.

    Args:
        worker_hosts: the host of each worker.
        packet_hosts: for each packet the host of its server.
        computes: units between the last sum of an iteration and the gradients of the next, 1 or more.
    """

    def __init__(self, worker_hosts: Sequence[int], packet_hosts: Sequence[int], computes: int) -> None:
        self._workers, self._packets, self._computes = worker_hosts, packet_hosts, computes
        self._all = (1 << len(packet_hosts)) - 1

    def units(self, iterations: int) -> int:
        """The least time in which all workers begin that many iterations after the first, which begins at 0."""
        states = {self._settled(tuple(_At(0, self._computes) for _ in self._workers))}
        for now in itertools.count():
            if any(min(at.iteration for at in state) >= iterations for state in states):
                return now
            states = {after for state in states for after in self._after(state)}
        raise AssertionError

    def _after(self, state: State) -> Iterator[State]:
        """All states one unit later."""
        computed = tuple(at._replace(computes=max(0, at.computes - 1)) for at in state)
        for carried in self._carried(list(self._waiting(state)), frozenset()):
            after = list(computed)
            for worker, packet, is_pull in carried:
                at, bit = after[worker], 1 << packet
                after[worker] = at._replace(pulled=at.pulled | bit) if is_pull else at._replace(pushed=at.pushed | bit)
            yield self._settled(tuple(after))

    def _waiting(self, state: State) -> Iterator[tuple[tuple[int, int], tuple[int, int, bool]]]:
        """(from host, to host) and (worker, packet, is a pull) of all that may be carried now."""
        for worker, at in enumerate(state):
            if at.computes:
                continue
            for packet, server in enumerate(self._packets):
                here = self._workers[worker]
                if here == server:
                    continue
                if not at.pushed >> packet & 1:
                    yield (here, server), (worker, packet, False)
                if not at.pulled >> packet & 1 and self._is_summed(state, at.iteration, packet):
                    yield (server, here), (worker, packet, True)

    def _is_summed(self, state: State, iteration: int, packet: int) -> bool:
        return all(at.iteration > iteration or (at.iteration == iteration and at.pushed >> packet & 1) for at in state)

    def _carried(
        self, waiting: list[tuple[tuple[int, int], tuple[int, int, bool]]], busy: frozenset[tuple[str, int]]
    ) -> Iterator[tuple[tuple[int, int, bool], ...]]:
        """All ways to choose of `waiting` so that no link that is not busy has two, and none more would fit."""
        fits = [each for each in waiting if ("up", each[0][0]) not in busy and ("down", each[0][1]) not in busy]
        if not fits:
            yield ()
            return
        (source, target), _ = fits[0]
        # of those that want a link of the first one, one has it
        rivals = [each for each in fits if each[0][0] == source or each[0][1] == target]
        for (up, down), what in rivals:
            for others in self._carried(fits, busy | {("up", up), ("down", down)}):
                yield (what, *others)

    def _settled(self, state: State) -> State:
        """What takes no time: packets between a worker and a server of its host, and the next iteration."""
        while True:
            after = []
            for worker, at in enumerate(state):
                if not at.computes:
                    for packet, server in enumerate(self._packets):
                        if server == self._workers[worker]:
                            at = at._replace(pushed=at.pushed | 1 << packet)
                            if self._is_summed(state, at.iteration, packet):
                                at = at._replace(pulled=at.pulled | 1 << packet)
                    if at.pulled == self._all:
                        at = _At(at.iteration + 1, self._computes)
                after.append(at)
            if tuple(after) == state:
                return state
            state = tuple(after)
