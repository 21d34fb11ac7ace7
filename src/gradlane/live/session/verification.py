"""Verification: compares a session's steps with an independent computation of DDP's steps.

In a verified iteration each rank copies its part of each sum. When the backward pass has ended, the
ranks all-reduce these copies in a process group of their own, which gives the sums as DDP computes
them: bit for bit at two ranks, within rounding at more, since a sum of three numbers depends on
their order. Parts that travel as halves are added in float32 here, and rounding permits more.

At `optimizer.step()`, parameters, optimizer state and hyper-parameters are copied. When the session
has updated a parameter, at `step()` or later, the script's own optimizer makes the same update on
the copy, and the results are compared bit for bit. Buffers are compared with rank 0's at the start
of the forward pass.

Verification cannot see that something outside of Python read a value too early. If a gradient came
of it, `session.py` finds that out, in every iteration. Everything here runs on the training thread.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import gradlane
from gradlane.core.fields import need
from gradlane.errors import VerificationError
from gradlane.live.backends.process_groups import NewGroups, ProcessGroups, is_by_host
from gradlane.live.session import guards
from gradlane.live.session.deferred_step import DeferredStep
from gradlane.live.session.job import Job
from gradlane.live.torch_versions import broadcast_from

_ROUNDING = 1e-5  # error that is allowed beyond two ranks, as part of a sum's largest element
_NOT_THE_SCRIPT = (str(Path(gradlane.__file__).parent), str(Path(torch.__file__).parent))


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
        need(self.first >= 0, "first", self.first, "iterations, 0 or more")
        need(self.every >= 0, "every", self.every, "iterations, 0 or more")

    def includes(self, iteration: int) -> bool:
        """Whether `iteration` is verified."""
        return iteration < self.first or (self.every > 0 and iteration % self.every == 0)


@dataclass
class _Before:
    """A parameter before `step()`: its value, optimizer state, and gradient if that was there."""

    copy: torch.nn.Parameter
    state: dict[str, Any]
    gradient: torch.Tensor | None


class Unverified:
    """What a session reports about its steps. Here nothing is compared; `Verifier` does that.

    In all methods, `owed` tells whether the update of a parameter is deferred.
    """

    compares = False
    """Whether any iteration is compared."""
    verifies = False
    """Whether this iteration is compared, so that its gradients have to be reported."""
    steps = verified = 0
    """How many steps, and updates of single parameters, have been compared and were as under DDP."""

    def connect(
        self, tell: Callable[[BaseException], None], wait_for: Callable[[ProcessGroups, Sequence[Any], str], None]
    ) -> None:
        """Set the callbacks.

        Args:
            tell: called with an error before it is raised.
            wait_for: waits for collectives of a group; the text says what they are.
        """

    def forward_begins(self, iteration: int) -> None:
        """The forward pass of `iteration` begins, with the buffers as they are now (collective).

        Raises:
            VerificationError: a buffer is not as under DDP.
        """

    def begin(self, iteration: int) -> None:
        """A backward pass begins; all updates of the iteration before have run."""

    def contributes(self, param: torch.nn.Parameter, part: torch.Tensor) -> None:
        """This rank's part of a sum, divided by the number of ranks, is about to be sent."""

    def backward_ended(self) -> None:
        """The backward pass has ended, and `contributes` was called for all parts (collective)."""

    def touched(self, param: torch.nn.Parameter) -> None:
        """The script uses a parameter or its gradient; an error will name that line of it."""

    def arrived(self, param: torch.nn.Parameter, total: torch.Tensor) -> None:
        """The session has the sum `total`, which the script has not seen yet.

        Raises:
            VerificationError: the sum is not as under DDP.
        """

    def stepping(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        """`optimizer` is about to update all parameters that are not `owed`."""

    def updated(self, params: Iterable[torch.nn.Parameter], gradient_of: Callable[[torch.nn.Parameter], Any]) -> None:
        """The session has updated `params`.

        Args:
            params: the parameters.
            gradient_of: gives the gradient of a parameter whose update was deferred.

        Raises:
            VerificationError: a parameter or its optimizer state is not as under DDP.
        """

    def all_updated(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        """`step()` has updated all parameters that are not `owed`.

        Raises:
            VerificationError: as `updated`.
        """

    def close(self) -> None:
        """Close the process group."""

    def interrupt(self) -> None:
        """The job has failed: end collectives that are stuck on a device."""


class Verifier(Unverified):
    """Compares the steps of one session with DDP's.

    Everything is kept by parameter rather than by tensor of a plan, since the plan may change.

    Args:
        options: which iterations are verified.
        job: the model and optimizers on this rank.
        new_groups: makes process groups over the job's ranks.
    """

    compares = True

    def __init__(self, options: VerifyOptions, job: Job, new_groups: NewGroups) -> None:
        self._options = options
        self._params = [param for _, param in job.params]
        self._job = job
        self._names = {id(param): name for name, param in job.params}
        on_wire = {id(param): job.dtype_on_wire(param) for param in self._params}
        # of those that travel as halves, by id of parameter
        self._halves = {key: dtype for key, dtype in on_wire.items() if dtype in (torch.bfloat16, torch.float16)}
        self._groups = ProcessGroups(new_groups, job.timeout_s)
        self._groups.open()
        self._device = job.device
        self._rank, self._global_rank, self._world = job.rank, job.global_rank, job.world
        self._tell: Callable[[BaseException], None] = lambda error: None
        self._wait_for: Callable[[ProcessGroups, Sequence[Any], str], None] = lambda groups, works, what: None
        self._iteration = -1
        self.verifies = False
        # all of these by id of parameter
        self._parts: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._magnitudes: dict[int, torch.Tensor] = {}  # sums of absolute values, where rounding depends on them
        self._touched: dict[int, str] = {}
        self._steps: dict[int, tuple[DeferredStep, _Before]] = {}

    def connect(
        self, tell: Callable[[BaseException], None], wait_for: Callable[[ProcessGroups, Sequence[Any], str], None]
    ) -> None:
        self._tell, self._wait_for = tell, wait_for

    def _wait(self, works: Sequence[Any], what: str) -> None:
        if works:
            self._wait_for(self._groups, works, what)

    # -- one iteration -----------------------------------------------------------------------------

    def begin(self, iteration: int) -> None:
        """A backward pass begins; all updates of the iteration before have run."""
        self.steps += self.verifies
        self._iteration, self.verifies = iteration, self._options.includes(iteration)
        self._parts.clear()
        self._sums.clear()
        self._magnitudes.clear()
        self._touched.clear()
        self._steps.clear()

    def contributes(self, param: torch.nn.Parameter, part: torch.Tensor) -> None:
        if self.verifies:
            half = self._halves.get(id(param))
            self._parts[id(param)] = part.clone() if half is None else part.to(half).to(torch.float32)

    def backward_ended(self) -> None:
        if not self.verifies:
            return
        self._sums, self._parts = self._parts, {}
        if self._world > 2:
            self._magnitudes = {key: self._sums[key].abs() for key in self._halves}
        parts = [*(self._sums[id(param)] for param in self._params), *self._magnitudes.values()]
        self._wait([dist.all_reduce(part, group=self._groups[0], async_op=True) for part in parts], "the sums of verification")

    def touched(self, param: torch.nn.Parameter) -> None:
        if self.verifies:
            self._touched[id(param)] = _line_of_the_script()

    def arrived(self, param: torch.nn.Parameter, total: torch.Tensor) -> None:
        reference = self._sums.pop(id(param), None)
        if reference is None:
            return
        half = self._halves.get(id(param))
        if half is not None:
            magnitude = self._magnitudes.get(id(param))
            is_right = _is_sum_of_halves(reference, total, half, magnitude, self._world)
        elif self._world == 2:
            is_right = _same_bits(reference, total)
        else:
            is_right = torch.allclose(reference, total, rtol=0, atol=_ROUNDING * float(reference.abs().max()), equal_nan=True)
        if not is_right:
            self._fail(param, "the sum of its gradient", reference, total)

    # -- the step ----------------------------------------------------------------------------------

    def stepping(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        if not self.verifies:
            return
        step = DeferredStep(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._names or (param.grad is None and not owed(param)):
                    continue  # of no session, or of another one
                copied = torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
                state = {key: _copied(value) for key, value in optimizer.state.get(param, {}).items()}
                gradient = None if owed(param) else param.grad.detach().clone()
                self._steps[id(param)] = step, _Before(copied, state, gradient)

    def updated(self, params: Iterable[torch.nn.Parameter], gradient_of: Callable[[torch.nn.Parameter], Any]) -> None:
        together: dict[int, tuple[DeferredStep, list[tuple[torch.nn.Parameter, _Before]]]] = {}
        for param in params:
            found = self._steps.pop(id(param), None)
            if found is not None:
                step, before = found
                before.copy.grad = gradient_of(param).clone() if before.gradient is None else before.gradient
                together.setdefault(id(step), (step, []))[1].append((param, before))
        for step, befores in together.values():
            step.update_copies([(param, before.copy, before.state) for param, before in befores])
            for param, before in befores:
                self._compare(step.optimizer, param, before)

    def all_updated(self, optimizer: torch.optim.Optimizer, owed: Callable[[torch.nn.Parameter], bool]) -> None:
        if self.verifies:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self.updated([param for param in params if not owed(param)], lambda param: None)

    def _compare(self, optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, before: _Before) -> None:
        if not _same_bits(before.copy, param):
            self._fail(param, "its value after the update", before.copy, param)
        state = guards.attributes_of(optimizer)["state"].get(param, {})
        for key, value in before.state.items():
            mine = state.get(key)
            if isinstance(value, torch.Tensor) and (not isinstance(mine, torch.Tensor) or not _same_bits(value, mine)):
                self._fail(param, f"the optimizer's {key} of it", value, mine)
        self.verified += 1

    # -- buffers -----------------------------------------------------------------------------------

    def forward_begins(self, iteration: int) -> None:
        if not self._options.includes(iteration):
            return
        buffers = [buffer for _, buffer in self._job.buffers]
        references = [buffer.detach().clone() for buffer in buffers]
        works = [broadcast_from(0, each, self._groups[0], async_op=True) for each in references]
        self._wait(works, "the buffers of verification")
        for index, (reference, buffer) in enumerate(zip(references, buffers, strict=True)):
            if not _same_bits(reference, buffer):
                self._raise(
                    f"verification: rank {self._global_rank}, iteration {iteration}: buffer {index} of the model is not "
                    "rank 0's, as it would be under DDP; report this with the training loop"
                )

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
            + "; train with DDP, or pass cross_barrier=False to gradlane.attach, and report this with the training loop"
        )

    def _raise(self, text: str) -> NoReturn:
        error = VerificationError(text)
        self._tell(error)
        raise error

    def interrupt(self) -> None:
        if not is_by_host(self._groups[0], self._device):
            self._groups.abort()

    def close(self) -> None:
        self.steps += self.verifies
        self.verifies = False
        self._groups.close()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    mine, theirs = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(mine, theirs)


def _is_sum_of_halves(
    exact: torch.Tensor, total: torch.Tensor, half: torch.dtype, magnitude: torch.Tensor | None, world: int
) -> bool:
    """Whether `total` is a sum of halves, up to the rounding that adding them in any order permits.

    Args:
        exact: their sum in float32.
        total: the sum that arrived.
        half: their dtype.
        magnitude: the sum of their absolute values; None at two ranks, where there is one addition
            and so one result.
        world: number of ranks, each of which has added one.
    """
    total = total.to(exact.dtype)
    if magnitude is None:
        return torch.allclose(exact.to(half).to(exact.dtype), total, rtol=0, atol=0, equal_nan=True)
    limits = torch.finfo(half)
    # no partial sum is larger than `magnitude`, and each addition rounds by half of `eps` of it at most
    slack = world * limits.eps * (magnitude + limits.smallest_normal)
    low, high = ((exact + bound).to(half).to(exact.dtype) for bound in (-slack, slack))
    may_overflow = ~(magnitude + slack <= limits.max)  # NaN too
    return bool(((low <= total) & (total <= high) | may_overflow & ~total.isfinite()).all())


def _line_of_the_script() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_SCRIPT):
            return f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})"
    return "torch"
