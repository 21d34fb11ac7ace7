"""Programs of tests/live/test_metrics.py, which run on ranks."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import nn

import gradlane


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
