"""Run folder, checkpoints and requeue for a Lightning Trainer in a user's script: see docs/guides/scripts.md.

Lightning resumes within an epoch from a loader that starts the epoch again: it trains on the first batches
twice, and never on the last ones. RunFolder leaves out the batches that are done, and makes order, random
augmentation and dropout functions of seed, epoch and step. A resumed run has the weights of a run that was
never stopped, bit for bit.
"""

import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.entry import print_errors_in_one_line
from hpctrain.distributed.rendezvous import all_or_none, broadcast, main_address
from hpctrain.distributed.world import World, detect
from hpctrain.errors import UsageError
from hpctrain.run.options import RunOptions
from hpctrain.run.record import Record
from hpctrain.training.batches import ResumableBatches, seed_everything, seed_loader
from hpctrain.training.strategies.ddp import settle_buckets

CPU = torch.device("cpu")


class WorldEnvironment(ClusterEnvironment):
    """Passes the World to a Trainer. Under mpirun in Slurm, Lightning would give every rank the rank 0."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        """True: a launcher has started the ranks, or there is only one rank."""
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
        """False: the Trainer has it as a plugin, and need not detect it."""
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


class RunFolder(Checkpoint):
    """A callback that gives a Trainer a run folder: metrics, checkpoints at any step, requeue, the result.

        folder = RunFolder("runs/mine")
        trainer = Trainer(max_epochs=3, callbacks=[folder], ...)
        trainer.fit(module, loader, ckpt_path=folder.ckpt_path)

    It takes the place of ModelCheckpoint, which a Trainer may have as well. A checkpoint is due every
    `checkpoint_every` (500 steps, 30s, 10min, 1h), after each epoch, and when the launch script asks for the
    end of the job. The newest `keep_checkpoints` are kept. Raises UsageError if `checkpoint_every` is not an
    interval.
    """

    _run: Record  # from setup() on
    _only_finite = True  # of the values that the module logs

    def __init__(
        self, folder: str | Path, *, checkpoint_every: int | str = "10min", keep_checkpoints: int = 3
    ) -> None:
        print_errors_in_one_line()
        self._seed_of_run = int(os.environ.get("PL_GLOBAL_SEED", 0))  # of lightning.seed_everything()
        self._folder = Path(folder)
        self._options = RunOptions(
            out=self._folder,
            resume="auto",
            watchdog=0,
            checkpoint_every=str(checkpoint_every),
            keep_checkpoints=keep_checkpoints,
            others={"seed": self._seed_of_run},
        )
        self._state: dict[str, Any] | None = None  # of the checkpoint that the run was resumed from
        self._metrics: dict[str, float] = {}
        self._begun = self._must_save = self._saving = False
        self._last = 0.0  # when the last batch, or a validation after it, was done

    @property
    def ckpt_path(self) -> Path | None:
        """The newest checkpoint, None in a new run. If it is corrupt, Trainer.fit() loads an older one."""
        return next(iter(checkpoint.list_newest_first(self._folder)), None)

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Open the run folder, for the Trainer's checkpoints (collective). Raises HpctrainError."""
        if stage != "fit":
            return
        if not hasattr(self, "_run"):
            self._run = self._open(trainer, module)
        self._checkpoints = _RunCheckpoints(self._run.folder / "checkpoints", self, trainer)
        trainer.strategy.checkpoint_io = self._checkpoints

    def _open(self, trainer: Trainer, module: LightningModule) -> Record:
        if trainer.max_steps != -1 or not trainer.max_epochs or trainer.max_epochs < 0:
            raise UsageError(
                "RunFolder counts epochs: make the Trainer with max_epochs, and without max_steps"
            )
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]  # Trainer() sets it
            raise UsageError("RunFolder cannot resume with reload_dataloaders_every_n_epochs: leave it out")
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Trainer() sets it
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            raise UsageError(
                "RunFolder cannot resume with GradientAccumulationScheduler, as epochs then have different "
                "numbers of steps: use accumulate_grad_batches"
            )
        if not module.automatic_optimization:
            raise UsageError(
                "RunFolder counts optimizer steps: use automatic optimization in the LightningModule"
            )
        if type(trainer.strategy).save_checkpoint is not Strategy.save_checkpoint:
            name = type(trainer.strategy).__name__
            raise UsageError(
                f'RunFolder cannot save what {name} saves in parts: make the Trainer with strategy="ddp"'
            )
        options = replace(self._options, epochs=trainer.max_epochs)
        places = trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices
        world = World(*places, trainer.node_rank, trainer.num_nodes, detect().launcher)
        run = Record(world, "lightning", options, trainer.strategy.root_device)
        run.can_skip = False
        return run

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint that the run resumes from, in its own folder or in the folder of another run.

        None in a new run, and before the Trainer has begun.
        """
        return self._run.resume_from if hasattr(self, "_run") else None

    def resume(self, trainer: Trainer) -> dict[str, Any] | None:
        """The newest checkpoint that fits, in CPU memory; None in a new run (collective)."""
        assert trainer.max_epochs
        self._state = self._run.resume(CPU, trainer.max_epochs, trainer.lightning_module, "state_dict")
        return self._state

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Prepare the loader and DDP to resume at any step. Raises UsageError if they cannot."""
        # Lightning's handler starts a collective, which waits for ranks that are dead.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._state is None:
            if self._run.resume_from:
                raise UsageError(
                    f"{self._run.folder} has checkpoints: call Trainer.fit(..., ckpt_path=folder.ckpt_path)"
                )
            self.resume(trainer)
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            raise UsageError(
                "ReduceLROnPlateau changes after the checkpoint of an epoch: "
                "use another scheduler with RunFolder"
            )
        self._prepare_loader(trainer)
        self._state = None  # as large as the model and its optimizer
        if isinstance(model := trainer.strategy.model, DistributedDataParallel) and not model.static_graph:
            settle_buckets(model)  # training_step() may do more than compute a loss
        with all_or_none(self._run.world):
            self._dump(trainer)
            if self._run.world.rank == 0:
                checkpoint.check_loadable(
                    self._checkpoints.state, "save_hyperparameters() or on_save_checkpoint()"
                )

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Let SIGTERM end this process: Trainer.test() has set Lightning's handler again."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _prepare_loader(self, trainer: Trainer) -> None:
        loader = trainer.train_dataloader
        if (
            not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, IterableDataset)
            or loader.batch_sampler is None
        ):
            raise UsageError(
                "RunFolder can resume within an epoch from one torch.utils.data.DataLoader, with batches of "
                "a Dataset that has __getitem__ and __len__, and not from this "
                f"{type(loader).__name__}: give Trainer.fit() such a loader"
            )
        if math.isinf(trainer.num_training_batches):
            raise UsageError(
                "RunFolder counts batches, and the batch sampler of this DataLoader has no __len__(): "
                "make the Trainer with limit_train_batches"
            )
        self._run.check_steps(self._steps(trainer))  # Lightning starts no epoch that has no batch left
        skip = self._state["step"] * trainer.accumulate_grad_batches if self._state else 0
        batches: Any = loader.batch_sampler
        if isinstance(batches, ResumableBatches):
            batches = batches.inner
        number = int(trainer.num_training_batches)
        resumable = ResumableBatches(batches, number, lambda: trainer.current_epoch, self._seed_of_run, skip)
        # DataLoader refuses a new batch sampler because of its old workers. New workers are started below.
        object.__setattr__(loader, "batch_sampler", resumable)
        seed_loader(loader, self._seed_of_run)
        loader._iterator = None  # of persistent workers
        # An iterator draws from the generator of its loader, or from the random numbers that are seeded here.
        # A resumed Trainer makes other iterators, so each loader gets a generator.
        apply_to_collection([loader, trainer.val_dataloaders], DataLoader, _give_generator)
        # Lightning has made an iterator of the old batches before it calls on_train_start().
        assert trainer.fit_loop._data_fetcher
        iter(trainer.fit_loop._data_fetcher)
        self._seed(trainer, skip, "before")

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the epoch before its first batch, and save if a checkpoint is due.

        Only now Lightning counts the batch before. It has no on_train_epoch_start() in a resumed epoch.
        """
        if self._begun:
            self._run.times.wait(time.perf_counter() - self._last)
        else:  # Lightning gets the first batch before a callback can start a clock
            self._begin_epoch(trainer, batch_idx)
        if self._must_save:
            self._must_save = False
            self._save(trainer)
        self._seed(trainer, batch_idx, "in")

    def _begin_epoch(self, trainer: Trainer, batch_idx: int) -> None:
        self._begun = True
        if batch_idx != self._start_epoch(trainer) * trainer.accumulate_grad_batches:
            raise UsageError(
                f"{self._run.resume_from} was saved within an epoch, with another --accumulate "
                "(accumulate_grad_batches): give that of its run"
            )
        self._loss = self._scaled_loss = torch.zeros((), device=trainer.strategy.root_device)
        self._losses = 0  # in self._loss

    def _start_epoch(self, trainer: Trainer) -> int:
        """Returns how many steps of the epoch are done: see Run.start_epoch()."""
        sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
        batch_size = getattr(sampler, "batch_size", None) or 1
        batch_size *= trainer.accumulate_grad_batches * self._run.world.size
        return self._run.start_epoch(trainer.current_epoch + 1, self._steps(trainer), batch_size)

    def _steps(self, trainer: Trainer) -> int:
        return math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)

    def _seed(self, trainer: Trainer, batch_idx: int, stage: str) -> None:
        """Seed by (seed, epoch, batch, rank) alone, "before" a step, when its batch is made, or "in" it."""
        key = self._seed_of_run, trainer.current_epoch, batch_idx, self._run.world.rank, stage == "in"
        seed_everything(hash(key))

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Seed the random numbers of the first batch."""
        self._seed(trainer, 0, "before")

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: torch.Tensor) -> None:
        """Add up the losses of the present step. They are scaled, and finite if the losses are."""
        self._scaled_loss = self._scaled_loss + loss.detach()

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """See Run.check_gradients(). Gradients are clipped after this."""
        self._run.check_gradients(getattr(trainer.precision_plugin, "scaler", None), self._scaled_loss)
        self._scaled_loss = torch.zeros((), device=module.device)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimizer steps, each with the mean loss of its batches that had one."""
        if not self._begun:  # a batch that is None has no on_train_batch_start()
            self._begin_epoch(trainer, batch_idx)
        self._seed(trainer, batch_idx + 1, "before")
        if outputs:  # training_step() may skip a batch
            self._loss = self._loss + outputs["loss"]
            self._losses += 1
        if (
            batch_idx + 1
        ) % trainer.accumulate_grad_batches == 0 or batch_idx + 1 >= trainer.num_training_batches:
            # Lightning has divided each loss by accumulate_grad_batches; the last step may have fewer batches
            loss = self._loss * (trainer.accumulate_grad_batches / self._losses) if self._losses else None
            self._run.step(loss, learning_rate=trainer.optimizers[0].param_groups[0]["lr"])
            self._loss, self._losses = torch.zeros((), device=module.device), 0
            self._must_save = self._run.must_save()
        self._last = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the metrics that the module has logged, in a validation while it trains."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._metrics = self._logged(trainer)
            self._run.metrics(**self._metrics)
            self._seed(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.completed, "before")
            self._last = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save a checkpoint of the epoch; there may have been no validation."""
        self._end_epoch()
        self._save(trainer, self._score(self._metrics) if self._metrics else None)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the result, with the last metrics."""
        self._run.finish(module, **self._logged(trainer))

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, state: dict[str, Any]) -> None:
        """Add the weights as the bundled trainers do; the file has each tensor once, under both names."""
        if not self._saving:
            return
        state["model"] = self._bare(module).state_dict()
        # Lightning counts the batch before this one again when it resumes, in the steps of its loggers.
        if self._begun:
            state["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def _logged(self, trainer: Trainer) -> dict[str, float]:
        """The values that the module has logged, of rank 0 where ranks differ (collective)."""
        values = {
            name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1
        }
        every = not self._only_finite
        values = broadcast(self._run.world, values)
        return {name: value for name, value in values.items() if every or math.isfinite(value)}

    def _bare(self, module: LightningModule) -> torch.nn.Module:
        """The model whose weights a checkpoint has as "model"."""
        return module

    def _score(self, metrics: dict[str, float]) -> tuple[float, ...] | None:
        """The score of an epoch, of which the highest is the best; None if epochs have no score."""
        return None

    def _end_epoch(self) -> None:
        if self._begun:
            self._begun = self._must_save = False
            self._run.end_epoch()

    def _dump(self, trainer: Trainer) -> None:
        """Let Lightning collect its state: it calls on_save_checkpoint(), and _RunCheckpoints on rank 0."""
        self._saving = True
        trainer.save_checkpoint(self._checkpoints.folder, weights_only=False)
        self._saving = False

    def _save(self, trainer: Trainer, score: tuple[float, ...] | None = None) -> None:
        self._dump(trainer)
        self._run.save(self._checkpoints.state, score)


class _RunCheckpoints(CheckpointIO):
    """Saves Lightning's checkpoints in the run folder, and loads them from there.

    Checkpoints of other callbacks go where they went before. Lightning calls save_checkpoint() on rank 0,
    while the other ranks wait in a barrier, so it only keeps the state for Run.save(), which all ranks call.
    """

    def __init__(self, folder: Path, callback: RunFolder, trainer: Trainer) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {}
        self._callback, self._trainer, self._others = callback, trainer, trainer.strategy.checkpoint_io

    def save_checkpoint(self, state: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Keep the state if it is for the run folder. Lightning calls this on rank 0."""
        if path == self.folder:
            self.state = state
        else:
            self._others.save_checkpoint(state, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint that the run resumes from, on every rank. Raises HpctrainError."""
        if path == self._callback.resume_from or Path(path).parent.resolve() == self.folder.resolve():
            return self._callback.resume(self._trainer) or {}
        return self._others.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint of another callback; the run folder removes its own ones."""
        self._others.remove_checkpoint(path)


def _give_generator(loader: DataLoader) -> None:
    if loader.generator is None:
        loader.generator = torch.Generator()
