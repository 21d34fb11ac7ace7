"""Runner: ranks that run one program after another, and new ones after any error."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gradlane.errors
from tests.live.programs.program import Program
from tests.live.ranks import Ranks
from tests.processes import PROCESSES

LIMIT_S = 30.0  # for a program: several times what a session may wait before it says so
AFTER_DDP_S = 2.0  # for the other rank, once DDP has failed on one
PROGRAMS_EACH = 300  # before the ranks are renewed

Kind = Literal["equal", "refused", "discarded", "differs", "raises", "hangs"]
BAD: tuple[Kind, ...] = ("differs", "raises", "hangs")
"""What must not happen. raises: an error that is not gradlane's own, where DDP raised none. hangs: no answer, or a sum that ran
out of time.
"""


@dataclass(frozen=True)
class Outcome:
    """equal; refused: a typed error on some rank; discarded: DDP itself refuses the program; or one of `BAD`.

    about: names that differ, by rank, or what was raised. deferred: updates that `step()` left, on each rank.
    """

    kind: Kind
    about: str = ""
    trace: str = ""
    deferred: tuple[int, ...] = ()

    @property
    def bad(self) -> bool:
        return self.kind in BAD

    @property
    def how(self) -> str:
        """Its kind, and what was raised."""
        return self.kind if self.kind != "raises" else self.about.partition(" (in ")[0][:60]


class Runner:
    """A context; its processes are started with the first program.

    Args:
        device: on which programs train.
        group: the backend of the ranks' process group.
        environments: see `Ranks`.
        ranks: how many; those behind the second add zeros to every gradient.
    """

    def __init__(
        self,
        device: str = "cpu",
        group: str = "gloo",
        environments: Sequence[dict[str, str]] | None = None,
        ranks: int = 2,
    ) -> None:
        self._device, self._group, self._environments, self._count = device, group, environments, ranks
        self._ranks: Ranks | None = None
        self._programs = 0

    def __enter__(self) -> Runner:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of find_unused_parameters in each program
        return self

    def __exit__(self, *_: object) -> None:
        self._end(kill=False)

    def run(self, program: Program) -> Outcome:
        if self._ranks is None:
            # a process that has opened a device cannot be forked
            processes = PROCESSES if self._device != "cuda" else multiprocessing.get_context("spawn")
            self._ranks, self._programs = Ranks(self._count, self._group, processes, self._environments), 0
        answers = self._ranks.answers(
            "tests.live.programs.comparison:compare",
            limit_s=LIMIT_S,
            hurry_s=lambda answer: AFTER_DDP_S if answer[0] and "refused_by_ddp" in answer[1] else None,
            program=program.json(),
            device=self._device,
        )
        outcome = _outcome(answers)
        self._programs += 1
        if outcome.kind not in ("equal", "differs"):
            self._end(kill=True)
        elif self._programs >= PROGRAMS_EACH:
            self._end(kill=False)
        return outcome

    def _end(self, kill: bool) -> None:
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            ranks.kill() if kill else ranks.close()


def _outcome(answers: list[tuple[bool, Any] | None]) -> Outcome:
    found = [answer[1] if answer and answer[0] else {} for answer in answers]
    deferred = tuple(one.get("deferred", 0) for one in found)
    refused = [one["refused_by_ddp"] for one in found if "refused_by_ddp" in one]
    if refused:
        return Outcome("discarded", refused[0])
    failed = [answer[1] for answer in answers if answer and not answer[0]]
    broken = [f"{kind}: {text}" for kind, text, _ in failed if not hasattr(gradlane.errors, kind)]
    errors = [(one["typed"], one["error"]) for one in found if "error" in one]
    errors += [(True, told) for told in failed if hasattr(gradlane.errors, told[0])]  # of a thread of the program's own
    untyped = [(f"{kind}: {text}", trace) for typed, (kind, text, trace) in errors if not typed]
    if untyped:
        return Outcome("raises", untyped[0][0], untyped[0][1], deferred)
    if broken:
        return Outcome("raises", broken[0], deferred=deferred)
    if None in answers:
        return Outcome("hangs", f"no answer of rank {answers.index(None)} within {LIMIT_S:.0f} s", deferred=deferred)
    if errors:
        late = [text for _, (kind, text, _) in errors if kind == "CommunicationError" and " no end of " in text]
        if late:  # every rank waits for what only a rank that waits could send
            return Outcome("hangs", late[0], errors[0][1][2], deferred)
        _, (kind, text, trace) = min(errors, key=lambda one: one[1][0].startswith("Peer"))  # the cause, if it is known
        return Outcome("refused", f"{kind}: {text}", trace, deferred)
    differs = [f"rank {rank}: {_names(one['differs'])}" for rank, one in enumerate(found) if one["differs"]]
    return Outcome("differs" if differs else "equal", "; ".join(differs), deferred=deferred)


def _names(names: list[str]) -> str:
    """The first of them in the order in which they were seen: what differs later mostly follows from it."""
    seen = sorted(
        (name for name in names if not name.startswith("end/")), key=lambda name: int(name.split("/")[1].split(":")[0])
    )
    names = seen + [name for name in names if name.startswith("end/")]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
