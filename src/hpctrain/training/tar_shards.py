"""Examples in tar files, in WebDataset's layout, read by number.

The library webdataset streams tar files: to begin in the middle of an epoch it reads everything before. Its
map-style sibling wids ended with webdataset 1.0. An uncompressed tar file needs only the offset of each file.
"""

import os
import tarfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy
from torch.utils.data import Dataset

from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files.plain import open_plain
from hpctrain.text import first_line


class TarShards(Dataset):
    """A map-style data set of the examples in uncompressed tar files. Only offsets are in memory.

    An example is the files in a row with the same name up to the first dot: 000017.jpg and 000017.cls are
    one. It is read as {"__key__": "000017", "jpg": bytes, "cls": bytes}. All examples have the same
    extensions.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Read the headers of all files in the tar files. Raises HpctrainError, naming the tar file."""
        self._paths = [Path(path) for path in paths]
        self.extensions: list[str] = []
        keys, places = [], []
        for number, path in enumerate(self._paths):
            for key, files in _examples_in(path):
                self.extensions = self.extensions or sorted(files)
                if sorted(files) != self.extensions:
                    raise HpctrainError(
                        f"{path}: {key} has {', '.join(sorted(files))}, but the first example has "
                        f"{', '.join(self.extensions)}: give all examples the same extensions"
                    )
                keys.append(os.fsencode(key))
                places.append([(number, *files[extension]) for extension in self.extensions])
        if not keys:
            raise HpctrainError(
                f"{self._paths[0] if paths else 'TarShards()'}: has no examples: "
                "give tar files with files in them"
            )
        # Arrays: lists would be copied into the memory of each worker, as their reference counts change.
        self._keys, self._places = numpy.array(keys), numpy.array(places)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> dict[str, str | bytes]:
        """An example. Raises HpctrainError, naming the tar file, if it cannot be read."""
        contents = self._read([(number, extension) for extension in self.extensions])
        return {"__key__": self.key(number)} | dict(zip(self.extensions, contents, strict=True))

    @property
    def index(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The names of the examples, and the tar file, offset and size of each of their files."""
        return self._keys, self._places

    def key(self, number: int) -> str:
        """The name of an example: the name of its files up to the first dot."""
        return os.fsdecode(bytes(self._keys[number]))

    def path(self, number: int) -> Path:
        """The tar file of an example."""
        return self._paths[self._places[number, 0, 0]]

    def read(self, number: int, extension: str) -> bytes:
        """One file of an example. Raises HpctrainError, naming the tar file, if it cannot be read."""
        return self._read([(number, extension)])[0]

    def read_all(self, extension: str) -> list[bytes]:
        """This extension's file of each example; opens each tar once. HpctrainError names the tar file."""
        shards = [
            [(number, extension) for number in group] for _, group in groupby(range(len(self)), self.path)
        ]
        return [content for shard in shards for content in self._read(shard)]

    def _read(self, wanted: list[tuple[int, str]]) -> list[bytes]:
        """The contents of files (example, extension), all in the same tar file."""
        path, contents = self.path(wanted[0][0]), []
        with (
            explain_os_error(f"{path}: cannot be read", "check the path and its permissions"),
            path.open("rb", buffering=0) as file,
        ):
            for number, extension in wanted:
                _, offset, size = self._places[number, self.extensions.index(extension)].tolist()
                contents.append(os.pread(file.fileno(), size, offset))
                if len(contents[-1]) < size:
                    raise HpctrainError(f"{path}: ends within {self.key(number)}.{extension}: copy it again")
        return contents


class _Header(tarfile.TarInfo):
    """A header that refuses a negative size: tarfile would go back, and read the same headers forever."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError("negative size")
        return super()._block(count)  # type: ignore[misc]  # typeshed does not declare it


def _examples_in(path: Path) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Key, and offset and size of each file by extension, for each example. Raises HpctrainError."""
    examples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        with open_plain(path) as file, tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                # folders, and hidden files such as ._NAME of macOS
                if not member.isfile() or not stem or not extension:
                    continue
                if member.issparse():  # its content is not in one place
                    raise HpctrainError(
                        f"{path}: {member.name} is a sparse file: make this tar file without --sparse"
                    )
                key = f"{folder}/{stem}" if folder else stem
                if not examples or examples[-1][0] != key:
                    examples.append((key, {}))
                examples[-1][1][extension] = member.offset_data, member.size
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile ends without an error there
                raise tarfile.ReadError("damaged header")
    except HpctrainError:
        raise
    except Exception as error:  # tarfile raises exceptions of many kinds for damaged files
        raise HpctrainError(
            f"{path}: cannot be read as an uncompressed tar file ({first_line(error)}): "
            "unpack a .tar.gz with gunzip, or copy the file again"
        ) from error
    return examples
