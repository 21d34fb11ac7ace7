"""Gradients: what stands in `.grad` of a session's parameters, as the script sees it.

Each tensor's gradient is summed in a slot, which is memory that the session uses again in every
iteration. The script never gets that memory: `.grad` is a `PendingGradient`, which hands out
copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gradlane.live.comm.driver import Driver
from gradlane.live.session import aliases
from gradlane.live.session.guards import PendingGradient


class Gradients:
    """The gradients of one session. Used on the training thread only.

    Args:
        driver: the session's; has the slots.
        on_read: called with a tensor before anything operates on a gradient that stands for its
            sum.
        scale: factor for each gradient before it is summed.

    Attributes:
        wrappers: by tensor: the `PendingGradient` that stands for its sum.
        of_the_script: tensors of this backward pass whose gradients are in memory that the script
            holds too, with those gradients.
    """

    def __init__(self, driver: Driver, on_read: Callable[[int], None], scale: float) -> None:
        self._driver, self._on_read = driver, on_read
        self.scale_by(scale)
        self._params: Sequence[torch.nn.Parameter] = []
        self.wrappers: list[PendingGradient] = []
        self.of_the_script: list[tuple[int, Any]] = []
        self._lent: list[int] = []  # tensors whose slots are seen during a step or a compiled forward pass

    def scale_by(self, scale: float) -> None:
        """Multiply each gradient by `scale` from now on, before it is summed."""
        self._scale = scale
        self._factors = {dtype: torch.tensor(scale, dtype=dtype) for dtype in (torch.float32, torch.float64)}

    def take_up(self, params: Sequence[torch.nn.Parameter], groups: Sequence[Sequence[int]]) -> None:
        """Switch to a plan with another order of tensors, which the driver has already taken up.

        Args:
            params: in the order of the plan's tensors.
            groups: of tensors that are neighbours in the plan and of one dtype.
        """
        before = {id(param): wrapper for param, wrapper in zip(self._params, self.wrappers, strict=True)}
        self._params = params
        self.wrappers = [self._wrapper_of(tensor, before.get(id(param))) for tensor, param in enumerate(params)]
        # by the first tensor of a group: the slots, one by one and as one tensor
        self._of_group = {
            group[0]: ([self._driver.slots[tensor] for tensor in group], self._driver.range_of(group))
            for group in groups
            if len(group) > 1
        }

    def _wrapper_of(self, tensor: int, before: PendingGradient | None) -> PendingGradient:
        """The wrapper for `tensor`, given the one of the last plan, if there was one."""
        slot, param = self._driver.slots[tensor], self._params[tensor]
        if before is not None and before.slot is slot:
            return before
        if before is not None and param.grad is before:  # the next backward pass may add to it
            slot.copy_(before.slot)
            before.moved(slot, tensor)
            return before
        if before is not None:
            # the session no longer uses that memory; the script may still read it
            before.given_away(before.slot)
        return PendingGradient(slot, tensor, self._on_read, self._give_away)

    # -- from autograd to the slot -----------------------------------------------------------------

    def begin(self) -> None:
        """Let the next backward pass add to the sums that are still in `.grad`, in their slots."""
        for param, wrapper in zip(self._params, self.wrappers, strict=True):
            gradient = param.grad
            if gradient is None:
                continue
            if gradient is wrapper:
                param.grad = wrapper.slot
            elif isinstance(gradient, PendingGradient):  # another parameter's
                param.grad = gradient.own()

    def put(self, tensors: Sequence[int]) -> None:
        """Put the gradients that autograd left in `.grad`, times the scale, into their slots.

        From then on `.grad` stands for the sum. Where the script also holds the gradient's memory,
        it stays in `.grad`, and the sum has to be copied there, see `of_the_script`.

        Args:
            tensors: one, or a whole group.

        Raises:
            RuntimeError: torch refuses, since a parameter now has another dtype, shape or device.
        """
        if len(tensors) > 1 and self._put_together(tensors):
            return
        for tensor in tensors:
            if self._put_alone(tensor):
                self.show(tensor)
            else:
                self.of_the_script.append((tensor, self._params[tensor].grad))

    def _put_together(self, tensors: Sequence[int]) -> bool:
        """Put a whole group, if autograd has just made all its gradients, for nobody else.

        It costs 0.6 us a gradient of 4 KB to copy them and to multiply all at once, and 1.3 us to
        multiply each into its slot.

        Returns:
            Whether it was done.
        """
        params, wrappers = self._params, self.wrappers
        gradients = []
        for tensor in tensors:
            gradient = params[tensor].grad
            if gradient is None or gradient._version or aliases.is_held(wrappers, tensor):
                return False
            gradients.append(gradient)
        slots, whole = self._of_group[tensors[0]]
        with torch.no_grad():  # gradients of `backward(create_graph=True)` have a graph themselves
            torch._foreach_copy_(slots, gradients)
            whole.mul_(self._factors.get(whole.dtype, self._scale))
        for tensor in tensors:
            params[tensor].grad = wrappers[tensor]
        return True

    def _put_alone(self, tensor: int) -> bool:
        """Put one gradient.

        Returns:
            Whether `.grad` may stand for the sum from now on: nobody else holds its memory.
        """
        param, slot = self._params[tensor], self._driver.slots[tensor]
        gradient = param.grad
        assert gradient is not None
        if gradient is slot:
            slot.mul_(self._scale)
            return True
        if aliases.is_held(self.wrappers, tensor):  # the script has kept an earlier step's gradient
            self.give(tensor)
        # a scalar that is a tensor already saves torch the making of one: 1.2 of 2.0 us for 4 KB
        factor = self._factors.get(slot.dtype, self._scale) if gradient.dtype is slot.dtype else self._scale
        torch.mul(gradient.detach() if gradient.requires_grad else gradient, factor, out=slot)
        # if nothing was added to it, and no hook has seen it, autograd has made it for nobody else
        is_new = gradient._version == 0 and len(param._post_accumulate_grad_hooks) == 1
        del gradient  # so that this reference is not counted
        return is_new or not aliases.is_the_scripts(param)

    def put_absent(self, tensor: int, counts: bool) -> None:
        """Fill the slot of a tensor that got no gradient in this pass.

        Args:
            tensor: whose `.grad` goes into the slot; zeros if it is None.
            counts: whether this rank has used the tensor since the last sum nevertheless.
        """
        param = self._params[tensor]
        gradient = param.grad
        if gradient is self._driver.slots[tensor] or aliases.is_held(self.wrappers, tensor):
            self.give(tensor)
            gradient = param.grad
        self._driver.put_absent(tensor, gradient, self._scale, counts)

    # -- from the slot to the script ---------------------------------------------------------------

    def show(self, tensor: int) -> None:
        """Let `.grad` stand for the sum from now on.

        Raises:
            RuntimeError: torch refuses, since the parameter now has another dtype, shape or device.
        """
        self._params[tensor].grad = self.wrappers[tensor]

    def show_absent(self, tensor: int) -> None:
        """Show a sum that has arrived and to which only other ranks contributed."""
        gradient = self._params[tensor].grad
        if gradient is None:
            self.show(tensor)
        else:
            with torch.no_grad():
                gradient.copy_(self._driver.slots[tensor])

    def that_stand_for_sums(self, tensors: Iterable[int]) -> list[int]:
        """Those of `tensors` whose `.grad` the script has neither replaced nor dropped."""
        params, wrappers = self._params, self.wrappers
        return [tensor for tensor in tensors if params[tensor].grad is wrappers[tensor]]

    def lend(self, tensors: Sequence[int]) -> None:
        """Show the slots themselves, whose sums have arrived, to code that keeps no reference to them: the optimizer that
        steps now, or a compiled forward pass.
        """
        params, slots = self._params, self._driver.slots
        for tensor in tensors:
            params[tensor].grad = slots[tensor]
        self._lent += tensors

    def take_back(self) -> None:
        """Undo `lend` for all tensors: the step or the forward pass is over."""
        params, slots, wrappers = self._params, self._driver.slots, self.wrappers
        for tensor in self._lent:
            param = params[tensor]
            if param.grad is slots[tensor]:
                param.grad = wrappers[tensor]
        self._lent.clear()

    # -- given to the script -----------------------------------------------------------------------

    def give(self, tensor: int) -> None:
        """Make the gradient an ordinary tensor of the script's own, with what is in the slot."""
        self._give_away(self.wrappers[tensor])

    def give_all(self) -> None:
        """Make every gradient an ordinary tensor, which the session will not touch."""
        for tensor in self.that_stand_for_sums(range(len(self._params))):
            self.give(tensor)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let there be no gradients meanwhile; afterwards they are the script's own again."""
        self.give_all()
        own = [(param, param.grad) for param in self._params]
        for param, _ in own:
            param.grad = None
        yield
        for param, gradient in own:
            param.grad = gradient

    def _give_away(self, wrapper: PendingGradient, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Make `wrapper` stand for memory of the script's own, and return that memory.

        Args:
            wrapper: one of `wrappers`; a new one takes its place there.
            memory: what it stands for; None for a copy of the slot.
        """
        tensor = wrapper.tensor
        param, slot = self._params[tensor], self._driver.slots[tensor]
        memory = slot.clone() if memory is None else memory
        wrapper.given_away(memory)
        self.wrappers[tensor] = PendingGradient(slot, tensor, self._on_read, self._give_away)
        if param.grad is wrapper or param.grad is slot:
            param.grad = memory
        return memory

    def close(self, failed: bool) -> None:
        """Make every gradient an ordinary tensor.

        Args:
            failed: the job has failed. `.grad` becomes None then, where it would stand for a sum:
                the slot holds this rank's part at best.
        """
        for param, wrapper in zip(self._params, self.wrappers, strict=True):
            if param.grad is wrapper:
                param.grad = None if failed else wrapper.slot
            wrapper.given_away(wrapper.slot)
