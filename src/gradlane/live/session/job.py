"""Job: what is attached on this rank, and which rank of which group it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradlane.core.profile import TensorSpec


@dataclass(frozen=True)
class Job:
    """A model with its optimizers on one rank of a process group.

    Args:
        params: the parameters that are trained, by name, last registered first.
        group: None for the default group.
        timeout_s: seconds after which waiting for another rank is an error.
    """

    model: torch.nn.Module
    params: Sequence[tuple[str, torch.nn.Parameter]]
    optimizers: Sequence[torch.optim.Optimizer]
    group: Any
    rank: int
    world: int
    timeout_s: float

    @property
    def device(self) -> torch.device:
        """That of all parameters."""
        return self.params[0][1].device

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The parameters as profiles and plans name them."""
        return tuple(
            TensorSpec(name, param.numel() * param.element_size(), str(param.dtype).removeprefix("torch."))
            for name, param in self.params
        )

    @property
    def described_tensors(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, dtype and shape of each parameter that is trained."""
        return tuple((name, str(param.dtype), tuple(param.shape)) for name, param in self.params)

    @property
    def described_buffers(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, dtype and shape of each buffer."""
        return tuple((name, str(buffer.dtype), tuple(buffer.shape)) for name, buffer in self.model.named_buffers())
