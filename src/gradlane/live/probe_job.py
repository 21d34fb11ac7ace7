"""The worker of `gradlane probe`: `python -m gradlane.live.probe_job OUT BUDGET_S`, a process a rank.

Rank 0 leaves the samples and the fitted network in OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from gradlane.core import files
from gradlane.live.probe import FULL_SIZES, sweep
from gradlane.tune.fit import fit_network


def main(out: str, budget_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    samples = sweep(dist.group.WORLD, torch.device("cpu"), FULL_SIZES, repeats=7, budget_s=budget_s)
    if dist.get_rank() == 0:
        network = fit_network(samples, workers=dist.get_world_size(), source="gradlane probe, Gloo")
        files.write(Path(out, "network.json"), network)
        Path(out, "samples.json").write_bytes(msgspec.json.encode(samples))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
