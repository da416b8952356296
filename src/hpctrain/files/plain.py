"""Files that somebody else may have made, opened for reading."""

import errno
import os
import stat
from pathlib import Path
from typing import IO

from hpctrain.errors import HpctrainError

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"  # the first line of a file that git did not fetch
)


def open_plain(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError, also for a pipe or a device (a link to /dev/zero).

    Raises HpctrainError for a pointer of Git LFS.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
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


def refuse_pointer(path: Path) -> None:
    """Raise HpctrainError if a file is a pointer of Git LFS."""
    if path.is_file():
        open_plain(path).close()
