"""Verification: compares a session's steps with an independent computation of DDP's steps.

In a verified iteration values are only copied as they pass. These are each rank's part of each sum, the sums, and parameters,
optimizer state and gradients before and after their updates. Nothing waits for another rank, so that as many updates are
deferred as in any other iteration.

The comparison comes when the next backward pass begins, or in `close()`, after all deferred updates have run. The
ranks all-reduce the copied parts in a process group of their own, which gives the sums as DDP computes them. They are
equal bit for bit at two ranks, and within rounding at more, since a sum of three numbers depends on their order. Parts
that travel as halves are added in float32 here, and rounding permits more. Each call of `step()` is made again by the
script's own optimizer, on copies of all its parameters at once, and the results are compared bit for bit. Buffers are
compared with rank 0's, as they were when the forward pass began.

Verification cannot see that something outside of Python read a value too early. If a gradient came of it, the table of
phases (`phases.py`) ends the job, in every iteration. Copies are made by the thread that has the turn (`turn.py`), and
compared on the training thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gradlane.core.fields import need_int
from gradlane.errors import VerificationError
from gradlane.live.backends.process_groups import NewGroups, ProcessGroups, is_by_host
from gradlane.live.session import guarded_states
from gradlane.live.session.bits import is_sum_of_halves, same_bits
from gradlane.live.session.deferred_step import DeferredStep, is_replaced, why_it_needs_the_barrier
from gradlane.live.session.job import Job
from gradlane.live.session.pending_gradient import InPlace, PendingGradient
from gradlane.live.session.script_lines import source_line
from gradlane.live.session.step_observer import StepObserver
from gradlane.live.torch_versions import broadcast_from

_ROUNDING = 1e-5  # error that is allowed beyond two ranks, as part of a sum's largest element


_VOUCHED_ITERATIONS = 3
_MOST = 1_000_000_000  # iterations


@dataclass(frozen=True)
class VerifyOptions:
    """Which iterations are verified.

    Args:
        first: so many iterations from the start, 0 or more.
        every: after them each iteration whose number is a multiple of this; 0: no more.
    """

    first: int = 20
    every: int = 100

    def __post_init__(self) -> None:
        need_int("first", self.first, 0, _MOST)
        need_int("every", self.every, 0, _MOST)

    def includes(self, iteration: int) -> bool:
        """Whether `iteration` is verified."""
        return iteration < self.first or (self.every > 0 and iteration % self.every == 0)


@dataclass
class _Update:
    """The update of one parameter by one call of `step()`: what was there before, and what the session made of it."""

    param: torch.nn.Parameter
    copy: torch.nn.Parameter
    state: dict[str, Any]
    gradient: torch.Tensor | None
    """As `step()` found it; None where the update was deferred, which takes the sum."""
    operations: Sequence[InPlace] = ()
    """By which the script has changed the sum that a deferred update takes."""
    after: torch.Tensor | None = None
    state_after: dict[str, Any] = field(default_factory=dict)


class Verifier(StepObserver):
    """Compares the steps of one session with DDP's.

    Everything is kept by parameter rather than by tensor of a plan, since the plan may change.

    Args:
        options: which iterations are verified; None for none but those that `vouched` asks for.
        job: the model and optimizers on this rank.
        new_groups: makes process groups over the job's ranks.
        vouched: classes of optimizers that the script vouches for (`cross_barrier=True`). That they update each parameter
            from its own gradient alone is checked in the first iterations that cross the barrier.
        buffers_are_due: under DDP the first forward pass begins with rank 0's buffers.
    """

    def __init__(
        self,
        options: VerifyOptions | None,
        job: Job,
        new_groups: NewGroups,
        vouched: Sequence[type[torch.optim.Optimizer]] = (),
        buffers_are_due: bool = True,
    ) -> None:
        super().__init__()
        self.compares = options is not None
        self._options = options or VerifyOptions(first=0, every=0)
        self._vouched, self._to_check = vouched, _VOUCHED_ITERATIONS if vouched else 0
        self._params = [param for _, param in job.params]
        self._job = job
        self._names = {id(param): name for name, param in job.params}
        on_wire = {id(param): job.dtype_on_wire(param) for param in self._params}
        # of those that travel as halves, by id of parameter
        self._halves = {key: dtype for key, dtype in on_wire.items() if dtype in (torch.bfloat16, torch.float16)}
        self._groups = ProcessGroups(new_groups, job.timeout_s)
        self._groups.open()
        self._device = job.device
        self._global_rank, self._world = job.global_rank, job.world
        self._tell: Callable[[BaseException], None] = lambda error: None
        self._wait_for: Callable[[ProcessGroups, Sequence[Any], str], None] = lambda groups, works, what: None
        self._iteration = -1
        self.verifies = False
        # by id of parameter
        self._parts: dict[int, torch.Tensor] = {}
        self._totals: dict[int, torch.Tensor] = {}
        self._touched: dict[int, str] = {}
        self._last_updates: dict[int, _Update] = {}
        self._steps: list[tuple[DeferredStep, list[_Update]]] = []
        self._returned = 0  # how many of `_steps` have returned
        self._not_compared: dict[str, None] = {}  # classes of optimizers whose steps have no reference
        self._norms: list[tuple[torch.nn.Parameter, float, torch.Tensor, Sequence[InPlace]]] = []
        # by iteration, when the forward pass began that DDP begins with rank 0's: one of training, or an evaluation before it,
        # perhaps on this rank alone. Its own rule, since BufferSync is what is verified.
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._buffers_are_due = buffers_are_due
        self._has_trained = False  # a forward pass in training has begun since the last backward pass

    def connect(
        self, tell: Callable[[BaseException], None], wait_for: Callable[[ProcessGroups, Sequence[Any], str], None]
    ) -> None:
        self._tell, self._wait_for = tell, wait_for

    def _wait(self, works: Sequence[Any], what: str) -> None:
        if works:
            self._wait_for(self._groups, works, what)

    # -- copying -----------------------------------------------------------------------------------

    def forward_begins(self, iteration: int, trains: bool) -> None:
        due_in = iteration if trains else iteration + self._has_trained
        self._has_trained |= trains
        if self._buffers_are_due and self._options.includes(due_in):
            self._buffers[due_in] = [buffer.detach().clone() for _, buffer in self._job.buffers]

    def forward_ended(self, sums: bool) -> None:
        self._buffers_are_due = sums

    def forward_was_not_seen(self, iteration: int) -> None:
        if self._options.includes(iteration) and self._job.buffers:
            self._raise(
                f"verification: rank {self._global_rank}, iteration {iteration}: the backward pass followed no forward pass "
                "that gradlane saw, so that rank 0's buffers were not sent before it, as DDP would: call the model itself, "
                "model(inputs)"
            )

    def begin(self, iteration: int, crosses: bool) -> None:
        is_checked = crosses and self._to_check > 0
        self._to_check -= is_checked
        self._has_trained = False
        self._iteration, self.verifies = iteration, is_checked or self._options.includes(iteration)
        for values in (self._parts, self._totals, self._touched, self._last_updates, self._steps, self._norms):
            values.clear()
        self._returned = 0

    def excuse(self) -> None:
        self._to_check = 0

    def contributes(self, param: torch.nn.Parameter, part: torch.Tensor) -> None:
        if self.verifies:
            half = self._halves.get(id(param))
            self._parts[id(param)] = part.clone() if half is None else part.to(half).to(torch.float32)

    def touched(self, param: torch.nn.Parameter) -> None:
        if self.verifies:
            self._touched[id(param)] = source_line()

    def arrived(self, param: torch.nn.Parameter, total: torch.Tensor) -> None:
        if self.verifies and id(param) not in self._totals:
            self._totals[id(param)] = total.detach().clone()

    def stepping(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        if not self.verifies:
            return
        if not self._has_reference(optimizer):
            self._not_compared.setdefault(type(optimizer).__name__)
            return
        updates = []
        states = guarded_states.attributes_of(optimizer)["state"]
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if owed(param):
                gradient = None
            elif param.grad is None or isinstance(param.grad, PendingGradient):
                continue  # it is not updated, or by another session
            else:
                gradient = param.grad.detach().clone()
            copied = torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            updates.append(_Update(param, copied, _copies(states.get(param, {})), gradient))
        self._steps.append((DeferredStep(optimizer), updates))
        self._last_updates.update((id(update.param), update) for update in updates)

    def _has_reference(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step is compared with one on copies.

        A step that is not torch's may change what no copy has, as a random generator or a counter of its class, and would
        change it twice. It runs once, behind the barrier, with the sums that are compared, unless the script vouches for it.
        """
        is_known = why_it_needs_the_barrier(optimizer) is None and not is_replaced(optimizer)
        return is_known or guarded_states.own_class(optimizer) in self._vouched

    def told_norm(self, param: torch.nn.Parameter, order: float, norm: torch.Tensor, operations: Sequence[InPlace]) -> None:
        if self.verifies:
            self._norms.append((param, order, norm.clone(), tuple(operations)))

    def changes(self, param: torch.nn.Parameter, operations: Sequence[InPlace]) -> None:
        update = self._last_updates.get(id(param))
        if update is not None:
            update.operations = tuple(operations)

    def updated(self, params: Iterable[torch.nn.Parameter]) -> None:
        for param in params:
            update = self._last_updates.pop(id(param), None)
            if update is not None:
                update.after = param.detach().clone()
                step = next(step for step, updates in reversed(self._steps) if any(each is update for each in updates))
                update.state_after = _copies(guarded_states.attributes_of(step.optimizer)["state"].get(param, {}))

    def all_updated(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        if self.verifies:
            self._returned = len(self._steps)
            self.updated(param for group in optimizer.param_groups for param in group["params"] if not owed(param))

    def drop_what_has_raised(self) -> None:
        # the reference would raise, too; and what is kept of it would count as the script's aliases
        while len(self._steps) > self._returned:
            for update in self._steps.pop()[1]:
                self._last_updates.pop(id(update.param), None)

    # -- comparing ---------------------------------------------------------------------------------

    def compare(self) -> None:
        if not self.verifies:
            return
        self.verifies = False
        self.drop_what_has_raised()
        self._compare_buffers()
        self._compare_sums()
        self._compare_norms()
        for step, updates in self._steps:
            self._compare_step(step, updates)
        self.verified.steps += 1

    def _compare_buffers(self) -> None:
        mine = self._buffers.get(self._iteration)
        self._buffers = {due_in: buffers for due_in, buffers in self._buffers.items() if due_in > self._iteration}
        if mine is None:
            return
        references = [buffer.clone() for buffer in mine]
        works = [broadcast_from(0, each, self._groups[0], async_op=True) for each in references]
        self._wait(works, "the buffers of verification")
        for (name, _), reference, buffer in zip(self._job.buffers, references, mine, strict=True):
            if not same_bits(reference, buffer):
                self._raise(
                    f"verification: rank {self._global_rank}, iteration {self._iteration}: the buffer {name} was not rank 0's "
                    "when the forward pass began, as it would be under DDP; report this with the training loop"
                )

    def _compare_sums(self) -> None:
        sums, self._parts = self._parts, {}
        magnitudes = {key: sums[key].abs() for key in self._halves} if self._world > 2 else {}
        parts = [*(sums[id(param)] for param in self._params), *magnitudes.values()]
        self._wait([dist.all_reduce(part, group=self._groups[0], async_op=True) for part in parts], "the sums of verification")
        for param in self._params:
            reference, total, half = sums[id(param)], self._totals[id(param)], self._halves.get(id(param))
            if half is not None:
                is_right = is_sum_of_halves(reference, total, half, magnitudes.get(id(param)), self._world)
            elif self._world <= 2:
                is_right = same_bits(reference, total)
            else:
                allowed = _ROUNDING * float(reference.abs().max()) if reference.numel() else 0.0
                is_right = torch.allclose(reference, total, rtol=0, atol=allowed, equal_nan=True)
            if not is_right:
                self._fail(param, "the sum of its gradient", reference, total)
            self.verified.tensors.add(id(param))

    def _compare_step(self, step: DeferredStep, updates: list[_Update]) -> None:
        for update in updates:
            update.copy.grad = self._changed(update) if update.gradient is None else update.gradient
        if updates:
            began = f"verification: rank {self._global_rank}, iteration {self._iteration}: step() of "
            began += type(step.optimizer).__name__
            try:
                left = step.update_copies([(update.param, update.copy, update.state) for update in updates])
            except Exception as error:  # of any kind: the script's own code has raised it
                if not self._vouched or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                    raise
                first = str(error).partition("\n")[0]
                self._raise(f"{began} raised {type(error).__name__} for copies of its parameters ({first:.100}){self._advice}")
            if left is not None:
                self._raise(f"{began} left another {left} than with all gradients at once{self._advice}")
        for update in updates:
            if id(update.param) not in self._names:
                continue  # no session's
            if update.after is None:
                self._fail(update.param, "its value after the update", update.copy, None)
            if not same_bits(update.copy, update.after):
                self._fail(update.param, "its value after the update", update.copy, update.after)
            for key, value in update.state.items():
                mine = update.state_after.get(key)
                if isinstance(value, torch.Tensor) and (not isinstance(mine, torch.Tensor) or not same_bits(value, mine)):
                    self._fail(update.param, f"the optimizer's {key} of it", value, mine)
            self.verified.updates += 1
            self.verified.deferred += update.gradient is None

    def _changed(self, update: _Update) -> torch.Tensor:
        """The gradient that a deferred update takes: the sum, as the script has changed it."""
        return _after(update.operations, self._totals[id(update.param)])

    def _compare_norms(self) -> None:
        for param, order, told, operations in self._norms:
            gradient = _after(operations, self._totals[id(param)])
            (norm,) = torch._foreach_norm([gradient], order)  # with the kernel of `both_norms`
            if not same_bits(norm, told):
                self._fail(param, "the norm of its gradient", norm, told)

    def summary(self, steps: int) -> str | None:
        verified = self.verified
        if not verified.steps:
            return None
        reference = "DDP"
        if self._halves:
            dtype = str(next(iter(self._halves.values()))).removeprefix("torch.")
            reference = f"DDP that compresses to {dtype}"
        how = " bit for bit" if self._world <= 2 else " (sums within rounding)"
        compared = f"verified {verified.steps} of {steps} steps, {len(verified.tensors)} tensors"
        if not verified.updates:  # of a closure, or an optimizer that gradlane does not know
            return f"{compared}: sums equal to those of {reference}{how}; no update was compared"
        others = f"; updates of {', '.join(self._not_compared)} were not compared" if self._not_compared else ""
        return f"{compared}, {verified.deferred:,} of {verified.updates:,} updates deferred: equal to {reference}{how}{others}"

    # -- failing -----------------------------------------------------------------------------------

    def _fail(self, param: torch.nn.Parameter, what: str, reference: torch.Tensor, mine: torch.Tensor | None) -> NoReturn:
        name = self._names.get(id(param), "a parameter")
        by = "is missing"
        if mine is not None:
            off = (reference.detach().double() - mine.detach().double()).abs()
            by = f"differs from DDP's in {int((off != 0).sum())} of {off.numel()} elements, by {float(off.max()):.3g} at most"
        touched = self._touched.get(id(param))
        self._raise(
            f"verification: rank {self._global_rank}, iteration {self._iteration}: {name}: {what} {by}"
            + (f"; last used by {touched}" if touched else "")
            + self._advice
        )

    @property
    def _advice(self) -> str:
        if not self._vouched:
            return "; train with DDP, or pass cross_barrier=False to gradlane.attach, and report this with the training loop"
        return (
            "; cross_barrier=True is for optimizers that update each parameter from its own gradient alone: leave it out for "
            f"{', '.join(each.__name__ for each in self._vouched)}"
        )

    def _raise(self, text: str) -> NoReturn:
        error = VerificationError(text)
        self._tell(error)
        raise error

    def interrupt(self) -> None:
        if not is_by_host(self._groups[0], self._device):
            self._groups.abort()

    def close(self) -> None:
        self._groups.close()


def _after(operations: Sequence[InPlace], gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as the script's operations change it, in memory of its own if there are any."""
    if operations:
        gradient = gradient.clone()
        for operation in operations:
            operation(gradient)
    return gradient


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    """Copies of all that an update may change, a queue of gradients as well."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value) for key, value in state.items()
    }
