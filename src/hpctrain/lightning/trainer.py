"""Lightning's Trainer with the ranks, checkpoints and run folder of hpctrain."""

import logging
import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.lazy_imports import import_of_lightning
from hpctrain.distributed.rendezvous import broadcast
from hpctrain.distributed.world import World
from hpctrain.run.record import Record
from hpctrain.training.precision import Scaler
from hpctrain.training.strategies.ddp import broadcast_buffers, settle_buckets

with import_of_lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning_utilities.core.apply_func import apply_to_collection

    from hpctrain.lightning.run_folder import RunFolder, WorldEnvironment

PRECISIONS: dict[str, Literal["32-true", "bf16-mixed"] | None] = {
    "fp32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": None,  # a plugin: see Fp16
}


class TrainerOptions(Protocol):
    """The options of a command that make_trainer() uses."""

    @property
    def epochs(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def precision(self) -> str: ...


def quiet() -> None:
    """Silence Lightning's tips, its lines about hardware, and warnings that do not apply here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "does not have many workers",  # the data are in memory
        "dataloader is not resumable",  # the sampler is
        "sync_dist=True",  # logged values are the same on all ranks
        "`broadcast_buffers` is deprecated",  # its new name is not in the older torch of other images
        "LeafSpec",  # Lightning 2.6 calls a function that torch 2.13 deprecates
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")


class JsonStrategy(DDPStrategy):
    """DDPStrategy whose ranks exchange JSON: Lightning's broadcast() unpickles what another rank sends.

    Buffers are not copied to all ranks in each step: what training computes depends on none, and
    TrainerFolder copies those of rank 0 before each evaluation. Gradients are views of DDP's buckets: their
    mean is not copied out of them.
    """

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(broadcast_buffers=False, gradient_as_bucket_view=True, **options)
        self._world = world

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The JSON value of rank `src`, on every rank. A collective call. Raises HpctrainError."""
        return broadcast(self._world, obj, src)


class Fp16(MixedPrecision):
    """fp16 with the Scaler, whose state Lightning saves and loads.

    For precision="16-mixed" Lightning would compute in bf16 on a CPU, and clip the gradients of a fused
    optimizer while they are scaled.
    """

    scaler: Scaler

    def __init__(self, device: torch.device, *, sharded: bool) -> None:
        super().__init__("16-mixed", device.type, Scaler("fp16", device, sharded=sharded))

    def optimizer_step(  # type: ignore[override]  # as in MixedPrecision
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Compute the gradients, divide them by the scale, clip them, and update the weights."""
        closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)  # calls on_before_optimizer_step(), and clips
        result = self.scaler.step(optimizer, **options)
        self.scaler.update()
        return result


class TrainerFolder(RunFolder):
    """The RunFolder of hpctrain's own trainers: they open the run, and their samplers know epoch and step.

    `batch_size` is the global one. `model` is the model inside the LightningModule: each checkpoint has its
    weights as "model", under the same names as the checkpoints of the other trainers. `score` gets the
    metrics that the module logged in an evaluation; the highest score is the best.

    With `evaluate_every`, evaluations also follow every so many steps of the run, and a checkpoint if the
    evaluation is the best so far. A run that stalls there has no further step: the module skips the batches
    that are left, see on_train_epoch_end().
    """

    _run: Record  # open from the start
    _only_finite = False  # Run.metrics() ends the run if a value is not finite

    def __init__(
        self,
        run: Record,
        batch_size: int,
        model: nn.Module,
        score: Callable[[dict[str, float]], tuple[float, ...]],
        evaluate_every: int | None = None,
    ) -> None:
        super().__init__(run.folder)
        self._run, self._batch_size = run, batch_size
        self._model, self._score_of, self._evaluate_every = model, score, evaluate_every

    def _bare(self, module: LightningModule) -> nn.Module:
        return self._model

    def _score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return self._score_of(metrics)

    def resume(self, trainer: Trainer) -> dict[str, Any]:
        """The state of the checkpoint that the run was resumed from."""
        path = self._run.resume_from
        assert path
        return checkpoint.load(path, torch.device("cpu"), lazily=self._run.in_parts)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Let SIGTERM end this process, and arrange DDP's buckets with one example of the first batch."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # see RunFolder
        self._run.check_steps(self._steps(trainer))
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            loader: Any = trainer.train_dataloader
            with torch.random.fork_rng(devices=[]):  # an iterator of a DataLoader draws a seed
                batch = apply_to_collection(next(iter(loader)), Tensor, lambda tensor: tensor[:1])
            batch = trainer.strategy.batch_to_device(batch, module.device)

            def compute_loss() -> Tensor:
                loss = trainer.strategy.training_step(batch, 0)
                assert isinstance(loss, Tensor)
                return loss

            settle_buckets(trainer.strategy.model, compute_loss)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimizer steps, and let an evaluation follow if it is due."""
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        # Lightning evaluates after a batch whose number is a multiple of val_check_batch.
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
        broadcast_buffers(module, self._run.world)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the metrics. An evaluation within an epoch is saved before the next step: see RunFolder."""
        super().on_validation_end(trainer, module)
        if trainer.state.fn == "fit" and self._is_within_epoch(trainer):
            self._must_save |= self._run.end_evaluation(self._score(self._metrics))

    def _is_within_epoch(self, trainer: Trainer) -> bool:
        return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save a checkpoint of the epoch, or end the training if the run has stalled within the epoch."""
        if not self._run.best.has_stalled:
            super().on_train_epoch_end(trainer, module)
        trainer.should_stop = self._run.best.has_stalled

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Nothing: the trainer finishes the run."""

    def _start_epoch(self, trainer: Trainer) -> int:
        loader: Any = trainer.train_dataloader
        epoch, sampler = trainer.current_epoch + 1, loader.sampler
        return self._run.start_epoch(
            epoch, self._steps(trainer), self._batch_size, partial(sampler.examples_of, epoch)
        )

    def _seed(self, trainer: Trainer, batch_idx: int, stage: str) -> None:
        """Nothing: a module that draws random numbers seeds them itself."""


def make_trainer(
    run: Record,
    args: TrainerOptions,
    device: torch.device,
    model: nn.Module,
    score: Callable[[dict[str, float]], tuple[float, ...]],
    *,
    evaluate_every: int | None = None,
    accumulate_grad_batches: int = 1,
    strategy: Callable[..., DDPStrategy] = JsonStrategy,
) -> Trainer:
    """Create a Trainer for the ranks that a launcher has started. It writes into the run folder.

    For `model`, `score` and `evaluate_every` see TrainerFolder.
    """
    world = run.world
    chosen: DDPStrategy | Literal["auto"] = "auto"
    devices: list[int] | Literal["auto", 1] = 1
    if world.size > 1:
        # Lightning indexes the list with the local rank. Every entry is this rank's device: with
        # --gpus-per-task=1 each rank sees only its own GPU, as number 0.
        chosen, devices = strategy(world, parallel_devices=[device] * world.local_size), "auto"
    elif device.index is not None:
        devices = [device.index]
    scaled = [Fp16(device, sharded=run.in_parts)] if args.precision == "fp16" else []
    return Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        strategy=chosen,
        devices=devices,
        num_nodes=world.nodes,
        plugins=[WorldEnvironment(world), *scaled],
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        accumulate_grad_batches=accumulate_grad_batches,
        use_distributed_sampler=False,  # the samplers of hpctrain divide the data between the ranks
        num_sanity_val_steps=0,
        callbacks=[TrainerFolder(run, args.batch_size, model, score, evaluate_every)],
        enable_progress_bar=False,  # Run shows the progress
        enable_model_summary=False,
        logger=False,
        default_root_dir=run.folder,
    )
