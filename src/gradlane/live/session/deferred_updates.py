"""DeferredUpdates: updates that `optimizer.step()` left out because their sums had not arrived.

Each runs when its parameter is first used, together with all others whose sums have arrived.

On a device all run on the stream on which `step()` ran, the home stream. Whatever uses parameters on
another stream was ordered by the script after `step()`, not after a later update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gradlane.live.backends.streams import Stream
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.live.session import guards, outdated, torch_patches
from gradlane.live.session.deferred_step import DeferredStep, as_at_step
from gradlane.live.session.finite import Unchecked
from gradlane.live.session.verification import Unverified

_LOST = "was updated with a sum that never came: the update was queued on the device behind it, and the job failed before"
_LACKS = "lacks its update of the last step: step() had left it until its gradients are summed, and the job failed before"


class DeferredUpdates:
    """The deferred updates of one session. Whoever uses them has the turn (`turn.py`).

    Iteration yields the tensors whose updates are deferred, and `in` tells whether a tensor's is.

    Args:
        driver: the session's; has the sums.
        recorder: gets the times of updates.
        verifier: is told of each update.
        finite: is asked before each update.
    """

    def __init__(self, driver: Driver, recorder: Recorder, verifier: Unverified, finite: Unchecked) -> None:
        self._driver, self._recorder, self._verifier, self._finite = driver, recorder, verifier, finite
        self._steps: dict[int, DeferredStep] = {}  # tensor -> the call of step() that left it out
        self._hidden: list[int] = []
        self.home: Stream | None = None
        """The stream on which the last `step()` ran; None on the CPU."""
        self.were_used_elsewhere = False
        """Whether a parameter was used first on another stream than the home stream."""

    def take_up(self, params: Sequence[torch.nn.Parameter], show: Callable[[int], None]) -> None:
        """Switch to a plan with another order of tensors. No update may be deferred.

        Args:
            params: in the order of the plan's tensors.
            show: puts what stands for a tensor's sum into `.grad`.
        """
        assert not self._steps, "updates are owed"
        self._params, self._show = params, show

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._steps

    def of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether updates of `optimizer` are deferred."""
        return any(step.optimizer is optimizer for step in self._steps.values())

    def hide(self, tensor: int, step: DeferredStep) -> None:
        """Defer the update of `tensor`: hide its gradient from `step`, which is about to run."""
        self._steps[tensor] = step
        step.owes += 1
        self._hidden.append(tensor)
        self._params[tensor].grad = None

    def show_hidden(self, on_use: Callable[[int], None], on_state: Callable[[], None]) -> None:
        """Put hidden gradients back after the step, and guard what is not up to date.

        Args:
            on_use: called with a tensor before the first use of its parameter.
            on_state: called before anything accesses the optimizer's state, or reads parameters in
                C++ by the ways that `torch_patches.py` knows.
        """
        for tensor in self._hidden:
            param = self._params[tensor]
            self._show(tensor)
            guards.watch(param, tensor, on_use)
        if self._hidden:
            guards.watch_state(self._steps[self._hidden[0]].optimizer, self, on_state)
            torch_patches.before_leaving(self, on_state)
        self._hidden.clear()

    def step_ran(self) -> None:
        """An optimizer has stepped, on the stream that is current now."""
        if self._driver.streams is not None:
            self.home = self._driver.streams.scripts()

    def note_use(self) -> None:
        """A parameter is used, for the first time in this iteration."""
        if self.home is not None and self._driver.streams is not None and self._driver.streams.scripts() != self.home:
            self.were_used_elsewhere = True

    def make_current(self, tensor: int) -> None:
        """Wait for the sum of `tensor`. If its update is deferred, run it.

        All other deferred updates whose sums have arrived run with it.
        """
        if tensor in self._steps and self.home is not None:
            assert self._driver.streams is not None
            if self._driver.streams.scripts() != self.home:
                self.were_used_elsewhere = True
                self.make_all_current_at_home()
        awaited = self._steps.get(tensor)
        self._driver.look()
        self._driver.wait_for(tensor)
        if awaited is None or self._steps.get(tensor) is not awaited:
            return  # another thread has made the update meanwhile
        batches: dict[int, tuple[DeferredStep, list[int]]] = {}
        comes = self._driver.arriving_with(tensor)
        for other, step in self._steps.items():
            if other == tensor or comes(other):
                batches.setdefault(id(step), (step, []))[1].append(other)
        for step, tensors in batches.values():
            self._update(step, tensors)
            if not step.owes:
                guards.unwatch_state(step.optimizer, self)
                step.ended()
        if not self._steps:
            torch_patches.nothing_is_owed(self)

    def make_all_current(self) -> None:
        """Wait for the sums of all deferred updates, and run them."""
        while self._steps:
            self.make_current(next(iter(self._steps)))

    def make_all_current_at_home(self) -> None:
        """Make all deferred updates on the home stream, and let the host wait for it.

        The streams on which the script uses parameters wait for `step()`, and no more can be told to them.
        """
        assert self.home is not None
        self.home.run(self.make_all_current).synchronize()

    def give_up(self, why: str, name_of: Callable[[int], str]) -> None:
        """Drop the deferred updates: their parameters and state refuse to be read from now on, and so do parameters
        whose updates were queued on a device behind sums that never came.

        Args:
            why: what became of the job.
            name_of: the name of a tensor.
        """
        for tensor, step in self._steps.items():
            param, optimizer = self._params[tensor], step.optimizer
            guards.unwatch(param)
            outdated.refuse_reads(param, f"{name_of(tensor)} {_LACKS} ({why}). {outdated.ADVICE}")
            guards.unwatch_state_for_all(optimizer)
            outdated.refuse_state(optimizer, f"the state of {type(optimizer).__name__} {_LACKS} ({why}). {outdated.ADVICE}")
        for tensor in self._driver.lost():
            if tensor not in self._steps:
                param = self._params[tensor]
                guards.unwatch(param)
                outdated.refuse_reads(param, f"{name_of(tensor)} {_LOST} ({why}). {outdated.ADVICE}")
        self._steps.clear()
        torch_patches.nothing_is_owed(self)

    def _update(self, step: DeferredStep, tensors: list[int]) -> None:
        began = now_ns()
        before: list[torch.Tensor | None] = []
        self._driver.wait_for_each(tensors)
        self._finite.updates(tensors)
        step.owes -= len(tensors)
        with guards.as_ordinary():
            if self._verifier.verifies:
                with as_at_step():
                    for tensor in tensors:
                        self._verifier.arrived(self._params[tensor], self._driver.slots[tensor])
            for tensor in tensors:
                del self._steps[tensor]
                param = self._params[tensor]
                before.append(param.grad)
                param.grad = self._driver.slots[tensor]
            with as_at_step():
                step.update(self._params[tensor] for tensor in tensors)
                if self._verifier.verifies:
                    self._verifier.updated(self._params[tensor] for tensor in tensors)
            for tensor, gradient in zip(tensors, before, strict=True):
                # what stood there before: the wrapper, or what the script has put there since step()
                self._params[tensor].grad = gradient
                guards.unwatch(self._params[tensor])  # last: other threads wait for it
        ended = now_ns()
        self._recorder.add_each("update", self._driver.iteration, tensors, began, ended)
