"""`auto` beside every fixed policy, on emulated devices and hosts: `python -m bench.auto [MODEL...] [--out FOLDER]`.

All arms of a model and a rate train in turns in one run, over both backends; `auto` is measured once it has settled, its
looking apart. Then, in --finals further rounds, only auto, DDP and the two fastest fixed policies of each backend do: which
of many is the fastest is known only from times that did not choose it. One row a cell: how long a step took in those under
auto, under the faster of the two and under torch's DDP, the ratios, whether auto's plan is the other's too, and whether its
bits are DDP's. A row whose backend is "any" is of auto that was told none; beside it stand the fastest fixed policy over any
backend, and auto with the better of the backends named. Profiles are stretched and tensors shrunk to the same time and size
for all, and a link's rate is such that all bytes take `ratio` times as long as computing. With --out what was measured is
kept, and a grid that was ended goes on where it was.

--change FACTOR runs another case: the links of two hosts carry FACTOR times as much for a while, and then what they did before;
said is how long after the first iteration that differed auto had settled again. --load N with it runs N processes that do
nothing but compute for as long; with a factor of 1 nothing else changes, and auto should not look again.

--varying SECONDS runs a third case: every 5 s each host's link has another rate, drawn between 1 and 10 tenths of what the
ratio says (Mercury Figs. 18, 19), and auto, DDP and each fixed policy train one after another on the same links for so long;
after 20 s, by which auto has settled once, iterations are counted, auto's further looks with them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET

from bench.auto_varying import Counted
from gradlane import lab, zoo
from gradlane.compare.arms import BASELINE, ArmSpec, file_of
from gradlane.compare.records import Cell
from gradlane.compare.runner import Trial, at_ratio, run_all
from gradlane.core import files
from gradlane.core.backends import BackendName
from gradlane.core.cluster import Link, RateStep
from gradlane.core.plan import Plan
from gradlane.core.records.search_log import ANY, AUTO
from gradlane.core.records.speedup import Speedup, turn_times
from gradlane.planning import catalog

MODELS = ("resnet50", "vgg16", "inception-v3", "bert-base", "gpt2", "alexnet", "resnet152", "transformer-base")
_Backend = BackendName | Literal["any"]
_WARM_UP_S, _EVERY_NS, _RATES = 20.0, 5 * 10**9, 200
_HIGH_NS, _LOW_NS = 40 * 10**9, 80 * 10**9  # when the links change, and change back


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.auto", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help=f"names of gradlane zoo; default: {', '.join(MODELS)}")
    parser.add_argument("--ratios", default="0.25,0.5,1,2", help="of communicating to computing (default: %(default)s)")
    parser.add_argument("--backend", default="all-reduce,server,any", help="with a comma (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1, help="they share its link (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=8, help="of all tensors, as they are shrunk (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=150, help="of computing, as it is stretched (default: %(default)s)")
    parser.add_argument("--policies", help="the fixed ones, with a comma; default: all that a backend carries")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured, a round (default: %(default)s)")
    parser.add_argument("--finals", type=int, default=8, help="rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--change", type=float, help="run the case of changing links instead, with one MODEL, ratio and backend"
    )
    parser.add_argument(
        "--load", type=int, default=0, metavar="N", help="with --change: N processes that compute while it lasts"
    )
    parser.add_argument("--varying", type=float, metavar="SECONDS", help="run the case of varying links instead")
    given = parser.parse_args()
    reason = lab.supported()
    if reason is not None:
        sys.exit(f"bench.auto: no lab can be made here: {reason}")
    names = given.models or list(MODELS)
    ratios = [float(ratio) for ratio in given.ratios.split(",")]
    backends: list[_Backend] = given.backend.split(",")
    if given.change is not None:
        return _change(names[0], ratios[0], backends[0], given)
    if given.varying is not None:
        return _vary(names, ratios, [each for each in backends if each != ANY], given)
    print("| model | ratio | backend | kept | ms | best fixed | ms | auto / best | auto / DDP | any / named | plan | bits |")
    print("|---|---|---|---|---:|---|---:|---:|---:|---:|---|---|")
    with tempfile.TemporaryDirectory(prefix="gradlane-") as scratch:
        for name in names:
            for ratio in ratios:
                trial = _trial(name, ratio, backends, given)
                folder = given.out or Path(scratch)
                cells = run_all([trial], folder, _say)
                for backend in backends:
                    _row(trial, cells, ratio, backend, folder / trial.key)
    return 0


def _trial(name: str, ratio: float, backends: list[_Backend], given: argparse.Namespace) -> Trial:
    profile, bits, scale = at_ratio(zoo.profile(name), ratio, given.step_ms, given.megabytes)
    arms = []
    for backend in backends:
        carried = () if backend == ANY else catalog.names(backend)
        wanted = given.policies.split(",") if given.policies else carried
        arms += [ArmSpec(policy, backend) for policy in (AUTO, *wanted) if policy in (AUTO, *carried)]
    how = {"finals": given.finals, "ranks_per_host": given.ranks_per_host}
    return Trial(profile, given.hosts, bits, scale, False, arms, given.rounds, given.steps, 0, 60.0, **how)


def _row(trial: Trial, cells: tuple[Cell, ...], ratio: float, backend: _Backend, folder: Path) -> None:
    by_arm = {cell.arm: cell for cell in cells}
    auto, ddp = by_arm[ArmSpec(AUTO, backend).name], by_arm[BASELINE]
    others = [by_arm[arm.name] for arm in trial.arms if backend in (arm.backend, ANY) and arm.policy != AUTO]
    best = min((cell for cell in others if cell.final_step_ns), key=_final_ns)
    named = [by_arm[arm.name] for arm in trial.arms if arm.policy == AUTO and backend == ANY != arm.backend]
    plans = [files.read(folder / file_of("plan", cell.arm, 0), Plan) for cell in (auto, best)]

    def longer(than: Cell) -> float:
        return Speedup.of(*(turn_times(cell.final_step_ns, trial.finals) for cell in (auto, than))).ratio

    kept = plans[0].policy if backend != ANY or plans[0].backend is UNSET else f"{plans[0].policy}@{plans[0].backend}"
    same = "the same" if plans[0].messages == plans[1].messages else "another"
    print(
        f"| {auto.model} | {ratio:g} | {backend} | {kept} | {_final_ns(auto) / 1e6:.1f} | "
        f"{best.arm if backend == ANY else best.arm.partition('@')[0]} | {_final_ns(best) / 1e6:.1f} | {longer(best):.3f} | "
        f"{longer(ddp):.3f} | {f'{longer(min(named, key=_final_ns)):.3f}' if named else ''} | {same} | "
        f"{'yes' if auto.equal_to_ddp else 'no'} |",
        flush=True,
    )


def _final_ns(cell: Cell) -> float:
    return statistics.median(cell.final_step_ns)


def _change(name: str, ratio: float, backend: _Backend, given: argparse.Namespace) -> int:
    profile, bits, scale = at_ratio(zoo.profile(name), ratio, given.step_ms, given.megabytes)
    link = Link(bits // 8, (RateStep(_HIGH_NS, round(bits // 8 * given.change)), RateStep(_LOW_NS, bits // 8)))
    unlike = tuple(lab.HostSpec(host, link, link) for host in range(given.hosts))
    spec = lab.LabSpec(given.hosts, bits, unlike=unlike, scale=scale, ranks_per_host=given.ranks_per_host)
    stretch = profile.compute_ns / zoo.profile(name).compute_ns
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


def _vary(names: list[str], ratios: list[float], backends: list[_Backend], given: argparse.Namespace) -> int:
    print("| model | ratio | backend | auto's last | looks | a second | best fixed | a second | auto / best | auto / DDP |")
    print("|---|---|---|---|---:|---:|---|---:|---:|---:|")
    for name, ratio, backend in itertools.product(names, ratios, backends):
        trial = _trial(name, ratio, [backend], given)
        speeds = {}
        for arm in (*trial.arms, None):
            title = arm.name if arm is not None else BASELINE
            speeds[title] = _counted(trial, arm, given.varying)
            _say(f"{name} {ratio:g}, {title}: {speeds[title]}")
        auto, ddp = speeds.pop(ArmSpec(AUTO, backend).name), speeds.pop(BASELINE)
        best = max(speeds, key=lambda title: speeds[title].per_second)
        fastest = speeds[best].per_second
        print(
            f"| {name} | {ratio:g} | {backend} | {auto.policy} | {auto.looks} | {auto.per_second:.2f} | "
            f"{best.partition('@')[0]} | {fastest:.2f} | {fastest / auto.per_second:.3f} | "
            f"{ddp.per_second / auto.per_second:.3f} |",
            flush=True,
        )
    return 0


def _counted(trial: Trial, arm: ArmSpec | None, seconds: float) -> Counted:
    assert trial.link_bits_per_second is not None
    fastest = trial.link_bits_per_second // 8
    unlike = tuple(lab.HostSpec.varying(host, fastest // 10, fastest, _EVERY_NS, _RATES) for host in range(trial.hosts))
    spec = lab.LabSpec(
        trial.hosts, trial.link_bits_per_second, unlike=unlike, scale=trial.scale, ranks_per_host=trial.ranks_per_host
    )
    with tempfile.TemporaryDirectory(prefix="gradlane-") as scratch:
        given, found = Path(scratch, "given.json"), Path(scratch, "counted.json")
        files.write(given, trial.profile)
        wanted = msgspec.json.encode(arm).decode() if arm is not None else BASELINE
        when = [str(_WARM_UP_S), str(_WARM_UP_S + seconds)]
        command = [sys.executable, "-m", "bench.auto_varying", str(given), wanted, *when, str(found)]
        if lab.run(spec, command):
            sys.exit(f"bench.auto: a rank failed under {wanted}")
        return msgspec.json.decode(found.read_bytes(), type=Counted)


def _load(seconds: float) -> subprocess.Popen[bytes]:
    """Computes for so long, and ends."""
    program = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    return subprocess.Popen([sys.executable, "-c", program])


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
