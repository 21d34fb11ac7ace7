"""UnevenInputs: lets ranks run out of inputs one by one, as DDP's `join()` does.

Before each sum the ranks count how many of them have come with a gradient. A rank without inputs left
counts as none, and goes on taking part: it contributes zeros to the others' sums, and updates nothing.
When no rank comes any more, all take the model of one that came last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import UnevenInputsError
from gradlane.live.backends.base import Backend
from gradlane.live.backends.copies import copy_from

Collective = Callable[[Callable[[], Any], str], Any]
"""Runs a call that waits for other ranks; its second argument names the call in errors."""


class UnevenInputs:
    """One `join()` of one session, on one rank. Used on the training thread only.

    Args:
        rank: of this process in the group.
        world: number of ranks in the group.
        backend: its control group carries the counts.
        collective: see `Collective`.
        divides_by_all: divide sums by the number of all ranks, not by that of those that still come.
        ends_early: raise an error on all ranks as soon as one of them has no input left.
    """

    def __init__(
        self, rank: int, world: int, backend: Backend, collective: Collective, divides_by_all: bool, ends_early: bool
    ) -> None:
        self._rank, self._world = rank, world
        self._group, self._device = backend.control_group, backend.control_device
        self._collective, self._divides_by_all, self._ends_early = collective, divides_by_all, ends_early

    def come(self) -> float:
        """Come with a gradient (collective).

        Returns:
            The factor for each gradient before it is summed.

        Raises:
            UnevenInputsError: a rank has no input left, and `ends_early` was asked for.
            JobError: the job has failed.
        """
        came = self._count(comes=True)
        return 1.0 / (self._world if self._divides_by_all else came)

    def finish(self, take_part: Callable[[], None], values: Iterable[torch.Tensor]) -> None:
        """Take part in the others' iterations until all are out of inputs (collective).

        Args:
            take_part: runs one iteration, to whose sums this rank contributes zeros.
            values: take those of a rank that came to the last iteration; of several, the one with the
                highest number, as under DDP.

        Raises:
            As `come`.
        """
        came_last = True
        while self._count(comes=False):
            take_part()
            came_last = False

        def take_the_last() -> None:
            last = torch.tensor([self._rank if came_last else -1], device=self._device)
            dist.all_reduce(last, dist.ReduceOp.MAX, group=self._group)
            copy_from(int(last.item()), values, self._group, self._device)

        self._collective(take_the_last, "the model of the rank with the most inputs")

    def _count(self, comes: bool) -> int:
        def add_up() -> int:
            count = torch.tensor([int(comes)], device=self._device)
            dist.all_reduce(count, group=self._group)
            return int(count.item())

        came: int = self._collective(add_up, "the ranks that still have inputs")
        if self._ends_early and 0 < came < self._world:
            without = "this rank among them" if not comes else "this rank is not among them"
            raise UnevenInputsError(
                f"rank {self._rank}: {self._world - came} of {self._world} ranks have no input left, {without}; join() was "
                "asked to raise an error then (throw_on_early_termination=True)"
            )
        return came
