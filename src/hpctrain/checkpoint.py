"""Checkpoints that are whole or not there: written under another name, read back, then renamed.

A checkpoint is a plain torch.save() of a dictionary. That is a zip archive with a CRC-32 for every
record, which torch.load() does not look at and this file does: a truncated file or a flipped bit is
found before it is trained on.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from hpctrain.world import HpctrainError


def path_of(folder: Path, epoch: int) -> Path:
    """Where a run folder has the checkpoint of an epoch, counted from 1."""
    return folder / "checkpoints" / f"epoch-{epoch:04d}.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, on one rank; the file appears complete and verified, or not at all.

    Raises HpctrainError where it cannot be written, naming the file; earlier checkpoints stay as they are.
    """
    unfinished = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if not whole(unfinished):
            raise OSError("what was read back is not what was written")
        unfinished.replace(path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save() reports a full disk as RuntimeError
        unfinished.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        raise HpctrainError(
            f"{path}: the checkpoint could not be written ({reason}): free some space there, or use --out"
        ) from error


def newest(folder: Path) -> Path:
    """The last whole checkpoint of a run folder; broken ones are named and passed over.

    Raises HpctrainError where there is none.
    """
    broken = []
    for path in sorted((folder / "checkpoints").glob("epoch-*.pt"), reverse=True):
        if whole(path):
            if broken:
                print(f"hpctrain: {', '.join(broken)} in {path.parent} is broken; going on from {path.name}", flush=True)
            return path
        broken.append(path.name)
    if broken:
        raise HpctrainError(f"{folder}: every checkpoint in it is broken ({', '.join(broken)}): start without --resume")
    raise HpctrainError(f"{folder}: no checkpoint to resume from (checkpoints/epoch-*.pt): name a run folder that has one")


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint onto `device`; only tensors and plain values, never code. Raises HpctrainError naming the file."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load() raises whatever the part of the archive that it trips over raises
        raise HpctrainError(f"{path}: not a checkpoint that can be loaded ({str(error).splitlines()[0]})") from error


def whole(path: Path) -> bool:
    """Whether every record of the archive is there and has the CRC-32 that was written with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def sync(path: Path) -> None:
    """Make a file, or the renames in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
