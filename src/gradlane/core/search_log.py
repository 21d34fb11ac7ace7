"""Chosen: what `auto` predicted, tried and kept, and when it changed its mind."""

from __future__ import annotations

import msgspec

from gradlane.core.fields import MAX_NS, need_int, need_name
from gradlane.units import format_bytes

AUTO = "auto"
"""What users type in place of a policy."""


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy with those of its knobs that are not at their defaults. look: the one whose network it was planned for."""

    policy: str
    knobs: dict[str, int] = {}
    look: int = 0

    def __post_init__(self) -> None:
        need_name("policy", self.policy)

    def __hash__(self) -> int:
        return hash((self.policy, self.look, *self.knobs.items()))

    def __str__(self) -> str:
        knobs = (f"{name}={format_bytes(v) if name.endswith('_bytes') else v}" for name, v in self.knobs.items())
        return " ".join((self.policy, *knobs))


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the simulator expects an iteration to take under a choice."""

    choice: Choice
    iteration_ns: int

    def __post_init__(self) -> None:
        need_int("iteration_ns", self.iteration_ns, 0, MAX_NS)


class PolicyTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some iterations under one choice. times_ns: those measured. cut: ended before its time, as bad."""

    choice: Choice
    times_ns: tuple[int, ...]
    cut: bool = False


class SearchRound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One search for the best choice.

    why: what began it. began, ended: iterations. bytes_per_second: the network that was assumed. predicted: all candidates,
    the best first. tried: in their order. kept: what was in force afterwards. verdict: the line that was logged.
    """

    why: str
    began: int
    ended: int
    bytes_per_second: int
    predicted: tuple[Predicted, ...]
    tried: tuple[PolicyTrial, ...]
    kept: Choice
    verdict: str


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From `iteration` on, `choice` was in force. at_ns: on the clock of the timeline."""

    iteration: int
    at_ns: int
    choice: Choice


class SearchLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of one job. `looks` are those that have ended; `switches` each change of plan, trials included."""

    model: str
    workers: int
    backend: str
    safe: Choice
    looks: tuple[SearchRound, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def kept(self) -> Choice:
        """What the last look kept; the safe choice before the first has ended."""
        return self.looks[-1].kept if self.looks else self.safe
