"""Session: the live driver of the Dispatcher, attached to one model and its optimizers on one rank.

An iteration, in the order in which things happen:

    forward     a parameter whose update is owed is updated when it is first used (`pending.py`)
    backward    `_begin`, then for each gradient `_gradient_ready`: scale, put into its arena slot, tell the
                Dispatcher; `_end` reports gradients that this rank did not produce
    messages    `_issue` starts sums in the agreed order, `_message_done` hears of their end
    step        `_before_step` lets the optimizer update what has arrived, and notes the rest as owed

No scheduling thread: a fact is handled at once by the thread that brings it (training thread, or the thread
of torch.distributed that finished a sum), under one lock, so that no message waits for a thread to wake.
The training thread blocks only in `_wait_until`, which ends in a result or a typed error within the timeout.

Whatever this cannot do for one step, it does behind the barrier: it waits for all sums, as DDP would.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from gradlane.core import files
from gradlane.core.checks import check_plan
from gradlane.core.network import Network
from gradlane.core.plan import Plan
from gradlane.core.policy import Policy
from gradlane.core.profile import Profile, TensorSpec
from gradlane.core.timeline import Timeline
from gradlane.dispatch import Dispatcher
from gradlane.errors import CommunicationError, JobError, MismatchError, OrderError, PeerDied
from gradlane.live import pending
from gradlane.live.arena import Arena
from gradlane.live.backend import AllReduce
from gradlane.live.buffers import BufferSync
from gradlane.live.deferral import DeferredStep
from gradlane.live.peers import Peers
from gradlane.live.recorder import ProfileBuilder, Recorder, now_ns
from gradlane.sim import planned_ahead

log = logging.getLogger("gradlane")

_VERDICT_S = 1.5  # how long a failed collective waits for the control channel to name the culprit
_LEFT_S = 5.0  # how long sums may take after a peer has left in order


class Session:
    """Made by `gradlane.attach`; `close()` (or leaving a `with` block) detaches it.

    Useful to a training script: `no_sync()`, `flush()`, `profile()`, `timeline()`, `plan`, `close()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Sequence[tuple[str, torch.nn.Parameter]],
        specs: Sequence[TensorSpec],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        policy: Policy | Plan,
        network: Network,
        profile: Profile | None,
        profile_iterations: int,
        first_plan: Plan,
        coordinated: bool,
        may_cross: bool,
        rank: int,
        world: int,
        timeout_s: float,
        backend: AllReduce,
        peers: Callable[..., Peers],
        buffers: BufferSync | None,
    ) -> None:
        self.model, self.rank, self.world = model, rank, world
        self.network = network
        self._names = [name for name, _ in params]
        self._all_params = [param for _, param in params]
        self._specs = {spec.name: spec for spec in specs}
        self._optimizers = list(optimizers)
        self._policy = policy
        self._given_profile = profile
        self._profile_iterations = profile_iterations
        self._coordinated, self._may_cross = coordinated, may_cross
        self._timeout_s = timeout_s
        self._scale = 1.0 / world
        self._backend = backend
        self._buffers = buffers
        self._recorder = Recorder()
        self._builder: ProfileBuilder | None = None
        self._profile: Profile | None = profile

        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._failure: JobError | None = None
        self._suspicion: tuple[str, float] | None = None
        self._left: tuple[int, float] | None = None
        self._closed = False
        self._told: set[str] = set()

        self._sync = True
        self._iteration = -1
        self._in_backward = False
        self._settled = False  # the final plan is in force
        self._rolling_hash = 0
        self._choices: dict[int, list[int]] = {}  # told by the coordinator before this rank was there
        self._forward_began_ns = self._forward_ended_ns = self._backward_began_ns = 0
        self._step_began_ns = 0
        self._hidden_from_step: list[tuple[torch.nn.Parameter, int]] = []
        self._owed: dict[int, DeferredStep] = {}
        self._to_issue: deque[int] = deque()
        self._issuing = False
        self._expected_fires: dict[str, int] = {}  # by name: how often a backward pass fires its hook
        self._device = self._all_params[0].device

        if buffers is not None:
            buffers.on_end(self._buffers_ended)
        self._peers = peers(on_failure=self._fail, on_choice=self._on_choice, on_left=self._on_left)
        self._install(first_plan)
        self._handles = self._attach_hooks()

    # -- taking up a plan ------------------------------------------------------------------------------

    def _install(self, plan: Plan) -> None:
        """Make `plan` the plan in force; nothing may be under way."""
        check_plan(plan, tuple(self._specs[spec.name] for spec in plan.tensors))
        base = {name: index for index, name in enumerate(self._names)}
        order = [base[spec.name] for spec in plan.tensors]
        self._plan = plan
        self._crosses = plan.crosses_barrier and self._may_cross
        self._params = [self._all_params[index] for index in order]
        self._index_of = {index: tensor for tensor, index in enumerate(order)}
        self._tensor_of = {id(param): tensor for tensor, param in enumerate(self._params)}
        self._arena = Arena(self._params)
        self._message_buffers = self._arena.message_buffers(plan)
        self._wrappers = [
            pending.PendingGradient(slot, tensor, self._gradient_read) for tensor, slot in enumerate(self._arena.slots)
        ]
        self._parts_at_first = [0] * len(self._params)
        self._messages_of: list[list[int]] = [[] for _ in self._params]
        for index, message in enumerate(plan.messages):
            for tensor in message.tensors:
                self._parts_at_first[tensor] += 1
                self._messages_of[tensor].append(index)
        self._parts = [0] * len(self._params)  # messages of each tensor not yet arrived
        self._fired = [0] * len(self._params)
        self._launched = [False] * len(self._params)
        self._expected = [self._expected_fires.get(spec.name, 1) for spec in plan.tensors]
        self._events: list[torch.Event | None] = [None] * len(self._params)
        self._sent_ns = [0] * len(plan.messages)
        follows = self._coordinated and self.rank != 0 and self._settled
        self._dispatcher = Dispatcher(plan, follow=follows)
        self._backend.prepare(plan)
        self._recorder.forget()

    def _adopt(self) -> None:
        """All ranks take up the plan of the user's policy together, and prove that it is the same."""
        if isinstance(self._policy, Plan) and self._policy.sequence is not None:
            plan = self._policy
        else:
            plan = self._plan_from_profile()
        self._settled = True
        self._install(self._share_plan(plan))
        log.info("rank %d: %s", self.rank, self._plan.describe(limit=0).splitlines()[0])

    def _plan_from_profile(self) -> Plan:
        if self._given_profile is not None:
            profile = self._given_profile
        else:
            assert self._builder is not None
            ready = torch.tensor(self._builder.ready_medians(), dtype=torch.int64, device=self._device)
            self._collective(lambda: dist.all_reduce(ready, group=self._backend.control_group))
            mean_ns = [int(total) // self.world for total in ready.tolist()]
            profile, _ = self._builder.build(type(self.model).__name__, str(self._device), mean_ns)
            self._builder = None
        self._profile = profile
        plan = self._policy if isinstance(self._policy, Plan) else self._policy.plan(profile, self.network)
        if self._coordinated:
            return plan
        if plan.tensors != profile.specs:  # a given plan without a sequence: replay it on its own tensor order
            profile = reordered(profile, plan)
        return planned_ahead(plan, profile, self.network)

    def _share_plan(self, plan: Plan) -> Plan:
        """Rank 0's plan on every rank; its fingerprint compared over all of them."""
        data = files.dumps(plan)
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        self._collective(lambda: dist.broadcast(size, group_src=0, group=self._backend.control_group))
        payload = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._collective(lambda: dist.broadcast(payload, group_src=0, group=self._backend.control_group))
        plan = files.loads(payload.cpu().numpy().tobytes(), Plan)
        mine = int(plan.fingerprint, 16) >> 1  # fits a signed 64-bit integer
        prints = torch.zeros(self.world, dtype=torch.int64, device=self._device)
        prints[self.rank] = mine
        self._collective(lambda: dist.all_reduce(prints, group=self._backend.control_group))
        for rank, other in enumerate(prints.tolist()):
            if other != mine:
                self._fail(MismatchError(f"rank {rank} holds another plan than rank {self.rank}: {other:x} and {mine:x}"))
        self._check()
        return plan

    def _collective(self, call: Callable[[], Any]) -> None:
        """A blocking collective between iterations, its failure told like any other."""
        try:
            call()
        except RuntimeError as error:
            self._suspect(error)
            self._wait_until(lambda: False, "a collective between iterations")

    # -- hooks -----------------------------------------------------------------------------------------

    def _attach_hooks(self) -> list[Any]:
        handles: list[Any] = [
            param.register_post_accumulate_grad_hook(partial(self._gradient_ready, index))
            for index, param in enumerate(self._all_params)
        ]
        before, after = _Hook(self._before_forward), _Hook(self._after_forward)
        handles.append(self.model.register_forward_pre_hook(_traceable(before)))
        handles.append(self.model.register_forward_hook(_traceable(after)))
        for module in self.model.modules():
            if module is not self.model and is_opaque(module):
                handles.append(module.register_forward_pre_hook(_traceable(_Hook(self._before_opaque))))
        handles.append(self.model.register_state_dict_pre_hook(_Hook(self._flush_for_state_dict)))
        for optimizer in self._optimizers:
            handles.append(optimizer.register_step_pre_hook(self._before_step))
            handles.append(optimizer.register_step_post_hook(self._after_step))
            handles.append(optimizer.register_state_dict_pre_hook(self._flush_for_state_dict))
        return handles

    def _flush_for_state_dict(self, *_: Any, **__: Any) -> None:
        self.flush()

    # -- forward ---------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, args: Any, compiling: bool) -> None:
        self._check()
        if _inside_a_backward_pass():
            return  # a checkpoint runs the whole model again
        if self._in_backward and torch.is_grad_enabled():
            error = JobError(
                f"rank {self.rank}: the backward pass of iteration {self._iteration} was left unfinished (an exception "
                "that the script caught?); its gradients are partly summed, so the job cannot go on from here"
            )
            self._peers.fail(error)
            self._fail(error)
            self._check()
        if compiling or is_opaque(self.model):
            self._tell("compiled", "the whole model is compiled: updates cannot overlap with the forward pass; compile blocks")
            self.flush()
        if self._buffers is not None:
            self._buffers.apply(self._wait_until)
        if not torch.is_grad_enabled() or not module.training:
            return
        now = now_ns()
        if self._forward_began_ns and self._iteration >= 0:
            self._recorder.add("step", self._iteration, -1, self._forward_began_ns, now)
        self._forward_began_ns = now
        if self._measuring:
            for tensor, param in enumerate(self._params):
                pending.watch(param, tensor, self._parameter_used)

    def _before_opaque(self, module: torch.nn.Module, args: Any, compiling: bool) -> None:
        for param in module.parameters():
            if pending.is_watched(param):
                pending.unwatch(param)
                self._parameter_used(self._tensor_of[id(param)])

    def _after_forward(self, module: torch.nn.Module, args: Any, compiling: bool, output: Any = None) -> None:
        if not torch.is_grad_enabled() or _inside_a_backward_pass():
            return
        now = self._forward_ended_ns = now_ns()
        self._recorder.add("forward", self._iteration + 1, -1, self._forward_began_ns, now)
        if not self._sync:
            return
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_gradient_ready)
        if self._buffers is not None and module.training:
            self._buffers.send()

    def _parameter_used(self, tensor: int) -> None:
        """The first touch of a watched parameter since it was watched."""
        self._make_current(tensor)
        now = now_ns()
        self._recorder.add("use", self._iteration + 1, tensor, now, now)
        if self._measuring and self._builder is not None:
            self._builder.used(self._base_index(tensor), now - self._forward_began_ns)

    def _base_index(self, tensor: int) -> int:
        return self._names.index(self._plan.tensors[tensor].name)

    # -- backward --------------------------------------------------------------------------------------

    @property
    def _measuring(self) -> bool:
        """Whether this iteration goes into the profile: not the first, and not after the final plan."""
        return not self._settled and self._given_profile is None and self._iteration >= 0

    def _output_gradient_ready(self, _: torch.Tensor) -> None:
        if self._sync and not self._in_backward:
            self._begin()

    def _begin(self) -> None:
        """The first gradient of a backward pass that is to be summed."""
        self._check()
        self._finish_iteration()
        if not self._settled and self._iteration >= self._iterations_before_plan:
            self._adopt()
        self._iteration += 1
        self._in_backward = True
        self._recorder.begin()
        self._backward_began_ns = now_ns()
        if self._measuring and self._builder is None:
            self._builder = ProfileBuilder([(name, self._specs[name]) for name in self._names])
        self._fired = [0] * len(self._params)
        self._launched = [False] * len(self._params)
        self._arena.mark_all_present()
        with self._lock:
            self._parts = list(self._parts_at_first)
            self._unissued = len(self._plan.messages)
            self._dispatcher.begin()
            self._backend.begin(self._agreed_order())
            for message in self._choices.pop(self._iteration, ()):
                self._follow(message)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @property
    def _iterations_before_plan(self) -> int:
        planned = isinstance(self._policy, Plan) and self._policy.sequence is not None
        return 0 if planned or self._given_profile is not None else self._profile_iterations

    def _agreed_order(self) -> list[list[int]]:
        order: list[list[int]] = [[] for _ in self._plan.lanes]
        if self._plan.sequence is not None:
            for message in self._plan.sequence:
                order[self._plan.messages[message].lane].append(message)
        return order

    def _gradient_ready(self, index: int, param: torch.nn.Parameter) -> None:
        """Hook: autograd has accumulated into `param.grad` (once, or as often as a checkpoint replays it)."""
        if not self._sync:
            return
        if not self._in_backward:
            self._begin()
        tensor = self._index_of[index]
        fired = self._fired[tensor] = self._fired[tensor] + 1
        expected = self._expected[tensor]
        # in iteration 0 nobody knows how often a hook fires: everything leaves at the end of the pass
        if self._iteration == 0 or fired < expected:
            return
        if fired > expected:
            error = JobError(
                f"rank {self.rank}, iteration {self._iteration}: the gradient of {self._names[index]} arrived {fired} times in "
                f"one backward pass, expected {expected}; use checkpoint(use_reentrant=False), or one backward pass a step"
            )
            self._peers.fail(error)
            self._fail(error)
            self._check()
        self._launch(tensor, param)

    def _launch(self, tensor: int, param: torch.nn.Parameter) -> None:
        """Put the gradient, divided by the world size as DDP does, into its slot, and say that it is ready."""
        gradient, slot, wrapper = param.grad, self._arena.slots[tensor], self._wrappers[tensor]
        assert gradient is not None
        if gradient is wrapper or gradient.data_ptr() == slot.data_ptr():
            slot.mul_(self._scale)
        else:
            torch.mul(gradient.detach(), self._scale, out=slot)
        param.grad = wrapper
        self._report_ready(tensor)

    def _report_ready(self, tensor: int) -> None:
        self._launched[tensor] = True
        if self._backend.stream_ordered:
            self._events[tensor] = torch.accelerator.current_stream().record_event()
        now = now_ns()
        with self._lock:
            self._recorder.add("ready", self._iteration, tensor, now, now)
            self._issue(self._dispatcher.ready(tensor))
        if self._measuring and self._builder is not None and self._iteration > 0:
            self._builder.ready(self._base_index(tensor), now - self._backward_began_ns)

    def _end(self) -> None:
        """The backward pass is over: what it did not produce contributes nothing."""
        ended = now_ns()
        absent = []
        for tensor, param in enumerate(self._params):
            if self._launched[tensor]:
                continue
            if self._fired[tensor]:
                self._launch(tensor, param)
            else:
                self._arena.slots[tensor].zero_()
                self._arena.presence[tensor].zero_()
                self._report_ready(tensor)
                absent.append(tensor)
        self._in_backward = False
        if self._iteration == 0:
            self._expected = [max(1, fired) for fired in self._fired]
            self._expected_fires = {spec.name: n for spec, n in zip(self._plan.tensors, self._expected, strict=True)}
        self._recorder.add("backward", self._iteration, -1, self._backward_began_ns, ended)
        if self._measuring and self._builder is not None and self._iteration > 0:
            self._builder.passed(self._forward_ended_ns - self._forward_began_ns, ended - self._backward_began_ns)
        for tensor in absent:  # as DDP with find_unused_parameters: used by nobody means left alone
            self._wait_for(tensor)
            if float(self._arena.presence[tensor]) != 0:
                self._params[tensor].grad = self._arena.slots[tensor]

    # -- messages: under the lock, on any thread -------------------------------------------------------------

    def _issue(self, starts: list[int]) -> None:
        self._to_issue.extend(starts)
        if self._issuing:  # a sum that ended while it was being started: the loop below goes on with it
            return
        self._issuing = True
        try:
            while self._to_issue:
                message = self._to_issue.popleft()
                buffer = self._message_buffers[message]
                buffer.gather()
                if self._coordinated and self._settled and self.rank == 0:
                    self._backend.expect(message)
                    self._peers.choose(self._iteration, message)
                self._sent_ns[message] = now_ns()
                if self._backend.start(message, buffer.tensor, self._events_of(message), self._message_done):
                    self._arrived(message)
                self._rolling_hash = (self._rolling_hash * 1_000_003 + message + 1) & 0xFFFF_FFFF_FFFF_FFFF
                self._unissued -= 1
                if self._unissued == 0:
                    self._peers.issued(self._iteration, self._rolling_hash)
        except OrderError as error:
            named = OrderError(f"rank {self.rank}, iteration {self._iteration}: {error}")
            self._peers.fail(named)
            self._fail(named)
            self._check()
        except RuntimeError as error:  # torch.distributed refuses: a connection is broken already
            self._suspect(error)
        finally:
            self._issuing = False

    def _events_of(self, message: int) -> list[torch.Event]:
        if not self._backend.stream_ordered:
            return []
        return [event for tensor in self._plan.messages[message].tensors if (event := self._events[tensor]) is not None]

    def _message_done(self, message: int, error: BaseException | None) -> None:
        """Called by torch.distributed, once a message."""
        if error is not None:
            self._suspect(error)
            return
        try:
            with self._lock:
                if not self._closed and self._failure is None:
                    self._arrived(message)
        except JobError:
            pass  # noted in self._failure; there is no caller to raise it to

    def _arrived(self, message: int) -> None:
        self._message_buffers[message].scatter()
        self._recorder.add("send", self._iteration, message, self._sent_ns[message], now_ns())
        for tensor in self._plan.messages[message].tensors:
            self._parts[tensor] -= 1
        self._issue(self._dispatcher.finished(message))
        self._condition.notify_all()

    def _buffers_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._suspect(error)
        with self._condition:
            self._condition.notify_all()

    def _on_choice(self, iteration: int, message: int) -> None:
        """The coordinator's next message; it may be ahead of this rank."""
        with self._lock, contextlib.suppress(JobError):
            if iteration == self._iteration and self._unissued:
                self._follow(message)
            else:
                self._choices.setdefault(iteration, []).append(message)

    def _follow(self, message: int) -> None:
        self._backend.expect(message)
        self._issue(self._dispatcher.allow(message))

    # -- waiting and failing ---------------------------------------------------------------------------

    def _wait_for(self, tensor: int) -> None:
        """Return when the sum of `tensor` is in its slot (on a device: for whatever the stream does next)."""
        if self._parts[tensor]:
            began = now_ns()
            self._wait_until(lambda: not self._parts[tensor], f"the sum of {self._plan.tensors[tensor].name}")
            self._recorder.add("wait", self._iteration, tensor, began, now_ns())
        if self._backend.stream_ordered:
            for message in self._messages_of[tensor]:
                self._backend.join(message)

    def _wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        """Block until `predicate()`, or raise the typed reason why that will not come."""
        deadline = time.monotonic() + self._timeout_s
        with self._condition:
            while not predicate():
                self._check()
                limit = deadline
                if self._suspicion is not None:
                    limit = min(limit, self._suspicion[1])
                if self._left is not None:
                    limit = min(limit, self._left[1])
                remaining = limit - time.monotonic()
                if remaining > 0:
                    self._condition.wait(remaining)
                else:
                    self._fail(self._why_not(what))

    def _why_not(self, what: str) -> JobError:
        if self._suspicion is not None:
            return CommunicationError(
                f"rank {self.rank}, iteration {self._iteration}: {what} failed in torch.distributed: {self._suspicion[0]}"
            )
        if self._left is not None and time.monotonic() >= self._left[1]:
            rank = self._left[0]
            return PeerDied(
                f"rank {rank} left the job while rank {self.rank} waited for {what} in iteration {self._iteration}; "
                "do all ranks run the same number of steps?",
                rank,
            )
        return CommunicationError(
            f"rank {self.rank}, iteration {self._iteration}: no end of {what} within {self._timeout_s:.0f} s; "
            f"{self._dispatcher.describe_state()}; every rank's control channel is alive, so a rank is slow or has not "
            "reached this iteration; raise timeout= if that is to be expected"
        )

    def _suspect(self, error: BaseException) -> None:
        """A collective failed; the control channel will shortly know which rank is to blame."""
        with self._condition:
            if self._suspicion is None:
                self._suspicion = (str(error).strip().splitlines()[0], time.monotonic() + _VERDICT_S)
            self._condition.notify_all()

    def _fail(self, error: JobError) -> None:
        """The first reason stands; everything that waits, and every later call, raises it."""
        with self._condition:
            if self._failure is None:
                self._failure = error
            self._condition.notify_all()

    def _on_left(self, rank: int) -> None:
        with self._condition:
            if self._left is None:
                self._left = (rank, time.monotonic() + _LEFT_S)
            self._condition.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- step ------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check()
        if not self._in_backward and self._iteration >= 0:
            self._split_step(optimizer, defer=self._crosses and not self._needs_all(optimizer, args, kwargs))
        self._step_began_ns = now_ns()

    def _split_step(self, optimizer: torch.optim.Optimizer, defer: bool) -> None:
        """Leave in `.grad` what the optimizer may use now; hide, and owe, what has not arrived."""
        owed = None
        for group in optimizer.param_groups:
            for param in group["params"]:
                tensor = self._tensor_of.get(id(param))
                if tensor is None or param.grad is not self._wrappers[tensor]:
                    continue  # not ours, or replaced or dropped by the script
                if defer and not self._has_arrived(tensor):
                    owed = owed or DeferredStep(optimizer)
                    param.grad = None
                    self._owed[tensor] = owed
                    self._hidden_from_step.append((param, tensor))
                else:
                    self._wait_for(tensor)
                    param.grad = self._arena.slots[tensor]

    def _needs_all(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether this call of `step` is one whose updates cannot be deferred."""
        has_closure = bool(args[1:]) or kwargs.get("closure") is not None
        if has_closure:
            self._tell("closure", "optimizer.step(closure): the barrier is kept")
        return has_closure or hasattr(optimizer, "grad_scale")

    def _has_arrived(self, tensor: int) -> bool:
        if not self._backend.stream_ordered:
            return self._parts[tensor] == 0
        return all(self._backend.has_ended(message) for message in self._messages_of[tensor])

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = now_ns()
        for param, tensor in self._hidden_from_step:
            param.grad = self._wrappers[tensor]
            pending.watch(param, tensor, self._parameter_used)
        self._hidden_from_step.clear()
        if self._iteration < 0:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                updated = self._tensor_of.get(id(param))
                if updated is not None and updated not in self._owed:
                    self._recorder.add("update", self._iteration, updated, self._step_began_ns, now)
        if self._measuring and self._builder is not None:
            self._builder.updated(now - self._step_began_ns)

    # -- owed updates ----------------------------------------------------------------------------------

    def _gradient_read(self, tensor: int) -> None:
        """Somebody operates on a gradient that stands for a sum."""
        if self._parts[tensor] and tensor not in self._owed and self._crosses:
            self._tell(
                "read",
                "gradients are read between backward and step (clip_grad_norm_, GradScaler, logging): "
                "such steps wait for all sums",
            )
        self._make_current(tensor)

    def _make_current(self, tensor: int) -> None:
        """Wait for the sum of `tensor`; if its update is owed, run it, with all others that have arrived."""
        self._wait_for(tensor)
        if tensor not in self._owed:
            return
        batch: dict[int, list[int]] = {}
        steps: dict[int, DeferredStep] = {}
        for other, step in self._owed.items():
            if other == tensor or self._has_arrived(other):
                batch.setdefault(id(step), []).append(other)
                steps[id(step)] = step
        for key, tensors in batch.items():
            self._update(steps[key], tensors)

    def _update(self, step: DeferredStep, tensors: list[int]) -> None:
        began = now_ns()
        before: list[torch.Tensor | None] = []
        for tensor in tensors:
            del self._owed[tensor]
            param = self._params[tensor]
            pending.unwatch(param)
            before.append(param.grad)
            self._wait_for(tensor)
            param.grad = self._arena.slots[tensor]
        step.update(self._params[tensor] for tensor in tensors)
        for tensor, gradient in zip(tensors, before, strict=True):
            # the script may have dropped or replaced the gradient since step(); it keeps what it did
            if gradient is not self._wrappers[tensor]:
                self._params[tensor].grad = gradient
        ended = now_ns()
        for tensor in tensors:
            self._recorder.add("update", self._iteration, tensor, began, ended)

    def _finish_iteration(self) -> None:
        """Everything of the iteration before has arrived, and every update has run."""
        while self._owed:
            self._make_current(next(iter(self._owed)))
        for tensor in range(len(self._params)):
            if self._parts[tensor]:
                self._wait_for(tensor)
        for param in self._params:
            pending.unwatch(param)

    # -- what a training script calls ------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def plan(self) -> Plan:
        """The plan in force. Over the first iterations that is a safe one, see `settled`."""
        return self._plan

    @property
    def settled(self) -> bool:
        """Whether the profile has been taken and the policy's own plan is in force."""
        return self._settled

    @property
    def crosses_barrier(self) -> bool:
        """Whether the next forward pass may begin before all updates have arrived."""
        return self._crosses

    def flush(self) -> None:
        """Wait for every sum and run every owed update: parameters and gradients are as plain DDP's.

        For whatever reads parameters in a way that no guard sees (NumPy views taken earlier, other
        processes, `optimizer.state` by hand). `state_dict`, `deepcopy` and averages need no call.
        """
        self._check()
        if not self._in_backward:
            self._finish_iteration()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally, as DDP's `no_sync`; forward belongs inside too."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def profile(self) -> Profile:
        """The Profile measured over the first iterations (or given to attach)."""
        if self._profile is None:
            raise JobError(f"no profile yet: it takes {self._profile_iterations + 1} iterations and the start of one more")
        return self._profile

    def timeline(self) -> Timeline:
        """What happened in the last iterations under the plan in force, up to now."""
        self.flush()
        return self._recorder.timeline(self._plan.fingerprint, self.rank)

    def close(self) -> None:
        """Finish what is under way, and detach: hooks, threads, sockets and process groups go.

        Does not raise for a job that has failed already: whoever needs to know was told.
        """
        if self._closed:
            return
        try:
            if self._failure is None and not self._in_backward:
                self._finish_iteration()
                if self._buffers is not None:
                    self._buffers.finish(self._wait_until)
        finally:
            self._closed = True
            for handle in self._handles:
                handle.remove()
            for tensor, param in enumerate(self._params):
                pending.unwatch(param)
                if param.grad is self._wrappers[tensor]:
                    param.grad = self._arena.slots[tensor]
            self._peers.close()
            if self._failure is None:
                self._backend.close()
                if self._buffers is not None:
                    self._buffers.close()

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails with `error`; they raise `PeerFailed` with its text."""
        if not self._closed:
            self._peers.fail(error)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.abort(error)
        self.close()

    def _tell(self, key: str, text: str) -> None:
        """One line, once."""
        if key not in self._told:
            self._told.add(key)
            if self.rank == 0:
                log.warning("gradlane: %s", text)


class _Hook:
    """A bound method as a module hook that can be copied and pickled with the module: the copy does nothing."""

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._method is not None:
            self._method(*args, **kwargs)

    def __reduce__(self) -> Any:
        return (_Hook, (None,))


class _traceable(_Hook):
    """A forward hook that tells its method whether it runs inside a compiled region, and never is compiled."""

    def __call__(self, module: Any, args: Any, output: Any = None) -> None:
        if self._method is not None:
            _outside_the_compiler(self._method, module, args, torch.compiler.is_compiling(), output)


@torch.compiler.disable
def _outside_the_compiler(method: Callable[..., Any], module: Any, args: Any, compiling: bool, output: Any) -> None:
    if output is None:
        method(module, args, compiling)
    else:
        method(module, args, compiling, output)


def _inside_a_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether the module's forward reads parameters past every guard in Python."""
    return isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None


def reordered(profile: Profile, plan: Plan) -> Profile:
    """`profile` with its tensors in the plan's order; readiness made monotone where the plan disagrees."""
    by_name = {tensor.spec.name: tensor for tensor in profile.tensors}
    latest = 0
    tensors = []
    for spec in plan.tensors:
        seen = by_name[spec.name]
        latest = max(latest, seen.ready_ns)
        tensors.append(msgspec.structs.replace(seen, ready_ns=latest))
    return msgspec.structs.replace(profile, tensors=tuple(tensors))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors_in(getattr(value, name))
