"""The demonstration job: a convolutional network on scikit-learn's images of handwritten digits.

Real data and a real loop, tuned for no policy. The 8x8 images are upscaled to 32x32, so that a step
computes long enough to hide communication.
"""

from __future__ import annotations

import torch
from torch import nn

SIDE = 32


class DigitsNet(nn.Sequential):
    """VGG-like, 2.2 M parameters: most computation in the first layers, most parameters in the
    last.
    """

    def __init__(self) -> None:
        super().__init__(
            *_block(1, 24),
            *_block(24, 48),
            nn.MaxPool2d(2),
            *_block(48, 96),
            *_block(96, 96),
            nn.MaxPool2d(2),
            *_block(96, 192),
            *_block(192, 192),
            nn.MaxPool2d(2),
            *_block(192, 256),
            *_block(256, 256),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256 * 4, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


class Digits:
    """Batches of one rank's share of the digits, in an order by seed and rank."""

    def __init__(self, rank: int, world: int, batch_size: int, seed: int = 0) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images[rank::world], dtype=torch.float32, device="cpu").unsqueeze(1) / 16
        self._images = nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        self._labels = torch.tensor(digits.target[rank::world], device="cpu")
        self._order = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        self._batch_size = batch_size

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(self._labels), (self._batch_size,), generator=self._order)
        return self._images[chosen], self._labels[chosen]
