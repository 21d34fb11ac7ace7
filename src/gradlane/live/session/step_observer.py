"""StepObserver: hears what a session does in each step, and may compare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradlane.live.backends.process_groups import ProcessGroups
from gradlane.live.session.pending_gradient import InPlace


@dataclass
class Verified:
    """What has been compared and was as under DDP.

    Args:
        steps: iterations.
        tensors: ids of the parameters whose updates were compared.
        updates: of single parameters.
        deferred: so many of `updates` ran after `step()` had returned.
    """

    steps: int = 0
    tensors: set[int] = field(default_factory=set)
    updates: int = 0
    deferred: int = 0


class StepObserver:
    """Here nothing is done with what is reported; `verification.Verifier` compares it with DDP's steps.

    In all methods, `owed` tells whether the update of a parameter is deferred.
    """

    compares = False
    """Whether any iteration is compared."""
    verifies = False
    """Whether this iteration is compared, so that its values have to be reported."""

    def __init__(self) -> None:
        self.verified = Verified()

    def connect(
        self, tell: Callable[[BaseException], None], wait_for: Callable[[ProcessGroups, Sequence[Any], str], None]
    ) -> None:
        """Set the callbacks.

        Args:
            tell: called with an error before it is raised.
            wait_for: waits for collectives of a group; the text says what they are.
        """

    def forward_begins(self, iteration: int, trains: bool) -> None:
        """A forward pass begins, with the buffers as they are now.

        Args:
            iteration: that of the next backward pass.
            trains: it is in training, with gradients.
        """

    def forward_ended(self, sums: bool) -> None:
        """A forward pass has ended; `sums`: under DDP the next one begins with rank 0's buffers."""

    def forward_was_not_seen(self, iteration: int) -> None:
        """The backward pass of `iteration` begins, and `forward_begins` was not called for it.

        Raises:
            VerificationError: the model has buffers that DDP would have made equal.
        """

    def contributes(self, param: torch.nn.Parameter, part: torch.Tensor) -> None:
        """This rank's part of a sum, divided by the number of ranks, is about to be sent."""

    def touched(self, param: torch.nn.Parameter) -> None:
        """The script uses a parameter or its gradient; an error will name that line of it."""

    def arrived(self, param: torch.nn.Parameter, total: torch.Tensor) -> None:
        """The session has the sum `total`, which the script has not seen yet. Later calls in an iteration change nothing."""

    def told_norm(self, param: torch.nn.Parameter, order: float, norm: torch.Tensor, operations: Sequence[InPlace]) -> None:
        """The script has been told the norm of a sum that has not arrived, as its `operations` in place will change it."""

    def changes(self, param: torch.nn.Parameter, operations: Sequence[InPlace]) -> None:
        """A deferred update is about to take the sum, changed by the script's `operations` in place."""

    def stepping(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        """`optimizer` is about to update all parameters that are not `owed`."""

    def updated(self, params: Iterable[torch.nn.Parameter]) -> None:
        """The session has updated `params`."""

    def all_updated(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        """`step()` has updated all parameters that are not `owed`."""

    def drop_what_has_raised(self) -> None:
        """An optimizer is about to step, or a backward pass begins: leave out the last step if it has raised."""

    def compare(self) -> None:
        """Every sum has arrived, and all updates have run: compare what was copied (collective).

        Raises:
            VerificationError: a sum, a parameter, its optimizer state or a buffer is not as under DDP.
        """

    def begin(self, iteration: int, crosses: bool) -> None:
        """A backward pass begins; the iteration before has been compared.

        Args:
            iteration: its number.
            crosses: the plan in force lets updates be deferred.
        """

    def excuse(self) -> None:
        """From now on some ranks may have fewer steps: do not check any more what is vouched for."""

    def summary(self, steps: int) -> str | None:
        """What was compared, as a line for the log; None for nothing.

        Args:
            steps: that the job had in all.
        """
        return None

    def close(self) -> None:
        """Close the process group."""

    def interrupt(self) -> None:
        """The job has failed: end collectives that are stuck on a device."""
