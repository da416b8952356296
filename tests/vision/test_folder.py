"""Images in class folders and tar files: which are read, and how.

A resumed run sees the same augmented images.
"""

import inspect
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tarfile
import unicodedata
import zlib

import numpy
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError
from hpctrain.training.batches import EpochPlan, Part, can_fork_beside_threads
from hpctrain.vision import recipe
from hpctrain.vision.folder import center_crop, decode, load_folder, random_resized_crop
from tests.tools import warm_start
from tests.vision.test_train import in_image, run

CPU = torch.device("cpu")
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """12 images for training and 6 for evaluation, of two classes, in sizes of their own."""
    folder = tmp_path_factory.mktemp("images")
    noise = numpy.random.default_rng(0)
    for part, number in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for n in range(number):
                pixels = noise.integers(0, 128, (24 + 3 * n, 40 - 2 * n, 3), numpy.uint8) + 127 * label
                Image.fromarray(pixels.astype(numpy.uint8)).save(
                    folder / part / name / f"{n}.{'png' if n % 2 else 'jpg'}"
                )
    return folder


@pytest.fixture(scope="module")
def shards(images, tmp_path_factory):
    """The same images, in the same order, in two tar files for training and one for evaluation."""
    folder = tmp_path_factory.mktemp("shards")
    for part, data in zip(("train", "val"), load(images), strict=True):
        (folder / part).mkdir()
        for first in range(0, len(data), 8):
            with tarfile.open(folder / part / f"{first:03d}.tar", "w") as tar:
                for number in range(first, min(first + 8, len(data))):
                    add(tar, f"{number}.jpg", data.path(number).read_bytes())
                    add(tar, f"{number}.cls", f"{data.labels[number]}\n".encode())
    return folder


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def copy(images, tmp_path):
    return shutil.copytree(images, tmp_path / "copy")


def load(folder, workers=0, seed=1):
    return load_folder(folder, 16, seed, workers)


def test_files_and_labels_are_in_the_order_of_torchvision(copy):
    """By class, then by folder, then by name; whatever is no image is left out."""
    cat = copy / "train/cat"
    (cat / "more").mkdir()
    for name in ("more/0.JPEG", "A.PNG"):
        shutil.copy(cat / "0.jpg", cat / name)
    for name in ("._0.jpg", "Thumbs.db", "list.txt"):
        (cat / name).write_text("not an image")
    (copy / "train/README").touch()
    train, test = load(copy)
    names = [str(train.path(number).relative_to(copy / "train")) for number in range(len(train))]
    own = ["0.jpg", "1.png", "2.jpg", "3.png", "4.jpg", "5.png"]
    assert names == [f"cat/{name}" for name in ["0.jpg", *own[1:], "A.PNG", "more/0.JPEG"]] + [
        f"dog/{name}" for name in own
    ]
    assert train.labels.tolist() == [0] * 8 + [1] * 6 and train.classes == ["cat", "dog"]
    assert len(test) == 6


def test_links_that_lead_to_a_folder_in_many_ways_are_refused(copy):
    """Nine levels of thirty links each took for ever."""
    (copy / "levels/9").mkdir(parents=True)
    for level in range(9):
        (copy / f"levels/{level}").mkdir()
        for number in range(30):
            (copy / f"levels/{level}/{number}").symlink_to(f"../{level + 1}")
    (copy / "train/cat/a").symlink_to("../../levels/0")
    with pytest.raises(HpctrainError, match=r"/train/cat/a/.*more than 100 ways lead to this folder"):
        load(copy)


def test_a_jpeg_of_many_scans_is_refused(copy):
    """The last scan of a progressive one, repeated: 700 kB took nine minutes."""
    path = copy / "train/cat/0.jpg"
    Image.new("L", (64, 64)).save(path, progressive=True)
    content = path.read_bytes()
    scan, end = content[content.rindex(b"\xff\xda") : -2], content[-2:]
    path.write_bytes(content[:-2] + 150 * scan + end)
    train, _ = load(copy)
    train.read(torch.tensor([0]), 1)
    path.write_bytes(content[:-2] + 300 * scan + end)
    with pytest.raises(HpctrainError, match=r"0\.jpg: cannot be read .*\(it has more than 200 scans\)"):
        train.read(torch.tensor([0]), 1)


def test_files_that_are_not_read_are_told(copy, capsys):
    """torchvision reads .webp and .bmp as well."""
    for name in (
        "train/dog/a.webp",
        "train/dog/b.webp",
        "train/dog/more.x/c",
        "train/a.jpg",
        "train/dog/.hidden",
    ):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).touch()
    args = recipe.parse(
        recipe.vision_parser("train_ddp", ""),
        ["--model=resnet50", f"--data={copy}", "--workers=0"],
        recipe.ImageOptions(),
    )
    recipe.load_data(args, ALONE)
    kinds = "2 .webp, 1 .jpg, 1 without a suffix"
    told = f"{copy}/train: not used: 4 files ({kinds}): only JPEG and PNG in class folders are read\n"
    assert capsys.readouterr().out == told


def corner(path, **at):
    """The color of the upper left corner of a decoded file, each channel rounded to a multiple of 51."""
    return tuple(round(channel / 51) * 51 for channel in decode(path).getpixel((1, 1)))


def test_gray_palette_cmyk_16_bit_and_rotated_images(tmp_path):
    wide = Image.new("RGB", (40, 20), BLUE)
    wide.paste(RED, (0, 0, 20, 20))
    Image.new("L", (8, 8), 102).save(tmp_path / "gray.png")
    Image.fromarray(numpy.full((8, 8), 102 * 256, numpy.uint16)).save(tmp_path / "gray16.png")
    Image.new("1", (8, 8), 1).save(tmp_path / "bits.png")
    wide.convert("P").save(tmp_path / "palette.png", transparency=0)
    wide.convert("RGBA").save(tmp_path / "alpha.png")
    wide.convert("CMYK").save(tmp_path / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees: the left end is up
    wide.rotate(90, expand=True).save(tmp_path / "rotated.jpg", exif=exif, quality=95)
    colors = {path.name: corner(path) for path in tmp_path.iterdir()}
    gray = (102, 102, 102)
    assert colors == {
        "gray.png": gray,
        "gray16.png": gray,
        "bits.png": (255, 255, 255),
        "palette.png": RED,
        "alpha.png": RED,
        "cmyk.jpg": RED,
        "rotated.jpg": RED,
    }
    assert decode(tmp_path / "rotated.jpg").size == (40, 20)
    assert {decode(path).mode for path in tmp_path.iterdir()} == {"RGB"}


def exif(*tags):
    """EXIF with these tags: number, type, count and four bytes."""
    entries = b"".join(struct.pack("<HHI", *tag[:3]) + tag[3] for tag in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(60)


TURNED = (0x0112, 3, 1, b"\6\0\0\0")
# EXIF, and the height of an image of 40 x 20 that it turns by 90 degrees, or not.
ODD_EXIF = {
    "whole": (exif(TURNED), 40),
    "orientation as a text": (exif((0x0112, 2, 2, b"6\0\0\0")), 20),
    "orientation twice": (exif((0x0112, 3, 2, b"\6\0\6\0")), 40),
    "ImageWidth as a text": (exif(TURNED, (0x0100, 2, 3, b"48\0\0")), 40),
    "Software as a number": (exif(TURNED, (0x0131, 11, 1, b"\0\0\xc0?")), 40),
    "GPS beyond the end": (exif(TURNED, (0x8825, 4, 1, b"\xff\xff\0\0")), 40),
    "garbage": (b"\x12\x34\x56\x78" * 3, 20),
    "cut": (exif(TURNED)[:16], 20),
    "empty": (b"", 20),
}


@pytest.mark.parametrize("kind", ODD_EXIF)
def test_only_the_orientation_in_exif_counts(tmp_path, kind):
    """A tag of an unusual type ended a training."""
    content, height = ODD_EXIF[kind]
    image = Image.new("RGB", (40, 20), BLUE)
    image.save(tmp_path / "a.jpg", exif=b"Exif\0\0" + content)
    image.save(tmp_path / "a.png", exif=content)
    info = PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n 9\n{content.hex()}z")  # no hexadecimal number
    image.save(tmp_path / "profile.png", pnginfo=info)
    found = {path.name: decode(path).height for path in tmp_path.iterdir()}
    assert found == {"a.jpg": height, "a.png": height, "profile.png": 20}


def chunk(kind, content):
    """A chunk of PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_transparency_beyond_the_palette_is_no_error(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), BLUE).convert("P").save(path)
    content = path.read_bytes()
    at = content.index(b"IDAT") - 4
    path.write_bytes(content[:at] + chunk(b"tRNS", bytes(300)) + content[at:])
    assert corner(path) == BLUE


def png(width, height):
    """A PNG file whose header gives this size, with the data of one row at most."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(8)))
        + chunk(b"IEND", b"")
    )


BROKEN = {
    "empty": (lambda good: b"", "cannot be read as a JPEG or PNG"),
    "truncated": (lambda good: good[:-20], "cannot be read as a JPEG or PNG .*truncated"),
    "html": (lambda good: b"<html>404</html>", "cannot be read as a JPEG or PNG"),
    "gif": (lambda good: b"GIF89a" + bytes(20), "cannot be read as a JPEG or PNG"),
    "bomb": (lambda good: png(10_000, 10_000), "has more than 89478485 pixels"),
    "large bomb": (lambda good: png(60_000, 60_000), "has more than 89478485 pixels"),
    "header only": (lambda good: png(100, 100), "cannot be read as a JPEG or PNG"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_named(images, tmp_path, kind):
    make, message = BROKEN[kind]
    path = tmp_path / "broken.jpg"
    path.write_bytes(make((images / "train/cat/0.jpg").read_bytes()))
    with pytest.raises(HpctrainError, match=message) as error:
        decode(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "0.jpg")
    signal.alarm(60)
    with pytest.raises(HpctrainError, match=r"0.jpg: cannot be read as a JPEG or PNG .*not a plain file"):
        decode(tmp_path / "0.jpg")
    signal.alarm(0)


def test_damaged_images_are_read_or_refused_in_one_line(images, tmp_path):
    """400 random changes of bytes and lengths."""
    chance = random.Random(1)
    for number in range(400):
        good = images / "train/cat" / ("1.png" if number % 2 else "0.jpg")
        content = bytearray(good.read_bytes())
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(200 if chance.random() < 0.7 else len(content))] = chance.randrange(256)
        path = tmp_path / good.name
        path.write_bytes(content[: chance.randrange(len(content)) if chance.random() < 0.3 else len(content)])
        try:
            assert decode(path).mode == "RGB"
        except HpctrainError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def test_a_file_that_is_gone_is_named(copy):
    train, _ = load(copy)
    train.path(3).unlink()
    with pytest.raises(HpctrainError, match=re.escape(f"{train.path(3)}: cannot be read as a JPEG or PNG")):
        train.read(torch.tensor([3]), epoch=1)


FOLDERS = {
    "no evaluation set": (
        lambda folder: shutil.rmtree(folder / "val"),
        "has train/ but none of val/, valid/, test/",
    ),
    "no classes": (
        lambda folder: [shutil.rmtree(path) for path in (folder / "train").iterdir()],
        "train: has no class folders",
    ),
    "empty class": (lambda folder: (folder / "val/emu").mkdir(), "val/emu: has no JPEG or PNG file"),
    "class without evaluation": (
        lambda folder: shutil.rmtree(folder / "val/dog"),
        r"the class dog is in train/ but not in val/ \(1 classes differ in all\)",
    ),
    "class without training": (
        lambda folder: shutil.rmtree(folder / "train/cat"),
        "the class cat is in val/ but not in train/",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_wrong_folder_is_named(copy, kind):
    change, message = FOLDERS[kind]
    change(copy)
    with pytest.raises(HpctrainError, match=message) as error:
        load(copy)
    assert str(error.value).startswith(str(copy)) and "\n" not in str(error.value)


def test_the_evaluation_set_is_val_valid_or_test(copy):
    (copy / "val").rename(copy / "test")
    assert len(load(copy)[1]) == 6


def test_the_mnist_net_refuses_color_images(images):
    args = recipe.parse(recipe.vision_parser("train_ddp", ""), ["--data", str(images)], recipe.ImageOptions())
    with pytest.raises(HpctrainError, match="takes MNIST's: add --model resnet50"):
        recipe.load_data(args, ALONE)


def batches(folder, workers, epoch=1, skip=0, seed=1, world=ALONE):
    train, _ = load(folder, workers, seed)
    return list(train.load_batches(EpochPlan(len(train), 4, seed, epoch, world).parts(skip), CPU))


def batches_of(data, examples, epoch):
    """The batches of these lists of examples."""
    parts = (Part(number, epoch, each, each) for number, each in enumerate(map(torch.tensor, examples)))
    return list(data.load_batches(parts, CPU))


def test_tar_files_give_the_batches_of_class_folders(images, shards):
    assert sorted(path.name for path in (shards / "train").iterdir()) == ["000.tar", "008.tar"]
    for (train, test), workers in ((load(shards), 0), (load(shards, 2), 2)):
        of_folders, evaluation = load(images)
        order = [[3, 11, 0], [7, 8]]
        assert equal(batches_of(train, order, 2), batches_of(of_folders, order, 2)), workers
        assert equal(*(batches_of(part, [[3, 0]], 0) for part in (test, evaluation)))
        assert train.classes == test.classes == ["0", "1"] and len(train) == 12 and len(test) == 6
    assert equal(batches(shards, 1, skip=1), batches(images, 0, skip=1))


def test_tar_files_may_have_their_suffix_in_capitals(shards, tmp_path):
    renamed = shutil.copytree(shards, tmp_path / "renamed")
    (renamed / "train/008.tar").rename(renamed / "train/008.TAR")
    assert equal(batches(renamed, 0), batches(shards, 0))


WRONG_SHARDS = {
    "no label": (
        ["0.jpg", "1.jpg"],
        "000.tar: its examples have jpg: they need one JPEG or PNG file and its label in .cls",
    ),
    "two images": (["0.jpg", "0.png", "0.cls"], "its examples have cls, jpg, png: they need one JPEG"),
    "word": (["0.jpg", "0.cls=cat"], "000.tar: 0.cls has no label: it must be an integer from 0"),
    "negative": (["0.jpg", "0.cls=-1"], "000.tar: 0.cls has no label"),
    "large": (["0.jpg", "0.cls=12345678901"], "000.tar: 0.cls has no label"),
    "a hundred million classes": (
        ["0.jpg", "0.cls=99999999"],
        "000.tar: 0.cls has the label 99999999, but labels are the numb",
    ),
}


@pytest.mark.parametrize("kind", WRONG_SHARDS)
def test_wrong_tar_files_are_named(shards, tmp_path, kind):
    names, message = WRONG_SHARDS[kind]
    folder = shutil.copytree(shards, tmp_path / "copy")
    (folder / "train/008.tar").unlink()
    with tarfile.open(folder / "train/000.tar", "w") as tar:
        for name, _, content in (name.partition("=") for name in names):
            add(tar, name, content.encode())
    with pytest.raises(HpctrainError, match=message) as error:
        load(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)


def test_tar_files_in_one_part_only_and_unlike_labels(images, shards, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(shards / "train", folder / "train")
    shutil.copytree(images / "val", folder / "val")
    with pytest.raises(HpctrainError, match=r"there are .tar files in train/ or val/, but none in val/"):
        load(folder)
    shutil.copy(shards / "val/000.tar", folder / "val")
    with pytest.raises(HpctrainError, match=r"val: has .tar files and the folder cat: keep one of the two"):
        load(folder)
    shutil.rmtree(folder / "val")
    (folder / "val").mkdir()
    with tarfile.open(folder / "val/000.tar", "w") as tar:
        add(tar, "a.jpg", b"")
        add(tar, "a.cls", b"2")
    with pytest.raises(
        HpctrainError,
        match=r"the label 2 is in val/, but those in train/ end at 1: both need the same labels",
    ):
        load(folder)


def test_a_broken_image_in_a_tar_file_is_named(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "copy")
    with tarfile.open(folder / "train/000.tar", "w") as tar:
        add(tar, "00/7.jpg", b"<html>404</html>")
        add(tar, "00/7.cls", b"0")
    train, _ = load(folder, workers=1)
    with pytest.raises(HpctrainError, match="cannot be read as a JPEG or PNG") as error:
        batches_of(train, [[0]], epoch=1)
    assert str(error.value).startswith(
        f"{folder}/train/000.tar: 00/7.jpg: cannot be read"
    ) and "\n" not in str(error.value)


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_augmentation_depends_on_seed_epoch_and_example_alone(images):
    whole = batches(images, 0)
    assert len(whole) == 3 and whole[0][0].shape == (4, 3, 16, 16) and whole[0][0].dtype == torch.float32
    assert equal(batches(images, 2), whole)
    assert equal(batches(images, 1, skip=1), whole[1:])
    halves = [batches(images, 0, world=World(rank, 2, rank, 2, 0, 1, "torchrun")) for rank in (0, 1)]
    for (pixels, labels), *parts in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat([part[0] for part in parts]), pixels)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)
    train, _ = load(images)
    assert not torch.equal(
        train.read(torch.tensor([0]), epoch=1)[0], train.read(torch.tensor([0]), epoch=2)[0]
    )
    assert not torch.equal(
        train.read(torch.tensor([0]), epoch=1)[0], load(images, seed=2)[0].read(torch.tensor([0]), epoch=1)[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("data", ["images", "shards"])
def test_where_a_worker_that_is_forked_could_hang_it_is_not(request, monkeypatch, data):
    folder = request.getfixturevalue(data)
    forked = batches(folder, 1)
    monkeypatch.delitem(sys.modules, "hpctrain_fork_lock", raising=False)
    monkeypatch.setattr(sys, "version_info", (3, 11, 2, "final", 0))
    with monkeypatch.context() as without_fork:
        without_fork.delattr(os, "fork")
        assert equal(batches(folder, 1), forked)
    for version, can in {
        (3, 10, 14): False,
        (3, 10, 15): True,
        (3, 11, 9): False,
        (3, 11, 10): True,
        (3, 12, 0): True,
    }.items():
        monkeypatch.setattr(sys, "version_info", version)
        assert can_fork_beside_threads() == can


def test_an_error_of_a_worker_is_one_line(copy):
    train, _ = load(copy, workers=1)
    train.path(5).write_bytes(b"")
    with pytest.raises(HpctrainError) as error:
        batches_of(train, [[4, 5]], epoch=1)
    assert str(error.value).startswith(f"{train.path(5)}: cannot be read") and "\n" not in str(error.value)


def test_normalization():
    from hpctrain.vision.data import to_images

    pixels = torch.tensor([255, 0, 0], dtype=torch.uint8)[None, :, None, None]
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]  # torchvision's values for ImageNet
    torch.testing.assert_close(to_images(pixels, 1).flatten(), torch.tensor(expected))


@pytest.mark.parametrize("size", [(500, 375), (1, 1), (3000, 2), (2, 3000), (224, 224)])
def test_every_image_gives_a_crop(size):
    image = Image.new("RGB", size, GREEN)
    assert center_crop(image, 224).size == (224, 224)
    for seed in range(5):
        crop = random_resized_crop(image, 224, random.Random(seed))
        # nothing from beyond the edge, which is black
        assert crop.size == (224, 224) and crop.getpixel((0, 0)) == GREEN


def test_the_center_crop_is_the_middle_224_of_256():
    """The shorter side becomes 256 pixels, and the crop is from 16 to 240."""
    image = Image.new("RGB", (512, 256))
    image.paste(RED, (0, 20, 512, 21))
    image.paste(GREEN, (0, 10, 512, 11))
    crop = numpy.asarray(center_crop(image, 224))
    assert crop[4].tolist() == [list(RED)] * 224 and crop[:, :, 1].max() == 0


def test_random_crops_have_the_distribution_of_the_paper():
    """The image has two ramps. Their ranges in a crop are its width and height; a sign shows a flip."""
    ramp = numpy.zeros((256, 256, 3), numpy.uint8)
    ramp[:, :, 0], ramp[:, :, 1] = numpy.arange(256)[None], numpy.arange(256)[:, None]
    image = Image.fromarray(ramp)
    areas, ratios, flips = [], [], []
    for seed in range(500):
        crop = numpy.asarray(random_resized_crop(image, 32, random.Random(seed))).astype(float) / 256
        width, height = (
            abs(crop[0, -1, 0] - crop[0, 0, 0]) * 32 / 31,
            (crop[-1, 0, 1] - crop[0, 0, 1]) * 32 / 31,
        )
        areas.append(width * height)
        ratios.append(width / height)
        flips.append(crop[0, -1, 0] < crop[0, 0, 0])
    assert 0.05 < min(areas) < 0.12 and 0.9 < max(areas) < 1.1 and 0.45 < numpy.mean(areas) < 0.6
    assert 0.68 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.45
    assert 0.4 < numpy.mean(flips) < 0.6


class Small(torch.nn.Module):
    """A stand-in for ResNet-50, whose runs take minutes on a CPU."""

    def __init__(self, channels, classes):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.BatchNorm2d(channels),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * channels, classes),
        )

    def forward(self, images):
        return self.layers(images)


def use_small_model():
    recipe.RECIPES["resnet50"] = recipe.RECIPES["resnet50"]._replace(model=Small)


IN_IMAGE = f"""
import torch
from hpctrain.__main__ import main
from hpctrain.vision import recipe

{inspect.getsource(Small)}
{inspect.getsource(use_small_model)}
if __name__ == "__main__":
    use_small_model()
    main()
"""


def train(trainer, images, cwd, *words, ranks=2):
    """With a small model: Horovod in the image, the other trainers on warm-started ranks."""
    options = ["--model=resnet50", "--data", images, "--image-size=16", "--batch-size=4"]
    words = [*options, "--checkpoint-every=1", *words]
    arguments = [trainer, *map(str, words), "--epochs", "2", "--keep-checkpoints", "99"]
    if trainer == "train_horovod":
        (cwd / "small.py").write_text(IN_IMAGE)
        return run(in_image("mpirun", "-np", str(ranks), "python", "small.py"), *arguments, cwd=cwd)
    return warm_start.run(warm_start.torchrun_ranks(ranks, arguments, dict(os.environ), use_small_model), cwd)


def digest(folder):
    return json.loads((folder / "result.json").read_text())["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "data", "ranks"),
    [("train_ddp", "shards", 4), ("train_lightning", "images", 2), ("train_horovod", "shards", 2)],
)
def test_a_run_cut_within_an_epoch_is_resumed_bit_for_bit(request, tmp_path, trainer, data, ranks):
    """In the second epoch, with another number of workers."""
    # the image sees the working folder alone
    folder = shutil.copytree(request.getfixturevalue(data), tmp_path / "data")
    done = train(trainer, folder, tmp_path, "--out", "whole", "--workers", 1, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (cut / "result.json").unlink()
    for name in ("epoch-0002.pt", "epoch-0002-step-000002.pt"):
        (cut / "checkpoints" / name).unlink(missing_ok=True)
    done = train(trainer, folder, tmp_path, "--resume", "cut", "--workers", 0, ranks=ranks)
    assert done.returncode == 0 and "resuming after epoch 1 and 1 steps" in done.stdout, (
        done.stdout + done.stderr
    )
    assert digest(cut) == digest(tmp_path / "whole")


@pytest.mark.slow
def test_a_broken_image_ends_the_job_in_one_line(copy, tmp_path):
    path = copy / "train/dog/2.jpg"
    path.write_bytes(b"")
    done = train("train_lightning", copy, tmp_path, "--workers", 1, "--watchdog", 5)
    errors = [line for line in done.stderr.splitlines() if "cannot be read" in line]
    assert done.returncode == 1 and len(errors) == 1 and errors[0].startswith(f"hpctrain: error: {path}: "), (
        done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_resnet50_has_the_channels_and_classes_of_the_folder(images):
    args = recipe.parse(
        recipe.vision_parser("train_ddp", ""),
        ["--data", str(images), "--model", "resnet50"],
        recipe.ImageOptions(),
    )
    train, _ = recipe.load_data(args, ALONE)
    assert args.image_size == 224 and args.workers == min(16, len(os.sched_getaffinity(0)) - 1)
    model = recipe.build_model(args, train, CPU)
    assert model(train.batch(torch.tensor([0]), CPU)[0]).shape == (1, 2)
    # torchvision's ResNet-50 has 25,557,032 parameters with 1000 classes.
    assert sum(p.numel() for p in model.parameters()) == 25_557_032 - 998 * 2049


OF_SYSTEMS = (".DS_Store", "._0.jpg", ".ipynb_checkpoints", "@eaDir", "__MACOSX", "lost+found")


@pytest.mark.parametrize("below", ["", "cat"])
@pytest.mark.parametrize("name", OF_SYSTEMS)
def test_what_systems_leave_is_neither_a_class_nor_an_image(images, tmp_path, name, below):
    """Also not the small copies of the images that a NAS (@eaDir) and Jupyter put below a class."""
    shutil.copytree(images, tmp_path, dirs_exist_ok=True)
    place = tmp_path / "train" / below / name
    if place.suffix:
        place.write_bytes(b"no image")
    else:
        place.mkdir()
        shutil.copy(images / "train/cat/0.jpg", place / "0-checkpoint.jpg")
    for data, expected in zip(load(tmp_path), load(images), strict=True):
        assert (data.classes, len(data), data.unused) == (expected.classes, len(expected), "")


def test_a_class_in_another_form_of_unicode_is_the_same(images, tmp_path):
    """As a folder that macOS has packed, beside one of Linux."""
    for part, form in (("train", "NFD"), ("val", "NFC")):
        for name, korean in (("cat", "고양이"), ("dog", "개")):
            shutil.copytree(images / part / name, tmp_path / part / unicodedata.normalize(form, korean))
    train, test = load(tmp_path)
    assert train.classes == test.classes == ["개", "고양이"]
    assert train.path(0).parent.name == unicodedata.normalize("NFD", "개")


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP"])
def test_another_format_is_named_by_its_suffix_or_its_first_bytes(images, tmp_path, kind):
    shutil.copytree(images, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "train/cat").iterdir():
        path.unlink()
    path = tmp_path / f"train/cat/0.{kind.lower()}"
    Image.new("RGB", (40, 30)).save(path, kind)
    with pytest.raises(HpctrainError, match=rf"has no JPEG or PNG file \(found 1 \.{kind.lower()}: convert"):
        load(tmp_path)
    head = re.escape(repr(path.read_bytes()[:12]))
    with pytest.raises(
        HpctrainError, match=rf"0\.jpg: cannot be read as a JPEG or PNG \(it begins with {head}\)"
    ):
        decode(path.rename(path.with_suffix(".jpg")))


def test_a_digest_tells_other_examples(images, shards, tmp_path):
    """Names, labels and sizes; the path of the data and the kind of split do not count."""
    shutil.copytree(images, tmp_path / "copy")
    assert load(tmp_path / "copy")[0].digest() == load(images)[0].digest()
    digests = {part.digest() for folder in (images, shards) for part in load(folder)}
    for old, new in (("cat", "swap"), ("dog", "cat"), ("swap", "dog")):
        (tmp_path / "copy/train" / old).rename(tmp_path / "copy/train" / new)
    digests.add(load(tmp_path / "copy")[0].digest())
    with (tmp_path / "copy/train/cat/0.jpg").open("ab") as file:
        file.write(b"0")
    digests.add(load(tmp_path / "copy")[0].digest())
    assert len(digests) == 6
