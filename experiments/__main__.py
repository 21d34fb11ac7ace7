"""The papers' own figures beside simulated ones.

    python -m experiments [NAME...] [--write experiments/notes/papers.md] [--plots experiments/notes/figures] [--data FOLDER]
    python -m experiments.brief > docs/papers.md

One set of assumptions for all (`assumptions.py`); nothing that is counted is fitted to a figure.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from experiments import assumptions, not_compared
from experiments.lab.page import section
from experiments.pictures import draw, pictures
from experiments.table import page, summary, wrong_rows

# how many values each paper and its authors' scripts state, in text, tables and captions
PAPERS = {"bytescheduler": 28, "mg_wfbp": 141, "prophet": 63, "geryon": 49, "mercury": 52}
HEAD = """# The papers' figures, simulated

These notes put gradlane's results beside figures that the papers published; [papers.md](../../docs/papers.md) has the main
ones. `python -m experiments --write experiments/notes/papers.md` writes the notes. The first tables come from the simulator;
those below "In the lab" were measured on emulated hosts. Differences are relative, or in percentage
points where the value is a percentage. "plot" stands for a value that a paper shows in a plot and
does not state. Not everything agrees, and nothing that is counted was fitted to a published figure.

A remark that names a cause has a row that begins with "tried": the same run with the cause put in
or taken out. Where none explains a difference, the remark says so. The next table counts simulated
values, without those rows and without figures that are shown once more with other constants.
"Within 5" and "within 15" are percent, or points of a percentage. Rows may also compare what a plot
shows, in words, so that more values may be compared than are stated. The section "Not compared"
lists the others with the reason of each.

"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PAPERS)}; default: all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page instead of printing it")
    parser.add_argument(
        "--data", type=Path, default=Path("..") / "shared" / "data", help="folder of recordings, where there is one"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="FOLDER",
        help="also draw the papers' figures there, as SVG; the notes show experiments/notes/figures",
    )
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in PAPERS]
    if unknown:
        parser.error(f"got {unknown[0]!r}, expected some of {', '.join(PAPERS)}")
    sections, counted, titles = [], [], {}
    for name in given.names or PAPERS:
        begun = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        paper = importlib.import_module(f"experiments.{name}")
        rows = paper.rows(given.data)
        drawn = pictures(name, rows)
        shown = "\n".join(f"![{each.title}](figures/{each.stem}.svg)" for each in drawn)
        sections.append((paper.TITLE, f"{paper.REMARKS.strip()}\n\n{shown}", rows))
        if given.plots is not None:
            given.plots.mkdir(parents=True, exist_ok=True)
            for each in drawn:
                draw(each, given.plots)
        titles[name] = paper.TITLE.split(" (")[0]
        left = sum(each.values for each in not_compared.NOT_COMPARED[name])
        counted.append((titles[name], PAPERS[name], left, rows))
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    text = (
        HEAD
        + summary(counted)
        + "\n## Wrong in sign or order\n\n"
        + wrong_rows([(title, rows) for title, _, _, rows in counted])
        + "\n## Assumptions\n\n"
        + (assumptions.__doc__ or "").split("\n\n", 1)[1]
        + "\n"
        + page(sections)
        + not_compared.section(titles)
    )
    if not given.names:
        text += "\n" + section()
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text)


main()
