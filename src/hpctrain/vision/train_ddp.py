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

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpctrain.checkpoints.checkpoint import load_optimizer
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import all_or_none, process_group
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.options import Parser, add_device
from hpctrain.run.run import Run
from hpctrain.training.batches import steps_per_epoch, training_batches
from hpctrain.training.buckets import settle_buckets
from hpctrain.vision import recipe


def main(world: World, arguments: list[str]) -> None:
    """Train with the options at the end of this file."""
    train(world, parse(parser(), arguments, world))


def train(world: World, args: argparse.Namespace) -> None:
    """Load the data and train; evaluate and save a checkpoint after each epoch.

    A collective call. Raises HpctrainError.
    """
    device = choose_device(world, args.device)
    with process_group(world, device):
        training_set, test_set = recipe.load_data(args, world)
        steps = steps_per_epoch(len(training_set), args.batch_size, world)
        run = Run(world, "train_ddp", args, device)

        model = recipe.build_model(args, training_set, device)
        run.count_flops(lambda: recipe.count_flops(model, training_set, args))
        parallel = (
            DistributedDataParallel(model)
            if world.size > 1
            else DataParallel(model)
            if args.strategy == "dp"
            else model
        )
        optimizer = recipe.make_optimizer(args, parallel.parameters())
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

        if state := run.resume(device, args.epochs, model):
            model.load_state_dict(state["model"])
            with all_or_none(world):
                load_optimizer(optimizer, state, run.resume_from)

        def make_state() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        def compute_loss(images: Tensor, labels: Tensor) -> Tensor:
            with autocast:
                return cross_entropy(parallel(images), labels)

        def evaluate() -> tuple[float, float]:
            if world.size > 1:
                # all ranks evaluate with rank 0's batch normalization, which is saved
                for buffer in model.buffers():
                    dist.broadcast(buffer, src=0)
            with autocast:
                return recipe.evaluate(model, test_set, args, world, device, partial(total, world))

        if world.size > 1:
            settle_buckets(
                parallel,
                lambda: compute_loss(*training_set.batch(torch.tensor([0]), device, args.image_size)),
            )
        resumed_after_last = run.epoch >= args.epochs
        for epoch in range(run.epoch + 1, args.epochs + 1):
            # depends on the epoch alone: resuming needs no scheduler state
            for group in optimizer.param_groups:
                group["lr"] = args.lr * args.lr_decay ** (epoch - 1)
            parallel.train()
            batches = partial(training_batches, len(training_set), args.batch_size, args.seed, epoch, world)
            done = run.start_epoch(
                epoch, steps, args.batch_size, lambda step, batches=batches: next(batches(skip=step))
            )
            for images, labels in run.time_data(
                training_set.batches(batches(skip=done), device, args.image_size, epoch)
            ):
                loss = compute_loss(images, labels)
                optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients over all ranks meanwhile
                run.check_gradients()
                optimizer.step()
                run.step(loss.detach(), learning_rate=optimizer.param_groups[0]["lr"])
                if run.must_save():
                    run.save(make_state())
            run.end_epoch()

            test_loss, test_accuracy = evaluate()
            run.metrics(test_loss=test_loss, test_accuracy=test_accuracy)
            run.save(make_state(), score=(test_accuracy, -test_loss))
        if resumed_after_last:
            test_loss, test_accuracy = evaluate()
        run.finish(model, test_loss=test_loss, test_accuracy=test_accuracy)


def total(world: World, value: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


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


def parse(parser: Parser, arguments: list[str], world: World) -> argparse.Namespace:
    """Parse the command line. Raises UsageError, also if it does not fit the number of ranks."""
    args = recipe.parse(parser, arguments)
    if args.strategy == "dp" and world.size > 1:
        raise UsageError(
            f"--strategy dp is for one process, but {world.launcher_command} started {world.size}: use no launcher"
        )
    if args.strategy == "dp" and args.compile:
        raise UsageError(
            "--compile is not for --strategy dp, which copies the model to each GPU in each step: leave out one"
        )
    return args
