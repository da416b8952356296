"""Train an image classifier with FSDP2 of PyTorch: each rank holds a part of the weights, gradients and
optimizer.

One node with 4 ranks:

    torchrun --nproc-per-node 4 -m hpctrain train_fsdp

Two nodes with 2 ranks each, in the container, on Slurm:

    sbatch launch/apptainer_ddp.sh train_fsdp --model resnet50 --precision bf16 --data FOLDER

The numbers are those of train_ddp, also with --precision bf16: weights are gathered as fp32, which batch
normalization needs. One process has nothing to shard and does what train_ddp does.
"""

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpctrain.checkpoints.checkpoint import load_optimizer
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import process_group
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.options import Parser, add_device
from hpctrain.run.run import Run
from hpctrain.training.batches import evaluation_batches, steps_per_epoch, training_batches
from hpctrain.training.sharding import (
    copy_without_weights,
    gather_model,
    load_parts,
    shard,
    split,
    split_state,
)
from hpctrain.vision import recipe


def main(world: World, arguments: list[str]) -> None:
    """Train with the options at the end of this file."""
    args = recipe.parse(parser(), arguments)
    if args.fast_kernels:
        raise UsageError(
            "--fast-kernels is not for train_fsdp, which cannot shard channels-last weights: leave it out"
        )
    train(world, args)


def train(world: World, args: argparse.Namespace) -> None:
    """Load the data and train; evaluate and save a checkpoint after each epoch.

    A collective call. Raises HpctrainError.
    """
    device = choose_device(world, args.device)
    with process_group(world, device):
        training_set, test_set = recipe.load_data(args, world)
        steps = steps_per_epoch(len(training_set), args.batch_size, world)
        run = Run(world, "train_fsdp", args, device)

        run.in_parts = world.size > 1  # each rank saves its part of a checkpoint
        model = recipe.build_model(args, training_set, device, sharded=run.in_parts)
        run.count_flops(lambda: recipe.count_flops(model, training_set, args))
        whole = model
        if run.in_parts:
            model.to(memory_format=torch.contiguous_format)  # fully_shard() takes no other order
            whole = copy_without_weights(model)
            shard(model, device)
        optimizer = recipe.make_optimizer(args, model.parameters())
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

        if state := run.resume(device, args.epochs, model):
            load_parts(model, state["model"])
            load_optimizer(optimizer, state, run.resume_from, partial(split_state, optimizer))

        def make_state() -> dict[str, Any]:
            return split({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

        def evaluate() -> tuple[float, float]:
            most = torch.tensor(
                sum(1 for _ in evaluation_batches(len(test_set), args.batch_size, world)), device=device
            )
            own = most.item()
            if world.size > 1:
                dist.all_reduce(most, dist.ReduceOp.MAX)
                # all ranks evaluate with rank 0's batch normalization, which is saved
                for buffer in model.buffers():
                    dist.broadcast(buffer, src=0)

            def total(value: Tensor) -> Tensor:
                # all ranks gather weights in each forward pass, so they need as many of them
                for _ in range(own, most.item()):
                    model(test_set.batch(torch.tensor([0]), device, args.image_size)[0])
                if world.size > 1:
                    dist.all_reduce(value)
                return value

            with autocast:
                return recipe.evaluate(model, test_set, args, world, device, total)

        resumed_after_last = run.epoch >= args.epochs
        for epoch in range(run.epoch + 1, args.epochs + 1):
            # depends on the epoch alone: resuming needs no scheduler state
            for group in optimizer.param_groups:
                group["lr"] = args.lr * args.lr_decay ** (epoch - 1)
            model.train()
            batches = partial(training_batches, len(training_set), args.batch_size, args.seed, epoch, world)
            done = run.start_epoch(
                epoch, steps, args.batch_size, lambda step, batches=batches: next(batches(skip=step))
            )
            for images, labels in run.time_data(
                training_set.batches(batches(skip=done), device, args.image_size, epoch)
            ):
                with autocast:
                    # gathers the weights of a block while it computes
                    loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # averages the gradients over all ranks, and each rank keeps its part
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
        if run.in_parts:
            whole = gather_model(model, whole)
        run.finish(whole, test_loss=test_loss, test_accuracy=test_accuracy)


def parser() -> Parser:
    """The options of this trainer, on top of those of all vision trainers (recipe.py)."""
    parser = recipe.vision_parser(
        "train_fsdp", "Train an image classifier with FSDP2, which shards the model over all ranks."
    )
    add_device(parser)
    return parser
