"""Parameter servers in virtual time: jobs on a cluster, each rank driven by the same Dispatcher
that runs live.

Where workers are all alike, one is simulated and stands for all, so that 2048 cost no more than 2.
Otherwise, and where a packet has a startup or a message is acknowledged, each worker is simulated, and every packet.
Where a cluster has a bus, the workers of a host sum each message first, and the host sends the sum to the
servers (`hosts.py`). There are three kinds of training.
Synchronous: a server returns a sum when it has every worker's part. Asynchronous: a server returns
parameters to a worker as soon as it has that worker's part. Bounded staleness: as asynchronous, but
no worker begins an iteration more than `staleness` iterations ahead of the slowest worker's pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from gradlane.core.backends import BUS_KNOWS_NO_OWNERS, refuse_owners_beyond, refuse_what_cannot_be_done
from gradlane.core.cluster import Cluster, Host, Link
from gradlane.core.fields import need, need_int
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.errors import PlanError
from gradlane.sim.fabric import Fabric, Job
from gradlane.sim.fluid import FluidFabric
from gradlane.sim.hosts import HostFabric
from gradlane.sim.norms import NormsFabric, norms_ns
from gradlane.sim.packets import PacketFabric
from gradlane.sim.simulation import Simulation

ALIKE = 0.001  # iterations that differ by this part of them, or less, are steady
LONG_RUN = 18  # iterations, where the first ones are not
PERIODS = range(1, 5)  # after how many of them a long run may repeat


def simulate_servers(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    iterations: int = 3,
    *,
    staleness: int | None = 0,
    jitter: float = 0.0,
    seed: int = 0,
    whole: bool = False,
) -> tuple[Timeline, ...]:
    """Run iterations of one job on the whole cluster.

    Args:
        plan: what to carry out.
        profile: one iteration's computation; has the tensors of the plan.
        cluster: workers, servers, and the hosts that they are on.
        iterations: as in `simulate_jobs`, like the arguments after it.
        whole: simulate every worker and packet, though the workers are all alike.

    Returns:
        A timeline for each worker; a single one where the workers are all alike, unless `whole`.

    Raises:
        PlanError, InputError: as `simulate_jobs` does.
    """
    job = Job(plan, profile)
    return simulation((job,), cluster, iterations, staleness=staleness, jitter=jitter, seed=seed, whole=whole).run()[0]


class Steady(NamedTuple):
    """A job on a cluster in the long run.

    Attributes:
        timeline: the slowest worker's.
        iterations: those of it that a long run repeats, as far as the simulation has seen.
        iteration_ns: their mean, in ns.
    """

    timeline: Timeline
    iterations: range
    iteration_ns: int


def simulate_steady(plan: Plan, profile: Profile, cluster: Cluster, *, whole: bool = False) -> Steady:
    """Run one synchronous job until its iterations repeat.

    Workers that are simulated one by one may take turns, so that an iteration is long for one of them and short for
    the next. These are simulated for longer. The last iteration is left out, since no later one disturbs it.

    Args:
        plan, profile, cluster, whole: as in `simulate_servers`.

    Raises:
        PlanError, InputError: as `simulate_servers` does.
    """
    timelines = simulate_servers(plan, profile, cluster, whole=whole)
    steps = [timeline.iteration_ns() for timeline in timelines]
    last = [took_ns for of_worker in steps for took_ns in of_worker[-2:]]
    if len(steps) == 1 or max(last) - min(last) <= ALIKE * max(last):
        slowest = max(range(len(steps)), key=lambda worker: steps[worker][-1])
        return Steady(timelines[slowest], range(len(steps[0]) - 1, len(steps[0])), steps[slowest][-1])
    timelines = simulate_servers(plan, profile, cluster, LONG_RUN, whole=whole)
    steps = [timeline.iteration_ns()[:-1] for timeline in timelines]
    periods = (count for count in PERIODS if all(each[-count:] == each[-2 * count : -count] for each in steps))
    count = next(periods, len(steps[0]) // 2)
    slowest = max(range(len(steps)), key=lambda worker: sum(steps[worker][-count:]))
    taken = range(len(steps[0]) - count, len(steps[0]))
    return Steady(timelines[slowest], taken, round(sum(steps[slowest][-count:]) / count))


def simulate_jobs(
    jobs: Sequence[Job],
    cluster: Cluster,
    iterations: int = 3,
    *,
    staleness: int | None = 0,
    jitter: float = 0.0,
    seed: int = 0,
) -> list[tuple[Timeline, ...]]:
    """Run iterations of several jobs that share a cluster.

    The sum of a two-phase message is returned when every worker has asked for it; where training is
    not synchronous, when the worker itself has. Asking passes no link.

    Args:
        jobs: 1 or more.
        cluster: workers, servers, and the hosts that they are on.
        iterations: of each job, 1 to 10^6.
        staleness: 0 is synchronous training, a greater number bounded staleness, None asynchronous
            training.
        jitter: the compute times of each worker in each iteration are drawn evenly from 1 - jitter
            to 1 + jitter times their length; 0 to below 1.
        seed: of these draws. The result is the same for the same seed.

    Returns:
        For each job a timeline for each of its workers; a single one where all workers are alike.

    Raises:
        PlanError: the cluster's servers cannot carry out a plan.
        InputError: an argument is out of its range.
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
    """The run of `simulate_jobs`, which has the other arguments, before it begins.

    Args:
        whole: as in `simulate_servers`.
    """
    need(len(jobs) > 0, "jobs", len(jobs), "1 or more")
    place = Place.of(cluster)
    for job in jobs:
        refuse_what_cannot_be_done(job.plan, place.backend, place.has_external_servers)
        refuse_owners_beyond(job.plan, len(cluster.workers))
        if job.plan.owners is not UNSET and cluster.bus is not UNSET:
            raise PlanError(f"plan {job.plan.policy}: {BUS_KNOWS_NO_OWNERS}; expected another policy")
        for server in job.placement or ():
            if server is not None:
                need_int("placement", server, 0, len(cluster.servers) - 1)
        for worker in job.workers or ():
            need_int("workers", worker, 0, len(cluster.workers) - 1)
    if cluster.bus is not UNSET:
        need(
            len(jobs) == 1 and jobs[0].workers is None, "jobs", len(jobs), "one on all workers, where hosts sum messages first"
        )
        if jitter > 0 or _unlike_devices(cluster):
            jobs = (_in_one_order(jobs[0], cluster),)
    plain = jitter == 0 and all(job.placement is None and job.workers is None for job in jobs)
    packets_count = cluster.packet_startup_ns is not UNSET or any(job.plan.is_acknowledged for job in jobs)
    homogeneous = cluster.is_homogeneous and plain and not whole and not packets_count
    if not homogeneous:
        jobs = [_at_owners(job, cluster) for job in jobs]
    placed = [
        (number, worker)
        for number, job in enumerate(jobs)
        for worker in ((0,) if homogeneous else job.workers or range(len(cluster.workers)))
    ]
    carrier = _carrier(jobs, cluster, placed, staleness, homogeneous)
    if staleness == 0:  # otherwise servers update, and there is no norm of a sum
        carrier = _with_norms(carrier, jobs, cluster, placed)
    return Simulation(
        jobs,
        [(number, cluster.workers[worker].compute_percent) for number, worker in placed],
        carrier,
        iterations,
        staleness=staleness,
        jitter=jitter,
        seed=seed,
        updates_here=cluster.update_bytes_per_second is None,
    )


def _at_owners(job: Job, cluster: Cluster) -> Job:
    """The job with each tensor of two phases at the server beside its owner, if its tensors have owners."""
    if job.plan.owners is UNSET or job.placement is not None:
        return job
    beside: dict[int, list[int]] = {}
    for number, server in enumerate(cluster.servers):
        beside.setdefault(server.host, []).append(number)
    server_of = [beside[worker.host].pop() for worker in cluster.workers]  # as many as workers on every host
    placement: list[int | None] = [None] * len(job.plan.tensors)
    for index in job.plan.second_phases:
        for tensor in job.plan.messages[index].tensors:
            placement[tensor] = server_of[job.plan.owners.ranks[tensor]]
    return msgspec.structs.replace(job, placement=tuple(placement))


def _with_norms(fabric: Fabric, jobs: Sequence[Job], cluster: Cluster, placed: Sequence[tuple[int, int]]) -> Fabric:
    """`fabric` with the exchange of norms around it, for jobs whose tensors have owners."""
    plans = {number: job.plan for number, job in enumerate(jobs) if job.plan.owners is not UNSET and job.plan.second_phases}
    if not plans:
        return fabric
    took_ns = {number: norms_ns(plan, cluster, len(jobs[number].workers or cluster.workers)) for number, plan in plans.items()}
    return NormsFabric(fabric, plans, [number for number, _ in placed], took_ns)


def _unlike_devices(cluster: Cluster) -> bool:
    """Whether some host has devices of several speeds."""
    speeds = {(worker.host, worker.compute_percent) for worker in cluster.workers}
    return len(speeds) > len({host for host, _ in speeds})


def _in_one_order(job: Job, cluster: Cluster) -> Job:
    """The job with the order fixed in which its messages start.

    A host sums a message when each of its devices has handed it over. As ranks of an all-reduce, they must
    hand over messages in one order: two devices whose windows are taken by different messages would wait
    for one another for ever. The order is that of devices which are all alike.
    """
    if job.plan.sequence is not None:
        return job
    alike = msgspec.structs.replace(
        cluster, workers=tuple(msgspec.structs.replace(worker, compute_percent=100) for worker in cluster.workers)
    )
    ((timeline, *_),) = simulate_jobs((job,), alike, 2)
    starts: dict[int, int] = {}
    for span in timeline.spans:
        if span.kind == "send" and span.iteration == 1:
            starts[span.subject] = min(span.start_ns, starts.get(span.subject, span.start_ns))
    return msgspec.structs.replace(job, plan=job.plan.with_sequence(tuple(sorted(starts, key=starts.__getitem__))))


def _carrier(
    jobs: Sequence[Job], cluster: Cluster, placed: Sequence[tuple[int, int]], staleness: int | None, homogeneous: bool
) -> Fabric:
    """What carries the messages of `placed`: (job, worker of the cluster) of each rank."""
    bus, between = cluster.bus, cluster.between
    if bus is UNSET:
        return FluidFabric(jobs, cluster) if homogeneous else PacketFabric(jobs, cluster, placed, staleness)
    sends = {worker.host: number for number, worker in enumerate(between.workers)}
    host_of = [sends[cluster.workers[worker].host] for _, worker in placed]
    senders = [(0, number) for number in range(len(sends))]
    fabric: Fabric = FluidFabric(jobs, between) if homogeneous else PacketFabric(jobs, between, senders, staleness)
    fastest = tuple(Host(Link(host.up.fastest), Link(host.down.fastest)) for host in between.hosts)
    rate = msgspec.structs.replace(between, hosts=fastest).as_network().bytes_per_second
    stages = (bus.broadcast, bus.broadcast)
    return HostFabric(fabric, jobs[0].plan, host_of, stages, bus.packet_bytes, lambda size_bytes: rate, collective=False)
