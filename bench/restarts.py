"""Jobs under plain torchrun whose ranks are killed and that torchrun starts again: do they end with an undisturbed job's bits?

    python -m bench.restarts                      10 jobs of two restarts each, on each backend
    python -m bench.restarts --jobs 2 --backend server
    python -m bench.restarts --nodes 2            two agents on this host, with one rank each

In each job one rank is killed by itself in the first attempt and the other in the second, at steps that differ from job to
job. In the later attempts one rank comes three seconds after the other. Rank 0 saves a checkpoint after each step.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from gradlane.core.backends import BackendName
from tests.ports import free_port

STEPS = 8
LATE_S = 3.0
POLICIES: dict[BackendName, str] = {"all-reduce": "bytescheduler", "server": "mercury"}


def rank_of_a_job(folder: Path, backend: BackendName, deaths: dict[int, tuple[int, int]], late_s: float) -> None:
    """What each rank runs.

    Args:
        folder: for the checkpoint `state` and, at the end, the parameters `final`.
        backend: a name that `attach` takes.
        deaths: attempt -> the rank that kills itself in it, and the step before which it does.
        late_s: by which rank 1 comes later than rank 0 in the second attempt, and rank 0 than rank 1 in the third.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    import gradlane

    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if attempt and rank == attempt % 2:
        time.sleep(late_s)
    gradlane.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if (folder / "state").exists():
        state = torch.load(folder / "state")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    dist.barrier()  # nobody saves before all have loaded
    network = gradlane.Network.line(2, startup_ns=20_000, bytes_per_second=10**9)
    session = gradlane.attach(model, optimizer, POLICIES[backend], backend=backend, network=network)
    for step in range(first, STEPS):
        if deaths.get(attempt) == (rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "new")
            os.replace(folder / "new", folder / "state")
    session.close()
    if rank == 0:
        torch.save(model.state_dict(), folder / "final")
    dist.destroy_process_group()


def run_job(
    folder: Path, backend: BackendName, deaths: dict[int, tuple[int, int]], *, late_s: float = 0.0, nodes: int = 1
) -> str:
    """Run a job of two ranks under torchrun.

    Args:
        folder, backend, deaths, late_s: see `rank_of_a_job`.
        nodes: 1, or 2 for two agents on this host that meet by torchrun's c10d rendezvous.

    Returns:
        "" if it ended well, else the last lines of what it printed.
    """
    told = ",".join(f"{attempt}:{rank}:{step}" for attempt, (rank, step) in deaths.items())
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", str(len(deaths) + nodes - 1)]
    command += ["--nproc-per-node", str(2 // nodes), "--nnodes", str(nodes), "--local-addr", "127.0.0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "restarts", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["-m", "bench.restarts", "--rank", str(folder), backend, told, str(late_s)]
    with (folder / "printed").open("w+") as printed:
        agents = [subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT) for _ in range(nodes)]
        codes = [agent.wait() for agent in agents]
        printed.seek(0)
        return "".join(printed.readlines()[-40:]) if any(codes) else ""


def same_bits(one: Path, other: Path) -> bool:
    """Whether two jobs ended with the same parameters, by their folders."""
    import torch

    first, second = (torch.load(folder / "final") for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--backend", choices=list(POLICIES), action="append")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        folder, backend, told, late_s = given.rank
        deaths = {int(a): (int(r), int(s)) for a, r, s in (one.split(":") for one in told.split(",") if one)}
        rank_of_a_job(Path(folder), backend, deaths, float(late_s))
        return 0
    failed = 0
    for backend in given.backend or POLICIES:
        with tempfile.TemporaryDirectory() as calm:
            print(run_job(Path(calm), backend, {}, nodes=given.nodes), end="")
            well, took_s = 0, []
            for number in range(given.jobs):
                deaths = {0: (number % 2, number % 4), 1: ((number + 1) % 2, 4 + number % 3)}
                with tempfile.TemporaryDirectory() as folder:
                    began = time.monotonic()
                    said = run_job(Path(folder), backend, deaths, late_s=LATE_S, nodes=given.nodes)
                    took_s.append(time.monotonic() - began)
                    same = not said and same_bits(Path(calm), Path(folder))
                    well += same
                    if not same:
                        print(f"job {number}, {deaths}: {said or 'other bits'}", flush=True)
        took = f"{min(took_s):.0f} to {max(took_s):.0f} s each"
        print(
            f"{backend}: {well} of {given.jobs} jobs of two restarts ended with an undisturbed job's bits, {took}", flush=True
        )
        failed += given.jobs - well
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
