"""What each rank does for `test_emulated`: train emulated models under DDP and under gradlane."""

from __future__ import annotations

import torch
from torch import nn

import gradlane
from gradlane.core.profile import Layer, Profile, TensorProfile, TensorSpec
from gradlane.emulation.model import Emulated, coefficient

STEPS = 12
LEARNING_RATE = 0.5
LAYERS = 5
NAMES = tuple(f"layer{layer}.{kind}" for layer in reversed(range(LAYERS)) for kind in ("bias", "weight"))
PROFILE = Profile(
    "model",
    "device",
    tuple(
        TensorProfile(TensorSpec(name, 4_000 * (index + 1)), 1_000_000 * (index // 2 + 1), LAYERS - 1 - index // 2)
        for index, name in enumerate(NAMES)
    ),
    tuple(Layer(f"layer{layer}", 500_000, 20_000) for layer in range(LAYERS)),
    6_000_000,
)


def _train(model: Emulated, call: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        call().backward()
        optimizer.step()


def train_both(rank: int, world: int) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """By name, the one value of each parameter after training under DDP and gradlane; and what it has to be."""
    model = Emulated(PROFILE, rank=rank)
    other = Emulated(PROFILE, rank=rank)
    _train(model, nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    optimizer = torch.optim.SGD(other.parameters(), lr=LEARNING_RATE)
    with gradlane.attach(other, optimizer, "bytescheduler") as session:
        _train(other, other, optimizer)
        assert session.settled
        assert session.crosses_barrier
    ours = dict(other.named_parameters())
    learned = {}
    for name, param in model.named_parameters():
        values = torch.cat([param.detach().unique(), ours[name].detach().unique()]).tolist()
        learned[name] = tuple(values)
    expected = {
        name: -LEARNING_RATE * sum(coefficient(r, step, tensor) for r in range(world) for step in range(STEPS)) / world
        for tensor, name in enumerate(NAMES)
    }
    return learned, expected


def order_of_readiness(rank: int, world: int) -> list[str]:
    """The tensors in the order of the profile that gradlane measures of the emulated device."""
    model = Emulated(PROFILE, rank=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    with gradlane.attach(model, optimizer) as session:
        _train(model, model, optimizer)
        return [spec.name for spec in session.profile().specs]
