"""Training loops that change which parameters a model has, or where, after DistributedDataParallel wrapped it.

Torch's class sums what was trained when it wrapped the model, by tensor: under whatever name it goes later, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradlane
from tests.live.cases import differences
from tests.live.ddp import OPTIONS, close, train_step
from tests.live.loops import Mlp, bits, log_lines, momentum
from tests.live.networks import slow_network

Wrap = Callable[..., Any]
STEPS = 6
"""Of one optimizer: the drop-in attaches after the first of them, and defers updates of the later ones."""


class Layers(nn.Module):
    """Layers of one size, which may change places, and a head."""

    batch = staticmethod(Mlp.batch)

    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(12, 12)) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layer() for _ in range(3)), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: torch.Tensor = self.head(x)
        return found

    def swap(self, one: int, other: int) -> None:
        """Let two layers change places."""
        self.layers[one], self.layers[other] = self.layers[other], self.layers[one]


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12).requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found

    def merged(self) -> nn.Linear:
        """The layer alone, trained from now on, with what the adapter has learned."""
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight
        return self.base.requires_grad_(True)


def _train(call: Any, model: Any, optimizer: Any, generator: torch.Generator) -> None:
    for _ in range(STEPS):
        train_step(call, model, optimizer, generator)


def _train_while_layers_change_places(wrapper: Any, model: Layers, other: int, generator: torch.Generator) -> Layers:
    """The first and another one do, under one optimizer. A new one follows, for which the drop-in attaches anew."""
    optimizer = momentum(model)
    _train(wrapper, model, optimizer, generator)
    model.swap(0, other)
    _train(wrapper, model, optimizer, generator)
    _train(wrapper, model, momentum(model), generator)
    return model


def added_under_one_optimizer(rank: int, world: int, wrapped: bool) -> list[str]:
    """What is logged where a layer comes into a model that is trained, and into its optimizer."""
    torch.manual_seed(7)
    model = Layers()
    optimizer = momentum(model)
    generator = torch.Generator().manual_seed(rank)
    with log_lines() as lines:
        if wrapped:
            call: Any = gradlane.DistributedDataParallel(model, options=OPTIONS)
            _train(call, model, optimizer, generator)
        else:
            call = model
            session = gradlane.attach(model, optimizer, **OPTIONS)
            _train(call, model, optimizer, generator)
        model.layers.append(nn.Linear(12, 12))
        optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
        _train(call, model, optimizer, generator)
        close(call) if wrapped else session.close()
    return lines


def _train_and_merge(model: Layers, wrap: Wrap, generator: torch.Generator) -> Layers:
    wrapper = wrap(model, find_unused_parameters=True)
    _train(wrapper, model, momentum(model), generator)
    model.layers = nn.ModuleList(layer.merged() for layer in model.layers)
    _train(wrapper, model, momentum(model), generator)
    return model


def a_frozen_layer_changes_places(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    model = Layers()
    model.layers[0].requires_grad_(False)
    return _train_while_layers_change_places(wrap(model), model, 1, generator)


def a_layer_that_is_ignored_changes_places(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    model = Layers()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["layers.0.weight", "layers.0.bias"])
    return _train_while_layers_change_places(wrap(model), model, 2, generator)


def a_layer_that_was_frozen_gets_a_parametrization(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    """So that its weight has another name, and then is trained."""
    model = Layers()
    model.layers[0].requires_grad_(False)
    wrapper = wrap(model, find_unused_parameters=True)
    _train(wrapper, model, momentum(model), generator)
    nn.utils.parametrize.register_parametrization(model.layers[0], "weight", nn.Tanh())
    model.layers[0].requires_grad_(True)
    _train(wrapper, model, momentum(model), generator)
    return model


def adapters_are_merged(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    """Under the old wrapper."""
    return _train_and_merge(Layers(Adapted), wrap, generator)


def adapters_are_merged_into_a_model_of_its_own(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    """While the wrapper of the adapters is there."""
    model = Layers(Adapted)
    model.head.requires_grad_(False)
    adapters = wrap(model)
    _train(adapters, model, momentum(model), generator)
    merged = Layers()
    merged.layers, merged.head = nn.ModuleList(layer.merged() for layer in model.layers), model.head.requires_grad_(True)
    wrapper = wrap(merged)
    _train(wrapper, merged, momentum(merged), generator)
    return merged


def all_that_was_trained_has_gone(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    """The adapters, under the old wrapper: nothing is left that it would sum."""
    model = Layers(Adapted)
    model.head.requires_grad_(False)
    return _train_and_merge(model, wrap, generator)


def a_layer_is_added(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    model = Layers()
    wrapper = wrap(model)
    _train(wrapper, model, momentum(model), generator)
    model.layers.append(nn.Linear(12, 12))
    _train(wrapper, model, momentum(model), generator)
    return model


def a_layer_is_added_to_the_optimizer(wrap: Wrap, generator: torch.Generator) -> nn.Module:
    model = Layers()
    wrapper, optimizer = wrap(model), momentum(model)
    _train(wrapper, model, optimizer, generator)
    model.layers.append(nn.Linear(12, 12))
    optimizer.add_param_group({"params": model.layers[-1].parameters()})
    _train(wrapper, model, optimizer, generator)
    return model


LOOPS = {
    each.__name__: each
    for each in (
        a_frozen_layer_changes_places,
        a_layer_that_is_ignored_changes_places,
        a_layer_that_was_frozen_gets_a_parametrization,
        adapters_are_merged,
        adapters_are_merged_into_a_model_of_its_own,
        all_that_was_trained_has_gone,
        a_layer_is_added,
        a_layer_is_added_to_the_optimizer,
    )
}


def compare(rank: int, world: int, name: str, verify: bool) -> tuple[list[str], list[str]]:
    """What differs from torch's class after the loop of that name, and what was logged but for who reads gradients."""
    verified = gradlane.VerifyOptions(first=0, every=1) if verify else False
    options = {**OPTIONS, "verify": verified}

    def trained(wrap: Wrap) -> Any:
        torch.manual_seed(7)
        return bits(LOOPS[name](wrap, torch.Generator().manual_seed(1000 + rank)), None)

    def wrap(model: nn.Module, **kwargs: Any) -> gradlane.DistributedDataParallel:
        wrappers.append(gradlane.DistributedDataParallel(model, options=options, **kwargs))
        return wrappers[-1]

    reference, wrappers = trained(TorchDDP), []
    with log_lines() as lines, slow_network():
        found = trained(wrap)
        for wrapper in wrappers:
            close(wrapper)
    return differences(reference, found), [line for line in lines if "reads gradients" not in line]
