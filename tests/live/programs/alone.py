"""Alone: each action, hook, flag, optimizer and way by itself in an otherwise plain loop, wherever it can stand."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from tests.live.programs.comparison import SERVED_WAYS, WAYS
from tests.live.programs.models import MODELS, OPTIMIZERS, SERVED, TAKES_ROOTS
from tests.live.programs.program import Program, matches
from tests.live.programs.strategies import (
    AS_SERVED,
    BETWEEN,
    CASTS,
    FLAGS,
    GRADIENTS,
    HOOKS,
    METHODS,
    NOISY,
    OF_STATE,
    STEPS_UNDER,
    WRAPPED,
    ZEROING,
    parts_of,
)

PLAIN = ("zero_grad", "backward", "step")
BEFORE, AFTER = 2, 2  # plain steps; gradlane defers nothing in the first two


def alone() -> Iterator[Program]:
    """About 2,000 programs."""
    for model in MODELS:
        yield _program([PLAIN] * 3, model=model)
    for optimizer in OPTIMIZERS:
        yield _program([PLAIN] * 3, optimizer=optimizer)
        yield _program([("backward", "step")] * 3, optimizer=optimizer)
    for way in WAYS:
        yield _program([PLAIN] * 3, way=way)
    for lines in (GRADIENTS | BETWEEN).values():
        for line in lines:
            yield from _placed(line)
    for line in CASTS:
        yield _program([(*PLAIN, line)], after=0)
    for name, hooks in HOOKS.items():
        for hook in hooks:
            for when in ("before", "after"):
                yield _program([(*PLAIN, *(["schedule"] if name == "scheduler" else []))] * 3, hooks=(f"{when} {hook}",))
    for flag in (*FLAGS, "no_sync", "no_sync again"):
        yield _program([("zero_grad", f"backward {flag}", "step")] * 3)
        yield _program([("backward", "step"), (f"backward {flag}", "step")] * 2)
        yield _program([("zero_grad", f"backward {flag}", "backward", "step")] * 3)
    for flag in WRAPPED:
        yield _program([("zero_grad", f"backward {flag}", "step")] * 3, way="bytescheduler late wrapped")
    for method in METHODS:
        yield _program([(method, "step")] * 3)
    for step in STEPS_UNDER:
        yield _program([("zero_grad", "backward", step)] * 3)
    yield _program([("closure",)] * 3)
    for step in ("scaled_step", "scaled_step unscaled"):
        yield _program([("zero_grad", "backward scaled autocast", step)] * 3, before=0)
    for zeroing in ZEROING:
        for steps in (
            [(f"zero_grad {zeroing}".strip(), "backward", "step")] * 3,
            [("backward", "step", f"zero_grad {zeroing}".strip())] * 3,
        ):
            yield _program(steps)
    for model in MODELS:
        for parts in parts_of(model) if MODELS[model].parts else ():
            for first in ("zero_grad", "zero_grad in_place", ""):
                step = tuple(line for line in (first, f"backward {parts}", "step") if line)
                yield _program([step] * 3, model=model)
                yield _program(
                    [tuple(line for line in (first, "backward no_sync", f"backward {parts}", "step") if line)] * 3, model=model
                )


def alone_served() -> Iterator[Program]:
    """Those of `alone()` that are to be compared where the update is on the servers."""
    for way in SERVED_WAYS:
        yield _program([PLAIN] * 3, way=way)
    for program in (*alone(), *_placed("fetch_state")):
        if any("backward" not in {line.split()[0] for line in step} for step in program.steps):
            continue
        if program.way != "bytescheduler late" or any(matches(item, words) for item in program.items() for words in AS_SERVED):
            continue
        if not all(_zeroes_first(step) for step in program.steps):
            continue
        optimizer = program.optimizer if program.optimizer in SERVED else "momentum"
        if MODELS[program.model].are_models:
            optimizer = "two_by_sgd"
        elif program.model in NOISY and optimizer in TAKES_ROOTS:
            continue
        served = structs.replace(program, optimizer=optimizer, way=SERVED_WAYS[0])
        yield served
        if any(matches(line, words) for step in program.steps for line in step for words in OF_STATE):
            yield structs.replace(served, steps=tuple(_with_state(step) for step in served.steps))


def _zeroes_first(step: tuple[str, ...]) -> bool:
    """Whether gradients are not added to those of the step before, and not zeroed through their data once they are sent."""
    names = [line.split()[0] for line in step]
    zeroed, summed = names.index("zero_grad") if "zero_grad" in names else len(step), names.index("backward")
    return zeroed < summed and "zero_grad data" not in step[summed:]


def _with_state(step: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(each for line in step for each in (*["fetch_state"] * any(matches(line, words) for words in OF_STATE), line))


def _placed(line: str) -> Iterator[Program]:
    """At each place of a step, three times, and once where gradients are accumulated in place."""
    model, optimizer = "mlp", "momentum"
    if line.startswith(("buffer", "rollback", "see buffers", "evaluate", "mode", "forward")) and "@" not in line.replace(
        "buffer", ""
    ):
        model = "buffers"
    elif line.startswith("add_group"):
        optimizer = "part"
    beside: tuple[str, ...] = ("look",) if line.startswith("keep") else ()
    for place in range(len(PLAIN) + 1):
        yield _program([(*PLAIN[:place], line, *PLAIN[place:])] * 3, model=model, optimizer=optimizer, beside=beside)
        plain = ("zero_grad in_place", *PLAIN[1:])
        yield _program([(*plain[:place], line, *plain[place:])], model=model, optimizer=optimizer, beside=beside)


def _program(
    steps: list[tuple[str, ...]], before: int = BEFORE, after: int = AFTER, beside: tuple[str, ...] = (), **rest: object
) -> Program:
    """beside: actions after the step that follows, and after the last one."""
    plain = [PLAIN] * after
    if beside and plain:
        plain[0] = (*PLAIN[:2], *beside, "step", *beside)
        plain[-1] = (*PLAIN, *beside)
    return Program((*[PLAIN] * before, *steps, *plain), **rest)  # type: ignore[arg-type]
