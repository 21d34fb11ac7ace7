"""What the papers' experiments gave in the lab, its file and its part of the page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from experiments.table import text

MEASURED = Path(__file__).with_name("measured.json")


class Measured(msgspec.Struct, frozen=True):
    """A ratio. simulated: what the simulator says of the same plans on the network that the run measured."""

    figure: str
    what: str
    published: float
    simulated: float | None
    lab: float
    unit: str


def write(rows: list[Measured]) -> None:
    MEASURED.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))


def read() -> list[Measured]:
    return msgspec.json.decode(MEASURED.read_bytes(), type=list[Measured]) if MEASURED.exists() else []


def section() -> str:
    lines = [
        "## In the lab",
        "",
        REMARKS.strip(),
        "",
        "| figure | what | published | lab | simulated |",
        "|---|---|---|---|---|",
    ]
    for row in read():
        simulated = "-" if row.simulated is None else text(row.simulated, row.unit)
        lines.append(
            f"| {row.figure} | {row.what} | {text(row.published, row.unit)} | {text(row.lab, row.unit)} | {simulated} |"
        )
    return "\n".join(lines) + "\n"


REMARKS = """
Made by `python -m experiments.lab`: emulated devices and hosts, real processes, sockets and TCP, on two cores of which other
work took most meanwhile. Tensors and links are a twentieth or a tenth of their size, which keeps times. "Simulated" is of the
very plans that ran, on the network that the run measured, except for Geryon's, which is that of the table above.

Geryon Fig. 5: two servers answer one worker over its link of 100 Mbit/s, 4 MB each; the urgent one's packets are marked EF.
MG-WFBP Fig. 6 has the order of WFBP and MG-WFBP, and a larger gain: what a message costs does not shrink with tensors and
links, and with all processors busy a small one took milliseconds here. That favours few messages, SyncEASGD's single one most.
Prophet Table 2: two workers with a server beside each, where at 3 Gbit/s already all that a policy could hide is hidden. Lab
and simulator agree; the testbed's ByteScheduler and P3 were slower than their schedules allow, as said above. Mercury Figs. 18
and 19: two workers, rates drawn anew every 5 s; not simulated beside it, as a run measures its network once.
"""
