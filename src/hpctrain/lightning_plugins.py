"""Lightning's Trainer, and what it takes from us: the place in the world, whole checkpoints, the run folder."""

import argparse
import logging
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from hpctrain import checkpoint
from hpctrain.run import Run
from hpctrain.world import HpctrainError, World, all_or_none, main_address


def quiet() -> None:
    """No tips for other products, no lines about hardware that we have said ourselves, no advice to load 4 MB by workers."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # what we log is the same on all ranks already
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 calls a function that torch 2.13 will drop


class WorldEnvironment(ClusterEnvironment):
    """Our World for Lightning, which otherwise guesses: `mpirun` inside a Slurm job is Slurm to it, and every rank is rank 0."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        """A launcher has started the ranks, or there is only one."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 is; asked for only where process_group() has not joined the ranks before."""
        return main_address()[0]

    @property
    def main_port(self) -> int:
        """Its port."""
        return main_address()[1]

    @staticmethod
    def detect() -> bool:
        """Never by itself: it is passed to the Trainer."""
        return False

    def world_size(self) -> int:
        """Ranks of the job."""
        return self._world.size

    def global_rank(self) -> int:
        """This one, from 0."""
        return self._world.rank

    def local_rank(self) -> int:
        """This one on its node, from 0."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """The node, from 0."""
        return self._world.node_rank

    def set_world_size(self, size: int) -> None:
        """The launcher has said it."""

    def set_global_rank(self, rank: int) -> None:
        """The launcher has said it."""


class WholeCheckpoints(CheckpointIO):
    """Lightning's checkpoints by checkpoint.py: complete and verified, or not there; nothing but tensors and plain values read.

    An error of rank 0, which alone writes, is kept for raise_error(), because the others wait for it in a barrier.
    """

    def __init__(self) -> None:
        self._error: HpctrainError | None = None

    def save_checkpoint(self, state: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ANN401
        """Called on rank 0."""
        try:
            checkpoint.save(Path(path), state)
        except HpctrainError as error:
            self._error = error

    def raise_error(self) -> None:
        """What went wrong in writing, if anything."""
        if self._error:
            raise self._error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ANN401
        """Called on every rank."""
        return checkpoint.load(Path(path), torch.device("cpu"))

    def remove_checkpoint(self, path: Any) -> None:  # noqa: ANN401
        """Take a checkpoint away."""
        Path(path).unlink(missing_ok=True)


class RunFolder(Callback):
    """Metrics, progress and checkpoints of a Trainer go into our run folder: the lines of all trainers, and the learning rate.

    `batch_size` is the global one. `bare` gives the module without what Lightning adds; its weights are also in
    each checkpoint as "model", with the names that they have in every other trainer's.
    """

    def __init__(self, run: Run, batch_size: int, bare: Callable[[LightningModule], torch.nn.Module]) -> None:
        self._run, self._batch_size, self._bare = run, batch_size, bare

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """SIGTERM ends this process; Lightning would begin a collective call, and wait in it for ranks that are dead."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin to count."""
        self._steps = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        self._run.start_epoch(trainer.current_epoch + 1, self._steps)
        self._loss_sum, self._since = torch.zeros((), device=module.device), time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Every fifth of an epoch, the loss averaged over its steps and over all ranks."""
        self._loss_sum += outputs["loss"]  # Lightning has divided it by the batches of a step
        step, rest = divmod(batch_idx + 1, trainer.accumulate_grad_batches)
        if rest:
            return
        self._run.step()
        log_every = -(-self._steps // 5)
        if step % log_every == 0:
            mean = trainer.strategy.reduce(self._loss_sum, reduce_op="sum").item() / (log_every * trainer.world_size)
            now = time.perf_counter()
            self._run.metrics(
                epoch=trainer.current_epoch + 1,
                step=trainer.current_epoch * self._steps + step,
                train_loss=mean,
                learning_rate=trainer.optimizers[0].param_groups[0]["lr"],
                examples_per_s=log_every * self._batch_size / (now - self._since),
            )
            self._loss_sum, self._since = torch.zeros((), device=module.device), now

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Take rank 0's buffers of batch normalisation, so that the metrics are of what is saved."""
        self._run.end_epoch()
        if trainer.world_size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """What the module has logged."""
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._run.metrics(epoch=trainer.current_epoch + 1, step=trainer.global_step, **values)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """A checkpoint of Lightning's."""
        trainer.save_checkpoint(checkpoint.path_of(self._run.folder, trainer.current_epoch + 1))
        with all_or_none(self._run.world):
            trainer.strategy.checkpoint_io.raise_error()

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, state: dict[str, Any]) -> None:
        """What the other trainers' checkpoints have, too; the tensors are in the file once, under both names."""
        state["epoch"] = trainer.current_epoch + 1  # Lightning goes by its "loops"
        state["model"] = self._bare(module).state_dict()


def make_trainer(
    run: Run,
    args: argparse.Namespace,
    device: torch.device,
    bare: Callable[[LightningModule], torch.nn.Module],
    *,
    find_unused_parameters: bool = False,
    accumulate_grad_batches: int = 1,
) -> Trainer:
    """A Trainer for the ranks that a launcher has started, which writes into our run folder; `bare` as for RunFolder.

    Of the options it takes precision, epochs and batch_size.
    """
    world = run.world
    # One device a rank, whatever it sees: with --gpus-per-task=1 its GPU is always the first.
    strategy = DDPStrategy(parallel_devices=[device] * world.local_size, find_unused_parameters=find_unused_parameters)
    return Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        strategy=strategy if world.size > 1 else "auto",
        devices="auto" if world.size > 1 else [device.index] if device.type == "cuda" else 1,
        num_nodes=world.nodes,
        plugins=[WorldEnvironment(world), WholeCheckpoints()],
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[args.precision],
        max_epochs=args.epochs,
        accumulate_grad_batches=accumulate_grad_batches,
        use_distributed_sampler=False,  # our samplers know the ranks
        num_sanity_val_steps=0,
        callbacks=[RunFolder(run, args.batch_size, bare)],
        enable_checkpointing=False,  # RunFolder does that, and shows the progress
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=run.folder,
    )
