"""Checkpoints that appear complete and verified under their final name, or not at all.

A checkpoint is a plain torch.save() of a dictionary: a zip archive with a CRC-32 for every record.
torch.load() ignores the CRC-32. is_intact() compares it, so nothing is trained on a truncated file or a
flipped bit. The checkpoint of a sharded model is a folder of such files: see parts.py.
"""

import copy
import io
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils._pytree import tree_map_only

from hpctrain.checkpoints import parts
from hpctrain.checkpoints.position import Position
from hpctrain.errors import HpctrainError, UsageError, hint_missing
from hpctrain.files import atomic
from hpctrain.files.plain import refuse_pointer
from hpctrain.files.trust import follow_link
from hpctrain.text import first_line, say

# Under which name checkpoints have the weights: those of hpctrain, Lightning, and torch's tutorial.
ENTRIES = ("model", "state_dict", "model_state_dict")
KERNELS = {"fused", "foreach", "capturable"}  # options of an optimizer that change no more than rounding
# Classes that wrap a model, and the attribute that holds the model.
_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


def path_of(folder: Path, epoch: int, step: int = 0) -> Path:
    """The path of the checkpoint after an epoch, counted from 1, or after `step` steps of that epoch."""
    name = f"epoch-{epoch:04d}-step-{step:06d}.pt" if step else f"epoch-{epoch:04d}.pt"
    return folder / "checkpoints" / name


def list_newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, in the order of path_of() from the last epoch and step backwards."""
    matches = [
        (re.fullmatch(r"epoch-(\d+)(?:-step-(\d+))?", path.stem), path)
        for path in (folder / "checkpoints").glob("*.pt")
    ]
    order = {path: (int(match[1]), int(match[2] or sys.maxsize)) for match, path in matches if match}
    return sorted(order, key=order.__getitem__, reverse=True)


def has_complete(folder: Path) -> bool:
    """Whether a run folder has a checkpoint of all ranks, and not only an unfinished first one."""
    return any(map(_has_all_files, list_newest_first(folder)))


def _has_all_files(path: Path) -> bool:
    try:
        parts.find_files(path)
    except FileNotFoundError:
        return False
    except OSError:  # it is a file, or cannot be read
        pass
    return True


def remove(path: Path) -> None:
    """Remove a checkpoint. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_best(folder: Path, best: Path) -> None:
    """Let best.pt in this folder be a link to a checkpoint, which may be that of an earlier run.

    A file system without links has none.
    """
    if best.exists():
        new = folder / f".best.pt.{os.getpid()}"
        with suppress(OSError):
            new.unlink(missing_ok=True)
            new.symlink_to(best.name if best.parent == folder else best.absolute())
            new.replace(folder / "best.pt")


def find_best(folder: Path) -> Path:
    """The best checkpoint of a run folder; prints that it is the newest, if no score has chosen one.

    Raises HpctrainError if there is no checkpoint.
    """
    best = folder / "checkpoints" / "best.pt"
    if not best.exists():
        best = find_newest(folder)
        say(f"hpctrain: {folder} has no best checkpoint: loading the newest one, {best.name}")
    return best


def save(path: Path, state: dict[str, Any], check: Callable[[], None] = lambda: None) -> None:
    """Write `state`, on one rank. `check` is called when the file is complete, before it gets its name.

    Raises HpctrainError, naming the file, if it cannot be written. Earlier checkpoints stay as they are.
    """
    try:
        follow_link(path.parent)
        path.parent.mkdir(exist_ok=True)  # of a checkpoint in parts
        with atomic.file(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            if not is_intact(Path(file.name)):
                raise OSError("the file read back is not the one written")
            check()
    except (OSError, RuntimeError) as error:
        # When the disk is full, torch.save() raises a RuntimeError that does not say so; its context does.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise HpctrainError(
            f"{path}: the checkpoint could not be written ({first_line(cause)}): "
            "free some space there, or use --out"
        ) from error


def check_loadable(state: dict[str, Any], where: str) -> None:
    """Raise UsageError for a state that holds more than tensors and plain values: load() refuses it."""
    file = io.BytesIO()
    small = tree_map_only(torch.Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype), state)
    try:
        torch.save(small, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    # AttributeError and TypeError: of a local function, a lock
    except (pickle.PickleError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # behind advice to load the object in spite of it
        text = found[1] if found else first_line(error)
        raise UsageError(
            f"the checkpoints would hold more than tensors and plain values ({text[:200]}): "
            f"remove it from {where}, or call torch.serialization.add_safe_globals()"
        ) from None


def check_resumable(state: dict[str, Any], entry: str | None) -> None:
    """Raise UsageError for a state that find_fitting() would skip, as it needs the model and this entry.

    `entry` is None if nothing will resume from the state.
    """
    if entry and not isinstance(state.get("model"), dict):
        raise UsageError(
            "run.save() got no state_dict() of the model as 'model', without which no run can be resumed"
        )
    if entry and entry not in state:
        raise UsageError(f"run.save() got no {entry!r}, without which no run can be resumed")
    check_loadable(state, "the state for run.save()")


def find_newest(folder: Path) -> Path:
    """The last intact checkpoint; prints the corrupt ones that it skips. Raises HpctrainError without any."""
    corrupt: list[str] = []
    for path in list_newest_first(folder):
        if is_intact(path):
            if corrupt:
                say(
                    f"hpctrain: skipping corrupt or incomplete {', '.join(corrupt)} in {path.parent}, "
                    f"resuming from {path.name}"
                )
            return path
        corrupt.append(path.name)
    if has_complete(folder):
        raise HpctrainError(
            f"{folder}: every checkpoint in it is corrupt ({', '.join(corrupt)}): start without --resume"
        )
    again = f", or start that run again with --resume auto --out {folder}"
    raise HpctrainError(
        f"{folder}: no checkpoint to resume from (checkpoints/epoch-*.pt): name a run folder that has one"
        + (again if (folder / "config.json").exists() else "")
    )


def find_fitting(
    newest: Path,
    model: torch.nn.Module,
    *entries: str,
    compare: Callable[[dict[str, str]], str] = lambda saved: "",
) -> Path:
    """The newest checkpoint that this model can be resumed from. Prints why it skips others.

    The search goes backwards from `newest`, which find_newest() has just verified: it is not read through a
    second time. A checkpoint fits if it has the position of a run, the weights of `model`, and one of the
    entries, as the checkpoints of the same trainer have. `compare` gets the options that a checkpoint of
    another model was saved with, and names those that differ now. Raises HpctrainError that names the folder
    and `newest` if no checkpoint fits.
    """
    problems: dict[str, str] = {}
    paths = list_newest_first(newest.parent.parent)
    for path in paths[paths.index(newest) :]:
        if path == newest or is_intact(path):
            problem = _describe_misfit(path, model, entries, compare)
        else:
            problem = "corrupt"
        if not problem:
            for name, text in problems.items():
                line = f"hpctrain: skipping {name} in {path.parent} ({text}), resuming from {path.name}"
                say(line)
            return path
        problems[path.name] = problem
    name, text = next(iter(problems.items()))
    raise HpctrainError(
        f"{newest.parent.parent}: none of its checkpoints can be resumed from (the newest, {name}: {text}): "
        "give the trainer and the options of that run, or start without --resume"
    )


def _describe_misfit(
    path: Path,
    model: torch.nn.Module,
    entries: tuple[str, ...],
    compare: Callable[[dict[str, str]], str],
) -> str:
    """Why a checkpoint does not fit this model; "" if it does."""
    try:
        state = _open(path)
    except Exception as error:
        return f"it cannot be loaded: {first_line(error)[:200]}"
    weights = state.get("model") if isinstance(state, dict) else None
    if (
        not isinstance(weights, dict)
        or not {"epoch", "step"} <= state.keys()
        or not state.keys() & {*entries}
    ):
        return "it is of another trainer"
    try:
        position = Position.from_entries(state)
    except ValueError as error:
        return f"it holds no position of a run ({error})"
    own, saved = (
        {name: _shape_of(value) for name, value in part.items()} for part in (model.state_dict(), weights)
    )
    differing = next((name for name in [*own, *saved] if own.get(name) != saved.get(name)), None)
    if not differing:
        return ""
    options = compare(position.options)
    cause = f", because of {options}" if options else ""
    return f"it is of another model: {differing} is {saved.get(differing)}, not {own.get(differing)}{cause}"


def _shape_of(value: Any) -> tuple[int, ...] | str:
    """The shape of a tensor or of its Pieces."""
    dense = parts.has_memory(value) if isinstance(value, torch.Tensor) else hasattr(value, "shape")
    return tuple(value.shape) if dense else "no dense tensor"


def load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Any, path: Path, load: Callable[[Any], None] | None = None
) -> None:
    """Load the state of an optimizer from a checkpoint, by `load` or its load_state_dict().

    Options that choose a kernel stay those of this optimizer, as the run may have moved to another device.
    Raises HpctrainError, naming the file, if the state does not fit the model.
    """
    try:
        own = optimizer.state_dict()["param_groups"]
        groups = []
        for mine, group in zip(own, saved["param_groups"], strict=True):
            groups.append(mine | group | {name: mine[name] for name in KERNELS & mine.keys()})
            for name, value in mine.items():
                if isinstance(value, int | float) and not isinstance(groups[-1][name], int | float):
                    raise ValueError(f"{name} is no number")
        tensors = [
            value
            for values in saved["state"].values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        if not all(map(parts.has_memory, tensors)):  # `load` copies
            raise ValueError("a tensor without values of its own")
        (load or optimizer.load_state_dict)(saved | {"param_groups": groups})
        for parameter, values in optimizer.state.items():
            for name, value in values.items():
                if name != "step" and value is not None and getattr(value, "shape", None) != parameter.shape:
                    raise ValueError("a tensor of another shape")
    except Exception as error:  # the entry may hold anything
        raise HpctrainError(
            f"{path}: not the optimizer of this model ({first_line(error)[:200]}): "
            "resume from another run folder"
        ) from error


def load(path: Path, device: torch.device, *, lazily: bool = False) -> dict[str, Any]:
    """Load tensors and plain values to `device`, never code; `lazily`: in mapped files or Pieces, on the CPU.

    Raises HpctrainError, naming the file.
    """
    try:
        if lazily:
            return _open(path)
        if path.is_dir():
            return tree_map_only(
                (parts.Pieces, torch.Tensor), lambda each: parts.make_whole(each).to(device), parts.read(path)
            )
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load() passes on the errors of zipfile, pickle and others
        is_pickle = isinstance(error, pickle.UnpicklingError)  # torch's text says how to run its code
        why = "it has other values than weights and plain ones" if is_pickle else first_line(error)
        problem = f"{path}: not a checkpoint that can be loaded ({why}): take another one"
        raise HpctrainError(problem) from error


def _open(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return parts.read(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def is_intact(path: Path) -> bool:
    """Whether every record of the archive is there and matches its CRC-32, in all files of a folder."""
    try:
        if path.is_dir():
            with ThreadPoolExecutor() as threads:
                return all(threads.map(is_intact, parts.find_files(path)))
        if not path.is_file():  # a pipe would be waited for
            return False
        with zipfile.ZipFile(path) as archive:
            # torch.save() does not compress. A compressed record of another writer may unpack to any size.
            stored = all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist())
            return stored and archive.testzip() is None
    except Exception:
        # Broken headers raise ValueError, RuntimeError, NotImplementedError, UnicodeDecodeError and others.
        return False


def check_intact(path: Path) -> None:
    """Raise HpctrainError, naming the path, if is_intact() is false."""
    if not is_intact(path):
        raise HpctrainError(
            f"{path}: damaged since it was written, or incomplete: copy it again, or take another checkpoint"
        )


def load_weights(model: torch.nn.Module, path: str | Path) -> None:
    """Load weights into a model, in place, from a checkpoint of hpctrain or Lightning, or a file of weights.

    Of a run folder, its best checkpoint is taken, or the newest if the run has no scores.
    DistributedDataParallel, DataParallel and torch.compile put a prefix before each name; the model and the
    file may each have one. Lightning puts the name of the attribute that holds the model. Raises
    HpctrainError, naming the file, if it is damaged or does not fit the model.
    """
    path = Path(path)
    if not path.exists():
        raise HpctrainError(f"{path}: no such file or folder{hint_missing(path)}")
    refuse_pointer(path)
    if (path / "checkpoints").is_dir():
        path = find_best(path)
    if path.is_dir() and not any(path.glob("rank-*.pt")):
        raise HpctrainError(f"{path}: a folder that is no checkpoint and no run folder: name one of these")
    if path.suffix == ".json":
        raise HpctrainError(f"{path}: a list of the files that have the weights: load them one by one")
    if path.is_dir() or zipfile.is_zipfile(path):  # other formats have no checksum
        check_intact(path)
    content = load(path, torch.device("cpu"))
    if not isinstance(content, dict):
        content = {}
    found = next((content[name] for name in ENTRIES if isinstance(content.get(name), dict)), content)
    plain = unwrap(model)
    try:
        plain.load_state_dict(_take_part(without_prefix(found, plain), plain))
    except (RuntimeError, TypeError) as error:  # its first line names only the class
        problem = " ".join(str(error).split("\n", 1)[-1].split())[:300]
        raise HpctrainError(
            f"{path}: not the weights of this model ({problem}): build the model with its options"
        ) from error


def _take_part(weights: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """The weights of this model among those of a larger one, if they are in one part of it."""
    own = model.state_dict().keys()
    first = next(iter(own), "")
    found = [
        prefix
        for name in weights
        if str(name).endswith(f".{first}")
        and all((prefix := name.removesuffix(first)) + each in weights for each in own)
    ]
    if weights.keys() >= own or len(found) != 1:
        return weights
    return {name: weights[found[0] + name] for name in own}


def without_prefix(weights: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """The weights without the prefixes that wrappers of this model put before their names."""
    weights, own = copy.copy(weights), model.state_dict().keys()
    if hasattr(weights, "_metadata"):  # by which load_state_dict() knows old versions
        weights._metadata = copy.copy(weights._metadata)
    for prefix in ("module.", "_orig_mod.", "module."):  # DDP may hold a compiled model, and be compiled
        if weights.keys() != own and all(name.startswith(prefix) for name in weights):
            consume_prefix_in_state_dict_if_present(weights, prefix)
    return weights


def with_plain_names(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """The state of a checkpoint, with without_prefix() of its entry "model"."""
    if not isinstance(state.get("model"), dict):
        return state
    return state | {"model": without_prefix(state["model"], model)}


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model in DistributedDataParallel, DataParallel or torch.compile, or the model itself."""
    while name := _WRAPPERS.get(type(model).__name__):
        model = model.get_submodule(name)
    return model
