"""A rank of `python -m bench.auto --change`: train under auto while links change, and say when it had settled again."""

from __future__ import annotations

import itertools
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import gradlane
from gradlane import zoo
from gradlane.core.records.search_log import ANY
from gradlane.lab import emulated

_SECONDS = 130  # from the start on, with both changes and some time after the second
_DIFFERENT = 1.2  # times as long, or as short, as the steps before


def main(name: str, stretch: str, backend: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = emulated(zoo.profile(name).stretched(float(stretch)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    began = time.monotonic_ns()
    ends: list[int] = []
    settled: list[bool] = []
    over = torch.zeros(1)
    with gradlane.attach(model, optimizer, "auto", backend=None if backend == ANY else backend) as session:
        while not over:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            ends.append(time.monotonic_ns())
            settled.append(not session.tuning)
            if len(ends) % 10 == 0:
                over.fill_(time.monotonic_ns() - began > _SECONDS * 10**9)
                dist.broadcast(over, 0)
        found = session.auto
    dist.destroy_process_group()
    if found is None:
        return
    steps = [end - start for start, end in itertools.pairwise(ends)]
    print(f"{len(steps)} iterations, {len(found.looks)} looks")
    for look in found.looks:
        print(f"iterations {look.began} to {look.ended}: {look.why}; {look.verdict}")
        if look is found.looks[0]:
            continue
        before = median(steps[max(0, look.began - 20) : max(1, look.began - 8)])
        near = range(max(0, look.began - 8), look.ended)
        first = next((at for at in near if not 1 / _DIFFERENT < steps[at] / before < _DIFFERENT), look.began)
        after = median(steps[look.ended + 1 : look.ended + 11] or steps[-1:])
        took_s = (ends[look.ended - 1] - ends[first]) / 1e9
        print(
            f"  settled again {took_s:.1f} s after the first iteration that differed; before {before / 1e6:.0f} ms, "
            f"then {steps[first] / 1e6:.0f} ms, after {after / 1e6:.0f} ms"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
