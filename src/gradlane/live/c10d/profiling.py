"""Entries of torch's profilers: "gradlane:all_reduce" and the like, from the call to its end, with the shapes of its inputs."""

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
    """End an entry of `begin`. The profilers call an entry asynchronous if another thread ends it than began it."""
    thread = threading.Thread(target=_autograd._record_function_with_args_exit, args=(entry,))
    thread.start()
    thread.join()
