"""Train an image classifier with PyTorch's FSDP2.

Each rank holds a part of the weights, of the gradients and of the optimizer's state.

One node with 4 ranks:

    torchrun --nproc-per-node 4 -m hpctrain train_fsdp

Two nodes with 2 ranks each, in the container, on Slurm:

    sbatch launch/apptainer_ddp.sh train_fsdp --model resnet50 --precision bf16 --data FOLDER

The numbers are those of train_ddp. With --precision bf16, too: weights are gathered in fp32, which batch
normalization needs. A single process has nothing to shard, and trains as train_ddp does.
"""

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
from hpctrain.parser import Parser, add_device
from hpctrain.run.record import Record
from hpctrain.training.batches import evaluation_batches, steps_per_epoch
from hpctrain.training.buckets import broadcast_buffers
from hpctrain.training.precision import Scaler, load_scaler, make_autocast, set_precision
from hpctrain.training.sharding import (
    copy_without_weights,
    gather_model,
    load_parts,
    shard,
    split,
    split_state,
)
from hpctrain.vision import recipe
from hpctrain.vision.loop import train_epochs


class FsdpOptions(recipe.ImageOptions):
    """The options of train_fsdp."""

    device: str


def main(world: World, arguments: list[str]) -> None:
    """Train with the options at the end of this file. A collective call. Raises HpctrainError."""
    args = parse(arguments)
    device = choose_device(world, args.device)
    args.precision = set_precision(args.precision, args.tf32, world, device)
    with process_group(world, device):
        training_set, test_set = recipe.load_data(args, world)
        steps_per_epoch(len(training_set), args.batch_size, world)  # raises UsageError before a folder exists
        run = Record(world, "train_fsdp", args, device)

        run.in_parts = world.size > 1  # each rank saves its part of a checkpoint
        model = recipe.build_model(args, training_set, device, sharded=run.in_parts)
        run.count_flops(lambda: recipe.count_flops(model, training_set, args))
        whole = model
        if run.in_parts:
            # fully_shard() takes no other memory format
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # torch's stub
            whole = copy_without_weights(model)
            shard(model, device)
        optimizer = recipe.make_optimizer(args, model.parameters())
        autocast = make_autocast(args.precision, device)
        scaler = Scaler(args.precision, device, sharded=run.in_parts)

        if state := run.resume(device, args.epochs, model):
            load_parts(model, state["model"])
            assert run.resume_from
            load_optimizer(optimizer, state, run.resume_from, partial(split_state, optimizer))
            load_scaler(scaler, state, run.resume_from)

        def train_step(images: Tensor, labels: Tensor) -> Tensor:
            recipe.set_learning_rate(optimizer, args, run.epoch)
            with autocast:
                loss = cross_entropy(model(images), labels)  # gathers the weights of a block when it computes
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # averages the gradients over all ranks; each rank keeps its part
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
                # Each forward pass gathers weights, so all ranks need the same number of them.
                for _ in range(missing_batches(len(test_set), args.batch_size, world)):
                    model(test_set.batch(torch.tensor([0]), device, args.image_size)[0])
                dist.all_reduce(value)
            return value

        def make_state() -> dict[str, Any]:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return split(state | {"scaler": scaler.state_dict()})

        test_loss, test_accuracy = train_epochs(
            run, args, device, training_set, args.batch_size, optimizer, train_step, evaluate, make_state
        )
        if run.in_parts:
            whole = gather_model(model, whole)
        run.finish(whole, test_loss=test_loss, test_accuracy=test_accuracy)


def missing_batches(examples: int, batch_size: int, world: World) -> int:
    """The evaluation batches that this rank has fewer than the rank with the most examples."""
    most = -(-examples // world.size)
    own = sum(1 for _ in evaluation_batches(examples, batch_size, world))
    return -(-most // batch_size) - own


def parser() -> Parser:
    """The options of this trainer, on top of those of all vision trainers (recipe.py)."""
    parser = recipe.vision_parser(
        "train_fsdp", "Train an image classifier with FSDP2, which shards the model over all ranks."
    )
    add_device(parser)
    return parser


def parse(arguments: list[str]) -> FsdpOptions:
    """Parse the command line. Raises UsageError."""
    args = recipe.parse(parser(), arguments, FsdpOptions())
    if args.fast_kernels:
        raise UsageError(
            "--fast-kernels is not for train_fsdp, which cannot shard channels-last weights: leave it out"
        )
    return args
