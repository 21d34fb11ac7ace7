"""Iterations: what a session does in each pass of the script; what it does in a step is in `steps.py`.

Everything here runs on the training thread, but for reads of parameters and gradients, which another thread of the
script may make too: whoever changes anything has the turn (`turn.py`). What threads of gradlane use is in
`live/comm/carrier.py`.

One iteration:

    forward     the first use of a parameter makes its deferred update (`updates.py`)
    backward    `begin`; then, for each gradient, `complete` divides it by the world size, puts it into its slot
                and reports that it is ready; `_end` reports the gradients that this rank did not produce
    step        the optimizer updates what has arrived, and the rest is deferred
"""

from __future__ import annotations

from typing import Any

import torch

from gradlane.core.plan import Plan
from gradlane.errors import JobError
from gradlane.live.comm.recorder import now_ns
from gradlane.live.comm.turn import in_turn
from gradlane.live.session import guarded_params
from gradlane.live.session.frozen import Frozen
from gradlane.live.session.hooks import inside_a_backward_pass, is_compiled, is_traced, parameters_of_scripts
from gradlane.live.session.ignored import summed_parameters
from gradlane.live.session.interruptions import wrap_handlers
from gradlane.live.session.module_buffers import BufferSync
from gradlane.live.session.open_calls import OpenCalls
from gradlane.live.session.parts import Parts, log
from gradlane.live.session.passes import PAST_WRAPPER, UNSEEN_FORWARD, Passes
from gradlane.live.session.sending import Sending
from gradlane.live.session.steps import Steps
from gradlane.live.session.tracked import Tracked


class Iterations:
    """The iterations of one session: the `passes.Listener` of its model.

    Args:
        parts: of the session.
        first_plan: in force until the policy's own plan is there.

    Attributes:
        summed: names and parameters of the model whose gradients are summed wherever they are trained.
    """

    def __init__(self, parts: Parts, first_plan: Plan) -> None:
        self.parts, job = parts, parts.job
        self.summed = summed_parameters(job.model, job.ignored)
        self._frozen = Frozen(self.summed)
        self._by_name = {name: Tracked(name, param, tensor) for tensor, (name, param) in enumerate(job.params)}
        parts.tracked_of = {id(tracked.param): tracked for tracked in self._by_name.values()}
        self._driver, self._updates, self._verifier = parts.driver, parts.updates, parts.verifier
        self._gradients, self._measuring, self._recorder = parts.gradients, parts.measuring, parts.recorder
        self._sending = Sending(parts, lambda several: self.passes.refuse_replaced(several))
        self._steps = Steps(parts, self._watch_all)
        parts.gradients.reads.connect(parts, self._steps)
        self.before_step, self.after_step, self.fail = self._steps.before, self._steps.after, parts.fail
        self.complete, self.arrived_again = self._sending.complete, self._sending.arrived
        self.may_be_complete = self._sending.may_be_complete
        self._unseen: set[Tracked] = set()  # that something reads past every guard
        self._forward_began_ns = self._forward_ended_ns = self._backward_began_ns = 0
        self._begun_behind: int | None = None  # the last iteration when the first forward pass of the coming one began
        self._in_forward = False  # a forward pass in training runs; until it ends, or its backward pass begins
        self._calls = OpenCalls()
        self._take_up(first_plan)
        past_wrapper = (lambda: parts.tell("past the wrapper", PAST_WRAPPER)) if job.wrapped else None
        self.passes = Passes(
            job.model, parts.tracked, job.optimizers, self, fills_in=not job.finds_unused, past_wrapper=past_wrapper
        )

    def _take_up(self, plan: Plan) -> None:
        """Put `plan` in force. No message may be in flight, and no update deferred."""
        parts = self.parts
        parts.plan = plan
        parts.crosses = plan.crosses_barrier and parts.may_cross
        parts.tracked = parts.actions.tracked = [self._by_name[spec.name] for spec in plan.tensors]
        for tensor, tracked in enumerate(parts.tracked):
            tracked.tensor = tensor
        params = [tracked.param for tracked in parts.tracked]
        self._driver.take_up(plan, params, parts.planner.place.coordinated and parts.settled)
        parts.finite.take_up(plan)
        self._find_unguarded()
        self._sending.take_up()
        self._recorder.forget(self._driver.iteration + 1)

    def _find_unguarded(self) -> None:
        """Find the parameters whose updates must not be deferred, since something reads them past every guard."""
        scripts = {id(param) for param in parameters_of_scripts(self.parts.job.model)}
        for tracked in self.parts.tracked:
            tracked.unguarded = id(tracked.param) in scripts or tracked in self._unseen

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass runs whose gradients are summed."""
        return self._updates.in_backward

    @property
    def counting(self) -> bool:
        """Whether this is iteration 0, which counts how often each hook fires in a backward pass.

        Until that is known, all gradients are sent at the end of the pass.
        """
        return self._driver.iteration == 0

    # -- forward -----------------------------------------------------------------------------------

    @in_turn
    def before_forward(self, module: torch.nn.Module, compiling: bool, nested: bool) -> None:
        """The model is called."""
        parts = self.parts
        parts.failures.check()
        wrap_handlers()
        trains = torch.is_grad_enabled() and module.training
        if self.passes.is_run_once_more():
            return
        if self.in_backward and inside_a_backward_pass():  # the wrapper, run once more by a checkpoint, or called in a hook
            if not (parts.left_alone or nested):
                self._take_buffers(module, self._calls.begin_within(trains))
            return
        if is_traced():
            self.settle()  # only the model must be recorded
            return
        self.passes.refuse_wrappers(inside=not parts.settled)
        if nested and trains and self._in_forward:
            return  # a part of the pass that runs
        if trains:
            parts.gpu.refuse_capture("the model's forward pass in training")
        elif parts.gpu.is_captured:
            return  # it was settled before the capture
        if self.in_backward and trains:
            self.fail(
                "the backward pass was left unfinished (an exception that the script caught?); its gradients are partly "
                "summed, the job cannot go on from here"
            )
        if trains:
            self._measuring.forward_is_due()
        whole = compiling or is_compiled(parts.job.model)
        if whole:
            parts.tell("compiled", "the whole model is compiled: updates cannot overlap with its forward pass; compile blocks")
            self._hand_to_compiled_code()
        elif not trains:  # an evaluation may read parameters by any way
            self._steps.updates_are_needed("parameters")
            self.settle()
        elif not parts.settled:
            self.passes.hook_compiled_parts()
        if self.passes.counts_calls and not (parts.left_alone or nested):
            self._take_buffers(module, self._calls.begin(trains))
        if trains:
            self._forward_that_trains(watches=not whole and not parts.settled)
        elif self.passes.counts_calls and parts.buffers is not None:
            self._verifier.forward_begins(self._driver.iteration + 1, trains)

    def _take_buffers(self, module: torch.nn.Module, again: bool) -> None:
        """Take over rank 0's buffers, as DDP does at the start of each call; `again` if the call before did not end."""
        parts = self.parts
        if again:
            parts.refused_aloud(BufferSync.forward_raised)
            self._in_forward = False
        parts.refused_aloud(lambda buffers: buffers.before_forward(parts.driver.wait_until, module.training, parts.settled))

    def _forward_that_trains(self, watches: bool) -> None:
        self._steps.go_on_after_an_error()
        if self.passes.counts_calls and self.parts.buffers is not None:
            self._verifier.forward_begins(self._driver.iteration + 1, trains=True)
        fault = self._frozen.fault
        if fault is not None:
            raise JobError(fault)
        buffers = self.parts.buffers
        changed = None if buffers is None or self.parts.job.wrapped else buffers.changed
        if changed is not None:
            raise JobError(f"buffer {changed} is not where it was at attach: close() the session and attach again")
        self._steps.keep_the_barrier_if_it_is_kept_anyway()
        if self._begun_behind != self._driver.iteration:  # else gradients accumulate, or the model is called several times
            self._begin_step()
        if watches:
            self._measuring.all_are_watched()
            self._watch_all()
        self._in_forward = True

    def _begin_step(self) -> None:
        """The first forward pass of an iteration begins."""
        self._begun_behind = self._driver.iteration
        now = now_ns()
        self._measuring.forward_begins()
        if self._forward_began_ns and self._driver.iteration >= 0:
            self._recorder.add("step", self._driver.iteration, -1, self._forward_began_ns, now)
        self._forward_began_ns = now

    def _watch_all(self) -> None:
        self.parts.actions.guard([tracked for tracked in self.parts.tracked if not tracked.unguarded])

    def _hand_to_compiled_code(self) -> None:
        """Make all parameters and gradients ordinary tensors, until the forward pass has ended.

        The compiler would trace into the guards otherwise: their state changes while it traces, and
        each change of a class would make it compile again.
        """
        self._use_all()
        if not self.in_backward:  # an evaluation in a hook would see gradients that are not summed
            self._gradients.lend(self._gradients.that_stand_for_sums(self.parts.tracked))

    def _use_all(self) -> None:
        for tracked in self.parts.tracked:
            guarded_params.use(tracked.param)  # while the profile is measured: all are used now
        self.settle()

    @in_turn
    def before_compiled_code(self, module: torch.nn.Module | None) -> None:
        """Compiled code is about to run: a method of `module`, or a function of the script."""
        if module is not None:
            self.passes.before_compiled(module)
            return
        self._use_all()
        if not (self._in_forward or self.in_backward):
            self._gradients.give_all()

    @in_turn
    def after_forward(self, module: torch.nn.Module, nested: bool, output: Any) -> None:
        """The model has returned `output`."""
        if self.passes.is_run_once_more() or is_traced():
            return
        if self.in_backward and inside_a_backward_pass():
            if not (self.parts.left_alone or nested):
                self._calls.end_within()
                self._verifier.forward_ended(self.passes.sync and torch.is_grad_enabled())
                if self.passes.sync and torch.is_grad_enabled() and module.training:
                    self.parts.refused_aloud(BufferSync.after_forward)
            return
        if not nested:
            self._gradients.take_back()
            if self.passes.counts_calls:
                self._calls.end()
                self._verifier.forward_ended(self.passes.sync and torch.is_grad_enabled())
        if not torch.is_grad_enabled():
            return
        if not nested:
            self._forward_is_over()
        if self.passes.forward_ended(module, nested, output):
            self.parts.refused_aloud(BufferSync.after_forward)

    def _forward_is_over(self) -> None:
        """A forward pass has ended; or its backward pass begins, also inside of a call of the model."""
        if self._in_forward:
            self._in_forward = False
            self._measuring.forward_ended()
            self._forward_ended_ns = now_ns()

    def use(self, tracked: Tracked) -> None:
        """Called before the first use of a guarded parameter, on any thread."""
        if not self._in_forward:
            self._steps.updates_are_needed("parameters")
        self._updates.use(tracked, lambda: self._used(tracked))

    def _used(self, tracked: Tracked) -> None:
        self._verifier.touched(tracked.param)
        self.parts.actions.note_use()
        if not tracked.was_used:
            tracked.was_used = True
            now = now_ns()
            self._recorder.add("use", self._driver.iteration + 1, tracked.tensor, now, now)
            self._measuring.used(tracked, self._in_forward)

    # -- backward ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass begins whose gradients are summed."""
        parts = self.parts
        parts.gpu.refuse_capture("a backward pass that sums gradients")
        # the drop-in is told to sum without a forward pass of its own, for which torch's class sends no buffers either
        if parts.buffers is not None and not (self.passes.forward_was_seen or parts.job.wrapped):
            self._verifier.forward_was_not_seen(self._driver.iteration + 1)
            parts.tell("unseen forward", UNSEEN_FORWARD)
        if parts.uneven is not None:
            self._gradients.scale_by(parts.uneven.come())
        self._begin_iteration()
        self.passes.call_at_end(self._end)

    @in_turn
    def _begin_iteration(self) -> None:
        parts = self.parts
        parts.failures.check()
        self._forward_is_over()
        if self._forward_ended_ns:
            self._recorder.add("forward", self._driver.iteration + 1, -1, self._forward_began_ns, self._forward_ended_ns)
            self._forward_ended_ns = 0
        unread = list(self._updates)
        self.settle()
        self.verify()
        self._change_plan()
        if self.passes.was_evaluated:
            parts.refused_aloud(BufferSync.after_forward)
        self._recorder.begin()
        self._updates.begin(parts.tracked, unread)
        self._backward_began_ns = now_ns()
        self.passes.backward_begins()
        self._sending.begin()
        parts.meter.begin()
        self._driver.begin()
        self._measuring.backward_begins()
        self._verifier.begin(self._driver.iteration, parts.crosses)

    def _change_plan(self) -> None:
        """Put the plan in force that is due, if another one is."""
        parts, planner, controller = self.parts, self.parts.planner, self.parts.controller
        if not parts.settled:
            if not planner.is_due(self._driver, self._measuring.settle):
                return
            plan = planner.decide(parts.job.model_name, parts.job.device, parts.backend, parts.failures.collective)
            parts.settled = True
            planner.learn(parts.may_cross, self._measuring.always_read, self._measuring.norms_read)
            self._take_up(plan)
            log.info("rank %d: %s", self._driver.global_rank, plan.describe(limit=0).partition("\n")[0])
            if controller is not None:
                controller.start(planner, self._recorder)
        elif controller is not None and not controller.over:
            changed = controller.decide(planner, self._driver, parts.backend)
            if changed is not None:
                self._take_up(changed)

    def verify(self) -> None:
        """Compare the iteration that is over with DDP's, if it is verified. Every sum has arrived, and all updates are made."""
        if self._verifier.verifies:
            for tracked in self.parts.tracked:
                self._verifier.arrived(tracked.param, tracked.slot)
            with self.parts.failures.explained("the sums of verification"):
                self._verifier.compare()

    @in_turn
    def _end(self) -> None:
        """Report the gradients that the backward pass, which is over, did not produce."""
        ended, parts = now_ns(), self.parts
        self._measuring.backward_ended()
        self.passes.count()
        absent = self._sending.send_rest()
        unseen = self._measuring.unseen(parts.tracked)
        if unseen:
            self._unseen.update(unseen)
            self._find_unguarded()
        self._updates.end(parts.tracked)
        self.passes.backward_ended()
        self._recorder.add("backward", self._driver.iteration, -1, self._backward_began_ns, ended)
        self._sending.fill_in(absent)

    def take_part(self) -> None:
        """Run an iteration without a gradient of this rank's own, in which the others have theirs."""
        self._begin_iteration()
        self.passes.count()
        self._sending.lack_all()
        self._updates.end(self.parts.tracked)
        self.passes.backward_ended()
        self.settle()

    # -- all at once -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for every sum of the last iteration and make every deferred update; gradients are left alone."""
        self._updates.settle()

    def before_state_dict(self, *_: Any, **__: Any) -> None:
        """The model's state is saved or loaded."""
        self._steps.updates_are_needed("the model's state")
        self._updates.settle()

    def before_optimizer_state_dict(self, *_: Any, **__: Any) -> None:
        """An optimizer's state is saved."""
        self._steps.updates_are_needed("the optimizer's state")
        self._updates.settle()

    @property
    def trains_more(self) -> str | None:
        """The name of a parameter that was frozen at attach and is trained now; None if there is none."""
        return self._frozen.trained

    # -- forks and signals, see `interruptions.py` -------------------------------------------------

    def is_busy_here(self) -> bool:
        """Whether the calling thread is in the middle of a change of what other threads of the session share."""
        lock: Any = self.parts.failures.lock
        return bool(lock._is_owned())

    def before_fork(self) -> None:
        """Make all deferred updates, unless the job has failed."""
        if self.parts.failures.failure is None:
            self._updates.settle()

    def in_child(self) -> None:
        """Detach from the model, in a child process that has no other thread."""
        self.passes.sync = False
        self.passes.close()
        failed = self.in_backward
        self._updates.give_up(self.parts.tracked, str(self.parts.failures.failure or "this process was forked meanwhile"))
        self._gradients.close(failed)

    # -- ending ------------------------------------------------------------------------------------

    def give_up(self, why: str) -> None:
        """Detach from the model. Parameters whose updates will not come refuse to be read, because of `why`."""
        self.passes.close()
        self.parts.gpu.close()
        failed = self.parts.failures.failure is not None
        self._updates.give_up(self.parts.tracked, why)
        self.parts.actions.refuse_lost(why)
        self._gradients.close(failed)
