"""Many small tensors, or some larger ones, and next to no computing: what a step costs beside torch DDP, in turns.

    python -m bench.small_tensors [--turns 20] [--nets 467,161] [ARM...]

ARM: a policy and what carries its messages, as mercury@server, or auto@any; without any, those of bench/notes/overhead.md.
Servers sum through the memory of the host; with mercury@server@loopback they do not (GRADLANE_SHARED_MEMORY=0).
Each arm trains on two ranks, in processes that stay; of all arms' processes two are at work at a time, a few steps a turn.
The last column says how much longer the first 200 iterations took than so many of those that came after `auto` had settled:
what measuring and looking cost.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys

from bench.versions import STACKS, Arm, of_stack, ratio, spread

ARMS = ("auto@any", "blocks@all-reduce", "blocks@server", "mercury@server", "bytescheduler@server")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", metavar="ARM")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--nets", default="467,161", help="by numbers of tensors: " + ", ".join(STACKS))
    given = parser.parse_args()
    nets = [net for net in STACKS if net.split()[0] in given.nets.split(",")]
    names = ["torch-ddp@all-reduce", *(given.arms or ARMS)]
    for net in nets:
        with contextlib.ExitStack() as stack:
            arms = [
                Arm(of_stack(sys.executable, net, policy, backend), stack, GRADLANE_SHARED_MEMORY="0" if rest else "1")
                for policy, backend, *rest in (name.split("@") for name in names)
            ]
            times: list[list[float]] = [[] for _ in arms]
            for turn in range(given.turns):
                for place in range(len(arms)):
                    which = (place + turn) % len(arms)
                    times[which].append(arms[which].turn())
        print(f"{net}: torch-ddp {spread(times[0])} ms")
        for name, arm, taken in zip(names[1:], arms[1:], times[1:], strict=True):
            lost = sum(arm.first_ms) / (len(arm.first_ms) * statistics.median(taken)) - 1
            print(f"  {name:32s} {spread(taken)} ms, of DDP's {ratio(taken, times[0])}, at first {lost:+.1%}", flush=True)


if __name__ == "__main__":
    main()
