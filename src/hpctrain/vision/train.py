"""Train an image classifier: train_ddp with DistributedDataParallel, train_fsdp with FSDP2.

One process, without a launcher:

    hpctrain train_ddp

One node with 4 ranks:

    torchrun --nproc-per-node 4 -m hpctrain train_ddp

One process with all GPUs of a node, with DataParallel:

    hpctrain train_ddp --strategy dp

Two nodes with 2 ranks each, in the container, on Slurm:

    sbatch launch/apptainer_ddp.sh train_ddp --model resnet50 --precision bf16 --data FOLDER
    sbatch launch/apptainer_ddp.sh train_fsdp --model resnet50 --precision bf16 --data FOLDER

With FSDP2 each rank holds a part of the weights, of the gradients and of the optimizer's state. The numbers
are those of train_ddp, with --precision bf16, too: weights are gathered in fp32, which batch normalization
needs. A single process has nothing to shard.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import process_group
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.parser import Parser, add_device
from hpctrain.run.options import Prune
from hpctrain.training.batches import steps_per_epoch
from hpctrain.training.run import Run
from hpctrain.training.strategies.ddp import LEAN
from hpctrain.vision import recipe
from hpctrain.vision.folder import ImageSet


class TrainOptions(recipe.ImageOptions):
    """The options of train_ddp and train_fsdp."""

    device: str
    strategy: str


def main(world: World, arguments: list[str], trainer: str = "train_ddp", prune: Prune | None = None) -> None:
    """Train with the options at the end of this file. A collective call. Raises HpctrainError."""
    args = parse(arguments, world, trainer)
    with process_group(world, choose_device(world, args.device)):
        training_set, test_set = recipe.load_data(args, world)
        steps = steps_per_epoch(len(training_set), args.batch_size, world)  # or refuses too few examples
        with Run(trainer, prune=prune, **vars(args)) as run:
            model = recipe.build_model(
                args, training_set, run.device, sharded=args.strategy == "fsdp" and world.size > 1
            )
            run.count_flops(lambda: recipe.count_flops(model, training_set, args))
            parallel = prepare(run, model, args, training_set)
            optimizer = recipe.make_optimizer(args, parallel.parameters(), run.precision)
            run.track(model=parallel, optimizer=optimizer)

            for epoch in run.epochs(args.epochs, fixed=bool(args.schedule)):
                for images, labels in run.batches(training_set, args.batch_size):
                    lr = recipe.learning_rate(args, epoch - 1, run.global_step, steps)
                    recipe.set_learning_rate(optimizer, lr)
                    with run.autocast():
                        loss = cross_entropy(parallel(images), labels)
                    run.backward(loss)  # meanwhile, the strategy averages the gradients over all ranks
                    run.update(optimizer)  # a step of the optimizer, and zero_grad()
                    run.step(loss, learning_rate=lr)
                run.score(**recipe.evaluate(model, test_set, args, run))


def prepare(run: Run, model: nn.Module, args: TrainOptions, training_set: ImageSet) -> nn.Module:
    """The model for all ranks. LEAN are the options of DDP that save memory and time.

    From an example, DDP learns in which order gradients become ready.
    """

    def compute_loss(parallel: nn.Module) -> torch.Tensor:
        images, labels = training_set.batch(torch.tensor([0]), run.device)
        return cross_entropy(parallel(images), labels)

    options: dict[str, Any] = {"example": compute_loss, **LEAN} if args.strategy == "ddp" else {}
    return run.prepare(model, strategy=args.strategy, **options)


def parser(trainer: str = "train_ddp") -> Parser:
    """The options of this trainer, on top of those of all vision trainers (recipe.py)."""
    descriptions = {
        "train_ddp": "Train an image classifier with DDP; without a launcher, in one process.",
        "train_fsdp": "Train an image classifier with FSDP2, which shards the model over all ranks.",
    }
    options = recipe.vision_parser(trainer, descriptions[trainer])
    add_device(options)
    options.add_argument(
        "--strategy",
        choices=["ddp", "fsdp", "dp"],
        default=trainer.removeprefix("train_"),
        help="ddp: each rank has the model; fsdp: each has a part of it; dp: DataParallel, one process with "
        "all its GPUs (default: %(default)s)",
    )
    return options


def parse(arguments: list[str], world: World, trainer: str = "train_ddp") -> TrainOptions:
    """Parse the command line. Raises UsageError, also if it does not fit the number of ranks."""
    args = recipe.parse(parser(trainer), arguments, TrainOptions())
    if args.strategy == "dp" and world.size > 1:
        started = f"{world.launcher_command} started {world.size}"
        raise UsageError(f"--strategy dp is for one process, but {started}: use no launcher")
    if args.strategy == "dp" and args.compile:
        raise UsageError(
            "--compile is not for --strategy dp, which copies the model to each GPU in each step: "
            "leave out one"
        )
    if args.strategy == "fsdp" and args.fast_kernels:
        raise UsageError(
            "--fast-kernels is not for --strategy fsdp, which cannot shard channels-last weights: "
            "leave out one"
        )
    return args
