"""What the vision trainers share: options, data, model, optimizer, evaluation.

RECIPES has the optimizer and the default hyperparameters of each model.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from hpctrain.distributed.rendezvous import all_or_none, broadcast, gather
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.parser import Parser, add_kernels, add_precision, fraction, positive, trainer_parser
from hpctrain.run import flops
from hpctrain.training import schedule
from hpctrain.training.kernels import check_compiler, compile_training, make_deterministic
from hpctrain.training.run import Run
from hpctrain.vision import data
from hpctrain.vision.folder import ImageSet, is_image_folder, load_folder
from hpctrain.vision.model import MnistNet, ResNet50


class Recipe(NamedTuple):
    """A model, and how it is trained unless the command line says otherwise."""

    model: Callable[..., nn.Module]
    side: int  # MNIST's images are resized to side x side pixels, on the device
    optimizer: Callable[..., Optimizer]
    epochs: int
    batch_size: int
    lr: float
    lr_decay: float


RECIPES = {
    # The batch is small because 1,437 digits need many steps; docs/guides/trainers.md has values for MNIST.
    "mnist": Recipe(
        MnistNet,
        28,
        partial(SGD, momentum=0.9, nesterov=True),
        epochs=10,
        batch_size=32,
        lr=0.03,
        lr_decay=0.8,
    ),
    # Model, size of the images and optimizer are those of github.com/DSL-Lab/HPC_helper (main.py).
    "resnet50": Recipe(ResNet50, 128, Adam, epochs=5, batch_size=256, lr=0.001, lr_decay=1.0),
}
FOLDER_SIDE = 224  # pixels, for JPEG and PNG unless --image-size is given
MAX_WORKERS = 16  # by default


class ImageOptions(argparse.Namespace):
    """The options of vision_parser(), as parse() and load_data() fill them in."""

    model: str
    data: Path | None
    image_size: int
    workers: int
    epochs: int
    batch_size: int
    lr: float
    lr_decay: float
    schedule: str | None
    warmup: float | None
    seed: int
    precision: str
    tf32: str | None
    fast_kernels: bool
    compile: bool
    deterministic: bool
    data_sha256: str


Options = TypeVar("Options", bound=ImageOptions)


def vision_parser(trainer: str, description: str) -> Parser:
    """A parser with the options that all vision trainers have; parse() fills in what depends on the model."""

    def default(field: str) -> str:
        return ", ".join(f"{name} {getattr(recipe, field):g}" for name, recipe in RECIPES.items())

    parser = trainer_parser(trainer, description, prog=f"hpctrain {trainer}")
    add = parser.add_argument
    add("--model", choices=RECIPES, default="mnist", help="model to train (default: %(default)s)")
    add(
        "--data", type=Path, metavar="FOLDER",
        help="train on the images in this folder: MNIST's four idx files, or for resnet50 train/ and val/ "
        "with class folders or tar files of JPEG or PNG (default: the digits in scikit-learn)",
    )  # fmt: skip
    add(
        "--image-size", type=positive(int), metavar="PIXELS",
        help="width and height of the images that resnet50 sees "
        f"(default: {FOLDER_SIDE} for JPEG and PNG, else 128)",
    )  # fmt: skip
    add(
        "--workers", type=int, metavar="N",
        help="processes per rank that decode JPEG and PNG; 0: none "
        f"(default: CPUs of the rank - 1, at most {MAX_WORKERS})",
    )  # fmt: skip
    add(
        "--epochs",
        type=positive(int),
        metavar="N",
        help=f"passes over the training data (default: {default('epochs')})",
    )
    add(
        "--batch-size",
        type=positive(int),
        metavar="N",
        help=f"global batch size, over all ranks (default: {default('batch_size')})",
    )
    add("--lr", type=positive(float), metavar="RATE", help=f"learning rate (default: {default('lr')})")
    add(
        "--lr-decay",
        type=positive(float),
        metavar="FACTOR",
        help=f"factor on the learning rate after each epoch (default: {default('lr_decay')})",
    )
    add(
        "--schedule",
        choices=["cosine"],
        help="instead of --lr-decay, let the learning rate fall from --lr to 0 as a cosine, step by step",
    )
    add(
        "--warmup",
        type=fraction,
        metavar="FRACTION",
        help="with --schedule: fraction of all steps in which the learning rate first rises to --lr "
        "(default: 0)",
    )
    add_precision(parser, "fp32")
    add(
        "--fast-kernels", action="store_true",
        help="train faster on a CPU, with other rounding: channels-last convolutions, a fused optimizer "
        "(always on GPUs)",
    )  # fmt: skip
    add_kernels(parser)
    return parser


def parse(parser: Parser, arguments: list[str], options: Options) -> Options:
    """Parse into `options`; missing values come from the model's recipe. Raises UsageError."""
    args: Options = parser.parse_args(arguments, options)
    if args.schedule and args.lr_decay:
        raise UsageError(f"--lr-decay is not for --schedule {args.schedule}: leave out one")
    if args.warmup is not None and not args.schedule:
        raise UsageError("--warmup needs --schedule cosine: add it, or leave --warmup out")
    for name in ("epochs", "batch_size", "lr", "lr_decay"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(RECIPES[args.model], name))
    if args.workers is not None and args.workers < 0:
        raise UsageError(f"--workers {args.workers} is below zero: use 0 or more")
    if args.model == "mnist" and args.image_size not in (None, RECIPES["mnist"].side):
        raise UsageError(
            f"--image-size {args.image_size} is not for --model mnist: add --model resnet50, or leave it out"
        )
    return args


def load_data(args: ImageOptions, world: World) -> tuple[ImageSet, ImageSet]:
    """The training set and the test set of --data. Fills in --image-size and --workers, and data_sha256.

    A collective call. Raises HpctrainError, naming the file or folder.
    """
    cpus = sorted(os.sched_getaffinity(0))
    own = [world.node_rank, cpus[0], cpus[-1], len(cpus)]
    # ranks that may use the same CPUs: all of a node, unless the launcher binds them
    sharing = gather(world, own).count(own)
    with all_or_none(world):
        if args.compile:
            check_compiler(world.rank)
        in_folders = is_image_folder(args.data)
        if in_folders and args.model == "mnist":
            raise HpctrainError(
                f"--data {args.data} has color images, and --model mnist takes MNIST's: add --model resnet50"
            )
        if args.workers is None:
            spare = len(cpus) // sharing - 1
            args.workers = min(MAX_WORKERS, max(spare, 0)) if in_folders else 0
        if args.image_size is None:
            args.image_size = FOLDER_SIDE if in_folders else RECIPES[args.model].side
        sets: tuple[ImageSet, ImageSet]
        if args.data and in_folders:
            sets = load_folder(args.data, args.image_size, args.seed, args.workers)
        else:
            sets = data.load(args.data, args.image_size)
    for part in sets:
        if world.rank == 0 and part.unused:
            print(part.unused, flush=True)
    args.data_sha256 = broadcast(world, sets[0].digest() if world.rank == 0 else "")
    return sets


def build_model(
    args: ImageOptions, training_set: ImageSet, device: torch.device, *, sharded: bool = False
) -> nn.Module:
    """Create the model on `device`, initialized by --seed alone. `sharded`: see compile_training()."""
    torch.manual_seed(args.seed)
    make_deterministic(args.deterministic, device, on_gpu=True)
    model = RECIPES[args.model].model(training_set.channels, len(training_set.classes))
    model.to(device)
    if uses_fast_kernels(args, device):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    if args.compile:
        compile_training(model, by_block=sharded)
    return model


def uses_fast_kernels(args: ImageOptions, device: torch.device) -> bool:
    """Whether weights are channels last in memory, and one kernel updates all of them, if it can."""
    return device.type == "cuda" or args.fast_kernels


def count_flops(model: nn.Module, training_set: ImageSet, args: ImageOptions) -> int | None:
    """The floating-point operations to train on an image: see flops.count_flops()."""
    images, _ = training_set.batch(torch.tensor([0]), torch.device("cpu"))
    return flops.count_flops(model, lambda empty: empty(images.to("meta")))


def make_optimizer(args: ImageOptions, parameters: Iterable[nn.Parameter], precision: str) -> Optimizer:
    """Create the optimizer of the model's recipe, with --lr."""
    parameters = list(parameters)
    make = RECIPES[args.model].optimizer
    is_sharded = hasattr(parameters[0], "to_local")  # DTensors: _fused_sgd_() takes none (torch 2.13)
    # If the scaler skips its first step, a fused SGD has uninitialized memory as momentum (torch 2.13).
    is_scaled_sgd = precision == "fp16" and getattr(make, "func", make) is SGD
    is_fused = uses_fast_kernels(args, parameters[0].device) and not is_sharded and not is_scaled_sgd
    return make(parameters, lr=args.lr, **({"fused": True} if is_fused else {}))


def learning_rate(args: ImageOptions, epoch: int, step: int, steps: int) -> float:
    """The rate of a step of the whole training; an epoch has `steps` steps. Both are counted from 0."""
    if args.schedule:
        return args.lr * schedule.cosine(step, args.epochs * steps, args.warmup or 0.0)
    return args.lr * args.lr_decay**epoch


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def evaluate(model: nn.Module, test_set: ImageSet, args: ImageOptions, run: Run) -> dict[str, list[Tensor]]:
    """The loss of each test image of this rank, and whether its class is right, for run.score()."""
    losses, hits = [], []
    model.eval()
    with run.autocast():
        for images, labels in run.evaluation_batches(test_set, args.batch_size):
            logits = model(images)
            losses.append(cross_entropy(logits, labels, reduction="none"))
            hits.append(logits.argmax(1) == labels)
    model.train()
    return {"test_loss": losses, "test_accuracy": hits}
