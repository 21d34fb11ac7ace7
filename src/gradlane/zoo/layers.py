"""Layers: a network, module by module, with the tensors and the operations of each module.

A `Net` is built in the order of the forward pass. Each module with parameters becomes a `Module`;
modules without (activations, pooling, additions) are further kernels of the one before. Shapes are
per sample. A multiply-accumulate counts as two operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]

# A 3 x 3 convolution of stride 1 takes 16 multiplications for 2 x 2 outputs where 36 are counted
# (Lavin and Gray, "Fast algorithms for convolutional neural networks", F(2x2, 3x3)); cuDNN has it
# since version 5. Its transforms cost as many operations whatever the number of channels on the
# other side, so that few channels gain nothing; 128 agrees best with recorded times of layers.
WINOGRAD = 36 / 16
WINOGRAD_CHANNELS = 128


class Kernel(NamedTuple):
    """What one kernel does for one sample's forward pass.

    Attributes:
        operations: counted.
        moved_elements: what it reads and writes, parameters aside.
        written_elements: its output, which is kept for the backward pass at most.
        reduction: counted operations for each one that is carried out.
    """

    operations: int
    moved_elements: int
    written_elements: int
    reduction: float = 1.0


@dataclass
class Module:
    """A module with parameters: its tensors in order of definition, and the kernels of its forward
    pass with those of the modules without parameters after it.
    """

    name: str
    tensors: list[tuple[str, Shape]]
    kernels: list[Kernel]

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors)

    @property
    def operations(self) -> int:
        return sum(kernel.operations for kernel in self.kernels)


class Net:
    """The modules so far, and the output shape: (channels, height, width) or (positions, width)."""

    def __init__(self, *shape: int) -> None:
        self.shape: Shape = shape
        self.modules: list[Module] = []

    @property
    def channels(self) -> int:
        return self.shape[0]

    def _add(self, name: str, tensors: dict[str, Shape], operations: int, out: Shape, reduction: float = 1.0) -> None:
        kernel = Kernel(operations, math.prod(self.shape) + math.prod(out), math.prod(out), reduction)
        self.modules.append(Module(name, [(f"{name}.{key}", shape) for key, shape in tensors.items()], [kernel]))
        self.shape = out

    def _without_parameters(self, out: Shape, operations: int = 0) -> None:
        if self.modules:
            self.modules[-1].kernels.append(Kernel(operations, math.prod(self.shape) + math.prod(out), math.prod(out)))
        self.shape = out

    # -- images ----------------------------------------------------------------------------------------------

    def conv(
        self,
        name: str,
        out: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        pad: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        above, beside = pad if isinstance(pad, tuple) else (pad, pad)
        rows = (self.shape[1] + 2 * above - high) // stride + 1
        columns = (self.shape[2] + 2 * beside - wide) // stride + 1
        weight = (out, self.channels // groups, high, wide)
        tensors: dict[str, Shape] = {"weight": weight}
        if bias:
            tensors["bias"] = (out,)
        has_winograd = (high, wide, stride, groups) == (3, 3, 1, 1) and min(self.channels, out) >= WINOGRAD_CHANNELS
        self._add(
            name, tensors, 2 * math.prod(weight) * rows * columns, (out, rows, columns), WINOGRAD if has_winograd else 1.0
        )

    def norm(self, name: str, relu: bool = True) -> None:
        """Batch normalisation, followed by a ReLU unless `relu` is False."""
        tensors: dict[str, Shape] = {"weight": (self.channels,), "bias": (self.channels,)}
        self._add(name, tensors, 4 * math.prod(self.shape), self.shape)
        if relu:
            self.relu()

    def relu(self) -> None:
        self._without_parameters(self.shape, math.prod(self.shape))

    def pool(self, kernel: int, stride: int, pad: int = 0, ceil: bool = False) -> None:
        def after(size: int) -> int:
            spare = size + 2 * pad - kernel
            return (-(-spare // stride) if ceil else spare // stride) + 1

        out = (self.channels, after(self.shape[1]), after(self.shape[2]))
        self._without_parameters(out, math.prod(out) * kernel * kernel)

    def average(self, size: int = 1) -> None:
        """Adaptive average pooling to size x size."""
        self._without_parameters((self.channels, size, size), math.prod(self.shape))

    def flatten(self) -> None:
        self.shape = (math.prod(self.shape),)

    def concatenate(self, channels: int, like: Shape) -> None:
        """Concatenate the outputs of branches, which ran one after another."""
        self.shape = (channels, *like[1:])

    # -- vectors and sequences -------------------------------------------------------------------------------

    def linear(self, name: str, out: int, bias: bool = True) -> None:
        """A projection of the last axis, at every position of a sequence."""
        tensors: dict[str, Shape] = {"weight": (out, self.shape[-1])}
        if bias:
            tensors["bias"] = (out,)
        positions = math.prod(self.shape[:-1])
        self._add(name, tensors, 2 * positions * self.shape[-1] * out, (*self.shape[:-1], out))

    def layer_norm(self, name: str, bias: bool = True) -> None:
        width = self.shape[-1]
        tensors: dict[str, Shape] = {"weight": (width,)}
        if bias:
            tensors["bias"] = (width,)
        self._add(name, tensors, 8 * math.prod(self.shape), self.shape)

    def embedding(self, name: str, rows: int, width: int, positions: int) -> None:
        self._add(name, {"weight": (rows, width)}, positions * width, (positions, width))

    def parameter(self, name: str, *shape: int) -> None:
        """A parameter without a module, such as a class token, that is added or prepended."""
        self._add(name, {}, math.prod(shape), self.shape)
        self.modules[-1].tensors.append((name, shape))

    def attend(self, width: int, positions: int, keys: int, causal: bool = False) -> None:
        """Scores, softmax and weighted sum of `positions` queries over `keys`; no projections."""
        operations = 4 * positions * keys * width // (2 if causal else 1)
        self._without_parameters((positions, width), operations)

    def tied_linear(self, out: int) -> None:
        """A projection by another module's parameter."""
        positions = math.prod(self.shape[:-1])
        written = positions * out
        kernel = Kernel(2 * positions * self.shape[-1] * out, math.prod(self.shape) + written, written)
        self.modules[-1].kernels.append(kernel)
