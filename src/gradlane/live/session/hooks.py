"""Hooks on modules that survive copying, and what they need to know of autograd and the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class Hook:
    """A bound method as a hook. A copied or unpickled module carries a copy of the hook that does nothing."""

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._method is not None:
            self._method(*args, **kwargs)

    def __reduce__(self) -> Any:
        return (type(self), (None,))


class ModuleHook(Hook):
    """A forward (pre-)hook that calls `method(module, compiling, output)` and is never compiled itself.

    compiling: whether the call comes from inside a compiled region. output: None before the forward pass.
    """

    def __call__(self, module: Any, args: Any, output: Any = None) -> None:
        if self._method is not None:
            _outside_the_compiler(self._method, module, torch.compiler.is_compiling(), output)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_the_compiler(method: Callable[..., Any], module: Any, compiling: bool, output: Any) -> None:
    method(module, compiling, output)


class _Handles:
    """Several hooks that are removed as one."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def around_step(optimizer: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]) -> _Handles:
    """Call `before` as the last thing before `optimizer` updates and `after` as the first thing after it.

    Hooks of the script's own, whenever it registers them, then see gradients and parameters as they are under DDP.
    """
    # a compiled step breaks its graph there
    before, after = torch.compiler.disable(before), torch.compiler.disable(after)  # type: ignore[no-untyped-call]
    befores: Any = optimizer._optimizer_step_pre_hooks  # ordered dictionaries
    afters: Any = optimizer._optimizer_step_post_hooks
    first = optimizer.register_step_post_hook(after)
    afters.move_to_end(first.id, last=False)
    last = optimizer.register_step_pre_hook(before)
    register = optimizer.register_step_pre_hook

    def register_step_pre_hook(hook: Any) -> Any:
        handle = register(hook)
        if last.id in befores:
            befores.move_to_end(last.id)
        return handle

    def remove() -> None:
        first.remove()
        last.remove()
        if optimizer.__dict__.get("register_step_pre_hook") is register_step_pre_hook:
            del optimizer.__dict__["register_step_pre_hook"]

    optimizer.register_step_pre_hook = register_step_pre_hook  # type: ignore[method-assign]
    return _Handles(remove)


def inside_a_backward_pass() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def is_traced() -> bool:
    """Whether what is called is recorded by TorchScript or for an export, rather than run."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling the module runs compiled code, by `module.compile()` or as `torch.compile(module)`."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def parameters_of_scripts(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Parameters that TorchScript reads past every guard in Python; no hook can be put on its modules either."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.parameters()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's output: nested lists, tuples, dicts and dataclasses are looked through."""
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
