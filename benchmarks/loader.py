"""Images per second of hpctrain's loader and of PyTorch's, with the same transforms.

    python benchmarks/loader.py [--images 400] [--workers 2] [--turns 5]

hpctrain's reads class folders and tar files. PyTorch's is DataLoader(shuffle by DistributedSampler,
batch_size, num_workers) over a dataset of single images in class folders, collated in the worker. The images
are JPEG files of 500 x 375 pixels, ImageNet's usual size, made in a temporary folder. The loaders take turns,
one epoch each. The output is medians, the smallest and the largest value, and the ratio to PyTorch's of each
round. On a machine that others use, look at the images per processor second.
"""

import argparse
import os
import random
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy
import records
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpctrain.distributed.world import ALONE
from hpctrain.training.batches import EpochPlan
from hpctrain.vision.data import to_images
from hpctrain.vision.folder import ImageFolder, ImageShards, decode, random_resized_crop

SIDE, BATCH = 224, 32
UNITS = ("second", "processor second")


class PlainDataset(Dataset):
    """The same files and transforms, one example at a time, with random numbers that no seed fixes."""

    def __init__(self, images: ImageFolder) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image = random_resized_crop(decode(self._images.path(number)), SIDE, random.Random())
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1), self._images.labels[number]


def make_images(folder: Path, number: int) -> None:
    """Write JPEG files of smooth noise, which compress like photographs, into two class folders."""
    noise = numpy.random.default_rng(0)
    for n in range(number):
        path = folder / f"class{n % 2}" / f"{n:05d}.jpg"
        path.parent.mkdir(exist_ok=True)
        small = Image.fromarray(noise.integers(0, 256, (94, 125, 3), numpy.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)


def write_shards(images: ImageFolder, folder: Path) -> list[Path]:
    """Write the same images into four tar files, as WebDataset's writer would."""
    paths = [folder / f"train-{shard}.tar" for shard in range(4)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for number in range(shard, len(images), len(paths)):
                label = folder / "label.cls"
                label.write_text(str(int(images.labels[number])))
                tar.add(images.path(number), f"{number:05d}.jpg")
                tar.add(label, f"{number:05d}.cls")
    return paths


def main() -> None:
    """Print the images per second of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    records.add_options(parser, turns=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as folder:
        make_images(Path(name), args.images)
        size = sum(path.stat().st_size for path in Path(name).rglob("*.jpg")) / args.images
        images = ImageFolder(Path(name), SIDE, 1, args.workers)
        shards = ImageShards(write_shards(images, Path(folder)), SIDE, 1, args.workers)
        cpu = torch.device("cpu")
        sampler = DistributedSampler(images, num_replicas=1, rank=0, shuffle=True, drop_last=True)
        plain = DataLoader(
            PlainDataset(images), BATCH, sampler=sampler, num_workers=args.workers, drop_last=True
        )

        def epoch_of_ours(source: ImageFolder, epoch: int) -> int:
            parts = EpochPlan(len(source), BATCH, 1, epoch + 1, ALONE).parts()
            return sum(len(labels) for _, labels in source.load_batches(parts, cpu))

        def epoch_of_plain(epoch: int) -> int:
            sampler.set_epoch(epoch)
            return sum(len(to_images(pixels, SIDE)) for pixels, _ in plain)

        runs = {
            "folders": partial(epoch_of_ours, images),
            "tar files": partial(epoch_of_ours, shards),
            "PyTorch's": epoch_of_plain,
        }
        rates = {(unit, name): [] for unit in UNITS for name in runs}
        for epoch in range(args.turns + 1):
            for name in sorted(runs, reverse=epoch % 2 == 0):
                began, used = time.perf_counter(), processor_seconds()
                examples = runs[name](epoch)
                if epoch:  # the first one warms the page cache
                    rates["second", name].append(examples / (time.perf_counter() - began))
                    rates["processor second", name].append(examples / (processor_seconds() - used))
    rows = {}
    for name in sorted(runs):
        rows[name] = {f"images a {unit}": rates[unit, name] for unit in UNITS}
        for unit in UNITS:
            pairs = zip(rates[unit, name], rates[unit, "PyTorch's"], strict=True)
            rows[name][f"times PyTorch's a {unit}"] = [ours / other for ours, other in pairs]
    digits = {f"images a {unit}": 0 for unit in UNITS} | {f"times PyTorch's a {unit}": 2 for unit in UNITS}
    about = f"{args.images} images of {size / 1000:.0f} kB, batches of {BATCH}, {args.workers} workers"
    records.report("loader", "loader", rows, digits, about, args)


def processor_seconds() -> float:
    """The processor time of this process and of all workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
