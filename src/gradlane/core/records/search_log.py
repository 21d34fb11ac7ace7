"""SearchLog: what `auto` predicted, tried and kept, and when it changed the plan."""

from __future__ import annotations

from typing import Final

import msgspec

from gradlane.core.backends import BackendName
from gradlane.core.fields import MAX_NS, need_int, need_name
from gradlane.units import format_bytes

AUTO = "auto"
"""What users type in place of a policy."""
ANY: Final = "any"
"""The backend of a job in which `auto` chooses that too."""
_OVER = {"all-reduce": "over all-reduce", "server": "over servers"}


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy and its knobs, and what carries its plan.

    Attributes:
        policy: the policy's name.
        knobs: the knobs that are not at their defaults.
        look: number of the search round whose fitted network the plan was made for.
        backend: what carries the plan; None where the job has one backend only.
    """

    policy: str
    knobs: dict[str, int] = {}
    look: int = 0
    backend: BackendName | None = None

    def __post_init__(self) -> None:
        need_name("policy", self.policy)

    def __hash__(self) -> int:
        return hash((self.policy, self.look, self.backend, *self.knobs.items()))

    def __str__(self) -> str:
        knobs = (f"{name}={format_bytes(v) if name.endswith('_bytes') else v}" for name, v in self.knobs.items())
        return " ".join((self.policy, *knobs, *(() if self.backend is None else (_OVER[self.backend],))))


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The iteration time in ns that the simulator predicts for a choice."""

    choice: Choice
    iteration_ns: int

    def __post_init__(self) -> None:
        need_int("iteration_ns", self.iteration_ns, 0, MAX_NS)


class PolicyTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some iterations under one choice.

    Attributes:
        choice: what was in force.
        times_ns: the measured iterations' times, in order.
        cut: whether the trial was stopped early because it was clearly slower.
    """

    choice: Choice
    times_ns: tuple[int, ...]
    cut: bool = False


class SearchRound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One search for the best choice.

    Attributes:
        why: what started the search.
        began, ended: iteration numbers.
        bytes_per_second: rate of the network that predictions assumed; all-reduce's, if there were
            two backends.
        predicted: all candidates, the fastest first.
        tried: the trials, in order.
        kept: the choice in force afterwards.
        verdict: the line that was logged.
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
    """From `iteration` on, `choice` was in force; `at_ns` is on the timeline's clock."""

    iteration: int
    at_ns: int
    choice: Choice


class SearchLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All searches of one job.

    Attributes:
        model, workers, backend: the job; the backend is "any" if `auto` chooses it.
        safe: the choice that a winner must not be slower than.
        looks: the search rounds that have ended.
        switches: every change of plan, trials included.
    """

    model: str
    workers: int
    backend: str
    safe: Choice
    looks: tuple[SearchRound, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def kept(self) -> Choice:
        """What the last search round kept; the safe choice before the first has ended."""
        return self.looks[-1].kept if self.looks else self.safe
