"""Train an image classifier with PyTorch Lightning: model, data, order and losses are those of train_ddp.

    hpctrain train_lightning

One node with 4 ranks; --devices and --num-nodes default to what the launcher started:

    torchrun --nproc-per-node 4 -m hpctrain train_lightning

Two nodes with 2 ranks each, in the container, on Slurm:

    sbatch launch/apptainer_ddp.sh train_lightning --epochs 3

The checkpoints in the run folder are Lightning's own (Classifier.load_from_checkpoint() reads them). Each
also has the weights of the network as "model", under the names that checkpoints of train_ddp have.
"""

import logging
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import broadcast, process_group
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import UsageError
from hpctrain.lightning import RunFolder, WorldEnvironment
from hpctrain.parser import Parser, positive
from hpctrain.run.options import Prune, RunOptions
from hpctrain.text import counted
from hpctrain.training.batches import EpochPlan, evaluation_batches, steps_per_epoch
from hpctrain.training.precision import Scaler, set_precision
from hpctrain.training.strategies.ddp import LEAN, broadcast_buffers, settle_buckets
from hpctrain.vision import data, recipe
from hpctrain.vision.folder import Batch, ImageLoader, ImageSet

PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed"}


class LightningOptions(recipe.ImageOptions):
    """The options of train_lightning, as parse() fills them in."""

    accelerator: str
    devices: int
    num_nodes: int


class Mean(Metric):
    """The mean over all examples on all ranks, in float64 as in train_ddp: MeanMetric rounds to float32."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weight: int) -> None:
        """Add the values of some examples; with `weight` 0 they do not count."""
        self.sums += weight * torch.stack([values.double().sum(), self.sums.new_tensor(len(values))])

    def compute(self) -> Tensor:
        """The mean: float64, without dimensions."""
        return self.sums[0] / self.sums[1]


class Classifier(LightningModule):
    """A network and how it is trained; `args` are the options of the command line."""

    def __init__(
        self,
        net: nn.Module,
        args: LightningOptions,
        world: World = ALONE,
        training_set: ImageSet | None = None,
    ) -> None:
        super().__init__()
        self.net, self.args, self.world, self.training_set = net, args, world, training_set
        self.test_loss, self.test_accuracy = Mean(), Mean()
        self.weight = 1  # of each test image of this rank

    @property
    def flops_per_batch(self) -> int | None:
        """The operations to train on a batch of this rank; RunFolder asks for them on a GPU."""
        assert self.training_set
        flops = recipe.count_flops(self.net, self.training_set, self.args)
        return flops and flops * (self.args.batch_size // self.world.size)

    def on_fit_start(self) -> None:
        """Let DDP arrange its buckets by a loss, as in train_ddp. RunFolder calls no training_step()."""
        strategy = self.trainer.strategy
        if isinstance(strategy.model, DistributedDataParallel):
            assert self.training_set
            example = self.training_set.batch(torch.tensor([0]), self.device)

            def compute_loss() -> Tensor:
                loss = strategy.training_step(example, 0)
                assert isinstance(loss, Tensor)
                return loss

            settle_buckets(strategy.model, compute_loss)

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Turn pixels into images, on the device."""
        pixels, labels = batch
        return data.to_images(pixels, self.args.image_size), labels

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Set the learning rate of the step."""
        steps = self.trainer.num_training_batches
        lr = recipe.learning_rate(self.args, self.current_epoch, self.trainer.global_step, int(steps))
        recipe.set_learning_rate(self.trainer.optimizers[0], lr)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over a batch."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def on_validation_start(self) -> None:
        """Copy rank 0's batch normalization, which is saved, to all ranks, which evaluate with it."""
        broadcast_buffers(self.net, self.world)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the loss and accuracy of the test set."""
        images, labels = batch
        logits = self.net(images)
        self.test_loss.update(cross_entropy(logits, labels, reduction="none"), self.weight)
        self.test_accuracy.update(logits.argmax(1) == labels, self.weight)
        self.log_dict({"test_loss": self.test_loss, "test_accuracy": self.test_accuracy})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer of the model's recipe."""
        return recipe.make_optimizer(self.args, self.net.parameters(), self.args.precision)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let the optimizer keep its own options, which the Trainer would take from the checkpoint."""
        if self._trainer is None:
            return  # load_from_checkpoint()
        own = self.configure_optimizers().state_dict()["param_groups"]
        for mine, saved in zip(own, checkpoint["optimizer_states"][0]["param_groups"], strict=True):
            saved |= mine


class ImageBatchSampler:
    """A sampler of this rank's batches, in the order of the epoch that Lightning sets."""

    def __init__(self, examples: int, args: LightningOptions, world: World) -> None:
        self.batch_size, self._epoch = args.batch_size // world.size, 1
        self._plan = partial(EpochPlan, examples, args.batch_size, args.seed, world=world)

    def examples_of(self, epoch: int, step: int) -> Tensor:
        """The examples of this rank in a step, counted from 0, of an epoch, counted from 1."""
        return self._plan(epoch).examples_of(step)

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch, also when it resumes. It counts epochs from 0."""
        self._epoch = epoch + 1

    def __len__(self) -> int:
        return self._plan(self._epoch).steps

    def __iter__(self) -> Iterator[Batch]:
        for part in self._plan(self._epoch).parts():
            yield Batch(part.epoch, part.examples)


class JsonStrategy(DDPStrategy):
    """DDPStrategy whose ranks exchange JSON: Lightning's broadcast() unpickles what another rank sends."""

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(**options)
        self._world = world

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The JSON value of rank `src`, on every rank. A collective call. Raises HpctrainError."""
        return broadcast(self._world, obj, src)


def main(world: World, arguments: list[str], prune: Prune | None = None) -> None:
    """Train with the options at the end of this file. A collective call. Raises HpctrainError."""
    args = parse(arguments, world)
    quiet()
    device = choose_device(world, {"gpu": "cuda"}.get(args.accelerator, args.accelerator))
    args.precision = set_precision(args.precision, args.tf32, world, device)
    with process_group(world, device):  # Lightning uses it and creates none of its own
        training_set, test_set = recipe.load_data(args, world)
        steps_per_epoch(len(training_set), args.batch_size, world)  # raises UsageError before a folder exists
        module = Classifier(recipe.build_model(args, training_set, device), args, world, training_set)
        sampler = ImageBatchSampler(len(training_set), args, world)
        evaluation = [Batch(0, index) for index in evaluation_batches(len(test_set), args.batch_size, world)]
        # Lightning needs a batch on each rank. There may be fewer images than ranks: this one does not count.
        if not evaluation:
            evaluation, module.weight = [Batch(0, torch.tensor([0]))], 0

        folder = RunFolder(
            RunOptions.from_args({**vars(args), "prune": prune}),
            name="train_lightning",
            monitor="test_accuracy",
            model=module.net,
            fixed_epochs=bool(args.schedule),
        )
        plugins: list[Any] = [WorldEnvironment(world)]
        if args.precision == "fp16":  # for precision="16-mixed", Lightning would compute in bf16 on a CPU
            plugins.append(MixedPrecision("16-mixed", device.type, Scaler("fp16", device)))
        ranks: dict[str, Any] = {"devices": 1 if device.index is None else [device.index]}
        if world.size > 1:
            # Lightning takes the entry of the local rank. With --gpus-per-task=1 each rank sees only its own
            # GPU, as number 0. No step depends on the statistics of batch normalization of another rank.
            own = [device] * world.local_size
            ranks = {"strategy": JsonStrategy(world, parallel_devices=own, **LEAN)}
        trainer = Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            num_nodes=world.nodes,
            plugins=plugins,
            precision=PRECISIONS.get(args.precision),
            max_epochs=args.epochs,
            use_distributed_sampler=False,  # the samplers of hpctrain divide the data between the ranks
            num_sanity_val_steps=0,
            callbacks=[folder],
            enable_progress_bar=False,  # RunFolder shows the progress
            enable_model_summary=False,
            logger=False,
            default_root_dir="runs",  # Lightning resumes from hpc_ckpt_N.ckpt, if there is one
            **ranks,
        )
        train_loader, test_loader = ImageLoader(training_set, sampler), ImageLoader(test_set, evaluation)
        # as rank 0 sees it: a file system may show a new file later on other nodes
        newest = broadcast(world, folder.ckpt_path and str(folder.ckpt_path))
        trainer.fit(module, train_loader, test_loader, ckpt_path=newest)


def quiet() -> None:
    """Silence Lightning's tips, its lines about hardware, and warnings that do not apply here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "does not have many workers",  # the data are in memory
        "dataloader is not resumable",  # RunFolder makes it so
        "sync_dist=True",  # logged values are the same on all ranks
        "`broadcast_buffers` is deprecated",  # its new name is not in the older torch of other images
        "LeafSpec",  # Lightning 2.6 calls a function that torch 2.13 deprecates
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")


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
