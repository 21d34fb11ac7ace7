"""IdleSession: what `attach` returns where one process trains alone, and nothing is to be summed.

One script then serves one rank and many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import torch

from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.dispatch_log import Log
from gradlane.core.timeline import Timeline
from gradlane.errors import JobError
from gradlane.live.session.metrics import NOTHING, StepMetrics

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on


class IdleSession:
    """A session with the methods of `Session` that training scripts call; it changes nothing.

    Args:
        model: the one that it was attached to.
    """

    rank, world = 0, 1
    sync, settled, counts_calls = True, True, False
    tuning = crosses_barrier = failed = has_other_buffers = False
    tuned = auto = trains_more = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    summed: Sequence[tuple[str, torch.nn.Parameter]] = ()

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.closed = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is summed anyway."""
        yield

    @contextlib.contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """There are no other ranks with more inputs."""
        yield

    def sum_next_backward(self) -> None:
        """Nothing is summed anyway."""

    def flush(self) -> None:
        """Nothing is awaited."""

    def abort(self, error: BaseException) -> None:
        """There is nobody to tell."""

    def leave(self, error: SystemExit) -> None:
        """There is nobody to tell."""

    def leave_alone(self) -> None:
        """It is alone."""

    def metrics(self) -> StepMetrics:
        """Nothing is summed, so no step waits; no other number is known."""
        return NOTHING.copy()

    def close(self) -> None:
        """There is nothing to detach."""
        self.closed = True

    @property
    def plan(self) -> Plan:
        """Raises `JobError`: there is none."""
        self._has_none("plan")

    @property
    def network(self) -> Network:
        """Raises `JobError`: there is none."""
        self._has_none("network")

    @property
    def places(self) -> tuple[Place, ...]:
        """Raises `JobError`: there are none."""
        self._has_none("places")

    def profile(self) -> Profile:
        """Raises `JobError`: there is none."""
        self._has_none("profile")

    def timeline(self) -> Timeline:
        """Raises `JobError`: there is none."""
        self._has_none("timeline")

    def dispatch_log(self) -> Log:
        """Raises `JobError`: there is none."""
        self._has_none("log")

    def _has_none(self, what: str) -> NoReturn:
        raise JobError(
            f"no {what}: one process trains alone, and nothing is summed; start several ranks (gradlane launch --nproc 2), or "
            "name a policy to have one rank carry it out"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
