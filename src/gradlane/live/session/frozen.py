"""Frozen: the parameters that were frozen at attach. Their gradients are not summed if the script trains them later."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def not_summed(why: str, again: str) -> str:
    """What to say of a parameter that is trained and not summed.

    Args:
        why: with its name.
        again: what to do after that.
    """
    return f"{why}: its gradient is not summed, as under DDP, so ranks drift apart; {again} after that"


class Frozen:
    """The frozen ones of some parameters.

    Args:
        named: names and parameters.
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._named = [(name, param) for name, param in named if not param.requires_grad]

    @property
    def trained(self) -> str | None:
        """The name of one that is trained now; None if there is none."""
        return next((name for name, param in self._named if param.requires_grad), None)

    @property
    def fault(self) -> str | None:
        """The error text for `trained`; None if there is none."""
        name = self.trained
        return None if name is None else f"{name} was frozen at attach and is trained now: close() the session and attach again"
