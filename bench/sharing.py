"""What two jobs on the same hosts and links get of them, by weight.

    python -m bench.sharing [SECONDS]

Two emulated hosts with links of 100 Mbit/s carry two jobs alike, each a rank on each host, in slices of 128 KiB, with so little
to compute that links are all that counts. Printed: iterations a second of each in the time that both trained, and their ratio.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gradlane.lab import JobSpec, LabSpec
from gradlane.lab.files import write_spec

WEIGHTS = ((1, 1), (3, 1))
BACKENDS = ("all-reduce", "server")


def train(backend: str, weight: str, seconds: str, out: str) -> None:
    """One rank of one job; rank 0 leaves the moments at which iterations ended."""
    import torch
    import torch.distributed as dist

    import gradlane
    from gradlane import zoo
    from gradlane.core.network import Network
    from gradlane.lab import emulated

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = emulated(zoo.profile("alexnet"), scale=0.02, compute_percent=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    network = Network.line(2, startup_ns=100_000, bytes_per_second=12_500_000)
    options: dict[str, Any] = {"backend": backend, "weight": int(weight), "network": network, "profile": model.profile}
    # so much under way that every connection has something to send
    slices = gradlane.policies.get("bytescheduler", partition_bytes=128 * 1024, credit_bytes=2**30)
    ends: list[float] = []
    more = torch.ones(1)
    with gradlane.attach(model, optimizer, slices, **options):
        began = time.time()
        while float(more):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            ends.append(time.time())
            if len(ends) % 4 == 0:  # all ranks stop alike
                more.fill_(ends[-1] < began + float(seconds))
                dist.broadcast(more, 0)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(ends))
    dist.destroy_process_group()


def rates(backend: str, weights: tuple[int, int], seconds: float) -> list[float]:
    """Iterations a second of each job."""
    with tempfile.TemporaryDirectory(prefix="gradlane-") as scratch:
        outs = [Path(scratch, f"{job}.json") for job in range(2)]
        jobs = tuple(
            JobSpec(
                (0, 1), command=(sys.executable, "-m", "bench.sharing", "train", backend, str(weight), str(seconds), str(out))
            )
            for weight, out in zip(weights, outs, strict=True)
        )
        spec = Path(scratch, "lab.json")
        write_spec(spec, LabSpec(2, 100_000_000, jobs=jobs))
        subprocess.run([sys.executable, "-m", "gradlane", "lab", "--quiet", "--file", str(spec)], check=True, timeout=300)
        moments = [json.loads(out.read_text()) for out in outs]
    both_from, both_to = max(each[4] for each in moments), min(each[-1] for each in moments)
    return [sum(both_from < at <= both_to for at in each) / (both_to - both_from) for each in moments]


def main(seconds: str = "20") -> None:
    for backend in BACKENDS:
        for weights in WEIGHTS:
            first, second = rates(backend, weights, float(seconds))
            print(f"{backend:>10}  weights {weights[0]} and {weights[1]}: {first:.2f} and {second:.2f} iterations/s, "
                  f"{first / second:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1:2] == ["train"] else main(*sys.argv[1:])
