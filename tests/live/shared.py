"""What the ranks of test_shared.py do: the same sums through the host's memory and over loopback, and ranks that end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import GradlaneError
from gradlane.live import c10d

SHARED, LOOPBACK = c10d.Options(shared_memory=True), c10d.Options(shared_memory=False, rank_order=True)


def both(rank: int, world: int, dtype: str, op: str, sizes: list[int]) -> bool:
    """Whether sums of noise have the same bits through the host's memory as over loopback in rank order."""
    torch.manual_seed(rank)
    given = [(torch.randn(size) * 50).to(getattr(torch, dtype)) for size in sizes]
    results = []
    for options in (SHARED, LOOPBACK):
        group = dist.new_group(backend="gradlane", pg_options=options)
        mine = [tensor.clone() for tensor in given]
        works = [dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group, async_op=True) for tensor in mine]
        for work in works:
            work.wait()
        results.append(mine)
        dist.destroy_process_group(group)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*results, strict=True))


def carried(rank: int, world: int, shared: bool) -> int:
    """Bytes that this rank's node sends for an all-reduce of 4 MB."""
    group: Any = dist.new_group(backend="gradlane", pg_options=SHARED if shared else LOOPBACK)
    before = group._node.stats()["sent_bytes"]
    dist.all_reduce(torch.ones(1_000_000), group=group)
    dist.barrier()  # what this rank sends to others, they have
    sent = group._node.stats()["sent_bytes"] - before
    dist.destroy_process_group(group)
    return int(sent)


def silent(rank: int, world: int, how: str, what: str) -> tuple[str, int, float]:
    """The last rank is killed or stopped in the middle of sums or messages; what the others hear, whom it names, and after
    how long.
    """
    group = dist.new_group(backend="gradlane", pg_options=c10d.Options(stall_timeout=2.5))
    data, last = torch.ones(4_000_000), world - 1

    def go_on() -> None:
        if what == "sums":
            dist.all_reduce(data, group=group)
        elif rank != last:
            dist.recv(data, last, group)
        else:
            works = [dist.isend(data, other, group) for other in range(last)]
            for work in works:
                work.wait()

    go_on()
    if rank == last:
        go_on()  # the others have begun the next by now, or soon will
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    began = time.monotonic()
    try:
        for _ in range(1000):
            go_on()
    except GradlaneError as error:
        return type(error).__name__, getattr(error, "rank", -1), time.monotonic() - began
    return "", -1, 0.0


def paused(rank: int, world: int, pause_s: float, shared: bool) -> tuple[bool, bool]:
    """The last rank is stopped for so long amid sums; whether it was, and whether all sums until then and after are right."""
    group = dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=shared))
    pausing = None
    right, went_on = True, torch.ones(1)
    while went_on.item():
        data = torch.ones(1000)
        dist.all_reduce(data, group=group)
        right &= bool((data == world).all())
        if rank == world - 1 and pausing is None:
            me = os.getpid()
            pausing = subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep {pause_s}; kill -CONT {me}"])
        went_on.fill_(rank == world - 1 and pausing is not None and pausing.poll() is None)
        dist.all_reduce(went_on, group=group)
    dist.destroy_process_group(group)
    return pausing is None or pausing.returncode == 0, right


def limited(rank: int, world: int) -> tuple[str, str]:
    """Rank 0 may make no file of a megabyte, not even one without a name; what each rank hears before the first sum."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        dist.new_group(backend="gradlane", pg_options=SHARED, timeout=timedelta(seconds=20))
    except GradlaneError as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", ""


def exchanged(rank: int, world: int, shared: bool) -> int:
    """Bytes that this rank's node sends for messages of 4 MB and of 8 bytes to the next rank."""
    group: Any = dist.new_group(backend="gradlane", pg_options=SHARED if shared else LOOPBACK)
    before = group._node.stats()["sent_bytes"]
    for size in (1_000_000, 2):
        data, into = torch.full((size,), float(rank)), torch.empty(size)
        send = dist.isend(data, (rank + 1) % world, group)
        dist.recv(into, (rank - 1) % world, group)
        send.wait()
        assert (into == (rank - 1) % world).all()
    sent = group._node.stats()["sent_bytes"] - before
    dist.destroy_process_group(group)
    return int(sent)


def mixed(rank: int, world: int) -> tuple[str, str]:
    """Rank 0 shares memory, and the others do not."""
    try:
        dist.new_group(backend="gradlane", pg_options=c10d.Options(shared_memory=rank == 0), timeout=timedelta(seconds=20))
    except GradlaneError as error:
        return type(error).__name__, str(error)
    return "", ""


def main() -> None:
    """Rank 0 prints what each rank sent over its sockets."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sent, torch.tensor([carried(rank, world, shared=True)]))
    if rank == 0:
        print(*(int(each) for each in sent))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
