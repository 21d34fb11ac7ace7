"""What torch's DistributedDataParallel does in a few steps, as the plan and the timeline of a session.

DDP says nothing of its messages. A communication hook is told of each bucket when it is ready, and
may begin the sum itself; this one begins the sum as DDP would, and notes the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gradlane.compare.arms import BASELINE
from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.core.timeline import Span, Timeline
from gradlane.live.backends.gradient_buffers import dtype_name

now_ns = time.monotonic_ns


class StockDdp:
    """Watches one model under DDP. DDP takes one hook for good, so that this must come last.

    Args:
        call: the model.
        optimizer: its optimizer, of which each step ends an iteration.
        loss: makes the loss of a step.
    """

    def __init__(
        self, call: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
    ) -> None:
        self._call, self._optimizer, self._loss = call, optimizer, loss
        self._names = {id(param): name for name, param in call.module.named_parameters()}
        self._buckets: dict[int, list[TensorSpec]] = {}
        self._spans: list[tuple[str, int, int, int, int]] = []
        self._iteration = self._last_ready_ns = 0
        # DDP looks at annotations, and does not know them as text
        call.register_comm_hook(None, lambda group, bucket: self._begin_sum(group, bucket))

    def watch(self, model: str, steps: int) -> tuple[Plan, Timeline]:
        """Run `steps` steps and one before them, on every rank.

        Args:
            model: its name, for the plan.
            steps: how many, 1 or more.

        Returns:
            The buckets as a plan, and what happened on this rank.
        """
        began = [self._step() for self._iteration in range(steps + 2)]
        # the step before them may have buckets of another order, and the one behind them has no end
        spans = [row for row in self._spans if 1 <= row[1] <= steps]
        spans += [("step", at, -1, began[at], began[at + 1]) for at in range(1, steps + 1)]
        tensors = [spec for bucket in sorted(self._buckets) for spec in self._buckets[bucket]]
        place_of = {spec.name: place for place, spec in enumerate(tensors)}
        messages = tuple(
            Message(tuple(Slice(place_of[spec.name], 0, spec.size_bytes) for spec in self._buckets[bucket]), priority=bucket)
            for bucket in sorted(self._buckets)
        )
        plan = Plan(BASELINE, model, tuple(tensors), messages, sequence=tuple(range(len(messages))))
        ready = [
            ("ready", at, tensor, start, start)
            for kind, at, bucket, start, _ in spans if kind == "send" for tensor in messages[bucket].tensors
        ]  # fmt: skip
        rows: Any = sorted([*spans, *ready], key=lambda row: row[3])
        return plan, Timeline(plan.fingerprint, dist.get_rank(), tuple(Span(*row) for row in rows))

    def _step(self) -> int:
        began = now_ns()
        self._optimizer.zero_grad()
        loss = self._loss()
        computed = now_ns()
        loss.backward()  # type: ignore[no-untyped-call]
        summed = now_ns()
        self._optimizer.step()
        at = self._iteration
        self._spans += [
            ("forward", at, -1, began, computed),
            ("backward", at, -1, computed, summed),
            # the backward pass ends when all sums are there
            ("wait", at, -1, min(self._last_ready_ns, summed), summed),
            ("update", at, -1, summed, now_ns()),
        ]
        return began

    def _begin_sum(self, group: Any, bucket: Any) -> Any:
        began, at, index = now_ns(), self._iteration, bucket.index()
        self._last_ready_ns = began
        self._buckets[index] = [
            TensorSpec(self._names[id(param)], param.numel() * param.element_size(), dtype_name(param))
            for param in bucket.parameters()
        ]

        def ended(future: Any) -> torch.Tensor:
            self._spans.append(("send", at, index, began, now_ns()))
            total: torch.Tensor = future.value()
            return total

        return allreduce_hook(group, bucket).then(ended)
