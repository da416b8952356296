"""hpctrain sweep: search hyperparameters, as a job array whose tasks are the trials.

Nothing coordinates the trials. Each one reads the run folders of the others, asks Optuna for its own
parameters, writes them into its folder, and trains there. A trial that was killed can therefore be run again.
"""

import json
import os
import subprocess
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cli import load_command
from hpctrain.commands.sweep.file import Sweep, as_options, check_options, read_file
from hpctrain.commands.sweep.search import should_prune, suggest
from hpctrain.commands.sweep.trials import (
    describe_parameters,
    describe_progress,
    read_line,
    read_parameters,
    read_state,
    read_trials,
    show,
    trial_folder,
    without_end,
)
from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import DivergedError, EndEarly, HpctrainError, UsageError
from hpctrain.files import atomic
from hpctrain.files.trust import make_private_folder, refuse_foreign
from hpctrain.parser import Parser
from hpctrain.run.reader import DIVERGED, NOT_SCORES, PRUNED, read_metrics, read_record
from hpctrain.text import first_line, say

FAILED = "error.txt"  # in the folder of a trial that an error has ended
SAME_ERRORS = 3  # so many first trials with the same error end the sweep
WAIT = 120  # s, for the parameters of rank 0


def run_trial(sweep: Sweep, folder: Path, number: int, world: World) -> None:
    """Run a trial on all ranks, or continue where its last start ended."""
    path = trial_folder(folder, number)
    if read_state(folder, number) != "running":
        if world.rank == 0:
            say(f"trial {number} has ended already: {path}")
        return
    parameters = choose_parameters(sweep, folder, number, world)
    if world.rank == 0:
        say(f"trial {number}: {describe_parameters(parameters)}")
    train(sweep, folder, number, world, parameters)
    if world.rank == 0:
        print(describe_progress(sweep, read_trials(sweep, folder)), flush=True)
        if not without_end(sweep, folder):
            show(sweep, folder)


def choose_parameters(sweep: Sweep, folder: Path, number: int, world: World) -> dict[str, Any]:
    """The parameters of a trial, which rank 0 writes at its first start. Raises HpctrainError on a time-out.

    The ranks meet over the file system: the trainer has not made their process group yet.
    """
    file = trial_folder(folder, number) / "parameters.json"
    if world.rank == 0:
        _keep_sweep(sweep, folder)
        file.with_name(FAILED).unlink(missing_ok=True)
        if not read_record(file):
            if file.exists():
                say(f"hpctrain: {file} is damaged: it is written again")
            parameters = read_parameters(sweep, folder, number)
            parameters = parameters or suggest(sweep, read_trials(sweep, folder), number)
            make_private_folder(file.parent, foreseen=False)
            atomic.write_text(file, json.dumps(parameters, indent=2) + "\n")
    deadline = time.monotonic() + WAIT
    while not (parameters := read_record(file)):
        if time.monotonic() > deadline:
            raise HpctrainError(
                f"rank {world.rank} sees no {file} of rank 0: is it a file system of all nodes?"
            )
        time.sleep(0.1)
    return parameters


def train(sweep: Sweep, folder: Path, number: int, world: World, parameters: dict[str, Any]) -> None:
    """Run the trainer in the folder of a trial, and write how it ended if it has no result."""
    path = trial_folder(folder, number)
    name, *words = sweep.command
    words = [*words, *as_options(parameters), "--out", str(path), "--resume", "auto"]
    should_end = partial(prune, sweep, folder, number) if sweep.pruner != "none" else None
    try:
        load_command(name).main(world, words, prune=should_end)
    except EndEarly:  # on all ranks
        if not (path / PRUNED).exists():
            raise
    except DivergedError as error:  # on rank 0; the others have ended
        atomic.write_text(path / DIVERGED, f"{error}\n")
        say(f"trial {number} has no result: {error}")
    except Exception as error:
        if world.rank == 0:
            # for run_all() to compare
            atomic.write_text(path / FAILED, first_line(error).replace(str(path), "FOLDER"))
        raise


def prune(sweep: Sweep, folder: Path, number: int, world: World) -> bool:
    """Whether to end a trial after this epoch. A collective call, with the same answer on every rank.

    Writes PRUNED into the ended trial's folder. Raises HpctrainError if an epoch does not measure the metric.
    """
    from hpctrain.distributed.rendezvous import all_or_none, broadcast  # imports torch

    pruned = False
    with all_or_none(world):
        if world.rank == 0:
            trials = read_trials(sweep, folder)
            trial = next(trial for trial in trials if trial.number == number)
            if not trial.scores:
                lines = read_metrics(trial_folder(folder, number))
                known = ", ".join(name for name in lines[-1] if name not in NOT_SCORES)
                raise HpctrainError(
                    f"{sweep.metric} is not measured after each epoch, as pruner needs: metric can be {known}"
                )
            pruned = bool(should_prune(sweep, trials, trial))  # from numpy's bool
            if pruned:
                epoch = max(trial.scores)
                text = f"pruned after epoch {epoch}, {sweep.metric} {trial.scores[epoch]:.4f}"
                atomic.write_text(trial_folder(folder, number) / PRUNED, f"{text}\n")
                say(f"trial {number} {text}")
    return broadcast(world, pruned)


def _keep_sweep(sweep: Sweep, folder: Path) -> None:
    """Write sweep.json, or raise UsageError if it differs in more than the number of trials."""
    own, path = asdict(sweep), folder / "sweep.json"
    if not (kept := read_record(path)):
        if path.exists():
            say(f"hpctrain: {path} is damaged: it is written again")
        kept = own
    differing = [name for name in own if name != "trials" and own[name] != kept.get(name)]
    if differing:
        raise UsageError(
            f"{folder} is of another sweep, which differs in {', '.join(differing)}: give another --out"
        )
    make_private_folder(folder, foreseen=False)
    atomic.write_text(path, json.dumps(own, indent=2) + "\n")


def run_all(file: Path, sweep: Sweep, folder: Path) -> None:
    """Run the trials that have not ended one after the other, each as a process of this machine.

    Raises HpctrainError if some fail, and at once if the first ones all fail with the same error.
    """
    _keep_sweep(sweep, folder)
    errors: list[str] = []
    for number in without_end(sweep, folder):
        sweep_words = ["sweep", str(file), "--out", str(folder), "--trial", str(number)]
        subprocess.run([*SAFE_PYTHON, "-m", "hpctrain", *sweep_words], check=False)
        errors.append(read_line(trial_folder(folder, number) / FAILED))
        all_failed = len(without_end(sweep, folder)) == sweep.trials
        if all_failed and errors[0] and errors == SAME_ERRORS * errors[:1]:
            raise HpctrainError(
                f"the first {SAME_ERRORS} trials end with the same error ({errors[0]}): correct {file}"
            )
    if missing := without_end(sweep, folder):
        raise HpctrainError(
            f"{len(missing)} of {sweep.trials} trials have not ended ({', '.join(map(str, missing[:10]))}): "
            "see what they printed, and run this again"
        )
    if not errors:  # otherwise the last trial has shown the results
        show(sweep, folder)


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain sweep",
        description="Search hyperparameters. Each task of a job array runs one trial; "
        "without a job array, the trials run one after the other.",
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the sweep, in YAML: docs/guides/sweeps.md has its keys"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the trials (default: runs/FILE without .yaml)"
    )
    parser.add_argument(
        "--trial",
        type=int,
        metavar="N",
        help="run this trial, from 0 (default: the number of the array task)",
    )
    parser.add_argument("--show", action="store_true", help="only print the trials, and draw sweep.png")
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Run a trial, or all; or show them. Raises HpctrainError."""
    args = parser().parse_args(arguments)
    sweep, folder = read_file(args.file), args.out or Path("runs") / args.file.stem
    number = args.trial
    if number is None and "SLURM_ARRAY_TASK_ID" in os.environ:
        number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    if args.show:
        if world.rank == 0:
            show(sweep, folder)
        return
    refuse_foreign(folder, foreseen=args.out is None, advice="give --out, a folder of your own")
    check_options(args.file, sweep)
    if number is not None:
        if not 0 <= number < sweep.trials:
            raise UsageError(
                f"there is no trial {number}: {args.file} has {sweep.trials}, "
                f"so give --array=0-{sweep.trials - 1}"
            )
        run_trial(sweep, folder, number, world)
    elif world.size > 1 or world.launcher != ALONE.launcher:
        raise UsageError(
            f"submit a sweep as a job array, such as sbatch --array=0-{sweep.trials - 1}%4 ..., "
            "or give --trial N"
        )
    else:
        run_all(args.file, sweep, folder)
