"""One rank of `gradlane probe`: `python -m gradlane.live.backends.probe_job OUT BUDGET_S`.

Rank 0 writes the samples and the fitted network to the folder OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from gradlane.core import files
from gradlane.live.backends.probe import FULL_SIZES, fit, measure_start, sweep, sweep_streams


def main(out: str, budget_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, device = dist.group.WORLD, torch.device("cpu")
    samples = sweep(group, device, FULL_SIZES, repeats=7, budget_s=budget_s)
    streams = sweep_streams(group, device, samples)
    start_ns = measure_start(group, device)
    if dist.get_rank() == 0:
        network = fit(group, device, samples, streams, start_ns, "gradlane probe, Gloo")
        files.write(Path(out, "network.json"), network)
        Path(out, "samples.json").write_bytes(msgspec.json.encode(samples))
        Path(out, "streams.json").write_bytes(msgspec.json.encode(streams))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
