"""The networks that are trained, with random weights and synthetic data that lies on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A layer of a transformer: attention and two products, each with a residual and a norm.

    Args:
        norm_first: as in GPT-2; else as in BERT.
        causal: no position sees those behind it.
    """

    def __init__(self, width: int, heads: int, norm_first: bool, causal: bool) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.norm_first, self.causal = heads, norm_first, causal

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        samples, positions, width = x.shape
        parts = self.qkv(x).view(samples, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(samples, positions, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self._attend(self.attention_norm(x))
            return x + self.down(F.gelu(self.up(self.norm(x))))
        x = self.attention_norm(x + self._attend(x))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    """A transformer whose output is the product with the embedding of its words, as BERT's and GPT-2's.

    Without dropout, so that arms draw no random numbers. (samples, positions) -> (samples * positions, words), or without
    its head, as the zoo counts BERT-Base, (samples, width) of the first position.
    """

    places: torch.Tensor

    def __init__(
        self,
        words: int,
        positions: int,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        causal: bool = False,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.has_head = has_head
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, norm_first=causal, causal=causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("places", torch.arange(positions), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.word(x) + self.position(self.places[: x.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, self.word.weight).flatten(0, 1) if self.has_head else x[:, 0]


@dataclass(frozen=True)
class Workload:
    """A network and what it is trained on.

    Attributes:
        make: makes the network, on the CPU.
        batch: makes a batch of so many samples with a generator, on the CPU.
        probe: batch size of the run that measures computing, from which the batch size is chosen.
        most: largest batch size that two ranks can hold on one device.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    probe: int
    most: int


def _sentences(words: int, positions: int, classes: int) -> Callable[[int, torch.Generator], Batch]:
    def batch(samples: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(words, (samples, positions), generator=generator)
        return tokens, torch.randint(classes, (samples,), generator=generator)

    return batch


def _words(words: int, positions: int) -> Callable[[int, torch.Generator], Batch]:
    def batch(samples: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(words, (samples, positions + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    return batch


def _images(side: int, classes: int) -> Callable[[int, torch.Generator], Batch]:
    def batch(samples: int, generator: torch.Generator) -> Batch:
        images = torch.randn(samples, 3, side, side, generator=generator)
        return images, torch.randint(classes, (samples,), generator=generator)

    return batch


def _resnet50() -> nn.Module:
    import torchvision

    return torchvision.models.resnet50(weights=None)


WORKLOADS = {
    "resnet50": Workload(_resnet50, _images(224, 1000), 16, 128),
    "bert-base": Workload(lambda: Transformer(30522, 128), _words(30522, 128), 32, 320),
    "gpt2": Workload(lambda: Transformer(50257, 1024, causal=True), _words(50257, 1024), 2, 24),
}

# as the zoo counts them, at its batch
OF_THE_ZOO = {
    "resnet50": WORKLOADS["resnet50"],
    "bert-base": Workload(lambda: Transformer(30522, 128, has_head=False), _sentences(30522, 128, 768), 32, 320),
}


def _tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


# for a dry run on the CPU
TINY = {
    "resnet50": Workload(_tiny, _images(16, 10), 2, 4),
    "bert-base": Workload(lambda: Transformer(100, 16, 32, 2, 2), _words(100, 16), 2, 4),
    "gpt2": Workload(lambda: Transformer(120, 32, 32, 2, 2, causal=True), _words(120, 32), 1, 4),
}


def why_not(name: str, dry: bool) -> str:
    """Why a network cannot be made here; "" if it can."""
    if name == "resnet50" and not dry:
        from importlib.util import find_spec

        if find_spec("torchvision") is None:
            return "torchvision is not installed"
    return ""
