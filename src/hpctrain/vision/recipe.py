"""What the vision trainers share: options, evaluation, and for each model its optimizer and default hyperparameters."""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from hpctrain.batches import evaluation_batches
from hpctrain.cli import Parser, positive, trainer_parser
from hpctrain.vision.data import Images
from hpctrain.vision.model import MnistNet, ResNet50
from hpctrain.world import World


class Recipe(NamedTuple):
    """A model, and how it is trained unless the command line says otherwise."""

    model: Callable[[], nn.Module]
    side: int  # images are resized to side x side pixels, on the device
    optimizer: Callable[..., Optimizer]
    epochs: int
    batch_size: int
    lr: float
    lr_decay: float


RECIPES = {
    # The batch is small because 1,437 digits need many steps; docs/trainers.md has values for MNIST.
    "mnist": Recipe(MnistNet, 28, partial(SGD, momentum=0.9, nesterov=True), epochs=10, batch_size=32, lr=0.03, lr_decay=0.8),
    # As in the benchmark of HPC_helper.
    "resnet50": Recipe(ResNet50, 128, Adam, epochs=5, batch_size=256, lr=0.001, lr_decay=1.0),
}


def vision_parser(trainer: str, description: str) -> Parser:
    """A parser with the options that all vision trainers have; parse() fills in what depends on the model."""

    def default(field: str) -> str:
        return ", ".join(f"{name} {getattr(recipe, field):g}" for name, recipe in RECIPES.items())

    parser = trainer_parser(trainer, description)
    add = parser.add_argument
    add("--model", choices=RECIPES, default="mnist", help="model to train (default: %(default)s)")
    add("--data", type=Path, metavar="FOLDER", help="folder with MNIST's four idx files (default: the digits in scikit-learn)")
    add("--epochs", type=positive(int), help=f"passes over the training data (default: {default('epochs')})")
    add("--batch-size", type=positive(int), help=f"global batch size, over all ranks (default: {default('batch_size')})")
    add("--lr", type=positive(float), help=f"learning rate (default: {default('lr')})")
    add("--lr-decay", type=positive(float), help=f"factor on the learning rate after each epoch (default: {default('lr_decay')})")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast with fp32 weights (default: %(default)s)")
    return parser


def parse(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """Parse the command line, and fill in missing values from the recipe of --model. Raises UsageError."""
    args = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "lr", "lr_decay"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(RECIPES[args.model], name))
    return args


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Create the model on `device`; its initial weights depend on --seed alone."""
    torch.manual_seed(args.seed)
    if device.type == "cuda":  # not on a CPU: its algorithms are deterministic, and the call imports the compiler for two seconds
        torch.use_deterministic_algorithms(True, warn_only=True)
    return RECIPES[args.model].model().to(device)


def make_optimizer(args: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Create the optimizer of the model's recipe, with --lr."""
    return RECIPES[args.model].optimizer(parameters, lr=args.lr)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    test: Images,
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
    for index in evaluation_batches(len(test), args.batch_size, world):
        images, labels = test.batch(index, device, RECIPES[args.model].side)
        logits = model(images)
        sums[0] += cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
    loss, correct = (total(sums) / len(test)).tolist()
    return loss, correct
