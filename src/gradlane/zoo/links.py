"""Links: what a host's cards are sold as; a row of `data/links.json` each. A host has one or more."""

from __future__ import annotations

from importlib import resources

import msgspec

from gradlane.core.fields import need_int


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A card, each way.

    Attributes:
        title: for people.
        bits_per_second: on the wires.
        source: who says so.
    """

    title: str
    bits_per_second: int
    source: str

    def __post_init__(self) -> None:
        need_int("bits_per_second", self.bits_per_second, 1, 10**15)


LINKS = msgspec.json.decode(resources.files("gradlane.zoo").joinpath("data/links.json").read_bytes(), type=dict[str, Link])
