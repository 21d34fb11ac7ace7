"""One rank of `gradlane probe`: `python -m gradlane.live.backends.probe_job OUT BUDGET_S`.

Rank 0 writes what was timed and the networks that fit to the folder OUT, see `gradlane.cli.probe`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from gradlane.core import files
from gradlane.live.backends.hierarchy import Stages, hosts_of, levels_of
from gradlane.live.backends.probe import FULL_SIZES, measure
from gradlane.live.backends.probe_levels import in_turns, time_levels
from gradlane.live.backends.process_groups import NewGroups, ProcessGroups

_TIMEOUT_S = 60.0


def main(out: str, budget_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, device = dist.group.WORLD, torch.device("cpu")
    hosts = levels_of(hosts_of(group), dist.get_rank())
    if hosts is not None:
        budget_s /= 2  # each way of summing gets a half
    probed = measure(group, device, sizes=FULL_SIZES, repeats=7, budget_s=budget_s)
    written: dict[str, object] = {"samples": probed.samples, "streams": probed.streams}
    networks = {"flat": probed.network(group, device, "gradlane probe, Gloo")}
    groups = ProcessGroups(NewGroups(None, dist.distributed_c10d._get_default_store(), "probe"), _TIMEOUT_S)
    if hosts is not None:
        stages = Stages(groups, hosts)
        levels = time_levels(stages, group, torch.float32, budget_s, FULL_SIZES)
        networks["hierarchical"] = levels.network("gradlane probe, Gloo within hosts first")
        size_bytes = max(size for size, _ in levels.between)
        flat_ns, hierarchical_ns = in_turns(stages, group, torch.float32, size_bytes)
        written |= {"levels": levels._asdict(), "turns": (size_bytes, flat_ns, hierarchical_ns)}
    if dist.get_rank() == 0:
        for name, network in networks.items():
            files.write(Path(out, f"{name}.json"), network)
        Path(out, "timed.json").write_bytes(msgspec.json.encode(written))
    dist.barrier()
    groups.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
