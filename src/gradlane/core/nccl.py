"""The cost of all-reduce by what NCCL would choose for each message: ring, double binary trees or trees of NVSwitches.

NCCL counts, for each algorithm and protocol, a latency and a rate, and takes the cheapest for a message's size. Its
figures are public: `TABLES`. Here each algorithm and protocol is a line a + b * size, and a network has the lower
envelope of the lines as its cost segments. One message after another has the network, as NCCL's kernels on one stream.

N devices on H hosts, D = N / H; a host's cards have a rate R together, a device sends r to the next one in its host:

    algorithm                       a                                         time per byte b
    ring                            base + (2 N - 2 - 2 H) inside + 2 H net   2 (N - 1) / N / min(.96 R, r) / protocol
    trees, H > 2                    base + 2 ((D - 1) inside + log H net)     2 / (.92 min(.96 R, r)) / protocol
    trees, H = 2: one transfer      the same                                  max(1 / (.92 * .96 R), 2 / (.92 r)) / protocol
    trees of NVSwitches (NVLSTree)  inside + 2 log H net                      6/5 max(1 / r, 2 / .96 R); H = 2: 1 / .96 R

Differs from NCCL: no caps by channel, since the number of channels depends on the machine. There is no correction of trees for
sizes in the middle, and no in-network reduction by InfiniBand switches. log H is rounded down.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import msgspec

from gradlane.core.bus import Bus
from gradlane.core.fields import MAX_BYTES, MAX_NAME, MAX_NS, MAX_RATE, need_int
from gradlane.core.network import MAX_WORKERS, CostSegment, Network
from gradlane.errors import InputError
from gradlane.units import NS_PER_SECOND

LARGEST = 2**30
"""A line is a cost segment only if it is the cheapest for some message of at most this many bytes. Gradients come in buckets,
and policies plan with the startup of the last segment: one for larger messages would mislead them."""


class Latency(NamedTuple):
    """Latency of an algorithm with a protocol, in ns: once, a transfer over NVLink or PCIe, and one between hosts."""

    base: int
    nvlink: int
    pci: int
    net: int


class Table(msgspec.Struct, frozen=True):
    """What a release of NCCL counts with.

    Attributes:
        source: the file.
        ring, trees: by protocol.
        nvls_tree: the trees of NVSwitches, which have one protocol.
        ring_part, tree_part: of the rate, by protocol; the ring's LL128 has `ring_alone` where a host has one device.
        low_latency_rate: bytes per second that LL reaches at most, of two hosts and of more.
        plateau: how many times its latency the ring has with the simple protocol.
        net_part: of the cards' rate, what NCCL counts with.
    """

    source: str
    ring: dict[str, Latency]
    trees: dict[str, Latency]
    nvls_tree: Latency
    ring_part: dict[str, Fraction]
    tree_part: dict[str, Fraction]
    ring_alone: Fraction
    low_latency_rate: tuple[int, int]
    plateau: Fraction
    net_part: Fraction


TABLES = {
    "nccl-2.21": Table(
        source="src/graph/tuning.cc of NCCL 2.21.5, Intel hosts; NET_BW of topo.h",
        ring={
            "LL": Latency(6_600, 600, 1_000, 2_700),
            "LL128": Latency(14_000, 1_900, 2_500, 4_000),
            "Simple": Latency(8_400, 3_400, 5_700, 14_000),
        },
        trees={
            "LL": Latency(6_800, 600, 1_000, 5_000),
            "LL128": Latency(14_000, 1_250, 1_900, 8_500),
            "Simple": Latency(0, 28_000, 28_000, 28_000),
        },
        nvls_tree=Latency(0, 25_000, 25_000, 14_000),
        ring_part={"LL": Fraction(1, 2), "LL128": Fraction(92, 100), "Simple": Fraction(1)},
        tree_part={"LL": Fraction(10, 38), "LL128": Fraction(120, 128), "Simple": Fraction(1)},
        ring_alone=Fraction(7, 10),
        low_latency_rate=(39_000_000_000, 20_400_000_000),
        plateau=Fraction(14, 10),
        net_part=Fraction(96, 100),
    )
}
LATEST = "nccl-2.21"
_TREES = Fraction(92, 100)
_NVLS = Fraction(5, 6)
_OVERHEAD_NS = {"LL": 1_000, "LL128": 1_000, "Simple": 3_000}  # a ring's step within a host waits for its card, at least


class Line(NamedTuple):
    """An algorithm with a protocol: startup_ns + size * byte_ns."""

    name: str
    startup_ns: int
    byte_ns: Fraction


def nccl(
    hosts: int, bus: Bus | None, *, bytes_per_second: int, added_ns: int = 0, nvlink: bool = False, nvswitch_sums: bool = False,
    table: str = LATEST,
) -> Network:  # fmt: skip
    """The cost of all-reduce among the devices of all hosts, each message by its cheapest algorithm and protocol.

    Args:
        hosts: 1 or more.
        bus: the devices of a host and the rate between them; None: one device a host.
        bytes_per_second: of a host's cards together, each way.
        added_ns: what a transfer between hosts takes beyond the table's latency, which is that of InfiniBand.
        nvlink: the bus is NVLink rather than PCIe. Latencies within a host are the table's, times by how much the bus's
            startup differs from the table's for a ring.
        nvswitch_sums: the hosts' NVSwitches sum (NVLink SHARP: Hopper and later).
        table: one of `TABLES`.

    Returns:
        A network without a bus, a cost segment for each line of the lower envelope up to `LARGEST`.

    Raises:
        InputError: an argument is out of its range.
    """
    if table not in TABLES:
        raise InputError(f"algorithm: got {table!r}, expected one of {', '.join(TABLES)}")
    devices = 1 if bus is None else bus.devices
    need_int("hosts", hosts, 1, MAX_WORKERS // devices)
    need_int("bytes_per_second", bytes_per_second, 1, MAX_RATE)
    need_int("added_ns", added_ns, 0, MAX_NS)
    workers = hosts * devices
    if workers == 1:
        return Network(1, (CostSegment(0, MAX_RATE),), table, source=TABLES[table].source)
    lines = _lines(TABLES[table], hosts, bus, bytes_per_second, added_ns, nvlink, nvswitch_sums)
    least_ns = Fraction(2 * (hosts - 1), hosts) * NS_PER_SECOND / bytes_per_second
    assert all(line.byte_ns >= least_ns for line in lines), "an algorithm sends too few bytes between hosts"
    kept = envelope(lines, LARGEST)
    segments = tuple(
        CostSegment(line.startup_ns, min(max(1, int(NS_PER_SECOND / line.byte_ns)), MAX_RATE), up_to) for line, up_to in kept
    )
    names = ", ".join(line.name for line, _ in kept)
    return Network(workers, segments, table, source=f"{names}, by {TABLES[table].source}"[:MAX_NAME])


def _lines(
    table: Table, hosts: int, bus: Bus | None, bytes_per_second: int, added_ns: int, nvlink: bool, nvswitch_sums: bool
) -> list[Line]:
    devices = 1 if bus is None else bus.devices
    workers = hosts * devices
    usual = table.ring["Simple"].nvlink if nvlink else table.ring["Simple"].pci
    scale = Fraction(1) if bus is None else Fraction(bus.startup_ns, usual)
    net = bytes_per_second * table.net_part if hosts > 1 else None
    within = None if bus is None else Fraction(bus.bytes_per_second)
    slowest = min((rate for rate in (net, within) if rate is not None), default=Fraction(MAX_RATE))
    steps = 2 * (workers - 1)
    between = min(2 * hosts, steps) if hosts > 1 else 0
    depth = hosts.bit_length() - 1
    lines = []
    for protocol in ("LL", "LL128", "Simple"):
        if protocol == "LL128" and not nvlink and devices > 1:
            continue  # NCCL trusts it over NVLink only
        most = Fraction(table.low_latency_rate[0 if hosts == 2 else 1] if protocol == "LL" and hosts > 1 else MAX_RATE)
        # an inter-node transfer with the simple protocol is flushed, which adds the network's latency once more
        added = added_ns * (2 if protocol == "Simple" else 1)

        ring = table.ring[protocol]
        inside_ns = (ring.nvlink if nvlink else ring.pci) * scale
        step_ns = max(inside_ns, Fraction(_OVERHEAD_NS[protocol])) if hosts > 1 else inside_ns
        ring_ns = ring.base + (steps - between) * step_ns + between * (ring.net + added)
        part = table.ring_alone if protocol == "LL128" and devices == 1 else table.ring_part[protocol]
        byte_ns = Fraction(steps, workers) * NS_PER_SECOND / min(slowest * part, most)
        lines.append(Line(f"ring {protocol}", round(ring_ns * (table.plateau if protocol == "Simple" else 1)), byte_ns))

        trees = table.trees[protocol]
        inside_ns = (trees.nvlink if nvlink else trees.pci) * scale
        trees_ns = trees.base + 2 * ((devices - 1) * inside_ns + depth * (trees.net + added))
        part = _TREES * table.tree_part[protocol]
        ways = [] if within is None else [2 / min(within * part, most)]
        if net is not None:
            # each host sends half up and half down one tree, and the same in the other, where it is a leaf or has
            # children; of two hosts each sends one half up and the other down
            ways.append((1 if hosts == 2 else 2) / min(net * part, most))
        lines.append(Line(f"trees {protocol}", round(trees_ns), max(ways) * NS_PER_SECOND))
    if nvswitch_sums and within is not None and net is not None:
        startup_ns = table.nvls_tree.nvlink + 2 * depth * (table.nvls_tree.net + 2 * added_ns)
        byte = max(1 / within, (1 if hosts == 2 else 2) / net) / _NVLS
        lines.append(Line("NVSwitch trees", startup_ns, byte * NS_PER_SECOND))
    return lines


def envelope(lines: list[Line], largest: int) -> list[tuple[Line, int]]:
    """The lines that are the cheapest for some size, in order of size.

    Args:
        lines: one or more.
        largest: lines that are the cheapest only above so many bytes are left out.

    Returns:
        Each line with the largest size that it is the cheapest of; the last with `MAX_BYTES`.
    """
    line = min(lines, key=lambda each: (each.startup_ns, each.byte_ns))
    found: list[tuple[Line, int]] = []
    while True:
        flatter = [
            ((each.startup_ns - line.startup_ns) / (line.byte_ns - each.byte_ns), each.byte_ns, each)
            for each in lines
            if each.byte_ns < line.byte_ns
        ]
        if not flatter:
            break
        crossing, _, after = min(flatter)
        if crossing >= largest:
            break
        if int(crossing) > (found[-1][1] if found else 0):
            found.append((line, int(crossing)))
        line = after
    return [*found, (line, MAX_BYTES)]
