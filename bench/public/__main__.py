"""Public training scripts, unchanged but for size and device, beside DDP: `python -m bench.public FOLDER [NAME...]`.

FOLDER has checkouts, named as their repositories; the command skips scripts whose checkout is missing. Each script runs in a
lab of two hosts under torch's DDP, under `auto` and under bytescheduler, which defers most. Where one differs, the script runs
under DDP again, since it may differ from itself. A row says whether parameters, buffers and optimizers' states are DDP's bit
for bit on each rank, and what share of the updates bytescheduler deferred. It has the time of a step under `auto`, once it
tried no more, beside DDP's, and gradlane's lines. Install the libraries that the scripts import. --keep keeps the runs' output.
With --device cuda both hosts train on the first GPU, over NCCL where the script asks for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.public import data
from bench.public.scripts import Script, table
from bench.public.witness import Witnessed
from gradlane.core.launch_options import LAUNCH_VARIABLE, LaunchOptions

WITNESS = Path(__file__).with_name("witness.py")  # by its path, since a script's folder may have a module "bench"
RANKS = 2
ARMS = {
    "ddp": LaunchOptions(),
    "auto": LaunchOptions(ddp=True, policy="auto"),
    "bytescheduler": LaunchOptions(ddp=True, policy="bytescheduler"),
}
AGAIN = "ddp again"


class Row(msgspec.Struct, frozen=True):
    """What became of a script. equal: by arm; ratio: steps beside DDP's; said: gradlane's lines."""

    name: str
    failed: str | None = None
    changes: dict[str, int] = {}
    equal: dict[str, bool] = {}
    deferred: float = 0
    ratio: float | None = None
    ddp_ms: float | None = None
    steps: int = 0
    said: list[str] = []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.public", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with the checkouts")
    parser.add_argument("names", nargs="*", help="rows whose names contain one of these; default: all")
    parser.add_argument("--link", default="200mbit", help="of each host (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=240, help="of a run, in seconds (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="leave what the runs printed in this folder")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    given = parser.parse_args()
    worst = 0
    known = table()
    for script in known.scripts:
        if given.names and not any(name in script.name for name in given.names):
            continue
        if not (given.folder / script.folder).is_dir():
            print(f"{script.name}: skipped, no {script.folder} in {given.folder}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="gradlane-public-") as folder:
            changes = known.changes(script, given.device)
            setting = _Setting(given.device, given.link, given.timeout, given.keep)
            row = _row(script, changes, given.folder, Path(folder), setting)
        worst = max(worst, int(row.failed is not None or not all(row.equal.values())))
        print(json.dumps(msgspec.to_builtins(row)) if given.json else _text(row), flush=True)
    return worst


def _row(
    script: Script,
    changes: Sequence[tuple[str, str]],
    checkouts: Path,
    folder: Path,
    setting: _Setting,
) -> Row:
    made: dict[str, int] = {}
    try:
        shutil.copytree(checkouts / script.folder, folder / "script", ignore=shutil.ignore_patterns(".git"))
        made = _change(folder / "script", changes)
        getattr(data, script.data)(folder / "script")
    except ImportError as error:
        return Row(script.name, f"its data cannot be made: {error}", made)
    runs = _Runs(script, folder, setting)
    try:
        for arm, options in ARMS.items():
            runs.run(arm, options)
        if len({runs.digests(arm) for arm in ARMS}) > 1:
            runs.run(AGAIN, ARMS["ddp"])
    except _RunFailed as error:
        return Row(script.name, str(error), made, said=runs.said)
    ddp, auto, deferring = (runs.seen[arm][0] for arm in ("ddp", "auto", "bytescheduler"))
    begin = min(auto.settled, len(auto.steps_ns) // 2)
    ddp_ns, auto_ns = (statistics.median(steps[begin:] or [0]) for steps in (ddp.steps_ns, auto.steps_ns))
    return Row(
        name=script.name,
        changes=made,
        equal={arm: runs.digests(arm) == runs.digests("ddp") for arm in runs.seen if arm != "ddp"},
        deferred=deferring.deferred / max(1, deferring.updates),
        ratio=auto_ns / ddp_ns if ddp_ns else None,
        ddp_ms=ddp_ns / 1e6,
        steps=len(ddp.steps_ns) + 1,
        said=runs.said,
    )


class _Setting(msgspec.Struct, frozen=True):
    """How scripts run: on which device, over which link of each host, for how many seconds, and where output is kept."""

    device: str
    link: str
    timeout: float
    keep: Path | None


class _RunFailed(Exception):
    """A run ended with another exit code than 0."""


class _Runs:
    """The runs of one script, each in a folder of its own."""

    def __init__(self, script: Script, folder: Path, setting: _Setting) -> None:
        self._script, self._folder, self._setting = script, folder, setting
        self.seen: dict[str, list[Witnessed]] = {}
        self.said: list[str] = []

    def digests(self, arm: str) -> tuple[str, ...]:
        return tuple(rank.digest for rank in self.seen[arm])

    def run(self, arm: str, options: LaunchOptions) -> None:
        out = self._folder / arm
        shutil.copytree(self._folder / "script", out / "script")
        code, printed = _run(self._script, out, options, self._setting)
        keep = self._setting.keep
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            name = re.sub("[^a-z0-9]+", "-", f"{self._script.name} {arm}".lower())
            (keep / f"{name}.txt").write_text(printed)
        self.said = list(dict.fromkeys([*self.said, *_said(printed)]))
        if code:
            raise _RunFailed(f"{arm}: exit code {code}: {_last(printed)}")
        self.seen[arm] = [msgspec.json.decode((out / f"{rank}.json").read_bytes(), type=Witnessed) for rank in range(RANKS)]


def _change(folder: Path, changes: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Make `changes` in all Python files under `folder`; which of them were made how often."""
    made: dict[str, int] = {}
    for path in sorted(folder.rglob("*.py")):
        text = before = path.read_text()
        for pattern, replacement in changes:
            text, count = re.subn(pattern, replacement, text)
            if count:
                made[pattern] = made.get(pattern, 0) + count
        if text != before:
            path.write_text(text)
    return made


def _run(script: Script, out: Path, options: LaunchOptions, setting: _Setting) -> tuple[int, str]:
    command = [
        sys.executable, "-m", "gradlane", "lab", "--hosts", str(RANKS), "--link", setting.link,
        "--timeout", str(setting.timeout), "--",
        sys.executable, str(WITNESS), str(out), setting.device, *script.started(setting.device),
    ]  # fmt: skip
    environment = os.environ | {
        LAUNCH_VARIABLE: options.to_text(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(out / "hub"), "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }  # fmt: skip
    run = subprocess.run(
        command, cwd=out / "script", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout


def _said(printed: str) -> list[str]:
    """gradlane's own lines."""
    return [line.strip() for line in printed.splitlines() if line.startswith("gradlane: ")]


def _last(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if re.match(r"(\[\d+\] )?\S*(Error|Exception)\b", line)]
    return lines[0] if lines else (printed.strip().splitlines() or ["printed nothing"])[-1]


def _text(row: Row) -> str:
    if row.failed is not None:
        head = f"{row.name}: did not run, {row.failed}"
    else:
        differing = [arm for arm, equal in row.equal.items() if not equal]
        ratio = "" if row.ratio is None else f"; auto's steps take {row.ratio:.2f} of DDP's {row.ddp_ms:.0f} ms"
        outcome = f"DIFFERS from DDP under {', '.join(differing)}" if differing else "equal to DDP"
        head = f"{row.name}: {row.steps} steps, {outcome}, {row.deferred:.0%} of updates deferred{ratio}"
    changes = ", ".join(f"{pattern!r} x {count}" for pattern, count in row.changes.items())
    return "\n    ".join([head, *row.said, f"changed: {changes or 'nothing'}"])


if __name__ == "__main__":
    sys.exit(main())
