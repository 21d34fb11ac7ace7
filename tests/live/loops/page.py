"""The page of the documentation that lists what was tried."""

from __future__ import annotations

from tests.live.loops.job import LOOPS, Loop

_FAMILIES = {
    "state": "State that is rolled back, read, saved or replaced",
    "parameters": "Parameters that are read, copied or written to",
    "conversions": "Parameters that are replaced or converted",
    "unused": "Accumulation, and parts that are left out",
    "parts": "Models whose parts are tied, left out, checkpointed or frozen",
    "buffers": "Buffers that scripts and models change",
    "gradients": "Gradients that are accumulated, clipped, scaled or read",
    "kept_gradients": "Gradients that the script keeps",
    "written_gradients": "Gradients that the script replaces or writes to",
    "optimizer_hooks": "Hooks of the optimizer, and what stands around `step()`",
    "rates": "Hyper-parameters that change, and optimizers of every kind",
    "passes": "Forward and backward passes of every kind",
    "readers": "Readers that Python does not see, and collectives of the script's own",
    "bystanders": "Threads, forks, signals, other processes and torch.func beside the training",
    "exported": "Models that are traced, scripted, exported or quantised",
    "refused": "What is refused",
}

_HEAD = """\
# Training loops that were tried

Each row is a loop in `tests/live/loops`, run at two ranks under DDP and then under gradlane three times: `bytescheduler`
over all-reduce, plans that change every second iteration as `auto` changes them, and `mercury` over servers, all on a
network on which sums arrive after `step()`, so that updates really are deferred. "Equal": parameters, buffers, optimizer
state and everything that the loop looks at on its way have DDP's bits on both ranks. "Said": rank 0 logs one line that
contains this. "Refused": the job ends with a typed error that contains this.

Made by `python -m tests.live.loops > docs/training-loops.md`; a test compares. Generated loops beside these:
`python -m tests.live.programs --examples 2000`.
"""


def page() -> str:
    """The page, as it is to be in docs/."""
    parts = [f"{_HEAD}\n{len(LOOPS)} loops.\n"]
    for family, title in _FAMILIES.items():
        rows = [f"| {name.replace('_', ' ')} | {_outcome(case)} |" for name, case in LOOPS.items() if case.family == family]
        parts.append("\n".join([f"## {title}\n", "| loop | outcome |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def families() -> set[str]:
    """Those that the page has."""
    return set(_FAMILIES)


def _outcome(case: Loop) -> str:
    if case.refused:
        return f"refused: {case.refused}"
    return f"equal; said: {case.says}" if case.says else "equal"
