"""MG-WFBP Figs. 6, 7 and 9: what the authors' published scripts plot of their three clusters of up to 16 GPUs.

Plans are made as the authors make them, with the fitted a and b. They run on what else the paper says of its testbed: a
tensor's startup comes on top of computing (§6.3.2), and a link has a rate (Table 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from statistics import mean, median
from typing import NamedTuple

import msgspec

from experiments.assumptions import k80_cluster
from experiments.mg_wfbp_networks import (
    V100_CLUSTERS,
    counted_twice,
    fitted,
    over_its_links,
    script_cluster,
    startups_on_device,
)
from experiments.table import Row, count
from gradlane import zoo
from gradlane.core.collectives import flat_ring
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.profile import Profile
from gradlane.planning import catalog
from gradlane.planning.plans import make_plan
from gradlane.planning.questions import Case, judge_plan
from gradlane.zoo.buses import bus

POLICIES = ("wfbp", "sync-easgd", "mg-wfbp")
NAMES = "WFBP, SyncEASGD, MG-WFBP"
Three = tuple[float, float, float]

# images a second of all workers, by workers; one node of two, where nothing is sent, calibrates the zoo
THROUGHPUT: dict[tuple[str, str, int], dict[int, Three]] = {
    ("Fig. 6", "googlenet", 64): {4: (299.32, 250.28, 316.08), 8: (599.28, 461.36, 600.24), 16: (1006.4, 889.28, 1210.88)},
    ("Fig. 7", "resnet50", 32): {4: (151.1, 120.0, 151.18), 8: (294.72, 222.8, 295.2), 16: (465.6, 406.4, 566.6)},
}
# tensors, millions of parameters
TABLE_4 = {
    "googlenet": (59.0, 13.0),
    "resnet50": (161.0, 25.5),
    "resnet152": (467.0, 60.1),
    "densenet161": (484.0, 28.6),
    "densenet201": (604.0, 20.0),
    "inception-v4": (449.0, 42.6),
}
# a in us, b in ps; its 2 and 4 GPUs share a node
FITTED_8 = {"10GbE": (523.03, 857.07), "56GbIB": (97.537, 305.68)}
# seconds: computing in FP32 and FP16
COMPUTING = {
    "resnet152": (0.883118, 0.388588),
    "inception-v4": (0.610822, 0.279731),
    "densenet161": (0.477655, 0.253019),
    "densenet201": (0.360877, 0.215182),
}
# seconds of an iteration: FP32, FP16
ITERATION: dict[str, dict[str, tuple[Three, Three]]] = {
    "10GbE": {
        "resnet152": ((1.233439, 1.360146, 1.126113), (0.757145, 0.636333, 0.629695)),
        "inception-v4": ((0.943731, 0.899976, 0.780576), (0.59102, 0.477116, 0.423176)),
        "densenet161": ((0.832388, 0.682585, 0.628013), (0.614906, 0.399356, 0.360415)),
        "densenet201": ((0.7636, 0.51283, 0.4566), (0.614204, 0.406464, 0.36181)),
    },
    "56GbIB": {
        "resnet152": ((1.082075, 1.143499, 1.089261), (0.531046, 0.518223, 0.486271)),
        "inception-v4": ((0.767365, 0.746227, 0.661337), (0.430171, 0.373203, 0.363821)),
        "densenet161": ((0.601903, 0.596815, 0.52739), (0.400008, 0.329965, 0.321051)),
        "densenet201": ((0.512376, 0.437789, 0.405943), (0.397707, 0.3544, 0.331319)),
    },
}


def rows() -> list[Row]:
    return [*_models(), *_costs(), *_throughput(), *_iterations(), *_gains(), *_tried()]


def _models() -> list[Row]:
    profiles = [zoo.profile(name) for name in TABLE_4]
    tensors, parameters = zip(*TABLE_4.values(), strict=True)
    names = ", ".join(TABLE_4)
    alike = (("resnet152", 1024, 150.0), ("densenet161", 768, 160.0))
    return [
        Row("Table 4", f"tensors of {names}", tensors, tuple(float(len(profile.tensors)) for profile in profiles)),
        Row("Table 4", "parameters of the same", parameters, tuple(profile.size_bytes / 4e6 for profile in profiles), "M"),
        *(
            Row("Fig. 5", f"{model}: tensors of {size} bytes", count, float(_tensors_of(zoo.profile(model), size)))
            for model, size, count in alike
        ),
    ]


def _tensors_of(profile: Profile, size_bytes: int) -> int:
    return sum(seen.spec.size_bytes == size_bytes for seen in profile.tensors)


def _costs() -> list[Row]:
    """The ring's a and b of 8 GPUs, from those of 16 by Table 2, beside those of the authors' published code."""
    found = []
    for cluster, published in FITTED_8.items():
        startup_ns, seconds_a_byte, _ = V100_CLUSTERS[cluster]
        ours = (startup_ns * 7 / 15 / 1000, 1e9 * seconds_a_byte * (7 / 8) / (15 / 16) * 1000)
        found.append(Row("Eq. 10", f"{cluster}, 8 GPUs from 16: a in us, b in ps", published, ours))
        what = f"tried: {cluster}, 8 GPUs in two nodes from 16 in four, a ring through PCIe 3"
        found.append(Row("Eq. 10", what, published, _in_nodes(startup_ns, seconds_a_byte), counts=False))
    for workers, counts in ((16, True), (8, False)):
        network = k80_cluster("ring", workers)
        times = tuple(network.cost_ns(size) / 1e6 for size in (200_000, 400_000))
        what = f"8 nodes, 10GbE, {workers} GPUs: all-reduce of 200 and 400 KB"
        found.append(Row("§1", what if counts else f"tried: {what}", (1.5, 1.8), times, "ms", counts=counts))
    return found


def _in_nodes(startup_ns: int, seconds_a_byte: float) -> tuple[float, float]:
    """The a in us and b in ps of a ring through two nodes of four GPUs, from those of a ring through four such nodes."""
    within = bus("pcie3", 4)
    # of the 30 steps of 16 GPUs, 8 pass from node to node one after another
    between_ns = (startup_ns - 22 * within.startup_ns) // 8
    rate = round(2 * 15 / 16 / seconds_a_byte)
    ring = flat_ring(2, within, startup_ns=between_ns, bytes_per_second=rate)
    return ring.startup_ns / 1000, 1e12 / ring.bytes_per_second


def half_precision(profile: Profile) -> Profile:
    """The same with gradients of two bytes an element."""
    tensors = tuple(
        msgspec.structs.replace(
            seen, spec=msgspec.structs.replace(seen.spec, dtype="float16", size_bytes=seen.spec.size_bytes // 2)
        )
        for seen in profile.tensors
    )
    return msgspec.structs.replace(profile, tensors=tensors)


def _throughput() -> list[Row]:
    return [
        *_throughput_over(script_cluster, "the script's a, b"),
        *_throughput_over(k80_cluster, "a, b of Fig. 4(a)", counts=False),
    ]


def _throughput_over(
    cluster: Callable[[str, int], Network], constants: str, *, counts: bool = True, hidden: bool = False
) -> list[Row]:
    """hidden: startups that are no part of computing, as in Eq. 7."""
    found = []
    for (figure, model, batch), by_workers in THROUGHPUT.items():
        for workers, published in by_workers.items():
            network = cluster("ring", workers)
            times = _seconds(zoo.profile(model), network, network if hidden else startups_on_device(network))
            ours = tuple(workers * batch / time for time in times)
            what = f"{model}, {workers} workers, {constants}: {NAMES}"
            found.append(Row(figure, what, published, ours, "images/s", counts=counts))
    return found


class Measured(NamedTuple):
    """What Fig. 9 shows of one cluster, model and precision, in seconds."""

    cluster: str
    model: str
    precision: str
    profile: Profile
    published: Three

    def row(self, ours: tuple[float, ...]) -> Row:
        return Row("Fig. 9", f"{self.cluster}, {self.model}, {self.precision}: {NAMES}", self.published, ours, "s")

    @property
    def fitted(self) -> Network:
        return fitted(self.cluster)

    @property
    def over_its_links(self) -> Network:
        return over_its_links(self.cluster)

    @property
    def counted_twice(self) -> Network:
        return counted_twice(self.cluster)

    @property
    def implied(self) -> Network:
        """With the time per byte that SyncEASGD's iteration implies, which is computing + a + b M."""
        (segment,) = self.fitted.segments
        transfer_s = self.published[1] - (self.profile.compute_ns + segment.startup_ns) / 1e9
        return Network.line(self.fitted.workers, segment.startup_ns, int(self.profile.size_bytes / transfer_s))


def _measured() -> Iterator[Measured]:
    for cluster, models in ITERATION.items():
        for model, by_precision in models.items():
            single = zoo.profile(model, device="v100")
            yield Measured(cluster, model, "FP32", single, by_precision[0])
            factor = COMPUTING[model][1] / COMPUTING[model][0]
            yield Measured(cluster, model, "FP16", half_precision(single.stretched(factor)), by_precision[1])


@cache
def _simulated() -> dict[tuple[str, str, str], tuple[float, ...]]:
    """Seconds of an iteration under each policy, by cluster, model and precision."""
    return {
        (case.cluster, case.model, case.precision): _seconds(case.profile, case.fitted, startups_on_device(case.counted_twice))
        for case in _measured()
    }


def _iterations() -> list[Row]:
    return [case.row(_simulated()[case[:3]]) for case in _measured()]


def _gains() -> list[Row]:
    """What the text says of Figs. 6, 7 and 9: how much faster MG-WFBP is."""
    iterations = _simulated()
    faster = {key: (wfbp / merged, easgd / merged) for key, (wfbp, easgd, merged) in iterations.items()}

    def most(cluster: str) -> float:
        return 100 * (max(max(pair) for (of, *_), pair in faster.items() if of == cluster) - 1)

    of_better = 100 * (max(min(pair) for pair in faster.values()) - 1)
    average = 100 * (mean(ratio for pair in faster.values() for ratio in pair) - 1)
    of_resnet = iterations["10GbE", "resnet152", "FP32"]
    of_densenet = iterations["10GbE", "densenet161", "FP32"]
    sixteen_k80 = script_cluster("ring", 16)
    sixteen = [_seconds(zoo.profile(model), sixteen_k80, startups_on_device(sixteen_k80)) for _, model, _ in THROUGHPUT]
    over_wfbp, over_easgd = (mean(times[slower] / times[2] for times in sixteen) for slower in (0, 1))
    return [
        Row(
            "Figs. 6, 7",
            "16 workers, the script's a, b: MG-WFBP over WFBP, SyncEASGD",
            (1.2, 1.36),
            (over_wfbp, over_easgd),
            "x",
        ),
        Row("Fig. 9", "MG-WFBP over either other, at most: 10GbE, 56GbIB", (70.0, 26.0), (most("10GbE"), most("56GbIB")), "%"),
        Row("Fig. 9", "MG-WFBP over the better of the two others, at most", 15.0, of_better, "%"),
        Row("§1", "MG-WFBP over either other, on average", 18.8, average, "%"),
        Row(
            "Fig. 9",
            "10GbE, resnet152, FP32: WFBP over SyncEASGD, MG-WFBP over WFBP",
            (10.0, 10.0),
            (100 * (of_resnet[1] / of_resnet[0] - 1), 100 * (of_resnet[0] / of_resnet[2] - 1)),
            "%",
        ),
        Row(
            "Fig. 9",
            "10GbE, densenet161, FP32: SyncEASGD over WFBP, MG-WFBP over SyncEASGD",
            (20.0, 7.0),
            (100 * (of_densenet[0] / of_densenet[1] - 1), 100 * (of_densenet[1] / of_densenet[2] - 1)),
            "%",
        ),
    ]


def _tried() -> list[Row]:
    """Figs. 6, 7 and 9 with one thing changed."""
    found = [
        _agreement("Figs. 6, 7", "as above", _throughput_over(script_cluster, "")),
        _agreement("Figs. 6, 7", "startups hidden behind computing", _throughput_over(script_cluster, "", hidden=True)),
        _agreement("Fig. 9", "as above", _iterations()),
    ]
    for what, runs_on in (
        ("startups hidden behind computing", lambda case: case.counted_twice),
        ("b of Fig. 4, but no faster than the link", lambda case: startups_on_device(case.over_its_links)),
        ("b of Fig. 4 whatever the link's rate", lambda case: startups_on_device(case.fitted)),
        ("the same, startups hidden behind computing", lambda case: case.fitted),
        ("b that SyncEASGD's own iteration implies", lambda case: startups_on_device(case.implied)),
        ("the same, startups hidden behind computing", lambda case: case.implied),
    ):
        changed = [case.row(_seconds(case.profile, case.fitted, runs_on(case))) for case in _measured()]
        found.append(_agreement("Fig. 9", what, changed))
    found += _with_fitted_tensor_cost()
    for cluster, (_, seconds_a_byte, _) in V100_CLUSTERS.items():
        for precision in ("FP32", "FP16"):
            cases = [case for case in _measured() if (case.cluster, case.precision) == (cluster, precision)]
            implied = " ".join(f"{1e9 / case.implied.bytes_per_second:.2f}" for case in cases)
            what = f"tried: {cluster}, {precision}, b: of Fig. 4; that SyncEASGD's iterations imply, by model"
            found.append(Row("Fig. 9", what, f"{1e9 * seconds_a_byte:.2f} ns", f"{implied} ns", counts=False))
    used = " ".join(f"{1e9 / counted_twice(cluster).bytes_per_second:.2f}" for cluster in V100_CLUSTERS)
    return [*found, Row("Fig. 9", f"tried: {', '.join(V100_CLUSTERS)}: b of the rows above", None, f"{used} ns", counts=False)]


def _with_fitted_tensor_cost() -> list[Row]:
    """Fig. 9 with a time for each tensor (§5.3: copies, casts) that is fitted to what SyncEASGD's iterations lack."""
    cases = list(_measured())
    lacks_ns = [(case.published[1] - _simulated()[case[:3]][1]) * 1e9 / len(case.profile.tensors) for case in cases]
    fitted_ns = round(median(lacks_ns))
    changed = []
    for case in cases:
        cost_ns = case.profile.uncovered_ns + fitted_ns * len(case.profile.tensors)
        profile = msgspec.structs.replace(case.profile, uncovered_ns=cost_ns)
        changed.append(case.row(_seconds(profile, case.fitted, startups_on_device(case.counted_twice))))
    what = f"a fitted constant, {fitted_ns / 1e6:.2f} ms a tensor for all clusters, models and precisions"
    spread = f"{min(lacks_ns) / 1e6:.2f} to {max(lacks_ns) / 1e6:.2f} ms"
    return [
        _agreement("Fig. 9", what, changed),
        Row("Fig. 9", "tried: what SyncEASGD's iterations lack, a tensor: least to most", None, spread, counts=False),
    ]


def _agreement(figure: str, what: str, changed: list[Row]) -> Row:
    counted = count(changed)
    wrong = [row.what.partition(f": {NAMES}")[0] for row in changed if count([row]).wrong]
    ours = f"{counted.within_15} of {counted.compared}; {'; '.join(wrong) or 'none'}"
    return Row(figure, f"tried: {what}: values within 15 %; wrong in order", None, ours, counts=False)


def _seconds(profile: Profile, planned: Network, runs_on: Network) -> tuple[float, ...]:
    """Under each policy, planned for one network and run on another."""
    case = Case(profile, runs_on)
    plans = [make_plan(catalog.get(name), profile, Place.of(planned)) for name in POLICIES]
    return tuple(judge_plan(plan, case, bound_ns=0).iteration_ns / 1e9 for plan in plans)
