"""The page that results make."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from experiments.fidelity.anatomy import STAGES
from experiments.fidelity.results import BEST_WITHIN, RIVALS, Results, TrialResult, backend_of, policy_of, spread
from gradlane.compare.arms import BASELINE
from gradlane.compare.records import Cell
from gradlane.core.backends import BackendName

HEAD = """# How true the simulator is

Made by `python -m experiments.fidelity --page docs/fidelity.md` from `experiments/fidelity/measured.json`, which came from

    {command}

on {machine}. Each trial is a model, a rate and a number of hosts (each pair of the
first two with one of 2, 3 and 4, in turns), under every policy of both backends, {steps} measured steps an arm; in it
all arms live side by side and take turns, as in `gradlane compare`. The simulator is given the profile that was emulated and
the network that the run measured by itself, and simulates the very plan that ran. An error above 0 means that the simulator
was too slow; it is that of the median step, and beside it stands the median error of the fastest step, which others have
disturbed least.

Computing is stretched to {step_ms} and tensors shrunk to
{megabytes:.1f} MB a model, so that two cores can carry it: more hosts have less of them each, which handle as many messages.
"ratio" is the time of all bytes on an ideal link, as a part of computing. "others" is what processes that are
not of the trial took of the machine meanwhile: each wake-up waits for them, and a message has several.

"""

JUDGED = """The least of many medians of a few steps is low by chance, so finals judge the choice too: over each backend what is
called best trains beside the {rivals} fastest others in a later run of {steps} measured steps an arm,

    {command}

The error of those {count} cells was {median:.1%} in the median, nine of ten below {most:.1%}.
"""

TAIL = """
## What the model is

A lone message costs startup + bytes / rate. In a stream it costs less: a part of the startup is latency, which keeps nobody
waiting, and the rest is handling, of one message at a time, while another's bytes pass. Gloo has two sums under way a group,
and a ring of N moves a message in 2 (N - 1) steps, between which the other sum's steps pass, of no more than two segments of
1 MiB each. `python -m bench.shared_link` has messages start together and says when each ended, as a part of when all had;
among two hosts, and `python -m bench.shared_link 3` among three:

| messages, MiB | 2 hosts, measured | simulated | 3 hosts, measured | simulated |
|---|---|---|---|---|
| 4 + 4 | 0.76 1 | 0.75 1 | 0.87 1 | 0.88 1 |
| 4 + 1/16 | 1 0.52 | 0.99 1 | 1 0.87 | 1 1 |
| 8 + 2 | 1 0.60 | 1 0.60 | 1 0.67 | 1 0.60 |
| 2 + 8 | 0.59 1 | 0.40 1 | 0.60 1 | 0.50 1 |
| 32 + 1/16 | 1 0.12 | 1 0.13 | 1 0.23 | 1 0.17 |
| 2 + 2 + 2 + 2 | 0.38 0.50 0.88 1 | 0.38 0.50 0.88 1 | 0.45 0.52 0.94 1 | 0.44 0.50 0.94 1 |

`probe` and sessions measure single messages and streams of eight, and wait for sums as a session does, so that what Python
costs on Gloo's threads is in the startup. Where a stream costs more than its messages alone, because some stall, its mean is
what a message costs: a plan pays for those too. `gradlane.sim.shared_link` simulates it.

A small message costs the processor more than the link, and on a slow link its bytes pass meanwhile: no message takes less than
that, and a larger one no more for it (`Network.min_message_ns`). As a startup beside the bytes, fitted by a line, it came out
anywhere between 0.1 and 1.7 ms on one link. Alone it takes longer than in a stream, where one's threads are woken while
another's work; what the stream saves is latency (`min_message_latency_ns`), and what is left of it is handling. Its times have
two peaks, and what a plan pays is their mean. In these trials it took 1.4 to 2.3 ms among two hosts, 0.1 to 1.1 of it latency,
2.8 to 4.0 and 0.2 to 2.0 among three, 5.3 to 7.1 and 1.6 to 3.0 among four. In none of them was a part of the startup that
large messages have found to be latency: handling that passes behind bytes explains what their streams save.

Networks are measured while a thread beside computes, since messages share the processors with computing when a model trains.
Each lane has a process group over Gloo, with two sums under way of its own.

## What is wrong

- **`searched`, among four hosts, is called best and is not** for Inception-v3 at ratio 1: 6 % slower than `blocks`, in the
  finals 4 %. It was made to be the best in the simulator, so that what the simulator leaves out makes it look better than it
  is: by 7 % there, 1.4 % in the median. For BERT-Base at 0.5 it was 7 % slower than `blocks`, in the finals level with the
  best.
- **Hundreds of small messages over Gloo**: up to 28 % too slow (`geryon` and Inception-v3 among three hosts), and one at a
  time (`prophet`, `tictac`) 9 to 19 % too slow where tensors are many and computing is short. What such a message costs was
  measured alone, and depends on whose thread runs when.
- **Many messages over servers**: handing one over and taking it back costs Python's thread more than is simulated, which
  shows where hosts are many and computing is short for the number of tensors (GoogLeNet and Inception-v3 at ratio 0.5): up to
  17 %. For GoogLeNet among four hosts `mercury` (128 messages) is called best, and is 7 % slower in the finals than `searched`
  (fewer), which takes what was simulated. What handling costs is known to `auto`, which counts it between plans that are
  predicted alike.
- **One small message at a time over servers** (`tictac`, GoogLeNet among two hosts: 14 % too fast). A message of one packet has
  one server, so that one direction of each link carries it; workers that are alike are simulated as one, with bytes like water
  on all links. Packet by packet (`whole=True` in `gradlane.sim.servers`) half of the error is gone.
- **`dear` over Gloo** is 3 % slower than simulated.

The cells over all-reduce are of runs of their own (`--backends all-reduce`), after the last change to how messages over Gloo
are simulated; those over servers, which it does not touch, of runs of both backends before. Before it, handling a message
kept the link from all others, so that `wfbp`, `bytescheduler` and `geryon` were 13 to 31 % too slow over Gloo where small
messages are many: 234 cells of the same trials were wrong by 2.1 % in the median, nine of ten by less than 13.4 %.

With `blocks` over servers the simulator is the faster one where communicating takes as long as computing. The most urgent block
is the last to be ready, and goes behind what is queued, both ways; where two ranks are apart by 10 ms they send in different
orders, and each of its parts waits for the other rank's. In one run it took 38 ms, where 20 were simulated by a worker that
stands for both. Packets that overtake (`mercury`, the default over servers) do not have it.
"""

QUIET = 0.3
QUIETER, BUSIER = f"less than {QUIET:.0%}", f"{QUIET:.0%} or more"
ERRORS = ("cells", "median error", "9 of 10 below", "median signed", "of the fastest step")


def page(results: Results) -> str:
    cells = [(trial, cell) for trial in results.trials for cell in trial.own]
    first = results.trials[0].cells[0]
    megabytes = statistics.median(trial.cells[0].scale * _bytes(trial) for trial in results.trials) / 1e6
    computed = {trial.hosts: trial.cells[0].compute_ns / 1e6 for trial in results.trials}
    step_ms = ", ".join(f"{computed[hosts]:.0f} ms a step on {hosts} hosts" for hosts in sorted(computed))
    text = HEAD.format(
        command=results.command, machine=results.machine, step_ms=step_ms, megabytes=megabytes, steps=len(first.step_ns)
    )
    text += f"## All of it: {len(results.trials)} trials, {len(cells)} cells\n\n"
    rows = [_row("all", cells, results)]
    rows += [_row(backend, [each for each in cells if backend_of(each[1]) == backend], results) for backend in results.backends]
    text += _table(("backend", *ERRORS, "best within 3 %", *(["in finals"] if results.finals else [])), rows)
    text += "\nBest within 3 %: in how many trials what the simulator calls best took at most so much longer than the best.\n"
    if results.finals:
        final = [cell for trial in results.trials for cell in trial.finals if cell.arm != BASELINE]
        median, most = spread([cell.error for cell in final])
        steps = min(len(cell.step_ns) for cell in final)
        text += JUDGED.format(rivals=RIVALS, steps=steps, command=results.finals, count=len(final), median=median, most=most)
    keys: tuple[tuple[str, Callable[[TrialResult, Cell], str]], ...] = (
        ("By policy", lambda trial, cell: f"{policy_of(cell)}, {backend_of(cell)}"),
        ("By model", lambda trial, cell: trial.model),
        ("By ratio", lambda trial, cell: f"{trial.ratio:g}"),
        ("By hosts", lambda trial, cell: str(trial.hosts)),
        ("By what others took of the machine", lambda trial, cell: QUIETER if trial.others < QUIET else BUSIER),
    )
    for title, key in keys:
        text += f"\n## {title}\n\n" + _table(("", *ERRORS), _grouped(cells, key))
    text += "\n## Trial by trial\n\n"
    heads = ("model", "hosts", "ratio", "others", "cells", "median error", "worst", "the choice is slower than the best by")
    text += _table(heads, [_trial(trial) for trial in results.trials])
    text += "\n## Where it comes from\n\n" + _anatomies(results)
    return text + TAIL


def _bytes(trial: TrialResult) -> float:
    """Of the model as it is meant, from the rate that gives the ratio."""
    cell = trial.cells[0]
    assert cell.link_bits_per_second is not None
    return cell.link_bits_per_second / 8 * trial.ratio * cell.compute_ns / 1e9


def _row(name: BackendName | Literal["all"], cells: list[tuple[TrialResult, Cell]], results: Results) -> tuple[str, ...]:
    backends = results.backends if name == "all" else [name]
    counts = [_within(results.trials, backends, TrialResult.loss_of_choice)]
    if results.finals:
        judged = [trial for trial in results.trials if trial.finals]
        counts.append(_within(judged, backends, TrialResult.judged_loss_of_choice))
    return (*_errors(name, [cell for _, cell in cells]), *counts)


def _within(
    trials: Sequence[TrialResult], backends: Sequence[BackendName], loss: Callable[[TrialResult, BackendName], float]
) -> str:
    """In how many trials the choice was about as fast as the best."""
    losses = [loss(trial, backend) for trial in trials for backend in backends if backend in trial.backends]
    return f"{sum(each <= BEST_WITHIN - 1 for each in losses)} of {len(losses)}"


def _errors(name: str, cells: list[Cell]) -> tuple[str, ...]:
    errors = [cell.error for cell in cells]
    median, most = spread(errors)
    undisturbed, _ = spread([cell.predicted_ns / min(cell.step_ns) - 1 for cell in cells])
    signed = statistics.median(errors)
    return name, str(len(cells)), f"{median:.1%}", f"{most:.1%}", f"{signed:+.1%}", f"{undisturbed:.1%}"


def _grouped(cells: list[tuple[TrialResult, Cell]], key: Callable[[TrialResult, Cell], str]) -> list[tuple[str, ...]]:
    groups: dict[str, list[Cell]] = defaultdict(list)
    for trial, cell in cells:
        groups[key(trial, cell)].append(cell)
    return [_errors(name, group) for name, group in groups.items()]


def _trial(trial: TrialResult) -> tuple[str, ...]:
    median, _ = spread([cell.error for cell in trial.own])
    worst = max(trial.own, key=lambda cell: abs(cell.error))
    losses = ", ".join(f"{trial.loss_of_choice(backend):.1%} ({backend})" for backend in trial.backends)
    if trial.finals:
        losses += "; " + ", ".join(f"{trial.judged_loss_of_choice(backend):.1%}" for backend in trial.backends) + " in finals"
    return (
        trial.model, str(trial.hosts), f"{trial.ratio:g}", f"{trial.others:.0%}", str(len(trial.own)), f"{median:.1%}",
        f"{worst.error:+.1%} {worst.arm}", losses,
    )  # fmt: skip


def _anatomies(results: Results) -> str:
    late: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    gaps = []
    for trial in results.trials:
        for cell in trial.own:
            seen = trial.anatomies.get(cell.arm)
            if seen is not None:
                late[f"{policy_of(cell)}, {backend_of(cell)}"].append(tuple(each / cell.median_ns for each in seen.late_ns))
                gaps.append((abs(seen.largest.gap_ns) / cell.median_ns, trial, cell, seen.largest))
    text = (
        "When tensors were ready and when the last message with a part of one started and ended, later than simulated, as a "
        "part of the step: the median tensor of the median trial.\n\n"
    )
    rows = [(name, *(f"{statistics.median(column):+.1%}" for column in zip(*each, strict=True))) for name, each in late.items()]
    text += _table(("", *STAGES), rows)
    text += "\nThe largest gaps: a tensor that took longer (or shorter) from one stage to the next than simulated.\n\n"
    gaps.sort(key=lambda gap: -gap[0])
    rows = [
        (
            trial.model, str(trial.hosts), f"{trial.ratio:g}", cell.arm, gap.tensor, f"until {gap.stage}",
            f"{gap.gap_ns / 1e6:+.1f} ms", f"{cell.median_ns / 1e6:.0f} ms",
        )
        for _, trial, cell, gap in gaps[:10]
    ]  # fmt: skip
    return text + _table(("model", "hosts", "ratio", "arm", "tensor", "", "gap", "step"), rows)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
