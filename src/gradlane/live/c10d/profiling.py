"""Entries of torch's profilers: "gradlane:all_reduce" and the like, from the call on, with the shapes of its inputs.

In PyTorch 2.13 such an entry lasts until the profiler stops, and not until the collective ends. Its end would be written into
the profiler's memory, which is another's if that profiler has stopped, and nothing in Python tells whether it has.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _autograd


def begin(name: str, inputs: Sequence[torch.Tensor]) -> Any:
    """Begin the entry "gradlane:`name`". Returns what `end` takes; None where no profiler runs."""
    if not _autograd._profiler_enabled():
        return None
    return _autograd._record_function_with_args_enter(f"gradlane:{name}", *inputs)


def end(entry: Any) -> None:
    """Let go of an entry of `begin`, on a thread that no profiler records: the profilers call the entry asynchronous."""
    thread = threading.Thread(target=_autograd._record_function_with_args_exit, args=(entry,))
    thread.start()
    thread.join()
