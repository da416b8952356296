"""What the vision trainers share: options, evaluation, and for each model its optimizer and default hyperparameters."""

import argparse
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from hpctrain.distributed.rendezvous import all_or_none, gather
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.options import Parser, add_kernels, positive, trainer_parser
from hpctrain.run import flops
from hpctrain.training.batches import evaluation_batches
from hpctrain.training.kernels import check_compiler, compile_training, make_deterministic
from hpctrain.vision import data
from hpctrain.vision.data import Images
from hpctrain.vision.folder import ImageFolder, is_image_folder, load_folder
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
    # The batch is small because 1,437 digits need many steps; docs/trainers.md has values for MNIST.
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
MOST_WORKERS = 16  # by default


def vision_parser(trainer: str, description: str) -> Parser:
    """A parser with the options that all vision trainers have; parse() fills in what depends on the model."""

    def default(field: str) -> str:
        return ", ".join(f"{name} {getattr(recipe, field):g}" for name, recipe in RECIPES.items())

    parser = trainer_parser(trainer, description)
    add = parser.add_argument
    add("--model", choices=RECIPES, default="mnist", help="model to train (default: %(default)s)")
    add(
        "--data", type=Path, metavar="FOLDER",
        help="train on the images in this folder: MNIST's four idx files, or for resnet50 train/ and val/ with class folders "
        "or tar files of JPEG or PNG (default: the digits in scikit-learn)",
    )  # fmt: skip
    add(
        "--image-size", type=positive(int), metavar="PIXELS",
        help=f"width and height of the images that resnet50 sees (default: {FOLDER_SIDE} for JPEG and PNG, else 128)",
    )  # fmt: skip
    add(
        "--workers", type=int, metavar="N",
        help="processes per rank that decode JPEG and PNG; 0: none (default: CPUs of the rank - 1, at most 16)",
    )  # fmt: skip
    add("--epochs", type=positive(int), help=f"passes over the training data (default: {default('epochs')})")
    add(
        "--batch-size",
        type=positive(int),
        help=f"global batch size, over all ranks (default: {default('batch_size')})",
    )
    add("--lr", type=positive(float), help=f"learning rate (default: {default('lr')})")
    add(
        "--lr-decay",
        type=positive(float),
        help=f"factor on the learning rate after each epoch (default: {default('lr_decay')})",
    )
    add(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="bf16: autocast with fp32 weights (default: %(default)s)",
    )
    add(
        "--fast-kernels", action="store_true",
        help="train faster on a CPU, with other rounding: channels-last convolutions, a fused optimizer (always on GPUs)",
    )  # fmt: skip
    add_kernels(parser)
    return parser


def parse(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """Parse the command line, and fill in missing values from the recipe of --model. Raises UsageError."""
    args = parser.parse_args(arguments)
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


def load_data(
    args: argparse.Namespace, world: World
) -> tuple[Images, Images] | tuple[ImageFolder, ImageFolder]:
    """The training set and the test set of --data; fills in --image-size and --workers. A collective call.

    Raises HpctrainError, naming the file or folder.
    """
    cpus = sorted(os.sched_getaffinity(0))
    mine = [world.node_rank, cpus[0], cpus[-1], len(cpus)]
    # ranks that may use the same CPUs: all of a node, unless the launcher binds them
    sharing = gather(world, mine).count(mine)
    with all_or_none(world):
        if args.compile:
            check_compiler(world.rank)
        in_folders = is_image_folder(args.data)
        if in_folders and args.model == "mnist":
            raise HpctrainError(
                f"--data {args.data} has color images, and --model mnist takes MNIST's: add --model resnet50"
            )
        if args.workers is None:
            args.workers = (
                min(MOST_WORKERS, len(cpus) // sharing - 1) if in_folders and len(cpus) > sharing else 0
            )
        if args.image_size is None:
            args.image_size = FOLDER_SIDE if in_folders else RECIPES[args.model].side
        sets = (
            load_folder(args.data, args.image_size, args.seed, args.workers)
            if in_folders
            else data.load(args.data)
        )
    for unused in [part.unused for part in sets if world.rank == 0 and part.unused]:
        print(unused, flush=True)
    return sets


def build_model(
    args: argparse.Namespace,
    training_set: Images | ImageFolder,
    device: torch.device,
    *,
    sharded: bool = False,
) -> nn.Module:
    """Create the model on `device`; its initial weights depend on --seed alone.

    `sharded`: see compile_training().
    """
    torch.manual_seed(args.seed)
    make_deterministic(args.deterministic, device, on_gpu=True)
    model = RECIPES[args.model].model
    built = (model() if model is MnistNet else model(training_set.channels, len(training_set.classes))).to(
        device
    )
    built = built.to(memory_format=torch.channels_last) if uses_fast_kernels(args, device) else built
    if args.compile:
        compile_training(built, by_block=sharded)
    return built


def uses_fast_kernels(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether images are in memory channels last, and one kernel updates all weights: with --fast-kernels, and on every GPU."""
    return device.type == "cuda" or args.fast_kernels


def count_flops(model: nn.Module, training_set: Images | ImageFolder, args: argparse.Namespace) -> int | None:
    """The floating-point operations to train on an image: see flops.count_flops()."""
    images, _ = training_set.batch(torch.tensor([0]), torch.device("cpu"), args.image_size)
    return flops.count_flops(model, lambda empty: empty(images.to("meta")))


def make_optimizer(args: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Create the optimizer of the model's recipe, with --lr."""
    parameters = list(parameters)
    # a DTensor, of which _fused_sgd_() has no parts (torch 2.13)
    is_sharded = hasattr(parameters[0], "to_local")
    fused = {"fused": True} if uses_fast_kernels(args, parameters[0].device) and not is_sharded else {}
    return RECIPES[args.model].optimizer(parameters, lr=args.lr, **fused)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    test: Images | ImageFolder,
    args: argparse.Namespace,
    world: World,
    device: torch.device,
    total: Callable[[Tensor], Tensor],
) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set; each example counts once, on any number of ranks.

    `total` sums a tensor over all ranks. A collective call.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    indices = evaluation_batches(len(test), args.batch_size, world)
    for images, labels in test.batches(indices, device, args.image_size, epoch=0):
        logits = model(images)
        sums[0] += cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
    loss, correct = (total(sums) / len(test)).tolist()
    return loss, correct
