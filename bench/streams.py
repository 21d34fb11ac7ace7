"""What a message costs over servers beside the ranks: through the memory of the host, and over connections.

    torchrun --nproc-per-node 2 -m bench.streams

For each size, streams of 16 messages with four in flight, as a session has them, and with one: each begins when the one
before has ended. The ways take turns; each figure is the median of the turns, on rank 0, in microseconds a message.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from gradlane.live.backends.parameter_server import ParameterServerBackend
from gradlane.live.backends.process_groups import NewGroups
from gradlane.transport import NodeOptions

SIZES = (64, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
TURNS = 9


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = {"memory": connect("memory", True), "connections": connect("connections", False)}
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, us a message\n{'bytes':>10} {'in flight':>10} {'memory':>10} {'connections':>12}"
        )
    for size in SIZES:
        for in_flight in (4, 1):
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(TURNS):
                for way in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                    dist.barrier()
                    spent_ns = ways[way].time_stream(size, in_flight)
                    taken[way].append(spent_ns * size / ways[way].stream_bytes(size) / 1000)
            if dist.get_rank() == 0:
                memory, connections = (statistics.median(taken[way]) for way in ways)
                print(f"{size:10d} {in_flight:10d} {memory:10.1f} {connections:12.1f}", flush=True)
    for backend in ways.values():
        backend.close(None)
    dist.destroy_process_group()


def connect(name: str, shared_memory: bool) -> ParameterServerBackend:
    """A backend of its own."""
    groups = NewGroups(None, dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store()), name)
    rank, world = dist.get_rank(), dist.get_world_size()
    return ParameterServerBackend(groups, NodeOptions(world, world, rank, rank), 60.0, shared_memory=shared_memory)


if __name__ == "__main__":
    main()
