"""How true emulated devices are: step times and moments of readiness against the profile, several workers at once.

    python -m bench.emulated [WORKERS [STEPS [MODEL...]]]

Workers do not communicate. A step is forward, backward and SGD with momentum; its time goes from the end of one backward
pass to the end of the next, which the device's schedule decides (a forward pass starts when the optimizer has ended).
`late` is how much later than its `ready_ns`, counted from the start of its backward pass, a gradient's hook ran. `others`:
how much of all processors went to processes that are not ours, which makes all of this worse.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from gradlane import zoo

SCALE = 0.1
WARM = 3


def worker(rank: int, model_name: str, steps: int, pipe: Connection, gate: multiprocessing.synchronize.Barrier) -> None:
    import torch

    from gradlane.lab import emulated

    torch.set_num_threads(1)
    profile = zoo.profile(model_name)
    model = emulated(profile, scale=SCALE, rank=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    params = dict(model.named_parameters())
    ready: list[int] = []
    for tensor in profile.tensors:
        params[tensor.spec.name].register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic_ns()))
    marks, late, cpu = [], [], 0.0
    for step in range(steps + WARM + 1):
        if step == WARM:
            gate.wait()
            cpu = time.process_time()
        optimizer.zero_grad()
        loss = model()
        ready.clear()
        began = time.monotonic_ns()
        loss.backward()
        marks.append(time.monotonic_ns())
        if step >= WARM:
            late += [at - began - tensor.ready_ns for at, tensor in zip(ready, profile.tensors, strict=True)]
        optimizer.step()
    cpu = (time.process_time() - cpu) / (steps + 1)
    step_ns = [after - before for before, after in itertools.pairwise(marks[WARM:])]
    pipe.send((step_ns, late, round(cpu * 1e9)))


def measure(model_name: str, workers: int, steps: int) -> None:
    gate = multiprocessing.Barrier(workers)
    busy_s, own_s, began = machine_busy_s(), children_s(), time.monotonic()
    pipes, processes = [], []
    for rank in range(workers):
        ours, theirs = multiprocessing.Pipe()
        processes.append(multiprocessing.Process(target=worker, args=(rank, model_name, steps, theirs, gate)))
        processes[-1].start()
        pipes.append(ours)
    outcomes = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    capacity_s = (time.monotonic() - began) * (os.cpu_count() or 1)
    others = (machine_busy_s() - busy_s - (children_s() - own_s)) / capacity_s
    profile = zoo.profile(model_name)
    step_ns = [value for outcome in outcomes for value in outcome[0]]
    late = sorted(value for outcome in outcomes for value in outcome[1])
    error = [abs(value / profile.compute_ns - 1) for value in step_ns]
    mean = statistics.mean(step_ns) / profile.compute_ns - 1
    absolute = sorted(map(abs, late))
    late_us = [value / 1e3 for value in (late[len(late) // 2], *(absolute[len(late) * part // 100] for part in (90, 99)))]
    cpu = statistics.mean(outcome[2] for outcome in outcomes) / profile.compute_ns
    print(
        f"{model_name:>14} {len(profile.tensors):8d} {profile.compute_ns / 1e6:10.1f} {mean:+9.3%} "
        f"{statistics.median(error):9.3%} {max(error):9.3%} {late_us[0]:9.0f} {late_us[1]:9.0f} {late_us[2]:9.0f} "
        f"{cpu:9.2%} {others:7.0%}",
        flush=True,
    )


def machine_busy_s() -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    print(f"{workers} workers at once, {steps} steps of each, sizes x {SCALE:g}")
    print(
        f"{'model':>14} {'tensors':>8} {'profile ms':>10} {'mean':>9} {'median |e|':>9} {'max |e|':>9} "
        f"{'late us':>9} {'|.| p90':>9} {'|.| p99':>9} {'CPU/step':>9} {'others':>7}"
    )
    for name in sys.argv[3:] or ("resnet50", "vgg16", "googlenet", "resnet18", "bert-base", "densenet201"):
        measure(name, workers, steps)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
