"""`python -m experiments.lab [NAME...] [--out FOLDER]`: run the papers' experiments in the lab and keep what they gave.

`python -m experiments --write experiments/notes/papers.md` puts it into the notes.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

from experiments.lab.page import PAPERS
from experiments.lab.results import MEASURED, read, write

EXPERIMENTS = {name: run for paper in PAPERS.values() for name, run in paper.EXPERIMENTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.lab", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("out/papers"), help="of runs; those that are there are not run again")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"got {unknown[0]!r}, expected some of {', '.join(EXPERIMENTS)}")
    for name in given.names or EXPERIMENTS:
        begun = time.monotonic()
        rows = EXPERIMENTS[name](given.out)
        # figures of different experiments are different, so that what is replaced is this one's
        kept = [row for row in read() if row.figure not in {new.figure for new in rows}]
        write([*kept, *rows])
        for row in rows:
            print(row)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(f"kept in {MEASURED.name}, on {platform.machine()}", file=sys.stderr)


main()
