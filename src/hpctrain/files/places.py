"""Folders that would not keep what is written to them, or whose content others decide."""

import os
import stat
from pathlib import Path

from hpctrain.errors import HpctrainError


def refuse_throw_away(folder: Path) -> None:
    """Raise HpctrainError if a folder is in the container's memory (--containall).

    Apptainer has such folders in the tmpfs of the lists of users and groups that it writes.
    """
    if not os.environ.get("APPTAINER_CONTAINER", os.environ.get("SINGULARITY_CONTAINER")):
        return
    of_container = {Path(path).stat().st_dev for path in ("/etc/passwd", "/etc/group")}
    if folder.stat().st_dev in of_container - {Path("/").stat().st_dev}:
        raise HpctrainError(
            f"{folder} would be gone at the end, as it is in the memory of the container: "
            "add --bind with a folder of the host, and use --out to name one in it"
        )


def refuse_of_others(*paths: Path, advice: str) -> None:
    """Raise HpctrainError, with advice, if another user made or can change one of these, which are caches.

    Whoever can write to a cache decides what is trained, or which code runs. root may.
    """
    for path in paths:
        status = path.lstat()
        own = status.st_uid in (os.geteuid(), 0) and not stat.S_ISLNK(status.st_mode)
        if not own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HpctrainError(
                f"{path}: another user has made it or can change it: {advice}, or chmod go-w your own"
            )


def is_below(name: str) -> bool:
    """Whether a name that a file gives is a path below its folder: others may lead to a private file."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def refuse_links_out(folder: Path) -> None:
    """Raise HpctrainError for a link in a folder that leaves it: it may lead to a secret of this user.

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
