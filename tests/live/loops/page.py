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

For those who ask whether gradlane handles what their script does: search this page for it. Each loop of `tests/live/loops`
was run at two ranks, under DDP and three times under gradlane. The three are `bytescheduler` over all-reduce, plans that
change every second iteration as under `auto`, and `mercury` over servers. Sums arrive after `step()`, so that updates are
deferred.

- **equal**: parameters, buffers, optimizer state and all that the loop reads have DDP's bits on both ranks.
- **equal; logged**: the same, and rank 0 logs one line that contains these words.
- **refused**: the job ends with a typed error that contains these words.

`python -m tests.live.loops > bench/notes/training-loops.md` makes the page, and a test compares them.
`python -m tests.live.programs --examples 2000` generates more loops, and with `--served` loops whose update is on the servers.
"""


def page() -> str:
    """The page, as it is to be in docs/."""
    parts = [f"{_HEAD}\n{len(LOOPS)} loops.\n"]
    for family, title in _FAMILIES.items():
        loops: dict[str, list[str]] = {}
        for name, case in LOOPS.items():
            if case.family == family:
                loops.setdefault(_outcome(case), []).append(name.replace("_", " "))
        rows = [f"| {outcome} | {'<br>'.join(names)} |" for outcome, names in sorted(loops.items())]
        parts.append("\n".join([f"## {title}\n", "| outcome | loops |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def families() -> set[str]:
    """Those that the page has."""
    return set(_FAMILIES)


def _outcome(case: Loop) -> str:
    if case.refused:
        return f"refused: {case.refused}"
    return f"equal; logged: {case.says}" if case.says else "equal"
