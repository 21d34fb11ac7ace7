"""Two versions of gradlane beside one another: what a step costs under each, in turns.

    python -m bench.versions OTHER_PYTHON [--policy blocks] [--backend all-reduce] [--turns 40]

OTHER_PYTHON: the interpreter of another environment, in which another version is installed. Each version trains on two
ranks on loopback, in processes that stay; of the four one version's are at work at a time, a few steps a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.ports import free_port

STEPS, WARM_UP = 6, 200  # of a turn, and before the first one
# square layers, and their width
STACKS = {"467 tensors of 4 KB": (467, 32), "161 tensors of 64 KB": (161, 128), "24 tensors of 1 MB": (24, 512)}
NETS = ("467 tensors of 4 KB", "the demo's network")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other_python")
    parser.add_argument("--policy", default="blocks")
    parser.add_argument("--backend", default="all-reduce")
    parser.add_argument("--turns", type=int, default=40)
    given = parser.parse_args()
    for net in NETS:
        with contextlib.ExitStack() as stack:
            pythons = (given.other_python, sys.executable)
            arms = [Arm(of_stack(python, net, given.policy, given.backend), stack) for python in pythons]
            times: list[list[float]] = [[], []]
            for turn in range(given.turns):
                for which in (0, 1) if turn % 2 == 0 else (1, 0):
                    times[which].append(arms[which].turn())
        print(
            f"{net}, {given.policy} over {given.backend}: other {spread(times[0])} ms, this {spread(times[1])} ms, "
            f"this/other {ratio(times[1], times[0])}",
            flush=True,
        )


def ratio(times: list[float], others: list[float]) -> str:
    """How many times as long `times` are as `others` of the same turns, and the middle half of the ratios."""
    from gradlane.core.records.speedup import Speedup  # ranks run this file under earlier versions, which have none

    found = Speedup.of(times, others)
    return f"{found.ratio:.3f} (pairs p25..p75 {found.low:.3f}..{found.high:.3f})"


def of_stack(python: str, net: str, policy: str, backend: str) -> list[str]:
    """The command of a rank that trains `net`.

    policy "torch-ddp": plain DistributedDataParallel; the backend is ignored. backend "any": none is named.
    """
    return [python, "-m", "bench.versions", "--rank", net, policy, backend]


class Arm:
    """Two ranks that run one command, and take a turn when they are told to.

    A rank prints a line when it is ready, and then one for each line that it reads: the median step of a turn, in milliseconds.

    Args:
        command: of each rank.
        stack: what ends the ranks.
        variables: of their environment, beside those of torchrun.

    Attributes:
        first_ms: how long each of the first steps took, on rank 0.
    """

    def __init__(self, command: Sequence[str], stack: contextlib.ExitStack, **variables: str) -> None:
        port = free_port()
        self._ranks = []
        for rank in range(2):
            environment = {
                **os.environ,
                **variables,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(process.wait)
            stack.callback(process.stdin.close)  # type: ignore[union-attr]
            self._ranks.append(process)
        self.first_ms = [float(each) for each in self._answers()[0].split()]
        self.turn()

    def turn(self) -> float:
        """The median step of a few, in milliseconds, on rank 0."""
        for process in self._ranks:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return float(self._answers()[0])

    def _answers(self) -> list[str]:
        found = [process.stdout.readline() for process in self._ranks]  # type: ignore[union-attr]
        if not all(found):
            sys.exit("a rank has ended; what it printed says why")
        return found


def rank(net: str, policy: str, backend: Any) -> None:
    """One rank: a turn for each line that comes."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import gradlane

    try:
        from gradlane.compare.demo import DigitsNet
    except ImportError:  # where it was in earlier versions
        from gradlane.live.demo import DigitsNet  # type: ignore[no-redef,import-not-found]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if net in STACKS:
        layers, width = STACKS[net]
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        inputs = torch.randn(2, width)
    else:
        model, inputs = DigitsNet(), torch.randn(8, 1, 32, 32)
    trained: nn.Module
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if policy == "torch-ddp":
        trained, session = nn.parallel.DistributedDataParallel(model), None
    else:
        named = {} if backend == "any" else {"backend": backend}
        trained, session = model, gradlane.attach(model, optimizer, policy, **named)

    def steps(count: int) -> list[int]:
        marks = [time.perf_counter_ns()]
        for _ in range(count):
            optimizer.zero_grad()
            trained(inputs).square().mean().backward()
            optimizer.step()
            marks.append(time.perf_counter_ns())
        return [end - start for start, end in itertools.pairwise(marks)]

    first = steps(WARM_UP)
    while session is not None and getattr(session, "tuning", False):
        steps(10)
    print(*(taken / 1e6 for taken in first), flush=True)
    for _ in sys.stdin:
        if session is not None:
            session.flush()
        dist.barrier()
        print(statistics.median(steps(STEPS)) / 1e6, flush=True)
    if session is not None:
        session.close()
    dist.destroy_process_group()


def spread(times: list[float]) -> str:
    """Median, 10th and 90th percentile."""
    tenths = statistics.quantiles(times, n=10)
    return f"{statistics.median(times):.2f} ({tenths[0]:.2f}..{tenths[-1]:.2f})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*sys.argv[2:])
    else:
        main()
