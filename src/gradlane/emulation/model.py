"""Emulated: a torch module with a profile's parameters and times, on an emulated `Device`.

To hooks, DDP, `gradlane.attach`, optimizers and backends it is an ordinary model with real
parameters and gradients. Only its arithmetic is missing, so that two cores hold many devices.

    model = gradlane.lab.emulated(gradlane.zoo.profile("resnet50"), scale=0.1)
    loss = model()          # each layer uses its parameters, then takes its time
    loss.backward()         # each gradient is ready at its `ready_ns`

All elements of a tensor's gradient have one value: a small multiple of 1/64 by rank, iteration and
tensor (`coefficient`), times the gradient that backward was called with. Sums of these over up to
eight ranks are exact in every dtype and in any order. Writing a gradient costs the processor time
(8 ms for 100 MB), within the layer's time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradlane.core.fields import need, need_int
from gradlane.core.profile import DTYPE_BYTES, Profile
from gradlane.emulation.device import Clock, Device
from gradlane.errors import InputError
from gradlane.units import format_bytes, format_ns

SCALE_VARIABLE = "GRADLANE_LAB_SCALE"
COMPUTE_VARIABLE = "GRADLANE_LAB_COMPUTE_PERCENT"

_MULTIPLES = 61  # of 1/64, from -30 to 30; prime, so that neighbouring ranks, iterations and tensors differ


def coefficient(rank: int, iteration: int, tensor: int) -> float:
    """The value of a gradient's elements.

    Args:
        rank: the rank.
        iteration: the backward pass, counted from 0.
        tensor: the tensor's index in the profile.
    """
    return ((7 * rank + 11 * iteration + 13 * tensor) % _MULTIPLES - _MULTIPLES // 2) / 64


class Emulated(nn.Module):
    """The model of `profile`.

    A layer whose parameters have changed since its last forward pass first takes its `update_ns`,
    whatever updated them. The profile's uncovered time comes first in a forward pass with gradients.
    A live profile of this model therefore has both inside its forward times. The processor time of
    the optimizer is not added: it delays the device only if it lasts longer than the device's work
    (`device.py`).

    Args:
        profile: the profile to emulate.
        scale: of the bytes; None: the lab's (`LabSpec.scale`), 1 outside a lab.
        compute_percent: of the profile's times; None: the lab's for this host, 100 outside.
        rank: whose gradients to produce; None: torch.distributed's rank.
        clock: None: the real one.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        scale: float | None = None,
        compute_percent: int | None = None,
        rank: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self.scale = _variable(os.environ, SCALE_VARIABLE, 1.0) if scale is None else scale
        percent = round(_variable(os.environ, COMPUTE_VARIABLE, 100)) if compute_percent is None else compute_percent
        need_int("compute_percent", percent, 1, 1_000_000)
        self.compute_percent = percent
        self.profile = profile.scaled(self.scale)
        self._rank = rank
        self._device = Device(clock)
        self._iteration = -1
        self._gradients = [_empty(spec.size_bytes, spec.dtype) for spec in self.profile.specs]
        params: list[nn.Parameter | None] = [None] * len(self.profile.tensors)
        # define parameters in reverse order of readiness, as DDP makes its first buckets from the
        # reverse of definition
        for tensor in reversed(range(len(params))):
            params[tensor] = _define(self, self.profile.specs[tensor].name, torch.zeros_like(self._gradients[tensor]))
        self._params = [param for param in params if param is not None]
        self._layers = [
            [tensor for tensor in reversed(range(len(params))) if self.profile.tensors[tensor].layer == layer]
            for layer in range(len(self.profile.layers))
        ]
        self._seen_changes = [self._changes(tensors) for tensors in self._layers]

    def __repr__(self) -> str:
        """One line, where torch would print a tree of empty modules."""
        profile = self.profile
        scaled = "" if self.scale == 1 else f" (sizes x {self.scale:g}: true on links of {self.scale:g} of the rate)"
        size, forward_ns = format_bytes(profile.size_bytes), self._took(profile.forward_ns)
        return (
            f"{profile.model} on {profile.device}, emulated: {len(profile.tensors)} tensors, {size}{scaled}; "
            f"forward {format_ns(forward_ns)}, backward {format_ns(self._took(profile.backward_ns))}"
        )

    def forward(self, *_: Any) -> torch.Tensor:
        """Run the forward pass; ignores its arguments and returns a scalar to call `backward` on."""
        # requires grad, so that the backward pass has a last node, which takes the time after the
        # last gradient
        origin = torch.zeros((), requires_grad=torch.is_grad_enabled(), device="cpu")
        chained: torch.Tensor = _End.apply(origin, self)  # type: ignore[no-untyped-call]
        unused = set(range(len(self._params)))
        last = len(self._params) - 1  # the first gradient that backward makes ready is the last of the chain
        self._device.begin_pass()
        if torch.is_grad_enabled():
            self._device.run(self._took(self.profile.uncovered_ns))
        for layer, tensors in enumerate(self._layers):
            for tensor in tensors:
                self._params[tensor].detach()  # if this parameter's update is pending, this line waits for it
                unused.discard(tensor)
            while last >= 0 and last not in unused:
                chained = _Gradient.apply(chained, self._params[last], self, last)  # type: ignore[no-untyped-call]
                last -= 1
            changes = self._changes(tensors)
            changed = changes != self._seen_changes[layer]
            self._seen_changes[layer] = changes
            work = self.profile.layers[layer]
            self._device.run(self._took(work.forward_ns + (work.update_ns if changed else 0)))
        self._device.end_pass()
        return chained

    # -- what the nodes of the graph call, in order --------------------------------------------------------------

    def _produce(self, tensor: int, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of `tensor`, once the device has it."""
        if tensor == 0:
            self._iteration += 1
        # if .grad holds an accumulated gradient, that is in our buffer, and the next one needs
        # memory of its own
        is_free = self._params[tensor].grad is None
        gradient = self._gradients[tensor].detach() if is_free else torch.empty_like(self._gradients[tensor])
        gradient.fill_(float(weight) * coefficient(self._own_rank(), self._iteration, tensor))
        before_ns = self.profile.tensors[tensor - 1].ready_ns if tensor else 0
        self._device.run(self._took(self.profile.tensors[tensor].ready_ns) - self._took(before_ns))
        # a tensor that nobody has written yet, as autograd's own are: a gradient that was written to
        # in memory that somebody holds is taken for the script's
        return gradient.data

    def _end_backward(self) -> None:
        self._device.run(self._took(self.profile.backward_ns) - self._took(self.profile.tensors[-1].ready_ns))
        self._device.end_pass()

    # -- small things ----------------------------------------------------------------------------------------------

    def _took(self, time_ns: int) -> int:
        return time_ns * self.compute_percent // 100

    def _changes(self, tensors: list[int]) -> int:
        return sum(self._params[tensor]._version for tensor in tensors)

    def _own_rank(self) -> int:
        if self._rank is None:
            self._rank = dist.get_rank() if dist.is_initialized() else 0
        return self._rank


class _Gradient(torch.autograd.Function):
    """Identity in forward; in backward, the time at which one parameter's gradient is ready."""

    @staticmethod
    def forward(ctx: Any, chained: torch.Tensor, param: torch.Tensor, model: Emulated, tensor: int) -> torch.Tensor:
        ctx.model, ctx.tensor = model, tensor
        return chained.view_as(chained)

    @staticmethod
    def backward(ctx: Any, weight: torch.Tensor) -> Any:
        # a new view each time, so that autograd takes it over without a copy
        return weight, ctx.model._produce(ctx.tensor, weight), None, None


class _End(torch.autograd.Function):
    """Identity in forward; in backward, the end of the pass."""

    @staticmethod
    def forward(ctx: Any, chained: torch.Tensor, model: Emulated) -> torch.Tensor:
        ctx.model = model
        return chained.view_as(chained)

    @staticmethod
    def backward(ctx: Any, weight: torch.Tensor) -> Any:
        ctx.model._end_backward()
        return None, None


def _empty(size_bytes: int, dtype: str) -> torch.Tensor:
    return torch.zeros(size_bytes // DTYPE_BYTES[dtype], dtype=getattr(torch, dtype), device="cpu")


def _define(model: nn.Module, name: str, values: torch.Tensor) -> nn.Parameter:
    """A parameter whose name in `model.named_parameters()` is `name`, dots and all."""
    *path, last = name.split(".")
    try:
        for part in path:
            inner = model._modules.get(part)
            if inner is None:
                inner = nn.Module()
                model.add_module(part, inner)
            model = inner
        param = nn.Parameter(values)
        model.register_parameter(last, param)
    except KeyError as error:
        raise InputError(f"tensor name: got {name!r}, which torch refuses for a parameter ({error.args[0]})") from error
    return param


def _variable(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    need(0 < value < float("inf"), name, text, "a number above 0")
    return value
