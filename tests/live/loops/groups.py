"""Process groups, more ranks than two, and a loop that ends in an error."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import gradlane
from gradlane.errors import JobError
from tests.live.cases import differences
from tests.live.loops.job import GIVEN, LOOPS, POLICIES, STEPS, Job, Loop, Mlp, adam, momentum, under_ddp, under_gradlane
from tests.live.models import Convolutions
from tests.live.networks import slow_network

# -- groups ------------------------------------------------------------------------------------------------


def train_in_a_group_of_all_ranks(rank: int, world: int) -> list[str]:
    case = Loop(LOOPS["buffers_and_accumulation"].run, Convolutions, adam, {}, {}, True, "")
    case.attach["process_group"] = dist.new_group(list(range(world)))
    return differences(under_ddp(case, rank), under_gradlane(case, rank, world, gradlane.policies.get("blocks")))


def train_alike(rank: int, world: int, policy: str, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """State after some steps under DDP and under gradlane, for more ranks than two, where roundings differ."""
    case = Loop(LOOPS["accumulation_with_no_sync"].run, Mlp, momentum, {}, options, True, "")
    reference = under_ddp(case, rank)
    with slow_network():
        return reference, under_gradlane(case, rank, world, gradlane.policies.get(policy, **POLICIES[policy]))


# -- loops that end in an error ----------------------------------------------------------------------------


def unfinished_backward(rank: int, world: int, failing: list[int]) -> tuple[str, str]:
    """An exception inside backward that the script catches, on the `failing` ranks; then it goes on."""
    torch.manual_seed(7)
    model = Mlp()
    optimizer = momentum(model)
    policy = gradlane.policies.get("bytescheduler", **POLICIES["bytescheduler"])
    session = gradlane.attach(model, optimizer, policy, network=GIVEN, profile_iterations=1, timeout=20)
    generator = torch.Generator().manual_seed(1000 + rank)
    job = Job(rank, model, model, optimizer, session.no_sync, generator, session)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a bad gradient")

    try:
        for step in range(STEPS):
            x, y = job.batch()
            optimizer.zero_grad()
            hidden = model.layers[1](torch.tanh(model.layers[0](x)))
            if step == 3 and rank in failing:
                hidden.register_hook(fail)
            loss = F.cross_entropy(model(x), y) + hidden.mean()
            with contextlib.suppress(ValueError):
                loss.backward()
                optimizer.step()
    except JobError as error:
        return type(error).__name__, str(error)
    finally:
        session.close()
    return "nothing", ""
