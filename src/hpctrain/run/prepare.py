"""The folder of a run: choose it, create it, and become its owner."""

import math
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.world import in_job, job_id, restart_count, torchrun_restarts
from hpctrain.errors import HpctrainError, UsageError, explain_os_error
from hpctrain.files import atomic
from hpctrain.files.trust import check_owner, make_private_folder, refuse_foreign
from hpctrain.run.options import RunOptions
from hpctrain.run.owner import Owner, launch_id
from hpctrain.run.reader import TAIL, is_number, read_metrics, read_record
from hpctrain.text import say

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
        first = read_record(folder / "config.json")  # if damaged, of this job: others have been refused
        of_launch = first.get("launch", launch_id()) == launch_id()
        again = restart_count() > 0 or (torchrun_restarts() and of_launch)
        again = again and first.get("job", job_id()) == job_id()
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
    with explain_os_error(f"{folder}: cannot be written", "use --out to name a folder that you can write to"):
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
        return known and empty and "trainer" in read_record(folder / "config.json")
    return False


@contextmanager
def withdraw_if_refused(owner: Owner, config: Path | None = None) -> Iterator[None]:
    """After an error, leave a run as it was: without this owner and `config`."""
    try:
        yield
    except HpctrainError:
        withdraw(owner, config)
        raise


def withdraw(owner: Owner, config: Path | None = None) -> None:
    """Leave a run as it was, without this owner and `config`."""
    if config:
        config.unlink(missing_ok=True)
    owner.release()


def find_earlier_checkpoint(folders: list[Path], epoch: int, step: int) -> Path:
    """The path of a checkpoint in one of these run folders, or in a folder that one was resumed from."""
    folders = [*folders]
    for folder in folders:  # the loop adds some
        path = checkpoint.path_of(folder, epoch, step)
        if path.exists():
            return path
        for config in folder.glob("config*.json"):
            with suppress(KeyError, TypeError):
                earlier = Path(read_record(config)["resumed_from"]).parent.parent
                if earlier not in folders:
                    folders.append(earlier)
    return checkpoint.path_of(folders[0], epoch, step)


class Result(NamedTuple):
    """The epochs of the result in a run folder, and how many it was to have if its loop ended before them."""

    epochs: float
    of_epochs: float


def read_result(folder: Path) -> Result:
    """The epochs in result.json: -1 without a result that can be read, infinity if it does not say."""
    path = folder / "result.json"
    if not (result := read_record(path)) and path.exists():
        say(f"hpctrain: {path} is damaged: it is written again")
    epochs, of_epochs = result.get("epochs", math.inf if result else -1), result.get("of_epochs", -1)
    return Result(epochs, of_epochs) if is_number(epochs) and is_number(of_epochs) else Result(-1, -1)
