"""Small models with the traps in them, by name."""

from __future__ import annotations

import torch
from torch import nn


class Convolutions(nn.Module):
    """A CNN with BatchNorm: buffers, channels-last weights would be legal, a wide last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)


class TiedTransformer(nn.Module):
    """Tied input and output embedding, MultiheadAttention, a learned position embedding used by no module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(12, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x) + self.position)).transpose(1, 2)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(50, (4, 13), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


MODELS = {"convolutions": Convolutions, "tied-transformer": TiedTransformer}

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


class Turnable(nn.Module):
    """Layers of one shape that run in their order, or in the opposite one. (16, 128) -> (16, 128)"""

    LAYERS, SIZE = 6, 128

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.SIZE, self.SIZE) for _ in range(self.LAYERS))
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = torch.tanh(layer(x))
        return x

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(16, self.SIZE, generator=generator), torch.randint(self.SIZE, (16,), generator=generator)
