"""Doors: functions of torch through which modules and parameters reach C++ past the guards of `pending.py`.

TorchScript takes a module's parameters as they stand in its dictionary, and functorch wraps a tensor without any torch
function. Both are asked to wait: `before_leaving` has updates made before a module or tensor goes through. TorchScript
would also compile the hooks of a module, which no session's can be; they stand aside meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.eager_transforms as functorch
import torch.jit._recursive as torchscript

from gradlane.live.session import guards
from gradlane.live.session.hooks import Hook

_settlers: dict[int, Callable[[], None]] = {}  # of sessions that owe updates, by their id()
_wrap_for_grad = functorch._wrap_for_grad  # type: ignore[attr-defined]


def before_leaving(owner: object, settle: Callable[[], None]) -> None:
    """Call `settle()` before anything goes through a door, until `nothing_is_owed(owner)`."""
    _settlers[id(owner)] = settle
    functorch._wrap_for_grad = _wrapped_for_grad  # type: ignore[attr-defined, assignment]


def nothing_is_owed(owner: object) -> None:
    """What goes through a door need not wait for `owner`."""
    _settlers.pop(id(owner), None)
    if not _settlers:  # so that compiled code finds torch's own
        functorch._wrap_for_grad = _wrap_for_grad  # type: ignore[attr-defined]


def _settle_all() -> None:
    for settle in list(_settlers.values()):
        settle()


def _wrapped_for_grad(*args: Any) -> Any:
    _settle_all()
    return _wrap_for_grad(*args)


def guard_torchscript() -> None:
    """From now on `torch.jit.script` and `torch.jit.trace` take modules that a session has hooks on, and copies of them."""
    really = torchscript.create_script_module
    if getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def create_script_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        _settle_all()
        for param in module.parameters():
            guards.use(param)
        with _without_hooks(module):
            return really(module, *args, **kwargs)  # type: ignore[no-untyped-call]

    create_script_module._of_gradlane = True  # type: ignore[attr-defined]
    torchscript.create_script_module = create_script_module  # type: ignore[assignment]


@contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for part in module.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            if any(isinstance(hook, Hook) for hook in hooks.values()):
                taken.append((hooks, dict(hooks)))
                for key in [key for key, hook in hooks.items() if isinstance(hook, Hook)]:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)
