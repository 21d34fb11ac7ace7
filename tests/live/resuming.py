"""What `scripts/resumed.py` trains, and what it must come to."""

from __future__ import annotations

import torch
from torch import nn

import gradlane

STEPS, KILLED_AT = 8, 4
NETWORK = gradlane.Network.line(2, startup_ns=20_000, bytes_per_second=10**9)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Leave those of one rank's batch in `.grad`."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()


def undisturbed(ranks: int = 2) -> dict[str, torch.Tensor]:
    """The parameters after all steps: two halves have one sum, in whichever order they are added."""
    model, optimizer = model_and_optimizer()
    for step in range(STEPS):
        parts = []
        for rank in range(ranks):
            gradients(model, optimizer, rank, step)
            parts.append([param.grad / ranks for param in model.parameters()])
        for param, *part in zip(model.parameters(), *parts, strict=True):
            param.grad = sum(part[1:], start=part[0])
        optimizer.step()
    return model.state_dict()
