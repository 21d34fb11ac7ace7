"""Runs seeds of the simulated control channel, and says which of them break a promise.

    python -m tests.faults --seeds 100000                   that many, from 0
    python -m tests.faults --from 4711 --seeds 1 --trace    one, and what happens in it
    python -m tests.faults --mutant PassesNothingOn         with a defect: how many seeds until it is found?

A seed that fails prints what happened and what is wrong, and does the same again each time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.faults.job import TODAY, Ways
from tests.faults.mutants import MUTANTS
from tests.faults.runs import report, run

PROGRESS_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2000, metavar="NUMBER", help="how many (2000)")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED", help="the first (0)")
    parser.add_argument("--trace", action="store_true", help="print what happens in every seed")
    parser.add_argument("--most", type=int, default=1, metavar="NUMBER", help="end when so many have failed (1)")
    parser.add_argument("--mutant", choices=MUTANTS, metavar="NAME", help=f"run ranks with a defect: {', '.join(MUTANTS)}")
    options = parser.parse_args()
    ways: Ways = MUTANTS[options.mutant] if options.mutant else TODAY
    began = told = time.monotonic()
    failed, done, ends = 0, 0, Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        job, wrong = run(seed, ways, options.trace)
        done += 1
        failed += bool(wrong)
        ends.update(type(rank.error).__name__ if rank.error else rank.state for rank in job.ranks)
        if wrong or options.trace:
            print(report(seed, ways))
        if failed == options.most:
            break
        if time.monotonic() > told + PROGRESS_S:
            told = time.monotonic()
            print(f"{done} of {options.seeds} seeds, {failed} failed", file=sys.stderr)
    how = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    print(f"{done} seeds in {time.monotonic() - began:.1f} s, {failed} failed; scripts ended: {how}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
