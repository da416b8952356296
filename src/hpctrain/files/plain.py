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

# A metrics.jsonl of this size has a million lines, and the tokenizer.json of 256,000 tokens has 35 MB.
MOST = 2**28  # bytes


def open_plain(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError, also for a pipe or a device (a link to /dev/zero).

    Raises HpctrainError for a pointer of Git LFS, and for a link of another user to a file of this one: its
    content may be secret, and an error would quote it in a log that others read.
    """
    maker = None
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        maker = path.lstat().st_uid
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = os.fdopen(number, "rb")
    status = os.fstat(number)
    if maker not in (None, 0, os.geteuid()) and status.st_uid == os.geteuid():
        file.close()
        raise _link_to_own(path)
    if not stat.S_ISREG(status.st_mode):
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


def is_below_link_of_others(path: Path, folder: Path) -> bool:
    """Whether a part of the path below the folder is a link that another user made."""
    parts = [path, *path.parents][: len(path.relative_to(folder).parts)]
    return any(part.is_symlink() and part.lstat().st_uid not in (0, os.geteuid()) for part in parts)


def refuse_own_below_link(path: Path, folder: Path) -> None:
    """As open_plain(), for a link of a folder: raise HpctrainError if it leads to this file of this user."""
    if path.stat().st_uid == os.geteuid() and is_below_link_of_others(path, folder):
        raise _link_to_own(path)


def _link_to_own(path: Path) -> HpctrainError:
    return HpctrainError(
        f"{path}: a link that another user made leads to a file of yours, {os.path.realpath(path)}: "
        "put a copy in its place, if others may read it"
    )


def read_whole(file: IO[bytes]) -> bytes:
    """The content of a file. Raises OSError if it is larger than MOST, which no file of a run or a model is
    that is read whole.
    """
    if os.fstat(file.fileno()).st_size > MOST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return file.read()


def refuse_pointer(path: Path) -> None:
    """Raise HpctrainError if a file is a pointer of Git LFS."""
    if path.is_file():
        open_plain(path).close()
