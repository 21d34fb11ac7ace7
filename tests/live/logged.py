"""What ranks run that keep a log of what their Dispatcher decided."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

import gradlane
from gradlane.planning import catalog
from gradlane.schedule import Log
from tests.live.loops import GIVEN, POLICIES, Mlp, momentum
from tests.live.networks import slow_network


def train(rank: int, world: int, policy: str, **options: Any) -> Log:
    """The log of four iterations under the policy's plan, after two that are measured, on a network that is slow."""
    torch.manual_seed(7)
    model = Mlp()
    optimizer = momentum(model)
    chosen = catalog.get(policy, **POLICIES.get(policy, {}))
    generator = torch.Generator().manual_seed(rank)
    with (
        slow_network(),
        gradlane.attach(
            model, optimizer, chosen, network=GIVEN, profile_iterations=1, timeout=20, keep_log=True, **options
        ) as session,
    ):
        for _ in range(6):
            x, y = model.batch(generator)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.flush()
        return session.dispatch_log()


def asks_for_a_log_that_is_not_kept(rank: int, world: int) -> str:
    """What is raised."""
    with gradlane.attach(Mlp(), network=GIVEN, timeout=20) as session:
        try:
            session.dispatch_log()
        except gradlane.GradlaneError as error:
            return str(error)
    return ""
