"""Checkpoints that appear complete and verified under their final name, or not at all.

A checkpoint is a plain torch.save() of a dictionary. That is a zip archive with a CRC-32 for every record. torch.load() does
not check it and this file does, so a truncated file or a flipped bit is found before anything is trained on it.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch

from hpctrain import atomic
from hpctrain.errors import HpctrainError, first_line


def path_of(folder: Path, epoch: int) -> Path:
    """The path of an epoch's checkpoint in a run folder; epochs are counted from 1."""
    return folder / "checkpoints" / f"epoch-{epoch:04d}.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, on one rank.

    Raises HpctrainError, naming the file, if it cannot be written; earlier checkpoints stay as they are.
    """
    try:
        with atomic.file(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            if not is_intact(Path(file.name)):
                raise OSError("the file read back is not the one written")
    except (OSError, RuntimeError) as error:  # torch.save() reports a full disk as RuntimeError
        raise HpctrainError(
            f"{path}: the checkpoint could not be written ({first_line(error)}): free some space there, or use --out"
        ) from error


def find_newest(folder: Path) -> Path:
    """The last intact checkpoint of a run folder. Prints the names of corrupt ones, which it skips.

    Raises HpctrainError if there is none.
    """
    corrupt = []
    for path in sorted((folder / "checkpoints").glob("epoch-*.pt"), reverse=True):
        if is_intact(path):
            if corrupt:
                print(f"hpctrain: skipping corrupt {', '.join(corrupt)} in {path.parent}, resuming from {path.name}", flush=True)
            return path
        corrupt.append(path.name)
    if corrupt:
        raise HpctrainError(f"{folder}: every checkpoint in it is corrupt ({', '.join(corrupt)}): start without --resume")
    raise HpctrainError(f"{folder}: no checkpoint to resume from (checkpoints/epoch-*.pt): name a run folder that has one")


def find_fitting(newest: Path, model: torch.nn.Module, entry: str) -> Path:
    """The newest checkpoint of this model, from `newest` on backwards in its folder; prints why others are skipped.

    It has an entry of this name beside "model" and "epoch", as the checkpoints of the trainer that asks have.
    Raises HpctrainError that names the folder and `newest` if none fits.
    """
    problems: dict[str, str] = {}
    for path in sorted(newest.parent.glob("epoch-*.pt"), reverse=True):
        if path.name > newest.name:
            continue
        problem = _describe_misfit(path, model, entry)
        if not problem:
            for name, text in problems.items():
                print(f"hpctrain: skipping {name} in {path.parent} ({text}), resuming from {path.name}", flush=True)
            return path
        problems[path.name] = problem
    name, text = next(iter(problems.items()))
    raise HpctrainError(
        f"{newest.parent.parent}: none of its checkpoints can be resumed from (the newest, {name}: {text}): "
        "give the trainer and the options of that run, or start without --resume"
    )


def _describe_misfit(path: Path, model: torch.nn.Module, entry: str) -> str:
    """Why a checkpoint is not one of this model; "" if it is."""
    if not is_intact(path):
        return "corrupt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # reads names and shapes, no weights
    except Exception as error:
        return f"it cannot be loaded: {first_line(error)[:200]}"
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not {"epoch", entry} <= state.keys():
        return "it is of another trainer"
    own, saved = ({name: tuple(value.shape) for name, value in part.items()} for part in (model.state_dict(), weights))
    differing = next((name for name in [*own, *saved] if own.get(name) != saved.get(name)), None)
    return f"it is of another model: {differing} is {saved.get(differing)}, not {own.get(differing)}" if differing else ""


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """Load a checkpoint onto `device`: tensors and plain values only, never code. Raises HpctrainError, naming the file."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load() passes on the errors of zipfile, pickle and others
        raise HpctrainError(
            f"{path}: not a checkpoint that can be loaded ({first_line(error)}): resume from another run folder"
        ) from error


def is_intact(path: Path) -> bool:
    """Whether every record of the archive is there and matches its CRC-32."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
