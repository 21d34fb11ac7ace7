"""Gradients: what stands in `.grad` of a session's parameters, as the script sees it.

Each tensor's gradient is summed in a slot, which is memory that the session uses again in every
iteration. The script never gets that memory: `.grad` is a `PendingGradient`, which hands out
copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from gradlane.live.comm.driver import Driver
from gradlane.live.session import aliases
from gradlane.live.session.gradient_reads import GradientReads
from gradlane.live.session.pending_gradient import InPlace, PendingGradient
from gradlane.live.session.tracked import Tracked


def _is_seen_by_nobody(param: torch.nn.Parameter) -> bool:
    """Whether no hook but the session's is given the gradient of `param`; one may keep a view of it."""
    hooks: Any = param
    return len(hooks._post_accumulate_grad_hooks) == 1 and not hooks._backward_hooks


def _unchanged(gradient: torch.Tensor | None) -> int | None:
    """Stands for a gradient that nothing has changed since autograd made it; None for any other."""
    return gradient._cdata if gradient is not None and gradient._version == 0 else None


class Gradients:
    """The gradients of one session. Whoever uses them has the turn (`turn.py`).

    Args:
        driver: the session's; has the slots.
        reads: hears of all that is done with a gradient that stands for a sum, before it is done; also an attribute.
        scale: factor for each gradient before it is summed.

    Attributes:
        of_the_script: parameters of this backward pass whose gradients are in memory that the script
            holds too, with those gradients.
        filled: parameters whose slots already have this backward pass's gradients, with what stands for a gradient that
            autograd has made for nobody else, or None.
    """

    def __init__(self, driver: Driver, reads: GradientReads, scale: float) -> None:
        self._driver, self.reads = driver, reads
        self.scale_by(scale)
        self._tracked: Sequence[Tracked] = ()
        self.of_the_script: list[tuple[Tracked, Any]] = []
        self.filled: dict[Tracked, int | None] = {}
        self._to_change: dict[Tracked, None] = {}  # with operations that change the sum when it is there
        self._lent: list[Tracked] = []  # whose slots are seen during a step or a compiled forward pass

    def scale_by(self, scale: float) -> None:
        """Multiply each gradient by `scale` from now on, before it is summed."""
        self._scale = scale
        self._factors = {dtype: torch.tensor(scale, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}

    def take_up(self, tracked: Sequence[Tracked], groups: Sequence[Sequence[int]]) -> None:
        """Switch to a plan with another order of tensors, which the driver has already taken up.

        Args:
            tracked: in the order of the plan's tensors.
            groups: of tensors that are neighbours in the plan and of one dtype.
        """
        self._tracked = tracked
        for each in tracked:
            self._move(each, self._driver.slots[each.tensor])
        # by the first tensor of a group: the slots, one by one and as one tensor
        self._of_group = {
            group[0]: ([self._driver.slots[tensor] for tensor in group], self._driver.range_of(group))
            for group in groups
            if len(group) > 1
        }

    def _move(self, tracked: Tracked, slot: torch.Tensor) -> None:
        """Sum the gradients of `tracked` in `slot` from now on."""
        wrapper = tracked.wrapper
        tracked.slot = slot
        if wrapper is None:
            tracked.wrapper = self._new_wrapper(tracked)
        elif wrapper.slot is slot:
            pass
        elif tracked.param.grad is wrapper:  # the next backward pass may add to it
            slot.copy_(wrapper.slot)
            wrapper.moved(slot)
        else:
            wrapper.given_away(wrapper.slot)  # the session no longer uses that memory; the script may still read it
            tracked.wrapper = self._new_wrapper(tracked)

    def _new_wrapper(self, tracked: Tracked) -> PendingGradient:
        return PendingGradient(tracked.slot, tracked, self.reads, self._give_away)

    # -- from autograd to the slot -----------------------------------------------------------------

    def begin(self) -> None:
        """Let the next backward pass add to the sums that are still in `.grad`, in their slots."""
        self.filled.clear()
        for tracked in self._tracked:
            gradient = tracked.param.grad
            if gradient is None:
                continue
            if gradient is tracked.wrapper:
                tracked.param.grad = tracked.slot
            elif isinstance(gradient, PendingGradient):  # another parameter's
                tracked.param.grad = gradient.own()

    def fill(self, tracked: Tracked, gradient: torch.Tensor) -> None:
        """Put a gradient, times the scale, into its slot; `put` will find it there, whatever becomes of `.grad` meanwhile.

        Raises:
            RuntimeError: as `put`.
        """
        self._write(tracked, gradient)
        self.filled[tracked] = _unchanged(gradient) if _is_seen_by_nobody(tracked.param) else None

    def put(self, several: Sequence[Tracked]) -> None:
        """Put the gradients that autograd left in `.grad`, times the scale, into their slots.

        From then on `.grad` stands for the sum. Where the script also holds the gradient's memory,
        it stays in `.grad`, and the sum has to be copied there, see `of_the_script`.

        Args:
            several: one parameter, or those of a whole group.

        Raises:
            RuntimeError: torch refuses, since a parameter now has another dtype, shape or device.
        """
        if len(several) > 1 and not self.filled and self._put_together(several):
            return
        for tracked in several:
            if self._put_alone(tracked):
                tracked.param.grad = tracked.wrapper
            elif not isinstance(tracked.param.grad, PendingGradient):  # else it is another parameter's, see `restore`
                self.of_the_script.append((tracked, tracked.param.grad))

    def _put_together(self, several: Sequence[Tracked]) -> bool:
        """Put a whole group, if autograd has just made all its gradients, for nobody else.

        It costs 0.6 us a gradient of 4 KB to copy them and to multiply all at once, and 1.3 us to
        multiply each into its slot.

        Returns:
            Whether it was done.
        """
        gradients = []
        for tracked in several:
            gradient = tracked.param.grad
            if gradient is None or gradient._version or aliases.is_held(tracked) or not _is_seen_by_nobody(tracked.param):
                return False
            gradients.append(gradient)
        slots, whole = self._of_group[several[0].tensor]
        with torch.no_grad():  # gradients of `backward(create_graph=True)` have a graph themselves
            torch._foreach_copy_(slots, gradients)
            whole.mul_(self._factors.get(whole.dtype, self._scale))
        for tracked in several:
            tracked.param.grad = tracked.wrapper
        return True

    def _put_alone(self, tracked: Tracked) -> bool:
        """Put one gradient.

        Returns:
            Whether `.grad` may stand for the sum from now on: nobody else holds its memory.
        """
        param = tracked.param
        if tracked in self.filled:
            made, now = self.filled[tracked], _unchanged(param.grad)
            is_new = param.grad is None or (made is not None and made == now and not aliases.is_shared(param.grad))
        else:
            assert param.grad is not None
            if self._write(tracked, param.grad):
                return True
            # if nothing was added to it, and no hook has seen it, autograd has made it for nobody else
            is_new = _unchanged(param.grad) is not None and _is_seen_by_nobody(param)
        return is_new or not aliases.is_the_scripts(param)

    def _write(self, tracked: Tracked, gradient: torch.Tensor) -> bool:
        """Write a gradient, times the scale, into its slot; return whether autograd had added to the slot itself."""
        slot = tracked.slot
        if gradient is slot:
            slot.mul_(self._scale)
            return True
        if aliases.is_held(tracked):  # the script has kept an earlier step's gradient
            self.give(tracked)
        # a scalar that is a tensor already saves torch the making of one: 1.2 of 2.0 us for 4 KB
        factor = self._factors.get(slot.dtype, self._scale) if gradient.dtype is slot.dtype else self._scale
        torch.mul(gradient.detach() if gradient.requires_grad else gradient, factor, out=slot)
        return False

    def restore(self, several: Iterable[Tracked]) -> None:
        """Let `.grad` have the sum where the script has dropped or replaced it in the backward pass, as DDP would."""
        filled_in = {tracked for tracked, _ in self.of_the_script}
        for tracked in several:
            gradient = tracked.param.grad
            if gradient is None:
                self.show((tracked,))
            elif tracked not in filled_in:
                if isinstance(gradient, PendingGradient):
                    gradient = self._shared(gradient)
                    tracked.param.grad = gradient
                self.of_the_script.append((tracked, gradient))

    def _shared(self, wrapper: PendingGradient) -> torch.Tensor:
        """Memory for another parameter's gradient too: both sums go there, one after the other, as under DDP."""
        if wrapper.reads is None:  # it stands for memory of the script's
            return wrapper.slot
        if wrapper.reads is not self.reads:  # it is another session's
            return torch.empty_like(wrapper.slot)
        owner = wrapper.tracked
        has_it = owner.param.grad is wrapper
        memory = self._give_away(wrapper, torch.empty_like(wrapper.slot))
        if has_it:
            self.of_the_script.append((owner, memory))
        return memory

    def put_absent(self, tracked: Tracked) -> None:
        """Fill the slot of a parameter that got no gradient in this pass, with what is in `.grad`, or zeros."""
        gradient = tracked.param.grad
        if gradient is tracked.slot or aliases.is_held(tracked):
            self.give(tracked)
            gradient = tracked.param.grad
        self._driver.gradient_buffers.put_absent(tracked.tensor, gradient, self._scale, counts=tracked.accumulated)

    # -- from the slot to the script ---------------------------------------------------------------

    def change_later(self, tracked: Tracked, operation: InPlace) -> None:
        """Let `operation` change the sum of `tracked` when it has arrived."""
        self._to_change[tracked] = None
        tracked.later.append(operation)

    def change(self, several: Iterable[Tracked]) -> None:
        """Change the sums of `several`, which have arrived, as the script has asked for it.

        Gradients that it has changed in one call are changed in one call.
        """
        if not self._to_change:
            return
        alike: dict[tuple[int, ...], list[Tracked]] = {}
        for tracked in several:
            if tracked in self._to_change:
                del self._to_change[tracked]
                alike.setdefault(tuple(map(id, tracked.later)), []).append(tracked)
        for members in alike.values():
            for operation in members[0].later:
                operation(*(tracked.slot for tracked in members))
            for tracked in members:
                tracked.later = []

    def change_all(self) -> None:
        """As `change`, of all; every sum has arrived."""
        self.change(list(self._to_change))

    def show(self, several: Iterable[Tracked]) -> None:
        """Let `.grad` stand for the sum from now on.

        Raises:
            RuntimeError: torch refuses, since a parameter now has another dtype, shape or device.
        """
        for tracked in several:
            tracked.param.grad = tracked.wrapper

    def hide(self, several: Iterable[Tracked]) -> None:
        """Let there be no gradients, until `show`."""
        for tracked in several:
            tracked.param.grad = None

    def show_absent(self, tracked: Tracked) -> None:
        """Show a sum that has arrived and to which only other ranks contributed."""
        gradient = tracked.param.grad
        if gradient is None:
            self.show((tracked,))
        else:
            with torch.no_grad():
                gradient.copy_(tracked.slot)

    def that_stand_for_sums(self, several: Iterable[Tracked]) -> list[Tracked]:
        """Those of `several` whose `.grad` the script has neither replaced nor dropped."""
        return [tracked for tracked in several if tracked.param.grad is tracked.wrapper]

    def lend(self, several: Sequence[Tracked]) -> None:
        """Show the slots themselves, whose sums have arrived, to code that keeps no reference to them: the optimizer that
        steps now, or a compiled forward pass.
        """
        for tracked in several:
            tracked.param.grad = tracked.slot
        self._lent += several

    def take_back(self) -> None:
        """Undo `lend` for all parameters: the step or the forward pass is over."""
        for tracked in self._lent:
            if tracked.param.grad is tracked.slot:
                tracked.param.grad = tracked.wrapper
        self._lent.clear()

    # -- given to the script -----------------------------------------------------------------------

    def give(self, tracked: Tracked) -> None:
        """Make the gradient an ordinary tensor of the script's own, with what is in the slot."""
        self._give_away(cast(PendingGradient, tracked.wrapper))

    def give_all(self) -> None:
        """Make every gradient an ordinary tensor, which the session will not touch."""
        for tracked in self.that_stand_for_sums(self._tracked):
            self.give(tracked)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let there be no gradients meanwhile; afterwards they are the script's own again."""
        self.give_all()
        own = [(tracked.param, tracked.param.grad) for tracked in self._tracked]
        for param, _ in own:
            param.grad = None
        try:
            yield
        finally:
            for param, gradient in own:
                param.grad = gradient

    def _give_away(self, wrapper: PendingGradient, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Make `wrapper` stand for memory of the script's own, and return that memory.

        Args:
            wrapper: that of a tracked parameter; a new one takes its place there.
            memory: what it stands for; None for a copy of the slot.
        """
        tracked = wrapper.tracked
        param, slot = tracked.param, tracked.slot
        memory = slot.clone() if memory is None else memory
        wrapper.given_away(memory)
        tracked.wrapper = self._new_wrapper(tracked)
        if param.grad is wrapper or param.grad is slot:
            param.grad = memory
        return memory

    def close(self, failed: bool) -> None:
        """Make every gradient an ordinary tensor.

        Args:
            failed: the job has failed. `.grad` becomes None then, where it would stand for a sum:
                the slot holds this rank's part at best.
        """
        for tracked in self._tracked:
            wrapper = cast(PendingGradient, tracked.wrapper)
            if tracked.param.grad is wrapper:
                tracked.param.grad = None if failed else wrapper.slot
            wrapper.given_away(wrapper.slot)
