"""May this path be used, and why not: only this module asks who made a file and where a link leads.

The folders of a project are often writable by its group, and /tmp by everybody: its sticky bit keeps others
from removing files, but not from making them first. There, another user can

- make a file, a folder or a link before this user does, if its name can be foreseen: runs/train_ddp/48,
  /tmp/hpctrain-UID, klue/bert-base. Through a link, a run overwrites or removes any file of this user, or
  quotes a secret in a log that others read;
- exchange a path between a look at it and its use. So a path is opened first, without following a link, and
  the owner of what was opened counts;
- change a cache, which decides what is trained and which code runs;
- put settings or modules into a folder where this user starts a command;
- read what is written into a folder or a file that existed before.

Files of root are trusted, because a site has shared folders and links. Functions named refuse_* raise
HpctrainError with advice. The others raise OSError, usually PermissionError: their callers add the advice.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import HpctrainError

MAX_LINKS = 40  # that lead to each other, as in Linux


def is_own(path: Path) -> bool:
    """Whether this user, and not root, made this path, and it is no link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def follow_link(path: Path) -> Path:
    """What a link points to, or the path itself. Raises PermissionError for a link of another user."""
    for _ in range(MAX_LINKS):
        try:
            number = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return path
        try:
            status = os.fstat(number)
            if not stat.S_ISLNK(status.st_mode):
                return path
            if is_of_others(status):
                raise PermissionError(errno.EPERM, "a link that another user made", str(path))
            path = path.parent / os.readlink("", dir_fd=number)
        finally:
            os.close(number)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def open_without_link(path: Path | str, flags: int) -> int:
    """Open a file, also as the `opener` of open(). Raises OSError (ELOOP) if it is a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def open_to_read(path: Path) -> int:
    """Open a file without waiting for a pipe. Refuses a link of another user to a file of this one."""
    flags = os.O_RDONLY | os.O_NONBLOCK
    try:
        return open_without_link(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    link = path.lstat()
    number = os.open(path, flags)
    if is_of_others(link) and os.fstat(number).st_uid == os.geteuid():
        os.close(number)
        raise _link_to_own(path)
    return number


def refuse_own_below_link(path: Path, folder: Path) -> None:
    """Refuse a file of this user that a link of another user, anywhere below the folder, leads to."""
    parts = [path, *path.parents][: len(path.relative_to(folder).parts)]
    if path.stat().st_uid == os.geteuid() and any(
        part.is_symlink() and is_of_others(part.lstat()) for part in parts
    ):
        raise _link_to_own(path)


def make_private_folder(folder: Path, *, foreseen: bool) -> None:
    """Make a folder for this user alone; one of this user that is there keeps its permissions.

    `foreseen`: its name is, so no link above it may be another user's. Raises OSError, and HpctrainError for
    a folder in the memory of the container.
    """
    check_owner(folder, foreseen=foreseen)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder, foreseen=foreseen)  # somebody else may have put another one there
    _refuse_throw_away(folder)


def refuse_foreign(path: Path, *, advice: str, foreseen: bool = True) -> None:
    """Refuse what check_owner() does, with advice."""
    try:
        check_owner(path, foreseen=foreseen)
    except PermissionError as error:
        raise HpctrainError(f"{path}: {error.strerror}: {advice}") from error


def check_owner(path: Path, *, foreseen: bool = False) -> None:
    """Raise PermissionError for what another user made, or put where everybody can, and can exchange.

    `foreseen`: the name is, so no link above it may be another user's. The folder of a project may be that
    of a colleague, but not one that everybody can write, unless its sticky bit is set as in /tmp.
    """
    for each in (path, *path.parents) if foreseen else (path,):
        follow_link(each)
    for each in (path, *path.absolute().parents):
        if not each.exists():
            continue
        status = each.stat()
        open_to_all = status.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
        if is_of_others(status) and (each == path or open_to_all):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "a file"
            where = "" if each == path else f"in {each}, "
            raise PermissionError(errno.EPERM, f"{where}{what} that another user made", str(path))


def refuse_changeable(*paths: Path, advice: str) -> None:
    """Refuse caches that another user made or can change, and links."""
    for path in paths:
        status = path.lstat()
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_of_others(status) or stat.S_ISLNK(status.st_mode) or shared:
            raise HpctrainError(
                f"{path}: another user has made it or can change it: {advice}, or chmod go-w your own"
            )


def refuse_links_out(folder: Path) -> None:
    """Refuse a folder with a link that leaves it, which may lead to a secret of this user.

    In the cache of the Hugging Face hub, files of snapshots/COMMIT are links to blobs/ of the repository.
    """
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    for path in folder.rglob("*"):
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not any(target.is_relative_to(place) for place in allowed):
            raise HpctrainError(
                f"{path}: a link that leads out of the folder, to {target}: copy what it means (cp -rL)"
            )


def is_below(name: str) -> bool:
    """Whether a name that a file gives is a path below its folder."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


@contextmanager
def hold_folder(folder: Path) -> Iterator[Path]:
    """Make a new folder private, and name it so that the name stays right where another user renames it."""
    number = open_without_link(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fchmod(number, 0o700)  # PermissionError if another user has put a folder there
        yield Path(f"/proc/self/fd/{number}")
    finally:
        os.close(number)


def write_private(path: Path, text: str) -> None:
    """Write a new file that this user alone can read, such as a token, in place of an earlier one."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def is_of_others(status: os.stat_result) -> bool:
    """Whether a file belongs neither to this user nor to root."""
    return status.st_uid not in (0, os.geteuid())


def _link_to_own(path: Path) -> HpctrainError:
    return HpctrainError(
        f"{path}: a link that another user made leads to a file of yours, {os.path.realpath(path)}: "
        "put a copy in its place, if others may read it"
    )


def _refuse_throw_away(folder: Path) -> None:
    """Refuse a folder that --containall puts into the tmpfs of the container's own /etc/passwd."""
    if not os.environ.get("APPTAINER_CONTAINER", os.environ.get("SINGULARITY_CONTAINER")):
        return
    of_container = {Path(path).stat().st_dev for path in ("/etc/passwd", "/etc/group")}
    if folder.stat().st_dev in of_container - {Path("/").stat().st_dev}:
        raise HpctrainError(
            f"{folder} would be gone at the end, as it is in the memory of the container: "
            "add --bind with a folder of the host, and use --out to name one in it"
        )
