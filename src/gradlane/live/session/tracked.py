"""Tracked: one trained parameter of a session, and all that the session knows of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gradlane.live.session.phases import FOLLOWS, Event, NotAllowedError, Phase

if TYPE_CHECKING:
    import torch

    from gradlane.live.session.pending_gradient import PendingGradient


class Tracked:
    """A trained parameter. Whoever changes it has the turn (`turn.py`).

    Args:
        name: of the parameter in the model.
        param: the parameter.
        tensor: its index in the plan in force.

    Attributes:
        phase: where it is, see `phases.py`.
        slot: the memory in which its gradients are summed.
        wrapper: stands for the sum in `.grad`.
        later: operations of the script that change its gradient when the sum is there.
        step: the call of an optimizer's `step` that has deferred its update; None if there is none.
        fired: how often its hook has fired in this backward pass.
        expected: how often it fires in one pass, more than once under checkpoints; 0 until that has been counted.
        accumulated: it got a gradient under `no_sync()` since the last sum.
        was_used: it was used in this iteration, as far as uses are watched.
        unguarded: something reads it past every guard, so that its update must not be deferred.
        accumulator: autograd's node for it; `aliases.py` needs it to be kept.
        hook: the key of its hook.
        waiting: its gradient while that waits for others of its group, and whether nothing has changed it since autograd made
            it; else None.
    """

    __slots__ = (
        "accumulated",
        "accumulator",
        "expected",
        "fired",
        "hook",
        "later",
        "name",
        "param",
        "phase",
        "slot",
        "step",
        "tensor",
        "unguarded",
        "waiting",
        "was_used",
        "wrapper",
    )  # fmt: skip

    def __init__(self, name: str, param: torch.nn.Parameter, tensor: int) -> None:
        self.name, self.param, self.tensor = name, param, tensor
        self.phase = Phase.CURRENT
        self.slot: torch.Tensor = None  # type: ignore[assignment]  # until a plan is in force
        self.wrapper: PendingGradient | None = None
        self.later: list[Any] = []
        self.step: Any = None
        self.fired = self.expected = 0
        self.accumulated = self.was_used = self.unguarded = False
        self.accumulator: Any = None
        self.hook = -1
        self.waiting: tuple[torch.Tensor, bool] | None = None

    @property
    def has_later_hooks(self) -> bool:
        """Whether a hook of the script's comes after the session's, and may change the gradient."""
        hooks: Any = self.param._post_accumulate_grad_hooks
        return len(hooks) > 1 and next(reversed(hooks)) != self.hook

    def happens(self, event: Event) -> None:
        """Go on to the phase that follows `event`.

        Raises:
            NotAllowedError: the script must not do that now; the phase stays.
        """
        follows = FOLLOWS[event][self.phase]
        if isinstance(follows, Phase):
            self.phase = follows
        elif follows is None:
            raise AssertionError(f"{self.name}: {event.name} cannot come in phase {self.phase.name}")
        else:
            raise NotAllowedError(follows.format(name=self.name, fired=self.fired, expected=self.expected))


def all_go_on(several: Iterable[Tracked], event: Event) -> None:
    """`event` happens to each of `several`: as `Tracked.happens`, for a small part of its price."""
    before = after = None
    for tracked in several:
        if tracked.phase is before and after is not None:  # most are where the one before was
            tracked.phase = after
        else:
            before = tracked.phase
            tracked.happens(event)
            after = tracked.phase
