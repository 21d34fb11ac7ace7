"""Operating points: where a paper's systems are compared, run in the lab, and what that gave."""

from __future__ import annotations

import hashlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from experiments.lab.results import Measured
from gradlane import lab
from gradlane.compare.arms import ALONE, ArmSpec, file_of, measured_place
from gradlane.compare.processes import run_on_lab
from gradlane.compare.runner import train_in_turns
from gradlane.core import files
from gradlane.core.backends import BackendName
from gradlane.core.cluster import Cluster, Host, Link, RateStep, Worker
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile
from gradlane.core.timeline import Timeline
from gradlane.errors import RunError
from gradlane.planning import catalog
from gradlane.planning.measured import where
from gradlane.planning.questions import Case
from gradlane.planning.questions.sweep import Outcome, judge_plan
from gradlane.units import format_rate

GBIT = 10**9
TIMEOUT_S = 60.0
STARTUP_NS = 100_000  # about what a small message costs in the lab, where it is not measured
_LOWEST_PACKET, _HIGHEST_PACKET = 64, 512 << 10  # what the transport has


def arm(
    policy: str,
    backend: BackendName = "server",
    knobs: Mapping[str, int | float | str] | None = None,
    *,
    name: str = "",
    packet_bytes: int | None = None,
    servers: int = 0,
) -> ArmSpec:
    """A policy over servers, where nothing else is said, as in most of the papers, and by its own name then."""
    label = name or (policy if backend == "server" else f"{policy}@{backend}")
    return ArmSpec(policy, backend, label, dict(knobs or {}), packet_bytes, servers)


def policy_of(arm: ArmSpec) -> Policy:
    """The policy with its knobs."""
    return catalog.get(arm.policy, **arm.knobs)


class Point(msgspec.Struct, frozen=True):
    """A model on a device, hosts on links, and the systems that take turns there, all as they are in the paper.

    scale: of tensors, links, partitions and packets in the lab. stretch: of all times; links are slower by as much. unlike:
    hosts with links or devices of their own. hosts: of workers.
    """

    profile: Profile
    bits_per_second: int
    arms: tuple[ArmSpec, ...]
    scale: float
    hosts: int = 2
    stretch: float = 1.0
    rounds: int = 2
    steps: int = 2
    unlike: tuple[lab.HostSpec, ...] = ()
    network_classes: int = 1

    @property
    def key(self) -> str:
        """Of its folder: equal points are the same run."""
        return f"{self.profile.model}-{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]}"

    def __str__(self) -> str:
        rate = format_rate(self.bits_per_second // 8)
        return f"{self.profile.model}, {self.hosts} hosts on {rate}, x {self.scale:g}, {len(self.arms)} arms"

    def made(self) -> Profile:
        """The profile as devices in the lab have it, but for its tensors, which a lab makes smaller itself."""
        return self.profile.stretched(self.stretch)

    def spec(self) -> lab.LabSpec:
        unlike = tuple(
            msgspec.structs.replace(host, up=self._slower(host.up), down=self._slower(host.down)) for host in self.unlike
        )
        servers = tuple(range(self.hosts, self.hosts + max(arm.servers for arm in self.arms)))
        return lab.LabSpec(
            self.hosts + len(servers),
            round(self.bits_per_second / self.stretch),
            unlike=unlike,
            jobs=(lab.JobSpec(tuple(range(self.hosts)), servers),),
            network_classes=self.network_classes,
            scale=self.scale,
        )

    def smaller(self, arm: ArmSpec) -> ArmSpec:
        """The same with sizes as they are in the lab."""
        knobs = {
            name: max(8, round(value * self.scale)) if isinstance(value, int) and name.endswith("_bytes") else value
            for name, value in arm.knobs.items()
        }
        packet = arm.packet_bytes
        if packet is not None:
            # the transport's packets are multiples of 64 bytes
            packet = min(max(round(packet * self.scale / 64) * 64, _LOWEST_PACKET), _HIGHEST_PACKET)
        return msgspec.structs.replace(arm, knobs=knobs, packet_bytes=packet)

    def _slower(self, link: Link | None) -> Link | None:
        if link is None:
            return None
        steps = tuple(RateStep(step.at_ns, round(step.bytes_per_second / self.stretch)) for step in link.steps)
        return Link(round(link.bytes_per_second / self.stretch), steps)


@dataclass(frozen=True)
class Cell:
    """What one arm did. alone_ns: what computing without communication took. simulated: of its plan; None where nothing is
    simulated beside it."""

    step_times_ns: Sequence[int]
    plan: Plan
    timeline: Timeline
    alone_ns: int
    simulated: Outcome | None

    @property
    def step_ns(self) -> float:
        return statistics.median(self.step_times_ns)

    @property
    def simulated_ns(self) -> int | None:
        return None if self.simulated is None else self.simulated.iteration_ns

    @property
    def simulated_timeline(self) -> Timeline | None:
        return None if self.simulated is None else self.simulated.timeline()


def cells(point: Point, out: Path, *, simulates: bool = True) -> dict[str, Cell]:
    """By the name of an arm. What is in `out` already is not run again."""
    folder = out / point.key
    done = folder / "rank-0.json"
    print(f"{point}" + (", from before" if done.exists() else ""), file=sys.stderr, flush=True)
    if not done.exists():
        _run(point, folder)
    measured = msgspec.json.decode(done.read_bytes())["arms"]
    alone_ns = round(statistics.median(measured[ALONE]["step_ns"]))
    found = {}
    for arm in point.arms:
        plan = files.read(folder / file_of("plan", arm.name, 0), Plan)
        timeline = files.read(folder / file_of("timeline", arm.name, 0), Timeline)
        simulated = _simulated(point, arm, plan, measured_place(folder, arm.name, arm, plan), alone_ns) if simulates else None
        found[arm.name] = Cell(measured[arm.name]["step_ns"], plan, timeline, alone_ns, simulated)
    return found


def _run(point: Point, folder: Path) -> None:
    arms = [point.smaller(arm) for arm in point.arms]
    how = {"rounds": point.rounds, "steps": point.steps, "timeout_s": TIMEOUT_S, "measures": False}
    exit_code = train_in_turns(point.made(), arms, folder, partial(run_on_lab, point.spec()), **how)
    if exit_code:
        raise RunError.of(str(point), exit_code)


def _simulated(point: Point, arm: ArmSpec, plan: Plan, measured: Place, alone_ns: int) -> Outcome | None:
    spec = point.spec()
    links = [spec.links(host) for host in range(point.hosts)]
    changes = any(link is not None and link.steps for pair in links for link in pair)
    if changes or arm.packet_bytes is not None or (point.unlike and arm.backend != "server"):
        return None  # a run measures its network once; packets cost nothing there; servers alone are simulated unlike
    profile = point.made().scaled(point.scale)
    profile = profile.stretched(alone_ns / profile.compute_ns).in_order_of(plan.tensors)
    place = where(measured)
    if isinstance(place, Cluster):
        place = msgspec.structs.replace(place, network_classes=point.network_classes)
        if point.unlike:
            place = msgspec.structs.replace(place, hosts=tuple(map(_host, links)), workers=tuple(_workers(spec)))
    return judge_plan(plan, Case(profile, place), bound_ns=0)


def _host(links: tuple[Link | None, Link | None]) -> Host:
    up, down = links
    assert up is not None
    assert down is not None
    return Host(up, down)


def _workers(spec: lab.LabSpec) -> Iterable[Worker]:
    """Rank 0 measured what computing takes, so that the others' times count from its."""
    first = spec.compute_percent(0)
    return (Worker(host, round(100 * spec.compute_percent(host) / first)) for host in range(spec.hosts))


# -- rows ---------------------------------------------------------------------------------------------------


def ratio(figure: str, what: str, published: float | str | None, ours: Cell, other: Cell) -> Measured:
    """The speed of `ours`, of that of `other`."""
    simulated = _quotient(other.simulated_ns, ours.simulated_ns)
    return Measured(figure, what, published, simulated, other.step_ns / ours.step_ns, "x")


def faster(figure: str, what: str, published: float | str | None, ours: Cell, other: Cell) -> Measured:
    """By how many per cent `ours` is faster than `other`."""
    found = ratio(figure, what, published, ours, other)
    simulated = None if found.simulated is None else 100 * (found.simulated - 1)
    return Measured(figure, what, published, simulated, 100 * (found.lab - 1), "%")


def of_best(figure: str, what: str, published: float | str | None, ours: Cell, among: Sequence[Cell]) -> Measured:
    """The speed of `ours`, of that of the best of `among`, each time the best there."""
    simulated = [cell.simulated_ns for cell in among if cell.simulated_ns is not None]
    least = _quotient(min(simulated, default=None), ours.simulated_ns)
    return Measured(figure, what, published, least, min(cell.step_ns for cell in among) / ours.step_ns, "x")


def efficiency(figure: str, what: str, published: float | str | None, ours: Cell) -> Measured:
    """The part of a step that computing alone takes."""
    part = _quotient(ours.alone_ns, ours.simulated_ns)
    simulated = None if part is None else 100 * part
    return Measured(figure, what, published, simulated, 100 * ours.alone_ns / ours.step_ns, "%")


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


__all__ = ["GBIT", "STARTUP_NS", "Cell", "Point", "arm", "cells", "efficiency", "faster", "of_best", "policy_of", "ratio"]
