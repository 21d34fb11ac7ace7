"""What torch does beside the operations that a thread calls: tracing, functorch's levels, dispatch and function modes.

Gradlane's own operations run on the script's threads, at whatever the script does there. None of this may see them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_AS_IT_IS = contextlib.nullcontext()


def outside_of_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave all of them on this thread; on exit they are as they were."""
    if not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return _AS_IT_IS
    return _outside_of_modes()


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        trace = torch._C._get_tracing_state()
        if trace is not None:
            torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
            stack.callback(torch._C._set_tracing_state, trace)  # type: ignore[attr-defined]
        yield
