"""Hosts: the devices of each host, around a fabric that carries messages between hosts.

A message passes three stages. Its host sums it among the host's devices; the fabric carries the sum
between hosts; each host spreads the result among its devices. A message passes from stage to stage
in packets, so that its first packet is between hosts while others are still summed, and messages
follow one another in each stage. The two stages within a host take messages one after another, in
the order in which they come, and the two do not hold one another up.

The fabric between hosts knows nothing of this: to it a host is a rank. It gets a message when the
first packet is summed, and what it says of the message's end is put off until the last packet can
have come. No packet is simulated by itself: in a stage that takes messages in turn, the first and
the last packet decide when a message ends. `tests/unit/test_hosts.py` compares
this with a simulation of every packet.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradlane.core.bus import Stage
from gradlane.core.plan import Plan
from gradlane.sim.fabric import FOREVER, Fabric, Notice
from gradlane.units import NS_PER_SECOND

ENTER, PUSHED, PULLED = 0, 1, 2


class _Times(NamedTuple):
    """What a message takes in each stage after any startup, in ns. packet: of the message's first packet."""

    enter_packet: int
    enter_bytes: int
    between_packet: int
    between_bytes: int
    leave_packet: int
    leave_bytes: int


class HostFabric:
    """A `gradlane.sim.fabric.Fabric` whose ranks are devices, around one whose ranks are hosts."""

    def __init__(
        self,
        between: Fabric,
        plan: Plan,
        host_of: Sequence[int],
        stages: tuple[Stage, Stage],
        packet_bytes: int,
        rate: Callable[[int], int],
        *,
        collective: bool,
    ) -> None:
        """Prepare hosts on which nothing is in flight.

        Args:
            between: carries messages between hosts. This fabric owns it from now on.
            plan: the job's plan.
            host_of: for each rank its host, which is a rank of `between`: 0 and all that follow.
            stages: the first and the last stage of a message.
            packet_bytes: a message passes from stage to stage in packets of this size.
            rate: for a message's size the highest rate at which `between` carries its bytes, in
                bytes per second.
            collective: whether the halves of a two-phase message are a reduce-scatter and an all-gather, of half of the bytes
                each. Any other message is then pushed when its sum is there, else when it has left its host.
        """
        self.events = 0
        self._own_events = 0
        self._between, self._collective = between, collective
        self._ranks_of: list[list[int]] = [[] for _ in range(max(host_of) + 1)]
        for rank, host in enumerate(host_of):
            self._ranks_of[host].append(rank)
        self._host_of = host_of
        self._two_phase = [message.two_phase for message in plan.messages]
        self._enter, self._leave = enter, leave = stages
        self._times: list[_Times] = []
        for message in plan.messages:
            size_bytes = message.size_bytes
            first_bytes, bytes_per_second = min(size_bytes, packet_bytes), rate(size_bytes)
            packet_ns, bytes_ns = (-(-part * NS_PER_SECOND // bytes_per_second) for part in (first_bytes, size_bytes))
            halves = 2 if collective and message.two_phase else 1
            self._times.append(
                _Times(
                    enter.bytes_ns(first_bytes), enter.bytes_ns(size_bytes),
                    packet_ns // halves, bytes_ns // halves,
                    leave.bytes_ns(first_bytes), leave.bytes_ns(size_bytes),
                )
            )  # fmt: skip
        hosts, messages = len(self._ranks_of), len(plan.messages)
        self._entered_until = [0] * hosts  # when the first stage is free
        self._left_until = [0] * hosts  # and the last one
        self._missing = [[len(ranks)] * messages for ranks in self._ranks_of]  # devices that have not issued it
        self._begun = [[0] * messages for _ in range(hosts)]  # since when it is between hosts
        self._summed = [[0] * messages for _ in range(hosts)]  # when its last packet has passed the first stage
        self._heap: list[tuple[int, int, int, int, int]] = []  # (time, number, what, host, message)
        self._numbers = 0

    def hand_over(self, now_ns: int, rank: int, message: int) -> None:
        """`Fabric.hand_over`."""
        host = self._host_of[rank]
        if self._waits_for_others(host, message):
            return
        times = self._times[message]
        begins_ns = max(self._entered_until[host], now_ns) + self._enter.startup_ns
        self._summed[host][message] = begins_ns + times.enter_bytes
        self._entered_until[host] = begins_ns + times.enter_bytes - self._enter.latency_ns
        self._begun[host][message] = begins_ns + times.enter_packet
        self._at(begins_ns + times.enter_packet, ENTER, host, message)

    def ask(self, now_ns: int, rank: int, message: int) -> None:
        """`Fabric.ask`."""
        host = self._host_of[rank]
        if not self._waits_for_others(host, message):
            self._begun[host][message] = now_ns
            self._between.ask(now_ns, host, message)

    def _waits_for_others(self, host: int, message: int) -> bool:
        missing = self._missing[host]
        missing[message] -= 1
        if missing[message]:
            return True
        missing[message] = len(self._ranks_of[host])
        return False

    def next_ns(self) -> int:
        """`Fabric.next_ns`."""
        return min(self._heap[0][0] if self._heap else FOREVER, self._between.next_ns())

    def run(self, until_ns: int) -> list[Notice]:
        """`Fabric.run`."""
        while True:
            to_ns = min(until_ns, self._heap[0][0]) if self._heap else until_ns
            told = self._between.run(to_ns)
            for notice in told:
                self._pass_on(notice)
            if told:
                continue
            notices = self._happen(to_ns)
            self.events = self._own_events + self._between.events
            if notices or self.next_ns() > until_ns:
                return notices

    def _happen(self, now_ns: int) -> list[Notice]:
        """Do what was to be done at `now_ns`."""
        notices: list[Notice] = []
        while self._heap and self._heap[0][0] == now_ns:
            _, _, what, host, message = heapq.heappop(self._heap)
            self._own_events += 1
            if what == ENTER:
                self._between.hand_over(now_ns, host, message)
            else:
                notices += [Notice(now_ns, rank, message, what == PULLED) for rank in self._ranks_of[host]]
        return notices

    def _pass_on(self, notice: Notice) -> None:
        """Put off what the fabric between hosts says until it holds for the devices of a host."""
        now_ns, host, message, pulled = notice
        times = self._times[message]
        # the last packet is between hosts once it has been summed
        here_ns = max(now_ns, self._summed[host][message] + times.between_packet)
        together = self._collective and not self._two_phase[message]
        if not pulled:
            if not together:
                self._at(here_ns, PUSHED, host, message)
            return
        # its bytes took this long at least, so its first packet came so much before its last; whether it
        # came earlier still, the fabric does not tell
        first_ns = max(self._begun[host][message], now_ns - times.between_bytes) + times.between_packet
        begins_ns = max(self._left_until[host], first_ns) + self._leave.startup_ns
        last_ns = here_ns + times.leave_packet
        ends_ns = max(begins_ns + times.leave_bytes, last_ns)
        self._left_until[host] = max(begins_ns + times.leave_bytes - self._leave.latency_ns, last_ns)
        if together:
            self._at(ends_ns, PUSHED, host, message)
        self._at(ends_ns, PULLED, host, message)

    def _at(self, time_ns: int, what: int, host: int, message: int) -> None:
        heapq.heappush(self._heap, (time_ns, self._numbers, what, host, message))
        self._numbers += 1
