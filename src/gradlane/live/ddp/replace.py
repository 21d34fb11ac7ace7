"""Puts the drop-in where scripts and trainers find torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradlane.live.ddp.wrapper import DistributedDataParallel


def replace_ddp(**options: Any) -> None:
    """From now on `torch.nn.parallel.DistributedDataParallel` is gradlane's, in this process.

    Call it before the script, or the trainer that it uses, imports torch's by name. Models that are
    wrapped already stay as they are. `gradlane launch --ddp` calls it before the script begins.

    Args:
        options: keywords for `gradlane.attach`, for models that give none of their own.
    """
    _put(DistributedDataParallel, options)


@contextlib.contextmanager
def replaced_ddp(**options: Any) -> Iterator[None]:
    """As `replace_ddp`, inside of this context only."""
    before, defaults = torch.nn.parallel.DistributedDataParallel, DistributedDataParallel.default_options
    _put(DistributedDataParallel, {**defaults, **options})
    try:
        yield
    finally:
        _put(before, defaults)


def _put(kind: Any, options: Any) -> None:
    torch.nn.parallel.DistributedDataParallel = kind  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = kind  # type: ignore[misc]
    DistributedDataParallel.default_options = options
