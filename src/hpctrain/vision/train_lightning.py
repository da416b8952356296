"""Train an image classifier with PyTorch Lightning: model, data, order and losses are those of train_ddp.

    hpctrain train_lightning

One node with 4 ranks; --devices and --num-nodes default to what the launcher started:

    torchrun --nproc-per-node 4 -m hpctrain train_lightning

Two nodes with 2 ranks each, in the container, on Slurm:

    sbatch launch/apptainer_ddp.sh train_lightning --epochs 3

The checkpoints in the run folder are Lightning's own (Classifier.load_from_checkpoint() reads them). Each
also has the weights of the network as "model", under the names that checkpoints of train_ddp have.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.distributed.device import choose_device
from hpctrain.distributed.lazy_imports import import_of_lightning
from hpctrain.distributed.rendezvous import process_group
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.lightning.trainer import make_trainer, quiet
from hpctrain.parser import Parser, positive
from hpctrain.run.options import Prune, RunOptions
from hpctrain.run.record import Record
from hpctrain.text import counted
from hpctrain.training.batches import evaluation_batches, steps_per_epoch, training_batches
from hpctrain.training.precision import set_precision
from hpctrain.vision import data, recipe
from hpctrain.vision.folder import ImageLoader

with import_of_lightning():
    from lightning.pytorch import LightningModule
    from torchmetrics import MeanMetric


class LightningOptions(recipe.ImageOptions):
    """The options of train_lightning, as parse() fills them in."""

    accelerator: str
    devices: int
    num_nodes: int


class Classifier(LightningModule):
    """A network and how it is trained; `args` are the options of the command line."""

    def __init__(self, net: nn.Module, args: LightningOptions) -> None:
        super().__init__()
        self.net, self.args = net, args
        # Sums over all ranks in double precision, like those of the other trainers; by default without NaN.
        self.test_loss = MeanMetric(nan_strategy=math.nan).set_dtype(torch.float64)
        self.test_accuracy = MeanMetric().set_dtype(torch.float64)
        self.weight = 1  # of each test image of this rank

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Turn pixels into images, on the device."""
        pixels, labels = batch
        return data.to_images(pixels, self.args.image_size), labels

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Set the learning rate of the epoch: Lightning has no on_train_epoch_start() in a resumed epoch."""
        recipe.set_learning_rate(self.trainer.optimizers[0], self.args, self.current_epoch)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over a batch."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the loss and accuracy of the test set."""
        images, labels = batch
        logits = self.net(images)
        self.test_loss.update(cross_entropy(logits, labels), weight=len(labels) * self.weight)
        self.test_accuracy.update(logits.argmax(1) == labels, weight=self.weight)
        self.log_dict({"test_loss": self.test_loss, "test_accuracy": self.test_accuracy})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer of the model's recipe."""
        return recipe.make_optimizer(self.args, self.net.parameters(), self.args.precision)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let the optimizer keep its own options, as load_optimizer() does for the other trainers."""
        if self._trainer is None:
            return  # load_from_checkpoint()
        own = self.configure_optimizers().state_dict()["param_groups"]
        for mine, saved in zip(own, checkpoint["optimizer_states"][0]["param_groups"], strict=True):
            saved |= mine


class ImageBatchSampler:
    """A sampler of this rank's batches, in the order of the epoch that Lightning sets.

    A batch is the epoch, counted from 1, and int64 indices [batch_size / world.size].
    """

    def __init__(self, examples: int, args: LightningOptions, world: World) -> None:
        self._examples, self._args, self._world = examples, args, world
        self._epoch, self._skip = 1, (0, 0)

    def skip(self, epoch: int, steps: int) -> None:
        """Leave out the first steps of this epoch, counted from 1, which a resumed run has done already."""
        self._skip = epoch, steps

    def examples_of(self, epoch: int, step: int) -> Tensor:
        """The examples of this rank in a step, counted from 0, of an epoch, counted from 1."""
        return next(self._batches(epoch, skip=step))

    def _batches(self, epoch: int, skip: int) -> Iterator[Tensor]:
        return training_batches(
            self._examples, self._args.batch_size, self._args.seed, epoch, self._world, skip
        )

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch, also when it resumes. It counts epochs from 0."""
        self._epoch = epoch + 1

    def __len__(self) -> int:
        return steps_per_epoch(self._examples, self._args.batch_size, self._world)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        # A generator reads the epoch at the first batch: a resumed Trainer calls iter() before set_epoch().
        skip = self._skip[1] if self._epoch == self._skip[0] else 0
        for index in self._batches(self._epoch, skip):
            yield self._epoch, index


def main(world: World, arguments: list[str], prune: Prune | None = None) -> None:
    """Train with the options at the end of this file."""
    args = parse(arguments, world)
    quiet()
    device = choose_device(world, {"gpu": "cuda"}.get(args.accelerator, args.accelerator))
    args.precision = set_precision(args.precision, args.tf32, world, device)
    with process_group(world, device):  # Lightning uses it and creates none of its own
        training_set, test_set = recipe.load_data(args, world)
        steps_per_epoch(len(training_set), args.batch_size, world)  # raises UsageError before a folder exists
        options = RunOptions.from_args({**vars(args), "prune": prune})
        run = Record(world, "train_lightning", options, device)

        module = Classifier(recipe.build_model(args, training_set, device), args)
        run.count_flops(lambda: recipe.count_flops(module.net, training_set, args))

        def score(metrics: dict[str, float]) -> tuple[float, ...]:
            return metrics["test_accuracy"], -metrics["test_loss"]

        trainer = make_trainer(run, args, device, module.net, score)
        evaluation = [(0, index) for index in evaluation_batches(len(test_set), args.batch_size, world)]
        # Lightning needs a batch on each rank. There may be fewer images than ranks: this one does not count.
        if not evaluation:
            evaluation, module.weight = [(0, torch.tensor([0]))], 0
        test_loader = ImageLoader(test_set, evaluation)
        state = run.resume(device, args.epochs, module.net, "state_dict")
        if state and run.epoch >= args.epochs:  # resumed after the last epoch
            module.net.load_state_dict(state["model"])
            trainer.validate(module, test_loader, verbose=False)
        else:
            sampler = ImageBatchSampler(len(training_set), args, world)
            if state:
                sampler.skip(run.epoch + 1, state["step"])
            train_loader = ImageLoader(training_set, sampler)
            trainer.fit(module, train_loader, test_loader, ckpt_path=run.resume_from)
        run.finish(module.net, **{name: value.item() for name, value in trainer.callback_metrics.items()})


def parser() -> Parser:
    """The options of this trainer, on top of those of all vision trainers (recipe.py)."""
    parser = recipe.vision_parser(
        "train_lightning", "Train an image classifier with PyTorch Lightning, on any number of ranks."
    )
    add = parser.add_argument
    add(
        "--accelerator",
        choices=["auto", "cpu", "gpu"],
        default="auto",
        help="auto: a GPU if there is one (default: %(default)s)",
    )
    add(
        "--devices",
        type=positive(int),
        metavar="N",
        help="ranks per node (default: as many as the launcher started)",
    )
    add(
        "--num-nodes",
        type=positive(int),
        metavar="N",
        help="number of nodes (default: as many as the launcher uses)",
    )
    return parser


def parse(arguments: list[str], world: World) -> LightningOptions:
    """Parse the command line. Raises UsageError, also if it contradicts the launcher."""
    args = recipe.parse(parser(), arguments, LightningOptions())
    started = "without a launcher there is"
    if world.launcher != "single":
        started = f"{world.launcher_command} started"
    if args.devices not in (None, world.local_size):
        ranks = counted(world.local_size, "rank")
        raise UsageError(
            f"--devices {args.devices}, but {started} {ranks} on this node: "
            "make them equal, or leave --devices out"
        )
    if args.num_nodes not in (None, world.nodes):
        ranks = counted(world.size, "rank")
        raise UsageError(
            f"--num-nodes {args.num_nodes}, but {started} {ranks} on {counted(world.nodes, 'node')}: "
            "make them equal, or leave --num-nodes out"
        )
    args.devices, args.num_nodes = world.local_size, world.nodes
    return args
