"""MG-WFBP Figs. 6 and 7: GoogLeNet and ResNet-50 among 4 workers on 10 Gbit/s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from experiments.lab.operating import GBIT, Point, arm, cells, ratio
from experiments.lab.results import Measured
from gradlane import zoo

# images a second of 2 nodes of two GPUs, the authors' published script
FIGURE_6 = {"wfbp": 299.32, "mg-wfbp": 316.08, "sync-easgd": 250.28}
FIGURE_7 = {"wfbp": 151.1, "mg-wfbp": 151.18, "sync-easgd": 120.0}


def merging(figure: int, model: str, title: str, published: dict[str, float], out: Path) -> list[Measured]:
    arms = tuple(arm(name, "all-reduce", name=name) for name in published)
    there = cells(Point(zoo.profile(model), 10 * GBIT, arms, 0.05, hosts=4), out)
    return [
        ratio(
            f"MG-WFBP Fig. {figure}",
            f"{title}, 4 workers: speed of MG-WFBP, of that of {other}",
            published["mg-wfbp"] / published[name],
            there["mg-wfbp"],
            there[name],
        )
        for name, other in (("wfbp", "WFBP"), ("sync-easgd", "SyncEASGD"))
    ]


EXPERIMENTS: dict[str, Callable[[Path], list[Measured]]] = {
    "merging": partial(merging, 6, "googlenet", "GoogLeNet", FIGURE_6),
    "merging-resnet": partial(merging, 7, "resnet50", "ResNet-50", FIGURE_7),
}

REMARKS = """
Four hosts have one worker each, where the paper has two nodes of two GPUs. Bytes are scaled by
0.05. The profiles are the zoo's, calibrated to the throughput of one node. The cost that a message
has at any size is not scaled.

Results: MG-WFBP is ahead of both, as published, and its lead over WFBP is larger: among four ranks
on two cores a small message costs Gloo some milliseconds, which favours few messages.
"""
