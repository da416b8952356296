"""Cross validation with a Trainer of Lightning, as people write it: three fits, and work after them."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

POINTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


class Sum(LightningModule):
    """It learns the sum of a point; its validation finds no epoch better than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, points: torch.Tensor, _: int) -> torch.Tensor:
        """The mean loss of a batch."""
        return (self.net(points)[:, 0] - points.sum(1)).square().mean()

    def validation_step(self, points: torch.Tensor, _: int) -> None:
        """A loss that rises."""
        self.log("val_loss", float(self.trainer.current_epoch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(fold: int) -> nn.Module:
    """Train on what is not in the fold; the second fold is ended by a callback."""
    module, best = Sum(), ModelCheckpoint(monitor="val_loss")
    callbacks = [best, *([EarlyStopping("val_loss", patience=1)] if fold == 1 else [])]
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(POINTS[torch.arange(24) % 3 != fold], batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(POINTS[fold::3]))
    assert trainer.callback_metrics["val_loss"] == trainer.current_epoch - 1 and best.best_model_score == 0
    return module.net


seed_everything(1)
nets = [train(fold).eval() for fold in range(3)]
answer = sum(net(POINTS).double().sum().item() for net in nets) + torch.rand(1).item()
with Path("after.txt").open("a") as file:
    file.write(f"{answer!r}\n")
sys.stdout.flush()
