"""Train on MNIST, or on digits, by PyTorch Lightning: the same model, data, order and losses as train_ddp.

    hpctrain train_lightning

One node with 4 ranks; what the launcher started need not be said again (--devices 4):

    torchrun --nproc-per-node 4 -m hpctrain train_lightning

Two nodes with 2 ranks each, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh train_lightning --epochs 3

Lightning's own checkpoints are in the run folder (Classifier.load_from_checkpoint() reads them), and in
each the bare weights as "model", as train_ddp has them.
"""

import argparse
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from hpctrain.lightning_plugins import make_trainer, quiet
from hpctrain.run import Run, positive
from hpctrain.vision import data, recipe
from hpctrain.world import UsageError, World, all_or_none, choose_device, process_group


class Classifier(LightningModule):
    """A net and how it is trained; `args` are the options of the command line."""

    def __init__(self, net: nn.Module, args: argparse.Namespace) -> None:
        super().__init__()
        self.net, self.args = net, args
        # Sums over all ranks, each example once; in double precision, like those of the other trainers.
        self.test_loss, self.test_accuracy = (MeanMetric().set_dtype(torch.float64) for _ in range(2))

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """From bytes to images, on the device."""
        pixels, labels = batch
        return data.to_images(pixels, recipe.RECIPES[self.args.model].side), labels

    def on_train_epoch_start(self) -> None:
        """The learning rate, by epoch and nothing else, so that resuming needs no scheduler's state."""
        for group in self.optimizers().param_groups:
            group["lr"] = self.args.lr * self.args.lr_decay**self.current_epoch

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch; Lightning does the rest."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and accuracy over the whole test set."""
        images, labels = batch
        logits = self.net(images)
        self.test_loss.update(cross_entropy(logits, labels), weight=len(labels))
        self.test_accuracy.update(logits.argmax(1) == labels)
        self.log_dict({"test_loss": self.test_loss, "test_accuracy": self.test_accuracy})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the model's recipe."""
        return recipe.optimizer(self.args, self.net.parameters())


class ByIndex(Dataset):
    """Images as a dataset that a sampler asks for a whole batch at a time: pixels [b, 28, 28] uint8, labels [b]."""

    def __init__(self, images: data.Images) -> None:
        self._images = images

    def __getitem__(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self._images.pixels[index], self._images.labels[index]


class Batches:
    """A sampler of whole batches: data.batches() of the epoch that Lightning sets, counted from 0 there and from 1 here."""

    def __init__(self, examples: int, args: argparse.Namespace, world: World) -> None:
        self._examples, self._args, self._world = examples, args, world
        self._epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch, also when it resumes."""
        self._epoch = epoch + 1

    def __len__(self) -> int:
        return data.steps_per_epoch(self._examples, self._args.batch_size, self._world)

    def __iter__(self) -> Iterator[Tensor]:
        # A generator looks at the epoch when the first batch is asked for: a resumed Trainer calls iter() before set_epoch().
        yield from data.batches(self._examples, self._args.batch_size, self._args.seed, self._epoch, self._world)


def main(world: World, arguments: list[str]) -> None:
    """Train as the flags at the foot of this file say."""
    args = parse(arguments, world)
    quiet()
    device = choose_device(world, {"gpu": "cuda"}.get(args.accelerator, args.accelerator))
    with process_group(world, device):  # Lightning finds it and makes none of its own
        with all_or_none(world):
            train, test = data.load(args.data)
        sampler = Batches(len(train), args, world)
        len(sampler)  # an impossible batch size is an error now
        run = Run(world, "train_lightning", args, device)

        module = Classifier(recipe.build(args, device), args)
        unused = args.strategy == "ddp_find_unused_parameters_true"
        trainer = make_trainer(run, args, device, bare=lambda module: module.net, find_unused_parameters=unused)
        run.resume(device, args.epochs)
        trainer.fit(
            module,
            DataLoader(ByIndex(train), sampler=sampler, batch_size=None),
            DataLoader(ByIndex(test), sampler=list(data.share(len(test), args.batch_size, world)), batch_size=None),
            ckpt_path=run.resume_from,
        )
        run.finish(module.net, **{name: value.item() for name, value in trainer.callback_metrics.items()})


def parse(arguments: list[str], world: World) -> argparse.Namespace:
    """The flags of this trainer, and those of all vision trainers (recipe.py). Raises UsageError."""
    parser = recipe.vision_parser("train_lightning", "Train on MNIST or digits by PyTorch Lightning, on any number of ranks.")
    add = parser.add_argument
    add("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="(default: a GPU where there is one)")
    add("--devices", type=positive(int), help="ranks on each node (default: as the launcher started)")
    add("--num-nodes", type=positive(int), help="(default: as the launcher started)")
    add("--strategy", choices=["ddp", "ddp_find_unused_parameters_true"], default="ddp", help="(default: %(default)s)")
    args = recipe.parse(parser, arguments)
    if args.devices not in (None, world.local_size):
        raise UsageError(
            f"--devices {args.devices}, but {started(world, world.local_size, 'rank')} on this node: make them equal"
        )
    if args.num_nodes not in (None, world.nodes):
        raise UsageError(f"--num-nodes {args.num_nodes}, but {started(world, world.nodes, 'node')}: make them equal")
    args.devices, args.num_nodes = world.local_size, world.nodes
    return args


def started(world: World, number: int, thing: str) -> str:
    """For an error: "srun started 2 ranks", "torchrun started ranks on 2 nodes"."""
    if world.launcher == "single":
        return f"without a launcher there is 1 {thing}"
    launcher = {"slurm": "srun", "openmpi": "mpirun", "mpich": "mpiexec"}.get(world.launcher, world.launcher)
    things = f"{number} {thing}{'s' if number > 1 else ''}"
    return f"{launcher} started {things if thing == 'rank' else f'ranks on {things}'}"
