"""Train an image classifier with Horovod: model, data and order are those of train_ddp.

Run it in the image, which has Horovod. One node with 4 ranks, with torchrun or horovodrun:

    torchrun --nproc-per-node 4 -m hpctrain train_horovod
    MASTER_ADDR=localhost MASTER_PORT=29500 horovodrun -np 4 hpctrain train_horovod

Two nodes with 2 ranks each, on Slurm:

    sbatch launch/apptainer_ddp.sh train_horovod --fp16-allreduce

Horovod's ranks connect over Gloo under every launcher, and need no MPI. With HOROVOD_CONTROLLER=mpi and
mpirun they connect over MPI, and use it for all-reduces on CPUs. Horovod fuses tensors that are ready at the
same time into one all-reduce. HOROVOD_FUSION_THRESHOLD=0, also set by --deterministic, turns that off: then
the weights are equal bit for bit from run to run.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpctrain.checkpoints.checkpoint import load_optimizer
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.horovod import horovod
from hpctrain.distributed.rendezvous import all_or_none, process_group
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.parser import Parser, add_device, positive
from hpctrain.run.record import Record
from hpctrain.training.batches import check_batch_size, steps_per_epoch
from hpctrain.training.precision import Scaler, load_scaler, make_autocast, set_precision
from hpctrain.vision import recipe
from hpctrain.vision.loop import train_epochs


class HorovodOptions(recipe.ImageOptions):
    """The options of train_horovod."""

    device: str
    fp16_allreduce: bool
    batches_per_allreduce: int
    warmup_epochs: int


def main(world: World, arguments: list[str]) -> None:
    """Train with the options at the end of this file. A collective call. Raises HpctrainError."""
    args = parse(arguments, world)
    device = choose_device(world, args.device)
    args.precision = set_precision(args.precision, args.tf32, world, device)
    if args.deterministic:
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    # For the run folder and errors; by Gloo on GPUs, too: torch and Horovod would conflict in NCCL.
    with process_group(world, torch.device("cpu")), horovod(world) as hvd:
        training_set, test_set = recipe.load_data(args, world)
        sub_batches = args.batches_per_allreduce
        batch_size = args.batch_size * sub_batches
        steps = steps_per_epoch(len(training_set), batch_size, world)
        run = Record(world, "train_horovod", args, device)

        model = recipe.build_model(args, training_set, device)
        run.count_flops(lambda: recipe.count_flops(model, training_set, args))
        optimizer = hvd.DistributedOptimizer(
            recipe.make_optimizer(args, model.parameters()),
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=sub_batches,
        )
        autocast = make_autocast(args.precision, device)
        scaler = Scaler(args.precision, device)

        if state := run.resume(device, args.epochs, model):
            model.load_state_dict(state["model"])
            assert run.resume_from
            # Every rank has read the same file. hvd.broadcast_optimizer_state() would send a pickle.
            with all_or_none(world):
                load_optimizer(optimizer, state, run.resume_from)
                load_scaler(scaler, state, run.resume_from)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

        def train_step(images: Tensor, labels: Tensor) -> Tensor:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run.global_step, steps, world, args)
            optimizer.zero_grad()
            loss_sum = torch.zeros((), device=device)
            for part, targets in zip(images.chunk(sub_batches), labels.chunk(sub_batches), strict=True):
                with autocast:
                    loss = cross_entropy(model(part), targets) / sub_batches
                scaler.scale(loss).backward()  # the last one starts the all-reduces of the gradients
                loss_sum += loss.detach()
            optimizer.synchronize()  # waits for the all-reduces
            scaler.unscale_(optimizer)
            run.check_gradients(scaler, loss_sum)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            return loss_sum

        def evaluate() -> tuple[float, float]:
            # All ranks evaluate with rank 0's batch normalization, which is saved.
            hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
            with autocast:
                return recipe.evaluate(model, test_set, args, world, device, sum_over_ranks)

        def sum_over_ranks(value: Tensor) -> Tensor:
            return hvd.allreduce(value, op=hvd.Sum, name="test")

        def make_state() -> dict[str, Any]:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return state | {"scaler": scaler.state_dict()}

        test_loss, test_accuracy = train_epochs(
            run, args, device, training_set, batch_size, optimizer, train_step, evaluate, make_state
        )
        run.finish(model, test_loss=test_loss, test_accuracy=test_accuracy)


def learning_rate(step: int, steps: int, world: World, args: HorovodOptions) -> float:
    """The learning rate of a step, counted from 0 over the whole training; an epoch has `steps` steps.

    The rate rises linearly from --lr / world.size to --lr over the first --warmup-epochs. After these it
    decays with each epoch.
    """
    warmup = args.warmup_epochs * steps
    if step < warmup:
        first = args.lr / world.size
        return first + (args.lr - first) * step / warmup
    return args.lr * args.lr_decay ** (step // steps - args.warmup_epochs)


def parser() -> Parser:
    """The options of this trainer, on top of those of all vision trainers (recipe.py)."""
    parser = recipe.vision_parser(
        "train_horovod", "Train an image classifier with Horovod, on any number of ranks."
    )
    add = parser.add_argument
    add_device(parser)
    add(
        "--fp16-allreduce", action="store_true", help="compress gradients to 16-bit floats for the all-reduce"
    )
    add(
        "--batches-per-allreduce",
        type=positive(int),
        default=1,
        metavar="N",
        help="accumulate N batches of --batch-size for each all-reduce and optimizer step "
        "(default: %(default)s)",
    )
    add(
        "--warmup-epochs",
        type=int,
        default=0,
        metavar="N",
        help="raise the learning rate linearly from --lr / ranks to --lr over N epochs "
        "(default: %(default)s)",
    )
    return parser


def parse(arguments: list[str], world: World) -> HorovodOptions:
    """Parse the command line. Raises UsageError, also if the ranks cannot share --batch-size evenly."""
    args = recipe.parse(parser(), arguments, HorovodOptions())
    # each of the --batches-per-allreduce, whose losses have the same weight
    check_batch_size(args.batch_size, world)
    if args.warmup_epochs < 0:
        raise UsageError(f"--warmup-epochs {args.warmup_epochs} is below zero: use 0 or more")
    return args
