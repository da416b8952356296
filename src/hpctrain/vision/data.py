"""Images and labels: MNIST from its four idx files, or the digits that are part of scikit-learn.

These data sets stay in memory, as bytes. folder.py has data sets that are too large for that.
"""

import gzip
import importlib.util
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from hpctrain.commands.data_sets import hint_fetch
from hpctrain.errors import HpctrainError, hint_missing
from hpctrain.files.digests import arrays_sha256
from hpctrain.files.plain import open_plain
from hpctrain.training.batches import Part

SIDE = 28  # pixels
CLASSES = 10
# A .gz may unpack to this many times its size, plus a MB (MNIST: images to 5 times, labels to 2).
MAX_RATIO = 200
# Mean and standard deviation of ImageNet's pixels, for red, green and blue.
RGB_MEAN, RGB_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@dataclass(frozen=True, eq=False)
class Images:
    """Gray images of one digit each: pixels [n, 28, 28] uint8, labels [n] int64 from 0 to 9."""

    pixels: Tensor
    labels: Tensor
    side: int = SIDE  # images are resized to side x side pixels, on the device
    channels: ClassVar[int] = 1
    classes: ClassVar[range] = range(CLASSES)
    workers: ClassVar[int] = 0  # processes that decode images
    unused: ClassVar[str] = ""  # a remark on files that were not read

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """What tells these examples from others."""
        return arrays_sha256(self.pixels.numpy(), self.labels.numpy())

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Examples on `device`: images [b, 1, side, side] float32 from -1 to 1, labels [b] int64."""
        pixels = self.pixels[index].to(device, non_blocking=True)
        labels = self.labels[index].to(device, non_blocking=True)
        return to_images(pixels, self.side), labels

    def load_batches(self, parts: Iterable[Part], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """batch() of each part in turn: see Run.batches()."""
        # On a GPU, only the indices are copied in a step.
        here = replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))
        for part in parts:
            yield here.batch(part.examples.to(device, non_blocking=True), device)

    def read(self, index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """The examples of `index`: pixels [b, 28, 28] uint8, labels [b] int64. The epoch changes nothing."""
        return self.pixels[index], self.labels[index]


def to_images(pixels: Tensor, side: int) -> Tensor:
    """Turn pixels into images, resized if h or w is not `side`.

    Gray ones, [b, h, w] uint8, become [b, 1, side, side] float32 from -1 to 1. Color, [b, 3, h, w] uint8,
    becomes [b, 3, side, side] float32, normalized by ImageNet's mean and standard deviation.
    """
    if pixels.dim() == 3:
        images = pixels[:, None].float().div(127.5).sub(1)
    else:
        mean, std = _mean_and_std(pixels.device)
        images = pixels.float().sub(mean).div(std)
    if images.shape[2:] != (side, side):
        images = torch.nn.functional.interpolate(images, (side, side), mode="bilinear")
    return images


@cache
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    """ImageNet's, [3, 1, 1] each. Cached: copying them to a GPU in each step would wait for the GPU."""
    mean, std = torch.tensor(RGB_MEAN, device=device), torch.tensor(RGB_STD, device=device)
    return mean[:, None, None], std[:, None, None]


def load(folder: Path | None, side: int = SIDE) -> tuple[Images, Images]:
    """The training set and the test set: MNIST from `folder`, or the digits without one.

    Raises HpctrainError, naming the file, if a file is missing or malformed.
    """
    train, test = load_digits() if folder is None else load_mnist(folder)
    return replace(train, side=side), replace(test, side=side)


def load_mnist(folder: Path) -> tuple[Images, Images]:
    """MNIST (60,000 + 10,000 images) from its four files, plain or .gz. Raises HpctrainError."""
    if not folder.is_dir():
        wrong, hint = "not a folder", ""
        if not folder.exists():
            wrong, hint = "no such folder", hint_missing(folder) or hint_fetch(folder)
        raise HpctrainError(
            f"{folder}: {wrong}: --data takes a folder with MNIST's four idx files, plain or .gz{hint}"
        )
    train, test = (
        Images(
            _read_idx(folder, f"{part}-images-idx3-ubyte", 3),
            _read_idx(folder, f"{part}-labels-idx1-ubyte", 1).long(),
        )
        for part in ("train", "t10k")
    )
    for part, images in (("train", train), ("t10k", test)):
        if len(images.pixels) != len(images.labels):
            raise HpctrainError(
                f"{folder}: {part} has {len(images.pixels)} images but {len(images.labels)} labels: "
                "download the files again"
            )
        if images.pixels.shape[1:] != (SIDE, SIDE):
            height, width = images.pixels.shape[1:]
            raise HpctrainError(
                f"{folder}: the {part} images have {height} x {width} pixels, not {SIDE} x {SIDE}: "
                "download the file again"
            )
        if len(images) == 0 or int(images.labels.max()) >= CLASSES:
            raise HpctrainError(
                f"{folder}: the {part} labels are not digits from 0 to 9: download the file again"
            )
    return train, test


def _read_idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """Read an idx file: two zero bytes, type 8, number of dimensions, their sizes (big-endian), bytes.

    Memory is allocated only if the file can hold as many as the header gives. Raises HpctrainError.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise HpctrainError(
            f"{folder}/{name}: no such file, nor {name}.gz: --data takes a folder with MNIST's four idx "
            "files, or for --model resnet50 a folder with train/ and val/, which have class folders or tar "
            "files of JPEG or PNG"
        )
    packed = path.suffix == ".gz"
    try:
        with open_plain(path) as plain, gzip.GzipFile(fileobj=plain) if packed else plain as file:
            header = file.read(4 + 4 * dimensions)
            if header[:4] != bytes([0, 0, 8, dimensions]) or len(header) < 4 + 4 * dimensions:
                raise HpctrainError(
                    f"{path}: not an idx file of bytes with {dimensions} dimensions (it begins with "
                    f"{header[:4].hex() or 'nothing'}): download the file again"
                )
            sizes = [int(n) for n in numpy.frombuffer(header[4:], ">u4")]
            wanted = math.prod(sizes)
            in_file = path.stat().st_size
            if wanted > (MAX_RATIO * in_file + 2**20 if packed else in_file):
                found = f"{in_file} bytes, packed" if packed else f"{in_file - len(header)} bytes of data"
            else:
                content = file.read(wanted)
                rest = len(file.read(1))  # at the end of a .gz, this also checks its CRC-32
                found = f"more than {wanted} bytes of data" if rest else f"{len(content)} bytes of data"
                if not rest and len(content) == wanted:
                    return torch.from_numpy(numpy.frombuffer(content, numpy.uint8).reshape(sizes).copy())
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: 0 x 4294967295 x 4294967295
        raise HpctrainError(f"{path}: cannot be read ({error}): download the file again") from error
    raise HpctrainError(
        f"{path}: {found}, but its header gives {wanted} ({' x '.join(map(str, sizes))}): "
        "download the file again"
    )


def load_digits() -> tuple[Images, Images]:
    """The 1,797 handwritten digits in scikit-learn, resized to 28 x 28: 1,437 for training, 360 for test.

    Their source is UCI, with 8 x 8 pixels. Raises HpctrainError if scikit-learn is not installed.
    """
    # Read the file directly: importing scikit-learn takes a second, on every rank.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise HpctrainError(
            "scikit-learn, which holds the digits, is not installed: pip install scikit-learn, or use --data"
        )
    table = torch.from_numpy(
        numpy.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    )
    small = table[:, :64].float().reshape(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(small, (SIDE, SIDE), mode="bilinear")[:, 0]
    pixels = large.round().to(torch.uint8)
    labels = table[:, 64].long()
    # Shuffled, as the file is sorted by writer; a fixed seed, as --seed must not change the split.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) * 4 // 5
    return Images(pixels[order[:cut]], labels[order[:cut]]), Images(pixels[order[cut:]], labels[order[cut:]])
