"""Run: one program on one rank, under DDP or under gradlane, which its actions cannot tell apart."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.live.programs.models import MODELS, Batch, dtype_of, loss_of
from tests.live.programs.program import Program


@dataclass
class Run:
    """What a program works on. `call` is the model as a loop calls it: DDP's wrapper, or the model itself."""

    program: Program
    rank: int
    model: Any
    call: Any
    optimizers: list[torch.optim.Optimizer]
    no_sync: Callable[[], contextlib.AbstractContextManager[None]]
    generator: torch.Generator
    fetch_state: Callable[[], None] = lambda: None
    """Has the optimizers' state fetched, where it is on servers."""
    apart: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Closes sessions whose update is on the servers, and attaches others at the end."""
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    """References that the program took, and looks at later."""
    saved: Any = None
    averaged: Any = None
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    schedulers: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    """Of autograd, which has dropped a node and its hooks when nobody refers to it."""
    scaler: torch.amp.GradScaler = field(init=False)
    flat: list[torch.Tensor] = field(default_factory=list)
    """Flat buffers of which gradients are views."""
    threads: list[Callable[[], None]] = field(default_factory=list)
    """Wait for threads that read parameters."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=64.0, growth_interval=3)

    @property
    def device(self) -> torch.device:
        """Of the model, and of what the program makes."""
        return torch.get_default_device()

    def join(self) -> None:
        """Wait for all threads, before something changes what they read."""
        while self.threads:
            self.threads.pop(0)()

    def batch(self) -> Batch:
        x, y = (part.to(self.device) for part in MODELS[self.program.model].batch(self.generator))
        return (x.to(dtype_of(self.model)) if x.is_floating_point() else x), y

    def take(self, parts: str = "") -> None:
        """Which parts of the model the next forward passes use, where it has parts: all of them where none is named."""
        if MODELS[self.program.model].parts:
            self.model.taken = tuple(part for part in parts.split(",") if part != "none") if parts else self.model.parts

    def loss(self, parts: str = "", past: bool = False) -> torch.Tensor:
        """Of one batch, by one forward pass; `past` a wrapper."""
        self.take(parts)
        x, y = self.batch()
        return loss_of((self.model if past else self.call)(x), y)

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        """Ranks behind the second add zeros to every gradient: a sum of two has the same bits in any order."""
        (loss if self.rank < 2 else loss * 0).backward(**how)

    def see(self, name: str, value: Any) -> None:
        """`value` (a number, a tensor, None, or a dict or list of them) must be the same under DDP."""
        if isinstance(value, dict):
            for key in sorted(value, key=str):  # the order in which an optimizer met its parameters is no number
                self.see(f"{name}.{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for key, item in enumerate(value):
                self.see(f"{name}.{key}", item)
        elif not isinstance(value, str):
            value = torch.tensor([]) if value is None else torch.as_tensor(value).detach().clone()
            self.seen[f"{self.steps}/{len(self.seen)}:{name}"] = value

    def parameters(self, which: str = "all") -> list[nn.Parameter]:
        """all, first, last, even or odd."""
        params = list(self.model.parameters())
        places = {
            "all": slice(None),
            "first": slice(1),
            "last": slice(-1, None),
            "even": slice(0, None, 2),
            "odd": slice(1, None, 2),
        }
        return params[places[which]]

    def with_gradients(self, which: str = "all") -> list[nn.Parameter]:
        return [param for param in self.parameters(which) if param.grad is not None]

    def states(self) -> list[dict[str, Any]]:
        """What the optimizers hold by hand, in the order of their groups."""
        found = []
        for optimizer in self.optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            found += [optimizer.state[param] for param in params if param in optimizer.state]
        return found

    def save(self) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers]))


Action = Callable[..., None]
ACTIONS: dict[str, Action] = {}


def action(function: Action) -> Action:
    """Registers a function of a `Run` and of the action's words."""
    ACTIONS[function.__name__] = function
    return function


def words_for(rank: int, line: str) -> list[str] | None:
    """The words of an action on this rank; None if it is for the other rank alone."""
    words = line.split()
    if words[-1].startswith("@") and int(words.pop()[1:]) != rank:
        return None
    return [word.split("|")[rank % 2] if "|" in word else word for word in words]


MAY_RUN_BESIDE = ("zero_grad", "backward", "thread", "fork", "interrupt", "functorch", "scripted")
"""Actions that change no parameter and no state, so that threads may read those meanwhile."""


def perform(run: Run) -> Iterator[str]:
    """Yields each action before it is done."""
    for number, step in enumerate(run.program.steps):
        run.steps = number
        for line in step:
            yield line
            words = words_for(run.rank, line)
            if words is not None:
                if words[0] not in MAY_RUN_BESIDE:
                    run.join()
                ACTIONS[words[0]](run, *words[1:])
    run.join()
