"""What the papers' experiments gave in the lab, and its file."""

from __future__ import annotations

from pathlib import Path

import msgspec

MEASURED = Path(__file__).with_name("measured.json")


class Measured(msgspec.Struct, frozen=True):
    """A ratio. published: None where the paper has it in a plot only, a text where it says it in words.

    simulated: what the simulator says of the same plans on the network that the run measured.
    """

    figure: str
    what: str
    published: float | str | None
    simulated: float | None
    lab: float
    unit: str


def write(rows: list[Measured]) -> None:
    MEASURED.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))


def read() -> list[Measured]:
    return msgspec.json.decode(MEASURED.read_bytes(), type=list[Measured]) if MEASURED.exists() else []
