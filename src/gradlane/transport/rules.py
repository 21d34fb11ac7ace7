"""Rules: how servers update parameters. The names and the meaning of their numbers are those of
torch.optim.

A rule is one of those below, with numbers; nothing that a server would have to trust. Where the
bits are torch's and where they are not stands in native/update/update.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

UNBOUNDED = 2**32 - 1
"""Staleness of a tensor whose gradients wait for nobody."""

Part = Literal["parameters", "first", "second", "steps"]
"""Of what a server keeps: the parameters; the momentum, or the first moment; the second; how many
updates there were.
"""
PARTS: dict[Part, int] = {"parameters": 0, "first": 1, "second": 2, "steps": 3}


@dataclass(frozen=True)
class Sgd:
    """Gradient descent, with momentum where that is not 0."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @property
    def kind(self) -> int:
        """Its number on the wire, which also says what a server keeps beside the parameters."""
        return 2 if self.momentum else 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a server keeps beside the parameters."""
        return ("first", "steps") if self.momentum else ("steps",)

    def numbers(self) -> dict[str, Any]:
        """As the native module takes them."""
        return dict(vars(self))


@dataclass(frozen=True)
class Adam:
    """Adam, or AdamW where the weight decay is decoupled. Without AMSGrad."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False

    @property
    def kind(self) -> int:
        """Its number on the wire, which also says what a server keeps beside the parameters."""
        return 4 if self.decoupled else 3

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a server keeps beside the parameters."""
        return ("first", "second", "steps")

    def numbers(self) -> dict[str, Any]:
        """As the native module takes them."""
        return {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "epsilon": self.eps,
            "maximize": self.maximize,
        }


Rule = Sgd | Adam
