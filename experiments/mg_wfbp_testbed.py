"""MG-WFBP Figs. 6, 7 and 9: what the authors' published scripts plot of their three clusters of up to 16 GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import mean, median

import msgspec

from experiments.assumptions import k80_cluster, scaled
from experiments.mg_wfbp_networks import script_cluster
from experiments.table import Row
from gradlane import zoo
from gradlane.core.network import Network
from gradlane.core.profile import Profile
from gradlane.planning import catalog
from gradlane.planning.questions import Case, judge

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
# a and b of 16 GPUs, Fig. 4(b) and (c)
CLUSTERS = {"10GbE": (908_000, 7.4e-10), "56GbIB": (236_000, 4.06e-10)}
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
        startup_ns, seconds_a_byte = CLUSTERS[cluster]
        ours = (startup_ns * 7 / 15 / 1000, 1e9 * seconds_a_byte * (7 / 8) / (15 / 16) * 1000)
        found.append(Row("Eq. 10", f"{cluster}, 8 GPUs from 16: a in us, b in ps", published, ours))
    eight = k80_cluster("ring", 8)
    times = tuple(eight.cost_ns(size) / 1e6 for size in (200_000, 400_000))
    return [*found, Row("§1", "8 nodes, 10GbE: all-reduce of 200 and 400 KB", (1.5, 1.8), times, "ms")]


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
    found = []
    for (figure, model, batch), by_workers in THROUGHPUT.items():
        profile = zoo.profile(model)
        for network, which in ((k80_cluster, "a, b of Fig. 4(a)"), (script_cluster, "the script's a, b")):
            for workers, published in by_workers.items():
                ours = tuple(workers * batch / time for time in _seconds(profile, network("ring", workers)))
                found.append(
                    Row(
                        figure,
                        f"{model}, {workers} workers, {which}: {NAMES}",
                        published,
                        ours,
                        "images/s",
                        counts=network is k80_cluster,
                    )
                )
    return found


def _cases() -> Iterator[tuple[str, str, str, Profile, Three]]:
    """(cluster, model, precision, profile, published seconds)."""
    for cluster, models in ITERATION.items():
        for model, by_precision in models.items():
            single = zoo.profile(model, device="v100")
            yield cluster, model, "FP32", single, by_precision[0]
            factor = COMPUTING[model][1] / COMPUTING[model][0]
            yield cluster, model, "FP16", half_precision(scaled(single, factor)), by_precision[1]


@cache
def _simulated() -> dict[tuple[str, str, str], tuple[float, ...]]:
    """Seconds of an iteration under each policy, by cluster, model and precision."""
    return {
        (cluster, model, precision): _seconds(profile, _fitted(cluster)) for cluster, model, precision, profile, _ in _cases()
    }


def _iterations() -> list[Row]:
    found = []
    for cluster, model, precision, _, published in _cases():
        ours = _simulated()[cluster, model, precision]
        found.append(Row("Fig. 9", f"{cluster}, {model}, {precision}: {NAMES}", published, ours, "s"))
    return found


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
    sixteen = [_seconds(zoo.profile(model), k80_cluster("ring", 16)) for _, model, _ in THROUGHPUT]
    over_wfbp, over_easgd = (mean(times[slower] / times[2] for times in sixteen) for slower in (0, 1))
    return [
        Row(
            "Figs. 6, 7",
            "16 workers, a, b of Fig. 4(a): MG-WFBP over WFBP, SyncEASGD",
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
    """Bytes that take as long as SyncEASGD's own iteration says: does it explain the two others?"""
    rates: dict[tuple[str, str], list[float]] = {}
    left: dict[tuple[str, str, str], float] = {}
    before: list[float] = []
    after: list[float] = []
    for cluster, model, precision, profile, published in _cases():
        startup_ns, _ = CLUSTERS[cluster]
        seconds_a_byte = (published[1] - (profile.compute_ns + startup_ns) / 1e9) / profile.size_bytes
        rates.setdefault((cluster, precision), []).append(1e9 * seconds_a_byte)
        left[cluster, model, precision] = published[1] - _simulated()[cluster, model, precision][1]
        implied = Network.line(16, startup_ns, int(1 / seconds_a_byte))
        for network, errors in ((_fitted(cluster), before), (implied, after)):
            wfbp, _, merged = _seconds(profile, network)
            errors += [abs(wfbp / published[0] - 1), abs(merged / published[2] - 1)]
    found = [
        Row(
            "Fig. 9",
            f"tried: {cluster}, {precision}: b that SyncEASGD's iterations imply, by model",
            f"{1e9 * CLUSTERS[cluster][1]:.2g} ns",
            " ".join(f"{rate:.2f}" for rate in implied_by) + " ns",
            counts=False,
        )
        for (cluster, precision), implied_by in rates.items()
    ]
    for cluster in CLUSTERS:
        # what is left is c tensors + d bytes, and FP16 has half of the bytes
        a_tensor = [
            1e6 * (2 * left[cluster, model, "FP16"] - left[cluster, model, "FP32"]) / TABLE_4[model][0] for model in COMPUTING
        ]
        what = f"tried: {cluster}: cost of a tensor that FP32 and FP16 of SyncEASGD imply together, by model"
        found.append(Row("Fig. 9", what, None, tuple(a_tensor), "us", counts=False))
    for which, errors in (("b of Fig. 4", before), ("b that SyncEASGD's iteration implies", after)):
        found.append(
            Row(
                "Fig. 9",
                f"tried: {which}: median error of WFBP and MG-WFBP",
                None,
                100 * median(errors),
                "%",
                counts=False,
            )
        )
    return found


def _fitted(cluster: str) -> Network:
    startup_ns, seconds_a_byte = CLUSTERS[cluster]
    return Network.line(16, startup_ns, int(1 / seconds_a_byte))


def _seconds(profile: Profile, network: Network) -> tuple[float, ...]:
    case = Case(profile, network)
    return tuple(judge(catalog.get(name), case, bound_ns=0).iteration_ns / 1e9 for name in POLICIES)
