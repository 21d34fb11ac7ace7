"""A LightningModule and its Trainer, as they are without gradlane.

gradlane launch --ddp --nproc 2 examples/trainers/lightning_training.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, step):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        if step % 20 == 0 and self.global_rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    images = torch.randn(41 * 64, 64)
    labels = (images @ torch.randn(64, 10)).argmax(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(images, labels), batch_size=32))
