"""Train on MNIST, or on digits, by PyTorch's DistributedDataParallel.

One process (train_single), no launcher:

    hpctrain train_ddp

One node with 4 ranks:

    torchrun --nproc-per-node 4 -m hpctrain train_ddp

One process with all GPUs of a node, by DataParallel:

    hpctrain train_ddp --strategy dp

Two nodes with 2 ranks each, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh train_ddp --model resnet50 --precision bf16
"""

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpctrain.run import Run
from hpctrain.vision import data, recipe
from hpctrain.world import UsageError, World, all_or_none, choose_device, process_group


def main(world: World, arguments: list[str]) -> None:
    """Train as the flags at the foot of this file say."""
    args = parse(arguments, world)
    device = choose_device(world, args.device)
    with process_group(world, device):
        with all_or_none(world):
            train, test = data.load(args.data)
        steps = data.steps_per_epoch(len(train), args.batch_size, world)
        run = Run(world, "train_ddp", args, device)

        model = recipe.build(args, device)
        side = recipe.RECIPES[args.model].side
        parallel = DistributedDataParallel(model) if world.size > 1 else DataParallel(model) if args.strategy == "dp" else model
        optimizer = recipe.optimizer(args, parallel.parameters())
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

        first_epoch = 1
        if state := run.resume(device, args.epochs):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first_epoch = state["epoch"] + 1

        log_every = -(-steps // 5)
        for epoch in range(first_epoch, args.epochs + 1):
            for group in optimizer.param_groups:  # by epoch and nothing else, so that resuming needs no scheduler's state
                group["lr"] = args.lr * args.lr_decay ** (epoch - 1)
            parallel.train()
            run.start_epoch(epoch, steps)
            loss_sum, since = torch.zeros((), device=device), time.perf_counter()
            for step, index in enumerate(data.batches(len(train), args.batch_size, args.seed, epoch, world), 1):
                images, labels = train.batch(index, device, side)
                with autocast:
                    loss = cross_entropy(parallel(images), labels)
                optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients over the ranks in here
                optimizer.step()
                run.step()

                loss_sum += loss.detach()
                if step % log_every == 0:
                    mean = total(world, loss_sum).item() / (log_every * world.size)
                    now = time.perf_counter()
                    speed = log_every * args.batch_size / (now - since)
                    run.metrics(epoch=epoch, step=(epoch - 1) * steps + step, train_loss=mean, examples_per_s=speed)
                    loss_sum, since = torch.zeros((), device=device), now
            run.end_epoch()

            if world.size > 1:
                for buffer in model.buffers():  # batch normalisation's, of rank 0; so the metrics are of what is saved
                    dist.broadcast(buffer, src=0)
            with autocast:
                test_loss, test_accuracy = recipe.evaluate(model, test, args, world, device, partial(total, world))
            run.metrics(epoch=epoch, step=epoch * steps, test_loss=test_loss, test_accuracy=test_accuracy)
            run.save(epoch, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        run.finish(model, test_loss=test_loss, test_accuracy=test_accuracy)


def total(world: World, value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


def parse(arguments: list[str], world: World) -> argparse.Namespace:
    """The flags of this trainer, and those of all vision trainers (recipe.py)."""
    parser = recipe.vision_parser("train_ddp", "Train on MNIST or digits by DDP; without a launcher, in one process.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: a GPU where there is one)")
    parser.add_argument(
        "--strategy",
        choices=["ddp", "dp"],
        default="ddp",
        help="dp: one process with all its GPUs (default: %(default)s)",
    )
    args = recipe.parse(parser, arguments)
    if args.strategy == "dp" and world.size > 1:
        raise UsageError(f"--strategy dp is for one process, but {world.launcher} started {world.size}: use no launcher")
    return args
