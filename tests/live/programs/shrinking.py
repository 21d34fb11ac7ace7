"""Shrinking: the smallest program that still fails in the same way, for a person to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tests.live.programs.models import MODELS
from tests.live.programs.program import Program
from tests.live.programs.runner import Outcome

Try = Callable[[Program], Outcome]


def without_kinds(program: Program, outcome: Outcome, run: Try) -> tuple[Program, Outcome]:
    """The program without all that is unusual about it and that it fails without, too. A run each, about ten."""
    for kind in program.kinds():
        smaller = program.kinds().get(kind, program)
        if smaller != program:
            program, outcome = _better(program, outcome, smaller, run)
    return program, outcome


def smallest(program: Program, outcome: Outcome, run: Try, most: int = 150) -> tuple[Program, Outcome]:
    """Shrunk until nothing more can be left out or made simpler, or `most` runs are over (fewer where each takes seconds)."""
    runs, most = 0, most if outcome.kind in ("equal", "differs") else most // 3
    changed = True
    while changed and runs < most:
        changed = False
        for smaller in _smaller(program):
            runs += 1
            found, seen = _better(program, outcome, smaller, run)
            if found is smaller:
                program, outcome, changed = found, seen, True
                break
            if runs >= most:
                break
    return program, outcome


def _better(program: Program, outcome: Outcome, smaller: Program, run: Try) -> tuple[Program, Outcome]:
    if "served" in program.way.split() and _adds_up(smaller) > _adds_up(program):
        return program, outcome  # which servers round otherwise than DDP
    seen = run(smaller)
    return (smaller, seen) if seen.how == outcome.how else (program, outcome)


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""
    count = len(program.steps)
    for length in (count // 2, 1):
        for start in range(0, count, length or 1) if length and count > length else ():
            yield msgspec.structs.replace(program, steps=program.steps[:start] + program.steps[start + length :])
    for index in range(len(program.hooks)):
        yield msgspec.structs.replace(program, hooks=program.hooks[:index] + program.hooks[index + 1 :])
    if program.way != program.plain_way:
        yield msgspec.structs.replace(program, way=program.plain_way)
    for optimizer in ("sgd", "momentum"):
        if program.optimizer not in ("sgd", optimizer):
            yield msgspec.structs.replace(program, optimizer=optimizer)
    if program.model != "mlp":
        steps = tuple(tuple(_without_parts(line, program.model) for line in step) for step in program.steps)
        yield msgspec.structs.replace(program, model="mlp", steps=steps)
    for at, step in enumerate(program.steps):
        for index, line in enumerate(step):
            words = line.split()
            others: list[tuple[str, ...]] = [()]
            if words[0] == "backward":
                others += [(" ".join(words[:word] + words[word + 1 :]),) for word in range(1, len(words))]
            elif words[0] in ("zero_grad", "surgery", "sam") and line != "zero_grad":
                others.append(("zero_grad" if words[0] == "zero_grad" else "backward",))
            for other in others:
                changed = (*step[:index], *other, *step[index + 1 :])
                yield msgspec.structs.replace(program, steps=(*program.steps[:at], changed, *program.steps[at + 1 :]))


def _adds_up(program: Program) -> int:
    """Steps whose gradients are added to those of the step before."""
    return sum(
        any(line.startswith("backward") for line in step) and not any(line.startswith("zero_grad") for line in step)
        for step in program.steps
    )


def _without_parts(line: str, model: str) -> str:
    """An action as another model can do it, which has no parts."""
    parts = {*MODELS[model].parts, "none"}
    return " ".join(word for word in line.split() if not parts & set(word.replace("|", ",").split(",")))
