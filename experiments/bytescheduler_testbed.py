"""ByteScheduler §6.2 and Fig. 13 on its own machines: eight V100 without NVLink behind 100 Gbit/s, and as many servers.

The default deals whole tensors to servers in turn ("round-robin by default", §6.2); ByteScheduler's partitions are spread
evenly. The devices of a machine sum on it first, over PCIe 3.
"""

from __future__ import annotations

import msgspec

from experiments.assumptions import (
    BYTESCHEDULER,
    DIVIDED_ELEMENTS,
    GBIT,
    MESSAGE_STARTUP_NS,
    SOCKET_BYTES,
    dealt_ns,
    speed,
    tuned_bytescheduler,
)
from experiments.table import Row
from gradlane import zoo
from gradlane.core.cluster import Cluster
from gradlane.core.collectives import all_reduce
from gradlane.core.fields import MAX_BYTES
from gradlane.core.network import Network
from gradlane.core.profile import Profile
from gradlane.planning import catalog
from gradlane.planning.questions import Case, judge
from gradlane.planning.search.space import with_knobs
from gradlane.zoo.buses import bus

DEVICES = 8
P3_BYTES = 160_000
BATCH = {"transformer-base": 16}  # 512 tokens; the others 32 images
# §6.2, over servers: model, machines, percent faster than the default
OVER_SERVERS = (("vgg16", 2, 124.9), ("transformer-base", 2, 171.0), ("alexnet", 4, 96.0), ("vgg19", 4, 60.0))
# Fig. 13, ResNet-50 on four machines: Gbit/s, percent faster than the default
FIG_13 = ((10, 64.4), (100, 9.6))


def rows() -> list[Row]:
    return [*_over_servers(), _over_all_reduce(), *_p3(), *_figure_13()]


def machines(count: int, gbit: int, *, devices: int = DEVICES) -> Cluster:
    """`count` machines of workers and as many of servers."""
    within = bus("pcie3", devices) if devices > 1 else msgspec.UNSET
    return Cluster.homogeneous(count * devices, count, gbit * GBIT, startup_ns=MESSAGE_STARTUP_NS, devices=devices, bus=within)


def sums_on_one_device(where: Cluster) -> Cluster:
    """The same where one device of a machine sums: each message whole, from the others in turn, and back so."""
    assert where.bus is not msgspec.UNSET
    rate = where.bus.bytes_per_second // (where.bus.devices - 1)
    within = msgspec.structs.replace(where.bus, bytes_per_second=rate, packet_bytes=MAX_BYTES)
    return msgspec.structs.replace(where, bus=within)


def profile_of(model: str) -> Profile:
    return zoo.profile(model, device="v100", batch=BATCH.get(model, 32))


def dealt(profile: Profile, where: Cluster, *, divided_elements: int | None = None) -> float:
    """Iterations a second of the default; `divided_elements` as in `dealt_ns`."""
    return 1e9 / dealt_ns(profile, where, divided_elements=divided_elements)


def tuned(profile: Profile, where: Network | Cluster) -> float:
    """Iterations a second of ByteScheduler with its best sizes."""
    return 1e9 / tuned_bytescheduler(Case(profile, where))[2].iteration_ns


def _over_servers() -> list[Row]:
    found = []
    for model, count, published in OVER_SERVERS:
        profile = profile_of(model)
        where, alone = machines(count, 100), machines(count, 100, devices=1)
        faster, on_one = profile.stretched(0.5), sums_on_one_device(where)
        ours, even, divided, of_one, computed_faster, summed_on_one = (
            100 * (tuned(model_of, place) / default - 1)
            for model_of, place, default in (
                (profile, where, dealt(profile, where)),
                (profile, where, speed("wfbp", profile, where)),
                (profile, where, dealt(profile, where, divided_elements=DIVIDED_ELEMENTS)),
                (profile, alone, dealt(profile, alone)),
                (faster, where, dealt(faster, where)),
                (profile, on_one, dealt(profile, on_one)),
            )
        )
        what = f"{model}, {count} machines, servers: ByteScheduler over the default"
        found += [
            Row("§6.2", what, published, ours, "%"),
            Row("§6.2", f"tried: {what}, whose bytes are dealt evenly", published, even, "%", counts=False),
            Row("§6.2", f"tried: {what}, which divides arrays of 10^6 elements or more", published, divided, "%", counts=False),
            Row("§6.2", f"tried: {what}, with one device a machine", published, of_one, "%", counts=False),
            Row("§6.2", f"tried: {what}, computing in half of the time", published, computed_faster, "%", counts=False),
            Row(
                "§6.2", f"tried: {what}, each sum whole on one device of a machine", published, summed_on_one, "%", counts=False
            ),
        ]
    return found


def _over_all_reduce() -> Row:
    profile = profile_of("vgg16")
    where = all_reduce("ring", 2, startup_ns=MESSAGE_STARTUP_NS // 2, bytes_per_second=100 * GBIT)
    where = msgspec.structs.replace(where, workers=2 * DEVICES, bus=bus("pcie3", DEVICES))
    gain = 100 * (tuned(profile, where) / speed("ddp", profile, where) - 1)
    return Row("§6.2", "vgg16, 2 machines, all-reduce: ByteScheduler over the default", 19.0, gain, "%")


def _p3() -> list[Row]:
    """P3 with its default slices, as the papers describe it; the published range is of three models."""
    where = machines(4, 100)
    coarse = msgspec.structs.replace(where, packet_bytes=P3_BYTES)  # every packet is simulated
    heard = {"until": "acknowledged"}
    found = []
    for how, knobs, also_ours, runs_on, counts in (
        ("one slice at a time", {}, {}, where, True),
        ("by TCP's blocking call", {"buffer_bytes": SOCKET_BYTES}, {}, where, False),
        ("both with acknowledgements after 0.3 ms", heard, heard, coarse, False),
    ):
        p3 = catalog.get("p3", slice_bytes=P3_BYTES, **knobs)
        gains = []
        for model in ("vgg16", "resnet50", "transformer-base"):
            profile = profile_of(model)
            partition_bytes, credit_bytes, _ = tuned_bytescheduler(Case(profile, where))
            ours = with_knobs(BYTESCHEDULER, {"partition_bytes": partition_bytes, "credit_bytes": credit_bytes, **also_ours})
            theirs_ns, ours_ns = (judge(each, Case(profile, runs_on), bound_ns=0).iteration_ns for each in (p3, ours))
            gains.append(100 * (theirs_ns / ours_ns - 1))
        what = f"{'' if counts else 'tried: '}4 machines, servers: ByteScheduler over P3, {how}: VGG-16, ResNet-50, Transformer"
        found.append(Row("Figs. 10 to 12", what, "28 to 43 %", " ".join(f"{gain:.1f}" for gain in gains) + " %", counts=counts))
    return found


def _figure_13() -> list[Row]:
    found = []
    profile = profile_of("resnet50")
    for gbit, published in FIG_13:
        where = machines(4, gbit)
        ours, even = (
            100 * (tuned(profile, where) / default - 1) for default in (dealt(profile, where), speed("wfbp", profile, where))
        )
        what = f"ResNet-50, {gbit} Gbit/s: tuned over the default"
        found += [
            Row("Fig. 13", what, published, ours, "%"),
            Row("Fig. 13", f"tried: {what}, whose bytes are dealt evenly", published, even, "%", counts=False),
        ]
    return found
