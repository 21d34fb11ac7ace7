"""What differs between the releases of PyTorch that a live session runs on: 2.4 and newer.

Functions have the names that the newest release gives them. docs/versions.md says what was run on
which release.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradlane.errors import UnsupportedError

RELEASE: tuple[int, int] = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))  # type: ignore[assignment]

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

KEEPS_WORKS = RELEASE >= (2, 7)
"""Whether C++ that calls a process group written in Python keeps the Python half of the work that
it gets. Older releases drop it at once, and the work's `wait()` in C++ then never returns.
"""


def is_exporting() -> bool:
    """Whether `torch.export` records what is called now."""
    of_newer: Callable[[], bool] | None = getattr(torch.compiler, "is_exporting", None)
    # before 2.7 torch.export sets this flag and nothing else does
    return of_newer() if of_newer is not None else bool(torch.compiler._is_compiling_flag)


def keeps_graph() -> bool:
    """Whether the running backward pass keeps its graph for another one; True where torch cannot
    tell, before 2.5.
    """
    of_newer: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return of_newer is None or of_newer()


def require_release(least: tuple[int, int], what: str) -> None:
    """Raise `UnsupportedError` unless PyTorch has release `least` or a newer one.

    Args:
        least: major and minor number.
        what: needs it; the beginning of the message.
    """
    if least > RELEASE:
        raise UnsupportedError(
            f"{what}: got PyTorch {torch.__version__}, expected {'.'.join(map(str, least))} or newer; install a newer release"
        )
