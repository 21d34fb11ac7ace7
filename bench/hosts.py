"""Hosts that have several ranks: what their cards carry and what it takes, beside Gloo and without shared memory.

    gradlane lab --hosts 2 --ranks-per-host 4 --link 1gbit -- python -m bench.hosts 25000000
    gradlane lab --hosts 2 --ranks-per-host 4 --link 1gbit -- python -m bench.hosts --session mercury 25000000

The first measures `all_reduce`: of Gloo's group, of Gloo's groups of hosts and between hosts (gloo-h), of gradlane's group
whose ranks all talk to one another (flat), and of the one whose hosts sum in their memory first (hosts). The second measures
a training step with next to no computing, whose gradients are tensors of 1 MB: of one rank alone, which sums nothing, of DDP
over Gloo, and of sessions over servers beside the ranks, flat and by hosts, under a policy.

Arms take turns in one run. Each is compared with what cannot be less: 2 (H - 1) / H of the tensor's bytes to
and from each of H hosts, and the time of these at the link's rate. A card's bytes are all that it sends meanwhile: headers,
acknowledgements and pings are among them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradlane
from gradlane.core.network import Network
from gradlane.core.records.speedup import Speedup
from gradlane.errors import InputError
from gradlane.lab.card import sent_bytes
from gradlane.live import c10d
from gradlane.live.backends.hierarchy import Stages, hosts_of, levels_of
from gradlane.live.backends.probe_levels import BlockingSums
from gradlane.live.backends.process_groups import NewGroups, ProcessGroups
from gradlane.units import format_bytes

LAST = "hosts"
Arms = dict[str, Callable[[], None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=[25_000_000], help="bytes of the tensors, or of all gradients")
    parser.add_argument(
        "--hierarchical", action="store_true", help="the arm gloo-h too, beside which others take a twentieth longer"
    )
    parser.add_argument("--session", metavar="POLICY", help="measure steps of sessions under this policy")
    parser.add_argument("--turns", type=int, default=6, help="of each arm")
    given = parser.parse_args()
    link = int(os.environ.get("GRADLANE_LAB_LINK") or 0)
    if not link:
        raise InputError("bench.hosts: got no shaped link, expected to run under `gradlane lab --link RATE`")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    hosts = len(set(names))
    if dist.get_rank() == 0:
        print(f"{hosts} hosts of {len(names) // hosts} ranks, {link / 1e6:g} Mbit/s each way; {given.turns} turns of each")
        heads = ("of least time", "MB on the fullest card", "of least bytes", "arm/hosts")
        print(f"{'size':>10} {'arm':>6} {'ms (p10..p90)':>28}", *(f"{head:>23}" for head in heads))
    with contextlib.ExitStack() as stack:
        groups = {} if given.session else collectives(stack, given.hierarchical)
        for size in given.sizes:
            arms: Arms = {arm: partial(call, size) for arm, call in groups.items()}
            if given.session:
                arms = steps(size, given.session, stack)
            compare(arms, size, given.turns, hosts, names, link)
    dist.destroy_process_group()


def collectives(stack: contextlib.ExitStack, hierarchical: bool) -> dict[str, Callable[[int], None]]:
    """By arm: sums so many bytes."""
    sums: dict[str, Callable[[torch.Tensor], Any]] = {"gloo": dist.all_reduce}
    if hierarchical:
        levels = levels_of(hosts_of(dist.group.WORLD), dist.get_rank())
        if levels is None:
            raise InputError("bench.hosts: got hosts of one rank or one host, expected several of several: --ranks-per-host 2")
        gloo = ProcessGroups(NewGroups(None, dist.distributed_c10d._get_default_store(), "bench"), 60.0)
        stack.callback(gloo.close)
        sums["gloo-h"] = BlockingSums(Stages(gloo, levels)).sum
    sums |= {
        "flat": partial(dist.all_reduce, group=new_group(shared_memory=False)),
        LAST: partial(dist.all_reduce, group=new_group(shared_memory=True)),
    }
    data: dict[int, torch.Tensor] = {}

    def call(arm: str, size: int) -> None:
        sums[arm](data.setdefault(size, torch.zeros(size // 4)))

    return {arm: partial(call, arm) for arm in sums}


def new_group(shared_memory: bool) -> Any:
    return dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=shared_memory))


class Parameters(nn.Module):
    """`size` bytes of parameters in tensors of 1 MB, whose gradients take no computing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        counts = [min(250_000, size // 4 - begin) for begin in range(0, size // 4, 250_000)]
        self.all = nn.ParameterList(torch.zeros(count) for count in counts)

    def forward(self) -> torch.Tensor:
        return torch.stack([each[:1].sum() for each in self.all]).sum()


def steps(size: int, policy: str, stack: contextlib.ExitStack) -> Arms:
    """By arm: a training step whose gradients have so many bytes; returns when all sums are there."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, session: Any) -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if session is not None:
            session.flush()

    calls: Arms = {}
    for arm in ("alone", "ddp", "flat", LAST):
        model: nn.Module = Parameters(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session: Any = None
        if arm == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif arm != "alone":
            os.environ["GRADLANE_SHARED_MEMORY"] = "1" if arm == LAST else "0"
            network = Network.line(dist.get_world_size(), 100_000, 10**8)
            session = stack.enter_context(gradlane.attach(model, optimizer, policy, backend="server", network=network))
        calls[arm] = partial(step, model, optimizer, session)
        for _ in range(12):
            calls[arm]()
    return calls


def compare(arms: Arms, size: int, turns: int, hosts: int, names: list[str], link: int) -> None:
    """All arms in turns; rank 0 prints a row for each."""
    least = 2 * (hosts - 1) / hosts * size
    calls = max(2, min(50, 25_000_000 // size))
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    medians: dict[str, list[float]] = {arm: [] for arm in arms}
    carried: dict[str, list[float]] = {arm: [] for arm in arms}
    for call in arms.values():
        call()
    for turn in range(turns):
        for arm in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
            dist.barrier()
            before, taken = sent_bytes() or 0, torch.empty(calls, dtype=torch.float64)
            for number in range(calls):
                began = time.perf_counter()
                arms[arm]()
                taken[number] = time.perf_counter() - began
            dist.barrier()
            sent = [0] * len(names)
            dist.all_gather_object(sent, (sent_bytes() or 0) - before)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[arm] += taken.tolist()
            medians[arm].append(statistics.median(taken.tolist()))
            carried[arm].append(max(sent) / calls)
    if dist.get_rank() == 0:
        for arm in arms:
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
