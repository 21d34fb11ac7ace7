"""The Trainer of transformers. gradlane's keeps it from reading the gradients before each step.

gradlane launch --nproc 2 examples/trainers/transformers_training.py
"""

import tempfile

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from gradlane.integrations.transformers import Trainer


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images, labels):
        logits = self.layers(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.3f}")


torch.manual_seed(0)
images = torch.randn(41 * 64, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    use_cpu=True,
    num_train_epochs=1,
    per_device_train_batch_size=32,
    learning_rate=1e-3,
    max_grad_norm=0,
    logging_steps=20,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
data = [{"images": x, "labels": y} for x, y in zip(images, labels, strict=True)]
Trainer(Classifier(), arguments, train_dataset=data, callbacks=[Losses()]).train()
