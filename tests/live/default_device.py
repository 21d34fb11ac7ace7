"""What ranks run: a loop whose default device is another than its model's."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane
from tests.live.cases import bits_of, differences
from tests.live.loops.job import GIVEN, POLICIES, Mlp

STEPS = 7


@contextlib.contextmanager
def _by_default(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def beside_ddp(
    rank: int, world: int, default: str, policy: str, backend: str | None, measures: bool, **options: Any
) -> list[str]:
    """Names that differ from DDP's. What is made without naming a device is made on `default`, under which DDP trains as well.

    Args:
        measures: the session measures the network, which is given otherwise.
    """
    reference = _trained(rank, default, None)
    if not measures:
        options["network"] = gradlane.Network.line(world, GIVEN.startup_ns, GIVEN.bytes_per_second)
    chosen = policy if policy == "auto" else gradlane.policies.get(policy, **POLICIES.get(policy, {}))
    return differences(reference, _trained(rank, default, chosen, backend=backend, **options))


def _trained(rank: int, default: str, policy: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    batches = [Mlp.batch(generator) for _ in range(STEPS)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_by_default(default))
        call: Any = model
        if policy is None:
            call = DistributedDataParallel(model)
        else:
            attached = gradlane.attach(model, optimizer, policy, profile_iterations=1, timeout=20, verify=True, **options)
            session: Any = stack.enter_context(attached)
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(call(x), y).backward()
            optimizer.step()
        if policy is not None:
            session.flush()
    return bits_of(model, optimizer)
