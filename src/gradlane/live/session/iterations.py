"""Iterations: what a session does in each pass and step of the script.

Everything here runs on the training thread, but for reads of parameters and gradients, which another thread of the
script may make too: whoever changes anything has the turn (`turn.py`). What threads of gradlane use is in
`live/comm/driver.py`.

One iteration:

    forward     the first use of a parameter runs its deferred update (`guards.py`)
    backward    `_begin`; then, for each gradient, `_launch` divides it by the world size, puts it
                into its slot and reports that it is ready; `_end` reports the gradients that this
                rank did not produce
    step        `_before_step` lets the optimizer update what has arrived and defers the rest

If the updates of a step cannot be deferred, the session waits for all sums first, as DDP does.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from gradlane.core.plan import Plan
from gradlane.errors import JobError, UnsupportedError
from gradlane.live.adapt.controller import PlanController
from gradlane.live.adapt.profiling import Planner
from gradlane.live.backends.base import Backend
from gradlane.live.backends.gradient_buffers import dtype_name
from gradlane.live.backends.streams import Streams
from gradlane.live.comm.coordination import Coordination
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.live.comm.turn import given_up, in_turn, turn
from gradlane.live.session import aliases, guards
from gradlane.live.session.base import UNSEEN_FORWARD, SessionBase
from gradlane.live.session.closures import closure_of, run_first
from gradlane.live.session.deferred_step import DeferredStep, is_stepping, keeps_no_gradient
from gradlane.live.session.deferred_updates import DeferredUpdates
from gradlane.live.session.finite import FiniteCheck, Unchecked
from gradlane.live.session.gpu import Gpu
from gradlane.live.session.gradient_groups import GradientGroups
from gradlane.live.session.gradients import Gradients
from gradlane.live.session.hooks import inside_a_backward_pass, is_compiled, is_last, is_traced, parameters_of_scripts
from gradlane.live.session.ignored import summed_parameters
from gradlane.live.session.interruptions import wrap_handlers
from gradlane.live.session.job import Job
from gradlane.live.session.metrics import Meter
from gradlane.live.session.module_buffers import BufferSync
from gradlane.live.session.patience import Patience
from gradlane.live.session.stopwatch import DeviceStopwatch, HostStopwatch, Stopwatch
from gradlane.live.session.uneven import UnevenInputs
from gradlane.live.session.verification import Unverified

log = logging.getLogger("gradlane")

_SETTLED_EARLY = 5  # steps in a row after which a script is taken to need all updates at once


class Iterations(SessionBase):
    """The part of a session that carries out iterations. A script calls the other (`session.py`).

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
        verifier: Unverified,
        checks_finite: bool,
        keeps_log: bool,
    ) -> None:
        super().__init__(job.model)
        self.rank, self.world = job.rank, job.world
        self._params_by_name = dict(job.params)
        self._ignored = job.ignored
        self._frozen = [(name, param) for name, param in summed_parameters(job.model, job.ignored) if not param.requires_grad]
        self._optimizers = list(job.optimizers)
        self._planner, self._controller = planner, controller
        self._coordinated, self._may_cross = planner.place.coordinated, may_cross
        self._backend = backend
        self._buffers = buffers
        self._device = job.device
        self._recorder = Recorder()
        self._told: set[str] = set()
        self._left_alone = False
        self._settled = False
        self._forward_began_ns = self._backward_began_ns = self._step_began_ns = 0
        # moments of the iteration that is measured
        self._stopwatch: Stopwatch = HostStopwatch() if streams is None else DeviceStopwatch(streams)
        self._forward_began = self._backward_began = self._step_began = self._stopwatch.now()
        self._step_ended: Any = None  # until the next forward pass that trains
        self._forward_ns = 0
        self._fires_in_a_pass: dict[str, int] = {}
        # iterations, until settled, in which gradients were read before the step
        self._reads: set[int] = set()
        self._params: list[torch.nn.Parameter] = []
        self._unseen: set[str] = set()  # names of parameters that something reads past every guard
        self._watched_iteration = -1  # the last in which all parameters were watched
        self._seen: set[int] = set()  # tensors whose parameters were used in this iteration
        self._in_forward = False
        self._measures = False  # whether this iteration is measured for the profile
        self._steps_in: int | None = None  # the thread in which an optimizer runs from which gradients are hidden
        self._runs_closure = False  # the step that runs was given a closure, which the optimizer calls itself
        self._stepped: list[int] = []  # tensors of the optimizer whose step runs or ran last
        # step() was called before all sums had arrived, so that there was something to defer
        self._is_late = False
        # steps in a row whose deferred updates had all run when the next forward pass began
        self._settled_early = 0
        self._patience = Patience()
        self._uneven: UnevenInputs | None = None  # inside `join()`
        # tensors whose updates were still deferred when this backward pass began
        self._stale: frozenset[int] = frozenset()
        on_buffers = (lambda forward, why: None) if buffers is None else buffers.announced
        self._driver = Driver(job.rank, job.global_rank, coordination, backend, streams, self._recorder, on_buffers, keeps_log)
        self._failures = self._driver.failures
        self._verifier = verifier
        verifier.connect(self._driver.abort, self._driver.wait_for_works)
        self._failures.at_once.append(verifier.interrupt)
        self._gradients = Gradients(self._driver, self._gradient_read, scale=1.0 / job.world)
        self._finite = FiniteCheck(self._driver) if checks_finite else Unchecked()
        self._driver.inspect = self._finite.contributes
        self._deferred = DeferredUpdates(self._driver, self._recorder, verifier, self._finite)
        self._gpu = Gpu(job.device, streams, self._deferred, self._settle, self._fail)
        if buffers is not None:
            self._failures.at_once.append(buffers.interrupt)
            buffers.connect(self._driver.coordination.announce_buffers, self._failures.notify)
        self._meter = Meter(self._driver, planner, on_device=streams is not None)
        self._take_up(first_plan)
        self._attach_hooks(self._params, self._optimizers)

    def _take_up(self, plan: Plan) -> None:
        """Put `plan` in force. No message may be in flight, and no update deferred."""
        self._plan = plan
        self._crosses = plan.crosses_barrier and self._may_cross
        self._params = [self._params_by_name[spec.name] for spec in plan.tensors]
        self._tensor_of = {id(param): tensor for tensor, param in enumerate(self._params)}
        self._driver.take_up(plan, self._params, self._coordinated and self._settled)
        self._finite.take_up(plan)
        self._find_unguarded()
        dtypes = [slot.dtype for slot in self._driver.slots]
        self._groups = GradientGroups(plan, dtypes, self._planner.ready_ns if self._settled else None)
        self._gradients.take_up(self._params, self._groups.members)
        self._deferred.take_up(self._params, self._gradients.show)
        self._fired = [0] * len(self._params)
        self._launched = [False] * len(self._params)
        self._expected = [self._fires_in_a_pass.get(spec.name, 0) for spec in plan.tensors]
        self._recorder.forget(self._driver.iteration + 1)

    def _find_unguarded(self) -> None:
        """Find the tensors whose updates must not be deferred.

        Something reads their parameters past every guard.
        """
        unseen = [self._params_by_name[name] for name in self._unseen]
        self._unguarded = {
            self._tensor_of[id(param)]
            for param in (*parameters_of_scripts(self.model), *unseen)
            if id(param) in self._tensor_of
        }

    # -- forward -----------------------------------------------------------------------------------

    @in_turn
    def _before_forward(self, module: torch.nn.Module, compiling: bool, _: Any) -> None:
        self._failures.check()
        wrap_handlers()
        if inside_a_backward_pass():
            return  # a checkpoint runs the whole model once more
        if is_traced():
            self._settle()  # only the model must be recorded
            return
        self._refuse_wrappers(inside=not self._settled)
        trains = torch.is_grad_enabled() and module.training
        if trains:
            self._gpu.refuse_capture("the model's forward pass in training")
        elif self._gpu.is_captured:
            return  # it was settled before the capture
        if self._in_backward and trains:
            self._fail(
                "the backward pass was left unfinished (an exception that the script caught?); its gradients are partly "
                "summed, the job cannot go on from here"
            )
        if trains and self._step_ended is not None:
            self._stopwatch.report(self._planner.builder.rested, self._step_ended)
            self._step_ended = None
        whole = compiling or is_compiled(self.model)
        if whole:
            self._tell("compiled", "the whole model is compiled: updates cannot overlap with its forward pass; compile blocks")
        if whole:
            self._hand_to_compiled_code()
        elif not trains:  # an evaluation may read parameters by any way
            self._settle()
        elif not self._settled:
            self._hook_compiled_parts()
        if self._buffers is not None and not self._left_alone:
            self._refused_aloud(
                lambda buffers: buffers.before_forward(self._failures.wait_until, module.training, self._settled)
            )
        if not trains:
            return
        if self.sync and self._buffers is not None:
            self._verifier.forward_begins(self._driver.iteration + 1)
        if self.trains_more is not None:
            raise JobError(f"{self.trains_more} was frozen at attach and is trained now: close() the session and attach again")
        self._keep_the_barrier_if_it_is_kept_anyway()
        now = now_ns()
        if self._planner.measures(self._driver.iteration + 1):
            self._forward_began = self._stopwatch.now()
        if self._forward_began_ns and self._driver.iteration >= 0:
            self._recorder.add("step", self._driver.iteration, -1, self._forward_began_ns, now)
        self._forward_began_ns = now
        if not whole and not self._settled:
            self._watched_iteration = self._driver.iteration + 1
            self._watch_all()
        self._in_forward = True

    def _watch_all(self) -> None:
        for tensor, param in enumerate(self._params):
            if tensor not in self._unguarded:
                guards.watch(param, tensor, self._parameter_used)

    def _keep_the_barrier_if_it_is_kept_anyway(self) -> None:
        """Stop deferring updates if the script needs them all before each next forward pass.

        Such a script gains nothing from deferred updates.
        """
        if self._is_late:
            self._settled_early = 0 if self._deferred else self._settled_early + 1
            self._is_late = False
        if self._crosses and self._deferred.were_used_elsewhere:
            self._crosses = self._may_cross = self._planner.crosses = False
            self._tell(
                "streams",
                "the model uses parameters on another stream than the one on which step() runs: from now on step() waits for "
                "all sums",
            )
        if self._crosses and self._settled_early >= _SETTLED_EARLY:
            self._crosses = self._may_cross = self._planner.crosses = False
            if not self._told & {"read", "aliases"}:
                self._tell(
                    "early",
                    f"updates were needed before the next forward pass {_SETTLED_EARLY} steps in a row (an average, a "
                    "checkpoint, a log of the parameters?): from now on step() waits for all sums",
                )

    def _hand_to_compiled_code(self) -> None:
        """Make all parameters and gradients ordinary tensors, until the forward pass has ended.

        The compiler would trace into the guards otherwise: their state changes while it traces, and
        each change of a class would make it compile again.
        """
        for param in self._params:
            guards.use(param)  # while the profile is measured: all are used before the pass begins
        self._settle()
        if not self._in_backward:  # an evaluation in a hook would see gradients that are not summed
            self._gradients.lend(self._gradients.that_stand_for_sums(range(len(self._params))))

    def _before_compiled(self, module: torch.nn.Module, compiling: bool, _: Any) -> None:
        """Treat the call of a compiled part as the first use of all its parameters.

        The compiler's guards include a parameter's class; a part that met watched parameters would
        be compiled again and again.
        """
        for param in module.parameters():
            guards.use(param)

    @in_turn
    def _before_compiled_code(self, module: torch.nn.Module | None) -> None:
        if module is not None:
            self._before_compiled(module, True, None)
            return
        for param in self._params:
            guards.use(param)
        self._settle()
        if not (self._in_forward or self._in_backward):
            self._gradients.give_all()

    @in_turn
    def _after_forward(self, module: torch.nn.Module, compiling: bool, output: Any) -> None:
        if inside_a_backward_pass() or is_traced():
            return
        self._gradients.take_back()
        if not torch.is_grad_enabled():
            return
        self._in_forward = False
        now = now_ns()
        if self._planner.measures(self._driver.iteration + 1):
            self._stopwatch.report(self._forward_took, self._forward_began)
        self._recorder.add("forward", self._driver.iteration + 1, -1, self._forward_began_ns, now)
        if self._forward_ended(module, output) and self._buffers is not None:
            self._buffers.after_forward()

    def _parameter_used(self, tensor: int) -> None:
        """Called before the first use of a watched parameter: run its update and note the time."""
        with turn, guards.as_ordinary():
            param = self._params[tensor]
            self._until_step_is_over()
            if not guards.is_watched(param):
                return  # another thread has made it current
            self._verifier.touched(param)
            self._deferred.note_use()
            self._deferred.make_current(tensor)
            if tensor in self._deferred:
                return  # while this thread waited, others went on as far as the next step
            guards.unwatch(param)
            self._seen.add(tensor)
            iteration = self._driver.iteration + 1
            now = now_ns()
            self._recorder.add("use", iteration, tensor, now, now)
            if self._planner.measures(iteration):
                used, name = self._planner.builder.used, self._name_of(tensor)
                if self._in_forward:
                    self._stopwatch.report(lambda since_ns: used(name, since_ns), self._forward_began)
                else:
                    used(name, 0)

    def _forward_took(self, forward_ns: int) -> None:
        self._forward_ns = forward_ns

    # -- backward ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._gpu.refuse_capture("a backward pass that sums gradients")
        if self._forward_summed is None and self._buffers is not None:
            self._verifier.forward_was_not_seen(self._driver.iteration + 1)
            self._tell("unseen forward", UNSEEN_FORWARD)
        if self._uneven is not None:
            self._gradients.scale_by(self._uneven.come())
        self._begin_iteration()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @in_turn
    def _begin_iteration(self) -> None:
        self._failures.check()
        self._stale = frozenset(self._deferred)
        self._settle()
        self._verify()
        if not self._settled and self._planner.is_due(self._driver, self._stopwatch.settle):
            plan = self._planner.decide(type(self.model).__name__, self._device, self._backend, self._failures.collective)
            self._settled = True
            always_read = 0 <= self._driver.iteration < len(self._reads)
            self._planner.crosses = self._may_cross and not always_read
            self._take_up(plan)
            log.info("rank %d: %s", self._driver.global_rank, plan.describe(limit=0).partition("\n")[0])
            if self._controller is not None:
                self._controller.start(self._planner, self._recorder)
        elif self._settled and self._controller is not None and not self._controller.over:
            changed = self._controller.decide(self._planner, self._driver, self._backend)
            if changed is not None:
                self._take_up(changed)
        if self._was_evaluated and self._buffers is not None:
            self._buffers.after_forward()
        self._was_evaluated = False
        self._gradients.begin()
        self._recorder.begin()
        self._in_backward = True
        self._backward_began_ns = now_ns()
        self._fired = [0] * len(self._params)
        self._launched = [False] * len(self._params)
        self._groups.begin()
        self._meter.begin()
        self._driver.begin()
        self._measures = self._planner.measures(self._driver.iteration)
        if self._measures:
            self._backward_began = self._stopwatch.now()
        self._verifier.begin(self._driver.iteration)

    def _verify(self) -> None:
        """Compare the iteration that is over with DDP's, if it is verified. Every sum has arrived, and all updates have run."""
        if self._verifier.verifies:
            for tensor, param in enumerate(self._params):
                self._verifier.arrived(param, self._driver.slots[tensor])
            self._verifier.compare()

    @property
    def _counting(self) -> bool:
        """Whether this is iteration 0, which counts how often each hook fires in a backward pass.

        Until that is known, all gradients are sent at the end of the pass.
        """
        return self._driver.iteration == 0

    def _name_of(self, tensor: int) -> str:
        return self._plan.tensors[tensor].name

    def _launch(self, tensor: int) -> None:
        # a hook of the script's comes after this one, and must not see what stands for no sum yet
        if len(self._params[tensor]._post_accumulate_grad_hooks) > 1 and self._groups.is_shared(tensor):
            self._groups.dissolve([tensor])
        group = self._groups.add(tensor)
        if group:
            self._launch_group(group)

    def _launch_group(self, tensors: Sequence[int]) -> None:
        """Put gradients, divided by the world size as in DDP, into their slots; report them ready."""
        if self._stale:
            self._refuse_stale(tensors)
        try:
            self._gradients.put(tensors)
        except RuntimeError:
            self._refuse_another(tensors)
            raise
        for tensor in tensors:
            self._launched[tensor] = True
            if self._verifier.verifies:
                self._verifier.contributes(self._params[tensor], self._driver.slots[tensor])
        self._driver.ready(tensors)
        if self._measures:
            names = [self._name_of(tensor) for tensor in tensors]
            self._stopwatch.report(lambda since_ns: self._planner.builder.ready_together(names, since_ns), self._backward_began)

    def _refuse_stale(self, tensors: Iterable[int]) -> None:
        """Fail if a parameter got a gradient whose update was still deferred in the forward pass."""
        for tensor in tensors:
            if tensor in self._stale:
                self._fail(
                    f"{self._name_of(tensor)} was read before its update had been made, by something that Python does not see "
                    "(a C++ extension?): put it into a module of its own and pass cross_barrier=False to gradlane.attach"
                )

    @in_turn
    def _end(self) -> None:
        """Report the gradients that the backward pass, which is over, did not produce."""
        ended = now_ns()
        if self._measures:
            passed = self._planner.builder.passed
            self._stopwatch.report(lambda backward_ns: passed(self._forward_ns, backward_ns), self._backward_began)
        self._count_fires()
        absent = []
        if not all(self._launched):
            for tensor, param in enumerate(self._params):
                if self._launched[tensor]:
                    continue
                if self._fired[tensor]:
                    self._launch_group((tensor,))
                else:
                    self._launch_absent(tensor, param)
                    absent.append(tensor)
            self._groups.dissolve(absent)
        self._driver.all_are_ready()
        if self._watched_iteration == self._driver.iteration > 0:
            unseen = {self._name_of(tensor) for tensor, fired in enumerate(self._fired) if fired and tensor not in self._seen}
            if unseen:
                self._unseen |= unseen
                self._find_unguarded()
        self._seen.clear()
        self._forward_summed = None
        self._accumulated.clear()
        self._in_backward = False
        self._recorder.add("backward", self._driver.iteration, -1, self._backward_began_ns, ended)
        # as DDP with find_unused_parameters, leave a gradient alone that no rank has produced
        for tensor in absent:
            self._driver.wait_for(tensor)
            if self._driver.used_by_anybody(tensor):
                self._gradients.show_absent(tensor)
        self._fill_in_the_scripts()

    def _count_fires(self) -> None:
        if self._counting:
            self._expected = [max(1, fired) for fired in self._fired]
            self._fires_in_a_pass = {spec.name: n for spec, n in zip(self._plan.tensors, self._expected, strict=True)}

    def _take_part(self) -> None:
        """Run an iteration without a gradient of this rank's own, in which the others have theirs."""
        self._begin_iteration()
        self._count_fires()
        for tensor, param in enumerate(self._params):
            self._launch_absent(tensor, param)
        self._driver.all_are_ready()
        self._in_backward = False
        self._settle()

    def _launch_absent(self, tensor: int, param: torch.nn.Parameter) -> None:
        """Report a tensor that got no gradient in this pass.

        What stands in `.grad` is summed, as under DDP: it is of passes under `no_sync()`, or kept
        from an earlier iteration. The presence element tells whether any pass since the last sum
        produced it.
        """
        self._refuse_replaced([tensor])
        self._gradients.put_absent(tensor, counts=id(param) in self._accumulated)
        self._verifier.contributes(param, self._driver.slots[tensor])
        self._driver.ready((tensor,))

    def _refuse_replaced(self, tensors: Iterable[int] | None = None) -> None:
        for tensor in range(len(self._params)) if tensors is None else tensors:
            if not self._is_replaced(self._params[tensor], self._name_of(tensor)):
                continue
            self._fail(
                f"{self._name_of(tensor)} was replaced since attach (load_state_dict(assign=True), swap_tensors, another "
                "Parameter?), and neither its gradient nor the optimizer reaches what is there now: close() the session before "
                "such a change, and attach again with an optimizer of the new parameters",
                UnsupportedError,
            )

    def _fill_in_the_scripts(self) -> None:
        """Wait for sums whose gradients are in memory that the script holds too; copy them there.

        DDP would have put them there by the end of the backward pass.
        """
        if not self._gradients.of_the_script:
            return
        self._tell(
            "shared gradients",
            "gradients lie in memory that the script holds too (a flat buffer, views): their sums are waited for in backward()",
        )
        for tensor, gradient in self._gradients.of_the_script:
            self._driver.wait_for(tensor)
            self._verifier.arrived(self._params[tensor], self._driver.slots[tensor])
            with torch.no_grad():
                gradient.copy_(self._driver.slots[tensor])
        self._gradients.of_the_script.clear()

    def _refuse_another(self, tensors: Iterable[int]) -> None:
        """Fail if a parameter has another dtype, shape or device than its slot."""
        for tensor in tensors:
            param, slot = self._params[tensor], self._driver.slots[tensor]
            if (param.dtype, param.shape, param.device) != (slot.dtype, slot.shape, slot.device):
                name = self._name_of(tensor)
                self._fail(
                    f"{name} is {param.dtype} of shape {tuple(param.shape)} on {param.device} now and was another tensor "
                    f"of {dtype_name(slot)} at attach: close() the session before such a change, and attach again",
                    UnsupportedError,
                )

    # -- step --------------------------------------------------------------------------------------

    @in_turn
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, compiling: bool) -> tuple[Any, Any] | None:
        with given_up():  # the script's closure may start threads, and its backward pass runs in autograd's
            instead = run_first(optimizer, args, kwargs)
        self._failures.check()
        self._gpu.refuse_capture("optimizer.step()")
        self._stepped = []
        if self._in_backward:
            self._refuse_step_in_backward(optimizer)
        else:
            if self._buffers is not None:
                self._refused_aloud(lambda buffers: buffers.check(self._failures.wait_until))
            if self._deferred.of(optimizer):  # a second step() before its updates were needed
                self._settle()
            self._runs_closure = instead is None and closure_of(args, kwargs) is not None
            needs_all = self._needs_all(optimizer, self._runs_closure, compiling)
            if self._may_cross and not is_last(optimizer):
                self._tell("hook", "a step pre-hook runs after gradlane's and may read gradients: such steps wait for all sums")
                needs_all = True
            self._split_step(optimizer, defer=not needs_all and self._crosses)
            # a closure that the optimizer runs itself may change the gradients that verification would take now
            if not self._runs_closure:
                self._verifier.stepping(optimizer, self._is_owed)
        self._step_began_ns = now_ns()
        if self._planner.measures(self._driver.iteration):
            self._step_began = self._stopwatch.now()
        return instead

    def _refuse_step_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                tensor = self._tensor_of.get(id(param))
                if tensor is not None:
                    self._fail(
                        f"optimizer.step() for {self._name_of(tensor)} inside the backward pass, before its gradient could be "
                        "summed: call it after backward()",
                        UnsupportedError,
                    )

    def _split_step(self, optimizer: torch.optim.Optimizer, defer: bool) -> None:
        """Leave in `.grad` what the optimizer may use now, and defer what has not arrived.

        Args:
            optimizer: the one that steps.
            defer: updates may be deferred; if not, wait for all of its sums.
        """
        if not self._settled:  # torch chooses kernels by the class of a parameter, and another optimizer may have stepped
            for tensor in self._tensors_of(optimizer):
                guards.unwatch(self._params[tensor])
        keeps_none = keeps_no_gradient(optimizer)
        self._stepped = self._tensors_of(optimizer)
        self._update_what_another_deferred(self._stepped)
        all_are_there = self._driver.all_are_there
        tensors = self._gradients.that_stand_for_sums(self._stepped)
        late: list[int] = []
        if not all_are_there and defer and not self._all_arrive_soon(tensors):
            tensors, late = self._late_among(optimizer, tensors)
        # nothing is hidden until the last wait is over, in which a signal handler or another thread may read anything
        self._driver.wait_for_each(tensors)
        # GradScaler has such an optimizer leave out the step by itself
        if not hasattr(optimizer, "grad_scale"):
            self._finite.updates(tensors)
        if self._verifier.verifies:
            for tensor in tensors:
                self._verifier.arrived(self._params[tensor], self._driver.slots[tensor])
        if keeps_none:
            self._gradients.lend(tensors)
        else:
            for tensor in tensors:
                self._gradients.give(tensor)
        if late:
            wrap_handlers()
            owed = DeferredStep(optimizer)
            for tensor in late:
                self._deferred.hide(tensor, owed)
            self._steps_in = threading.get_ident()

    def _update_what_another_deferred(self, tensors: Iterable[int]) -> None:
        """Run the updates of `tensors` that another optimizer's step has deferred: it has stepped first."""
        if self._deferred:
            for tensor in tensors:
                if tensor in self._deferred:
                    self._deferred.make_current(tensor)

    def _tensors_of(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """The tensors of this session that `optimizer` updates, in its order."""
        of = self._tensor_of
        return [of[id(param)] for group in optimizer.param_groups for param in group["params"] if id(param) in of]

    def _all_arrive_soon(self, tensors: Sequence[int]) -> bool:
        """Wait for the sums of `tensors`, if that may take less time than to defer their updates."""
        if self._backend.has_streams:
            return False
        late = sum(not self._driver.has_arrived(tensor) for tensor in tensors)
        limit_ns = self._patience.limit_ns(late, self._driver.told_if_awaited)
        if not limit_ns:
            return False
        came = self._driver.wait_briefly(limit_ns)
        self._patience.waited(in_vain=not came)
        return came

    def _late_among(self, optimizer: torch.optim.Optimizer, tensors: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those of `tensors` to update now, and those whose updates are deferred: their sums have not arrived."""
        shared = None
        others, late = [], []
        for tensor in tensors:
            if tensor in self._unguarded or self._driver.has_arrived(tensor):
                others.append(tensor)
                continue
            self._is_late = True
            shared = shared or aliases.Aliases(optimizer, self._params, self._accumulators)
            if shared.of(self._params[tensor]):
                self._tell(
                    "aliases",
                    f"something else holds the memory of {self._name_of(tensor)} or of the optimizer's state of it (a "
                    "state_dict that was kept, a view, a NumPy array, another process): such parameters are updated at step(), "
                    "not later",
                )
                others.append(tensor)
                continue
            late.append(tensor)
        return others, late

    def _needs_all(self, optimizer: torch.optim.Optimizer, has_closure: bool, compiling: bool) -> bool:
        """Whether the updates of this call of `step` cannot be deferred.

        Args:
            optimizer: the one that steps.
            has_closure: it was given a closure, which it will run itself.
            compiling: it is compiled. A deferred update would not be, and may round otherwise (seen with
                PyTorch 2.6).
        """
        if has_closure and self._may_cross:
            self._tell("closure", f"{type(optimizer).__name__}.step(closure) keeps the barrier")
        if compiling and self._may_cross:
            self._tell("compiled step", f"{type(optimizer).__name__}.step is compiled: it keeps the barrier")
        # a GradScaler gives a fused optimizer its scale for the time of one call
        return has_closure or compiling or hasattr(optimizer, "grad_scale")

    @in_turn
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = now_ns()
        if self._planner.measures(self._driver.iteration):
            self._stopwatch.report(self._planner.builder.updated, self._step_began)
            self._step_ended = self._stopwatch.now()
        self._runs_closure = False
        self._step_is_over()
        self._deferred.step_ran()
        self._verifier.all_updated(optimizer, self._is_owed)
        self._deferred.show_hidden(self._parameter_used, self._settle)
        self._gradients.take_back()
        if not self._settled:  # a parameter may be used before the forward pass
            self._watch_all()
        if self._driver.iteration < 0:
            return
        updated = [tensor for tensor in self._stepped if tensor not in self._deferred] if self._deferred else self._stepped
        self._recorder.add_each("update", self._driver.iteration, updated, self._step_began_ns, now)

    def _gradient_read(self, tensor: int) -> None:
        """Called before an operation on a gradient that stands for a sum: wait for the sum."""
        if self._in_backward and self._launched[tensor]:
            # its sum may need gradients that this pass has yet to produce
            self._fail(
                f"the gradient of {self._plan.tensors[tensor].name} is read, or accumulated into once more, after it was "
                "sent and before the backward pass has ended; use checkpoint(use_reentrant=False), and read gradients after "
                "backward()"
            )
        if not self._settled:
            self._reads.add(self._driver.iteration)
        # an optimizer reads gradients after its closure
        if self._crosses and not self._runs_closure and tensor not in self._deferred and not self._driver.has_arrived(tensor):
            self._is_late = True
            self._tell(
                "read",
                "gradients are read between backward and step (clip_grad_norm_, GradScaler, logging): such steps wait for "
                "all sums",
            )
        with turn, guards.as_ordinary():
            self._until_step_is_over()
            self._deferred.make_current(tensor)
            self._verifier.touched(self._params[tensor])
            self._verifier.arrived(self._params[tensor], self._driver.slots[tensor])

    def _until_step_is_over(self) -> None:
        """Let a thread wait while the optimizer runs in another one, which has hidden gradients from it."""
        stepping = self._steps_in
        if stepping is None or stepping == threading.get_ident():
            return
        if is_stepping(sys._current_frames().get(stepping)):
            self._failures.wait_until(lambda: self._steps_in is None, "the optimizer, which steps in another thread")

    def _step_is_over(self) -> None:
        if self._steps_in is not None:
            self._steps_in = None
            with self._failures.lock:
                self._failures.notify_if_awaited()

    def _is_owed(self, param: torch.nn.Parameter) -> bool:
        return self._tensor_of.get(id(param), -1) in self._deferred

    def _settle(self) -> None:
        """Wait for every sum of the last iteration and run every deferred update."""
        with turn, guards.as_ordinary():
            self._failures.check()
            self._until_step_is_over()
            while not self._in_backward:
                self._deferred.make_all_current()
                self._driver.wait_for_all()
                if not (self._in_backward or self._deferred):  # else another thread went on while this one waited
                    guards.unwatch_all(self._params)
                    return

    # -- errors and warnings -------------------------------------------------------------------------

    @property
    def trains_more(self) -> str | None:
        """The name of a parameter that was frozen at attach and is trained now; None if there is none."""
        return next((name for name, param in self._frozen if param.requires_grad), None)

    def _fail(self, text: str, kind: type[JobError] | type[UnsupportedError] = JobError) -> NoReturn:
        """Raise an error with `text`, and tell the other ranks."""
        self._failures.check()  # the first failure stands
        error = kind(f"{self._driver.where}: {text}")
        self._driver.abort(error)
        raise error

    def _refused_aloud(self, call: Callable[[BufferSync], None]) -> None:
        """Call `call` with the buffers; tell the other ranks if it raises `UnsupportedError`."""
        assert self._buffers is not None
        try:
            call(self._buffers)
        except UnsupportedError as error:
            self._fail(str(error), UnsupportedError)

    def _tell(self, key: str, text: str) -> None:
        """Log `text` as a warning on rank 0, once for each `key`."""
        if key not in self._told and self.rank == 0:
            with given_up():  # a thread that has logging's lock may want to show a parameter
                log.warning("gradlane: %s", text)
        self._told.add(key)
