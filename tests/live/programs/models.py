"""Models and optimizers of programs: a few kilobytes each, with what makes models differ to whoever trains them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

Batch = tuple[torch.Tensor, torch.Tensor]
UNUSED = {"find_unused_parameters": True}
WIDTH, CLASSES = 24, 5


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cpu")


def _labels(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(CLASSES, (6,), generator=generator, device="cpu")


def vectors(generator: torch.Generator) -> Batch:
    return _drawn((6, WIDTH), generator), _labels(generator)


def images(generator: torch.Generator) -> Batch:
    return _drawn((6, 1, 6, 6), generator), _labels(generator)


def tokens(generator: torch.Generator) -> Batch:
    drawn = torch.randint(20, (3, 7), generator=generator, device="cpu")
    return drawn[:, :-1], drawn[:, 1:]


def dtype_of(model: nn.Module) -> torch.dtype:
    """What inputs have to be of: the model may have been cast for a while."""
    return next(model.parameters()).dtype


class Mlp(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(WIDTH, 30), (30, 40), (40, 30), (30, CLASSES)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Branches(nn.Module):
    """A trunk, and two branches of which any may be left out."""

    parts = ("left", "right")

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 30)
        self.left = nn.Linear(30, 30)
        self.right = nn.Linear(30, 30)
        self.head = nn.Linear(30, CLASSES)
        self.taken: tuple[str, ...] = self.parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        for name in self.taken:
            x = x + torch.tanh(getattr(self, name)(x))
        return self.head(x)


class Heads(nn.Module):
    """Two tasks with a head and a scalar gate each; the output has the heads that were asked for."""

    parts = ("first", "second")

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(30, CLASSES) for name in self.parts})
        self.gates = nn.ParameterDict({name: nn.Parameter(torch.tensor(1.0)) for name in self.parts})
        self.taken: tuple[str, ...] = self.parts

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.trunk(x)
        return {name: self.heads[name](x) * self.gates[name] for name in self.taken}


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, and Dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(48, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


class ChannelsLast(Convolutions):
    """With weights in channels-last order from the start. (DDP sums wrongly where that is changed later.)"""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)


class Attention(nn.Module):
    """Tied input and output embedding, MultiheadAttention, a position embedding that no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(6, 16) * 0.02)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x) + self.position)).transpose(1, 2)


class Buffers(nn.Module):
    """Buffers that the forward pass writes: a running mean that is used, a count, and a mask that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40), nn.Linear(40, CLASSES)
        self.register_buffer("mean", torch.zeros(40))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(40, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
            self.count += 1
            self.mask[int(self.count) % 40] = False
        return self.second((x - self.mean) * (self.mask + 0.5).to(x.dtype))


class Checkpoints(Mlp):
    """The two middle layers are computed again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return self.layers[-1](x)


class Mixed(nn.Module):
    """A part in float64 and a part in float32, one layer used twice, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(WIDTH, 30, dtype=torch.float64)
        self.again = nn.Linear(30, 30)
        self.last = nn.Linear(30, CLASSES)
        self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.fine(x.to(self.fine.weight.dtype))).to(self.again.weight.dtype)
        return self.last(torch.tanh(self.again(torch.tanh(self.again(x)))))


class Frozen(Mlp):
    """The second layer is frozen from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class Spare(Mlp):
    """With a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(10, 10)


class NormedBranches(Branches):
    """Branches with BatchNorm each, which counts the passes that a branch takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30))
        self.right = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30, momentum=None))


class Odd(nn.Module):
    """A parameter without elements, one without dimensions, and a layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 30)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.coarse = nn.Linear(30, 30, dtype=torch.bfloat16)
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Linear(30, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + self.empty.sum()
        x = torch.tanh(self.coarse(x.to(self.coarse.weight.dtype))).to(self.first.weight.dtype)
        return self.last(x * self.factor)


class Recurrent(nn.Module):
    """LSTM, whose weights torch may put into one piece of memory, and a GRU that shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 12, num_layers=2, dropout=0.1, batch_first=True)
        self.gru = nn.GRU(16, 12, batch_first=True)
        self.head = nn.Linear(24, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        return self.head(torch.cat([self.lstm(x)[0], self.gru(x)[0]], -1)).transpose(1, 2)


class Parametrized(nn.Module):
    """Weights that are computed from parameters: by weight norm, by spectral norm (which changes its buffers), by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, 30))
        self.second = parametrizations.spectral_norm(nn.Linear(30, 30))
        self.third = prune.ln_structured(nn.Linear(30, CLASSES), "weight", amount=0.3, n=2, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Renormed(nn.Module):
    """An embedding that shortens its rows in the forward pass, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, max_norm=0.5)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(x)))).transpose(1, 2)


class Scripted(Mlp):
    """Layers that TorchScript has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(torch.jit.script(layer) for layer in self.layers)


class OwnFunction(torch.autograd.Function):
    """A linear layer whose backward pass computes the gradient of its weight, and keeps what it returned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope @ weight, slope.t() @ x


class Written(nn.Module):
    """A layer by a Function of the model's own, one whose weight is cast in the forward pass, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(30, WIDTH) * 0.1)
        self.second = nn.Linear(30, 30)
        self.norm = nn.LayerNorm(30)
        self.heads = nn.ParameterList(nn.Parameter(torch.randn(30, CLASSES) * 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.tanh(OwnFunction.apply(x, self.first))
        x = F.linear(x.double(), self.second.weight.double(), self.second.bias.double()).to(x.dtype)
        x = torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=True) + x
        return {str(index): x @ head for index, head in enumerate(self.heads)}


class Towers(nn.Module):
    """Two models in one loop, each with a wrapper or a session of its own, as a generator and its critic have. Where the second
    alone is taken, the first computes without gradients.
    """

    parts = ("left", "right")

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, CLASSES))
        self.takes = {"parts": self.parts}  # which the form of it that has wrappers in it shares

    @property
    def taken(self) -> tuple[str, ...]:
        return self.takes["parts"]

    @taken.setter
    def taken(self, parts: tuple[str, ...]) -> None:
        self.takes["parts"] = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if "left" in self.taken else torch.no_grad():
            x = self.left(x)
        return self.right(x) if "right" in self.taken else x[:, :CLASSES]


class NormedTowers(Towers):
    """Towers with BatchNorm each."""

    def __init__(self) -> None:
        super().__init__()
        self.left.append(nn.BatchNorm1d(30))
        self.right.insert(1, nn.BatchNorm1d(40))


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch] = vectors
    parts: tuple[str, ...] = ()
    ddp: dict[str, Any] = field(default_factory=dict)
    must_take: bool = False  # at least one of the parts
    are_models: bool = False  # the parts, each with a wrapper or session of its own; all ranks take the same


MODELS = {
    "mlp": Model(Mlp),
    "branches": Model(Branches, parts=Branches.parts, ddp=UNUSED),
    "heads": Model(Heads, parts=Heads.parts, ddp=UNUSED, must_take=True),
    "convolutions": Model(Convolutions, images),
    "channels_last": Model(ChannelsLast, images),
    "attention": Model(Attention, tokens),
    "buffers": Model(Buffers),
    "checkpoints": Model(Checkpoints),
    "mixed": Model(Mixed),
    "frozen": Model(Frozen),
    "spare": Model(Spare, ddp=UNUSED),
    "normed_branches": Model(NormedBranches, parts=Branches.parts, ddp=UNUSED),
    "static": Model(Attention, tokens, ddp={"static_graph": True}),
    "static_convolutions": Model(Convolutions, images, ddp={"static_graph": True}),
    "convolutions_of_unequal_buffers": Model(Convolutions, images, ddp={"broadcast_buffers": False}),
    "odd": Model(Odd),
    "recurrent": Model(Recurrent, tokens),
    "parametrized": Model(Parametrized),
    "renormed": Model(Renormed, tokens),
    "scripted": Model(Scripted),
    "written": Model(Written),
    "towers": Model(Towers, parts=Towers.parts, must_take=True, are_models=True),
    "normed_towers": Model(NormedTowers, parts=Towers.parts, must_take=True, are_models=True),
}


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The sum over tasks where there are several."""
    outputs = output.values() if isinstance(output, dict) else [output]
    return torch.stack([_loss(one.to(torch.promote_types(one.dtype, torch.float32)), target) for one in outputs]).sum()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.dim() > 2:  # over positions, CUDA adds losses in no order
        output, target = output.transpose(1, 2).flatten(0, 1), target.flatten()
    return F.cross_entropy(output, target)


# -- optimizers --------------------------------------------------------------------------------------------

Optimizers = list[torch.optim.Optimizer]


def one(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Optimizers]:
    return lambda model: [kind((param for param in model.parameters() if param.requires_grad), **options)]


def _halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = [param for param in model.parameters() if param.requires_grad]
    return params[: len(params) // 2], params[len(params) // 2 :]


def two_groups(model: nn.Module) -> Optimizers:
    first, second = _halves(model)
    groups = [{"params": first}, {"params": second, "lr": 0.02, "weight_decay": 0.1}]
    return [torch.optim.AdamW(groups, lr=0.005)]


def two_optimizers(model: nn.Module) -> Optimizers:
    first, second = _halves(model)
    return [torch.optim.SGD(first, lr=0.05, momentum=0.5), torch.optim.Adam(second, lr=0.005)]


def two_by_sgd(model: nn.Module) -> Optimizers:
    first, second = _halves(model)
    return [torch.optim.SGD(first, lr=0.05, momentum=0.5), torch.optim.SGD(second, lr=0.02, weight_decay=0.1)]


def part_of_the_model(model: nn.Module) -> Optimizers:
    """The rest of the parameters may be added as a group."""
    return [torch.optim.SGD(_halves(model)[0], lr=0.05, momentum=0.9)]


class OwnSgd(torch.optim.Optimizer):
    """One that gradlane does not know: it depends on the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                norm = torch.stack([param.grad.double().norm() for param in params]).norm() + 1e-6
                for param in params:
                    param.add_(param.grad / norm.to(param.dtype), alpha=-group["lr"])


class KeepingSgd(torch.optim.SGD):
    """One that keeps the gradients of its last step."""

    def step(self, closure: Any = None) -> Any:
        self.last = [param.grad for group in self.param_groups for param in group["params"]]
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "sgd": one(torch.optim.SGD, lr=0.05),
    "momentum": one(torch.optim.SGD, lr=0.05, momentum=0.9),
    "nesterov": one(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "adam": one(torch.optim.Adam, lr=0.005),
    "adam_single": one(torch.optim.Adam, lr=0.005, foreach=False, amsgrad=True),
    "adam_fused": one(torch.optim.Adam, lr=0.005, fused=True),
    "adam_tensor_lr": lambda model: one(torch.optim.Adam, lr=torch.tensor(0.005), foreach=False)(model),
    "adamw": one(torch.optim.AdamW, lr=0.005, foreach=True),
    "rmsprop": one(torch.optim.RMSprop, lr=0.002, momentum=0.5),
    "adagrad": one(torch.optim.Adagrad, lr=0.02),
    "adafactor": one(torch.optim.Adafactor, lr=0.02),
    "asgd": one(torch.optim.ASGD, lr=0.05),
    "rprop": one(torch.optim.Rprop, lr=0.002),
    "nadam": one(torch.optim.NAdam, lr=0.005),
    "radam": one(torch.optim.RAdam, lr=0.005),
    "adadelta": one(torch.optim.Adadelta, lr=0.5),
    "adamax": one(torch.optim.Adamax, lr=0.005),
    "maximizing": one(torch.optim.SGD, lr=0.005, momentum=0.9, maximize=True),
    "groups": two_groups,
    "two": two_optimizers,
    "part": part_of_the_model,
    "own": one(OwnSgd),
    "keeping": one(KeepingSgd, lr=0.05),
}

TAKES_ROOTS = ("adam", "adam_fused", "adam_tensor_lr", "adamw", "groups", "two")
"""Of those that servers know, whose updates a server rounds otherwise than torch."""
SERVED = {
    **{name: OPTIMIZERS[name] for name in ("sgd", "momentum", "nesterov", "maximizing")},
    "two_by_sgd": two_by_sgd,
    **{name: OPTIMIZERS[name] for name in TAKES_ROOTS},
}
"""Those whose update servers can do."""
