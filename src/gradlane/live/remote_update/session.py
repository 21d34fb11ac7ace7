"""ServedSession: gradlane attached to a model whose parameters are on servers, as a script sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from gradlane.core.plan import Plan
from gradlane.live.remote_update.iterations import ServedIterations
from gradlane.live.remote_update.values import Values

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

_ALL_CLOSE = "every rank to call close() of this session; where a rank has several, all ranks must close them in one order"


class ServedSession:
    """Made by `gradlane.attach_to_servers`; `close()`, or the end of a `with` block, detaches it.

    A training script may use `no_sync()`, `flush()`, `iteration`, `fetch_optimizer_state()` and
    `close()`. Any method may raise a `JobError`, after which the session is of no more use.

    Args:
        iterations: of the model.
        values: the servers' parameters.
        after_close: called with the session once it is detached.
    """

    _is_closing = False

    def __init__(self, iterations: ServedIterations, values: Values, after_close: Callable[[ServedSession], None]) -> None:
        self._iterations, self._values, self._after_close = iterations, values, after_close
        self._passes = iterations.passes
        self.model, self.rank, self.staleness = self._passes.model, iterations.rank, iterations.staleness

    @property
    def plan(self) -> Plan:
        """In which messages gradients go out and parameters come back."""
        return self._values.plan

    @property
    def iteration(self) -> int:
        """Index of the last backward pass that sent gradients, from 0; -1 before the first."""
        return self._iterations.iteration

    @property
    def failed(self) -> bool:
        """Whether the job has failed, on this rank or another."""
        return self._iterations.failed

    @property
    def summed(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters of the model: the gradients of all that are trained are summed."""
        return list(self.model.named_parameters())

    @property
    def closed(self) -> bool:
        """Whether the session has been detached from the model."""
        return self._passes.closed

    def check(self) -> None:
        """Raise the error that ended the job, if there is one."""
        self._iterations.check()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside accumulate gradients on this rank only, as DDP's `no_sync`.

        Their forward passes belong inside too.
        """
        return self._passes.no_sync()

    def flush(self) -> None:
        """Wait until the model has every parameter of the last step."""
        self._iterations.flush()

    def fetch_optimizer_state(self) -> None:
        """Copy the servers' optimizer state to this rank's optimizers, until the next backward
        pass.

        For checkpoints: call it between `step()` and the next backward pass, on the ranks that need it.
        """
        self._iterations.fetch_optimizer_state()

    def close(self) -> None:
        """Wait until every rank has called `close`, copy the servers' parameters and state, and
        detach.

        All ranks then have the same parameters, updated by every gradient, and the same optimizer
        state. A rank that is ahead waits for as long as the others train. After a failure it only
        detaches.
        """
        if self.closed or self._is_closing:  # by a signal handler, while it waits
            return
        self._is_closing = True
        iterations = self._iterations
        try:
            if not self.failed and not iterations.in_backward:
                iterations.flush()
                if self.staleness != 0:
                    iterations.actions.refuse_writes(iterations.tracked)
                self._values.leave()
                if iterations.buffers is not None:
                    iterations.buffers.close()
                iterations.take_unstepped()
                self._values.meet(_ALL_CLOSE)
                if self.staleness != 0:
                    self._values.fetch("parameters")
                    iterations.actions.copy(iterations.tracked)
                iterations.fetch_states()
                self._values.meet(_ALL_CLOSE)
        finally:
            self._passes.close()
            iterations.give_up()
            self._values.close()
            self._after_close(self)

    def abort(self, error: BaseException) -> None:
        """Fail the job with `error`; the other ranks raise `PeerFailed` with its text."""
        self._iterations.abort(error)

    def leave(self, error: SystemExit) -> None:
        """The script ends this process by `error`: fail the job. A rank that waits for nobody would go on."""
        if not self.closed:
            self.abort(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self.closed:
            self.abort(error)
        self.close()
