"""Gradients: what stands in `.grad` of a session's parameters, as its script sees it.

Each tensor's gradient is summed in a slot that the session uses again in every iteration. The script
never gets hold of that memory: `.grad` is a `PendingGradient`, and what leaves it is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradlane.live.comm.driver import Driver
from gradlane.live.session import aliases
from gradlane.live.session.guards import PendingGradient


class Gradients:
    """Owned by one session; used on the training thread only.

    Args:
        driver: of the session; has the slots.
        on_read: called with a tensor before anybody operates on a gradient that stands for its sum.
    """

    def __init__(self, driver: Driver, on_read: Callable[[int], None]) -> None:
        self._driver, self._on_read = driver, on_read
        self._params: Sequence[torch.nn.Parameter] = []
        self.wrappers: list[PendingGradient] = []
        self.of_the_script: list[tuple[int, Any]] = []  # of this pass, in memory that the script holds too
        self._lent: list[int] = []  # tensors whose slots the optimizer sees just now

    def take_up(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Another plan, with another order of tensors; the driver has taken it up."""
        before = {id(param): wrapper for param, wrapper in zip(self._params, self.wrappers, strict=True)}
        self._params = params
        self.wrappers = [self._wrapper_of(tensor, before.get(id(param))) for tensor, param in enumerate(params)]

    def _wrapper_of(self, tensor: int, before: PendingGradient | None) -> PendingGradient:
        """What will stand in `.grad` for `tensor`; `before`: what did so under the last plan."""
        slot, param = self._driver.slots[tensor], self._params[tensor]
        if before is not None and before.slot is slot:
            return before
        if before is not None and param.grad is before:  # the script accumulates onto it
            slot.copy_(before.slot)
            before.moved(slot, tensor)
            return before
        if before is not None:
            before.given_away(before.slot)  # that memory is not used any more; a script may look at it later
        return PendingGradient(slot, tensor, self._on_read, self._give_away)

    # -- leaving -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """The backward pass that begins adds to the sums that are still in `.grad`: in their slots, in place."""
        for param, wrapper in zip(self._params, self.wrappers, strict=True):
            gradient = param.grad
            if gradient is wrapper:
                param.grad = wrapper.slot
            elif isinstance(gradient, PendingGradient):  # another parameter's
                param.grad = gradient.own()

    def put(self, tensor: int, scale: float) -> bool:
        """Put the gradient that autograd left, times `scale`, into its slot.

        Returns:
            Whether `.grad` may stand for the sum from now on; otherwise the script holds the memory of it too, and the sum
            has to be copied there.
        """
        param, slot = self._params[tensor], self._driver.slots[tensor]
        gradient = param.grad
        assert gradient is not None
        if gradient is slot:
            slot.mul_(scale)
            return True
        if aliases.is_held(self.wrappers, tensor):  # the gradient of a step before, which the script has kept
            self.give(tensor)
        torch.mul(gradient.detach(), scale, out=slot)
        is_accumulated = gradient._version > 0  # what autograd has just made is nobody else's
        del gradient  # or it would be counted
        if is_accumulated and aliases.is_the_scripts(param):
            self.of_the_script.append((tensor, param.grad))
            return False
        return True

    def put_absent(self, tensor: int, scale: float, counts: bool) -> None:
        """This pass has no gradient: what stands in `.grad`, times `scale`, or zeros, goes into the slot.

        counts: whether this rank used the tensor since the last sum all the same.
        """
        param = self._params[tensor]
        gradient = param.grad
        if gradient is self._driver.slots[tensor] or aliases.is_held(self.wrappers, tensor):
            self.give(tensor)
            gradient = param.grad
        self._driver.put_absent(tensor, gradient, scale, counts)

    # -- coming back -------------------------------------------------------------------------------

    def show(self, tensor: int) -> None:
        """From now on `.grad` is what will be the sum. Raises torch's `RuntimeError` where the parameter is another tensor."""
        self._params[tensor].grad = self.wrappers[tensor]

    def show_absent(self, tensor: int) -> None:
        """The sum has arrived, to which another rank alone contributed."""
        gradient = self._params[tensor].grad
        if gradient is None:
            self.show(tensor)
        else:
            with torch.no_grad():
                gradient.copy_(self._driver.slots[tensor])

    def stands_for_the_sum(self, tensor: int) -> bool:
        """Whether `.grad` is ours still: the script has neither replaced nor dropped it."""
        return self._params[tensor].grad is self.wrappers[tensor]

    def lend(self, tensor: int) -> None:
        """The optimizer that steps now sees the slot itself, and keeps no reference to it."""
        self._params[tensor].grad = self._driver.slots[tensor]
        self._lent.append(tensor)

    def take_back(self) -> None:
        """The optimizer has stepped."""
        for tensor in self._lent:
            if self._params[tensor].grad is self._driver.slots[tensor]:
                self.show(tensor)
        self._lent.clear()

    # -- given to the script -----------------------------------------------------------------------

    def give(self, tensor: int) -> None:
        """The gradient becomes an ordinary tensor of the script's own, with what is in the slot."""
        self._give_away(self.wrappers[tensor])

    def give_all(self) -> None:
        """Every gradient becomes an ordinary tensor, which the session will not touch."""
        for tensor in range(len(self._params)):
            if self.stands_for_the_sum(tensor):
                self.give(tensor)

    def _give_away(self, wrapper: PendingGradient, memory: torch.Tensor | None = None) -> torch.Tensor:
        """`wrapper` stands for memory of the script's own from now on, with what is in the slot where none is given."""
        tensor = wrapper.tensor
        param, slot = self._params[tensor], self._driver.slots[tensor]
        memory = slot.clone() if memory is None else memory
        wrapper.given_away(memory)
        self.wrappers[tensor] = PendingGradient(slot, tensor, self._on_read, self._give_away)
        if param.grad is wrapper or param.grad is slot:
            param.grad = memory
        return memory

    def close(self, failed: bool) -> None:
        """Every gradient is an ordinary tensor; where the job has `failed`, a slot holds this rank's part at best."""
        for param, wrapper in zip(self._params, self.wrappers, strict=True):
            if param.grad is wrapper:
                param.grad = None if failed else wrapper.slot
            wrapper.given_away(wrapper.slot)
