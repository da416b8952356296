"""Files and folders that appear complete under their final name, or not at all.

Each is written beside its place under a hidden temporary name, synced to disk and renamed, and the rename is
synced as well. A crash, a full disk or an exception leaves the earlier content. OSError passes through:
callers add the advice.

A symbolic link at the final place stays, and what it points to is replaced, unless another user made the
link (trust.py). Permissions follow the umask.
"""

import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hpctrain.files.trust import check_owner, follow_link, open_without_link
from hpctrain.text import say

# How often and how long to retry a full, read-only or missing file system, in seconds.
RETRY_EVERY, RETRY_FOR = 5.0, 300.0
# Of a network file system whose server is away or has been started again
NO_ANSWER = {errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN}


class Retry:
    """For a loop that tries again what could not be written, until wait() raises the error."""

    def __init__(self) -> None:
        self._began, self._printed = time.monotonic(), False

    def wait(self, error: Exception, problem: str) -> None:
        """Print the problem once, and wait for a new try. Raises `error` after RETRY_FOR seconds."""
        if time.monotonic() - self._began > RETRY_FOR:
            raise error
        if not self._printed:
            self._printed = True
            say(f"hpctrain: {problem}; trying again for {RETRY_FOR:g} s")
        time.sleep(RETRY_EVERY)


def exists(path: Path) -> bool:
    """Whether a path exists. Waits for a file system that gives no answer. Raises OSError."""
    retry = Retry()
    while True:
        try:
            return path.exists()
        except OSError as error:
            if error.errno not in NO_ANSWER:
                raise
            retry.wait(error, f"{path}: no answer ({error.strerror})")


def existing_part(path: Path) -> Path:
    """The path, or the folder that exists of those around it."""
    while not os.access(path, os.F_OK):
        path = path.parent
    return path


def probe(folder: Path) -> None:
    """Write 4 MiB to the folder, and remove them. Raises OSError, as on a full or read-only file system."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(os.urandom(4 << 20))
        file.flush()
        os.fsync(file.fileno())  # quotas and file servers may report the error only here


@contextmanager
def file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing ("w" or "wb") that becomes `path` when the block ends without an exception.

    Text is UTF-8. To check what was written before it gets its final name, flush the file and read
    `Path(opened.name)`. A device or a pipe at `path`, such as /dev/null, is written to directly.
    """
    encoding = None if "b" in mode else "utf-8"
    followed = follow_link(path)
    if path.exists() and not path.is_file():
        with open(path, mode, encoding=encoding, opener=_open_device) as opened:
            yield opened
        return
    path = followed
    temporary = _temporary_name(path)
    try:
        # "x" instead of "w": fail where the file exists.
        with temporary.open(mode.replace("w", "x"), encoding=encoding) as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        with suppress(OSError):  # the first error counts
            temporary.unlink()


def _open_device(name: str, flags: int) -> int:
    number = os.open(name, flags & ~os.O_TRUNC)
    if stat.S_ISREG(os.fstat(number).st_mode):  # put there since file() looked
        os.close(number)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    return number


def open_to_append(path: Path) -> IO[str]:
    """Open or create a UTF-8 text file that grows in place. Links of other users raise OSError."""
    return open(follow_link(path), "a", encoding="utf-8", opener=open_without_link)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, in UTF-8."""
    with file(path) as opened:
        opened.write(text)


@contextmanager
def folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Create a folder that becomes `path` when the block ends without an exception.

    The block gets an empty temporary folder. Parents of `path` are created. `replace`: see rename_folder().
    """
    path = follow_link(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        temporary.mkdir()
        yield temporary
        rename_folder(temporary, path, replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def rename_folder(finished: Path, path: Path, replace: bool = True) -> None:
    """Sync a finished folder beside `path`, and rename it to `path`. PermissionError if others exchanged it.

    An earlier folder that has files is replaced, or raises OSError if `replace` is false. A rename cannot
    replace it, so it is renamed first: a crash between the two renames leaves both, under hidden names.
    """
    for part in finished.rglob("*"):
        if not part.is_symlink():
            sync(part)
    sync(finished)
    check_owner(finished)
    earlier = _temporary_name(path).with_suffix(".old")
    try:
        if replace and path.exists():
            path.rename(earlier)
        finished.rename(path)
    except BaseException:  # KeyboardInterrupt as well
        if earlier.exists() and not path.exists():
            earlier.rename(path)
        raise
    sync(path.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def remove_leftovers(folder: Path, age: float = 0) -> None:
    """Remove temporary files and folders of killed writers, unless they changed in the last `age` seconds.

    No process may be writing them. A folder that was to be replaced gets its name back, if it is free.
    """
    for path in folder.glob(".*.*"):
        match = re.fullmatch(r"\.(.{1,32})\.[0-9a-f]{12}\.(tmp|old)", path.name)
        with suppress(FileNotFoundError):  # another job has removed it
            if not match or path.is_symlink() or (age and path.stat().st_mtime > time.time() - age):
                continue
            place = path.with_name(match[1])
            if match[2] == "old" and not place.exists():
                path.rename(place)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def sync(path: Path) -> None:
    """Make the content of a file, or the renames in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and do not need to.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no process on any node has, short enough for any file system."""
    return path.with_name(f".{path.name[:32]}.{os.urandom(6).hex()}.tmp")
