"""A Trainer of Lightning of your own, with a run folder; it goes on after its time limit.

Added lines are marked "hpctrain".

sbatch launch/apptainer_ddp.sh examples/lightning/train.py
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hpctrain  # hpctrain
from hpctrain.lightning import RunFolder, WorldEnvironment  # hpctrain


class Points(Dataset):
    """Random points [8], with noise that is new in each epoch, and the sum of their values."""

    points = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index] + 0.1 * torch.randn(8), self.points[index].sum(0, keepdim=True)


class Regression(LightningModule):
    """A small network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over a batch."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(world: hpctrain.World) -> None:  # hpctrain: world
    """Train."""
    seed_everything(1)
    loader = DataLoader(Points(), batch_size=16, shuffle=True)
    folder = RunFolder("runs/lightning-" + os.environ.get("HPCTRAIN_JOB", "mine"))  # hpctrain
    # hpctrain
    ranks = {"devices": world.local_size, "num_nodes": world.nodes, "plugins": [WorldEnvironment(world)]}
    trainer = Trainer(max_epochs=3, callbacks=[folder], **ranks)  # hpctrain: callbacks, ranks
    trainer.fit(Regression(), loader, ckpt_path=folder.ckpt_path)  # hpctrain: ckpt_path


if __name__ == "__main__":
    hpctrain.main(main)  # hpctrain: errors in one line, and no abort at the end on CPUs
