"""Python calls that a training step makes inside of gradlane, and how often they cross from one of its files to another.

    python -m bench.calls [--policy bytescheduler] [--backend all-reduce] [--tensors 8] [--functions 25]

Two ranks train square layers on loopback. A profile function counts on rank 0, on the training thread and on every thread
that calls Python: sums end on threads of torch.distributed. A number of calls does not depend on the machine's load.
How many calls are made still differs a little between two runs, since sums come early or late.
"""

from __future__ import annotations

import argparse
import collections
import sys
import threading
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
WIDTH, WARM_UP, STEPS = 64, 60, 20
ROOT = str(Path(__file__).resolve().parents[1] / "src" / "gradlane")


def count(rank: int, world: int, policy: str, backend: Any, tensors: int) -> dict[str, Any]:
    """On each rank: train, and count over the last steps on rank 0.

    Returns:
        "calls": by "file:function"; "crossings": calls from one file of gradlane to another.
    """
    import torch
    from torch import nn

    import gradlane

    calls: collections.Counter[str] = collections.Counter()
    crossings = 0
    counting = False

    def profiled(frame: Any, event: str, _: Any) -> None:
        nonlocal crossings
        if event != "call" or not counting:
            return
        name = frame.f_code.co_filename
        if not name.startswith(ROOT):
            return
        calls[f"{name[len(ROOT) + 1 :]}:{frame.f_code.co_qualname}"] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        crossings += caller is not None and caller.f_code.co_filename != name

    when_done = torch._C.Future.add_done_callback

    def on_torchs_thread(future: Any, callback: Any) -> None:
        def called(done: Any) -> None:
            sys.setprofile(profiled)
            callback(done)

        when_done(future, called)

    if rank == 0:
        threading.setprofile(profiled)
        torch._C.Future.add_done_callback = on_torchs_thread  # type: ignore[method-assign,assignment]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(tensors)))
    inputs = torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with gradlane.attach(model, optimizer, policy, backend=backend):
        for step in range(WARM_UP + STEPS):
            if rank == 0 and step == WARM_UP:
                sys.setprofile(profiled)
                counting = True
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        counting = False
        sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    torch._C.Future.add_done_callback = when_done  # type: ignore[method-assign]
    return {"calls": dict(calls), "crossings": crossings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="bytescheduler")
    parser.add_argument("--backend", default="all-reduce")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--functions", type=int, default=25, help="how many to list, the most called first")
    given = parser.parse_args()

    from tests.live.ranks import Ranks

    ranks = Ranks(2)
    arm = {"policy": given.policy, "backend": given.backend, "tensors": given.tensors}
    answers = ranks.answers("bench.calls:count", LIMIT_S, lambda _: None, **arm)
    ranks.close()
    assert answers[0] is not None, f"no answer within {LIMIT_S:.0f} s"
    ok, found = answers[0]
    assert ok, found
    total = sum(found["calls"].values())
    print(f"{given.policy} over {given.backend}, {given.tensors} tensors of {WIDTH}x{WIDTH}, {STEPS} steps")
    print(f"{total / STEPS / given.tensors:.1f} calls a tensor and step, {found['crossings'] / STEPS:.0f} crossings a step")
    for name, times in collections.Counter(found["calls"]).most_common(given.functions):
        print(f"{times / STEPS:8.1f}  {name}")


if __name__ == "__main__":
    main()
