"""What each paper claims, at the ratio of computing to communicating at which it shows it, beside the live policy."""

from __future__ import annotations

from typing import NamedTuple

from experiments.lab.results import Measured
from experiments.table import text


class Claim(NamedTuple):
    """A claim, and the row that was measured for it.

    Attributes:
        claim: in words.
        figure, what: of the row in `measured.json`, as `Measured` has them.
        experiment: whose row it is: `python -m experiments.lab EXPERIMENT`.
    """

    claim: str
    figure: str
    what: str
    experiment: str


CLAIMS = (
    Claim(
        "ByteScheduler is faster than the default, over servers",
        "ByteScheduler Fig. 13",
        "ResNet-50, 10 Gbit/s, over servers: ByteScheduler faster than the default",
        "rates",
    ),
    Claim(
        "and over all-reduce",
        "ByteScheduler Fig. 10",
        "VGG-16, 100 Gbit/s, over all-reduce: ByteScheduler faster than the default",
        "frameworks",
    ),
    Claim(
        "MG-WFBP is faster than a message for each tensor",
        "MG-WFBP Fig. 6",
        "GoogLeNet, 4 workers: speed of MG-WFBP, of that of WFBP",
        "merging",
    ),
    Claim(
        "and than one message for all",
        "MG-WFBP Fig. 6",
        "GoogLeNet, 4 workers: speed of MG-WFBP, of that of SyncEASGD",
        "merging",
    ),
    Claim(
        "Prophet is faster than ByteScheduler by BytePS",
        "Prophet Table 2, one server",
        "ResNet-50, batch 64, 3 Gbit/s: speed of Prophet, of that of ByteScheduler by BytePS",
        "one-server",
    ),
    Claim(
        "and than P3",
        "Prophet Table 2, one server",
        "ResNet-50, batch 64, 3 Gbit/s: speed of Prophet, of that of P3",
        "one-server",
    ),
    Claim(
        "and than the default",
        "Prophet Table 2, one server",
        "ResNet-18, batch 64, 3 Gbit/s: speed of Prophet, of that of the default",
        "one-server",
    ),
    Claim(
        "Geryon: slices alone do not hide all communication",
        "Geryon Table II, matched",
        "VGG-19, 4.3 Gbit/s: scaling efficiency of slices",
        "matched",
    ),
    Claim(
        "and slices in lanes hide more of it",
        "Geryon Table II, matched",
        "VGG-19, 4.3 Gbit/s: scaling efficiency of slices in lanes",
        "matched",
    ),
    Claim(
        "an urgent parameter overtakes another in the network",
        "Geryon Fig. 5",
        "the urgent parameter's time with classes in the network, of that without",
        "collision",
    ),
    Claim(
        "Mercury is faster than the default",
        "Mercury Fig. 13",
        "VGG-16, 10 Gbit/s: Mercury faster than the default (published: the most of all models)",
        "preemption",
    ),
    Claim(
        "and than ByteScheduler",
        "Mercury Fig. 13",
        "VGG-16, 10 Gbit/s: Mercury faster than bytescheduler (published: the most of all models)",
        "preemption",
    ),
    Claim(
        "and than itself without preemption",
        "Mercury Fig. 13",
        "VGG-16, 10 Gbit/s: Mercury faster than itself without preemption (published: the most of all models)",
        "preemption",
    ),
)


def table(rows: list[Measured]) -> str:
    """As Markdown, of the claims that were measured."""
    measured = {(row.figure, row.what): row for row in rows}
    lines = ["| claim | shown at | published | simulated | lab | command |", "|---|---|---|---|---|---|"]
    for each in CLAIMS:
        row = measured.get((each.figure, each.what))
        if row is not None:
            shown = f"{row.figure}: {row.what.partition(': ')[0]}" if ": " in row.what else row.figure
            values = (text(row.published, row.unit), text(row.simulated, row.unit) if row.simulated is not None else "-")
            command = f"`python -m experiments.lab {each.experiment}`"
            lines.append(f"| {each.claim} | {shown} | {' | '.join(values)} | {text(row.lab, row.unit)} | {command} |")
    return "\n".join(lines)
