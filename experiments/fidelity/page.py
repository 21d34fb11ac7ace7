"""Writes experiments/notes/fidelity.md from the results of trials."""

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

This page compares simulated iteration times with measured ones, for those who want to rely on a
prediction. `python -m experiments.fidelity --page experiments/notes/fidelity.md` writes it from
`experiments/fidelity/measured.json`. The results in that file came from

    {command}

on {machine}. A trial is a model, a link rate and a number of hosts; each
pair of model and rate has one trial, on 2, 3 or 4 hosts in turns. In a trial all policies of both
backends (the arms) are alive in one job and train in turns, as in `gradlane compare`. Each has
{steps} measured steps; an arm of a trial is a cell. The simulator gets the profile that the devices
emulated and the network that the run measured, and simulates the plan that ran. All-reduces are
measured before the first step and eight times between turns, while another thread computes; what older
trials did instead stands below.

An error above 0 means that the simulated iteration is longer than the median measured step. The
column "of the fastest step" has the median error against the fastest step of each cell, which other
processes have disturbed least.

So that two cores can carry a trial, tensors are shrunk to {megabytes:.1f} MB a model, and computing is
stretched to {step_ms}:
the more hosts share the cores, the less of them each host has for the same number of messages.
"ratio" is the time that one message with all bytes takes on an ideal link, divided by the time that
computing takes. "others" is the fraction of the machine's processor time that went to processes
outside the trial. Each thread that a message wakes up has to wait for them.

"""

JUDGED = """
With few steps an arm, the least of many medians is low by chance. So finals judge the ranking again, in {judged} trials
in which the choice was more than 3 % slower: over each backend, the policy that the simulator ranks first trains
beside the {rivals} fastest others in a later run of {steps} measured steps an arm,

    {command}

The error of those {count} cells was {median:.1%} in the median, and below {most:.1%} in nine of ten. With what
the finals say in place of what they judge, the choice is within 3 % in {within}.
"""

TAIL = """
## What the model is

A lone message costs startup + bytes / rate. In a stream a message costs less. One part of its
startup is latency, which delays no other message. The rest is handling: the processor handles one
message at a time, while the link carries the bytes of another. Gloo has up to two sums of a process
group in flight. A ring of N ranks moves a message in 2 (N - 1) steps of at most two segments of
1 MiB each, and steps of the other sum go in between.

`python -m bench.shared_link` starts messages together and prints when each ended, as a fraction of
the time until all had ended; `python -m bench.shared_link 3` does so on three hosts. The largest
difference from the simulator is in the second row: on two hosts the small message ends earlier
than simulated.

| messages, MiB | 2 hosts, measured | simulated | 3 hosts, measured | simulated |
|---|---|---|---|---|
| 4 + 4 | 0.76 1 | 0.75 1 | 0.87 1 | 0.88 1 |
| 4 + 1/16 | 1 0.52 | 0.99 1 | 1 0.87 | 1 1 |
| 8 + 2 | 1 0.60 | 1 0.60 | 1 0.67 | 1 0.60 |
| 2 + 8 | 0.59 1 | 0.40 1 | 0.60 1 | 0.50 1 |
| 32 + 1/16 | 1 0.12 | 1 0.13 | 1 0.23 | 1 0.17 |
| 2 + 2 + 2 + 2 | 0.38 0.50 0.88 1 | 0.38 0.50 0.88 1 | 0.45 0.52 0.94 1 | 0.44 0.50 0.94 1 |

`gradlane probe` and sessions measure messages alone, small ones up to 16 in a row, and streams of eight,
of small ones up to 32. If a stream takes longer than its messages would take alone, because some of
them stall, the mean over the stream is taken as the cost of a message, since a plan pays for stalls
too. `gradlane.sim.shared_link`
simulates this model.

A small message costs the processor more than the link, and on a slow link its bytes pass while it
is handled. So a message has a minimum time (`Network.min_message_ns`), which is not added to the
time of a larger message. Where a line was fitted instead, with this cost as a startup, the startup
came out anywhere between 0.1 and 1.7 ms on the same link. A small message takes longer alone than
in a stream, where threads of one message wake up while those of another work. The fit counts what
the stream saves as latency (`min_message_latency_ns`), and the rest as handling. The times of small
messages have two peaks, and a plan pays their mean. These trials found

| hosts | minimum time of a message | its part that is latency |
|---|---|---|
| 2 | 2.2 to 2.5 ms | 0.8 to 1.2 ms |
| 3 | 3.5 to 4.7 ms | 0.7 to 1.6 ms |
| 4 | 6.0 to 7.4 ms | 1.8 to 3.2 ms |

In no trial did the fit find latency in the startup of large messages: handling while bytes pass
explains what their streams save.

Messages and computing share the processors when a model trains, so all-reduces are measured while another
thread computes. Over Gloo each lane has a process group of its own, with up to two sums in flight, and
with connections of its own: lanes share the link evenly, and one processor handles the messages of all.

## What is wrong

- **Hundreds of small messages over Gloo.** Two cores carry up to four hosts, and a small message takes
  1 to 3 ms between two of them, from one minute to the next. Steps of policies that send each tensor
  by itself are simulated up to 12 % too long or too short.
- **`p3` over Gloo** takes up to 15 % longer than simulated. Where its window is full, the end of each
  message is told by a thread of torch.distributed, which handles no other message meanwhile, while the thread
  that trains updates what has come. The simulator counts that (`Network.wakeup_ns`), as measured of sums one
  after another: 0.3 to 0.9 ms on three and four hosts and 0 to 0.3 ms on two. GoogLeNet's 158 messages on
  four hosts take 0.5 ms each more than that, and on another day they took 1.0 ms more.
- **`geryon` over Gloo**: its two lanes share the link and one processor. Until this version each lane had a
  processor of its own in the simulator, and lanes took turns by chunks on the link. Both versions simulated the
  same measured steps, in percent of them:

  | | before | lanes share the link | one processor | both, as it is now |
  |---|---|---|---|---|
  | VGG-16, 4 hosts | +7.2 | -1.3 | +7.2 | -1.3 |
  | Inception-v3, 4 hosts | -10.7 | -17.2 | +14.3 | +0.7 |
  | Inception-v3, 2 hosts | +1.6 | -3.6 | +7.6 | -2.0 |

  Inception-v3 on three hosts is simulated 32 % too long now: its 292 messages took 2.6 ms each in two lanes, and
  3.5 ms in the one of `bytescheduler`, and one processor gives both about the same.
- **Priorities over servers where computing takes longer than communicating**: `blocks` and `p3` take 10 % longer than
  simulated for GoogLeNet on two hosts. In the simulator ranks compute alike, but live ones are not all at the same
  point. In an iteration of `p3` on four hosts rank 1 sent seven messages of the last layers as backward began; rank 0
  sent others first, and these 325 ms later. Their sums came back before that of the most urgent gradient, which took
  54 ms from rank 0's send to its sum.
- **Packets over servers.** Until this version one worker stood for all, and packets were infinitely small. Now each
  packet of each worker is simulated where there are few, cut as the transport cuts them. Both versions simulated
  the same measured steps of all 270 cells, and their errors are

  | | before | now |
  |---|---|---|
  | median; nine of ten below | 0.62 %; 2.49 % | 0.65 %; 2.42 % |
  | nine of ten below, `p3` | 6.1 % | 3.3 % |
  | `mercury` | 4.1 % | 3.1 % |
  | `blocks` | 3.9 % | 2.5 % |
  | `tictac` | 3.1 % | 3.8 % |
  | how much slower the choice was than the best, mean of 18 trials | 0.62 % | 0.51 % |

  Inception-v3 on four hosts has more packets than are simulated. Of Inception-v3 on three hosts `mercury` is called
  best, and was 4.6 % slower than `searched` in the finals.
- **`dear` over Gloo** takes 2 to 5 % longer than simulated (median 3.2 %). Its reduce-scatter is an all-to-all in segments,
  and neither phase was measured by itself: the simulator gives each half of what an all-reduce takes.

The cells come from runs of one backend after another (`--backends`, `--add`), and not all of one
version. All over servers have 6 measured steps (`--rounds 3`) and are of this version, and so are those over
all-reduce of policies that cross the barrier. Others over all-reduce are older in part. What has changed since is the
emulated device, which started a layer earlier than the sum that it waits for, by what the script had computed
until it waited; behind the barrier that changes nothing. Of older cells, those with 8 measured steps measured the
network nine times, as this version does, and others four times, half of the times without computing.

Small messages may take far longer on one day than on another: Inception-v3 on three hosts over Gloo took 967 ms
a step under `tictac`, and 1642 ms the day after. What is measured in the same run follows for the most part: simulated
times were 4.7 % too long and 4.6 % too short.

With `blocks` over servers, steps take longer than simulated where communicating takes as long as
computing. The most urgent block is the last to be ready, and queues behind other blocks on the way
to the servers and back. If one rank runs 10 ms ahead of the other, they send in different orders,
and each part of the block waits for the other rank's. In one run the block took 38 ms; a
simulator in which one worker stands for both gave 20 ms. Packets that overtake others (`mercury`,
the default over servers) avoid this.
"""

OF_HOSTS = """
## Hosts with several ranks

Trials on emulated hosts of several ranks, which share their host's link: 2 x 3 are two hosts of three
ranks each. Runs measured both levels and summed by the faster way, over all ranks at once or within
hosts first, as sessions do by themselves ([training.md](../../docs/training.md)). Of the {trials} trials
{hierarchical} took the latter, which the simulator has as a network with a bus
([cost-model.md](../../docs/cost-model.md#hosts-with-several-devices)). The results are trials of

    {command}

with {steps} measured steps an arm, on {machine}; they are in
`experiments/fidelity/of_hosts.json`. The ranks of a trial share the cores, so computing is stretched
with their number, and rates shrink in proportion.

"""
OF_HOSTS_TAIL = """
Of VGG-16 and ResNet-50 on 2 x 3 and BERT-Base on 3 x 2 these are second runs. In the first, messages alone were
slow beside computing (VGG-16: 5.2 MB/s over a link for 6.4), and what the link limits was simulated 3, 7 and
15 % too long (medians). Since then a fit takes the rate from messages in a row where they are so much
faster ([cost-model.md](../../docs/cost-model.md#messages-that-share-a-network)); the other six were run before that.
BERT-Base's `wfbp` and `bytescheduler` on 2 x 3, about 200 messages of three collectives each, take 0.2 to 0.3 s
longer than simulated: the stages of a message share a rank's processor, and the simulator has only what is
spent between hosts. To count what all stages take of streams of whole messages was tried, with steps half as
long: ResNet-50's `wfbp` on 2 x 2 was then simulated 37 % too long, not 9 %, since beside computing those
streams take nearly twice as long as the session's messages do. `dear` takes up to a tenth longer than simulated
on 3 x 2; why is not known.
"""

QUIET = 0.3
QUIETER, BUSIER = f"less than {QUIET:.0%}", f"{QUIET:.0%} or more"
ERRORS = ("cells", "median error", "9 of 10 below", "median signed", "of the fastest step")


def page(results: Results, of_hosts: Results | None = None) -> str:
    """The page.

    Args:
        results: of hosts with one rank each.
        of_hosts: of hosts with several.
    """
    # by backend, since trials that were run again have their backends in another order
    cells = sorted(((trial, cell) for trial in results.trials for cell in trial.own), key=lambda each: backend_of(each[1]))
    megabytes = statistics.median(trial.cells[0].scale * _bytes(trial) for trial in results.trials) / 1e6
    computed = {trial.hosts: trial.cells[0].compute_ns / 1e6 for trial in results.trials}
    step_ms = ", ".join(f"{computed[hosts]:.0f} ms a step on {hosts} hosts" for hosts in sorted(computed))
    text = HEAD.format(
        command=results.command, machine=results.machine, step_ms=step_ms, megabytes=megabytes, steps=_steps(cells)
    )
    text += f"## All of it: {len(results.trials)} trials, {len(cells)} cells\n\n"
    rows = [_row("all", cells, results)]
    rows += [_row(backend, [each for each in cells if backend_of(each[1]) == backend], results) for backend in results.backends]
    text += _table(("backend", *ERRORS, "best within 3 %", *(["in finals"] if results.finals else [])), rows)
    text += (
        "\nBest within 3 %: the number of trials in which the policy that the simulator ranks first took at\n"
        "most 3 % longer than the fastest one, counted for each backend.\n"
    )
    if results.finals:
        final = [cell for trial in results.trials for cell in trial.finals if cell.arm != BASELINE]
        median, most = spread([cell.error for cell in final])
        steps = min(len(cell.step_ns) for cell in final)
        text += JUDGED.format(
            judged=sum(bool(trial.judged) for trial in results.trials), rivals=RIVALS, steps=steps, command=results.finals,
            count=len(final), median=median, most=most, within=_within(_last_losses(results.trials)),
        )  # fmt: skip
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
    if of_hosts is not None:
        text += _of_hosts(of_hosts)
    text += "\n## Where it comes from\n\n" + _anatomies(results)
    return text + TAIL


def _of_hosts(results: Results) -> str:
    cells = [(trial, cell) for trial in results.trials for cell in trial.own]
    text = OF_HOSTS.format(
        hierarchical=sum(any("devices" in cell.network for cell in trial.own) for trial in results.trials),
        trials=len(results.trials),
        steps=_steps(cells),
        machine=results.machine,
        command=results.command,
    )
    rows = [_errors("all", [cell for _, cell in cells]), *_grouped(cells, lambda trial, cell: _shape(trial))]
    text += _table(("", *ERRORS), [*rows, *_grouped(cells, lambda trial, cell: f"{policy_of(cell)}, {backend_of(cell)}")])
    heads = ("model", "hosts", "ratio", "others", "cells", "median error", "worst", "the choice is slower than the best by")
    return text + "\n" + _table(heads, [_trial(trial) for trial in results.trials]) + OF_HOSTS_TAIL


def _steps(cells: Sequence[tuple[TrialResult, Cell]]) -> str:
    """How many measured steps each has."""
    counts = sorted({len(cell.step_ns) for _, cell in cells})
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"


def _shape(trial: TrialResult) -> str:
    return str(trial.hosts) if trial.ranks_per_host == 1 else f"{trial.hosts} x {trial.ranks_per_host}"


def _bytes(trial: TrialResult) -> float:
    """Of the model as it is meant, from the rate that gives the ratio."""
    cell = trial.cells[0]
    assert cell.link_bits_per_second is not None
    return cell.link_bits_per_second / 8 * trial.ratio * cell.compute_ns / 1e9


def _row(name: BackendName | Literal["all"], cells: list[tuple[TrialResult, Cell]], results: Results) -> tuple[str, ...]:
    backends = results.backends if name == "all" else [name]
    losses = [trial.loss_of_choice(backend) for trial in results.trials for backend in trial.backends if backend in backends]
    counts = [_within(losses)]
    if results.finals:
        judged = [trial.judged_loss_of_choice(over) for trial in results.trials for over in trial.judged if over in backends]
        counts.append(_within(judged) if judged else "-")
    return (*_errors(name, [cell for _, cell in cells]), *counts)


def _last_losses(trials: Sequence[TrialResult]) -> list[float]:
    """What each choice lost, by finals where there were any."""
    return [
        (trial.judged_loss_of_choice if backend in trial.judged else trial.loss_of_choice)(backend)
        for trial in trials for backend in trial.backends
    ]  # fmt: skip


def _within(losses: Sequence[float]) -> str:
    """How often the choice was about as fast as the best."""
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
    if trial.judged:
        losses += "; " + ", ".join(f"{trial.judged_loss_of_choice(over):.1%} ({over})" for over in trial.judged) + " in finals"
    return (
        trial.model, _shape(trial), f"{trial.ratio:g}", f"{trial.others:.0%}", str(len(trial.own)), f"{median:.1%}",
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
        "How much later than simulated tensors were ready, and how much later the last message with a part\n"
        'of a tensor started ("sent") and ended ("summed"), as a fraction of the step: the median over\n'
        "tensors of the median trial.\n\n"
    )
    rows = [(name, *(f"{statistics.median(column):+.1%}" for column in zip(*each, strict=True))) for name, each in late.items()]
    text += _table(("", *STAGES), rows)
    text += "\nThe largest gaps: how much longer (above 0) or shorter (below 0) than simulated a tensor took from\n"
    text += "one stage to the next.\n\n"
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
