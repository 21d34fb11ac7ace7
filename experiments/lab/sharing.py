"""Several jobs on the same hosts and links, all under one policy, one policy after another (Mercury Fig. 20).

Run by each rank of each job with a file that has a `Job`. Rank 0 leaves the moments at which its iterations ended.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.lab.operating import STARTUP_NS, Point, policy_of
from gradlane import lab
from gradlane.compare.arms import ArmSpec
from gradlane.compare.processes import python_module, run_on_lab
from gradlane.core import files
from gradlane.core.cluster import Cluster
from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.profile import Profile
from gradlane.errors import RunError
from gradlane.planning.plans import make_plan
from gradlane.sim import Job as SimulatedJob
from gradlane.sim import simulate_jobs

SECONDS, TOGETHER = 12.0, 2  # how long each policy has, and how many iterations ranks do between asking whether it is over
SIMULATED_ITERATIONS = 12
TIMEOUT_S = 60.0

Speeds = dict[str, list[float]]
"""By policy the iterations a second of each job."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    profile: str
    arm: ArmSpec
    bytes_per_second: int
    seconds: float
    out: str


def speeds(
    profiles: Sequence[Profile], bits: int, arms: Sequence[ArmSpec], scale: float, stretch: float, out: Path
) -> tuple[Speeds, Speeds]:
    """Measured and simulated."""
    measured: Speeds = {}
    simulated: Speeds = {}
    for arm in arms:
        points = [Point(profile, bits, (arm,), scale, stretch=stretch) for profile in profiles]
        key = hashlib.sha256("".join(point.key for point in points).encode()).hexdigest()[:12]
        measured[arm.name] = _measured(points, out / f"shared-{arm.name}-{key}")
        simulated[arm.name] = _simulated(points)
    return measured, simulated


def _measured(points: Sequence[Point], folder: Path) -> list[float]:
    ends = [folder / f"ends-{job}.json" for job in range(len(points))]
    spec = points[0].spec()
    print(f"{len(points)} jobs under {points[0].arms[0].name}", file=sys.stderr, flush=True)
    if not all(path.exists() for path in ends):
        folder.mkdir(parents=True, exist_ok=True)
        jobs = []
        for job, (point, path) in enumerate(zip(points, ends, strict=True)):
            given, config = folder / f"given-{job}.json", folder / f"job-{job}.json"
            files.write(given, point.made())
            arm = point.smaller(point.arms[0])
            config.write_bytes(msgspec.json.encode(Job(str(given), arm, _bytes_per_second(point), SECONDS, str(path))))
            jobs.append(lab.JobSpec((0, 1), command=tuple(python_module("experiments.lab.sharing", [str(config)]))))
        exit_code = run_on_lab(msgspec.structs.replace(spec, jobs=tuple(jobs)), [])
        if exit_code:
            raise RunError.of("the jobs", exit_code)
    moments: list[list[float]] = [json.loads(path.read_text()) for path in ends]
    both_from, both_to = max(each[TOGETHER] for each in moments), min(each[-1] for each in moments)
    # whole iterations only, as a few long ones are all that there may be
    found = []
    for each in moments:
        inside = [at for at in each if both_from <= at <= both_to]
        found.append((len(inside) - 1) / (inside[-1] - inside[0]))
    return found


def _simulated(points: Sequence[Point]) -> list[float]:
    point = points[0]
    cluster = Cluster.homogeneous(2, 2, _bytes_per_second(point), colocated=True, startup_ns=STARTUP_NS)
    jobs = []
    for each in points:
        profile = each.made().scaled(each.scale)
        jobs.append(SimulatedJob(make_plan(policy_of(each.smaller(each.arms[0])), profile, Place.of(cluster)), profile))
    found = []
    for timelines in simulate_jobs(jobs, cluster, SIMULATED_ITERATIONS):
        later = timelines[0].iteration_ns()[2:]
        found.append(1e9 * len(later) / sum(later))
    return found


def _bytes_per_second(point: Point) -> int:
    up, _ = point.spec().links(0)
    assert up is not None
    return up.bytes_per_second


def main(path: str) -> None:
    import torch
    import torch.distributed as dist

    from gradlane.compare.worker import Arm, EmulatedWorkload

    job = msgspec.json.decode(Path(path).read_bytes(), type=Job)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network = Network.line(dist.get_world_size(), startup_ns=STARTUP_NS, bytes_per_second=job.bytes_per_second)
    device = EmulatedWorkload(files.read(job.profile, Profile))
    arm = Arm(job.arm.name, job.arm, device, TIMEOUT_S, network=network, profile=device.model.profile)
    assert arm.session is not None
    ends: list[float] = []
    more = torch.ones(1)
    began = time.time()
    while float(more):
        arm.step()
        ends.append(time.time())  # hosts share a clock
        if len(ends) % TOGETHER == 0:  # all ranks stop alike
            more.fill_(ends[-1] < began + job.seconds)
            dist.broadcast(more, 0)
    arm.session.close()
    if dist.get_rank() == 0:
        Path(job.out).write_text(json.dumps(ends))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
