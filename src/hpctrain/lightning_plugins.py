"""Lightning's Trainer with the ranks, checkpoints and run folder of hpctrain."""

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
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from hpctrain import checkpoint
from hpctrain.buckets import settle_buckets
from hpctrain.errors import HpctrainError
from hpctrain.rendezvous import all_or_none, broadcast, main_address
from hpctrain.run import Run
from hpctrain.world import World


def quiet() -> None:
    """Silence Lightning's tips, its lines about hardware, and warnings that do not apply here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data are in memory
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # logged values are the same on all ranks
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 calls a function that torch 2.13 deprecates


class WorldEnvironment(ClusterEnvironment):
    """Passes the World to Lightning, which would detect Slurm under `mpirun` in a Slurm job, where every rank would be rank 0."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        """True: a launcher has started the ranks, or there is only one."""
        return True

    @property
    def main_address(self) -> str:
        """MASTER_ADDR. Lightning reads it only if there is no process group yet."""
        return main_address()[0]

    @property
    def main_port(self) -> int:
        """MASTER_PORT. Lightning reads it only if there is no process group yet."""
        return main_address()[1]

    @staticmethod
    def detect() -> bool:
        """False: make_trainer() passes this environment to the Trainer, which need not detect it."""
        return False

    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self._world.size

    def global_rank(self) -> int:
        """The rank of this process in the job, from 0."""
        return self._world.rank

    def local_rank(self) -> int:
        """The rank of this process on its node, from 0."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """The number of this node in the job, from 0."""
        return self._world.node_rank

    def set_world_size(self, size: int) -> None:
        """Ignored: the launcher sets the world size."""

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the launcher sets the rank."""


class JsonStrategy(DDPStrategy):
    """DDPStrategy whose ranks exchange JSON: Lightning's own broadcast() unpickles what another rank sends."""

    def __init__(self, world: World, **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options)
        self._world = world

    def broadcast(self, obj: Any, src: int = 0) -> Any:  # noqa: ANN401 - any JSON value
        """The JSON value of rank `src`, on every rank. A collective call. Raises HpctrainError."""
        return broadcast(self._world, obj, src)


class VerifiedCheckpoints(CheckpointIO):
    """Saves and loads Lightning's checkpoints with checkpoint.py: complete and verified, with tensors and plain values only.

    Rank 0 alone writes, while the other ranks wait for it in a barrier. So save_checkpoint() keeps its error for raise_error().
    """

    def __init__(self) -> None:
        self._error: HpctrainError | None = None

    def save_checkpoint(self, state: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ANN401
        """Save a checkpoint. Lightning calls this on rank 0."""
        try:
            checkpoint.save(Path(path), state)
        except HpctrainError as error:
            self._error = error

    def raise_error(self) -> None:
        """Raise the HpctrainError of an earlier save_checkpoint(), if there was one."""
        if self._error:
            raise self._error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ANN401
        """Load a checkpoint into CPU memory. Lightning calls this on every rank. Raises HpctrainError."""
        return checkpoint.load(Path(path), torch.device("cpu"))

    def remove_checkpoint(self, path: Any) -> None:  # noqa: ANN401
        """Delete a checkpoint, if it exists."""
        Path(path).unlink(missing_ok=True)


class RunFolder(Callback):
    """Writes the metrics, progress and checkpoints of a Trainer into a run folder, as the other trainers do.

    `batch_size` is the global one. `bare` maps the LightningModule to the model inside it. Each checkpoint has the weights of
    that model as "model", under the same names as the checkpoints of the other trainers.
    """

    def __init__(self, run: Run, batch_size: int, bare: Callable[[LightningModule], torch.nn.Module]) -> None:
        self._run, self._batch_size, self._bare = run, batch_size, bare

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Let SIGTERM end this process, and arrange DDP's buckets with one example of the first batch.

        Lightning's handler of SIGTERM starts a collective, which waits for ranks that are dead.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if trainer.world_size > 1:
            with torch.random.fork_rng(devices=[]):  # an iterator of a DataLoader draws a seed
                batch = apply_to_collection(next(iter(trainer.train_dataloader)), Tensor, lambda tensor: tensor[:1])
            batch = trainer.strategy.batch_to_device(batch, module.device)
            settle_buckets(trainer.strategy.model, lambda: trainer.strategy.training_step(batch, 0))

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Reset the counters of the epoch."""
        self._steps = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        self._run.start_epoch(trainer.current_epoch + 1, self._steps)
        self._loss_sum, self._since = torch.zeros((), device=module.device), time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Log the loss five times per epoch, averaged over steps and ranks."""
        self._loss_sum += outputs["loss"]  # Lightning has divided it by accumulate_grad_batches
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
        """Copy rank 0's batch normalization, which is saved, to all ranks, which evaluate with it."""
        self._run.end_epoch()
        if trainer.world_size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the metrics that the module has logged after an epoch of training."""
        if trainer.state.fn != "fit":
            return
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._run.metrics(epoch=trainer.current_epoch + 1, step=trainer.global_step, **values)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save a checkpoint of Lightning."""
        trainer.save_checkpoint(checkpoint.path_of(self._run.folder, trainer.current_epoch + 1))
        with all_or_none(self._run.world):
            trainer.strategy.checkpoint_io.raise_error()

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, state: dict[str, Any]) -> None:
        """Add the entries of the other trainers' checkpoints; the file holds each tensor once, under both names."""
        state["epoch"] = trainer.current_epoch + 1  # Lightning itself resumes from its entry "loops"
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
    """Create a Trainer for the ranks that a launcher has started, which writes into the run folder.

    It uses the options precision, epochs and batch_size of `args`. For `bare` see RunFolder.
    """
    world = run.world
    # Lightning indexes the list with the local rank. Every entry is this rank's device: with --gpus-per-task=1 each rank sees
    # only its own GPU, as number 0.
    strategy = JsonStrategy(world, parallel_devices=[device] * world.local_size, find_unused_parameters=find_unused_parameters)
    return Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        strategy=strategy if world.size > 1 else "auto",
        devices="auto" if world.size > 1 else [device.index] if device.type == "cuda" else 1,
        num_nodes=world.nodes,
        plugins=[WorldEnvironment(world), VerifiedCheckpoints()],
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[args.precision],
        max_epochs=args.epochs,
        accumulate_grad_batches=accumulate_grad_batches,
        use_distributed_sampler=False,  # the samplers of hpctrain divide the data between the ranks
        num_sanity_val_steps=0,
        callbacks=[RunFolder(run, args.batch_size, bare)],
        enable_checkpointing=False,  # RunFolder saves checkpoints and shows the progress
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=run.folder,
    )
