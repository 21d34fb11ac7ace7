"""Session: gradlane attached to one model and its optimizers on one rank, as a script sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.dispatch_log import Log
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.tuned import Tuned
from gradlane.core.timeline import Timeline
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.session import guards
from gradlane.live.session.ignored import synchronised_tensors
from gradlane.live.session.iterations import Iterations
from gradlane.live.session.metrics import Progress, StepMetrics
from gradlane.live.session.uneven import UnevenInputs


class Session(Iterations):
    """Made by `gradlane.attach`; `close()`, or the end of a `with` block, detaches it.

    A training script may use `no_sync()`, `flush()`, `profile()`, `timeline()`, `plan`, `tuned`,
    `auto` and `close()`. Any method may raise a `JobError`, after which the session is of no more
    use. `Iterations` has the arguments.
    """

    # what `close` calls first and last
    _before_close: Callable[[Session], None] | None = None
    _after_close: Callable[[Session], None] | None = None

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that were given to attach."""
        return self._optimizers

    @property
    def plan(self) -> Plan:
        """The plan in force. In the first iterations it is a safe one, see `settled`."""
        return self._plan

    @property
    def settled(self) -> bool:
        """Whether the profile has been taken and the policy's own plan is in force."""
        return self._settled

    @property
    def tuned(self) -> Tuned | None:
        """On rank 0 of a session that tunes: its knobs in force and trials so far; else None."""
        found = None if self._controller is None else self._controller.record()
        return found if isinstance(found, Tuned) else None

    @property
    def auto(self) -> SearchLog | None:
        """On rank 0 of a session under `auto`: what it predicted, tried and kept; else None."""
        found = None if self._controller is None else self._controller.record()
        return found if isinstance(found, SearchLog) else None

    @property
    def tuning(self) -> bool:
        """Whether knobs or policies are being tried; the same on all ranks.

        `auto` may begin again at any time.
        """
        return self._controller is not None and not self._controller.settled

    @property
    def crosses_barrier(self) -> bool:
        """Whether the next forward pass may begin before all updates have arrived."""
        return self._crosses

    @property
    def network(self) -> Network:
        """The network that plans are made for: given to attach, or measured by it."""
        return self._planner.network

    @property
    def failed(self) -> bool:
        """Whether the job has failed, here or on another rank; it cannot train any more."""
        return self._failures.failure is not None

    def metrics(self) -> StepMetrics:
        """What the last whole step took on this rank, as plain numbers for a logger.

        Waits for nothing, and costs microseconds: call it in each step. `StepMetrics` says what each
        number is; a number that is not known yet is None.
        """
        return self._meter.metrics(self.tuning)

    def print_progress(self, every_s: float) -> None:
        """From now on print a line on stderr every `every_s` seconds, or after each step that is longer."""
        self._meter.on_step = Progress(self.metrics, every_s).step

    @contextlib.contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Let ranks have inputs in different numbers inside, as DDP's `join` (collective).

        Each iteration costs an agreement of all ranks, on how many of them still have inputs. A rank
        that has come to the end contributes zeros to the others' sums. At the end of the block all
        parameters and buffers become those of the rank with the most inputs, but no optimizer's state.

        Args:
            divide_by_initial_world_size: divide each sum by the number of all ranks; if not, by the
                number of those that still have inputs.
            enable: False makes the block one that does nothing.
            throw_on_early_termination: raise an error on all ranks as soon as one has no input left.

        Raises:
            UnevenInputsError: a rank has no input left, and `throw_on_early_termination` is True.
            UnsupportedError: buffers are kept equal to rank 0's, or steps are verified.
            JobError: the job has failed.
        """
        if not enable:
            yield
            return
        if self._buffers is not None:
            raise UnsupportedError(
                "join(): the model's buffers follow rank 0's, which may be the first without inputs; pass "
                "broadcast_buffers=False to attach: all ranks then end with the buffers of the rank with the most inputs"
            )
        if self._verifier.compares:
            raise UnsupportedError("join(): verify compares steps of all ranks, and some have fewer; leave verify out")
        self._uneven = UnevenInputs(
            self.rank, self.world, self._backend, self._failures.collective, divide_by_initial_world_size,
            throw_on_early_termination,
        )  # fmt: skip
        try:
            yield
            self._settle()
            self._accumulated.clear()
            with self._gradients.set_aside():
                self._uneven.finish(self._take_part, synchronised_tensors(self.model, self._ignored))
        finally:
            self._uneven = None
            self._gradients.scale_by(1.0 / self.world)

    def flush(self) -> None:
        """Wait for every sum and run every deferred update, so that all values are as under DDP.

        This is needed only if something reads parameters without Python between `step()` and the
        next forward pass: a C++ extension that keeps a pointer, or another process that shares
        their memory.
        """
        self._settle()
        if not self._in_backward:
            self._gradients.give_all()

    def profile(self) -> Profile:
        """The profile that was measured in the first iterations, or given to attach.

        Raises:
            JobError: there is none yet.
        """
        if self._planner.profile is None:
            raise JobError("no profile yet: it is made at the start of the backward pass after the measured iterations")
        return self._planner.profile

    @property
    def has_profile(self) -> bool:
        """Whether `profile()` has one by now."""
        return self._planner.profile is not None

    def timeline(self) -> Timeline:
        """What happened in the last iterations under the plan in force, up to now.

        Waits for every sum and runs every deferred update, so that their spans are complete.
        """
        self._settle()
        return self._recorder.timeline(self._plan.fingerprint, self.rank)

    def dispatch_log(self) -> Log:
        """What the Dispatcher was told and answered in the last iterations, for `schedule.replay`.

        The log begins with the plan in force, at the earliest.

        Raises:
            JobError: attach was not asked to keep it (`keep_log=True`).
        """
        log = self._driver.log
        if log is None:
            raise JobError("no log is kept: pass keep_log=True to gradlane.attach")
        return log

    def on_close(self, before: Callable[[Session], None], after: Callable[[Session], None]) -> None:
        """Set what `close` calls.

        Args:
            before: called with the session before it is detached, unless the job has failed.
            after: called with the session once it is detached, also if the job has failed.
        """
        self._before_close, self._after_close = before, after

    def leave_alone(self) -> None:
        """Let every later pass of the model be of this rank alone: nothing is summed, no buffer sent.

        What is under way is finished. Any thread may call it.
        """
        self.sync = False
        self._left_alone = True

    def close(self) -> None:
        """Wait for what is in flight, and detach: remove hooks, threads, sockets, process groups.

        Raises:
            JobError: the last sums failed. If the job had failed before, nothing is raised; parameters
                whose update `step()` had left until their sums arrive refuse to be read.
        """
        if self._closed:
            return
        try:
            if self._failures.failure is None and not self._in_backward:
                self._settle()
                self._verify()
                if self._before_close is not None:
                    self._before_close(self)
                if self._buffers is not None:
                    self._refused_aloud(lambda buffers: buffers.finish(self._failures.wait_until))
                    self._buffers.close()
                self._verifier.close()
                summary = self._verifier.summary(self._driver.iteration + 1)
                if summary is not None:
                    self._tell("verified", summary)
        finally:
            self._detach_hooks()
            self._gpu.close()
            self._deferred.give_up(str(self._failures.failure or "close() was interrupted"), self._name_of)
            guards.unwatch_all(self._params)
            self._gradients.close(failed=self.failed)
            if self._controller is not None:
                self._controller.close()
            self._driver.close()
            if self._after_close is not None:
                self._after_close(self)

    def _is_busy_here(self) -> bool:
        lock: Any = self._failures.lock
        return bool(lock._is_owned())

    def _in_child(self) -> None:
        super()._in_child()
        guards.unwatch_all(self._params)
        self._gradients.close(failed=self._in_backward)

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed with `error`; they raise `PeerFailed`."""
        self._driver.abort(error)
