"""Kills and forks at random moments, 200 of each where not told otherwise: no partial sum, nobody else blamed, nobody hung.

    python -m bench.kills              200 workers killed at random moments of an iteration, 200 forks in mid-flight
    python -m bench.kills --times 20

Every member asserts of each sum that was reported done, before the failure too, that it is the whole sum.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time

from tests.transport.jobs import each_with_a_server, job
from tests.transport.test_deaths import _keep_forking

WORLD = 3


def kill_one(seed: int) -> tuple[float, str]:
    """Seconds until the last survivor had raised, and what was wrong, if anything."""
    chance = random.Random(seed)
    culprit = chance.randrange(WORLD)
    with job(each_with_a_server(WORLD)) as running:
        for member in running.members:
            member.begin("iterate_until_failure")
        time.sleep(chance.uniform(0, 0.05))
        at = running[culprit].signal(signal.SIGKILL)
        outcomes = [running[rank].outcome() for rank in range(WORLD) if rank != culprit]
    wrong = [
        f"{end.error} of rank {end.rank}: {end.text}" for end in outcomes if (end.error, end.rank) != ("PeerDied", culprit)
    ]
    return max(end.at for end in outcomes) - at, "; ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=200)
    times = parser.parse_args().times
    seconds, wrong = [], []
    for seed in range(times):
        took_s, fault = kill_one(seed)
        seconds.append(took_s)
        wrong += [f"seed {seed}: {fault}"] if fault else []
        print(f"\r{seed + 1} of {times} kills, {len(wrong)} with something wrong", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    median, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    print(f"{times} kills: {len(wrong)} wrong; all others had raised after {median:.0f} ms (median), {worst:.0f} ms (most)")
    for line in wrong[:10]:
        print(line)
    with job(each_with_a_server(2)) as running:
        running[0].begin("apply", _keep_forking, times)
        running[1].begin("iterate", times)
        ends = [running[rank].outcome(600) for rank in (0, 1)]
    if any(end.error for end in ends):
        print(f"{times} forks: {[end.text for end in ends]}")
        return 1
    faults, worst_s = ends[0].value
    print(
        f"{times} forks in mid-flight: {faults} children with a connection of their parent's; "
        f"the slowest child took {worst_s * 1e3:.0f} ms"
    )
    return 1 if wrong or faults else 0


if __name__ == "__main__":
    sys.exit(main())
