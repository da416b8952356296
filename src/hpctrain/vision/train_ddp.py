"""Train on MNIST, or on digits, by PyTorch's DistributedDataParallel.

One process (train_single), no launcher:

    hpctrain train_ddp

One node with 4 ranks:

    torchrun --nproc-per-node 4 -m hpctrain train_ddp

Two nodes with 2 ranks each, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh train_ddp --epochs 3
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpctrain.run import Run, positive, trainer_parser
from hpctrain.vision import data
from hpctrain.vision.model import MnistNet
from hpctrain.world import UsageError, World, all_or_none, choose_device, process_group


def main(world: World, arguments: list[str]) -> None:
    """Train as the flags at the foot of this file say."""
    args = parse(arguments)
    device = choose_device(world, args.device)
    with process_group(world, device):
        with all_or_none(world):
            train, test = data.load(args.data)
        steps = data.steps_per_epoch(len(train), args.batch_size, world)
        run = Run(world, "train_ddp", args, device)

        torch.manual_seed(args.seed)
        if device.type == "cuda":  # on a CPU they are; and the call imports the compiler, which takes two seconds
            torch.use_deterministic_algorithms(True, warn_only=True)
        model = MnistNet().to(device)
        ddp = DistributedDataParallel(model) if world.size > 1 else model
        optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

        first_epoch = 1
        if state := run.resume(device):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first_epoch = state["epoch"] + 1
            if first_epoch > args.epochs:
                raise UsageError(f"{run.folder} has {state['epoch']} epochs already: give a larger --epochs to go on")

        log_every = -(-steps // 5)
        for epoch in range(first_epoch, args.epochs + 1):
            for group in optimizer.param_groups:  # by epoch and nothing else, so that resuming needs no scheduler's state
                group["lr"] = args.lr * args.lr_decay ** (epoch - 1)
            ddp.train()
            run.start_epoch(epoch, steps)
            loss_sum, since = torch.zeros((), device=device), time.perf_counter()
            for step, index in enumerate(data.batches(len(train), args.batch_size, args.seed, epoch, world), 1):
                images, labels = train.batch(index, device)
                loss = cross_entropy(ddp(images), labels)
                optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients over the ranks in here
                optimizer.step()
                run.step()

                loss_sum += loss.detach()
                if step % log_every == 0:
                    mean = total(loss_sum, world).item() / (log_every * world.size)
                    now = time.perf_counter()
                    speed = log_every * args.batch_size / (now - since)
                    run.metrics(epoch=epoch, step=(epoch - 1) * steps + step, train_loss=mean, examples_per_s=speed)
                    loss_sum, since = torch.zeros((), device=device), now
            run.end_epoch()

            test_loss, test_accuracy = evaluate(model, test, args.batch_size, world, device)
            run.metrics(epoch=epoch, step=epoch * steps, test_loss=test_loss, test_accuracy=test_accuracy)
            run.save(epoch, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        run.finish(model, test_loss=test_loss, test_accuracy=test_accuracy)


@torch.no_grad()
def evaluate(model: nn.Module, test: data.Images, batch_size: int, world: World, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set, each example counted once whatever the number of ranks."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for index in data.share(len(test), batch_size, world):
        images, labels = test.batch(index, device)
        logits = model(images)
        sums[0] += cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
    loss, correct = (total(sums, world) / len(test)).tolist()
    return loss, correct


def total(value: Tensor, world: World) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of this trainer, and those of all trainers (trainer_parser)."""
    parser = trainer_parser("train_ddp", "Train on MNIST or digits by DDP; without a launcher, in one process.")
    parser.add_argument("--data", type=Path, help="folder with MNIST's four idx files (default: the digits inside scikit-learn)")
    parser.add_argument("--lr-decay", type=positive(float), default=0.8, help="factor on --lr each epoch (default: %(default)s)")
    return parser.parse_args(arguments)
