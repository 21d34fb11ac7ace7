"""The profile that a session measures, beside a recording of the same step and beside the zoo's: `python -m
bench.device.profiles CONFIG.json`.

One rank trains at the zoo's batch. A session profiles its first iterations; torch's profiler records some of the same model
without a session, and `gradlane convert` reads them. The zoo's times are of operations counted on a data sheet, for the
card that is here, or for its newest.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import gradlane
from bench.device.lines import Lines
from bench.device.models import OF_THE_ZOO, TINY, why_not
from gradlane import trace, zoo
from gradlane.core.network import Network
from gradlane.core.profile import Profile

ITERATIONS = 6


class Config(msgspec.Struct, frozen=True):
    """What the parent asks for."""

    out: str
    models: tuple[str, ...]
    dry: bool


def device_of(card: str) -> str:
    """The zoo's device of a card's name, or its newest."""
    known = zoo.devices()
    return next((name for name in reversed(known) if name.replace("-", " ") in card.lower()), known[-1])


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    lines = Lines(Path(config.out))
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    if config.dry:
        torch.set_num_threads(1)
    device = torch.device("cpu" if config.dry else "cuda")
    card = "the CPU" if config.dry else torch.cuda.get_device_name()
    dist.init_process_group("gloo" if config.dry or not dist.is_nccl_available() else "nccl")
    failed = False
    for name in config.models:
        reason = "the zoo comparison has no such network" if name not in OF_THE_ZOO else why_not(name, config.dry)
        if reason:
            lines.add("left out", part="profile", model=name, reason=reason)
            continue
        try:
            _compare(name, device, card, config.dry, lines)
        except Exception:
            failed = True
            lines.add("error", part=f"profile of {name}", text=traceback.format_exc(limit=-6))
            traceback.print_exc()
    sys.stdout.flush()
    os._exit(int(failed))


def _compare(name: str, device: torch.device, card: str, dry: bool, lines: Lines) -> None:
    load = (TINY if dry else OF_THE_ZOO)[name]
    batch = load.most if dry else zoo.describe(name).batch
    torch.manual_seed(0)
    model = load.make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = (part.to(device) for part in load.batch(batch, torch.Generator().manual_seed(1)))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(5):  # libraries choose their algorithms
        step()
    measured = _measured(model, optimizer, step)
    lines.add("profile", model=name, card=card, batch=batch, of="session", **_times(measured))
    recorded = _recorded(step, device)
    lines.add("profile", model=name, card=card, batch=batch, of="Kineto", **_times(recorded), **errors(measured, recorded))
    where = device_of(card)
    lines.add("profile", model=name, card=where, batch=batch, of="zoo", **_times(zoo.profile(name, device=where, batch=batch)))
    if not dry:
        alone = _alone_ms(step)
        lines.add("profile", model=name, card=card, batch=batch, of="step, unwatched", step_ms=alone)


def _times(profile: Profile) -> dict[str, Any]:
    return {
        "forward_ms": profile.forward_ns / 1e6,
        "backward_ms": profile.backward_ns / 1e6,
        "step_ms": profile.compute_ns / 1e6,
        "tensors": len(profile.tensors),
        "layers": len(profile.layers),
        "source": profile.source,
    }


def errors(measured: Profile, recorded: Profile) -> dict[str, float]:
    """How far a measured profile is from a recorded one, as parts of the recorded times.

    Moments of readiness are compared in their order: the first with the first. Names do not count, and where gradients
    become ready together their order may differ.
    """
    pairs = list(zip((t.ready_ns for t in measured.tensors), (t.ready_ns for t in recorded.tensors), strict=False))
    return {
        "forward_error": measured.forward_ns / recorded.forward_ns - 1,
        "backward_error": measured.backward_ns / recorded.backward_ns - 1,
        "ready_error": statistics.median(abs(ours / theirs - 1) for ours, theirs in pairs if theirs > 0),
        "compared": len(pairs),
    }


def _measured(model: nn.Module, optimizer: Any, step: Any) -> Profile:
    network = Network.line(1, 10_000, 10**10)
    options: dict[str, Any] = {"network": network, "profile_iterations": ITERATIONS}
    with gradlane.attach(model, optimizer, "ddp", backend="all-reduce", **options) as session:
        for _ in range(ITERATIONS + 4):
            step()
        session.flush()
        return session.profile()


def _recorded(step: Any, device: torch.device) -> Profile:
    from torch.profiler import ProfilerActivity, profile, schedule

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with tempfile.TemporaryDirectory(prefix="gradlane-") as folder:
        path = Path(folder, "trace.json")
        steps = schedule(wait=1, warmup=1, active=3)
        with profile(activities=kinds, record_shapes=True, schedule=steps) as profiler:
            for _ in range(5):
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                profiler.step()
        profiler.export_chrome_trace(str(path))
        return trace.read(path)


def _alone_ms(step: Any) -> float:
    """The median step of ten, from the start of one to the start of the next, as the device sees it."""
    marks = []
    for _ in range(12):
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)
        step()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(marks[1:]))


if __name__ == "__main__":
    main()
