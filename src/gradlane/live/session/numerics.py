"""Numerics: the settings of torch on which the bits of an update depend, as they were when `step()` began.

A script may step under other settings than those of its forward pass: a default dtype, autocast, a number of threads,
kernels of oneDNN. A deferred update runs under those of its step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
_SMALLEST = sys.float_info.min


def _flushes_denormals() -> bool:
    """Whether this thread does; torch sets it and does not tell it."""
    return _SMALLEST * 0.5 == 0.0


def _precision_of_matmul() -> Iterator[_Setting]:
    # from PyTorch 2.9 on, the general question raises where a script has set it for one library
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        return
    for library in ("mkldnn", "cuda"):
        yield (
            functools.partial(torch._C._get_fp32_precision_getter, library, "matmul"),
            functools.partial(torch._C._set_fp32_precision_setter, library, "matmul"),
        )


_SETTINGS: tuple[_Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes_denormals, torch.set_flush_denormal),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *_precision_of_matmul(),
)
_AS_IT_IS = contextlib.nullcontext()


def _values(device: str) -> tuple[Any, ...]:
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (*[get() for get, _ in _SETTINGS], autocast)


class Numerics:
    """The settings of this thread and process now.

    Args:
        device: the type of device of what is computed under them, as "cpu".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._then = _values(device)

    def in_force(self) -> contextlib.AbstractContextManager[Any]:
        """Compute under these settings, and outside of `torch.inference_mode`."""
        now = _values(self._device)
        if now == self._then and not torch.is_inference_mode_enabled():
            return _AS_IT_IS
        return self._set(now)

    @contextlib.contextmanager
    def _set(self, now: tuple[Any, ...]) -> Iterator[None]:
        autocast = self._then[-1]
        changed = [
            (put, then, value)
            for (_, put), then, value in zip(_SETTINGS, self._then[:-1], now[:-1], strict=True)
            if then != value
        ]
        with torch.inference_mode(False), torch.autocast(self._device, autocast, enabled=autocast is not None):
            try:
                for put, then, _ in changed:
                    put(then)
                yield
            finally:
                for put, _, value in changed:
                    put(value)
