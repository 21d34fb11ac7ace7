"""all_reduce of hosts that have several ranks: what their cards carry and what it takes, beside Gloo and without shared memory.

    gradlane lab --hosts 2 --ranks-per-host 4 --link 1gbit -- python -m bench.hosts 25000000

Arms take turns in one run: Gloo's group, gradlane's group whose ranks all talk to one another (flat), and the one whose
hosts sum in their memory first (hosts). Each is compared with what cannot be less: 2 (H - 1) / H of the tensor's bytes to
and from each of H hosts, and the time of these at the link's rate. A card's bytes are all that it sends meanwhile: headers,
acknowledgements and pings are among them.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist

from gradlane.core.records.speedup import Speedup
from gradlane.errors import InputError
from gradlane.lab.card import sent_bytes
from gradlane.live import c10d
from gradlane.units import format_bytes

LAST = "hosts"


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
    groups = {
        "gloo": dist.group.WORLD,
        "flat": dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=False)),
        LAST: dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=True)),
    }
    hosts = len(set(names))
    if dist.get_rank() == 0:
        print(f"{hosts} hosts of {len(names) // hosts} ranks, {link / 1e6:g} Mbit/s each way; {given.turns} turns of each")
        heads = ("of least time", "MB on the fullest card", "of least bytes", "arm/hosts")
        print(f"{'size':>10} {'arm':>6} {'ms (p10..p90)':>28}", *(f"{head:>23}" for head in heads))
    for size in given.sizes:
        compare(groups, size, given.turns, hosts, names, link)
    dist.destroy_process_group()


def compare(
    groups: dict[str, dist.ProcessGroup | None], size: int, turns: int, hosts: int, names: list[str], link: int
) -> None:
    """All arms in turns; rank 0 prints a row for each."""
    least = 2 * (hosts - 1) / hosts * size
    calls = max(2, min(50, 25_000_000 // size))
    data = torch.zeros(size // 4)
    times: dict[str, list[float]] = {arm: [] for arm in groups}
    medians: dict[str, list[float]] = {arm: [] for arm in groups}
    carried: dict[str, list[float]] = {arm: [] for arm in groups}
    for group in groups.values():
        dist.all_reduce(data, group=group)
    for turn in range(turns):
        for arm in list(groups) if turn % 2 == 0 else list(groups)[::-1]:
            dist.barrier()
            before, taken = sent_bytes() or 0, torch.empty(calls, dtype=torch.float64)
            for call in range(calls):
                began = time.perf_counter()
                dist.all_reduce(data, group=groups[arm])
                taken[call] = time.perf_counter() - began
            dist.barrier()
            sent = [0] * len(names)
            dist.all_gather_object(sent, (sent_bytes() or 0) - before)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[arm] += taken.tolist()
            medians[arm].append(statistics.median(taken.tolist()))
            carried[arm].append(max(sent) / calls)
    if dist.get_rank() == 0:
        for arm in groups:
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
