"""Regular files of a bounded size: no pipes, no devices, no pointers of Git LFS."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

from hpctrain.errors import HpctrainError
from hpctrain.files.trust import open_to_read

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"  # the first line of a file that git did not fetch
)

# A metrics.jsonl of this size has a million lines, and the tokenizer.json of 256,000 tokens has 35 MB.
MAX_BYTES = 2**28


def open_plain(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError, also for a pipe or a device (a link to /dev/zero).

    Raises HpctrainError for a pointer of Git LFS, and see trust.open_to_read().
    """
    file = os.fdopen(open_to_read(path), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file")
    if file.read(len(LFS_POINTER)) == LFS_POINTER:
        file.close()
        raise HpctrainError(
            f"{path}: a pointer of Git LFS, not the file itself: run git lfs pull in its repository, "
            "or download the file"
        )
    file.seek(0)
    return file


def read_whole(file: IO[bytes], limit: int = MAX_BYTES) -> bytes:
    """The content of a file that is read whole. Raises OSError if it is larger than `limit`."""
    if os.fstat(file.fileno()).st_size > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return file.read()


def read_text(path: Path, *, limit: int = 2**20, errors: str = "strict") -> str:
    """The text of a small file in UTF-8. Raises OSError as open_plain() does, and ValueError."""
    with open_plain(path) as file:
        return read_whole(file, limit).decode(errors=errors)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError as open_plain() does, and ValueError for anything else."""
    with open_plain(path) as file:
        content = read_whole(file)
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def refuse_pointer(path: Path) -> None:
    """Raise HpctrainError if a file is a pointer of Git LFS."""
    if path.is_file():
        open_plain(path).close()
