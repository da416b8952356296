"""Run folder, checkpoints and requeue for a Trainer of Lightning: see docs/guides/scripts.md.

Lightning resumes within an epoch from a loader that starts the epoch again: it trains on the first batches
twice, and never on the last ones. RunFolder leaves out the batches that are done, and makes order, random
augmentation and dropout functions of seed, epoch and step. A resumed run has the weights of a run that was
never stopped, bit for bit.
"""

import math
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.entry import print_errors_in_one_line
from hpctrain.distributed.rendezvous import all_or_none, broadcast, gather, main_address
from hpctrain.distributed.world import World, detect, job_id, restart_count, torchrun_restarts
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.files.trust import make_private_folder
from hpctrain.hooks import count_ranks, is_child_of_rank
from hpctrain.run.config import write_json
from hpctrain.run.options import RunOptions
from hpctrain.run.owner import launch_id
from hpctrain.run.reader import read_record
from hpctrain.run.record import Record
from hpctrain.text import say
from hpctrain.training.batches import ResumableBatches, count_examples, seed_everything, seed_loader
from hpctrain.training.strategies.ddp import settle_buckets

# A script may have imported Lightning by its earlier name, which has classes of its own.
if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, Checkpoint, GradientAccumulationScheduler
    from lightning.pytorch.strategies import Strategy
else:
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback, Checkpoint, GradientAccumulationScheduler
    from pytorch_lightning.strategies import Strategy

CPU = torch.device("cpu")
# In the folder of a JobFolder: the start of its job that has used it last.
ATTEMPT = "attempt.json"
# The variable that names the job whose Trainers this job continues.
CONTINUES = "HPCTRAIN_CONTINUES"


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

    `folder` may also be a RunOptions, which has these options and more, such as on_nan and watchdog.

    name    in config.json, and of the folder runs/NAME/JOB, where RunOptions name none
    monitor the logged value whose best checkpoint is kept. All logged values must then be finite.
    mode    "min" or "max": which value of it is the best (default: "min" if its name ends in "loss")
    model   the part of the LightningModule whose weights a checkpoint has as "model" (default: all of it)
    fixed_epochs  a resumed run has to have the same max_epochs, as its learning rate depends on them

    A module's flops_per_batch, as ThroughputMonitor knows it, adds FLOP/s to the result of a run on GPUs. A
    sampler's examples_of(epoch, step) adds the numbers of a step's examples to the error of a loss that is
    not finite; epochs are counted from 1, steps from 0.
    """

    _run: Record  # from setup() on

    def __init__(
        self,
        folder: str | Path | RunOptions,
        *,
        checkpoint_every: int | str = "10min",
        keep_checkpoints: int = 3,
        name: str = "lightning",
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        model: nn.Module | None = None,
        fixed_epochs: bool = False,
    ) -> None:
        print_errors_in_one_line()
        self._seed_of_run = int(os.environ.get("PL_GLOBAL_SEED") or 0)  # of lightning.seed_everything()
        if not isinstance(folder, RunOptions):
            folder = RunOptions(
                out=folder,
                resume="auto",
                watchdog=0,
                checkpoint_every=checkpoint_every,
                keep_checkpoints=keep_checkpoints,
            )
        self._options, self._name, self._model = folder, name, model
        self._monitor, self._mode, self._fixed_epochs = monitor, mode, fixed_epochs
        self._state: dict[str, Any] | None = None  # of the checkpoint that the run was resumed from
        self._metrics: dict[str, float] = {}  # of the last evaluation
        self._examples: int | None = None  # of the training set
        self._score: tuple[float, ...] | None = None  # of the epoch
        self._begun = self._must_save = self._saving = self._has_loss = False
        self._handlers: dict[int, Any] = {}  # of signals, before Lightning has set its own ones
        self._last = 0.0  # when the last batch, or a validation after it, was done

    @property
    def ckpt_path(self) -> Path | None:
        """The newest checkpoint, None in a new run. If it is corrupt, Trainer.fit() loads an older one."""
        folders = self._options.choose_folder(self._name), self._options.source
        found = (checkpoint.list_newest_first(folder) for folder in folders if folder)
        return next(chain.from_iterable(found), None)

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Open the run folder, for the Trainer's checkpoints (collective). Raises HpctrainError."""
        if not hasattr(self, "_checkpoints"):
            self._checkpoints = _RunCheckpoints(self, trainer)
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
        if stage == "fit":
            self._open(trainer, module)

    def _open(self, trainer: Trainer, module: LightningModule) -> None:
        if not hasattr(self, "_run"):
            self._check_trainer(trainer, module)
            self._run = self._make_record(trainer, module)
        trainer.strategy.checkpoint_io = self._checkpoints

    def _check_trainer(self, trainer: Trainer, module: LightningModule) -> None:
        if not isinstance(trainer, Trainer):
            raise UsageError(
                "the script has imported lightning and pytorch_lightning, two copies of one library: "
                f"import {Trainer.__module__.partition('.')[0]} alone"
            )
        if trainer.max_steps != -1 or not trainer.max_epochs or trainer.max_epochs < 0:
            raise UsageError(
                "RunFolder counts epochs: make the Trainer with max_epochs, and without max_steps"
            )
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]  # Trainer() sets it
            raise UsageError("RunFolder cannot resume with reload_dataloaders_every_n_epochs: leave it out")
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in _callbacks(trainer)):
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

    def _make_record(self, trainer: Trainer, module: LightningModule) -> Record:
        self._model = self._model or module
        others = {**self._options.others}
        others.setdefault("seed", self._seed_of_run)
        options = replace(self._options, epochs=trainer.max_epochs, others=others)
        run = Record(_world_of(trainer), self._name, options, trainer.strategy.root_device)
        run.best.by, run.best.lowest = self._monitor, self._mode and self._mode == "min"
        return run

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint that the run resumes from, in its own folder or in the folder of another run.

        None in a new run, and before the Trainer has begun.
        """
        return self._run.resume_from if hasattr(self, "_run") else None

    def resume(self, trainer: Trainer) -> dict[str, Any] | None:
        """The newest checkpoint that fits, in CPU memory; None in a new run (collective).

        The Trainer trains no epoch if the run is finished, or if a callback had ended it.
        """
        assert trainer.max_epochs and self._model
        self._state = self._run.resume(
            CPU, trainer.max_epochs, self._model, "state_dict", fixed=self._fixed_epochs
        )
        if self._state:
            # Lightning does not know that the loader leaves out the batches that are done.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
            trainer.should_stop = self._run.is_finished or bool(self._state.get("should_stop"))
        return self._state

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Prepare the loader and DDP to resume at any step. Raises UsageError if they cannot."""
        self._restore_handlers()
        if self._state is None:
            if self._run.resume_from:
                raise UsageError(
                    f"{self._run.folder} has checkpoints: call Trainer.fit(..., ckpt_path=folder.ckpt_path)"
                )
            self.resume(trainer)
        self._check_training(trainer)
        if self._state is None:  # fit() may have got a checkpoint of something else, or be the second one
            self._run.epoch = trainer.current_epoch
        self._prepare_loader(trainer)
        self._run.count_flops(lambda: self._flops_per_example(module))
        self._state = None  # as large as the model and its optimizer
        if isinstance(model := trainer.strategy.model, DistributedDataParallel) and not model.static_graph:
            settle_buckets(model)  # training_step() may do more than compute a loss
        with all_or_none(self._run.world):
            self._check_state(trainer)

    def _restore_handlers(self) -> None:
        """Take Lightning's handlers away: they start collectives, which wait for ranks that are dead."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _check_training(self, trainer: Trainer) -> None:
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            raise UsageError(
                "ReduceLROnPlateau changes after the checkpoint of an epoch: "
                "use another scheduler with RunFolder"
            )
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                "RunFolder can resume within an epoch from one torch.utils.data.DataLoader of a Dataset that "
                f"has __getitem__ and __len__, and not from this {type(loader).__name__}: give Trainer.fit() "
                "such a loader"
            )
        if math.isinf(trainer.num_training_batches):
            raise UsageError(
                "RunFolder counts batches, and the batch sampler of this DataLoader has no __len__(): "
                "make the Trainer with limit_train_batches"
            )
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._state is None and done % int(trainer.num_training_batches):
            raise UsageError(
                "RunFolder cannot go on from a checkpoint that something else has saved within an epoch: "
                "give Trainer.fit() a ckpt_path of the end of an epoch"
            )

    def _check_state(self, trainer: Trainer) -> None:
        """Raise UsageError on rank 0 if its state has objects that a resume would refuse (collective)."""
        self._dump(trainer)
        if trainer.global_rank == 0:
            checkpoint.check_loadable(
                self._checkpoints.state, "save_hyperparameters() or on_save_checkpoint()"
            )

    def _flops_per_example(self, module: LightningModule) -> float | None:
        flops = getattr(module, "flops_per_batch", None)
        return flops and flops / self._examples_per_batch

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Take Lightning's handlers away, which Trainer.test() has set again."""
        self._restore_handlers()

    def _prepare_loader(self, trainer: Trainer) -> None:
        loader = trainer.train_dataloader
        assert isinstance(loader, DataLoader)
        self._run.check_steps(self._steps(trainer))  # Lightning starts no epoch that has no batch left
        before, self._examples = self._examples, count_examples(loader)
        if before and self._examples and before != self._examples:
            self._run.print(f"the loader has {self._examples} examples, and had {before} before the resume")
        skip = self._state["step"] * trainer.accumulate_grad_batches if self._state else 0
        # without a batch sampler, the dataset makes the batches (batch_size=None)
        in_lists = loader.batch_sampler is not None
        sampler: Any = loader.batch_sampler if in_lists else loader.sampler
        self._sampler = sampler.inner if isinstance(sampler, ResumableBatches) else sampler
        number = int(trainer.num_training_batches)
        resumable = ResumableBatches(
            self._sampler,
            number,
            lambda: trainer.current_epoch,
            self._seed_of_run,
            skip,
            in_lists=in_lists,
        )
        # DataLoader refuses a new sampler because of its old workers. New workers are started below.
        object.__setattr__(loader, "batch_sampler" if in_lists else "sampler", resumable)
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
        self._has_loss = False  # this batch

    def _begin_epoch(self, trainer: Trainer, batch_idx: int) -> None:
        self._begun = True
        epoch, examples_of = trainer.current_epoch + 1, getattr(self._sampler, "examples_of", None)
        done = self._run.start_epoch(
            epoch,
            self._steps(trainer),
            self._examples_per_batch * trainer.accumulate_grad_batches * self._run.world.size,
            examples_of and partial(examples_of, epoch),
        )
        if batch_idx != done * trainer.accumulate_grad_batches:
            raise UsageError(
                f"{self._run.resume_from} was saved within an epoch, with another --accumulate "
                "(accumulate_grad_batches): give that of its run"
            )
        self._loss = self._scaled_loss = torch.zeros((), device=trainer.strategy.root_device)
        self._losses = 0  # in self._loss

    @property
    def _examples_per_batch(self) -> int:
        """The examples of a batch of this rank."""
        return getattr(self._sampler, "batch_size", None) or 1

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
        self._has_loss = True

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """See Record.check_gradients(). Gradients are clipped after this."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler and self._has_loss and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # Lightning leaves this to a fused optimizer
        self._run.check_gradients(scaler, self._scaled_loss)
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

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Let no watchdog and no clock run in a validation, which follows an epoch or a step of it."""
        if self._is_in_training(trainer):
            if self._is_last_batch(trainer):
                self._end_epoch()
            else:
                self._run.start_evaluation()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the metrics that the module has logged, in a validation while it trains."""
        if self._is_in_training(trainer):
            self._metrics = self._logged(trainer)
            self._run.metrics(**self._metrics)
            score = self._choose_score()
            if self._is_last_batch(trainer):
                self._score = score
            else:  # saved before the next step: a callback may change the state after this
                self._must_save |= self._run.end_evaluation(score)
            self._seed(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.completed, "before")
            self._last = time.perf_counter()

    def _choose_score(self) -> tuple[float, ...] | None:
        if self._monitor is None:
            return None
        if self._monitor not in self._metrics:
            raise UsageError(
                f"RunFolder has monitor={self._monitor!r}, and the module has logged "
                f"{', '.join(self._metrics) or 'nothing'} in its validation: name one of these"
            )
        return self._run.best.choose(self._metrics)

    def _is_in_training(self, trainer: Trainer) -> bool:
        return trainer.state.fn == "fit" and not trainer.sanity_checking

    def _is_last_batch(self, trainer: Trainer) -> bool:
        return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save a checkpoint of the epoch; there may have been no validation."""
        self._end_epoch()
        self._metrics |= self._logged(trainer)
        self._save(trainer, self._score)
        self._score = None

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the result, with the last metrics."""
        assert self._model
        progress: Any = trainer.fit_loop.epoch_progress.current
        progress.completed = progress.processed  # Lightning counts an epoch after its checkpoint
        if not trainer.callback_metrics:  # it was resumed after its last epoch, and the script may read them
            trainer.callback_metrics.update(
                {name: torch.tensor(value) for name, value in self._metrics.items()}
            )
        self._run.finish(self._model, **self._logged(trainer))
        seed_everything(self._seed_of_run)  # as in Run: for what follows in the script

    def state_dict(self) -> dict[str, Any]:
        """The last metrics, for the result of a run that is resumed after its last epoch; and its data.

        In the run's own checkpoints alone: without RunFolder, Lightning would ask for it.
        """
        return {"metrics": self._metrics, "examples": self._examples} if self._saving else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See state_dict()."""
        self._metrics, self._examples = state_dict["metrics"], state_dict.get("examples")

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, state: dict[str, Any]) -> None:
        """Add the weights as the bundled trainers do; the file has each tensor once, under both names."""
        if not self._saving:
            return
        assert self._model
        state["model"] = self._model.state_dict()
        state["should_stop"] = trainer.should_stop  # Lightning forgets it, as after EarlyStopping
        # Lightning counts the batch before this one again when it resumes, in the steps of its loggers.
        if self._begun:
            state["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def _logged(self, trainer: Trainer) -> dict[str, float]:
        """The values that the module has logged, of rank 0 where ranks differ (collective)."""
        values = {
            name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1
        }
        values = broadcast(self._run.world, values)
        # with one to monitor, Record.metrics() ends the run if a value is not finite
        return {name: value for name, value in values.items() if self._monitor or math.isfinite(value)}

    def _end_epoch(self) -> None:
        if self._begun:
            self._begun = self._must_save = False
            self._run.end_epoch()

    def _dump(self, trainer: Trainer) -> None:
        """Let Lightning collect its state: it calls on_save_checkpoint(), and _RunCheckpoints on rank 0."""
        self._saving = True
        trainer.save_checkpoint("of the run folder", weights_only=False)
        self._saving = False

    def _save(self, trainer: Trainer, score: tuple[float, ...] | None = None) -> None:
        self._dump(trainer)
        self._run.save(self._checkpoints.state, score)


class JobFolder(RunFolder):
    """The run folder of a Trainer whose script has none, in a job that its launch script requeues.

    Lightning makes one for each Trainer: see callbacks_of_job(). It is runs/trainer/JOB for the first call of
    fit() in a job, runs/trainer-2/JOB for the second. A Trainer that RunFolder refuses trains as without it,
    and a line says why; so does one whose script has a handler for the signal that announces the time limit.
    """

    _fits: ClassVar[int] = 0  # calls of fit() in this process

    def __init__(self) -> None:
        super().__init__("runs", keep_checkpoints=2)

    def _open(self, trainer: Trainer, module: LightningModule) -> None:
        """Leave a Trainer that has a RunFolder. Others get theirs when they have their layers and loaders."""
        if any(isinstance(each, RunFolder) and each is not self for each in _callbacks(trainer)):
            self._leave(trainer)

    def _leave(self, trainer: Trainer, *successors: Callback) -> None:
        """Take this callback out of those of the Trainer, or let others take its place."""
        # a new list, as Lightning is going through the old one
        kept = [one for each in _callbacks(trainer) for one in (successors if each is self else (each,))]
        trainer.callbacks = kept  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Choose the folder (collective). If it has a checkpoint, load that as fit(ckpt_path=...) does."""
        self._model, self._world = module, _world_of(trainer)
        JobFolder._fits += 1
        if not self._may_go_on(trainer, partial(self._check_trainer, trainer, module)):
            return
        chosen = broadcast(self._world, self._choose() if self._world.rank == 0 else None)
        folder, JobFolder._fits, self._seed_of_run, resumes = chosen
        self._options = replace(self._options, out=folder, resume="auto")
        if resumes:
            self._begin(trainer, module)
            # Lightning has no public way to give a checkpoint to a fit() that has begun.
            trainer._checkpoint_connector._restore_modules_and_callbacks(self._run.resume_from)

    def _choose(self) -> tuple[str, int, int, bool]:
        """The folder of this call of fit(), its number, the seed of its run, and whether it has a checkpoint.

        A batch script of the user's may call launch scripts several times, and does so again after a requeue.
        """
        job = os.environ.get(CONTINUES) or job_id()
        while True:
            kind = "trainer" if JobFolder._fits == 1 else f"trainer-{JobFolder._fits}"
            folder = Path("runs", kind, job)
            config, last = read_record(folder / "config.json"), read_record(folder / ATTEMPT)
            goes_on = torchrun_restarts() and last.get("launch") == launch_id()
            if restart_count() > 0 or CONTINUES in os.environ:
                goes_on |= last.get("attempt") != _attempt()
            if not config or (goes_on and config.get("command") == sys.argv):
                own = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed())
                seed = config.get("options", {}).get("seed", own)
                return str(folder), JobFolder._fits, seed, checkpoint.has_complete(folder)
            JobFolder._fits += 1

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        super()._open(trainer, module)
        self._run.checks_values = False  # a loss that is not finite is the script's matter
        if self._world.rank == 0:
            own = {"attempt": _attempt(), "launch": launch_id()}
            write_json(self._run.folder / ATTEMPT, own)

    def _check_trainer(self, trainer: Trainer, module: LightningModule) -> None:
        if any(handler not in (signal.SIG_DFL, signal.SIG_IGN) for handler in self._handlers.values()):
            raise UsageError("its script has a handler for SIGUSR1 or SIGTERM, which gets the signal")
        if is_child_of_rank() or threading.current_thread() is not threading.main_thread():
            raise UsageError("it is in a thread, or in a process that a rank has started")
        if trainer.world_size != count_ranks():
            raise UsageError(f"it has {trainer.world_size} of the job's {count_ranks()} ranks")
        super()._check_trainer(trainer, module)

    def _check_folder(self, makes: bool) -> None:
        """Raise UsageError if this rank cannot write in the folder: it may be on the node of rank 0 alone."""
        folder = self._options.choose_folder(self._name)
        try:
            if not makes:
                tempfile.TemporaryFile(dir=folder).close()
            elif self._world.rank == 0:
                make_private_folder(folder, foreseen=True)
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be written on {os.uname().nodename} ({error.strerror})"
            ) from error

    def _may_go_on(self, trainer: Trainer, *checks: Callable[[], None]) -> bool:
        """Whether these checks raise HpctrainError on no rank (collective). Otherwise leaves the Trainer."""
        for check in checks:
            problem = ""
            try:
                check()
            except HpctrainError as error:
                problem = str(error)
            if problem := next(filter(None, gather(self._world, problem)), ""):
                if self._world.rank == 0:
                    say(f"hpctrain: this Trainer does not go on after the job's time limit: {problem}")
                self._leave(trainer)
                return False
        return True

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Open the folder of a new run, if RunFolder can resume what the Trainer trains."""
        if not hasattr(self, "_run"):
            before, trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io, self._checkpoints
            checks = [partial(each, trainer) for each in (self._check_training, self._check_state)]
            checks += [partial(self._check_folder, makes) for makes in (True, False)]
            if not self._may_go_on(trainer, *checks):
                trainer.strategy.checkpoint_io = before
                return
            self._begin(trainer, module)
            self._run.print(f"after a time limit or a fault, this Trainer goes on from {self._run.folder}")
        super().on_train_start(trainer, module)

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Leave the gradients, and those of a scaler, as they are."""
        self._run.check_gradients()

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the result, if fit() had something to train."""
        if hasattr(self, "_run"):
            super().on_fit_end(trainer, module)
            # Another one after each fit(), from which the script may make other initial weights
            seed_everything(hash((self._seed_of_run, JobFolder._fits)))
        self._leave(trainer, JobFolder())  # for the next call of fit()


def callbacks_of_job() -> list[Callback]:
    """For each Trainer(), by the entry points in pyproject.toml: a JobFolder in a job of a launch script.

    HPCTRAIN_WORLD_SIZE is not there if the script trains separately on each rank: see hooks/lone_ranks.py.
    """
    return [JobFolder()] if os.environ.keys() >= {"HPCTRAIN_CONTROL", "HPCTRAIN_WORLD_SIZE"} else []


def _attempt() -> list[Any]:
    return [job_id(), restart_count()]


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]  # Trainer() sets it


def _world_of(trainer: Trainer) -> World:
    places = trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices
    return World(*places, trainer.node_rank, trainer.num_nodes, detect().launcher)


class _RunCheckpoints(CheckpointIO):
    """Saves Lightning's checkpoints in the run folder, and loads them from there.

    Checkpoints of other callbacks go where they went before. Lightning calls save_checkpoint() on rank 0,
    while the other ranks wait in a barrier, so it only keeps the state for Run.save(), which all ranks call.
    """

    def __init__(self, callback: RunFolder, trainer: Trainer) -> None:
        self.state: dict[str, Any] = {}
        self._callback, self._trainer, self._others = callback, trainer, trainer.strategy.checkpoint_io

    def save_checkpoint(self, state: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Keep the state if it is for the run folder. Lightning calls this on rank 0."""
        if self._callback._saving:
            self.state = state
        else:
            self._others.save_checkpoint(state, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint that the run resumes from, on every rank. Raises HpctrainError."""
        folders = [
            self._callback._run.folder / "checkpoints",
            *([source.parent] if (source := self._callback.resume_from) else []),
        ]
        if Path(path).parent.resolve() in (folder.resolve() for folder in folders):
            if self._trainer.state.fn == "fit":
                return self._callback.resume(self._trainer) or {}
            checkpoint.check_intact(Path(path))  # for test() and the like
            return checkpoint.load(Path(path), CPU)
        return self._others.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint of another callback; the run folder removes its own ones."""
        self._others.remove_checkpoint(path)


def _give_generator(loader: DataLoader) -> None:
    if loader.generator is None:
        loader.generator = torch.Generator()
