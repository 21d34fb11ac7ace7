"""all_reduce of hosts that have several ranks: what their cards carry and what it takes, beside Gloo and without shared memory.

    gradlane lab --hosts 2 --ranks-per-host 4 --link 1gbit -- python -m bench.hosts 25000000

Arms take turns in one run: Gloo's group, Gloo's groups of hosts and between hosts (gloo-h), gradlane's group whose ranks all
talk to one another (flat), and the one whose hosts sum in their memory first (hosts). Each is compared with what cannot be
less: 2 (H - 1) / H of the tensor's bytes to and from each of H hosts, and the time of these at the link's rate. A card's bytes
are all that it sends meanwhile: headers, acknowledgements and pings are among them.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradlane.core.records.speedup import Speedup
from gradlane.errors import InputError
from gradlane.lab.card import sent_bytes
from gradlane.live import c10d
from gradlane.live.backends.hierarchy import Stages, hosts_of, levels_of
from gradlane.live.backends.probe_levels import BlockingSums
from gradlane.live.backends.process_groups import NewGroups, ProcessGroups
from gradlane.units import format_bytes

LAST = "hosts"
Sum = Callable[[torch.Tensor], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="all_reduce of hosts that have several ranks")
    parser.add_argument("sizes", type=int, nargs="*", default=[25_000_000], help="bytes of the tensors")
    parser.add_argument("--turns", type=int, default=6, help="of each arm")
    given = parser.parse_args()
    link = int(os.environ.get("GRADLANE_LAB_LINK") or 0)
    if not link:
        raise InputError("bench.hosts: got no shaped link, expected to run under `gradlane lab --link RATE`")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    levels = levels_of(hosts_of(dist.group.WORLD), dist.get_rank())
    if levels is None:
        raise InputError("bench.hosts: got hosts of one rank or one host, expected several of several: --ranks-per-host 2")
    groups = ProcessGroups(NewGroups(None, dist.distributed_c10d._get_default_store(), "bench"), 60.0)
    sums: dict[str, Sum] = {
        "gloo": dist.all_reduce,
        "gloo-h": BlockingSums(Stages(groups, levels)).sum,
        "flat": partial(dist.all_reduce, group=new_group(shared_memory=False)),
        LAST: partial(dist.all_reduce, group=new_group(shared_memory=True)),
    }
    hosts = len(set(names))
    if dist.get_rank() == 0:
        print(f"{hosts} hosts of {len(names) // hosts} ranks, {link / 1e6:g} Mbit/s each way; {given.turns} turns of each")
        heads = ("of least time", "MB on the fullest card", "of least bytes", "arm/hosts")
        print(f"{'size':>10} {'arm':>6} {'ms (p10..p90)':>28}", *(f"{head:>23}" for head in heads))
    for size in given.sizes:
        compare(sums, size, given.turns, hosts, names, link)
    groups.close()
    dist.destroy_process_group()


def new_group(shared_memory: bool) -> Any:
    return dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=shared_memory))


def compare(sums: dict[str, Sum], size: int, turns: int, hosts: int, names: list[str], link: int) -> None:
    """All arms in turns; rank 0 prints a row for each."""
    least = 2 * (hosts - 1) / hosts * size
    calls = max(2, min(50, 25_000_000 // size))
    data = torch.zeros(size // 4)
    times: dict[str, list[float]] = {arm: [] for arm in sums}
    medians: dict[str, list[float]] = {arm: [] for arm in sums}
    carried: dict[str, list[float]] = {arm: [] for arm in sums}
    for each in sums.values():
        each(data)
    for turn in range(turns):
        for arm in list(sums) if turn % 2 == 0 else list(sums)[::-1]:
            dist.barrier()
            before, taken = sent_bytes() or 0, torch.empty(calls, dtype=torch.float64)
            for call in range(calls):
                began = time.perf_counter()
                sums[arm](data)
                taken[call] = time.perf_counter() - began
            dist.barrier()
            sent = [0] * len(names)
            dist.all_gather_object(sent, (sent_bytes() or 0) - before)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[arm] += taken.tolist()
            medians[arm].append(statistics.median(taken.tolist()))
            carried[arm].append(max(sent) / calls)
    if dist.get_rank() == 0:
        for arm in sums:
            median, tenths = statistics.median(times[arm]), statistics.quantiles(times[arm], n=10)
            spread = f"{median * 1e3:.1f} ({tenths[0] * 1e3:.1f}..{tenths[-1] * 1e3:.1f})"
            ratio = "" if arm == LAST else f"{Speedup.of(medians[arm], medians[LAST]).ratio:.2f}"
            card = statistics.median(carried[arm])
            print(
                f"{format_bytes(size):>10} {arm:>6} {spread:>28} {median / (least * 8 / link):23.2f} {card / 1e6:23.2f} "
                f"{card / least:23.3f} {ratio:>23}",
                flush=True,
            )


if __name__ == "__main__":
    main()
