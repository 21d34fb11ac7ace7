"""`python -m bench.simulator`: what simulating costs. No network, no torch.

sweep     467 tensors (as many as ResNet-152's), every policy of all-reduce but `searched`, 2 to 2048 workers on a ring
packets   64 unequal workers and 64 unequal servers, every packet of 100 MB on every link, beside the same number
          of packets through two resources each in SimPy, where that is installed
searched  the search for the same 467 tensors
"""

from __future__ import annotations

import importlib
import random
import time
from typing import Any

from gradlane import policies
from gradlane.core.cluster import Cluster, Host, Link, Server, Worker
from gradlane.core.collectives import all_reduce
from gradlane.core.place import Place
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.planning.plans import make_plan
from gradlane.planning.searched import Searched
from gradlane.sim import Job, iteration_ns
from gradlane.sim.servers import simulation

TEN_GBIT = 1_250_000_000


def profile(tensors: int, size_bytes: int, backward_ns: int) -> Profile:
    """A network of layers of three tensors, one of them large, with sizes drawn from a fixed seed."""
    draw = random.Random(1)
    weights = [draw.random() ** 4 if index % 3 == 0 else 1e-5 for index in range(tensors)]
    layers = -(-tensors // 3)
    step_ns = backward_ns // layers
    return Profile(
        "synthetic",
        "none",
        tuple(
            TensorProfile(
                TensorSpec(f"t{index}", max(4, int(weight / sum(weights) * size_bytes) // 4 * 4)),
                (index // 3 + 1) * step_ns,
                layers - 1 - index // 3,
            )
            for index, weight in enumerate(weights)
        ),
        tuple(Layer(f"l{index}", step_ns // 2, 20_000) for index in range(layers)),
        layers * step_ns,
    )


def sweep() -> None:
    model = profile(467, 240_000_000, 200_000_000)
    begun = time.perf_counter()
    runs = 0
    for exponent in range(1, 12):
        network = all_reduce("ring", 2**exponent, startup_ns=5_000, bytes_per_second=TEN_GBIT)
        for name in policies.names("all-reduce"):
            iteration_ns(make_plan(policies.get(name), model, Place(network)), model, network)
            runs += 1
    print(f"sweep     {runs} plans and simulations in {time.perf_counter() - begun:.2f} s")


def packets() -> None:
    model = profile(161, 102_000_000, 65_000_000)
    hosts = tuple(Host(Link(TEN_GBIT if index % 3 else TEN_GBIT // 2), Link(TEN_GBIT)) for index in range(128))
    workers = tuple(Worker(index, 100 + index % 5 * 5) for index in range(64))
    servers = tuple(Server(64 + index, 1 + index % 2) for index in range(64))
    cluster = Cluster(hosts, workers, servers, startup_ns=20_000, sum_bytes_per_second=10**10)
    for name in ("mercury", "bytescheduler"):
        plan = make_plan(policies.get(name), model, Place.of(cluster))
        run = simulation([Job(plan, model)], cluster)
        begun = time.perf_counter()
        run.run()
        took = time.perf_counter() - begun
        print(f"packets   {name}: 3 iterations, {run.events} events in {took:.1f} s, {run.events / took:.0f} a second")
    try:
        simpy: Any = importlib.import_module("simpy")
    except ImportError:
        print("packets   SimPy is not installed: nothing to stand beside")
        return
    environment = simpy.Environment()
    links = [simpy.Resource(environment, 1) for _ in range(256)]

    def packet(up: int, down: int) -> Any:
        for link in (up, down):
            with links[link].request() as request:
                yield request
                yield environment.timeout(24)

    count = 100_000
    for index in range(count):
        environment.process(packet(index % 64, 192 + index * 7 % 64))
    begun = time.perf_counter()
    environment.run()
    print(f"packets   SimPy {simpy.__version__}: {2 * count / (time.perf_counter() - begun):.0f} packets on a link a second")


def searched() -> None:
    model = profile(467, 240_000_000, 200_000_000)
    for workers in (8, 64, 1024):
        network = all_reduce("ring", workers, startup_ns=5_000, bytes_per_second=TEN_GBIT)
        begun = time.perf_counter()
        found = Searched().search(model, network)
        plans = [make_plan(policies.get(name), model, Place(network)) for name in policies.names("all-reduce")]
        best = min(iteration_ns(plan, model, network) for plan in plans)
        print(
            f"searched  {workers} workers: {found.iteration_ns / 1e6:.1f} ms, {found.distance:.1%} above the bound, "
            f"the best other {best / 1e6:.1f} ms, in {time.perf_counter() - begun:.1f} s"
        )


if __name__ == "__main__":
    sweep()
    packets()
    searched()
