"""A user's own script: Lightning with its own detection of the launcher, independent of hpctrain."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layer(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    size, local_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=local_size,
        num_nodes=size // local_size,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=64 // size))
    loss = trainer.callback_metrics["loss"].item()
    print(f"rank {trainer.global_rank} of {trainer.world_size} loss {loss:.6f}", flush=True)
