"""How the size of a packet tells on an iteration (Mercury Fig. 17), on emulated hosts and devices.

    gradlane lab --hosts 2 --link 1gbit -- python -m bench.packets [MODEL [SCALE [COMPUTE_PERCENT [ROUNDS]]]]

Each rank has a worker and a server, under the policy mercury. The sizes take turns, ROUNDS times over; of each turn the
first iterations, until its plan is in force and its connections have found their rate, are not counted. Rank 0 prints
medians over all turns of a size, and how much longer than the shortest they are. COMPUTE_PERCENT: of the profile's times.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import gradlane
from gradlane import zoo
from gradlane.core.network import Network
from gradlane.lab import emulated
from gradlane.units import format_bytes

KIB = 1024
SIZES = tuple(KIB * size for size in (1, 2, 4, 8, 16, 30, 64, 128, 256, 512))
WARM, COUNTED = 3, 5


def turn(model: torch.nn.Module, profile: gradlane.Profile, packet_bytes: int) -> list[int]:
    """The times of the counted iterations, in ns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    network = Network.line(dist.get_world_size(), startup_ns=100_000, bytes_per_second=125_000_000)
    times = []
    with gradlane.attach(
        model, optimizer, "mercury", backend="server", packet_bytes=packet_bytes, network=network, profile=profile
    ):
        began = 0
        for step in range(WARM + COUNTED):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            now = time.monotonic_ns()
            if step >= WARM:
                times.append(now - began)
            began = now
    return times


def main(model_name: str = "alexnet", scale: str = "0.1", percent: str = "20", rounds: str = "3") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = emulated(zoo.profile(model_name), scale=float(scale), compute_percent=int(percent))
    profile = model.profile
    times: dict[int, list[int]] = {size: [] for size in SIZES}
    for _ in range(int(rounds)):
        for size in SIZES:
            times[size] += turn(model, profile, size)
    if dist.get_rank() == 0:
        made_of = f"{format_bytes(profile.size_bytes)} of gradients, {percent} % of its computing"
        print(f"{model_name}, {made_of}, {dist.get_world_size()} workers, {rounds} turns of {COUNTED} iterations")
        best = min(statistics.median(each) for each in times.values())
        for size, each in times.items():
            low, *_, high = statistics.quantiles(each, n=10)
            median = statistics.median(each)
            spread = f"({low / 1e6:.0f}..{high / 1e6:.0f})"
            print(f"{format_bytes(size):>10}  {median / 1e6:6.1f} ms {spread:>12}  {median / best:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
