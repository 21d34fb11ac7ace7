"""gradlane on GPUs beside torch DDP: `python -m bench.device [--part NAME] [--models A,B] [--rate 10gbit] [--limit SECONDS]`.

Parts, each in processes of its own; one that fails or takes too long stops no other, and what it had measured is kept:
  bus        how fast gradients come to pinned memory and sums go back, in GB/s
  costs      what a tensor and a message cost, in microseconds: 1 rank over NCCL, 2 over Gloo and over servers
  profile    the profile that a session measures, beside a recording of the same step and the zoo's times
  training   torch DDP and gradlane's policies in turns, on two ranks in a `gradlane lab` of two hosts

Writes out/device/bench.json as it goes. --page makes bench/notes/gpu.md of it and of out/device/tests.json, and
measures nothing.
--dry-run runs all parts on the CPU with tiny networks, to try the program; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.device import page, summary
from bench.device.lines import Lines, read
from tests.commands import ROOT
from tests.device.deadline import Deadline
from tests.device.machine import NO_DEVICE, Machine, found
from tests.ports import free_port

PARTS = ("bus", "costs", "profile", "training")
MODELS = {"resnet50": 1.0, "bert-base": 2.0, "gpt2": 2.0}  # and each one's share of the time that is left for training
ARMS = ("ddp", "ddp@all-reduce", "blocks@all-reduce", "mercury@server", "auto@any", "bytescheduler@all-reduce")
MOST_S = {"bus": 30.0, "costs": 40.0, "profile": 60.0}
LEAST_S = 10.0  # for a network
GRACE_S = 12.0  # for processes to start and to end by themselves


class Run:
    """What a run has found so far, in its file.

    Args:
        path: the file.
        head: what it begins with.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path, self._head = path, head
        self.folder = path.parent / "parts"
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.json*"):
            old.unlink()
        self.save()

    @property
    def found(self) -> dict[str, Any]:
        lines = [line for path in sorted(self.folder.glob("*.jsonl"), key=os.path.getmtime) for line in read(path)]
        return {**self._head, "lines": lines}

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(new, self.path)

    def leave_out(self, reason: str, **what: str) -> None:
        print(f"left out: {', '.join(what.values())}: {reason}", flush=True)
        Lines(self.folder / "left-out.jsonl").add("left out", reason=reason, **what)
        self.save()

    def make(self, name: str, module: str, config: dict[str, Any], limit_s: float, ranks: int, lab: Sequence[str] = ()) -> None:
        """Run `python -m module CONFIG` on so many ranks, here or in a lab, for `limit_s` and a little more at most.

        Args:
            name: of the part; its lines are in a file of that name.
            config: `out` is added to it.
            lab: the command of a lab; without one, ranks are on loopback.
        """
        out = self.folder / f"{name}.jsonl"
        given = self.folder / f"{name}.json"
        given.write_text(json.dumps({**config, "out": str(out.resolve())}))
        command = [sys.executable, "-m", module, str(given.resolve())]
        began = time.monotonic()
        print(f"-- {name}, at most {limit_s:.0f} s", flush=True)
        code = self._wait([*lab, *command] if lab else command, limit_s + GRACE_S, 1 if lab else ranks)
        self.save()
        took_s = time.monotonic() - began
        if code:
            how = f"ended after {limit_s:.0f} s" if code == 124 else f"ended with exit code {code}"
            if not summary.of_kind(read(out), "error"):
                Lines(out).add("error", part=name, text=f"{how}; what it printed says why")
            self.save()
            print(f"   {how}", flush=True)
        print(f"   {took_s:.0f} s", flush=True)

    def _wait(self, command: Sequence[str], limit_s: float, processes: int) -> int:
        """The first exit code that is not 0; 124 where time was up. Saves what there is meanwhile."""
        port = free_port()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        running = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "2", **os.environ, **address, "RANK": str(rank)},
                start_new_session=True,
            )
            for rank in range(processes)
        ]
        try:
            end = time.monotonic() + limit_s
            while True:
                codes = [process.poll() for process in running]
                failed = next((code for code in codes if code), None)
                if failed or None not in codes:
                    return failed or 0
                if time.monotonic() > end:
                    return 124
                time.sleep(0.5)
                self.save()
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(5)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given again")
    parser.add_argument("--models", default=",".join(MODELS), help="with a comma (default: %(default)s)")
    parser.add_argument("--arms", default=",".join(ARMS), help="with a comma, the first being torch DDP (default: %(default)s)")
    parser.add_argument("--rate", default="10gbit", help="of each host's link (default: %(default)s)")
    parser.add_argument(
        "--group", choices=("gloo", "nccl"), default="gloo", help="of the ranks that train (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=0, help="samples a rank; 0: computing takes as long as communicating")
    parser.add_argument("--turns", type=int, default=2, help="of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured, a turn (default: %(default)s)")
    parser.add_argument("--auto-steps", type=int, default=24, help="of auto before it is measured (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="for all (default: %(default)s)")
    parser.add_argument("--loopback", action="store_true", help="train on loopback, without a lab: no emulated rate")
    parser.add_argument("--dry-run", action="store_true", help="tiny networks on the CPU")
    parser.add_argument("--out", type=Path, default=Path("out/device/bench.json"), help="(default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="make bench/notes/gpu.md, and measure nothing")
    parser.add_argument("--page-to", type=Path, default=ROOT / "bench/notes/gpu.md", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.page:
        page.write(given.out.with_name("tests.json"), given.out, given.page_to)
        print(f"wrote {given.page_to}")
        return 0
    names = given.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"--models: got {', '.join(unknown)}, expected some of {', '.join(MODELS)}")
    machine = found()
    if not machine.cards and not given.dry_run:
        print(f"bench.device: {NO_DEVICE}; --dry-run runs all parts on the CPU with tiny networks")
        return 0
    return _measure(given, names, machine)


def _measure(given: argparse.Namespace, names: list[str], machine: Machine) -> int:
    deadline = Deadline(given.limit)
    dry = given.dry_run
    rate = "loopback" if given.loopback else given.rate
    run = Run(given.out, {**asdict(machine), "rate": rate, "group": given.group, "dry": dry})
    print(f"{', '.join(machine.cards) or 'no CUDA device'}; torch {machine.torch}; {machine.processors} cores", flush=True)

    def limit(part: str, where: str = "") -> float | None:
        """Seconds for a part; None, and it is said, where there are none."""
        seconds = deadline.limit_of(MOST_S[part]) - GRACE_S
        if seconds < 5:
            run.leave_out(f"the limit of {given.limit:g} s for all was over", part=f"{part}{where}")
            return None
        return seconds

    wanted = given.part or PARTS
    if "bus" in wanted and (seconds := limit("bus")):
        run.make("bus", "bench.device.bus", {"total_mib": 8 if dry else 256, "dry": dry}, seconds, 1)
    if "costs" in wanted:
        for group, ranks, carriers in (("nccl", 1, ["all-reduce"]), ("gloo", 2, ["all-reduce", "server"])):
            if group == "nccl" and (dry or not machine.nccl):
                run.leave_out("NCCL needs a GPU" if dry else "this PyTorch has no NCCL", part="costs over nccl")
            elif seconds := limit("costs", f" over {group}"):
                config = {"group": group, "carriers": carriers, "turns": 5 if dry else 25, "limit_s": seconds, "dry": dry}
                run.make(f"costs-{group}", "bench.device.costs", config, seconds, ranks)
    if "profile" in wanted and (seconds := limit("profile")):
        models = [name for name in names if name != "gpt2"]
        run.make("profile", "bench.device.profiles", {"models": models, "dry": dry}, seconds, 1)
    if "training" in wanted:
        _train(given, names, run, deadline)
    print(f"\n{summary.everything(run.found)}\n\n{given.limit - deadline.left_s:.0f} s; wrote {given.out}")
    return int(bool(summary.of_kind(run.found["lines"], "error")))


def _train(given: argparse.Namespace, names: list[str], run: Run, deadline: Deadline) -> None:
    from bench.device.models import why_not

    left = []
    for name in names:
        if reason := why_not(name, given.dry_run):
            run.leave_out(reason, part="training", model=name)
        else:
            left.append(name)
    shares = {name: MODELS[name] for name in left}
    for name in left:
        arms, attempt = given.arms.split(","), 0
        end_s = deadline.left_s * (1 - shares[name] / sum(shares.values()))  # what is to be left for the others
        del shares[name]
        while (seconds := deadline.left_s - end_s - GRACE_S) >= LEAST_S:
            title = f"training-{name}{f'-{attempt}' * (attempt > 0)}"
            failed = _train_one(given, name, arms, title, run, seconds)
            if failed not in arms[1:]:
                break
            arms.remove(failed)  # without the arm that has failed, which may leave time for the others
            attempt += 1
        else:
            run.leave_out(f"the limit of {given.limit:g} s for all was over", part="training", model=name)


def _train_one(given: argparse.Namespace, name: str, arms: list[str], title: str, run: Run, seconds: float) -> str:
    """Train one network under some arms; the arm that failed before any turn was over, or ""."""
    config = {
        "model": name,
        "group": given.group,
        "arms": arms,
        "batch": given.batch,
        "turns": given.turns,
        "steps": given.steps,
        "warm": 2,
        "auto_steps": given.auto_steps,
        "limit_s": seconds,
        "dry": given.dry_run,
    }
    lab = [sys.executable, "-m", "gradlane", "lab", "--quiet", "--hosts", "2", "--link", given.rate]
    lab += ["--timeout", f"{seconds + GRACE_S / 2:.0f}", "--"]
    run.make(title, "bench.device.worker", config, seconds, 2, () if given.loopback else lab)
    lines = read(run.folder / f"{title}.jsonl")
    errors = summary.of_kind(lines, "error")
    return errors[0].get("arm", "") if errors and not summary.of_kind(lines, "turn") else ""


if __name__ == "__main__":
    sys.exit(main())
