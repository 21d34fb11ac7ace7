"""How often a thread of torch.distributed takes the interpreter's lock to tell a session of an end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane import policies
from gradlane.core.network import Network
from gradlane.live.backends import process_groups
from tests.live.loops import Mlp, momentum
from tests.live.ranks import Ranks

PARTITION_BYTES = 1024
STEPS = 12  # the policy's own plan is in force long before


def told_in_backward(rank: int, world: int, credit_bytes: int) -> tuple[int, int]:
    """Run on each rank: ends that were asked for during the last backward pass, and messages of the plan."""
    asked: list[Any] = []

    class Counted(process_groups._Once):
        def __init__(self, *args: Any) -> None:
            asked.append(args)
            super().__init__(*args)

    plain, process_groups._Once = process_groups._Once, Counted  # type: ignore[misc]
    try:
        torch.manual_seed(1)
        model = Mlp()
        optimizer = momentum(model)
        policy = policies.get("bytescheduler", partition_bytes=PARTITION_BYTES, credit_bytes=credit_bytes)
        network = Network.line(world, 20_000, 10**9)
        session = gradlane.attach(model, optimizer, policy, backend="all-reduce", network=network)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            x, y = Mlp.batch(generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            asked.clear()
            loss.backward()
            told = len(asked)
            optimizer.step()
        session.flush()
        messages = len(session.plan.messages)
        assert session.plan.lanes[0].window_bytes == credit_bytes, session.plan.lanes
        session.close()
    finally:
        process_groups._Once = plain  # type: ignore[misc]
    return told, messages


def test_a_window_that_holds_nothing_back_wakes_nobody(two_ranks: Ranks) -> None:
    for told, messages in two_ranks.run("tests.live.test_wakeups:told_in_backward", credit_bytes=2**20):
        assert messages > 8
        assert told == 0


@pytest.mark.parametrize("credit_bytes", [PARTITION_BYTES, 4 * PARTITION_BYTES])
def test_a_window_wakes_somebody_once_for_each_message_held_back_at_most(two_ranks: Ranks, credit_bytes: int) -> None:
    for told, messages in two_ranks.run("tests.live.test_wakeups:told_in_backward", credit_bytes=credit_bytes):
        assert told < messages  # the last message keeps nobody waiting
