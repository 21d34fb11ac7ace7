"""Driver: a session's gradients and sums, from a gradient in its slot to the sum in the same slot.

A `Carrier` (`carrier.py`) carries out the plan in force. It is the node's engine if the plan's sums can do without this process
(`Sums.carry_out`), else an engine of this process. The driver has what both have in common: the memory, the device, and
waiting. Failing is in `failures.py`; what rank 0 decides for all is in `coordination.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from gradlane.core.plan import Plan
from gradlane.core.profile import TensorSpec
from gradlane.core.records.dispatch_log import Log
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.backends.base import Backend, Sums
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.norms import Norms
from gradlane.live.backends.process_groups import ProcessGroups
from gradlane.live.backends.staged_norms import StagedNorms
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import Streams
from gradlane.live.comm.carrier import Carrier, HostCarrier, NodeCarrier
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.recorder import Recorder, Waited, blocked, now_ns
from gradlane.live.comm.stragglers import BusyTimes


class Driver:
    """The messages of one session.

    Args:
        rank, global_rank: of this process, in the session's group and in the whole job.
        coordination: with the other ranks, and its failures.
        backend: carries the messages.
        streams: of the device that the model is on; None for the CPU. Unless the backend sums in these
            streams (`has_streams`), gradients are staged in CPU memory.
        recorder: keeps the times of what happens.
        on_buffers: called with a number of forward passes and what rank 0 says of its buffers after
            them, see `ControlChannel`.
        keeps_log: keep a log of what the Dispatcher is told and answers.

    Attributes:
        iteration: the one that runs or ran last, from 0; -1 before the first.
        plan: the plan in force.
        plans: how many were put in force so far.
        slots: by tensor: the memory of its gradient and, once that has arrived, of its sum.
        gradient_buffers: the memory of the slots, on the model's device.
        summed: the memory that the backend sums in: `gradient_buffers`, or their mirror in CPU memory.
        late: those of some tensors whose sums have not arrived. Does not wait. Call `wait_for` before using others on a device.
        waited: for sums, by each thread.
        inspect: called with tensors before the engine hears that they are ready.
    """

    def __init__(
        self,
        rank: int,
        global_rank: int,
        coordination: Coordination,
        backend: Backend,
        streams: Streams | None,
        recorder: Recorder,
        on_buffers: Callable[[int, int], None],
        keeps_log: bool = False,
    ) -> None:
        self.rank, self.global_rank = rank, global_rank
        self.iteration = -1
        self.plans = 0
        self.coordination, self.failures = coordination, coordination.failures
        self._backend = backend
        self.streams = streams
        self._staging = None if streams is None or backend.has_streams else Staging(streams)
        self._recorder = recorder
        self._keeps_log = keeps_log
        self._is_closed = False
        self.waited, self.waited_otherwise = Waited(), Waited()  # for sums, and for what else other ranks send
        self.inspect: Callable[[Sequence[int]], None] = lambda tensors: None
        self._busy_times = BusyTimes(coordination.channel.busy)
        self._sums: Sums
        self._carrier: Carrier
        self._communicated_ns = 0  # under plans before this one
        self._joined: set[int] = set()  # messages of this iteration for which a stream of the script's waits
        self.gradient_buffers = GradientBuffers([])
        self._laid_out: tuple[TensorSpec, ...] = ()
        self.failures.at_once.append(backend.interrupt)
        coordination.listen(self._follow, on_buffers)

    # -- one plan, one iteration -------------------------------------------------------------------

    def take_up(self, plan: Plan, params: Sequence[torch.nn.Parameter], coordinated: bool) -> None:
        """Put `plan` in force. No message may be in flight.

        Args:
            plan: the same on every rank.
            params: in the order of the plan's tensors.
            coordinated: rank 0 decides the order of messages while they run, and the others follow.

        Raises:
            JobError: what carries the plan has failed meanwhile; the other ranks are told.
        """
        # if the tensors are the same, the slots stay: others refer to them, and caches hold them
        if plan.tensors != self._laid_out:
            self.gradient_buffers, self._laid_out = GradientBuffers(params), plan.tensors
            if self._staging is not None:
                self._staging.take_up(params, self.gradient_buffers)
        self._has_begun = False  # until then no sum of this plan is anywhere
        self.plan, self._messages_of = plan, plan.messages_by_tensor
        self.plans += 1
        self.slots = self.gradient_buffers.slots
        self._every = range(len(self.slots))
        self.summed = self.gradient_buffers if self._staging is None else self._staging.mirror
        buffers = self.summed.message_buffers(plan)
        try:
            self._sums = self.failures.collective(lambda: self._backend.prepare(plan, buffers), "the connections for a plan")
        except JobError as error:  # of this rank alone, maybe
            self.abort(error)
            raise
        norms = self._sums.norms
        if norms is not None and self._staging is not None and self.streams is not None:
            norms.staged = StagedNorms(self._staging, self.streams, norms.owned, norms.order, norms.memory)
        self._communicated_ns = self.communicated_ns
        self._carrier = self._carrier_of(plan, coordinated)
        self.late = self._late_in_stream if self._backend.has_streams else self._carrier.late
        self.failures.interrupt = self._interrupt
        self.failures.whereabouts = self

    def _carrier_of(self, plan: Plan, coordinated: bool) -> Carrier:
        engine = self._sums.carry_out(self._keeps_log, self.failures.suspect)
        if engine is not None:
            return NodeCarrier(engine, self._sums, self.failures, self._recorder)
        return HostCarrier(
            plan,
            self._sums,
            self.coordination,
            self._recorder,
            coordinated=coordinated,
            chooses=coordinated and self.rank == 0,
            keeps_log=self._keeps_log,
            is_over=self._is_over,
        )

    def _is_over(self) -> bool:
        return self._is_closed or self.failures.failure is not None

    def begin(self) -> None:
        """Begin an iteration. All sums of the one before must have arrived."""
        if self.streams is None:
            self._busy_times.step(now_ns(), self.failures.waited.total_ns)
        if self._staging is not None:
            self._staging.begin()
        self.gradient_buffers.mark_all_present()
        self._has_begun = True
        self._joined.clear()
        with self.failures.lock:
            self.iteration += 1
            self.failures.notify_if_awaited()  # another thread may still wait for a sum of the iteration before
            self._carrier.begin(self.iteration)
            self.coordination.begin(self.iteration)

    def ready(self, tensors: Sequence[int]) -> None:
        """Report that the slots of `tensors`, one or more, hold this rank's gradients, or will once the
        device has done what it was given so far.
        """
        if self._staging is None:
            self._ready(tensors)
        else:
            self._staging.bring_down(tensors, lambda error: self._brought_down(tensors, error))

    def _ready(self, tensors: Sequence[int]) -> None:
        """The memory in which `tensors` are summed holds this rank's gradients."""
        self.inspect(tensors)
        self._carrier.ready(tensors)

    def range_of(self, tensors: Sequence[int]) -> torch.Tensor:
        """The slots of `tensors`, which are neighbours in the plan and of one dtype, as one tensor."""
        return self.gradient_buffers.range_of(tensors[0], tensors[-1])

    def all_are_ready(self) -> None:
        """Every gradient of this iteration was reported ready."""
        if self._staging is None:
            self._carrier.flush()
        else:
            self._staging.then(lambda error: self._brought_down((), error))

    @property
    def log(self) -> Log | None:
        """What the Dispatcher was told and answered in the last iterations; None without a log."""
        return self._carrier.log

    def _brought_down(self, tensors: Sequence[int], error: BaseException | None) -> None:
        """Called on the thread of `Staging`: the gradients of `tensors` are in the memory that is summed; without any, all
        gradients of the iteration are.
        """
        try:
            if not self._is_over():
                if error is not None:
                    what = f"the device failed while it copied gradients to CPU memory: {error}"
                    raise JobError(f"{self.where}: {what}") from error
                if tensors:
                    self._ready(tensors)
                else:
                    self._carrier.flush()
        except BaseException as failure:  # this thread has no caller that could handle it
            if self.failures.failure is None:
                self.abort(failure)

    def _follow(self, message: int) -> None:
        """Let `message` start, which rank 0 put next."""
        assert isinstance(self._carrier, HostCarrier), "no order is decided for a node"
        self._carrier.allow(message)

    # -- waiting -----------------------------------------------------------------------------------

    def _late_in_stream(self, tensors: Sequence[int]) -> list[int]:
        """Those of `tensors` whose sums have not arrived for the host, or are still queued on the device.

        A sum for which the script's stream waits is not late: the script may have changed it.
        """
        late = self._carrier.late(tensors)
        if self._has_begun:
            late += [tensor for tensor in tensors if not all(map(self._is_joined, self._messages_of[tensor]))]
        return late

    def _is_joined(self, message: int) -> bool:
        return message in self._joined or self._sums.has_ended(message)

    def late_behind(self, tensor: int, others: Sequence[int]) -> list[int]:
        """Those of `others` for whose sums whoever has waited for `tensor` has to wait longer."""
        if not self._backend.has_streams:
            return self._carrier.late(others)
        come = self._sums.ended_with(self._messages_of[tensor])
        return [other for other in others if not come.issuperset(self._messages_of[other])]

    @property
    def all_are_there(self) -> bool:
        """Whether every sum of this iteration has arrived. Where sums are queued on a device, False."""
        self.look()
        return self._carrier.all_arrived and not self._backend.has_streams

    @property
    def communicated_ns(self) -> int:
        """For how long so far at least one message was on its way; one that still is does not count yet."""
        return self._communicated_ns + (self._carrier.communicated_ns if self.iteration >= 0 else 0)

    def look(self) -> None:
        """Take note of what has arrived by now, where that is not told by itself."""
        self._carrier.look()

    def wait_for(self, tensors: Sequence[int]) -> None:
        """Wait until the sums of `tensors` are in their slots, or until another thread has begun the next iteration, for which
        they had to be there.

        On a device the script's stream waits for the slots. The host waits for the sums, unless they are queued on the device
        too.

        Raises:
            JobError: the job has failed, or a sum did not arrive in time.
        """
        iteration = self.iteration
        late = self._carrier.late(tensors)
        if len(late) > 1 and set(late).issuperset(self._carrier.late(self._every)):  # one wait takes less time than many
            self._wait(None, "the sums of this iteration")
        else:
            for tensor in late:
                self._wait(tensor, f"the sum of {self.plan.tensors[tensor].name}")
                if self.iteration != iteration:
                    break
        self._join_in(iteration, tensors)

    def _join_in(self, iteration: int, tensors: Sequence[int]) -> None:
        """`_join`, unless another thread has begun the next iteration meanwhile, whose sums are not there."""
        if self.streams is not None and self._has_begun and self.iteration == iteration:
            self._join(tensors)

    def _join(self, tensors: Sequence[int]) -> None:
        """Make the script's stream wait for sums that have arrived for the host."""
        if self._staging is not None:
            self._staging.bring_up(tensors)
        else:
            messages = {message for tensor in tensors for message in self._messages_of[tensor]}
            for message in messages:
                self._sums.join(message)
            self._joined |= messages

    def wait_for_all(self) -> None:
        """Wait for every sum of this iteration, as `wait_for` does.

        Raises:
            JobError: the job has failed, or a sum did not arrive in time.
        """
        iteration = self.iteration
        if not self._carrier.all_arrived:
            self._wait(None, "the sums of this iteration")
        self._join_in(iteration, self._every)

    @property
    def norms(self) -> Norms | None:
        """The norms of this iteration's sums, which come before the sums; None where the plan's tensors have no owners."""
        return self._sums.norms

    def wait_for_norms(self, norms: Norms) -> None:
        """Wait until `norms` are there, or until another thread has begun the next iteration. Of sums in a stream, the script's
        stream waits.

        Raises:
            JobError: the job has failed, or they did not come in time.
        """
        if not norms.are_there:
            began, iteration = now_ns(), self.iteration
            self.failures.wait_until(lambda: norms.are_there or self.iteration != iteration, "the norms of gradients")
            self._has_waited(None, began)
        if norms.are_there:
            self._sums.join_norms()

    def lost(self) -> list[int]:
        """Tensors whose sums were queued on a device and had not ended when the job failed: what used them is wrong."""
        messages = self._backend.lost
        return [tensor for tensor in range(len(self.slots)) if messages.intersection(self._messages_of[tensor])]

    @property
    def told_if_awaited(self) -> int:
        """Of how many messages a thread of torch.distributed would tell the end if all were waited for."""
        return self._carrier.told_if_awaited

    def wait_briefly(self, limit_ns: int) -> bool:
        """Wait until every sum of this iteration has arrived, for `limit_ns` at most. Not where sums are queued on a device.

        Returns:
            Whether they are.

        Raises:
            JobError: the job has failed.
        """
        began = now_ns()
        came = self._carrier.wait_briefly(limit_ns)
        self._has_waited(None, began)
        return came

    def _wait(self, tensor: int | None, what: str) -> None:
        began, iteration = now_ns(), self.iteration
        self._carrier.wait(tensor, what, lambda: self.iteration != iteration)
        self._has_waited(tensor, began)

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        """As `Failures.wait_until`, for what other ranks send beside gradients."""
        if predicate():
            return
        began = now_ns()
        self.failures.wait_until(predicate, what)
        waited_ns = now_ns() - began
        self.waited_otherwise.total_ns += waited_ns
        blocked.total_ns += waited_ns

    def _has_waited(self, tensor: int | None, began: int) -> None:
        ended = now_ns()
        self.waited.total_ns += ended - began
        blocked.total_ns += ended - began
        self._recorder.add("wait", self.iteration, -1 if tensor is None else tensor, began, ended)

    def wait_for_works(self, groups: ProcessGroups, works: Sequence[Any], what: str) -> None:
        """Wait for collectives of torch.distributed. On a device, the script's stream waits for them too.

        Args:
            groups: in which they were begun.
            works: what torch.distributed returned for them.
            what: names them in error messages.

        Raises:
            JobError: the job has failed, or they did not end in time.
        """
        if self.streams is None or not self.streams.orders(groups[0]):
            self.failures.wait_for_works(groups, works, what)
        if self.streams is not None:
            for work in works:
                work.wait()

    def decide(self, decided: int | None) -> int:
        """Agree on what rank 0 decided for the next iteration, see `Coordination.decide`."""
        return self.coordination.decide(self.iteration + 1, decided)

    # -- failing and ending ------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """Rank and iteration, for error messages."""
        return f"rank {self.global_rank}, iteration {self.iteration}"

    def describe_state(self) -> str:
        """What is in flight and what is waited for, for error messages."""
        return self._carrier.describe_state()

    def fail(
        self,
        text: str,
        kind: type[JobError] | type[UnsupportedError] = JobError,
        because_of: BaseException | None = None,
    ) -> NoReturn:
        """Raise an error with `text`, whose cause is `because_of`, and tell the other ranks."""
        self.failures.check()  # the first failure stands
        error = kind(f"{self.where}: {text}")
        self.abort(error)
        raise error from because_of

    def abort(self, error: BaseException) -> None:
        """Fail this rank with `error`, and tell the other ranks."""
        self.coordination.abort(error)

    def _interrupt(self) -> None:
        """End waits, since something has failed or is suspected to have."""
        self._carrier.interrupt()
        if self.failures.failure is not None:
            self.failures.end_device_work()

    def close(self, because_of: BaseException | None = None) -> None:
        """Close the control channel, then the backend.

        Args:
            because_of: the exception that made this rank leave; None at the end. The channel tells the other ranks.
        """
        self._is_closed = True
        if self._staging is not None:
            self._staging.close()
        self.coordination.channel.close(because_of)
        self._backend.close(self.failures.verdict())
