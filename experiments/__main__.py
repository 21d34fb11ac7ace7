"""The papers' own figures beside simulated ones: `python -m experiments [NAME...] [--write docs/papers.md] [--data FOLDER]`.

One set of assumptions for all (`assumptions.py`); nothing is fitted to a figure.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from experiments import assumptions
from experiments.lab.page import section
from experiments.table import page

PAPERS = ("bytescheduler", "mg_wfbp", "prophet", "geryon", "mercury")
HEAD = """# The papers' figures, simulated

This page puts gradlane's results beside figures that the papers published.
`python -m experiments --write docs/papers.md` writes it. The first tables come from the simulator;
those below "In the lab" were measured on emulated hosts. Differences are relative, or in percentage
points where the value is a percentage. "plot" stands for a value that a paper shows in a plot and
does not state. Not everything agrees, and nothing was fitted to a published figure.

"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PAPERS)}; default: all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page instead of printing it")
    parser.add_argument(
        "--data", type=Path, default=Path("..") / "shared" / "data", help="folder of recordings, where there is one"
    )
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in PAPERS]
    if unknown:
        parser.error(f"got {unknown[0]!r}, expected some of {', '.join(PAPERS)}")
    sections = []
    for name in given.names or PAPERS:
        begun = time.monotonic()
        paper = importlib.import_module(f"experiments.{name}")
        sections.append((paper.TITLE, paper.REMARKS, paper.rows(given.data)))
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    text = HEAD + "## Assumptions\n\n" + (assumptions.__doc__ or "").split("\n\n", 1)[1] + "\n" + page(sections)
    if not given.names:
        text += "\n" + section()
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text)


main()
