"""Job: the model and optimizers that are attached on a rank, and the rank's place in its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradlane.core.profile import TensorSpec
from gradlane.live.backends.gradient_buffers import dtype_name, spec_of
from gradlane.live.session.ignored import synchronised_buffers, synchronised_tensors


@dataclass(frozen=True)
class Job:
    """A model with its optimizers on one rank of a process group.

    Args:
        model: to train.
        params: its trained parameters with their names, last registered first.
        optimizers: that have `params`.
        group: a process group of torch.distributed; None for the default group.
        rank: of this process in the group.
        ranks: of the group, in its order, as torch's default group numbers them (global ranks).
        timeout_s: seconds after which waiting for another rank is an error.
        wire_dtype: "bfloat16" or "float16", as which float32 gradients travel; None for float32.
        ignored: names of parameters and buffers that DDP is told to ignore; each rank keeps its own.
        finds_unused: a parameter that was frozen after its forward pass counts as unused, as under DDP with
            `find_unused_parameters`; if not, its gradient is zeros.
        wrapped: the drop-in wraps the model. Only its own calls count as forward passes, as for torch's class.
    """

    model: torch.nn.Module
    params: Sequence[tuple[str, torch.nn.Parameter]]
    optimizers: Sequence[torch.optim.Optimizer]
    group: Any
    rank: int
    ranks: list[int]
    timeout_s: float
    wire_dtype: str | None = None
    ignored: frozenset[str] = frozenset()
    finds_unused: bool = True
    wrapped: bool = False

    @property
    def world(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """Of this process in torch's default group, for messages and the names of files."""
        return self.ranks[self.rank]

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return self.params[0][1].device

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The gradients of the trained parameters as they travel, which profiles and plans describe."""
        return tuple(spec_of(name, param).on_wire(self.wire_dtype) for name, param in self.params)

    def dtype_on_wire(self, param: torch.nn.Parameter) -> torch.dtype:
        """The dtype in which the gradient of `param` travels."""
        dtype = self.wire_dtype if param.dtype is torch.float32 and self.wire_dtype is not None else dtype_name(param)
        found: torch.dtype = getattr(torch, dtype)
        return found

    @property
    def measured_dtype(self) -> torch.dtype:
        """The dtype in which most bytes travel, for which a network is measured."""
        travelling: Counter[str] = Counter()
        for spec in self.specs:
            travelling[spec.dtype] += spec.size_bytes
        found: torch.dtype = getattr(torch, travelling.most_common(1)[0][0])
        return found

    @property
    def described_tensors(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, dtype and shape of each trained parameter."""
        return tuple((name, str(param.dtype), tuple(param.shape)) for name, param in self.params)

    @property
    def described_buffers(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, dtype and shape of each buffer that is kept equal to rank 0's."""
        return tuple((name, str(buffer.dtype), tuple(buffer.shape)) for name, buffer in self.buffers)

    @property
    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Names and buffers of the model that are kept equal to rank 0's."""
        return list(synchronised_buffers(self.model, self.ignored))

    @property
    def synchronised(self) -> list[torch.Tensor]:
        """The parameters and buffers of the model that become rank 0's at attach."""
        return synchronised_tensors(self.model, self.ignored)
