"""A loop with accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.live.scripts.trainers.job import BATCH, OPTIONS, STEPS, Examples, main, net


def accelerator_of(arm: str, **options: Any) -> accelerate.Accelerator:
    if arm == "integration":
        from gradlane.integrations.accelerate import Accelerator

        return Accelerator(cpu=True, options=OPTIONS, **options)
    return accelerate.Accelerator(cpu=True, **options)


def train(arm: str, case: str, folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    passes = 2 if case in ("accumulation", "triggered") else 1
    accelerator = accelerator_of(arm, gradient_accumulation_steps=2 if case == "accumulation" else 1)
    data = DataLoader(Examples(STEPS * passes), batch_size=BATCH)

    def prepared() -> tuple[Any, Any, Any, Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return accelerator.prepare(model, optimizer, schedule, data)

    model, optimizer, schedule, batches = prepared()
    for at, batch in enumerate(batches):
        if case == "resuming" and at == STEPS // 2 + 2:
            accelerator.save_state(str(folder))
            accelerator.free_memory()
            model, optimizer, schedule, _ = prepared()
            accelerator.load_state(str(folder))
        if case == "triggered" and at % 2 == 0:
            with accelerator.no_sync(model):
                losses = [F.cross_entropy(model(batch["x"]), batch["labels"])]
                continue
        if case == "triggered":
            with accelerator.no_sync(model):
                losses.append(F.cross_entropy(model(batch["x"]), batch["labels"]))
            accelerator.backward(losses[0])
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(losses[1])
            optimizer.step()
            optimizer.zero_grad()
            continue
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(batch["x"]), batch["labels"]))
            if case == "clipping" and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model), optimizer


if __name__ == "__main__":
    main(train)
