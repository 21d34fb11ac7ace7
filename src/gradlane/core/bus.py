"""Bus: the devices of one host, and what they cost one another.

A host with several devices sums a message among them before it goes to the other hosts, and spreads
the sum among them afterwards. Each operation costs a startup and its bytes at a rate;
docs/cost-model.md has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gradlane.core.fields import MAX_BYTES, MAX_NS, MAX_RATE, need_int, need_name
from gradlane.units import NS_PER_SECOND

MAX_DEVICES = 1_024


class Stage(NamedTuple):
    """An operation within a host: startup_ns + size / bytes_per_second for a message of `size`.

    Of the startup, `latency_ns` delays no other message.
    """

    startup_ns: int
    bytes_per_second: int
    latency_ns: int = 0

    def bytes_ns(self, size_bytes: int) -> int:
        """The time in ns of `size_bytes` without the startup, rounded up."""
        return -(-size_bytes * NS_PER_SECOND // self.bytes_per_second)


class Bus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What connects the devices of one host: PCIe, NVLink or shared memory.

    Devices form a ring or a chain, in which each sends to the next while it receives from the one
    before.

    Attributes:
        devices: number of devices on each host, 2 or more. Hosts of one device have no bus.
        startup_ns: of a transfer from one device to the next.
        bytes_per_second: at which each device sends to the next, while all do.
        packet_bytes: a message passes from stage to stage in packets of this size: the first of
            them is between hosts while the second is summed within its host.
        source: where the numbers come from.
        latency_ns: the part of `startup_ns` that delays no other message. It does not shorten a
            message that is alone.
    """

    devices: int
    startup_ns: int
    bytes_per_second: int
    packet_bytes: int = 2**20
    source: str = "unstated"
    latency_ns: int = 0

    def __post_init__(self) -> None:
        need_int("devices", self.devices, 2, MAX_DEVICES)
        need_int("startup_ns", self.startup_ns, 0, MAX_NS // MAX_DEVICES)
        need_int("bytes_per_second", self.bytes_per_second, 1, MAX_RATE)
        need_int("packet_bytes", self.packet_bytes, 1, MAX_BYTES)
        need_name("source", self.source)
        need_int("latency_ns", self.latency_ns, 0, self.startup_ns)

    @property
    def reduce_scatter(self) -> Stage:
        """Sum a message so that each device has its share of the sum: a ring of D - 1 steps."""
        return self._stage(min(self.bytes_per_second * self.devices // (self.devices - 1), MAX_RATE))

    @property
    def all_gather(self) -> Stage:
        """Give every device the shares of all: the same ring, without sums."""
        return self.reduce_scatter

    @property
    def broadcast(self) -> Stage:
        """Pass a whole message along a chain of all devices; or sum it backwards along the chain."""
        return self._stage(self.bytes_per_second)

    def _stage(self, bytes_per_second: int) -> Stage:
        steps = self.devices - 1
        return Stage(steps * self.startup_ns, bytes_per_second, steps * self.latency_ns)
