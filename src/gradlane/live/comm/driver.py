"""Driver: carries out a session's plan, from a gradient in its slot to the sum in the same slot.

Where the backend can carry the plan out by itself (`Backend.carry_out`), the driver tells the node's
engine what is ready and asks it what has arrived. Elsewhere it owns the engine, starts its messages
on the backend, and records the times. A fact is then handled at once, under one lock, by the thread
that brings it: the training thread, the backend's thread that finished a sum, the thread that waits for a
device (`Staging`), or the control channel's thread. Waiting and failing is in `failures.py`; what rank 0 decides for all is in
`coordination.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gradlane.core.plan import Plan
from gradlane.core.profile import TensorSpec
from gradlane.core.records.dispatch_log import Log
from gradlane.errors import JobError, OrderError
from gradlane.live.backends.base import Backend
from gradlane.live.backends.gradient_buffers import GradientBuffers
from gradlane.live.backends.process_groups import ProcessGroups
from gradlane.live.backends.staging import Staging
from gradlane.live.backends.streams import Event, Streams
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.live.comm.stragglers import BusyTimes
from gradlane.schedule import Engine
from gradlane.transport import NodeEngine

Subject = TypeVar("Subject")
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF


class Driver:
    """The messages of one session.

    Args:
        rank: of this process.
        coordination: with the other ranks, and its failures.
        backend: carries the messages.
        streams: of the device that the model is on; None for the CPU. Unless the backend sums in these
            streams (`has_streams`), gradients are staged in CPU memory.
        recorder: keeps the times of what happens.
        on_buffers: called with a number of forward passes and why rank 0 sends its buffers after
            them, see `ControlChannel`.
        keeps_log: keep a log of what the Dispatcher is told and answers.

    Attributes:
        iteration: the one that runs or ran last, from 0; -1 before the first.
        plan: the plan in force.
        slots: by tensor: the memory of its gradient and, once that has arrived, of its sum.
        summed: the slots in which gradients are summed: those of the model's device, or their mirror in
            CPU memory.
        inspect: called with tensors before the engine hears that they are ready.
        waited_ns: for how long the training thread has been blocked for sums so far.
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
        self.coordination, self.failures = coordination, coordination.failures
        self._backend = backend
        self.streams = streams
        self._staging = None if streams is None or backend.has_streams else Staging(streams)
        self._recorder = recorder
        self._keeps_log = keeps_log
        self._lock = self.failures.lock
        self._closed = False
        self.inspect: Callable[[Sequence[int]], None] = lambda tensors: None
        self._busy_times = BusyTimes(coordination.channel.busy)
        self._unissued = self.waited_ns = 0
        # messages that have not arrived; since when there is one; how long there was one before that
        self._under_way = self._since_ns = self._communicated_ns = 0
        # by lane: ranks need the same order within a lane, but not across lanes
        self._rolling_hashes: list[int] = []
        self._node_engine: NodeEngine | None = None
        self._gradient_buffers = GradientBuffers([])
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
            self._gradient_buffers, self._laid_out = GradientBuffers(params), plan.tensors
            if self._staging is not None:
                self._staging.take_up(params, self._gradient_buffers)
        self._has_begun = False  # until then no sum of this plan is anywhere
        self.plan = plan
        self.slots = self._gradient_buffers.slots
        self.summed = self._gradient_buffers if self._staging is None else self._staging.mirror
        self._buffers = self.summed.message_buffers(plan)
        self._events: list[Event | None] = [None] * len(params)
        self._began_ns = [0] * len(plan.messages)
        self._coordinated, self._chooses = coordinated, coordinated and self.rank == 0
        self._rolling_hashes = [0] * len(plan.lanes)
        self._agreed_order = _agreed_order(plan)
        self._second_phases = len(plan.second_phases)
        try:
            self.failures.collective(lambda: self._backend.prepare(plan, self._buffers), "the connections for a plan")
        except JobError as error:  # of this rank alone, maybe
            self.abort(error)
            raise
        self._engine: Engine | NodeEngine
        self._communicated_ns, self._under_way = self.communicated_ns, 0
        self._has_windows, self._makes_room = plan.has_windows, False
        self._node_engine = self._backend.carry_out(self._keeps_log, self.failures.suspect)
        # the engine of the plan before may have been a node's
        self.failures.interrupt = self._interrupt
        self._recorder.note_elsewhere(lambda last: [])
        if self._node_engine is not None:
            node_engine = self._engine = self._node_engine
            self._recorder.note_elsewhere(lambda last: node_engine.spans(last=last))
        else:
            self._engine = self._own_engine = Engine(
                plan, self, follow=coordinated and self.rank != 0, keeps_log=self._keeps_log
            )
        self.failures.whereabouts = self

    def begin(self) -> None:
        """Begin an iteration. All sums of the one before must have arrived."""
        if self.streams is None:
            self._busy_times.step(now_ns(), self.failures.waited_ns)
        if self._staging is not None:
            self._staging.begin()
        self._gradient_buffers.mark_all_present()
        self._has_begun = True
        with self._lock:
            self.iteration += 1
            self.failures.notify_if_awaited()  # another thread may still wait for a sum of the iteration before
            self._unissued = len(self.plan.messages) + self._second_phases
            if self._node_engine is not None:
                self._node_engine.begin(self.iteration)
                self._node_engine.interrupt()
            else:
                self._own_engine.begin()
            self._backend.begin([list(lane) for lane in self._agreed_order])
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
        """Tell the engine that the memory in which `tensors` are summed holds this rank's gradients."""
        self.inspect(tensors)
        if self._node_engine is not None:
            self._node_engine.ready(tensors)
            return
        reached = self._backend.so_far()
        now = now_ns()
        with self._lock:
            self.failures.check()  # what carried the sums may be gone
            self._recorder.add_each("ready", self.iteration, tensors, now, now)
            for tensor in tensors:
                self._events[tensor] = reached
            self._backend.look()
            self._tell(self._own_engine.ready, tensors)
            if self._has_windows:
                self._make_room()

    def range_of(self, tensors: Sequence[int]) -> torch.Tensor:
        """The slots of `tensors`, which are neighbours in the plan and of one dtype, as one tensor."""
        return self._gradient_buffers.range_of(tensors[0], tensors[-1])

    def all_are_ready(self) -> None:
        """Every gradient of this iteration was reported ready."""
        if self._node_engine is not None:
            if self._staging is None:
                self._node_engine.flush()
            else:
                self._staging.then(lambda error: self._brought_down((), error))

    def put_absent(self, tensor: int, gradient: torch.Tensor | None, scale: float, counts: bool) -> None:
        """Fill the slot of a tensor that got no gradient in this backward pass.

        Args:
            tensor: the tensor.
            gradient: goes into the slot, times `scale`; None for zeros.
            scale: factor for `gradient`.
            counts: whether this rank used the tensor nevertheless, see `used_by_anybody`.
        """
        if gradient is None:
            self.slots[tensor].zero_()
        else:
            torch.mul(gradient.detach(), scale, out=self.slots[tensor])
        if not counts:
            self._gradient_buffers.presence[tensor].zero_()

    def used_by_anybody(self, tensor: int) -> bool:
        """Whether any rank produced a gradient for `tensor`, whose sum must have arrived."""
        return float(self.summed.presence[tensor]) != 0

    def put_not_finite(self, tensor: int) -> None:
        """Mark this rank's gradient of `tensor`, before it is ready, as one that is not finite."""
        self.summed.presence[tensor].fill_(math.nan)

    def is_finite(self, tensor: int) -> bool:
        """Whether no rank has marked its gradient of `tensor`, whose sum must have arrived."""
        return math.isfinite(float(self.summed.presence[tensor]))

    @property
    def log(self) -> Log | None:
        """What the Dispatcher was told and answered in the last iterations; None without a log."""
        with self._lock:
            return self._engine.log

    # -- what the engine asks for, under the lock --------------------------------------------------

    def start(self, message: int, second_phase: bool) -> bool:
        """Hand `message` to the backend; return whether it has already ended for the host."""
        # rank 0 does not choose the order of second phases, which is the plan's
        if self._chooses or (self._coordinated and second_phase):
            self._backend.expect(message)
        if self._chooses and not second_phase:
            self.coordination.choose(message)
        now = self._began_ns[message] = now_ns()
        if not second_phase:
            self._since_ns = self._since_ns if self._under_way else now
            self._under_way += 1
        buffer = self._buffers[message]
        if second_phase:
            ended = self._backend.start_second_phase(message, buffer, self._message_done)
        else:
            events = self._events_of(message) if self._backend.has_streams else []
            ended = self._backend.start(message, buffer, events, self._message_done, self._message_sent)
        lane = self.plan.messages[message].lane
        self._rolling_hashes[lane] = (self._rolling_hashes[lane] * 1_000_003 + message + 1) & _64_BITS
        self._unissued -= 1
        if self._unissued == 0 and self._backend.needs_one_order:
            self.coordination.issued(sum(self._rolling_hashes) & _64_BITS)
        return ended

    def left(self, message: int) -> None:
        """Record that `message` has left its window; from now on it is received, if at all."""
        now = now_ns()
        self._recorder.add("send", self.iteration, message, self._began_ns[message], now)
        if self.plan.wire == "fifo":  # else a server may have begun to return packets long before
            self._began_ns[message] = now

    def arrived(self, message: int) -> None:
        """Record that the sum of `message` is in the slots of its tensors, for the host."""
        now = now_ns()
        self._under_way -= 1
        if not self._under_way:
            self._communicated_ns += now - self._since_ns
        if self.plan.messages[message].two_phase or self._backend.tells_sends:
            self._recorder.add("receive", self.iteration, message, self._began_ns[message], now)
        # the second phase of a message is its receive; a message of one phase beside such messages
        # gets a receive, too, of no duration
        elif self._second_phases:
            self._recorder.add("receive", self.iteration, message, now, now_ns())
        if self.failures.awaited:
            self.failures.notify_if_awaited()

    def _events_of(self, message: int) -> list[Event]:
        return [event for tensor in self.plan.messages[message].tensors if (event := self._events[tensor]) is not None]

    # -- facts, on any thread ----------------------------------------------------------------------

    def _tell(self, fact: Callable[[Subject], None], subject: Subject) -> None:
        """Hand a fact to the engine. If it cannot start messages, that is the job's failure."""
        try:
            fact(subject)
        except OrderError as error:
            self.abort(OrderError(f"{self.where}: {error}"))
            self.failures.check()
        except RuntimeError as error:  # torch.distributed refuses, since a connection is broken
            self.failures.suspect(error)

    def _brought_down(self, tensors: Sequence[int], error: BaseException | None) -> None:
        """Called on the thread of `Staging`: the gradients of `tensors` are in the memory that is summed; without any, all
        gradients of the iteration are.
        """
        try:
            if not self._closed and self.failures.failure is None:
                if error is not None:
                    what = f"the device failed while it copied gradients to CPU memory: {error}"
                    raise JobError(f"{self.where}: {what}") from error
                if tensors:
                    self._ready(tensors)
                elif self._node_engine is not None:
                    self._node_engine.flush()
        except BaseException as failure:  # this thread has no caller that could handle it
            if self.failures.failure is None:
                self.abort(failure)

    def _message_done(self, message: int, error: BaseException | None) -> None:
        """Called by the backend on any thread, once for each message or phase that has ended."""
        if isinstance(error, (JobError, RuntimeError)):  # torch.distributed raises RuntimeError
            self.failures.suspect(error)
        elif error is not None:
            self.abort(error)
        else:
            self._told_by_backend(self._own_engine.ended, message)

    def _message_sent(self, message: int) -> None:
        """Called by the backend on any thread, once for each message, if it `tells_sends`."""
        self._told_by_backend(self._own_engine.sent, message)

    def _told_by_backend(self, fact: Callable[[int], None], message: int) -> None:
        try:
            with self._lock:
                if not self._closed and self.failures.failure is None:
                    self._tell(fact, message)
                    if self._has_windows:
                        self._make_room()
        except BaseException as error:  # this thread has no caller that could handle it
            if self.failures.failure is None:
                self.abort(error)

    def _follow(self, message: int) -> None:
        """Let `message` start, which rank 0 put next."""
        self._backend.expect(message)
        self._tell(self._own_engine.allow, message)
        if self._has_windows:
            self._make_room()

    def _make_room(self) -> None:
        """Be told of the ends for want of which messages wait.

        Of other ends somebody hears who looks: to be told of one costs a turn at the interpreter's lock.
        """
        if self._makes_room:  # told of an end from within: the loop below goes on with it
            return
        self._makes_room = True
        try:
            awaited: list[int] = []
            while (blocking := self._own_engine.blocking()) != awaited:
                awaited = blocking
                self._backend.await_ends(blocking)
        finally:
            self._makes_room = False

    # -- waiting -----------------------------------------------------------------------------------

    def has_arrived(self, tensor: int) -> bool:
        """Whether the sum of `tensor` has arrived. Does not wait. Call `wait_for` before using it on a device."""
        if not self._engine.has_arrived(tensor):
            return False
        return (
            not self._backend.has_streams
            or not self._has_begun
            or all(map(self._backend.has_ended, self._engine.messages_of(tensor)))
        )

    def arriving_with(self, tensor: int) -> Callable[[int], bool]:
        """Which sums whoever waits for `tensor` need not wait for any longer: a predicate on tensors."""
        if not self._backend.has_streams:
            return self._engine.has_arrived
        come = self._backend.ended_with(self._engine.messages_of(tensor))
        return lambda other: come.issuperset(self._engine.messages_of(other))

    @property
    def all_are_there(self) -> bool:
        """Whether every sum of this iteration has arrived. Where sums are queued on a device, False."""
        self.look()
        return self._engine.all_arrived and not self._backend.has_streams

    @property
    def communicated_ns(self) -> int:
        """For how long so far at least one message was on its way; one that still is does not count yet."""
        return self._communicated_ns + (0 if self._node_engine is None else self._node_engine.communicated_ns)

    def look(self) -> None:
        """Take note of what has arrived by now, where that is not told by itself."""
        if self._node_engine is None:
            with self._lock:
                self._backend.look()

    def wait_for(self, tensor: int) -> None:
        """Wait until the sum of `tensor` is in its slot, or until another thread has begun the next iteration, for which the
        sum had to be there.

        On a device the script's stream waits for the slot. The host waits for the sum, unless it is queued on
        the device too.

        Raises:
            JobError: the job has failed, or the sum did not arrive in time.
        """
        self.wait_for_each((tensor,))

    def wait_for_each(self, tensors: Sequence[int]) -> None:
        """Wait until the sums of all `tensors` are in their slots, as `wait_for` does."""
        if not self._engine.all_arrived:
            for tensor in tensors:
                if not self._engine.has_arrived(tensor):
                    self._wait_for_one(tensor)
        if self.streams is not None and self._has_begun:
            self._join(tensors)

    def _wait_for_one(self, tensor: int) -> None:
        self._wait(lambda: self._engine.has_arrived(tensor), tensor, f"the sum of {self.plan.tensors[tensor].name}")

    def _join(self, tensors: Sequence[int]) -> None:
        """Make the script's stream wait for sums that have arrived for the host."""
        if self._staging is not None:
            self._staging.bring_up(tensors)
        else:
            for message in {message for tensor in tensors for message in self._engine.messages_of(tensor)}:
                self._backend.join(message)

    def wait_for_all(self) -> None:
        """Wait for every sum of this iteration, as `wait_for` does.

        Raises:
            JobError: the job has failed, or a sum did not arrive in time.
        """
        if not self._engine.all_arrived:
            self._wait(lambda: self._engine.all_arrived, None, "the sums of this iteration")
        if self.streams is not None and self._has_begun:
            self._join(range(len(self.slots)))

    def lost(self) -> list[int]:
        """Tensors whose sums were queued on a device and had not ended when the job failed: what used them is wrong."""
        messages = self._backend.lost
        return [tensor for tensor in range(len(self.slots)) if messages.intersection(self._engine.messages_of(tensor))]

    @property
    def told_if_awaited(self) -> int:
        """Of how many messages a thread of torch.distributed would tell the end if all were waited for."""
        return 0 if self._node_engine is not None else self._own_engine.missing

    def wait_briefly(self, limit_ns: int) -> bool:
        """Wait until every sum of this iteration has arrived, for `limit_ns` at most. Not where sums are queued on a device.

        Returns:
            Whether they are.

        Raises:
            JobError: the job has failed.
        """
        began = now_ns()
        if self._node_engine is not None:
            came = self.failures.wait_briefly_in(self._node_engine, limit_ns)
        else:
            with self._lock:
                self._backend.await_ends(range(len(self.plan.messages)))
            came = self.failures.wait_briefly(lambda: self._own_engine.all_arrived, limit_ns)
        self._has_waited(None, began)
        return came

    def _wait(self, has_arrived: Callable[[], bool], tensor: int | None, what: str) -> None:
        began, iteration = now_ns(), self.iteration
        if self._node_engine is not None:
            self.failures.wait_in(self._node_engine, tensor, what, lambda: self.iteration != iteration)
        else:
            with self._lock:
                messages = range(len(self.plan.messages)) if tensor is None else self._engine.messages_of(tensor)
                self._backend.await_ends(messages)
            self.failures.wait_until(lambda: has_arrived() or self.iteration != iteration, what)
        self._has_waited(tensor, began)

    def _has_waited(self, tensor: int | None, began: int) -> None:
        ended = now_ns()
        self.waited_ns += ended - began
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
        return self._engine.describe_state()

    def abort(self, error: BaseException) -> None:
        """Fail this rank with `error`, and tell the other ranks."""
        self.coordination.abort(error)

    def _interrupt(self) -> None:
        """End waits, since something has failed or is suspected to have."""
        if self._node_engine is not None:
            self._node_engine.interrupt()
        if self.failures.failure is not None:
            self.failures.end_device_work()

    def close(self) -> None:
        """Close the control channel, then the backend."""
        self._closed = True
        if self._staging is not None:
            self._staging.close()
        self.coordination.channel.close()
        self._backend.close(self.failures.verdict())


def _agreed_order(plan: Plan) -> list[list[int]]:
    """By lane, the order of messages that the plan fixes, two-phase ones twice; empty without one."""
    order: list[list[int]] = [[] for _ in plan.lanes]
    if plan.sequence is not None:
        for message in (*plan.sequence, *plan.second_phases):
            order[plan.messages[message].lane].append(message)
    return order
