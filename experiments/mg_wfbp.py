"""MG-WFBP Figs. 10 and 11: 4 to 2048 workers on its K80 cluster. Figs. 6, 7 and 9 are in `mg_wfbp_testbed.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from experiments import mg_wfbp_testbed
from experiments.assumptions import k80_cluster
from experiments.mg_wfbp_networks import SCRIPT_STARTUP_NS, script_cluster, script_ring_rate
from experiments.table import Row
from gradlane import trace, zoo
from gradlane.core.network import Network
from gradlane.core.profile import Profile
from gradlane.planning import catalog
from gradlane.planning.questions import Case, judge

TITLE = "MG-WFBP (TPDS '21)"
WORKERS = [2**power for power in range(2, 12)]
MERGED = {
    "googlenet": (10.0, 6.0, 6.0, 5.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0),
    "resnet50": (33.0, 19.0, 10.0, 7.0, 5.0, 3.0, 1.0, 1.0, 1.0, 1.0),
}
SPEEDUPS = {"googlenet": (1.78, 1.35), "resnet50": (1.75, 1.45)}
Times = dict[int, dict[str, tuple[int, int]]]


def rows(data: Path) -> list[Row]:
    recording = data / "b-caffe-googlenet-k80" / "tmp4ocomm.log"
    found: list[Row] = []
    recorded = trace.read(recording) if recording.is_file() else None
    if recorded is not None:
        found += _scaling("googlenet", "googlenet, the authors' recording", recorded, counts=True)
    for name in MERGED:
        found += _scaling(name, name, zoo.profile(name), counts=name != "googlenet" or recorded is None)
    if recorded is not None:
        found += _tried(recorded)
    return found + mg_wfbp_testbed.rows()


def _scaling(name: str, title: str, profile: Profile, *, counts: bool) -> list[Row]:
    """counts: whether the rows with the script's constants do; those with other ones never do."""
    found: list[Row] = []
    for cluster, constants in ((script_cluster, "the script's a, b"), (k80_cluster, "a, b of Fig. 4(a)")):
        counted = counts and cluster is script_cluster
        ring = _rings(profile, partial(cluster, "ring"))
        what = f"{title}, {constants}"
        found += [
            Row("Fig. 10", f"{what}: groups at 4, 8 .. 2048 workers", MERGED[name], _groups(ring), counts=counted),
            Row(
                "Fig. 10",
                f"{what}, 64 workers: MG-WFBP over WFBP, SyncEASGD",
                SPEEDUPS[name],
                _gains(ring),
                "x",
                counts=counted,
            ),
            Row(
                "Fig. 10",
                f"{what}: WFBP falls behind SyncEASGD between 16 and 64 workers",
                "yes",
                _crossing(ring),
                counts=counted,
            ),
        ]
        if name == "resnet50":
            scaling = tuple(100 * profile.compute_ns / ring[64][policy][0] for policy in ("wfbp", "sync-easgd"))
            found.append(
                Row("Fig. 10", f"{what}, 64 workers: WFBP's, SyncEASGD's scaling", (55.0, 55.0), scaling, "%", counts=counted)
            )
        trees = [_times(profile, cluster("double-binary-trees", workers)) for workers in WORKERS if workers >= 128]
        always = all(times["mg-wfbp"][0] <= times["wfbp"][0] < times["sync-easgd"][0] for times in trees)
        found.append(
            Row(
                "Fig. 11",
                f"{what}, trees, 128 to 2048: MG-WFBP ahead of WFBP ahead of SyncEASGD",
                "always",
                "always" if always else "not always",
                counts=counted,
            )
        )
    return found


def _tried(recorded: Profile) -> list[Row]:
    """What each remark of the page claims, put in or taken out."""

    def fit(workers: int) -> Network:
        return k80_cluster("ring", workers)

    def script(workers: int) -> Network:
        return script_cluster("ring", workers)

    zoos = zoo.profile("googlenet")
    factor = recorded.backward_ns / zoos.backward_ns
    runs: list[tuple[str, Profile, Callable[[int], Network]]] = [
        (
            "the recording, a of Fig. 4(a) and the script's b",
            recorded,
            lambda workers: Network.line(workers, fit(workers).segments[0].startup_ns, script_ring_rate(workers)),
        ),
        (
            "the recording, the script's a and b of Fig. 4(a)",
            recorded,
            lambda workers: Network.line(workers, 2 * workers * SCRIPT_STARTUP_NS, fit(workers).segments[0].bytes_per_second),
        ),
        (
            "the recording, the script's constants with 42 us a transfer",
            recorded,
            lambda workers: Network.line(workers, 2 * workers * 42_000, script_ring_rate(workers)),
        ),
        ("the zoo's layers in the recording's time, the script's a, b", zoos.stretched(factor), script),
        ("the recording's layers in the zoo's time, the script's a, b", recorded.stretched(1 / factor), script),
    ]
    found = []
    for what, profile, network in runs:
        ring = _rings(profile, network)
        groups = Row("Fig. 10", f"tried: {what}: groups", MERGED["googlenet"], _groups(ring), counts=False)
        gains = Row("Fig. 10", f"tried: {what}, 64 workers: the gains", SPEEDUPS["googlenet"], _gains(ring), "x", counts=False)
        found += [groups, gains]
    return found


def _rings(profile: Profile, network: Callable[[int], Network]) -> Times:
    return {workers: _times(profile, network(workers)) for workers in WORKERS}


def _times(profile: Profile, network: Network) -> dict[str, tuple[int, int]]:
    """By policy the iteration time and the number of messages."""
    case = Case(profile, network)
    outcomes = [judge(catalog.get(name), case, bound_ns=0) for name in ("wfbp", "sync-easgd", "mg-wfbp")]
    return {outcome.policy: (outcome.iteration_ns, len(outcome.plan.messages)) for outcome in outcomes}


def _groups(ring: Times) -> tuple[float, ...]:
    return tuple(float(ring[workers]["mg-wfbp"][1]) for workers in WORKERS)


def _gains(ring: Times) -> tuple[float, ...]:
    return tuple(ring[64][policy][0] / ring[64]["mg-wfbp"][0] for policy in ("wfbp", "sync-easgd"))


def _crossing(ring: Times) -> str:
    behind = [workers for workers in WORKERS if ring[workers]["wfbp"][0] > ring[workers]["sync-easgd"][0]]
    if behind and behind[0] in (32, 64):
        return "yes"
    return f"from {behind[0]} on" if behind else "never"


REMARKS = """
Fig. 10 depends on the constants of the network. The authors' published script has
45.25 us for each of a ring's 2 N transfers, 0.99 ns to transfer a byte and 2.5 ns to sum it: 1.45 ms
and 4.2 ns per byte among 16 workers, where Fig. 4(a) has 0.97 ms and 1.97 ns. The paper says that
the simulation uses Fig. 4(a). With the script's constants and the authors' recording of GoogLeNet,
nine of ten numbers of groups are the published ones. The rows "tried" put in one constant at a
time: the script's time per byte alone already gives all but one of the numbers (256 workers), its
startup alone gives four of ten. The published numbers and gains all come out with 42 us for a
transfer, which no text states. The rows that count use the script's constants.

The other input is the time of the backward pass, more than how layers share it. The recording's
backward pass takes 0.20 s. The zoo's takes 0.52 s, as the throughput of Fig. 6 implies for the
batch size of Table 4, and can hide more, so that fewer merges pay. The zoo's layers within 0.20 s
give about the published groups, and the recording's layers within 0.52 s do not. No recording of
ResNet-50 is published.

Figs. 6, 7 and 9 were measured. Plans are made with the authors' a and b, as their program makes
them. The clusters that run them differ from the paper's model (Eq. 7 and 10) in two ways, which the
paper's own text gives. Both were put in after a first comparison, and each is taken out in the rows
"tried".

1. A message's startup is time of the device, and no other message and no layer hides it. By Eq. 7
   WFBP's startups hide behind the backward pass; §6.3.2 says of the measurements that pipelining
   adds each layer's startup to the iteration. The startups are the paper's.
2. A byte takes twice as long as by Fig. 4(b) and (c), and at least as long as a ring of 16 needs on a node's
   link (Table 3). Fig. 4(b) has 0.74 ns a byte over 10 Gbit/s, which is half of what such a ring takes at
   best (1.5 ns), within 1 %. So it seems to count four bytes an element ("4p", below Fig. 4) where two were
   sent. Fig. 4(c) is of the same devices, so 56GbIB's is doubled too. Doubling it took one wrong order and
   three values beyond 15 % away, and put one value there.

With both, all values of Figs. 6 and 7 are within 15 %, and most of Fig. 9, of which without them
three in four are not. Figs. 6 and 7 count with the script's a and b, as Fig. 10 does for the same
cluster. The paper's two devices a node are taken as workers like all others.

SyncEASGD overlaps nothing: its iteration is computing + a + b M. Fig. 9's published iterations then
imply larger times per byte still, most of all for 16-bit gradients. So SyncEASGD is too fast here beside
the two others, and two rows of Fig. 9 are wrong in order. With the time per byte that its own iteration
implies these two are right. That row is circular: it starts from one of the values that it
is compared with. In the third wrong row, Inception-v4 in 32 bits on 56GbIB, SyncEASGD is right within 1 % and
WFBP 6 % too fast; no cause is found.

What SyncEASGD's iterations lack here is rather a time for each tensor, as of the copies and casts of §5.3: up
to 0.24 ms. A row has one such constant for all clusters, models and precisions. It is
fitted to these iterations, the only fitted constant in these notes, and its row is not counted. One value more
agrees with it. The orders stay as they are, since every policy pays it alike.

Table 4 has 59 tensors for GoogLeNet. The zoo's 128 are the weight and the bias of 64 layers, as many
as the authors' recording has, and of 58 without the auxiliary heads. The 8 nodes of §1 have 16 GPUs
(Table 3), whose a and b Fig. 4(a) has; a ring of 8 workers is too fast. Eq. 10 scales a and b of 16
GPUs to 8 as a ring does. The authors' code has values of its own for 8 GPUs on two nodes, 13 to 24 %
off. The links inside the nodes do not explain that: a ring that passes through four GPUs of each node
over PCIe 3 has the same time per byte, and 2 to 6 % more startup.
"""
