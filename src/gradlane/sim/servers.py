"""Parameter servers in virtual time: jobs on a cluster, each rank driven by the same Dispatcher that runs live.

Workers that are all alike are simulated as one, so that 2048 cost no more than 2; others each on their own, packet
by packet. Synchronous: a server returns a sum when it has every worker's part. Asynchronous: it returns the
parameters to a worker as soon as that worker's part is in. Bounded staleness: so too, but no worker begins an
iteration more than `staleness` ahead of the slowest one's pushes.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.core.backends import refuse_what_cannot_be_done
from gradlane.core.cluster import Cluster
from gradlane.core.fields import need, need_int
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.sim.fabric import Job
from gradlane.sim.fluid import FluidFabric
from gradlane.sim.packets import PacketFabric
from gradlane.sim.simulation import Simulation


def simulate_servers(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    iterations: int = 3,
    *,
    staleness: int | None = 0,
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[Timeline, ...]:
    """One job on the whole cluster: a timeline for each simulated worker, one alone where they are alike.

    As `simulate_jobs`, which has the arguments.
    """
    return simulate_jobs((Job(plan, profile),), cluster, iterations, staleness=staleness, jitter=jitter, seed=seed)[0]


def simulate_jobs(
    jobs: Sequence[Job],
    cluster: Cluster,
    iterations: int = 3,
    *,
    staleness: int | None = 0,
    jitter: float = 0.0,
    seed: int = 0,
) -> list[tuple[Timeline, ...]]:
    """Run `iterations` iterations of each job and return its workers' timelines. The same for the same `seed`.

    staleness: 0 synchronous, n bounded staleness, None asynchronous. jitter: the compute times of each worker and
    iteration are drawn evenly from 1 - jitter to 1 + jitter times their length. The sum of a split
    message is returned when every worker has asked for it (one alone, where not synchronous), which passes no link.
    Raises `InputError` for arguments of no use, `PlanError` for a plan that the cluster's servers cannot carry out.
    """
    return simulation(jobs, cluster, iterations, staleness=staleness, jitter=jitter, seed=seed).run()


def simulation(
    jobs: Sequence[Job],
    cluster: Cluster,
    iterations: int = 3,
    *,
    staleness: int | None = 0,
    jitter: float = 0.0,
    seed: int = 0,
    whole: bool = False,
) -> Simulation:
    """The run of `simulate_jobs`, not yet begun. whole: simulate every worker, though they are alike."""
    need(len(jobs) > 0, "jobs", len(jobs), "1 or more")
    place = Place.of(cluster)
    for job in jobs:
        refuse_what_cannot_be_done(job.plan, place.backend, place.has_external_servers)
        for server in job.placement or ():
            need_int("placement", server, 0, len(cluster.servers) - 1)
        for worker in job.workers or ():
            need_int("workers", worker, 0, len(cluster.workers) - 1)
    plain = jitter == 0 and all(job.placement is None and job.workers is None for job in jobs)
    homogeneous = cluster.is_homogeneous and plain and not whole
    placed = [
        (number, worker)
        for number, job in enumerate(jobs)
        for worker in ((0,) if homogeneous else job.workers or range(len(cluster.workers)))
    ]
    return Simulation(
        jobs,
        [(number, cluster.workers[worker].compute_percent) for number, worker in placed],
        FluidFabric(jobs, cluster) if homogeneous else PacketFabric(jobs, cluster, placed, staleness),
        iterations,
        staleness=staleness,
        jitter=jitter,
        seed=seed,
        updates_here=cluster.update_bytes_per_second is None,
    )
