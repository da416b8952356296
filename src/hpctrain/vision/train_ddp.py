"""Train an image classifier with PyTorch's DistributedDataParallel.

One process, without a launcher:

    hpctrain train_ddp

One node with 4 ranks:

    torchrun --nproc-per-node 4 -m hpctrain train_ddp

One process with all GPUs of a node, with DataParallel:

    hpctrain train_ddp --strategy dp

Two nodes with 2 ranks each, in the container, on Slurm:

    sbatch launch/apptainer_ddp.sh train_ddp --model resnet50 --precision bf16 --data FOLDER
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpctrain.checkpoints.checkpoint import load_optimizer
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import all_or_none, process_group
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.parser import Parser, add_device
from hpctrain.run.record import Record
from hpctrain.training.batches import steps_per_epoch
from hpctrain.training.buckets import broadcast_buffers, settle_buckets
from hpctrain.training.precision import (
    Scaler,
    load_scaler,
    make_autocast,
    set_precision,
    set_precision_in_threads,
)
from hpctrain.vision import recipe
from hpctrain.vision.loop import train_epochs


class DdpOptions(recipe.ImageOptions):
    """The options of train_ddp."""

    device: str
    strategy: str


def main(world: World, arguments: list[str]) -> None:
    """Train with the options at the end of this file. A collective call. Raises HpctrainError."""
    args = parse(arguments, world)
    device = choose_device(world, args.device)
    args.precision = set_precision(args.precision, args.tf32, world, device)
    with process_group(world, device):
        training_set, test_set = recipe.load_data(args, world)
        steps_per_epoch(len(training_set), args.batch_size, world)  # raises UsageError before a folder exists
        run = Record(world, "train_ddp", args, device)

        model = recipe.build_model(args, training_set, device)
        run.count_flops(lambda: recipe.count_flops(model, training_set, args))
        parallel: nn.Module = model
        if world.size > 1:
            # evaluate() copies the batch-norm statistics of rank 0, on which no training step depends
            # The name that torch 2.13 has for this option is not in the older torch of other images.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            parallel = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        elif args.strategy == "dp":
            parallel = DataParallel(model)
            set_precision_in_threads(model, args.precision, device)
        optimizer = recipe.make_optimizer(args, parallel.parameters())
        autocast = make_autocast(args.precision, device)
        scaler = Scaler(args.precision, device)

        if state := run.resume(device, args.epochs, model):
            model.load_state_dict(state["model"])
            assert run.resume_from
            with all_or_none(world):
                load_optimizer(optimizer, state, run.resume_from)
                load_scaler(scaler, state, run.resume_from)

        def compute_loss(images: Tensor, labels: Tensor) -> Tensor:
            with autocast:
                return cross_entropy(parallel(images), labels)

        def train_step(images: Tensor, labels: Tensor) -> Tensor:
            recipe.set_learning_rate(optimizer, args, run.epoch)
            loss = compute_loss(images, labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # meanwhile, DDP averages the gradients over all ranks
            scaler.unscale_(optimizer)
            run.check_gradients(scaler, loss)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        def evaluate() -> tuple[float, float]:
            broadcast_buffers(model, world)
            with autocast:
                return recipe.evaluate(model, test_set, args, world, device, sum_over_ranks)

        def sum_over_ranks(value: Tensor) -> Tensor:
            if world.size > 1:
                dist.all_reduce(value)
            return value

        def make_state() -> dict[str, Any]:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return state | {"scaler": scaler.state_dict()}

        if world.size > 1:
            example = training_set.batch(torch.tensor([0]), device, args.image_size)
            settle_buckets(parallel, lambda: compute_loss(*example))
        test_loss, test_accuracy = train_epochs(
            run, args, device, training_set, args.batch_size, optimizer, train_step, evaluate, make_state
        )
        run.finish(model, test_loss=test_loss, test_accuracy=test_accuracy)


def parser() -> Parser:
    """The options of this trainer, on top of those of all vision trainers (recipe.py)."""
    parser = recipe.vision_parser(
        "train_ddp", "Train an image classifier with DDP; without a launcher, in one process."
    )
    add_device(parser)
    parser.add_argument(
        "--strategy",
        choices=["ddp", "dp"],
        default="ddp",
        help="dp: DataParallel, one process with all its GPUs (default: %(default)s)",
    )
    return parser


def parse(arguments: list[str], world: World) -> DdpOptions:
    """Parse the command line. Raises UsageError, also if it does not fit the number of ranks."""
    args = recipe.parse(parser(), arguments, DdpOptions())
    if args.strategy == "dp" and world.size > 1:
        started = f"{world.launcher_command} started {world.size}"
        raise UsageError(f"--strategy dp is for one process, but {started}: use no launcher")
    if args.strategy == "dp" and args.compile:
        raise UsageError(
            "--compile is not for --strategy dp, which copies the model to each GPU in each step: "
            "leave out one"
        )
    return args
