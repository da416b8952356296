"""MNIST by pytorch_lightning and torchvision, as in the tutorial "Lightning on Neuron"."""

import os

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, random_split
from torchmetrics import Accuracy
from torchvision import transforms
from torchvision.datasets import MNIST


class Digits(pl.LightningDataModule):
    def prepare_data(self) -> None:
        MNIST(".", train=True, download=True)

    def setup(self, stage: str | None = None) -> None:
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
        images = MNIST(".", train=True, transform=transform)
        self.train, self.val = random_split(images, [len(images) - 64, 64])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=16)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=16)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        logits = self.layers(batch[0])
        self.log("loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("accuracy", self.accuracy(logits, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0)
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(accelerator="auto", strategy="ddp", devices=here, num_nodes=ranks // here,
                         max_epochs=1, logger=False, enable_checkpointing=False)  # fmt: skip
    trainer.fit(Classifier(), Digits())
    print(
        f"rank {trainer.global_rank} of {trainer.world_size} loss {trainer.callback_metrics['loss']:.6f}",
        flush=True,
    )
