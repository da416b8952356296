"""The folder of a run: choose it, create it, and become its owner."""

import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.world import in_job, job_id, restart_count, torchrun_restarts
from hpctrain.errors import EndEarly, HpctrainError, UsageError
from hpctrain.files import atomic
from hpctrain.files.trust import check_owner, make_private_folder, refuse_foreign
from hpctrain.run.options import RunOptions
from hpctrain.run.owner import Owner
from hpctrain.run.reader import TAIL, read_json, read_metrics

# What a run folder has before its first step, beside its configurations.
BEGINNING = {"owner.json", "metrics.jsonl", "checkpoints", "logs", "from-scratch"}


def prepare_folder(trainer: str, options: RunOptions) -> tuple[Path, Path | None, Owner]:
    """Create and own the run folder, on one rank. Returns it, the checkpoint to resume from, the owner."""
    if options.is_auto and not options.out and not in_job():
        raise UsageError(
            "--resume auto needs --out here: without a job of Slurm or PBS, each start has a new run folder"
        )
    source, folder = options.source, options.choose_folder(trainer)
    foreseen = not options.out and source is None
    trusted = f"with --resume {shlex.quote(str(folder))}"
    refuse_foreign(
        folder, foreseen=foreseen, advice=f"use --out to name one of your own, {trusted} if you trust it"
    )
    earlier_run = atomic.exists(folder / "config.json")
    again, failed_start = options.is_auto, False
    if earlier_run and not again and (not source or source.resolve() != folder.resolve()):
        again = restart_count() > 0 or (torchrun_restarts() and Owner(folder).is_of_this_launch())
        again = again and json.loads((folder / "config.json").read_text(encoding="utf-8"))["job"] == job_id()
        failed_start = not again and _is_failed_start(folder)
        if not again and not failed_start:
            auto = "" if checkpoint.has_complete(folder) else "auto --out "
            again_with = f"--resume {auto}{shlex.quote(str(folder))}"
            raise HpctrainError(
                f"{folder} holds a run already: give another --out, or continue that run with {again_with}"
            )
        # Slurm or torchrun has started the job again, with the same command line.
    if again and _can_resume(folder):
        source = folder
    own = source is not None and source.resolve() == folder.resolve()
    resume = None
    if source and not (own and (folder / "checkpoints").is_dir()):
        resume = checkpoint.find_newest(source)
    try:
        make_private_folder(folder, foreseen=foreseen)
        places = [folder / name for name in ("checkpoints", "logs", "tensorboard")]
        for path in [*places, *checkpoint.list_newest_first(folder)]:
            check_owner(path)
        owner = Owner(folder)
        owner.acquire()
        for path in folder.glob("config*.json") if failed_start else ():
            path.unlink()
        for name in ("checkpoints", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        # the checkpoint of a sharded model is a folder
        for path in [folder, folder / "checkpoints", *checkpoint.list_newest_first(folder)]:
            atomic.remove_leftovers(path)
        probe = folder / f".probe.{os.getpid()}"
        with probe.open("xb") as file:
            file.write(bytes(16_000))
        probe.unlink()
    except OSError as error:
        raise HpctrainError(
            f"{folder}: cannot be written ({error.strerror}): "
            "use --out to name a folder that you can write to"
        ) from error
    if own:
        with withdraw_if_refused(owner):
            resume = checkpoint.find_newest(folder)  # the last owner may have written until now
    return folder, resume, owner


def _can_resume(folder: Path) -> bool:
    """Whether a run has a checkpoint. HpctrainError if it had: a new start would overwrite its metrics.

    The checkpoint of an epoch is complete before the second epoch after it.
    """
    if checkpoint.has_complete(folder):
        return True
    lines = read_metrics(folder, TAIL)
    if lines and (lines[-1]["epoch"] > 2 or not (folder / "checkpoints").is_dir()):
        raise HpctrainError(
            f"{folder}: its checkpoints are gone, and it was in epoch {lines[-1]['epoch']:g}: put "
            "checkpoints/ back, or give another --out to begin again"
        )
    return False


def _is_failed_start(folder: Path) -> bool:
    """Whether an error has ended the run in this folder before its first line of metrics."""
    with suppress(OSError, ValueError):
        known = all(
            path.name in BEGINNING or re.fullmatch(r"config(\.\d+)?\.json", path.name)
            for path in folder.iterdir()
        )
        empty = (folder / "metrics.jsonl").stat().st_size == 0 and not any((folder / "checkpoints").iterdir())
        return (
            known and empty and "trainer" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
        )
    return False


@contextmanager
def withdraw_if_refused(owner: Owner, config: Path | None = None) -> Iterator[None]:
    """After an error, or if nothing is left to do, leave a run as it was: without this owner and `config`."""
    try:
        yield
    except (HpctrainError, EndEarly):
        if config:
            config.unlink(missing_ok=True)
        owner.release()
        raise


def find_earlier_checkpoint(folders: list[Path], epoch: int, step: int) -> Path:
    """The path of a checkpoint in one of these run folders, or in a folder that one was resumed from."""
    folders = [*folders]
    for folder in folders:  # the loop adds some
        path = checkpoint.path_of(folder, epoch, step)
        if path.exists():
            return path
        for config in folder.glob("config*.json"):
            with suppress(HpctrainError, KeyError, TypeError):
                earlier = Path(read_json(config)["resumed_from"]).parent.parent
                if earlier not in folders:
                    folders.append(earlier)
    return checkpoint.path_of(folders[0], epoch, step)


def finished_epochs(folder: Path) -> float:
    """The epochs of the result in a run folder: -1 without a result, infinity if the result does not say."""
    try:
        return json.loads((folder / "result.json").read_text(encoding="utf-8")).get("epochs", math.inf)
    except FileNotFoundError:
        return -1
    except (OSError, ValueError):
        return math.inf
