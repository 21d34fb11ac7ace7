"""Patches of functions through which torch reads parameters in C++, past the guards of `guards.py`.

TorchScript reads a module's parameters directly from its dictionary, and functorch wraps a tensor
without calling any torch function. The patched functions first run deferred updates, see
`before_leaving`. TorchScript would also compile the hooks of a module, and a session's cannot be
compiled; they are taken off the module meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.eager_transforms as functorch
import torch.jit._recursive as torchscript
import torch.utils._foreach_utils as foreach

from gradlane.live.session import guards, outdated
from gradlane.live.session.hooks import Hook

_settlers: dict[int, Callable[[], None]] = {}  # by id() of the owner: runs its deferred updates
_wrap_for_grad = functorch._wrap_for_grad  # type: ignore[attr-defined]


def before_leaving(owner: object, settle: Callable[[], None]) -> None:
    """Call `settle()` before each patched function runs, until `nothing_is_owed(owner)`.

    Args:
        owner: has deferred updates.
        settle: runs them.
    """
    _settlers[id(owner)] = settle
    functorch._wrap_for_grad = _wrapped_for_grad  # type: ignore[attr-defined, assignment]


def nothing_is_owed(owner: object) -> None:
    """Note that `owner` has no deferred updates any more: patched functions need not call it."""
    _settlers.pop(id(owner), None)
    if not _settlers:  # compiled code must find torch's own function
        functorch._wrap_for_grad = _wrap_for_grad  # type: ignore[attr-defined]


def take_as_a_tensor(kind: type) -> None:
    """Let torch use the same kernels for tensors of a class of ours as for ordinary ones, as it does for DTensor.

    `clip_grad_norm_` would take norms one by one else, which have other bits on a GPU.
    """
    kinds: Any = getattr(foreach, "_foreach_supported_types", [])
    if kind not in kinds:
        kinds.append(kind)


def _settle_all() -> None:
    for settle in list(_settlers.values()):
        settle()


def _wrapped_for_grad(*args: Any) -> Any:
    _settle_all()
    return _wrap_for_grad(*args)


def guard_torchscript() -> None:
    """Patch `torch.jit.script` and `torch.jit.trace`, so that they take modules of a session.

    They also take copies of such modules, which have copies of the hooks.
    """
    really = torchscript.create_script_module
    if getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def create_script_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        _settle_all()
        for param in module.parameters():
            guards.use(param)
            outdated.check(param)
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
