"""Hooks on modules and optimizers, and what they need to know about autograd and compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradlane.live.session.deferred_step import is_inside_its_own_step
from gradlane.live.session.guarded_states import attributes_of
from gradlane.live.session.script_lines import is_inside_itself
from gradlane.live.torch_versions import is_exporting


class Hook:
    """A bound method as a hook of a module, which survives copying the module.

    A copied or unpickled module has a copy of the hook, which does nothing.
    """

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._method is not None:
            self._method(*args, **kwargs)

    def __reduce__(self) -> Any:
        return (type(self), (None,))


class ModuleHook(Hook):
    """A forward hook or pre-hook, never compiled, that calls `method(module, compiling, output)`.

    `compiling` tells whether the module is called from inside a compiled region; `output` is None
    before the forward pass.
    """

    def __call__(self, module: Any, args: Any, output: Any = None) -> None:
        if self._method is not None:
            _outside_the_compiler(self._method, module, torch.compiler.is_compiling(), output)


class CallHook(ModuleHook):
    """A `ModuleHook` on a whole model. Compiled code, whose graph breaks at a hook, skips it while `counts()` is false."""

    def __init__(self, method: Callable[..., Any] | None, counts: Callable[[], bool] = lambda: True) -> None:
        super().__init__(method)
        self._counts = counts

    def __call__(self, module: Any, args: Any, output: Any = None) -> None:
        if not torch.compiler.is_compiling() or self._counts():
            super().__call__(module, args, output)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_the_compiler(method: Callable[..., Any], module: Any, compiling: bool, output: Any) -> None:
    method(module, compiling, output)


class _Handles:
    """A handle for several hooks, which removes them together."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def around_step(optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., None]) -> _Handles:
    """Call `before` right before `optimizer` updates, and `after` right after.

    The script's own step hooks, whenever it registers them, run outside of the two and so see
    gradients and parameters as under DDP.

    Args:
        optimizer: whose step it is.
        before: called with the optimizer, `step`'s args and kwargs, as torch's step pre-hooks, and whether
            the step is called from inside a compiled region.
        after: called with the first three, as torch's step post-hooks.

    Returns:
        A handle whose `remove()` ends both.
    """
    outside, after = _outermost(before), _outermost(after)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return outside(optimizer, args, kwargs, torch.compiler.is_compiling())

    before_step._of_gradlane = True  # type: ignore[attr-defined]
    befores: Any = optimizer._optimizer_step_pre_hooks  # ordered dictionaries
    afters: Any = optimizer._optimizer_step_post_hooks
    first = optimizer.register_step_post_hook(after)
    afters.move_to_end(first.id, last=False)
    last = optimizer.register_step_pre_hook(before_step)
    register = optimizer.register_step_pre_hook

    def register_step_pre_hook(hook: Any) -> Any:
        handle = register(hook)
        if last.id in befores:
            befores.move_to_end(last.id)
        return handle

    def remove() -> None:
        first.remove()
        last.remove()
        attributes = attributes_of(optimizer)
        if attributes.get("register_step_pre_hook") is register_step_pre_hook:
            del attributes["register_step_pre_hook"]

    optimizer.register_step_pre_hook = register_step_pre_hook  # type: ignore[method-assign]
    return _Handles(remove)


def _outermost(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, but not for a step that the optimizer's own `step()` calls. The graph of a compiled step breaks at it."""

    def called(optimizer: Any, *rest: Any) -> Any:
        return None if is_inside_its_own_step(optimizer) else hook(optimizer, *rest)

    return torch.compiler.disable(called)  # type: ignore[no-untyped-call,no-any-return]


def is_last(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no pre-hook of `optimizer` runs after those of sessions (`around_step`)."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    last = next(reversed(hooks.values()), None)
    return last is None or hasattr(last, "_of_gradlane")


def come_last(optimizer: torch.optim.Optimizer) -> None:
    """Have the pre-hooks of sessions run behind all others from the next step on."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    for key in [key for key, hook in hooks.items() if hasattr(hook, "_of_gradlane")]:
        hooks.move_to_end(key)


def inside_a_backward_pass() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


_CALLED = torch.nn.Module._wrapped_call_impl.__code__  # `Module.__call__`, also of a compiled module


def is_called_inside_itself(module: torch.nn.Module) -> bool:
    """Whether a call of `module` runs on this thread inside of another call of it; asked from a hook of the inner one."""
    return is_inside_itself(_CALLED, module)


def is_traced() -> bool:
    """Whether TorchScript or an export records what is called now."""
    return torch._C._get_tracing_state() is not None or is_exporting()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs compiled code, after `compile()` or `torch.compile(module)`."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def parameters_of_scripts(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of ScriptModules, which TorchScript reads past every guard in Python.

    No hook can be put on those modules either.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.parameters()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output, also in nested lists, tuples, dicts, dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
