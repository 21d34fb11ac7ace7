"""Messages between two ranks over gradlane's backend beside torch's Gloo.

Run by `python -m bench`, or alone by `python -m torch.distributed.run --nproc-per-node 2 -m bench.messages`.
Ping-pong: ranks 0 and 1 send a message there and back; the time is half of it. Ring: every rank sends to the next and receives
from the one before with `batch_isend_irecv`. Each turn is some of them by one arm, arms in alternating order.
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist

import gradlane.live.c10d  # noqa: F401 (makes the name known)
from bench.c10d import compare
from gradlane.units import format_bytes

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


def ping_pong(group: dist.ProcessGroup, data: torch.Tensor, count: int) -> list[float]:
    rank, taken = dist.get_rank(), []
    for _ in range(count):
        began = time.perf_counter()
        if rank == 0:
            dist.send(data, 1, group)
            dist.recv(data, 1, group)
        elif rank == 1:
            dist.recv(data, 0, group)
            dist.send(data, 0, group)
        taken.append((time.perf_counter() - began) / 2)
    return taken


def ring(group: dist.ProcessGroup, data: torch.Tensor, count: int) -> list[float]:
    rank, world, taken = dist.get_rank(), dist.get_world_size(), []
    into = torch.empty_like(data)
    for _ in range(count):
        began = time.perf_counter()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, data, (rank + 1) % world, group),
                dist.P2POp(dist.irecv, into, (rank - 1) % world, group),
            ]
        )
        for work in works:
            work.wait()
        taken.append(time.perf_counter() - began)
    return taken


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "gradlane": dist.new_group(backend="gradlane")}
    talks = dist.get_rank() == 0
    for what in (ping_pong, ring):
        if talks:
            name = "ping-pong, half of a round trip" if what is ping_pong else "ring of batch_isend_irecv"
            print(f"\nmessages on one host, {dist.get_world_size()} ranks: {name}, Gloo beside gradlane")
            heads = f"{'Gloo ms (p10..p90)':>26} {'gradlane ms (p10..p90)':>26} {'Gloo/gradlane':>13} {'CPU s/GB each':>15}"
            print(f"{'what':>12} {heads}")
        for size_bytes in SIZES:
            data = torch.zeros(size_bytes, dtype=torch.uint8)
            count = max(3, min(100, (16 << 20) // size_bytes))
            compare(
                format_bytes(size_bytes), {arm: partial(what, groups[arm], data) for arm in groups}, count, talks, size_bytes
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
