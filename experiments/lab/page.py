"""The part of the page that was measured in the lab."""

from __future__ import annotations

import re

from experiments.lab import bytescheduler, claims, geryon, mercury, mg_wfbp, prophet
from experiments.lab.results import Measured, read
from experiments.table import text

PAPERS = {
    "ByteScheduler": bytescheduler,
    "MG-WFBP": mg_wfbp,
    "Prophet": prophet,
    "Geryon": geryon,
    "Mercury": mercury,
}


def section() -> str:
    """Each paper's remarks, and the rows that have been measured so far."""
    rows = read()
    lines = ["## In the lab", "", REMARKS.strip(), "", claims.table(rows), ""]
    for name, paper in PAPERS.items():
        own = sorted((row for row in rows if row.figure.startswith(f"{name} ")), key=_place)
        lines += [f"### {name}", ""]
        if own:
            lines += ["| figure | what | published | lab | simulated |", "|---|---|---|---|---|", *map(_line, own), ""]
        lines += [paper.REMARKS.strip(), ""]
    return "\n".join(lines)


def _line(row: Measured) -> str:
    simulated = "-" if row.simulated is None else text(row.simulated, row.unit)
    figure = row.figure.split(" ", 1)[1]
    return f"| {figure} | {row.what} | {text(row.published, row.unit)} | {text(row.lab, row.unit)} | {simulated} |"


def _place(row: Measured) -> list[tuple[int, str]]:
    """Fig. 4 before Fig. 13; rows of a figure stay in their order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", row.figure)]


REMARKS = """
`python -m experiments.lab` measured what follows, with emulated devices and hosts, real processes,
sockets and TCP, on two cores. Tensors, links and the sizes that a system has as knobs (partitions,
credits, slices, packets) are scaled down by the same factor, which keeps the time of every
transfer. The cost that a message has at any size is not scaled. Where an experiment is stretched,
all computing times are longer and links slower by a second factor. This keeps the ratio of
computing to communicating, and the cost of each message weighs less.

"Simulated" is the simulation of the plans that ran, with the network and the computing time that
the run measured, unless a paper's remarks say otherwise. A policy over servers has one server in
each worker's process, so that each link carries as many bytes as with as many servers on hosts of
their own. "A, of that of B" is A divided by B.

The first table has what each paper claims, where the paper shows it and two cores can carry it. The
sections after it have all rows, and say what differs from the paper's testbed.
"""
