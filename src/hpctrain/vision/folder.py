"""Images in class folders or tar files, decoded in worker processes.

Training images are FOLDER/train/CLASS/NAME.jpg, or in FOLDER/train/NAME.tar; FOLDER/val has the same layout
for evaluation. Class folders, files and labels are those of torchvision's ImageFolder. Tar files have
WebDataset's layout: 000017.jpg and 000017.cls in a row are an example.

The transforms are those of torchvision's reference training of ResNet-50 (github.com/pytorch/vision,
references/classification/presets.py): a random resized crop and a flip in training; resize and center crop in
evaluation.
"""

import io
import math
import os
import random
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files.digests import arrays_sha256
from hpctrain.files.plain import open_plain
from hpctrain.text import counted, first_line, one_line
from hpctrain.training.batches import Part, can_fork_beside_threads
from hpctrain.training.tar_shards import TarShards
from hpctrain.vision.data import Images, to_images

if TYPE_CHECKING:  # importing Pillow would hold up MNIST's first step
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png")
MAX_DIGITS = 9  # of a label, with the end of its line
# The largest label allowed, or the number of examples if larger: models have an output for each number.
MAX_CLASSES = 100_000
MAX_WAYS = 100  # to a folder, through links: nine levels of 30 links each would take for ever
MAX_SIZES = 1000  # each takes a network file system about a millisecond
MAX_SCANS = 200  # of a progressive JPEG, which usually has ten
TRAINING, EVALUATION = "train", ("val", "valid", "test")  # folders in a data folder
ORIENTATION = 0x0112  # the tag of EXIF
# How an orientation turns an image, in the names of Pillow. 1 leaves it as it is.
TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
    7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip


class ImageFolder:
    """Color images in class folders. Only their names are in memory.

    `seed` selects the augmentation of a training set; an evaluation set has None. Images are cropped to
    `side` x `side` pixels by `workers` processes; 0: by this process. `classes` are the names of the classes
    in the order of their labels. `unused` says how many files are not read, and which ("": all are read).
    """

    channels = 3
    unused = ""

    def __init__(self, folder: Path, side: int, seed: int | None, workers: int) -> None:
        """Read the names of all files. Raises HpctrainError for a folder without images or permission."""
        self._folder, self._side, self._seed, self.workers = folder, side, seed, workers
        entries = [entry for entry in _scan(folder) if not is_of_system(entry.name)]
        # Hangul in a name of macOS has another form than elsewhere
        folders = sorted(
            (unicodedata.normalize("NFC", entry.name), entry.name) for entry in entries if entry.is_dir()
        )
        self.classes = [name for name, _ in folders]
        if not self.classes:
            raise HpctrainError(
                f"{folder}: has no class folders: put the images of each class into a folder of their own"
            )
        names, sizes = [], []
        unused = Counter(Path(entry.name).suffix for entry in entries if entry.is_file())
        for _, name in folders:
            here: Counter[str] = Counter()
            found = list(_images_in(folder / name, here))
            if not found:
                there = f" (found {_count_kinds(here)}: convert them)" if here else ""
                raise HpctrainError(
                    f"{folder / name}: has no JPEG or PNG file{there}: remove this class, or add its images"
                )
            unused += here
            names += found
            sizes.append(len(found))
        # An array: reference counts of a list's strings would copy it into the memory of each worker.
        self._names = numpy.array([os.fsencode(name.relative_to(folder)) for name in names])
        self.labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        if unused:
            count = counted(unused.total(), "file")
            read = "only JPEG and PNG in class folders are read"
            self.unused = f"{folder}: not used: {count} ({_count_kinds(unused)}): {read}"

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """What tells these examples from others: names, labels, and the sizes of up to MAX_SIZES files."""
        some = range(0, len(self), -(-len(self) // MAX_SIZES))
        sizes = [self.path(number).stat().st_size for number in some]
        return arrays_sha256(self._names, self.labels.numpy(), numpy.array(sizes))

    def path(self, number: int) -> Path:
        """The file of an example."""
        return self._folder / os.fsdecode(bytes(self._names[number]))

    def read(self, index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """The examples of `index`: pixels [b, 3, side, side] uint8, labels [b] int64.

        The augmentation of an example depends on (seed, epoch, example) alone. Raises HpctrainError, naming
        the file.
        """
        return torch.stack([self._pixels(number, epoch) for number in index.tolist()]), self.labels[index]

    def batch(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Examples on `device`, augmented as in epoch 0: [b, 3, side, side] float32, labels [b] int64."""
        pixels, labels = self.read(index, epoch=0)
        return to_images(pixels.to(device), self._side), labels.to(device)

    def load_batches(self, parts: Iterable[Part], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """batch() of each part in turn, augmented as in its epoch: see Run.batches().

        Workers read ahead. Raises HpctrainError, naming the file.
        """
        sampler = ((part.epoch, part.examples) for part in parts)
        for pixels, labels in ImageLoader(self, sampler, pin_memory=device.type == "cuda"):
            images = to_images(pixels.to(device, non_blocking=True), self._side)
            yield images, labels.to(device, non_blocking=True)

    def _decode(self, number: int) -> "Image.Image":
        return decode(self.path(number))

    def _pixels(self, number: int, epoch: int) -> Tensor:
        image = self._decode(number)
        if self._seed is None:
            image = center_crop(image, self._side)
        else:
            # the hash of integers is the same in every process
            chance = random.Random(hash((self._seed, epoch, number)))
            image = random_resized_crop(image, self._side, chance)
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


class ImageShards(ImageFolder):
    """Color images in tar files, only offsets and labels in memory. The label is the integer in .cls."""

    def __init__(self, paths: list[Path], side: int, seed: int | None, workers: int) -> None:
        """Read the headers and the labels. Raises HpctrainError, naming the tar file."""
        self._shards, self._side, self._seed, self.workers = TarShards(paths), side, seed, workers
        images = [name for name in self._shards.extensions if f".{name.lower()}" in SUFFIXES]
        if len(images) != 1 or "cls" not in self._shards.extensions:
            found = ", ".join(self._shards.extensions)
            raise HpctrainError(
                f"{paths[0]}: its examples have {found}: they need one JPEG or PNG file and its label in .cls"
            )
        self._extension = images[0]
        self.labels = torch.tensor([self._label(*label) for label in enumerate(self._shards.read_all("cls"))])
        largest = int(self.labels.argmax())
        if self.labels[largest] >= max(MAX_CLASSES, len(self.labels)):
            place = f"{self._shards.path(largest)}: {self._shards.key(largest)}.cls"
            raise HpctrainError(
                f"{place} has the label {self.labels[largest]}, but labels are the numbers of classes, from 0"
            )
        self.classes = [str(label) for label in range(int(self.labels[largest]) + 1)]

    def digest(self) -> str:
        """What tells these examples from others: names, labels, and the places in the tar files."""
        return arrays_sha256(*self._shards.index, self.labels.numpy())

    def _label(self, number: int, text: bytes) -> int:
        if not text.strip().isdigit() or len(text) > MAX_DIGITS:
            place = f"{self._shards.path(number)}: {self._shards.key(number)}.cls"
            raise HpctrainError(f"{place} has no label: it must be an integer from 0")
        return int(text)

    def _decode(self, number: int) -> "Image.Image":
        name = f"{self._shards.path(number)}: {self._shards.key(number)}.{self._extension}"
        return decode(io.BytesIO(self._shards.read(number, self._extension)), name)


ImageSet: TypeAlias = Images | ImageFolder


class ImageLoader(DataLoader):
    """A DataLoader for a sampler of (epoch, index): batches of pixels and labels, on the CPU.

    An HpctrainError of a worker is raised unchanged. DataLoader itself would replace its text by a traceback.
    """

    def __init__(
        self, images: ImageSet, sampler: Iterable[tuple[int, Tensor]], pin_memory: bool = False
    ) -> None:
        use_fork_server = images.workers and not can_fork_beside_threads()
        super().__init__(
            ImageDataset(images),
            sampler=sampler,
            batch_size=None,
            num_workers=images.workers,
            pin_memory=pin_memory,
            # without a generator, the loader draws from the random numbers of the model
            generator=torch.Generator(),
            multiprocessing_context="forkserver" if use_fork_server else None,
        )

    # A generator: workers must start at the first batch, when Lightning has set the epoch.
    # torch declares an iterator class of its own.
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, HpctrainError):
                raise batch
            yield batch


class Batch(NamedTuple):
    """An index of an ImageDataset: the epoch, and the examples of a whole batch, int64."""

    epoch: int
    examples: Tensor

    def __index__(self) -> int:
        """A number for RunFolder, which seeds random numbers with it."""
        return int(self.examples[0])


class ImageDataset(Dataset):
    """A dataset that a sampler indexes with the epoch and the examples of a whole batch."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images

    def __getitem__(self, item: tuple[int, Tensor]) -> tuple[Tensor, Tensor] | HpctrainError:
        epoch, index = item
        try:
            return self._images.read(index, epoch)
        except HpctrainError as error:
            return error


def is_image_folder(folder: Path | None) -> bool:
    """Whether --data has a folder train/, with class folders or tar files."""
    return folder is not None and (folder / TRAINING).is_dir()


def load_folder(folder: Path, side: int, seed: int, workers: int) -> tuple[ImageFolder, ImageFolder]:
    """The training and evaluation sets in `folder`. HpctrainError names a missing part or class."""
    evaluation = next((folder / name for name in EVALUATION if (folder / name).is_dir()), None)
    if evaluation is None:
        names = ", ".join(f"{name}/" for name in EVALUATION)
        raise HpctrainError(
            f"{folder}: has {TRAINING}/ but none of {names}: "
            "put class folders for evaluation into one of them"
        )
    tar_files = [sorted(part.glob("*.[tT][aA][rR]")) for part in (folder / TRAINING, evaluation)]
    if any(tar_files):
        return _load_shards(folder, evaluation.name, tar_files, side, seed, workers)
    train = ImageFolder(folder / TRAINING, side, seed, workers)
    test = ImageFolder(evaluation, side, None, workers)
    if different := sorted(set(train.classes) ^ set(test.classes)):
        has, lacks = TRAINING, evaluation.name
        if different[0] in test.classes:
            has, lacks = lacks, has
        raise HpctrainError(
            f"{folder}: the class {different[0]} is in {has}/ but not in {lacks}/ "
            f"({len(different)} classes differ in all): both need the same classes"
        )
    return train, test


def _load_shards(
    folder: Path, evaluation: str, tar_files: list[list[Path]], side: int, seed: int, workers: int
) -> tuple[ImageShards, ImageShards]:
    for name, paths in zip((TRAINING, evaluation), tar_files, strict=True):
        if not paths:
            raise HpctrainError(
                f"{folder}: there are .tar files in {TRAINING}/ or {evaluation}/, but none in {name}/"
            )
        folders = [entry.name for entry in _scan(folder / name) if entry.is_dir()]
        if visible := [folder for folder in folders if not folder.startswith(".")]:
            raise HpctrainError(
                f"{folder / name}: has .tar files and the folder {min(visible)}: keep one of the two"
            )
    train = ImageShards(tar_files[0], side, seed, workers)
    test = ImageShards(tar_files[1], side, None, workers)
    if len(test.classes) > len(train.classes):
        raise HpctrainError(
            f"{folder}: the label {len(test.classes) - 1} is in {evaluation}/, but those in {TRAINING}/ end "
            f"at {len(train.classes) - 1}: both need the same labels"
        )
    return train, test


def _scan(folder: Path) -> list[os.DirEntry]:
    with (
        explain_os_error(f"{folder}: cannot be read", "check the path and its permissions"),
        os.scandir(folder) as entries,
    ):
        return list(entries)


def is_of_system(name: str) -> bool:
    """Whether a file or a folder is one that a system leaves beside data: hidden, or of macOS or a NAS."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir", "lost+found")


def _count_kinds(suffixes: Counter[str]) -> str:
    """How many files have each suffix, of the five most common."""
    kinds = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.most_common(5)]
    return one_line(", ".join(kinds))


def _images_in(folder: Path, unused: Counter[str]) -> Iterator[Path]:
    """All images below a class folder, in the order of torchvision's ImageFolder; `unused`: other files."""

    def fail(error: OSError) -> None:
        raise HpctrainError(
            f"{error.filename}: cannot be read ({first_line(error)}): check its permissions"
        ) from error

    places, ways = [], Counter[tuple[int, int]]()
    for place, _, names in os.walk(folder, onerror=fail, followlinks=True):
        status = Path(place).stat()
        ways[status.st_dev, status.st_ino] += 1
        if ways[status.st_dev, status.st_ino] > MAX_WAYS:
            raise HpctrainError(
                f"{place}: more than {MAX_WAYS} ways lead to this folder through links: remove the links"
            )
        if not any(map(is_of_system, Path(place).relative_to(folder).parts)):
            places.append((place, sorted(names)))
    for place, names in sorted(places):
        for name in names:
            if is_of_system(name):  # such as ._NAME.jpg, which is no image
                continue
            if name.lower().endswith(SUFFIXES):
                yield Path(place, name)
            else:
                unused[Path(name).suffix] += 1


def decode(source: Path | io.BytesIO, name: str | None = None) -> "Image.Image":
    """Read a JPEG or PNG file as RGB, turned by its EXIF. Raises HpctrainError, `name` or path first."""
    from PIL import Image, UnidentifiedImageError

    path, head = name or source, b""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF data
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = open_plain(source) if isinstance(source, Path) else source
            with opened:
                head = opened.read(12)
                opened.seek(0)
                if head.startswith(b"\xff\xd8") and opened.read().count(b"\xff\xda") > MAX_SCANS:
                    raise OSError(f"it has more than {MAX_SCANS} scans")  # of 30 bytes, and 25 ms each
                opened.seek(0)
                file = Image.open(opened, formats=["JPEG", "PNG"])
                image = _turn(file)
                if image.mode.startswith("I"):  # 16 bits of gray, which convert() would clip and not scale
                    image = Image.fromarray((numpy.asarray(image) // 256).astype(numpy.uint8))
                # Pillow would look for the transparent color in the palette, where it may be missing
                image.info.pop("transparency", None)
                return image.convert("RGB")
    except HpctrainError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise HpctrainError(
            f"{path}: has more than {Image.MAX_IMAGE_PIXELS} pixels, Pillow's limit against decompression "
            "bombs: scale the image down or remove it"
        ) from error
    except Exception as error:  # Pillow raises exceptions of many kinds for damaged files
        why = first_line(error)
        if isinstance(error, UnidentifiedImageError):
            why = f"it begins with {head!r}" if head else "it is empty"
        raise HpctrainError(
            f"{path}: cannot be read as a JPEG or PNG ({why}): replace or remove it"
        ) from error


def _turn(image: "Image.Image") -> "Image.Image":
    """The image, turned by the orientation in its EXIF or XMP.

    Pillow's exif_transpose() also writes the rest of the EXIF again, and fails at a tag of an unusual type.
    """
    from PIL import Image

    image.load()  # here, because it says what is wrong with the pixels
    turn = None
    with suppress(Exception):  # damaged EXIF raises exceptions of many kinds
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    return image.transpose(Image.Transpose[turn]) if turn else image


def random_resized_crop(image: "Image.Image", side: int, chance: random.Random) -> "Image.Image":
    """A random part of the image, scaled to side x side pixels and flipped in half of the cases.

    The part has 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3, as in Szegedy et al., "Going deeper
    with convolutions" (2015).
    """
    from PIL import Image

    width, height = image.size
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = chance.randint(0, width - w), chance.randint(0, height - h)
            break
    else:  # the largest part in the middle that has such a ratio
        w, h = max(1, min(width, round(height * 4 / 3))), max(1, min(height, round(width * 4 / 3)))
        left, top = (width - w) // 2, (height - h) // 2
    part = image.crop((left, top, left + w, top + h)).resize((side, side), Image.Resampling.BILINEAR)
    if chance.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return part


def center_crop(image: "Image.Image", side: int) -> "Image.Image":
    """The middle side x side pixels, after scaling the shorter side to 8/7 of `side`: 256 for 224."""
    from PIL import Image

    width, height = image.size
    scale = side * 8 // 7 / min(width, height)
    # A very long image is cut before it is scaled up, so that it stays small.
    longest = min(width, height) * 4
    left, top = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    image = image.crop((left, top, width - left, height - top))
    width, height = (max(side, round(length * scale)) for length in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + side, top + side))
