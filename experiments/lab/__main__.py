"""`python -m experiments.lab [NAME...] [--out FOLDER]`: run the papers' experiments in the lab and keep what they gave.

`python -m experiments --write docs/papers.md` puts it on the page.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from experiments import geryon
from experiments.lab.results import MEASURED, Measured, read, write
from gradlane import lab, zoo
from gradlane.cli.trials import Trial, run_all
from gradlane.core.arms import ArmSpec
from gradlane.core.cluster import Link, random_steps
from gradlane.core.profile import Profile
from gradlane.report.sweep import Cell

GBIT = 10**9
SECOND_NS = 10**9


def collision(_: Path) -> list[Measured]:
    """Geryon Fig. 5: two servers, one worker, whose link down is a tenth of what the servers have."""
    narrow = (lab.HostSpec(0, Link(GBIT // 8), Link(GBIT // 80)),)
    arrived = []
    for classes in (8, 1):
        spec = lab.LabSpec(3, GBIT, unlike=narrow, network_classes=classes)
        program = (
            "import json, sys; from gradlane import lab; import msgspec; "
            "sys.exit(lab.run(msgspec.json.decode(sys.argv[1], type=lab.LabSpec), sys.argv[2:]))"
        )
        rank = [sys.executable, "-m", "experiments.lab.collision", "4000000", "9"]
        command = [sys.executable, "-c", program, msgspec.json.encode(spec).decode(), *rank]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        arrived.append(statistics.median(urgent for urgent, _ in msgspec.json.decode(done.stdout, type=list[tuple[int, int]])))
    what = "the urgent parameter's time with classes in the network, of that without"
    return [Measured("Geryon Fig. 5", what, 50, 100 * geryon.collision(), 100 * arrived[0] / arrived[1], "%")]


def merging(out: Path) -> list[Measured]:
    """MG-WFBP Fig. 6: GoogLeNet among 4 workers on 10 Gbit/s (there 2 hosts of two GPUs)."""
    cells = _cells(zoo.profile("googlenet"), 4, 10 * GBIT, 0.05, "all-reduce", ("wfbp", "mg-wfbp", "sync-easgd"), out)
    there = {"wfbp": 299.32, "mg-wfbp": 316.08, "sync-easgd": 250.28}  # images a second
    return [
        Measured(
            "MG-WFBP Fig. 6",
            f"GoogLeNet, 4 workers: speed of MG-WFBP, of that of {title}",
            there["mg-wfbp"] / there[name],
            cells[name].predicted_ns / cells["mg-wfbp"].predicted_ns,
            cells[name].median_ns / cells["mg-wfbp"].median_ns,
            "x",
        )
        for name, title in (("wfbp", "WFBP"), ("sync-easgd", "SyncEASGD"))
    ]


def blocks(out: Path) -> list[Measured]:
    """Prophet Table 2 at 3 and 10 Gbit/s: 2 workers with a server beside each (how many there were is not stated)."""
    profile = zoo.profile("resnet50", device="m60", batch=64)
    there = {
        3: {"prophet": 60.0, "bytescheduler": 44.0, "p3": 51.22},
        10: {"prophet": 70.6, "bytescheduler": 71.1, "p3": 72.83},
    }
    found = []
    for rate, published in there.items():
        cells = _cells(profile, 2, rate * GBIT, 0.1, "server", tuple(published), out)
        for name in ("bytescheduler", "p3"):
            found.append(
                Measured(
                    "Prophet Table 2",
                    f"ResNet-50, {rate} Gbit/s: speed of Prophet, of that of {name}",
                    published["prophet"] / published[name],
                    cells[f"{name}@server"].predicted_ns / cells["prophet@server"].predicted_ns,
                    cells[f"{name}@server"].median_ns / cells["prophet@server"].median_ns,
                    "x",
                )
            )
    return found


def changing(figure: int, low: int, published: dict[str, int], out: Path) -> list[Measured]:
    """Mercury Figs. 18, 19: links that are drawn anew every 5 s, the same for all arms, which take turns of a step."""
    unlike = tuple(
        lab.HostSpec(host, link, link)
        for host in range(2)
        for link in [Link(10 * GBIT // 8, random_steps(host, low * GBIT // 8, 10 * GBIT // 8, 5 * SECOND_NS, 60))]
    )
    profile, arms = zoo.profile("vgg16-cifar10", batch=128), (*published, "mercury")
    cells = _cells(profile, 2, 10 * GBIT, 0.1, "server", arms, out, rounds=12, unlike=unlike)
    ours_ns = statistics.mean(cells["mercury@server"].step_ns)
    return [
        Measured(
            f"Mercury Fig. {figure}",
            f"VGG-16 (CIFAR-10), {low} to 10 Gbit/s: Mercury faster than {name} (published: the most of all models)",
            most,
            None,
            100 * (statistics.mean(cells[f"{name}@server"].step_ns) / ours_ns - 1),
            "%",
        )
        for name, most in published.items()
    ]


def _cells(
    profile: Profile,
    hosts: int,
    bits: int,
    scale: float,
    backend: str,
    policies: Sequence[str],
    out: Path,
    *,
    rounds: int = 3,
    unlike: tuple[lab.HostSpec, ...] = (),
) -> dict[str, Cell]:
    arms = [ArmSpec(name, backend) for name in policies]  # type: ignore[arg-type]
    trial = Trial(profile, hosts, bits, scale, False, arms, rounds, 1, 0, 0, 60.0, unlike)
    return {cell.arm: cell for cell in run_all([trial], out, lambda text: print(text, file=sys.stderr))}


EXPERIMENTS: dict[str, Callable[[Path], list[Measured]]] = {
    "collision": collision,
    "merging": merging,
    "blocks": blocks,
    "changing": partial(changing, 18, 6, {"wfbp": 85, "bytescheduler": 41}),
    "changing-more": partial(changing, 19, 1, {"wfbp": 129, "bytescheduler": 104}),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.lab", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument(
        "--out", type=Path, default=Path("out/papers"), help="of trials; those that are there are not run again"
    )
    given = parser.parse_args()
    for name in given.names or EXPERIMENTS:
        rows = EXPERIMENTS[name](given.out)
        kept = [row for row in read() if row.figure not in {new.figure for new in rows}]
        write([*kept, *rows])
        for row in rows:
            print(row)
    print(f"kept in {MEASURED.name}, on {platform.machine()}", file=sys.stderr)


main()
