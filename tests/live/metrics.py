"""Programs of tests/live/test_metrics.py, which run on ranks."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import time
import unittest.mock
import urllib.request
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradlane
from gradlane.core.launch_options import LaunchOptions
from gradlane.live.startup.launched import set_launched
from tests.commands import ROOT
from tests.live.networks import UntilAwaited, network_until_awaited


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def numbers(rank: int, world: int, policy: str, backend: str, drop_in: bool = False, steps: int = 8) -> list[dict[str, Any]]:
    """The metrics after each step of a session."""
    torch.manual_seed(0)
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: Any = {"policy": policy, "backend": backend}
    model: nn.Module = gradlane.DistributedDataParallel(net, options=options) if drop_in else net
    session: Any = None if drop_in else gradlane.attach(net, optimizer, **options)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        session = model.session if isinstance(model, gradlane.DistributedDataParallel) else session
        if session is not None:
            found.append(dict(session.metrics()))
    session.close()
    return found


LAYER_S = 0.01


class _Slow(nn.Linear):
    """A layer that takes `LAYER_S` at least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(LAYER_S)
        return super().forward(x)


def several_passes(rank: int, world: int, how: str) -> tuple[list[int], int, int, list[int]]:
    """Eight steps of four forward passes each: three accumulate "without sums", or all of them are "in one loss".

    Returns:
        The iterations of the steps in the timeline, the shortest of these in ns, the measured forward pass in ns, and how many
        forward passes the timeline has of each iteration.
    """
    net = _Slow(32, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradlane.attach(net, optimizer, "p3", profile_iterations=3) as session:
        for _ in range(8):
            optimizer.zero_grad()
            if how == "in one loss":
                sum(net(torch.randn(8, 32)).square().mean() for _ in range(4)).backward()
            else:
                with session.no_sync():
                    for _ in range(3):
                        net(torch.randn(8, 32)).square().mean().backward()
                net(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
        session.flush()
        timeline, profile = session.timeline(), session.profile()
    steps = timeline.of("step")
    passes = [span.iteration for span in timeline.of("forward")]
    iterations = [span.iteration for span in steps]
    shortest_ns = min(span.end_ns - span.start_ns for span in steps)
    return iterations, shortest_ns, profile.forward_ns, [passes.count(each) for each in iterations]


def waits_for_buffers(rank: int, world: int) -> float | None:
    """The exposed seconds of a step. The model has buffers, and rank 1 comes 0.5 s late."""
    net = nn.Sequential(_net(), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradlane.attach(net, optimizer, "p3", backend="server") as session:
        for step in range(12):
            if rank == 1 and step > 8:
                time.sleep(0.5)
            optimizer.zero_grad()
            net(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
        return session.metrics()["exposed_seconds"]


def waits_in_second_passes(rank: int, world: int) -> list[int]:
    """How often the second forward pass of a step has waited for sums of the first, in the iterations that are measured."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    counts, awaits = (
        [],
        unittest.mock.patch.object(UntilAwaited, "await_ends", autospec=True, side_effect=UntilAwaited.await_ends),
    )
    with network_until_awaited(), awaits as awaited, gradlane.attach(net, optimizer, "wfbp", profile_iterations=6):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 32)).square().mean().backward()
            before = awaited.call_count
            loss = net(torch.randn(8, 32)).square().mean()
            counts.append(awaited.call_count - before)
            loss.backward()
            optimizer.step()
    assert awaited.call_count > 0
    return counts


def exported(rank: int, world: int, to: str, ports: list[int]) -> str:
    """What an export of examples/metrics.py has given away after some steps, as text: the files that it has left, or what it
    answers.
    """
    example = runpy.run_path(str(ROOT / "examples" / "metrics.py"))
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", MLFLOW_TRACKING_URI="mlruns", MLFLOW_ALLOW_FILE_STORE="true")
    folder = Path(os.environ["RANKS_FOLDER"], str(rank))
    folder.mkdir()
    os.chdir(folder)
    reader: Any = None
    if to == "opentelemetry":
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        reader = InMemoryMetricReader()
        metrics.set_meter_provider(MeterProvider([reader]))
    export = example["to_prometheus"](ports[rank] - rank) if to == "prometheus" else example["EXPORTS"][to]()
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradlane.attach(net, optimizer, "wfbp", backend="all-reduce") as session:
        for _ in range(13):
            optimizer.zero_grad()
            net(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            export(session.metrics())
    if to == "wandb":  # as at the end of a script
        import wandb

        wandb.finish()
    if to == "prometheus":
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[rank]}/metrics") as answer:
            return str(answer.read().decode())
    if reader is not None:
        return str(reader.get_metrics_data().to_json())
    return "\n".join(f"{path}: {path.stat().st_size}" for path in Path().rglob("*") if path.is_file())


def lines_of_two(rank: int, world: int) -> list[str]:
    """What two sessions of a process that is launched with --progress print."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.ExitStack() as sessions:
        set_launched(LaunchOptions(progress=1e-9))
        try:
            nets = [_net(), _net()]
            for net in nets:
                sessions.enter_context(gradlane.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "wfbp"))
        finally:
            set_launched(LaunchOptions())
        for net in [*nets, *nets]:
            net(torch.randn(8, 32)).square().mean().backward()
    return said.getvalue().splitlines()


def lines(rank: int, world: int) -> list[str]:
    """What a session prints that is to say after each step how it goes."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), gradlane.attach(net, optimizer, "wfbp") as session:
        session.print_progress(1e-9)
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    return said.getvalue().splitlines()
