"""Ranks of training jobs killed at random moments: is each named by all others, how soon, and was any sum partial?

    python -m bench.session_kills                200 jobs of 2 or 4 ranks and 25 MiB of gradients
    python -m bench.session_kills --times 20 --first 100

The job's seed chooses its ranks, policy and backend, whom to kill, rank 0 among them, and when: from the moment at which the
ranks have met in `attach`, so that some die before the first step. A survivor's parameters must be what whole sums make of
them, all of one step, or refuse to be read.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from gradlane.planning import catalog
from tests.live.phases import Job, misnamed
from tests.live.script_server import ScriptServer

WITHIN_S = 70.0  # longer than `timeout`, after which every wait is an error
LATEST_S = 4.0
CHOICES = (
    *((policy, "all-reduce") for policy in catalog.names("all-reduce") if policy != "searched"),
    *((policy, "server") for policy in catalog.names("server") if policy != "searched"),
    ("auto", "both"),
)


def kill_one(server: ScriptServer, seed: int) -> tuple[str, float, list[str]]:
    """What was run, seconds until the last survivor had ended, and what was wrong."""
    chance = random.Random(seed)
    world = chance.choice((2, 4))
    policy, backend = chance.choice(CHOICES)
    culprit = chance.randrange(world)
    after_s = chance.uniform(0, LATEST_S)
    others = [rank for rank in range(world) if rank != culprit]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(server, Path(folder), "endless.py", world, policy, backend)
        try:
            for rank in range(world):
                job.line(rank)
            time.sleep(after_s)
            job.signal(culprit, signal.SIGKILL)
            ends = job.ends_so_far(others, WITHIN_S)
            said = [job.printed(rank) for rank in others]
        finally:
            job.close()
    wrong = misnamed(dict(zip(others, ends, strict=True)), culprit, "KILL", "steady")
    wrong += [line for printed in said for line in printed.splitlines() if line.startswith("wrong")]
    seconds = max(WITHIN_S if end is None else end.after_s for end in ends)
    return f"{policy} over {backend}, rank {culprit} of {world} after {after_s:.2f} s", seconds, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200, help="jobs (200)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (0)")
    options = parser.parse_args()
    server, seconds, failed = ScriptServer(), [], 0
    for seed in range(options.first, options.first + options.times):
        what, took_s, wrong = kill_one(server, seed)
        seconds.append(took_s)
        failed += bool(wrong)
        print(f"{seed}: {what}: {took_s:.2f} s", *wrong, sep="\n  ", file=sys.stderr, flush=True)
    server.close()
    median, worst = statistics.median(seconds), max(seconds)
    print(
        f"{options.times} kills, {failed} with something wrong; all others had ended after {median:.2f} s (median), "
        f"{worst:.2f} s (most)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
