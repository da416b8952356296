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

import torch
from torch.nn.functional import cross_entropy

from hpctrain.distributed.horovod import horovod
from hpctrain.distributed.rendezvous import process_group
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.parser import Parser, add_device, positive
from hpctrain.run.options import Prune
from hpctrain.training.batches import check_batch_size, steps_per_epoch
from hpctrain.training.run import Run
from hpctrain.vision import recipe


class HorovodOptions(recipe.ImageOptions):
    """The options of train_horovod."""

    device: str
    fp16_allreduce: bool
    batches_per_allreduce: int
    warmup_epochs: int


def main(world: World, arguments: list[str], prune: Prune | None = None) -> None:
    """Train with the options at the end of this file. A collective call. Raises HpctrainError."""
    args = parse(arguments, world)
    if args.deterministic:
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    # For the run folder and errors; by Gloo on GPUs, too: torch and Horovod would conflict in NCCL.
    with process_group(world, torch.device("cpu")), horovod(world) as hvd:
        training_set, test_set = recipe.load_data(args, world)
        parts = args.batches_per_allreduce
        batch_size = args.batch_size * parts
        steps = steps_per_epoch(len(training_set), batch_size, world)
        with Run("train_horovod", prune=prune, **vars(args)) as run:
            model = recipe.build_model(args, training_set, run.device)
            run.count_flops(lambda: recipe.count_flops(model, training_set, args))
            model = run.prepare(model, strategy="horovod")
            optimizer = hvd.DistributedOptimizer(
                recipe.make_optimizer(args, model.parameters(), run.precision),
                named_parameters=model.named_parameters(),
                compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
                backward_passes_per_step=parts,
            )
            run.track(model=model, optimizer=optimizer)

            for _ in run.epochs(args.epochs, fixed=bool(args.schedule)):
                for images, labels in run.batches(training_set, batch_size, accumulate=parts):
                    lr = learning_rate(run.global_step, steps, world, args)
                    recipe.set_learning_rate(optimizer, lr)
                    with run.autocast():
                        loss = cross_entropy(model(images), labels)
                    run.backward(loss)  # the last part of a batch starts the all-reduces of the gradients
                    run.update(optimizer)
                    run.step(loss, learning_rate=lr)
                run.score(**recipe.evaluate(model, test_set, args, run))


def learning_rate(step: int, steps: int, world: World, args: HorovodOptions) -> float:
    """The learning rate of a step, counted from 0 over the whole training; an epoch has `steps` steps.

    The rate rises linearly from --lr / world.size to --lr over the first --warmup-epochs. After these it
    decays with each epoch. With --schedule it is that of all trainers.
    """
    if args.schedule:
        return recipe.learning_rate(args, step // steps, step, steps)
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
    if args.warmup_epochs and args.schedule:
        raise UsageError(f"--warmup-epochs is not for --schedule {args.schedule}: use --warmup instead")
    return args
