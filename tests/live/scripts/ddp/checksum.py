"""What the scripts of this folder print at their end: a checksum of everything that training changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def checksum(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """SHA-256 over the bytes of all parameters, buffers and optimizer state tensors."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    for optimizer in optimizers:
        for state in optimizer.state_dict()["state"].values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def summary(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], losses: Iterable[float]) -> str:
    """The last line of a script."""
    return f"sha256 {checksum(models, optimizers)} losses {' '.join(f'{loss:.6f}' for loss in losses)}"
