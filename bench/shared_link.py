"""How torch's Gloo shares a link among all-reduces that start together: when each ends, beside what `sim.shared_link` says.

    python -m bench.shared_link [HOSTS [LINK]]

Hosts are a lab's. Times are parts of the time of all messages together, so that rate and headers do not matter.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from gradlane import lab
from gradlane.core.network import CostSegment, Network, Sharing
from gradlane.sim.shared_link import SharedLink
from gradlane.units import format_bytes, parse_rate

MIB = 2**20
CASES = ((4 * MIB, 4 * MIB), (4 * MIB, 65_536), (8 * MIB, 2 * MIB), (2 * MIB, 8 * MIB), (32 * MIB, 65_536), (2 * MIB,) * 4)


def rank() -> None:
    import torch
    import torch.distributed as dist

    from gradlane.live.backends.probe import sharing

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group()
    for sizes in CASES:
        for _ in range(2):  # by the first the connections have found their pace
            ends = run(group, sizes)
        if dist.get_rank() == 0:
            expected = simulated(sizes, dist.get_world_size(), sharing(group, torch.device("cpu")))
            row = ("  ".join(f"{end / max(times):5.2f}" for end in times) for times in (ends, expected))
            print(
                f"{' + '.join(format_bytes(size) for size in sizes):34s}  measured {next(row)}   simulated {next(row)}",
                flush=True,
            )
    dist.destroy_process_group()


def run(group: Any, sizes: tuple[int, ...]) -> list[int]:
    import torch
    import torch.distributed as dist

    data = [torch.zeros(size // 4) for size in sizes]
    ends = [0] * len(sizes)
    dist.barrier(group)
    began = time.monotonic_ns()
    futures = []
    for place, each in enumerate(data):
        future = dist.all_reduce(each, group=group, async_op=True).get_future()
        futures.append(future.then(lambda _, place=place: ends.__setitem__(place, time.monotonic_ns() - began)))
    for future in futures:
        future.wait()
    return ends


def simulated(sizes: tuple[int, ...], workers: int, sharing: Sharing) -> list[int]:
    turns = SharedLink(Network(workers, (CostSegment(0, 10**9),), sharing=sharing))
    ends = [0] * len(sizes)
    for message, size in enumerate(sizes):
        turns.add(0, message, size, 0)
    while not all(ends):
        now_ns = turns.next_ns()
        ended = turns.run()
        if ended is not None:
            ends[ended] = now_ns
    return ends


def main(hosts: int = 2, link: str = "400mbit") -> int:
    print(f"{hosts} hosts, {link} links: when each message ended, as a part of when all had")
    return lab.run(
        lab.LabSpec(hosts, parse_rate(link)), [sys.executable, "-m", "bench.shared_link"], env={**os.environ, "BENCH_RANK": "1"}
    )


if __name__ == "__main__":
    if os.environ.get("BENCH_RANK"):
        rank()
    else:
        sys.exit(main(*(convert(text) for convert, text in zip((int, str), sys.argv[1:], strict=False))))
