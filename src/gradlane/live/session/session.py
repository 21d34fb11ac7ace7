"""Session: gradlane attached to one model and its optimizers on one rank, as a script sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradlane.core.network import Network
from gradlane.core.place import Place
from gradlane.core.plan import Plan
from gradlane.core.profile import Profile
from gradlane.core.records.dispatch_log import Log
from gradlane.core.records.search_log import SearchLog
from gradlane.core.records.tuned import Tuned
from gradlane.core.timeline import Timeline
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.adapt.controller import PlanController
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.backends.streams import Streams
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder
from gradlane.live.comm.turn import turn
from gradlane.live.comm.verdict import LEFT_S
from gradlane.live.session.deferred_step import DeferredStep
from gradlane.live.session.finite import FiniteCheck, Unchecked
from gradlane.live.session.gpu import Gpu
from gradlane.live.session.gradient_reads import GradientReads
from gradlane.live.session.gradients import Gradients
from gradlane.live.session.ignored import synchronised_tensors
from gradlane.live.session.iterations import Iterations
from gradlane.live.session.job import Job
from gradlane.live.session.measuring import Measuring
from gradlane.live.session.metrics import Meter, Progress, StepMetrics
from gradlane.live.session.module_buffers import BufferSync
from gradlane.live.session.parts import Parts
from gradlane.live.session.step_observer import StepObserver
from gradlane.live.session.torch_actions import TorchActions
from gradlane.live.session.uneven import UnevenInputs
from gradlane.live.session.updates import Updates

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on


class Session:
    """Made by `gradlane.attach`; `close()`, or the end of a `with` block, detaches it.

    A training script may use `no_sync()`, `flush()`, `profile()`, `timeline()`, `plan`, `tuned`,
    `auto` and `close()`. Any method may raise a `JobError`, after which the session is of no more
    use.

    Args:
        job: the model and optimizers on this rank.
        backend: carries the messages.
        streams: of the device that the model is on; None for the CPU.
        planner: makes the plans, and measures the profile for them.
        controller: changes the plan while the job trains; None to keep it.
        first_plan: in force until the policy's own plan is there.
        may_cross: updates may be deferred past `step()`, if the plan says so.
        coordination: with the other ranks.
        buffers: keeps the model's buffers equal to rank 0's; None to leave them alone.
        verifier: compares steps with DDP's, or ignores them.
        checks_finite: end the job before an update with a gradient that is not finite.
        keeps_log: keep a log of what the Dispatcher is told and answers.
    """

    _parts: Parts
    _iterations: Iterations
    # what `close` calls first and last
    _before_close: Callable[[Session], None] | None = None
    _after_close: Callable[[Session], None] | None = None
    _is_closing = False

    def __init__(
        self,
        job: Job,
        backend: Backend,
        streams: Streams | None,
        *,
        planner: Planner,
        controller: PlanController | None,
        first_plan: Plan,
        may_cross: bool,
        coordination: Coordination,
        buffers: BufferSync | None,
        verifier: StepObserver,
        checks_finite: bool,
        keeps_log: bool,
    ) -> None:
        self.model, self.rank, self.world = job.model, job.rank, job.world
        self._recorder = Recorder()
        on_buffers = (lambda forward, word: None) if buffers is None else buffers.announced
        self._driver = Driver(job.rank, job.global_rank, coordination, backend, streams, self._recorder, on_buffers, keeps_log)
        self._failures = self._driver.failures
        verifier.connect(self._driver.abort, self._driver.wait_for_works)
        self._failures.at_once.append(verifier.interrupt)
        if buffers is not None:
            self._failures.at_once.append(buffers.interrupt)
            buffers.connect(self._driver.coordination.announce_buffers, self._failures.notify)
        finite = FiniteCheck(self._driver) if checks_finite else Unchecked()
        self._driver.inspect = finite.contributes
        self._gradients = Gradients(self._driver, GradientReads(), scale=1.0 / job.world)
        actions = TorchActions(
            self._driver, self._recorder, self._gradients, verifier, finite,
            on_use=lambda tracked: self._iterations.use(tracked), on_state=self._settle,
        )  # fmt: skip
        updates: Updates[DeferredStep] = Updates(turn, actions)
        self._parts = Parts(
            job=job, backend=backend, driver=self._driver, recorder=self._recorder, planner=planner, controller=controller,
            verifier=verifier, buffers=buffers, finite=finite,
            measuring=Measuring(self._driver, planner, streams, device_waits=streams is not None and job.world > 1),
            gradients=self._gradients, actions=actions, updates=updates,
            gpu=Gpu(job.device, updates, actions, lambda text, kind: self._parts.fail(text, kind)),
            meter=Meter(self._driver, planner, on_device=streams is not None, world=job.world), may_cross=may_cross,
        )  # fmt: skip
        self._iterations = Iterations(self._parts, first_plan)
        self._passes = self._iterations.passes

    def _settle(self) -> None:
        self._parts.updates.settle()

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that were given to attach."""
        return self._parts.job.optimizers

    @property
    def plan(self) -> Plan:
        """The plan in force. In the first iterations it is a safe one, see `settled`."""
        return self._parts.plan

    @property
    def settled(self) -> bool:
        """Whether the profile has been taken and the policy's own plan is in force."""
        return self._parts.settled

    @property
    def tuned(self) -> Tuned | None:
        """On rank 0 of a session that tunes: its knobs in force and trials so far; else None."""
        found = None if self._parts.controller is None else self._parts.controller.record()
        return found if isinstance(found, Tuned) else None

    @property
    def auto(self) -> SearchLog | None:
        """On rank 0 of a session under `auto`: what it predicted, tried and kept; else None."""
        found = None if self._parts.controller is None else self._parts.controller.record()
        return found if isinstance(found, SearchLog) else None

    @property
    def tuning(self) -> bool:
        """Whether knobs or policies are being tried; the same on all ranks.

        `auto` may begin again at any time.
        """
        return self._parts.controller is not None and not self._parts.controller.settled

    @property
    def crosses_barrier(self) -> bool:
        """Whether the next forward pass may begin before all updates have arrived."""
        return self._parts.crosses

    @property
    def network(self) -> Network:
        """The network that plans are made for: given to attach, or measured by it."""
        return self._parts.planner.network

    @property
    def places(self) -> tuple[Place, ...]:
        """That network with what carries messages there now, and then those of other backends that plans may be tried over."""
        planner = self._parts.planner
        return planner.place, *(place for place in planner.places if place.backend != planner.place.backend)

    @property
    def failed(self) -> bool:
        """Whether the job has failed, here or on another rank; it cannot train any more."""
        return self._failures.failure is not None

    def metrics(self) -> StepMetrics:
        """What the last whole step took on this rank, as plain numbers for a logger.

        Waits for nothing, and costs microseconds: call it in each step. `StepMetrics` says what each
        number is; a number that is not known yet is None.
        """
        return self._parts.meter.metrics(self.tuning)

    def print_progress(self, every_s: float, name: str = "") -> None:
        """From now on print a line on stderr every `every_s` seconds, or after each step that is longer.

        Args:
            every_s: seconds.
            name: of the session, for the lines of a process with several.
        """
        self._parts.meter.on_step = Progress(self.metrics, every_s, name).step

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
        if self._parts.buffers is not None:
            raise UnsupportedError(
                "join(): the model's buffers follow rank 0's, which may be the first without inputs; pass "
                "broadcast_buffers=False to attach: all ranks then end with the buffers of the rank with the most inputs"
            )
        if self._parts.verifier.compares:
            raise UnsupportedError("join(): verify compares steps of all ranks, and some have fewer; leave verify out")
        self._parts.verifier.excuse()
        self._parts.uneven = UnevenInputs(
            self.rank, self.world, self._parts.backend, self._failures.collective, divide_by_initial_world_size,
            throw_on_early_termination,
        )  # fmt: skip
        try:
            yield
            self._settle()
            self._passes.backward_ended()
            with self._gradients.set_aside():
                self._parts.uneven.finish(self._iterations.take_part, synchronised_tensors(self.model, self._parts.job.ignored))
        finally:
            self._parts.uneven = None
            self._gradients.scale_by(1.0 / self.world)

    def flush(self) -> None:
        """Wait for every sum and run every deferred update, so that all values are as under DDP.

        Call it if something reads parameters without Python between `step()` and the next forward pass: a C++ extension that
        keeps a pointer, or a process that shares their memory.
        """
        self._settle()
        if not self._iterations.in_backward:
            self._gradients.give_all()

    def profile(self) -> Profile:
        """The profile that was measured in the first iterations, or given to attach.

        Raises:
            JobError: there is none yet.
        """
        if self._parts.planner.profile is None:
            raise JobError("no profile yet: it is made at the start of the backward pass after the measured iterations")
        return self._parts.planner.profile

    @property
    def has_profile(self) -> bool:
        """Whether `profile()` has one by now."""
        return self._parts.planner.profile is not None

    def timeline(self) -> Timeline:
        """What happened in the last iterations under the plan in force, up to now.

        Waits for every sum and runs every deferred update, so that their spans are complete.
        """
        self._settle()
        return self._recorder.timeline(self.plan.fingerprint, self.rank)

    def dispatch_log(self) -> Log:
        """The facts that the Dispatcher got in the last iterations, and its answers, for `schedule.replay`.

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
        self._passes.sync = False
        self._parts.left_alone = True

    def close(self) -> None:
        """Wait for what is in flight, and detach: remove hooks, threads, sockets, process groups.

        Raises:
            JobError: the last sums failed. If the job had failed before, nothing is raised; parameters
                whose update `step()` had left until their sums arrive refuse to be read.
        """
        self._close(None)

    def _close(self, because_of: BaseException | None) -> None:
        """Detach, at the end or `because_of` an exception that leaves the `with` block."""
        if self.closed or self._is_closing:  # by a signal handler, while it waits
            return
        self._is_closing = True
        parts = self._parts
        try:
            if because_of is not None:
                self._end_with(because_of)
            elif not self.failed and not self._iterations.in_backward:
                self._settle()
                self._iterations.verify()
                if self._before_close is not None:
                    self._before_close(self)
                parts.refused_aloud(lambda buffers: buffers.finish(self._failures.wait_until))
                if parts.buffers is not None:
                    parts.buffers.close()
                parts.verifier.close()
                summary = parts.verifier.summary(self._driver.iteration + 1)
                if summary is not None:
                    parts.tell("verified", summary)
        finally:
            self._iterations.give_up(str(self._failures.failure or "close() was interrupted"))
            if parts.controller is not None:
                parts.controller.close()
            self._driver.close(None if self.failed else because_of)
            if self._after_close is not None:
                self._after_close(self)

    def _end_with(self, error: BaseException) -> None:
        """Make the updates that `step()` has deferred, for a script that catches `error` and saves what it has.

        All ranks have sent the gradients of these updates, so that their sums come soon. Other ranks may be about to end in
        the same way; `Driver.close` tells them why this one leaves. Otherwise the job fails at once: inside a backward pass, of
        an error of gradlane's, and where ranks may be blocked by sums that are queued on a device.
        """
        parts = self._parts
        fails = isinstance(error, JobError) or self._iterations.in_backward or parts.backend.has_streams
        with contextlib.suppress(JobError):  # the job has failed elsewhere: that stands
            if not fails and self._driver.wait_briefly(round(LEFT_S * 1e9)):
                self._settle()
                if parts.buffers is not None:
                    parts.buffers.close()
                parts.verifier.close()
                return
        self.abort(error)

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed with `error`; they raise `PeerFailed`."""
        self._driver.abort(error)

    def leave(self, error: SystemExit) -> None:
        """The script ends this process by `error`. Ranks that take more steps hear so when this one closes, as it ends."""

    @property
    def closed(self) -> bool:
        """Whether the session has been detached from the model."""
        return self._passes.closed

    @property
    def summed(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names, at attach, and parameters of the model whose gradients are summed wherever they are trained."""
        return self._iterations.summed

    @property
    def trains_more(self) -> str | None:
        """The name of a parameter that was frozen at attach and is trained now; None if there is none."""
        return self._iterations.trains_more

    @property
    def has_other_buffers(self) -> bool:
        """Whether the model has other buffers than at attach, which are not kept equal to rank 0's."""
        return self._parts.buffers is not None and self._parts.buffers.changed is not None

    @property
    def sync(self) -> bool:
        """Whether backward passes sum gradients; `no_sync()` sets it, and a wrapper of the model may."""
        return self._passes.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._passes.sync = sync

    @property
    def counts_calls(self) -> bool:
        """Whether calls of the model count as forward passes; a wrapper sets it for its own calls."""
        return self._passes.counts_calls

    @counts_calls.setter
    def counts_calls(self, counts: bool) -> None:
        self._passes.counts_calls = counts
        if counts:
            self._passes.come_first()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let backward passes inside accumulate gradients on this rank only, as DDP's `no_sync`.

        Their forward passes belong inside too.
        """
        return self._passes.no_sync()

    def sum_next_backward(self) -> None:
        """Let the next backward pass sum gradients, although its forward pass was under `no_sync()`."""
        self._passes.sum_next_backward()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._close(error)
