"""Mercury Fig. 17: packets of several sizes. Each packet costs its sender time.

Small packets then take link, and large ones keep urgent ones waiting. The cost is that of gradlane's own transport, and not
fitted to the paper.
"""

from __future__ import annotations

import msgspec

from experiments.assumptions import GBIT, servers, speed
from experiments.mercury_model import profile_of
from experiments.table import Row

KIB = 1 << 10
SIZES = {8 * KIB: "8 KB", 16 * KIB: "16 KB", 64 * KIB: "64 KB", 256 * KIB: "256 KB", 1024 * KIB: "1 MB", 4096 * KIB: "4 MB"}
PLACES = 2  # workers, and as many servers
# bench/notes/overhead.md: packets of 30 KiB cost 0.15 s of processors more for a gigabyte than packets of 512 KiB, in
# four places each: sent and received by a worker and by a server
PACKET_NS = 1_000
LEVEL = 0.98  # of the best speed: level with it


def rows() -> list[Row]:
    found = []
    for model, label in (("vgg16", "VGG-16"), ("alexnet", "AlexNet")):
        for gbit in (10, 3):
            speeds = _speeds(model, gbit, PACKET_NS)
            what = f"{label}, {gbit} Gbit/s, a packet costs its sender 1 us: sizes"
            counts = (model, gbit) == ("vgg16", 3)
            found += [
                Row("Fig. 17", f"{what} within 2 % of the best", "16 to 256 KB", _level(speeds), counts=counts),
                Row("Fig. 17", f"{what} {', '.join(SIZES.values())}: of the best", None, _of_best(speeds), "%"),
            ]
    for packet_ns, cost in ((1, "1 ns"), (4 * PACKET_NS, "4 us")):
        what = f"tried: VGG-16, 3 Gbit/s, a packet costs {cost}: sizes within 2 % of the best"
        found.append(Row("Fig. 17", what, "16 to 256 KB", _level(_speeds("vgg16", 3, packet_ns)), counts=False))
    return found


def _speeds(model: str, gbit: int, packet_ns: int) -> dict[int, float]:
    """Iterations a second by the size of packets."""
    found = {}
    for size_bytes in SIZES:
        where = servers(PLACES, gbit * GBIT)
        where = msgspec.structs.replace(where, packet_bytes=size_bytes, packet_startup_ns=packet_ns)
        found[size_bytes] = speed("mercury", profile_of(model), where)
    return found


def _level(speeds: dict[int, float]) -> str:
    sizes = [size_bytes for size_bytes in SIZES if speeds[size_bytes] >= LEVEL * max(speeds.values())]
    return f"{SIZES[sizes[0]]} to {SIZES[sizes[-1]]}"


def _of_best(speeds: dict[int, float]) -> tuple[float, ...]:
    return tuple(100 * each / max(speeds.values()) for each in speeds.values())
