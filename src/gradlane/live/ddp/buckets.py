"""What torch's DistributedDataParallel sends and when, as a plan and as spans.

DDP says nothing of its messages. A communication hook is told of each bucket when it is ready, and
may begin the sum itself; this one begins the sum as DDP would, and notes the times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gradlane.core.plan import Message, Plan, Slice
from gradlane.core.profile import TensorSpec
from gradlane.core.timeline import Span, Timeline
from gradlane.live.backends.gradient_buffers import spec_of
from gradlane.live.comm.recorder import Row, now_ns


class Buckets:
    """Watches the buckets of one model under DDP. DDP takes one hook for good.

    Args:
        call: the model, without a hook.

    Attributes:
        iteration: the one that runs; the owner counts.
        last_ready_ns: when the last bucket became ready.
        rows: the spans so far; the owner may add others.
    """

    def __init__(self, call: nn.parallel.DistributedDataParallel) -> None:
        self.iteration = self.last_ready_ns = 0
        self.rows: list[Row] = []
        self._names = {id(param): name for name, param in call.module.named_parameters()}
        self._buckets: dict[int, list[TensorSpec]] = {}
        # DDP looks at annotations, and does not know them as text
        call.register_comm_hook(None, lambda group, bucket: self._begin_sum(group, bucket))

    def _begin_sum(self, group: Any, bucket: Any) -> Any:
        began, at, index = now_ns(), self.iteration, bucket.index()
        self.last_ready_ns = began
        self._buckets[index] = [spec_of(self._names[id(param)], param) for param in bucket.parameters()]

        def ended(future: Any) -> torch.Tensor:
            self.rows.append(("send", at, index, began, now_ns()))
            total: torch.Tensor = future.value()
            return total

        return allreduce_hook(group, bucket).then(ended)

    def plan(self, policy: str, model: str) -> Plan:
        """The buckets of the last iteration.

        Args:
            policy, model: names for the plan.
        """
        tensors = [spec for bucket in sorted(self._buckets) for spec in self._buckets[bucket]]
        place_of = {spec.name: place for place, spec in enumerate(tensors)}
        messages = tuple(
            Message(tuple(Slice(place_of[spec.name], 0, spec.size_bytes) for spec in self._buckets[bucket]))
            for bucket in sorted(self._buckets)
        )
        return Plan(policy, model, tuple(tensors), messages, sequence=tuple(range(len(messages))))

    def timeline(self, plan: Plan, rank: int, first: int, last: int) -> Timeline:
        """What happened in iterations `first` to `last`, with the owner's rows."""
        rows = [row for row in self.rows if first <= row[1] <= last]
        rows += [
            ("ready", at, tensor, start, start)
            for kind, at, bucket, start, _ in rows if kind == "send" for tensor in plan.messages[bucket].tensors
        ]  # fmt: skip
        return Timeline(plan.fingerprint, rank, tuple(Span(*row) for row in sorted(rows, key=lambda row: row[3])))
