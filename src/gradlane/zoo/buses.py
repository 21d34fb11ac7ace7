"""Buses: what connects the devices of one host, from public figures.

A rate is what each device sends to the next one in a ring, while all do. Of PCIe and NVLink it is
what NCCL counts with when it chooses algorithms, about 80 % of the wires' rate. A startup is NCCL's
latency of one step of a ring with its "simple" protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.core.bus import Bus
from gradlane.core.fields import did_you_mean
from gradlane.errors import InputError

_NVLINK = "startup: hwLat of NVLink in NCCL's src/graph/tuning.cc"
_PCI = "startup: hwLat of PCI in NCCL's src/graph/tuning.cc"


@dataclass(frozen=True)
class BusSpec:
    """What a bus gives each device, and who says so.

    Attributes:
        title, bytes_per_second, startup_ns, source: as `Bus` has them.
        nvlink: NCCL counts with NVLink's latencies rather than PCIe's.
        nvswitch_sums: its switches sum (NVLink SHARP).
    """

    title: str
    bytes_per_second: int
    startup_ns: int
    source: str
    nvlink: bool = False
    nvswitch_sums: bool = False


BUSES = {
    "pcie3": BusSpec(
        "PCIe 3.0 x16", 12_000_000_000, 5_700,
        f"PCI_BW in NCCL's src/graph/topo.h; 15.75 GB/s are on the wires (8 GT/s, 128b/130b); {_PCI}",
    ),
    "pcie4": BusSpec(
        "PCIe 4.0 x16", 24_000_000_000, 5_700, f"twice PCIe 3.0, as the wires' 31.5 GB/s (16 GT/s, 128b/130b) are; {_PCI}"
    ),
    "nvlink2": BusSpec(
        "V100 SXM2, 6 NVLinks", 120_000_000_000, 3_400,
        f"6 times SM70_NVLINK_BW in NCCL's src/graph/topo.h; 150 GB/s are on the wires; {_NVLINK}", nvlink=True,
    ),
    "nvlink3": BusSpec(
        "A100 SXM4, 12 NVLinks", 235_000_000_000, 3_400,
        f"the most that NCCL's src/graph/tuning.cc counts with for an A100; 300 GB/s are on the wires; {_NVLINK}", nvlink=True,
    ),
    "nvlink4": BusSpec(
        "H100 SXM5, 18 NVLinks", 370_000_000_000, 3_400,
        f"18 times SM90_NVLINK_BW in NCCL's src/graph/topo.h; 450 GB/s are on the wires; {_NVLINK}",
        nvlink=True, nvswitch_sums=True,
    ),
    "nvlink5": BusSpec(
        "B200 SXM6, 18 NVLinks", 720_000_000_000, 3_400,
        "18 times SM100_NVLINK_BW (40.1 GB/s) in NCCL's src/graph/topo.h, rounded down; 900 GB/s are on the wires; "
        f"{_NVLINK}", nvlink=True, nvswitch_sums=True,
    ),
    "shared-memory": BusSpec(
        "one channel of DDR4-3200 for each process", 8_500_000_000, 5_000,
        "a third of 25.6 GB/s (JEDEC: 3200 MT/s, 8 bytes each), as a sum reads two values and writes one; "
        "startup: assumed, two wake-ups of a process",
    ),
}  # fmt: skip


def bus(name: str, devices: int) -> Bus:
    """The bus of a name, for hosts of some devices.

    Args:
        name: see `BUSES`.
        devices: of each host, 2 or more.

    Raises:
        InputError: there is no such bus.
    """
    if name not in BUSES:
        raise InputError(f"bus: got {name!r}{did_you_mean(name, BUSES)}, expected one of {', '.join(BUSES)}")
    spec = BUSES[name]
    return Bus(devices, spec.startup_ns, spec.bytes_per_second, source=f"{spec.title}: {spec.source}")
