"""The Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.live.scripts.trainers.job import BATCH, OPTIONS, STEPS, Examples, main, net


def trainer_of(arm: str, **options: Any) -> transformers.Trainer:
    if arm == "integration":
        from gradlane.integrations.transformers import Trainer

        return Trainer(options=OPTIONS, **options)
    return transformers.Trainer(**options)


def train(arm: str, case: str, folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    passes = 2 if case == "accumulation" else 1
    half = STEPS // 2 + 2

    def trainer() -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=passes,
            max_grad_norm=0.1 if case == "clipping" else 0.0,
            learning_rate=1e-2,
            save_strategy="steps" if case == "resuming" else "no",
            save_steps=half,
            report_to="none",
            disable_tqdm=True,
            logging_steps=5,
        )
        return trainer_of(arm, model=net(), args=arguments, train_dataset=Examples(STEPS * passes))

    first = trainer()
    first.train()
    if case != "resuming":
        return first.model, first.optimizer
    second = trainer()
    second.train(resume_from_checkpoint=str(folder / f"checkpoint-{half}"))
    return second.model, second.optimizer


if __name__ == "__main__":
    main(train)
