"""Lightning's Trainer with the ranks, checkpoints and run folder of hpctrain."""

import argparse
import logging
import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.lazy_imports import import_of_lightning
from hpctrain.distributed.rendezvous import broadcast
from hpctrain.distributed.world import World
from hpctrain.run.run import Run
from hpctrain.training.buckets import settle_buckets

with import_of_lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning_utilities.core.apply_func import apply_to_collection

    from hpctrain.lightning.run_folder import RunFolder, WorldEnvironment


def quiet() -> None:
    """Silence Lightning's tips, its lines about hardware, and warnings that do not apply here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data are in memory
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")  # its sampler is
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # logged values are the same on all ranks
    # Lightning 2.6 calls a function that torch 2.13 deprecates
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


class JsonStrategy(DDPStrategy):
    """DDPStrategy whose ranks exchange JSON: Lightning's own broadcast() unpickles what another rank sends."""

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(**options)
        self._world = world

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The JSON value of rank `src`, on every rank. A collective call. Raises HpctrainError."""
        return broadcast(self._world, obj, src)


class TrainerFolder(RunFolder):
    """The RunFolder of hpctrain's own trainers, which open the run and whose samplers know the epoch and the
    step.

    `batch_size` is the global one. `bare` maps the LightningModule to the model inside it. Each checkpoint
    has the weights of that model as "model", under the same names as the checkpoints of the other trainers.
    `score` gets the metrics that the module logged in an evaluation; the one with the highest score is the
    best. With `evaluate_every`, evaluations also follow every so many steps of the run, and a checkpoint
    where one is the best so far. A run that stalls there has no further step: the module skips the batches
    that are left, see on_train_epoch_end().
    """

    def __init__(
        self,
        run: Run,
        args: argparse.Namespace,
        bare: Callable[[LightningModule], torch.nn.Module],
        score: Callable[[dict[str, float]], tuple[float, ...]],
    ) -> None:
        super().__init__(run.folder)
        self._run, self._batch_size, self._bare, self._score = run, args.batch_size, bare, score
        self._evaluate_every: int | None = getattr(args, "eval_every", None)

    def resume(self, trainer: Trainer) -> dict[str, Any]:
        """The state of the checkpoint that the run was resumed from."""
        path = self._run.resume_from
        return (
            checkpoint.open_lazily(path) if self._run.in_parts else checkpoint.load(path, torch.device("cpu"))
        )

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Let SIGTERM end this process, and arrange DDP's buckets with one example of the first batch."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # see RunFolder
        self._run.check_steps(self._steps(trainer))
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            with torch.random.fork_rng(devices=[]):  # an iterator of a DataLoader draws a seed
                batch = apply_to_collection(
                    next(iter(trainer.train_dataloader)), Tensor, lambda tensor: tensor[:1]
                )
            batch = trainer.strategy.batch_to_device(batch, module.device)
            settle_buckets(trainer.strategy.model, lambda: trainer.strategy.training_step(batch, 0))

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimizer steps, and let an evaluation follow if it is due."""
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        # Lightning evaluates after a batch whose number is a multiple of val_check_batch
        if self._evaluate_every:
            is_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            is_due = is_step and self._run.global_step % self._evaluate_every == 0
            trainer.val_check_batch = batch_idx + 1 if is_due else trainer.num_training_batches

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Copy rank 0's batch normalization, which is saved, to all ranks, which evaluate with it."""
        if trainer.state.fn == "fit":
            if self._is_within_epoch(trainer):
                self._run.start_evaluation()
            else:
                self._end_epoch()
        if trainer.world_size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the metrics.

        The checkpoint of an evaluation within an epoch follows before the next step: see RunFolder.
        """
        super().on_validation_end(trainer, module)
        if trainer.state.fn == "fit" and self._is_within_epoch(trainer):
            self._must_save |= self._run.end_evaluation(self._score(self._metrics))

    def _is_within_epoch(self, trainer: Trainer) -> bool:
        return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save a checkpoint of the epoch, unless the run has stalled within it, and end the training if the run has stalled."""
        if not self._run.best.has_stalled:
            super().on_train_epoch_end(trainer, module)
        trainer.should_stop = self._run.best.has_stalled

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Nothing: the trainer finishes the run."""

    def _start_epoch(self, trainer: Trainer) -> None:
        epoch, sampler = trainer.current_epoch + 1, trainer.train_dataloader.sampler
        self._run.start_epoch(
            epoch, self._steps(trainer), self._batch_size, partial(sampler.examples_of, epoch)
        )

    def _seed(self, trainer: Trainer, batch_idx: int, stage: str) -> None:
        """Nothing: a module that draws random numbers seeds them itself."""


def make_trainer(
    run: Run,
    args: argparse.Namespace,
    device: torch.device,
    bare: Callable[[LightningModule], torch.nn.Module],
    score: Callable[[dict[str, float]], tuple[float, ...]],
    *,
    accumulate_grad_batches: int = 1,
    strategy: Callable[..., DDPStrategy] = JsonStrategy,
) -> Trainer:
    """Create a Trainer for the ranks that a launcher has started, which writes into the run folder.

    It uses the options precision, epochs and batch_size of `args`. For `bare` and `score` see TrainerFolder.
    """
    world = run.world
    # Lightning indexes the list with the local rank. Every entry is this rank's device: with
    # --gpus-per-task=1 each rank sees only its own GPU, as number 0.
    devices = [device] * world.local_size
    return Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        strategy=strategy(world, parallel_devices=devices) if world.size > 1 else "auto",
        devices="auto" if world.size > 1 else [device.index] if device.type == "cuda" else 1,
        num_nodes=world.nodes,
        plugins=[WorldEnvironment(world)],
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[args.precision],
        max_epochs=args.epochs,
        accumulate_grad_batches=accumulate_grad_batches,
        use_distributed_sampler=False,  # the samplers of hpctrain divide the data between the ranks
        num_sanity_val_steps=0,
        callbacks=[TrainerFolder(run, args, bare, score)],
        enable_progress_bar=False,  # Run shows the progress
        enable_model_summary=False,
        logger=False,
        default_root_dir=run.folder,
    )
