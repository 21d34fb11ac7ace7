"""A DDP script under torch's DistributedDataParallel and under gradlane's in its place: what a step costs, in turns.

    python -m bench.drop_in [--policy NAME] [--turns 20] SCRIPT [ARGS]...

SCRIPT is as for `gradlane launch --ddp`. ARGS have to make it long, as in `tests/live/scripts/ddp/vision.py --epochs 100000`;
when the turns are over, it is ended. Each class has two ranks on loopback, in processes that stay; one class's are at work at a
time, for some steps a turn. A step lasts from one return of the first optimizer's `step()` to the next. Turns begin after 200
steps, and once `auto` has kept a policy; where it looks again, that is timed too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from bench.versions import Arm, ratio, spread
from gradlane.core.launch_options import LAUNCH_VARIABLE, LaunchOptions

WARM_UP, STEPS = 200, 20  # steps before the first turn, and of a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    command = [sys.executable, "-m", "bench.drop_in", "--rank", given.script, *given.arguments]
    with contextlib.ExitStack() as stack:
        classes = (LaunchOptions(), LaunchOptions(ddp=True, policy=given.policy))
        arms = [Arm(command, stack, OMP_NUM_THREADS="1", **{LAUNCH_VARIABLE: options.to_text()}) for options in classes]
        times: list[list[float]] = [[], []]
        for turn in range(given.turns):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                times[which].append(arms[which].turn())
    print(f"{given.script}: torch's {spread(times[0])} ms, gradlane's {spread(times[1])} ms, ratio {ratio(times[1], times[0])}")


def rank(script: list[str]) -> None:
    """One rank: runs `script` from turn to turn, whose lines alone go to its standard output."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from gradlane.live.startup import boot

    answers, sys.stdout = sys.stdout, sys.stderr
    turns = _turns(answers)
    first: list[Any] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not first:
            first.append(optimizer)
        if optimizer is first[0]:
            next(turns)

    register_optimizer_step_post_hook(stepped)
    boot.main(script)
    sys.exit(f"{script[0]} ended before the turns were over; give it arguments with which it runs longer")


def _turns(answers: TextIO) -> Iterator[None]:
    """Resumed at the end of each step; ends the process when no turn is left."""
    for _ in range(WARM_UP):
        yield
    while _is_tuning():
        for _ in range(STEPS):
            yield
    print(file=answers, flush=True)
    for _ in sys.stdin:
        yield  # this step's sums had the time between the turns
        marks = [time.perf_counter_ns()]
        for _ in range(STEPS):
            yield
            marks.append(time.perf_counter_ns())
        print(statistics.median(end - start for start, end in itertools.pairwise(marks)) / 1e6, file=answers, flush=True)
    sys.exit()


def _is_tuning() -> bool:
    """Whether a session of this process tries policies; the same on all ranks."""
    import gradlane

    wrapped = [each for each in gc.get_objects() if type(each) is gradlane.DistributedDataParallel]
    return any(each.session is not None and each.session.tuning for each in wrapped)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2:])
    else:
        main()
