"""Sessions on the devices of this machine: `python -m tests.device [--only NAME] [--jobs N] [--limit SECONDS]`.

Finds what there is. With one GPU, two ranks share it over Gloo and over gradlane's transport, and one rank trains over
NCCL; with several, NCCL has a rank for each. Each check has a name, runs on real ranks and is compared with torch's DDP.
Without a GPU every check is skipped with its reason; --stand-in runs on the CPU, taken for a device with streams, those
that make sense there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.device.catalog import LOOPS, checks, is_wanted, why_not
from tests.device.deadline import Deadline
from tests.device.machine import STAND_IN, found, setups
from tests.device.results import Results, Row, table
from tests.device.runner import run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="a family of checks, or a part of a check's name")
    parser.add_argument("--group", choices=("gloo", "nccl"), help="ranks with this process group alone (default: both)")
    parser.add_argument("--all-loops", action="store_true", help="every loop of tests/live/loops; some make tensors on the CPU")
    parser.add_argument("--jobs", type=int, default=4, help="checks at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="for all (default: %(default)s)")
    parser.add_argument("--stand-in", action="store_true", help="take the CPU for a device with streams")
    parser.add_argument("--out", type=Path, default=Path("out/device/tests.json"), help="(default: %(default)s)")
    given = parser.parse_args()
    began, deadline = time.monotonic(), Deadline(given.limit)
    machine = found(tries_nccl=given.group != "gloo")
    results = Results(given.out, machine, given.stand_in)
    cards = ", ".join(machine.cards) or "no CUDA device"
    print(f"{cards}; driver {machine.driver or 'none'}; torch {machine.torch}; {machine.processors} cores", flush=True)
    loops = LOOPS
    if given.all_loops:
        from tests.live.loops import LOOPS as ALL

        loops = tuple(name for name, loop in ALL.items() if not loop.refused)
    wanted = []
    for setup in [STAND_IN] if given.stand_in else setups(machine):
        if given.group not in (None, setup.group):
            continue
        for check in checks(setup, loops):
            if given.only and not is_wanted(check, given.only):
                continue
            reason = why_not(check, machine)
            if reason:
                row = Row(check.family, check.name, check.carrier, setup.group, setup.ranks, "skipped", 0.0, reason)
                results.rows.append(row)
            else:
                wanted.append(check)
    # those with ranks of their own first, and all of one set of ranks together
    run(sorted(wanted, key=lambda check: not check.apart and check.family != "compiled"), results, deadline, given.jobs)
    results.save()
    print(f"\n{table(results.rows)}\n{time.monotonic() - began:.0f} s; wrote {given.out}")
    return 0 if results.all_is_well else 1


if __name__ == "__main__":
    sys.exit(main())
