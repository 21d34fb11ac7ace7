"""FiniteCheck: ends the job before an update with a gradient that is infinite or NaN, and names where it came from.

Each rank checks its gradients before they are summed, in the same memory. On the CPU that is one sum over
memory that was just written. On a device the copy in CPU memory is checked, which costs the device
nothing. A slot that is not finite gets NaN for its presence element (`gradient_buffers.py`). That travels with
the data, so that all ranks stop at the same update. Rank 0 hears of it over the control channel, and tells all
ranks the first that it heard of in an iteration.

Only an update ends the job. Under AMP infinities are normal: GradScaler finds them in the sums and
leaves the step out, so nothing is updated and nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch

from gradlane.core.plan import Plan
from gradlane.errors import NotFiniteError
from gradlane.live.comm.driver import Driver


class Unchecked:
    """Gradients that are not looked at."""

    def take_up(self, plan: Plan) -> None:
        """Another plan is in force."""

    def contributes(self, tensors: Sequence[int]) -> None:
        """The memory in which `tensors` are summed holds this rank's gradients. Called before the engine hears of them."""

    def updates(self, tensors: Sequence[int]) -> None:
        """Parameters are about to be updated with the sums of `tensors`, which have arrived."""


class FiniteCheck(Unchecked):
    """The check of one session. `updates` runs on the thread that makes the update, `contributes` on the training thread, or
    on that of `Staging` where there is one.

    Args:
        driver: the session's.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def take_up(self, plan: Plan) -> None:
        self._names = [spec.name for spec in plan.tensors]
        self._limits = [
            torch.finfo(torch.float16).max if spec.dtype == "float16" and slot.dtype != torch.float16 else None
            for spec, slot in zip(plan.tensors, self._driver.slots, strict=True)
        ]

    def contributes(self, tensors: Sequence[int]) -> None:
        limit = self._limits[tensors[0]]
        summed = self._driver.summed
        if len(tensors) > 1 and _is_finite(summed.range_of(tensors[0], tensors[-1]), limit):
            return
        for tensor in tensors:
            if not _is_finite(summed.slots[tensor], limit):
                summed.put_not_finite(tensor)
                self._driver.coordination.not_finite(self._names[tensor])

    def updates(self, tensors: Sequence[int]) -> None:
        """Raises `NotFiniteError` if any rank's part of a sum was not finite."""
        for tensor in tensors:
            if not self._driver.summed.is_finite(tensor):
                self._refuse()

    def _refuse(self) -> NoReturn:
        iteration = self._driver.iteration
        rank, name = self._driver.coordination.first_not_finite(iteration)
        error = NotFiniteError(
            f"iteration {iteration}: the gradient of {name} on rank {rank} is infinite or NaN; nothing was updated with it. "
            "Look at that rank's batch and loss; a learning rate that is too high ends so, too. Continue from a checkpoint: "
            "other parameters may have been updated in this iteration",
            rank,
        )
        self._driver.abort(error)
        raise error


def need_finite(params: Iterable[tuple[str, torch.nn.Parameter]], rank: int) -> None:
    """Raise `NotFiniteError` if a parameter of this `rank` is not finite when the session begins."""
    for name, param in params:
        if not _is_finite(param.detach(), None):
            raise NotFiniteError(
                f"{name} is infinite or NaN on rank {rank} when gradlane begins to sum. With DistributedDataParallel, torch "
                "sums the first step, whose gradients check_finite does not see. Look at the first batch and loss, or at the "
                "checkpoint that was loaded",
                rank,
            )


def _is_finite(values: torch.Tensor, limit: float | None) -> bool:
    """Whether all `values` are finite, and within `limit` in the dtype in which they travel."""
    if limit is not None:
        low, high = (float(end) for end in torch.aminmax(values))
        return -limit <= low and high <= limit  # NaN is not
    # faster than `isfinite` of each value. Any infinity or NaN stays in a sum. A sum of finite values
    # may be too large, so a sum that is not finite is looked at value by value
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    return math.isfinite(values.sum(dtype=wide)) or bool(values.isfinite().all())
