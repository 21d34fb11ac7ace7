"""Patches of functions through which torch reads parameters in C++, past the guards of `guards.py`.

TorchScript reads a module's parameters directly from its dictionary, and those that a scripted function
is given without calling any torch function; so does functorch, which wraps them. The patched functions
first run deferred updates, see `before_leaving`. TorchScript would also compile the hooks of a module,
and a session's cannot be compiled; they are taken off the module meanwhile. Compiled code must meet no
guard and no gradient that stands for a sum, which the compiler would trace into; see
`before_compiled_code`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch._dynamo.eval_frame as dynamo
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.jit._recursive as torchscript
import torch.utils._foreach_utils as foreach
import torch.utils.dlpack

from gradlane.live.session import guards, outdated
from gradlane.live.session.hooks import Hook

_settlers: dict[int, Callable[[], None]] = {}  # by id() of the owner: runs its deferred updates


class ReadByCompiledCode(Protocol):
    """A session, as compiled code concerns it."""

    def before_compiled_code(self, module: torch.nn.Module | None) -> None:
        """Compiled code is about to run: a method of `module`, or a function of the script, which may read anything."""


_read_by_compiled_code: weakref.WeakSet[ReadByCompiledCode] = weakref.WeakSet()


def _before(really: Callable[..., Any]) -> Callable[..., Any]:
    def settle_first(*args: Any) -> Any:
        _settle_all()
        return really(*args)

    return settle_first


def _with_current(really: Callable[..., Any], in_containers: bool) -> Callable[..., Any]:
    """`really`, whose arguments are made current first; those in a list or a dictionary only if `in_containers`."""

    @functools.wraps(really)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if in_containers:
            guards.use_all_in(values)
        else:
            for value in values:
                guards.use(value)
        return really(*args, **kwargs)

    return call


# Each entry has the place of a function, its name, torch's function and ours. Functorch's transforms wrap their arguments by
# the first ones. The others copy a tensor, or take over its memory, without calling any torch function.
_PATCHED: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [
    *(
        (module, name, getattr(module, name), _before(getattr(module, name)))
        for module in (torch._functorch.eager_transforms, torch._functorch.vmap)
        for name in ("_wrap_for_grad", "_wrap_functional_tensor", "_add_batch_dim")
        if hasattr(module, name)
    ),
    *(
        (module, name, getattr(module, name), _with_current(getattr(module, name), in_containers=False))
        for module, names in (
            (torch, ("tensor", "as_tensor", "asarray")),
            (torch.Tensor, ("new_tensor", "new")),
            (torch.utils.dlpack, ("to_dlpack",)),
        )
        for name in names
    ),
]


def before_leaving(owner: object, settle: Callable[[], None]) -> None:
    """Call `settle()` before each patched function runs, until `nothing_is_owed(owner)`.

    Args:
        owner: has deferred updates.
        settle: runs them.
    """
    _settlers[id(owner)] = settle
    for module, name, _, ours in _PATCHED:
        setattr(module, name, ours)


def nothing_is_owed(owner: object) -> None:
    """Note that `owner` has no deferred updates any more: patched functions need not call it."""
    _settlers.pop(id(owner), None)
    if not _settlers:  # compiled code must find torch's own function
        for module, name, really, _ in _PATCHED:
            setattr(module, name, really)


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


def before_compiled_code(session: ReadByCompiledCode) -> None:
    """Tell `session` before each call of compiled code, until `forget(session)`.

    PyTorch has the function that is patched from 2.6 on. Before, only compiled modules are seen, by their hooks.
    """
    _read_by_compiled_code.add(session)
    really = getattr(dynamo, "_callback_from_stance", None)
    if really is None or getattr(really, "_of_gradlane", False):
        return

    @functools.wraps(really)
    def callback_from_stance(callback: Any) -> Any:
        if _read_by_compiled_code and callable(callback):
            _called(sys._getframe(1).f_locals.get("fn"))
        return really(callback)

    callback_from_stance._of_gradlane = True  # type: ignore[attr-defined]
    dynamo._callback_from_stance = callback_from_stance


def forget(session: ReadByCompiledCode) -> None:
    """`session` has ended."""
    _read_by_compiled_code.discard(session)


def _called(function: Any) -> None:
    """Compiled code of `function` is called: a module's own method, a step of an optimizer, or anything."""
    whose = getattr(function, "__self__", None)
    if isinstance(whose, torch.optim.Optimizer):
        return  # hooks on its step do what there is to do
    for session in list(_read_by_compiled_code):
        session.before_compiled_code(whose if isinstance(whose, torch.nn.Module) else None)


def patch_for_good() -> None:
    """Patch what a script may call at any time, once.

    `torch.jit.script` and `torch.jit.trace` take modules of a session, and copies of them, which have copies of the hooks. What
    they make is called with parameters that are current. A `Parameter` may be made of a parameter or gradient of a session.
    """
    really = torchscript.create_script_module
    if getattr(really, "_of_gradlane", False):
        return
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _with_current(kind.__call__, in_containers=True)  # type: ignore[method-assign]
    torch.nn.Parameter.__new__ = _made_of_current(torch.nn.Parameter.__new__)  # type: ignore[method-assign]

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


def _made_of_current(really: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(really)
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        guards.use(data)  # torch looks at its class
        return really(cls, data.detach() if isinstance(data, guards.PendingGradient) else data, requires_grad)

    return new


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
