"""What trainers call on the reducer of torch's DistributedDataParallel, for a module that gradlane schedules."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlane.live.session.session import Session


class Reducer:
    """In place of torch's reducer, which is gone while `session` sums the gradients.

    Trainers ask it for the sum of a backward pass whose forward pass ran under `no_sync()`:
    accelerate in `trigger_sync_in_backward`, Lightning in each `manual_backward`.

    Args:
        session: of the module.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let the next backward pass sum gradients.

        Args:
            outputs: from which torch would search for unused parameters; not needed here.
        """
        self._session.sum_next_backward()

    def _rebuild_buckets(self) -> bool:
        return False

    def _check_reducer_finalized(self) -> None:
        """A session has no buckets that a backward pass could leave unfinished."""

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """A session keeps none of torch's times."""
