"""Images and labels: MNIST from its four idx files, or the digits that ship inside scikit-learn.

The order of the data is a pure function of (seed, epoch), and a step takes the same examples whatever
the number of ranks: see batches().
"""

import gzip
import importlib.util
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from hpctrain.run import steps_per_epoch
from hpctrain.world import HpctrainError, World

SIDE = 28  # pixels
CLASSES = 10


class Images(NamedTuple):
    """Grey images with a digit each: pixels [n, 28, 28] uint8, labels [n] int64 from 0 to 9."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor, device: torch.device, side: int = SIDE) -> tuple[Tensor, Tensor]:
        """The examples of `index` on `device`: images [b, 1, side, side] float32 from -1 to 1, labels [b] int64."""
        pixels, labels = self.pixels[index].to(device, non_blocking=True), self.labels[index].to(device, non_blocking=True)
        return to_images(pixels, side), labels


def to_images(pixels: Tensor, side: int) -> Tensor:
    """Pixels [b, h, w] uint8 as images [b, 1, side, side] float32 from -1 to 1, resized where they have another size."""
    images = pixels[:, None].float().div(127.5).sub(1)
    if images.shape[2:] != (side, side):
        images = torch.nn.functional.interpolate(images, (side, side), mode="bilinear")
    return images


def load(folder: Path | None) -> tuple[Images, Images]:
    """The training and the test set: MNIST from `folder`, or digits where there is none.

    Raises HpctrainError, naming the file, where one is missing or not what it should be.
    """
    return load_digits() if folder is None else load_mnist(folder)


def load_mnist(folder: Path) -> tuple[Images, Images]:
    """MNIST (60,000 + 10,000) from the four files of Y. LeCun's page, plain or .gz. Raises HpctrainError."""
    if not folder.is_dir():
        raise HpctrainError(f"{folder}: no such folder: --data takes one that holds MNIST's four idx files, plain or .gz")
    train, test = (
        Images(_idx(folder, f"{part}-images-idx3-ubyte", 3), _idx(folder, f"{part}-labels-idx1-ubyte", 1).long())
        for part in ("train", "t10k")
    )
    for part, images in (("train", train), ("t10k", test)):
        if len(images.pixels) != len(images.labels):
            raise HpctrainError(
                f"{folder}: {part} has {len(images.pixels)} images but {len(images.labels)} labels: fetch the files again"
            )
        if images.pixels.shape[1:] != (SIDE, SIDE):
            raise HpctrainError(f"{folder}: the {part} images are {tuple(images.pixels.shape[1:])}, not {SIDE} x {SIDE} pixels")
        if len(images) == 0 or int(images.labels.max()) >= CLASSES:
            raise HpctrainError(f"{folder}: the {part} labels are not digits from 0 to 9: fetch the file again")
    return train, test


def _idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """One idx file of unsigned bytes: two zero bytes, type 8, the number of dimensions, their sizes (big-endian), the data."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise HpctrainError(f"{folder}/{name}: no such file, nor {name}.gz: --data takes a folder with MNIST's four idx files")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise HpctrainError(f"{path}: cannot be read ({error}): fetch the file again") from error
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise HpctrainError(
            f"{path}: not an idx file of bytes with {dimensions} dimensions (it begins with {content[:4].hex() or 'nothing'}): "
            "fetch the file again"
        )
    sizes = [int(n) for n in numpy.frombuffer(content[4:header], ">u4")]
    if len(content) - header != math.prod(sizes):
        raise HpctrainError(
            f"{path}: {len(content) - header} bytes of data where its header says {math.prod(sizes)} "
            f"({' x '.join(map(str, sizes))}): fetch the file again"
        )
    return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=header).reshape(sizes).copy())


def load_digits() -> tuple[Images, Images]:
    """The 1,797 handwritten digits inside scikit-learn (UCI, 8 x 8 pixels), enlarged to 28 x 28; 1,437 to train, 360 to test."""
    # The file itself: importing scikit-learn takes a second, on every rank.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise HpctrainError("there is no scikit-learn, which holds the digits: pip install scikit-learn, or give --data")
    table = torch.from_numpy(numpy.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=","))
    small = table[:, :64].float().reshape(-1, 1, 8, 8) * (255 / 16)
    pixels = torch.nn.functional.interpolate(small, (SIDE, SIDE), mode="bilinear")[:, 0].round().to(torch.uint8)
    labels = table[:, 64].long()
    # A fixed order, because writers follow each other in the file; the split must not move with --seed.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) * 4 // 5
    return Images(pixels[order[:cut]], labels[order[:cut]]), Images(pixels[order[cut:]], labels[order[cut:]])


def batches(examples: int, batch_size: int, seed: int, epoch: int, world: World) -> Iterator[Tensor]:
    """The examples of this rank for each step of an epoch, [batch_size / world.size] indices at a time.

    The order of all examples depends on (seed, epoch) alone. Each global batch is a slice of it, and each
    rank takes a slice of that: one process with the same global batch sees the same examples in a step.
    """
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    share = batch_size // world.size
    for step in range(steps_per_epoch(examples, batch_size, world)):
        first = step * batch_size + world.rank * share
        yield order[first : first + share]


def share(examples: int, batch_size: int, world: World) -> Iterator[Tensor]:
    """The examples of this rank for evaluation, in order: every example on exactly one rank, none padded, none left out."""
    first, last = (examples * r // world.size for r in (world.rank, world.rank + 1))
    for start in range(first, last, batch_size):
        yield torch.arange(start, min(start + batch_size, last))
