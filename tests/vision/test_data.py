"""MNIST's files, intact and malformed, and the digits of scikit-learn."""

import gzip
import os
import random
import signal
import struct
import sys

import numpy
import pytest
import torch

from hpctrain.errors import HpctrainError
from hpctrain.vision import data
from tests.helpers import run_command


def idx(*sizes, magic=None, values=None):
    dimensions = len(sizes)
    content = numpy.arange(numpy.prod(sizes)) % 10 if values is None else numpy.array(values)
    header = struct.pack(f">{dimensions + 1}I", magic or 0x0800 + dimensions, *sizes)
    return header + content.astype(numpy.uint8).tobytes()


@pytest.fixture
def folder(tmp_path):
    """A small MNIST: 30 and 20 images."""
    for part, n in (("train", 30), ("t10k", 20)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(n, 28, 28))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(n))
    return tmp_path


def test_plain_and_gz_are_the_same(folder):
    plain = data.load(folder)
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = data.load(folder)
    for one, other in zip(plain, packed, strict=True):
        assert torch.equal(one.pixels, other.pixels) and torch.equal(one.labels, other.labels)
    assert [len(part) for part in plain] == [30, 20]
    assert plain[0].pixels.dtype == torch.uint8 and plain[0].labels[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", None, "no such file, nor train-images-idx3-ubyte.gz"),
        ("train-images-idx3-ubyte", b"", "begins with nothing"),
        ("train-images-idx3-ubyte", idx(30, 28, 28)[:-1], "23519 bytes of data, but its header gives 23520"),
        ("train-images-idx3-ubyte", idx(30, 28, 28) + b"x", "more than 23520 bytes of data"),
        ("train-images-idx3-ubyte", idx(30), "not an idx file of bytes with 3 dimensions"),
        ("train-images-idx3-ubyte", b"<html>404</html>", "begins with 3c68746d"),
        ("train-images-idx3-ubyte", idx(30, 28, 27), "have 28 x 27 pixels, not 28 x 28: "),
        ("train-images-idx3-ubyte", idx(29, 28, 28), "29 images but 30 labels"),
        ("t10k-labels-idx1-ubyte", idx(20, values=[10] * 20), "not digits from 0 to 9"),
    ],
)
def test_a_broken_file_is_named(folder, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(HpctrainError, match=message) as error:
        data.load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_pipe_is_not_waited_for(folder, end):
    (folder / "train-images-idx3-ubyte").unlink()
    os.mkfifo(folder / f"train-images-idx3-ubyte{end}")
    signal.alarm(60)
    with pytest.raises(HpctrainError, match=r"ubyte(\.gz)?: cannot be read \(.*not a plain file\)"):
        data.load(folder)
    signal.alarm(0)


def test_a_truncated_gz_is_named(folder):
    path = folder / "t10k-images-idx3-ubyte"
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes())[:-20])
    path.unlink()
    with pytest.raises(HpctrainError, match=r"t10k-images-idx3-ubyte\.gz: cannot be read"):
        data.load(folder)


def test_class_folders_without_train_are_told_where_they_belong(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(
        HpctrainError, match="or for --model resnet50 a folder with train/ and val/, which have class folders"
    ):
        data.load(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(HpctrainError, match="no such folder"):
        data.load(tmp_path / "nothing")


@pytest.mark.parametrize("make", [os.mkfifo, os.mknod], ids=["pipe", "file"])
def test_what_is_there_and_no_folder(tmp_path, make):
    make(tmp_path / "it")
    with pytest.raises(HpctrainError, match="it: not a folder: --data takes a folder"):
        data.load(tmp_path / "it")


def test_real_mnist(mnist):
    train, test = data.load(mnist)
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert torch.bincount(test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_digits():
    train, test = data.load(None)
    assert (len(train), len(test)) == (1437, 360)
    assert train.pixels.shape == (1437, 28, 28) and int(train.pixels.max()) == 255
    images, labels = train.batch(torch.arange(4), torch.device("cpu"))
    assert images.shape == (4, 1, 28, 28) and float(images.min()) == -1 and labels.dtype == torch.int64


def test_images_are_resized_in_the_batch():
    pixels = torch.zeros(2, 28, 28, dtype=torch.uint8)
    pixels[1, :, 14:] = 255
    small = data.Images(pixels, torch.tensor([3, 7]), side=128)
    images, labels = small.batch(torch.tensor([1, 0]), torch.device("cpu"))
    assert images.shape == (2, 1, 128, 128) and images.dtype == torch.float32 and labels.tolist() == [7, 3]
    assert images[0, 0, :, :60].eq(-1).all() and images[0, 0, :, 68:].eq(1).all() and images[1].eq(-1).all()


def test_the_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    train, test = data.load_digits()
    labels = torch.cat([train.labels, test.labels])
    assert sorted(labels.tolist()) == sorted(load_digits().target.tolist())
    ink = torch.cat([train.pixels, test.pixels]).double().mean().item()
    assert ink == pytest.approx(load_digits().images.mean() * 255 / 16, rel=1e-3)


def memory_after(code, megabytes):
    """Run code in a process whose address space can grow by this much after its imports."""
    program = f"""
import resource, sys
from pathlib import Path
from hpctrain.errors import HpctrainError
from hpctrain.vision import data
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {megabytes} * 2**20,) * 2)
try:
    {code}
except HpctrainError as error:
    print(error)
"""
    return run_command([sys.executable, "-c", program])


@pytest.mark.slow
def test_a_gz_is_unpacked_no_further_than_its_header_gives(folder):
    """A .gz of 1 MB that unpacks to 1 GB.

    Whether the header is honest about that or not, it is refused in little memory.
    """
    path = folder / "train-images-idx3-ubyte"
    path.unlink()
    chunk = bytes(2**20)
    cases = (
        ((30, 28, 28), "more than 23520 bytes of data"),
        ((2**20, 32, 32), "bytes, packed, but its header gives 1073741824 "),
    )
    for sizes, message in cases:
        with gzip.open(f"{path}.gz", "wb", compresslevel=1) as file:
            file.write(idx(*sizes, values=[]))
            for _ in range(1024):
                file.write(chunk)
        done = memory_after(f"data.load(Path({str(folder)!r}))", 256)
        assert done.returncode == 0 and message in done.stdout and done.stdout.count("\n") == 1, done.stderr


def test_a_header_that_claims_too_much_allocates_nothing(folder):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(idx(2**32 - 1, 2**32 - 1, 2**32 - 1, values=[0] * 100))
    with pytest.raises(HpctrainError, match=f"100 bytes of data, but its header gives {(2**32 - 1) ** 3} "):
        data.load(folder)


def test_damaged_files_are_read_or_refused_in_one_line(folder):
    """1,000 random changes of bytes and lengths, plain and packed."""
    path = folder / "t10k-images-idx3-ubyte"
    good = path.read_bytes()
    path.unlink()
    chance = random.Random(1)
    for number in range(1000):
        packed = number % 2
        content = bytearray(gzip.compress(good) if packed else good)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(64 if chance.random() < 0.7 else len(content))] = chance.randrange(256)
        del content[chance.randrange(len(content)) if chance.random() < 0.3 else len(content) :]
        target = path.with_name(path.name + ".gz") if packed else path
        target.write_bytes(content)
        try:
            data.load(folder)
        except HpctrainError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
        target.unlink()
