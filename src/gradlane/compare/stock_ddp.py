"""What torch's DistributedDataParallel does in a few steps, as the plan and the timeline of a session."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from gradlane.compare.arms import BASELINE
from gradlane.core.plan import Plan
from gradlane.core.timeline import Timeline
from gradlane.live.comm.recorder import now_ns
from gradlane.live.ddp.buckets import Buckets


class StockDdp:
    """Watches one model under DDP. DDP takes one hook for good, so that this must come last.

    Args:
        call: the model.
        optimizer: its optimizer; each of its steps ends an iteration.
        loss: makes the loss of a step.
    """

    def __init__(
        self, call: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
    ) -> None:
        self._optimizer, self._loss = optimizer, loss
        self._buckets = Buckets(call)

    def watch(self, model: str, steps: int) -> tuple[Plan, Timeline]:
        """Run `steps` steps and one before them, on every rank.

        Args:
            model: its name, for the plan.
            steps: how many, 1 or more.

        Returns:
            The buckets as a plan, and what happened on this rank.
        """
        began = [self._step() for self._buckets.iteration in range(steps + 2)]
        self._buckets.rows += [("step", at, -1, began[at], began[at + 1]) for at in range(1, steps + 1)]
        plan = self._buckets.plan(BASELINE, model)
        # the step before them may have buckets of another order, and the one behind them has no end
        return plan, self._buckets.timeline(plan, dist.get_rank(), 1, steps)

    def _step(self) -> int:
        began = now_ns()
        self._optimizer.zero_grad()
        loss = self._loss()
        computed = now_ns()
        loss.backward()  # type: ignore[no-untyped-call]
        summed = now_ns()
        self._optimizer.step()
        at = self._buckets.iteration
        self._buckets.rows += [
            ("forward", at, -1, began, computed),
            ("backward", at, -1, computed, summed),
            # the backward pass ends when all sums are there
            ("wait", at, -1, min(self._buckets.last_ready_ns, summed), summed),
            ("update", at, -1, summed, now_ns()),
        ]
        return began
