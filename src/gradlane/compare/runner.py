"""Trials: emulated devices on emulated hosts under all arms; one run for each model, hosts and
link.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gradlane import lab
from gradlane.compare.arms import ALONE, BASELINE, ArmSpec, file_of, measured_place
from gradlane.compare.memory import comparing_bytes, need_memory
from gradlane.compare.processes import need_lab, python_module, run_on_lab, run_on_loopback
from gradlane.compare.records import Cell, hosts_text
from gradlane.core import files
from gradlane.core.bus import Bus
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.speedup import Speedup, turn_times
from gradlane.errors import RunError
from gradlane.lab.spec import ranks_on
from gradlane.planning.plans import make_plan, when_clipping
from gradlane.planning.questions.prediction import predict
from gradlane.planning.questions.sweep import Outcome
from gradlane.policies import get
from gradlane.units import format_rate

_MOST_OF_NAME = 64  # of a model, in the name of a folder, which file systems limit


@dataclass(frozen=True)
class Trial:
    """One run. Rates and tensors are the emulated cluster's; `scale` makes both smaller in the run.

    Attributes:
        unlike: hosts with links of their own, whose rates may change during the run.
        finals, clip_norm: as in `worker.Config`.
    """

    profile: Profile
    hosts: int
    link_bits_per_second: int | None
    scale: float
    loopback: bool
    arms: Sequence[ArmSpec]
    rounds: int
    steps: int
    batch_size: int
    timeout: float
    unlike: tuple[lab.HostSpec, ...] = ()
    finals: int = 0
    ranks_per_host: int = 1
    clip_norm: float | None = None

    @property
    def key(self) -> str:
        """Name of the run's folder; equal trials are the same run.

        A model may have any name, as "meta-llama/Llama-3-8B" or "../x".
        """
        name = re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", self.profile.model)[:_MOST_OF_NAME]
        return f"{name}-{hashlib.sha256(repr(self).encode()).hexdigest()[:12]}"

    @property
    def servers(self) -> int:
        """Hosts of servers, which all arms that have some share."""
        return max(arm.servers for arm in self.arms)

    @property
    def processes(self) -> int:
        """Ranks and servers."""
        return self.hosts * self.ranks_per_host + self.servers

    @property
    def rank_bytes(self) -> int:
        """Memory that a rank needs at least."""
        return comparing_bytes(self.profile.scaled(self.scale).size_bytes, len(self.arms))

    @property
    def lab_spec(self) -> lab.LabSpec:
        """The lab that it runs in, without `loopback`.

        Raises:
            InputError: it has more hosts than a lab.
        """
        servers = range(self.hosts, self.hosts + self.servers)
        return lab.LabSpec(
            hosts=servers.stop,
            link_bits_per_second=self.link_bits_per_second,
            unlike=self.unlike,
            jobs=(lab.JobSpec(ranks_on(self.hosts, self.ranks_per_host), tuple(servers)),),
            scale=self.scale,
        )

    def __str__(self) -> str:
        rate = "loopback" if self.loopback else "links as they are"
        if self.link_bits_per_second is not None:
            rate = f"links of {format_rate(self.link_bits_per_second // 8)}"
        return f"{self.profile.model} on {hosts_text(self.hosts, self.ranks_per_host)}, {rate}" + (
            f", x {self.scale:g}" if self.scale != 1 else ""
        )


def at_ratio(profile: Profile, ratio: float, compute_ms: float, megabytes: float) -> tuple[Profile, int, float]:
    """Set a profile's communication-to-computation ratio.

    Args:
        profile: the profile.
        ratio: communication time / computation time.
        compute_ms: computation time of an iteration.
        megabytes: size of the gradients in the run.

    Returns:
        The profile stretched to `compute_ms`, the links' rate in bits per second at which all bytes
        take `ratio` times as long, and the scale at which they are `megabytes`.
    """
    profile = profile.stretched(compute_ms * 1e6 / profile.compute_ns)
    bits = round(8e9 * profile.size_bytes / (ratio * profile.compute_ns))
    return profile, bits, float(f"{megabytes * 1e6 / profile.size_bytes:.3g}")


def need_room(trials: Sequence[Trial], folder: Path) -> None:
    """Refuse trials that this machine cannot run; those with an outcome in `folder` are not run again.

    Raises:
        InputError: one has more hosts than a lab, or this machine has not the memory for it.
        LabError: one needs a lab, and this machine cannot run it.
    """
    for trial in trials:
        if not (folder / trial.key / "rank-0.json").exists():
            need_memory(str(trial), trial.processes, trial.rank_bytes)
            if not trial.loopback:
                need_lab(trial.lab_spec, trial.rank_bytes)


def run_all(trials: Sequence[Trial], folder: Path, say: Callable[[str], None]) -> tuple[Cell, ...]:
    """The cells of all trials, in order; trials with an outcome in `folder` are not run again.

    Raises:
        InputError, LabError: as `need_room`; none was started.
    """
    need_room(trials, folder)
    cells: list[Cell] = []
    for place, trial in enumerate(trials):
        own = folder / trial.key
        done = own / "rank-0.json"
        say(f"trial {place + 1} of {len(trials)}: {trial}" + (", from before" if done.exists() else ""))
        if not done.exists():
            _run(trial, own)
        cells += cells_of(trial, own)
    return tuple(cells)


def _run(trial: Trial, folder: Path) -> None:
    def start(command: list[str]) -> int:
        if trial.loopback:
            return run_on_loopback(command[1:], trial.hosts * trial.ranks_per_host, {"GRADLANE_LAB_SCALE": str(trial.scale)})
        return run_on_lab(trial.lab_spec, command)

    how = {"rounds": trial.rounds, "steps": trial.steps, "timeout_s": trial.timeout, "finals": trial.finals}
    exit_code = train_in_turns(trial.profile, trial.arms, folder, start, clip_norm=trial.clip_norm, **how)
    if exit_code:
        raise RunError.of(f"the trial of {trial}", exit_code)


def train_in_turns(
    profile: Profile, arms: Sequence[ArmSpec], folder: Path, start: Callable[[list[str]], int], **how: float | None
) -> int:
    """Train emulated devices of `profile` under all `arms`.

    Args:
        profile, arms: what to train.
        folder: where the run leaves its outcome.
        start: runs a command on every rank; returns the exit code.
        how: as the fields of `worker.Config`.

    Returns:
        The exit code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given, config = folder / "given.json", folder / "config.json"
    files.write(given, profile)
    config.write_bytes(msgspec.json.encode({"out": str(folder), "arms": arms, "batch_size": 0, "profile": str(given), **how}))
    return start(python_module("gradlane.compare.worker", [str(config)]))


def cells_of(trial: Trial, folder: Path) -> list[Cell]:
    """What the run measured, and the simulation of the same plans with that run's profile and
    networks.
    """
    measured = _measured(folder)
    turns = {name: turn_times(arm["step_ns"], trial.rounds) for name, arm in measured.items()}
    gradient_bytes = files.read(folder / "given.json", Profile).scaled(trial.scale).size_bytes
    cells = []
    for name, _, place, outcome in predicted(trial, folder):
        network = place.network
        cells.append(
            Cell(
                model=trial.profile.model,
                hosts=trial.hosts,
                servers=_spec(trial, name).servers,
                link_bits_per_second=trial.link_bits_per_second,
                scale=trial.scale,
                arm=name,
                step_ns=tuple(measured[name]["step_ns"]),
                final_step_ns=tuple(measured[name]["final_step_ns"]),
                compute_ns=_alone_ns(measured),
                predicted_ns=outcome.iteration_ns,
                bound_ns=outcome.bound_ns,
                network=(
                    f"{network.segments[-1].startup_ns} ns ({network.segments[-1].latency_ns} latency) + "
                    f"{network.bytes_per_second} B/s, at least {network.min_message_ns} ns "
                    f"({network.min_message_latency_ns} latency)" + _described(network.bus)
                ),
                equal_to_ddp=measured[name]["equal_to_ddp"],
                turns=trial.rounds,
                speedup=Speedup.of(turns[BASELINE], turns[name]),
                folder=folder.name,
                ranks_per_host=trial.ranks_per_host,
                card_bytes=measured[name].get("card_bytes"),
                gradient_bytes=gradient_bytes,
            )
        )
    return cells


def _described(bus: Bus | UnsetType) -> str:
    return "" if bus is UNSET else f"; {bus.devices} devices on {bus.startup_ns} ns + {bus.bytes_per_second} B/s"


def predicted(trial: Trial, folder: Path) -> Iterator[tuple[str, Plan, Place, Outcome]]:
    """For each arm that communicates, its plan, where it ran and the simulation of it there."""
    measured = _measured(folder)
    profile = _as_measured(files.read(folder / "given.json", Profile).scaled(trial.scale), _alone_ns(measured))
    for name in measured:
        if name == ALONE:
            continue
        plan = files.read(folder / file_of("plan", name, 0), Plan)
        place = measured_place(folder, name, _spec(trial, name), plan)
        if name == BASELINE:
            plan = make_plan(get("ddp"), profile, place)
        carried = plan if trial.clip_norm is None else when_clipping(plan, 2.0)
        yield name, plan, place, predict(carried, profile, place)


def _measured(folder: Path) -> dict[str, Any]:
    arms: dict[str, Any] = msgspec.json.decode((folder / "rank-0.json").read_bytes())["arms"]
    return arms


def _alone_ns(measured: dict[str, Any]) -> int:
    alone_ns: float = statistics.median(measured[ALONE]["step_ns"])
    return round(alone_ns)


def _spec(trial: Trial, name: str) -> ArmSpec:
    return next((arm for arm in trial.arms if arm.name == name), ArmSpec("ddp"))


def _as_measured(profile: Profile, alone_ns: int) -> Profile:
    """The profile stretched so that computation takes `alone_ns`."""
    stretch = alone_ns / profile.compute_ns
    return profile.stretched(stretch)
