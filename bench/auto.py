"""`auto` beside every fixed policy, on emulated devices and hosts: `python -m bench.auto [MODEL...] [--out FOLDER]`.

All arms of a cell train in turns in one run; `auto` is measured once it has settled, its looking apart. One row a cell: how
long a step takes under auto, under the best fixed policy and under torch's DDP, and the ratios. With --out what was
measured is kept, and a grid that was ended goes on where it was.

--change FACTOR runs another case: the links of two hosts carry FACTOR times as much for a while, and then what they did before;
said is how long after the first iteration that differed auto had settled again. --load N with it runs N processes that do
nothing but compute for as long; with a factor of 1 nothing else changes, and auto should not look again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from gradlane import lab, zoo
from gradlane.cli.trials import Trial, run_all
from gradlane.core import files
from gradlane.core.arms import BASELINE, ArmSpec
from gradlane.core.chosen import AUTO
from gradlane.core.cluster import Link, Step
from gradlane.core.executors import EXECUTORS, BackendName
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.report.sweep import Cell
from gradlane.tune import catalog
from gradlane.units import format_rate, parse_rate

MODELS = ("resnet50", "vgg16", "inception-v3", "bert-base", "gpt2", "alexnet", "resnet152", "transformer-base")
_HIGH_NS, _LOW_NS = 40 * 10**9, 80 * 10**9  # when the links change, and change back


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.auto", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help=f"names of gradlane zoo; default: {', '.join(MODELS)}")
    parser.add_argument("--link", default="1gbit,3gbit,10gbit,25gbit", help="rates, with a comma (default: %(default)s)")
    parser.add_argument("--backend", default="all-reduce,server", help="with a comma (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.05, help="of tensors and links (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=150, help="profiles are stretched to compute so long")
    parser.add_argument("--policies", help="the fixed ones, with a comma; default: all that the backend carries")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--change", type=float, help="run the case of changing links instead, with MODEL and --link")
    parser.add_argument(
        "--load", type=int, default=0, metavar="N", help="with --change: N processes that compute, while it lasts"
    )
    given = parser.parse_args()
    reason = lab.supported()
    if reason is not None:
        sys.exit(f"bench.auto: no lab can be made here: {reason}")
    names = given.models or list(MODELS)
    profiles = [_lasting(zoo.profile(name), given.step_ms) for name in names]
    rates = [parse_rate(rate) for rate in given.link.split(",")]
    if given.change is not None:
        return _change(names[0], profiles[0].compute_ns / zoo.profile(names[0]).compute_ns, rates[0], given)
    print("| model | link | backend | auto kept | ms | best fixed | ms | auto / best | auto / DDP | bits as DDP |")
    print("|---|---|---|---|---:|---|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory(prefix="gradlane-") as scratch:
        for profile in profiles:
            for rate in rates:
                for backend in given.backend.split(","):
                    trial = _trial(profile, rate, backend, given)
                    folder = given.out or Path(scratch)
                    _row(run_all([trial], folder, _say), folder / trial.key, backend)
    return 0


def _lasting(profile: Profile, compute_ms: float) -> Profile:
    return profile.stretched(compute_ms * 1e6 / profile.compute_ns)


def _trial(profile: Profile, rate: int, backend: BackendName, given: argparse.Namespace) -> Trial:
    fixed = given.policies.split(",") if given.policies else catalog.names(EXECUTORS[backend])
    arms = [ArmSpec(name, backend) for name in (AUTO, *fixed)]
    return Trial(profile, given.hosts, rate, given.scale, False, arms, given.rounds, given.steps, 0, 0, 60.0)


def _row(cells: tuple[Cell, ...], folder: Path, backend: str) -> None:
    by_arm = {cell.arm.partition("@")[0]: cell for cell in cells}
    auto, ddp = by_arm.pop(AUTO), by_arm.pop(BASELINE)
    best = min(by_arm.values(), key=lambda cell: cell.median_ns)
    kept = _kept(folder, auto.arm)
    link = format_rate((auto.link_bits_per_second or 0) // 8)
    print(
        f"| {auto.model} | {link} | {backend} | {kept} | {auto.median_ns / 1e6:.1f} | {best.arm.partition('@')[0]} | "
        f"{best.median_ns / 1e6:.1f} | {auto.median_ns / best.median_ns:.3f} | {auto.median_ns / ddp.median_ns:.3f} | "
        f"{'yes' if auto.equal_to_ddp else 'no'} |",
        flush=True,
    )


def _kept(folder: Path, arm: str) -> str:
    return files.read(folder / f"plan-{arm}-rank0.json", Plan).policy


def _change(name: str, stretch: float, rate: int, given: argparse.Namespace) -> int:
    link = Link(rate // 8, (Step(_HIGH_NS, round(rate // 8 * given.change)), Step(_LOW_NS, rate // 8)))
    unlike = tuple(lab.HostSpec(host, link, link) for host in range(given.hosts))
    spec = lab.LabSpec(hosts=given.hosts, link_bits_per_second=rate, scale=given.scale, unlike=unlike)
    backend = given.backend.split(",")[0]
    loads: list[subprocess.Popen[bytes]] = []
    timer = threading.Timer(_HIGH_NS / 1e9, lambda: loads.extend(_load((_LOW_NS - _HIGH_NS) / 1e9) for _ in range(given.load)))
    timer.start()
    try:
        return lab.run(spec, [sys.executable, "-m", "bench.auto_change", name, str(stretch), backend])
    finally:
        timer.cancel()
        for load in loads:
            load.kill()
            load.wait()


def _load(seconds: float) -> subprocess.Popen[bytes]:
    """Computes for so long, and ends."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"]
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
