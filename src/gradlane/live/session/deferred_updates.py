"""Owed: the updates that `optimizer.step()` could not make, since their sums had not arrived; each is made when its
parameter is first used, together with all others that have arrived by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.live.session import guards, torch_patches
from gradlane.live.session.deferred_step import DeferredStep, as_at_step
from gradlane.live.session.verification import Unverified


class DeferredUpdates:
    """Owned by one session; used on the training thread only. `tensor in owed`: whether its update is."""

    def __init__(self, driver: Driver, recorder: Recorder, verifier: Unverified) -> None:
        self._driver, self._recorder, self._verifier = driver, recorder, verifier
        self._steps: dict[int, DeferredStep] = {}  # tensor -> the call of step() that owes its update
        self._hidden: list[int] = []

    def take_up(self, params: Sequence[torch.nn.Parameter], show: Callable[[int], None]) -> None:
        """Another plan, with another order of tensors; nothing may be owed."""
        assert not self._steps, "updates are owed"
        self._params, self._show = params, show

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._steps

    def of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether updates of `optimizer` are owed."""
        return any(step.optimizer is optimizer for step in self._steps.values())

    def hide(self, tensor: int, step: DeferredStep) -> None:
        """`step`, which is about to run, must not see this gradient: its update is owed from now on."""
        self._steps[tensor] = step
        step.owes += 1
        self._hidden.append(tensor)
        self._params[tensor].grad = None

    def show_hidden(self, on_use: Callable[[int], None], on_state: Callable[[], None]) -> None:
        """`step` has run: what was hidden from it is back.

        on_use: hears of the first use of its parameter. on_state: hears that somebody gets at the optimizer's state.
        """
        for tensor in self._hidden:
            param = self._params[tensor]
            self._show(tensor)
            guards.watch(param, tensor, on_use)
        if self._hidden:
            guards.watch_state(self._steps[self._hidden[0]].optimizer, on_state)
            torch_patches.before_leaving(self, on_state)
        self._hidden.clear()

    def make_current(self, tensor: int) -> None:
        """Wait for the sum of `tensor`; if its update is owed, run it, with all others that have arrived."""
        self._driver.wait_for(tensor)
        if tensor not in self._steps:
            return
        batches: dict[int, tuple[DeferredStep, list[int]]] = {}
        for other, step in self._steps.items():
            if other == tensor or self._driver.has_arrived(other):
                batches.setdefault(id(step), (step, []))[1].append(other)
        for step, tensors in batches.values():
            self._update(step, tensors)
            if not step.owes:
                guards.unwatch_state(step.optimizer)
                step.ended()
        if not self._steps:
            torch_patches.nothing_is_owed(self)

    def make_all_current(self) -> None:
        while self._steps:
            self.make_current(next(iter(self._steps)))

    def forget(self) -> None:
        """The job has failed: what is owed will never be made, and the script has its optimizers to itself."""
        for step in self._steps.values():
            guards.unwatch_state(step.optimizer)
        self._steps.clear()
        torch_patches.nothing_is_owed(self)

    def _update(self, step: DeferredStep, tensors: list[int]) -> None:
        began = now_ns()
        before: list[torch.Tensor | None] = []
        step.owes -= len(tensors)
        for tensor in tensors:
            del self._steps[tensor]
            param = self._params[tensor]
            guards.unwatch(param)
            self._driver.wait_for(tensor)  # on a device: the stream waits
            before.append(param.grad)
            param.grad = self._driver.slots[tensor]
            self._verifier.arrived(param, self._driver.slots[tensor])
        with as_at_step():
            step.update(self._params[tensor] for tensor in tensors)
        self._verifier.updated([self._params[tensor] for tensor in tensors], lambda param: param.grad)
        for tensor, gradient in zip(tensors, before, strict=True):
            self._params[tensor].grad = gradient  # or what the script has put in its place since step()
        ended = now_ns()
        for tensor in tensors:
            self._recorder.add("update", self._driver.iteration, tensor, began, ended)
