"""A loop with Lightning Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.live.scripts.trainers.job import BATCH, OPTIONS, STEPS, Examples, main, net


def strategy_of(arm: str) -> Any:
    if arm == "integration":
        from gradlane.integrations.lightning import FabricDDPStrategy

        return FabricDDPStrategy(options=OPTIONS)
    return "ddp"


def train(arm: str, case: str, folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    passes = 2 if case == "accumulation" else 1
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy_of(arm))
    fabric.launch()
    data = fabric.setup_dataloaders(DataLoader(Examples(STEPS * passes), batch_size=BATCH))

    def prepared() -> tuple[Any, Any]:
        model = net()
        return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = prepared()
    for at, batch in enumerate(data):
        if case == "resuming" and at == STEPS // 2 + 2:
            fabric.save(folder / "half.ckpt", {"model": model, "optimizer": optimizer})
            model, optimizer = prepared()
            fabric.load(folder / "half.ckpt", {"model": model, "optimizer": optimizer})
        summed = at % passes == passes - 1
        with fabric.no_backward_sync(model, enabled=not summed):
            fabric.backward(F.cross_entropy(model(batch["x"]), batch["labels"]))
        if summed:
            if case == "clipping":
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    return model.module, optimizer.optimizer


if __name__ == "__main__":
    main(train)
