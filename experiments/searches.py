"""ByteScheduler Fig. 14: how many trials each search needs until it has come to the best partition and credit.

A trial's value is the simulator's iteration time with noise of 2 %, as a few measured iterations have. The best is that
of a grid, as in the paper; a search has come to it when it tries sizes whose time, without the noise, is within 2 % of
it. `warm` begins from what the simulator predicts for the network as somebody might have measured it: a third less
rate, and half as much startup again.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from statistics import mean, stdev

import numpy as np

from experiments.assumptions import BYTESCHEDULER, GBIT, MESSAGE_STARTUP_NS
from experiments.table import Row
from gradlane import zoo
from gradlane.core.cluster import Cluster
from gradlane.core.collectives import all_reduce
from gradlane.core.network import Network
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.planning.questions import Case, judge
from gradlane.planning.search import GaussianProcess, Grid, Momentum, Prior, Search, Space, predicted

MODELS = (("VGG-16", "vgg16"), ("Transformer", "transformer-base"))
RATES_GBIT = (10, 25)
WORKERS = 4
SEEDS = 8
NOISE = 0.02
NEAR = 0.02
STEPS, PRIOR_STEPS = 7, 4  # a side of the grid that knows the best, and of the one that predicts it
AT_MOST = 100
# the paper tries several settings of its momentum search and shows the best: so here, over all cases
MOMENTA = tuple(itertools.product((0.03, 0.1, 0.3), (0.5, 0.9)))

Begin = Callable[[int], Search]


def network(kind: str, gbit: float, startup: float = 1.0) -> Network | Cluster:
    rate = int(gbit * GBIT)
    if kind == "servers":
        return Cluster.homogeneous(WORKERS, WORKERS, rate, startup_ns=int(MESSAGE_STARTUP_NS * startup))
    return all_reduce("ring", WORKERS, startup_ns=int(MESSAGE_STARTUP_NS * startup / 2), bytes_per_second=rate)


def surface(space: Space, profile: Profile, where: Network | Cluster, steps: int) -> Prior:
    """The simulated iteration time over the whole space, linear between `steps` sizes of each knob."""

    def time_ns(policy: Policy) -> int:
        return judge(policy, Case(profile, where), bound_ns=0).iteration_ns

    return predicted(space, time_ns, steps)


def trials(one: Search, truth: Prior, seed: int) -> int:
    """Trials until one is within `NEAR` of the best; `AT_MOST` where none of so many is."""
    draw = random.Random(seed)
    enough = truth.logs.min() + math.log(1 + NEAR)
    for tried in range(1, AT_MOST + 1):
        point = one.ask()
        value = float(truth(np.array([point]))[0])
        if value <= enough:
            return tried
        one.tell(point, math.exp(value + draw.gauss(0, NOISE)))
    return AT_MOST


def counts(begin: Begin, truths: Iterable[Prior]) -> list[list[int]]:
    """The trials of each seed, for each surface."""
    return [[trials(begin(seed), truth, seed) for seed in range(SEEDS)] for truth in truths]


def rows() -> list[Row]:
    found = []
    gaussian: list[int] = []
    for kind in ("servers", "all-reduce"):
        for label, name in MODELS:
            profile = zoo.profile(name, device="v100", batch=32)
            space = Space.of(BYTESCHEDULER, profile.specs)
            truths = [surface(space, profile, network(kind, gbit), STEPS) for gbit in RATES_GBIT]
            priors = [surface(space, profile, network(kind, gbit / 1.5, startup=1.5), PRIOR_STEPS) for gbit in RATES_GBIT]
            needed = {
                "Gaussian process": counts(lambda seed: GaussianProcess(2, seed), truths),
                "momentum": best(counts(_momentum(rate, inertia), truths) for rate, inertia in MOMENTA),
                "random": counts(lambda seed: Grid.random(2, seed), truths),
                "grid": counts(lambda seed: Grid.regular(2, STEPS), truths),
                "warm": [counts(_warm(prior), [truth])[0] for prior, truth in zip(priors, truths, strict=True)],
            }
            for what, of_rates in needed.items():
                text = " and ".join(f"{mean(one):.0f} ± {stdev(one):.0f}" for one in of_rates)
                what = "Gaussian process, warm" if what == "warm" else what
                found.append(Row("Fig. 14", f"{label}, {kind}, 10 and 25 Gbit/s: trials of {what}", None, text))
            gaussian += itertools.chain(*needed["Gaussian process"])
            mine, theirs = (sum(map(sum, needed[what])) for what in ("Gaussian process", "momentum"))
            if kind == "servers":
                found.append(
                    Row(
                        "§6.3",
                        f"{label}, {kind}: fewer trials than momentum",
                        "28 to 51 %",
                        f"{100 * (1 - mine / theirs):.0f} %",
                    )
                )
    share = f"{100 * sum(count <= 10 for count in gaussian) / len(gaussian):.0f} % of runs"
    found.append(Row("§6.3", "the Gaussian process is there within 10 trials", "typically", share))
    return found


def best(tried: Iterable[list[list[int]]]) -> list[list[int]]:
    return min(tried, key=lambda of_rates: sum(map(sum, of_rates)))


def _momentum(rate: float, inertia: float) -> Begin:
    return lambda seed: Momentum(2, seed, rate=rate, momentum=inertia)


def _warm(prior: Prior) -> Begin:
    return lambda seed: GaussianProcess(2, seed, prior)
