"""Sending: from complete gradients to messages that are ready, and what is left when a backward pass ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from gradlane.errors import UnsupportedError
from gradlane.live.backends.gradient_buffers import dtype_name
from gradlane.live.session.gradient_groups import GradientGroups
from gradlane.live.session.parts import Parts
from gradlane.live.session.phases import FOLLOWS, Event, NotAllowedError, Phase
from gradlane.live.session.tracked import Tracked, all_go_on

_AFTER_GRADIENT = FOLLOWS[Event.GRADIENT]


class Sending:
    """Sends the gradients of one session. Used on the training thread.

    Args:
        parts: of the session.
        refuse_replaced: fails if the model trains another tensor now than one of some tracked ones.
    """

    def __init__(self, parts: Parts, refuse_replaced: Callable[[Iterable[Tracked]], None]) -> None:
        self._parts, self._refuse_replaced = parts, refuse_replaced
        self._driver, self._gradients, self._verifier = parts.driver, parts.gradients, parts.verifier

    def take_up(self) -> None:
        """Another plan is in force, and `parts` has its parameters."""
        parts = self._parts
        dtypes = [slot.dtype for slot in self._driver.slots]
        self._groups = GradientGroups(parts.plan, dtypes, parts.planner.ready_ns if parts.settled else None)
        self._gradients.take_up(parts.tracked, self._groups.members)

    def begin(self) -> None:
        """A backward pass begins."""
        self._gradients.begin()
        self._groups.begin()

    def complete(self, tracked: Tracked) -> None:
        """The gradient of a parameter is complete: send it, or let it wait for its neighbours."""
        if tracked.has_later_hooks:
            self._parts.tell(
                "late hooks",
                f"a hook on {tracked.name}, registered during the backward pass, may change its gradient: such gradients are "
                "sent at the end of that pass",
            )
            if self._groups.is_shared(tracked.tensor):
                self._groups.dissolve([tracked.tensor])
            return
        if _AFTER_GRADIENT[tracked.phase] is not Phase.PRODUCED:
            self.arrived(tracked)
        tracked.phase = Phase.PRODUCED
        group = self._groups.add(tracked.tensor)
        if group:
            every = self._parts.tracked
            self._send([every[tensor] for tensor in group])
        else:
            gradient = tracked.param.grad
            assert gradient is not None
            tracked.waiting = None if gradient is tracked.slot else (gradient, gradient._version == 0)

    def may_be_complete(self, tracked: Tracked) -> None:
        """Put a gradient into its slot while hooks are counted; the slots are sent when the backward pass ends.

        As under DDP, nothing that changes `.grad` later changes the sum, but a gradient that comes once more.
        """
        if not tracked.has_later_hooks:
            self._fill(tracked, tracked.param.grad)

    def _fill(self, tracked: Tracked, gradient: torch.Tensor | None) -> None:
        assert gradient is not None
        try:
            self._gradients.fill(tracked, gradient)
        except RuntimeError:
            self._refuse_another((tracked,))
            raise

    def arrived(self, tracked: Tracked) -> None:
        """Note that a gradient has come; the job ends if it must not, as where it came twice."""
        try:
            tracked.happens(Event.GRADIENT)
        except NotAllowedError as error:
            self._parts.fail(str(error))

    def _send(self, several: Sequence[Tracked]) -> None:
        """Put gradients, divided by the world size as in DDP, into their slots; report them ready."""
        for tracked in several:
            if tracked.waiting is not None:
                self._has_waited(tracked, *tracked.waiting)
        try:
            self._gradients.put(several)
        except RuntimeError:
            self._refuse_another(several)
            raise
        all_go_on(several, Event.SEND)
        if self._verifier.verifies:
            for tracked in several:
                self._verifier.contributes(tracked.param, tracked.slot)
        self._driver.ready([tracked.tensor for tracked in several])
        if self._parts.measuring.is_on:
            self._parts.measuring.ready(several)

    def _has_waited(self, tracked: Tracked, gradient: torch.Tensor, is_new: bool) -> None:
        """Send the gradient as it was when it was complete, whatever hooks have put into `.grad` since, as DDP does.

        A hook that has changed it in place has overwritten it, and the job ends.
        """
        tracked.waiting = None
        if is_new and gradient._version:
            self._parts.fail(
                f"the gradient of {tracked.name} was changed after it was complete, by a hook on its AccumulateGrad node or on "
                "another tensor; DDP would drop that change. Change gradients after backward(), or by a hook of "
                "register_post_accumulate_grad_hook() on the parameter itself",
                UnsupportedError,
            )
        if tracked.param.grad is not gradient:
            self._fill(tracked, gradient)

    def _lack(self, tracked: Tracked) -> None:
        """Report a parameter that got no gradient in this pass.

        What stands in `.grad` is summed, as under DDP: it is of passes under `no_sync()`, or kept
        from an earlier iteration. The presence element tells whether any pass since the last sum
        produced it.
        """
        tracked.happens(Event.LACK)
        self._refuse_replaced((tracked,))
        self._gradients.put_absent(tracked)
        self._verifier.contributes(tracked.param, tracked.slot)
        self._driver.ready((tracked.tensor,))

    def lack_all(self) -> None:
        """Take part in an iteration in which this rank has no gradient."""
        for tracked in self._parts.tracked:
            self._lack(tracked)
        self._driver.all_are_ready()

    def send_rest(self) -> list[Tracked]:
        """The backward pass is over: send what waited for neighbours that did not come.

        Returns:
            The parameters that got no gradient, whose sums are on their way too.
        """
        absent = []
        for tracked in self._parts.tracked:
            if tracked.phase is Phase.SENT:
                continue
            if tracked.fired:
                if tracked.phase is not Phase.PRODUCED:
                    self.arrived(tracked)
                # a late hook has dropped it, where DDP sums zeros
                if tracked.param.grad is None and tracked.waiting is None and tracked not in self._gradients.filled:
                    tracked.param.grad = torch.zeros_like(tracked.param)
                self._send((tracked,))
            else:
                self._lack(tracked)
                absent.append(tracked)
        sent = (tracked for tracked in self._parts.tracked if tracked.phase is Phase.SENT)
        self._gradients.restore([tracked for tracked in sent if tracked.param.grad is not tracked.wrapper])
        self._sort_as_ddp()
        self._groups.dissolve([tracked.tensor for tracked in absent])
        self._driver.all_are_ready()
        return absent

    def _sort_as_ddp(self) -> None:
        """Have sums go into memory of the script's in DDP's order, since several gradients may share it: first in that of the
        model's parameters, and later in that of readiness, which plans have. Torch has made the drop-in's first iteration.
        """
        is_first = self._driver.iteration == 0 and not self._parts.job.wrapped
        self._gradients.of_the_script.sort(key=lambda each: each[0].tensor, reverse=is_first)

    def fill_in(self, absent: Sequence[Tracked]) -> None:
        """Show the sums of `absent` that other ranks have produced, and those that belong into memory of the script's.

        As DDP with find_unused_parameters, leave a gradient alone that no rank has produced.
        """
        self._driver.wait_for([tracked.tensor for tracked in absent])
        for tracked in absent:
            if self._driver.summed.used_by_anybody(tracked.tensor):
                self._gradients.show_absent(tracked)
        if self._gradients.of_the_script:
            self._fill_in_the_scripts()

    def _fill_in_the_scripts(self) -> None:
        """Wait for sums whose gradients are in memory that the script holds too; copy them there.

        DDP would have put them there by the end of the backward pass.
        """
        self._parts.tell(
            "shared gradients",
            "gradients lie in memory that the script holds too (a flat buffer, views): their sums are waited for in backward()",
        )
        self._driver.wait_for([tracked.tensor for tracked, _ in self._gradients.of_the_script])
        for tracked, gradient in self._gradients.of_the_script:
            self._verifier.arrived(tracked.param, tracked.slot)
            with torch.no_grad():
                gradient.copy_(tracked.slot)
        self._gradients.of_the_script.clear()

    # -- what must not have changed -----------------------------------------------------------------

    def _refuse_another(self, several: Iterable[Tracked]) -> None:
        """Fail if a parameter has another dtype, shape or device than its slot."""
        for tracked in several:
            param, slot = tracked.param, tracked.slot
            if (param.dtype, param.shape, param.device) != (slot.dtype, slot.shape, slot.device):
                self._parts.fail(
                    f"{tracked.name} is {param.dtype} of shape {tuple(param.shape)} on {param.device} now and was another "
                    f"tensor of {dtype_name(slot)} at attach: close() the session before such a change, and attach again",
                    UnsupportedError,
                )
