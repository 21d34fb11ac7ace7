"""The Trainer of Lightning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.live.scripts.trainers.job import BATCH, OPTIONS, STEPS, Examples, main, net


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch["x"]), batch["labels"])  # a call inside of the wrapped model's own
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Manual(Module):
    """Steps in `training_step`, twice: the loop of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, at: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch["x"]), batch["labels"]))
            optimizer.step()


def strategy_of(arm: str) -> Any:
    if arm == "integration":
        from gradlane.integrations.lightning import DDPStrategy

        return DDPStrategy(options=OPTIONS)
    return "ddp"


def train(arm: str, case: str, folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    passes = 2 if case == "accumulation" else 1

    def trainer(steps: int) -> lightning.Trainer:
        return lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy_of(arm),
            max_steps=steps,
            accumulate_grad_batches=passes,
            gradient_clip_val=0.1 if case == "clipping" else None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    data = DataLoader(Examples(STEPS * passes), batch_size=BATCH)
    model = Manual() if case == "manual" else Module()
    if case != "resuming":
        one = trainer(STEPS)
        one.fit(model, data)
        return model, one.optimizers[0]
    half = trainer(STEPS // 2 + 2)
    half.fit(model, data)
    half.save_checkpoint(folder / "half.ckpt")
    model = Module()
    rest = trainer(STEPS)
    rest.fit(model, data, ckpt_path=folder / "half.ckpt", weights_only=False)
    return model, rest.optimizers[0]


if __name__ == "__main__":
    main(train)
