"""hpctrain sweep: search hyperparameters, as a job array whose tasks are the trials.

Nothing coordinates the trials. Each one reads the run folders of the others, asks Optuna for its own
parameters, writes them into its folder, and trains there. A trial that was killed can therefore be run again.
Optuna keeps no file: its journal can be corrupted on NFS (github.com/optuna/optuna/issues/5138).
"""

import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.cli import load_command
from hpctrain.commands.sweep_file import Sweep, as_options, check_options, read_file
from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import DivergedError, EndEarly, HpctrainError, UsageError
from hpctrain.files import atomic
from hpctrain.files.trust import refuse_foreign
from hpctrain.parser import Parser
from hpctrain.run.charts import folder_for_matplotlib, make_charts, plain, save_picture
from hpctrain.run.options import prune_with
from hpctrain.run.reader import DIVERGED, NOT_SCORES, PRUNED, read_json, read_metrics
from hpctrain.text import first_line, one_line, say

# A file in the folder of a trial, and how a trial with this file has ended. The first one counts.
ENDINGS = {"result.json": "complete", PRUNED: "pruned", DIVERGED: "diverged"}
FAILED = "error.txt"  # in the folder of a trial that an error has ended
SAME_ERRORS = 3  # so many first trials with the same error end the sweep
WAIT = 120  # s, for the parameters of rank 0


@dataclass(frozen=True)
class Trial:
    """A trial that has begun.

    `scores` has the metric after each epoch, by the number of the epoch. Only a complete trial has a value.
    """

    number: int
    parameters: dict[str, Any]
    state: str = "running"  # or a value of ENDINGS
    value: float | None = None
    scores: dict[int, float] = field(default_factory=dict)


# --- a trial ---


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial-{number:03d}"


def read_state(folder: Path, number: int) -> str:
    """How a trial has ended, or "running": its job may also have been killed."""
    for name, state in ENDINGS.items():
        if (trial_folder(folder, number) / name).exists():
            return state
    return "running"


def without_end(sweep: Sweep, folder: Path) -> list[int]:
    """The numbers of the trials that have not ended, or not begun."""
    return [number for number in range(sweep.trials) if read_state(folder, number) == "running"]


def read_trial(sweep: Sweep, folder: Path, number: int) -> Trial:
    """A trial that has begun. Raises HpctrainError if it is complete and has no such metric.

    The value is that of result.json. If only metrics.jsonl has the metric, it is the best one of all epochs.
    """
    path, state = trial_folder(folder, number), read_state(folder, number)
    parameters, lines = read_json(path / "parameters.json"), read_metrics(path)
    if parameters.keys() != sweep.parameters.keys() or any(
        "values" in form and parameters[name] not in form["values"] for name, form in sweep.parameters.items()
    ):
        raise HpctrainError(f"{path}/parameters.json is of another sweep: give the --out of this one")
    scores = {int(line["epoch"]): line[sweep.metric] for line in lines if sweep.metric in line}
    if state != "complete":
        return Trial(number, parameters, state, scores=scores)
    result = read_json(path / "result.json")
    value = result.get(sweep.metric, _choose(sweep)(scores.values()) if scores else None)
    if not isinstance(value, int | float):
        measured = [*result.items(), *(item for line in lines for item in line.items())]
        known = ", ".join(dict.fromkeys(name for name, value in measured if isinstance(value, int | float)))
        raise HpctrainError(
            f"{path} has no {sweep.metric}: metric can be {known}; "
            f"correct it, remove {folder}/sweep.json, and the trials that have ended count"
        )
    return Trial(number, parameters, state, value, scores)


def read_trials(sweep: Sweep, folder: Path) -> list[Trial]:
    """The trials that have begun, in order. Raises HpctrainError."""
    begun = [
        number
        for number in range(sweep.trials)
        if (trial_folder(folder, number) / "parameters.json").exists()
    ]
    return [read_trial(sweep, folder, number) for number in begun]


def suggest(sweep: Sweep, trials: list[Trial], number: int) -> dict[str, Any]:
    """The parameters of a trial. They depend on the file, its number, and the trials that have begun alone.

    TPE takes a trial without a result for a bad one (constant liar), so that trials at the same time differ.
    """
    if sweep.sampler == "grid":
        chosen = {}
        # One combination, without a list of all: a short file can describe billions.
        for name, form in reversed(sweep.parameters.items()):
            number, place = divmod(number, len(form["values"]))
            chosen[name] = form["values"][place]
        return {name: chosen[name] for name in sweep.parameters}

    optuna = _import_optuna("take sampler: grid")
    seed = (sweep.seed * 1_000_003 + number) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of constant_liar
        if sweep.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        else:
            sampler = optuna.samplers.RandomSampler(seed)
    study = optuna.create_study(direction=sweep.direction, sampler=sampler)
    forms = _distributions(sweep)
    study.add_trials([_for_optuna(trial, forms) for trial in trials])
    return study.ask(forms).params


def should_prune(sweep: Sweep, trials: list[Trial], trial: Trial) -> bool:
    """Whether a trial's best score is worse than the median of the complete trials (at least five) by now."""
    optuna = _import_optuna("leave out pruner")
    study = optuna.create_study(direction=sweep.direction)
    forms = _distributions(sweep)
    study.add_trials([_for_optuna(other, forms) for other in trials if other.state == "complete"])
    return optuna.pruners.MedianPruner().prune(study, _for_optuna(trial, forms))


def _import_optuna(otherwise: str) -> ModuleType:
    if find_spec("optuna") is None:
        raise HpctrainError(
            f"{sys.executable} has no optuna: use the image, pip install optuna, or {otherwise}"
        )
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _for_optuna(trial: Trial, forms: dict[str, Any]) -> Any:
    from optuna.trial import TrialState, create_trial

    state = TrialState.FAIL if trial.state == "diverged" else TrialState[trial.state.upper()]
    return create_trial(
        state=state,
        value=trial.value,
        params=trial.parameters,
        distributions=forms,
        intermediate_values=trial.scores,
    )


def _distributions(sweep: Sweep) -> dict[str, Any]:
    try:
        return {name: _distribution(form) for name, form in sweep.parameters.items()}
    except (ArithmeticError, ValueError) as error:  # such as 10^28 steps
        raise HpctrainError(
            f"parameters: Optuna refuses them ({first_line(error)}): give other ranges"
        ) from error


def _distribution(form: dict[str, Any]) -> Any:
    from optuna import distributions

    if "values" in form:
        return distributions.CategoricalDistribution(form["values"])
    whole = all(type(form[name]) is int for name in ("low", "high", "step") if name in form)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(**form)


def run_trial(sweep: Sweep, folder: Path, number: int, world: World) -> None:
    """Run a trial on all ranks, or continue where its last start ended."""
    path = trial_folder(folder, number)
    if read_state(folder, number) != "running":
        if world.rank == 0:
            say(f"trial {number} has ended already: {path}")
        return
    parameters = choose_parameters(sweep, folder, number, world)
    if world.rank == 0:
        say(f"trial {number}: {_describe(parameters)}")
    train(sweep, folder, number, world, parameters)
    if world.rank == 0:
        print(_describe_progress(sweep, read_trials(sweep, folder)), flush=True)
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
        if not file.exists():
            parameters = suggest(sweep, read_trials(sweep, folder), number)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic.write_text(file, json.dumps(parameters, indent=2) + "\n")
    deadline = time.monotonic() + WAIT
    while not file.exists():
        if time.monotonic() > deadline:
            raise HpctrainError(
                f"rank {world.rank} sees no {file} of rank 0: is it a file system of all nodes?"
            )
        time.sleep(0.1)
    return read_json(file)


def train(sweep: Sweep, folder: Path, number: int, world: World, parameters: dict[str, Any]) -> None:
    """Run the trainer in the folder of a trial, and write how it ended if it has no result."""
    path = trial_folder(folder, number)
    name, *words = sweep.command
    trainer = load_command(name)
    try:
        with prune_with(partial(prune, sweep, folder, number) if sweep.pruner != "none" else None):
            trainer.main(world, [*words, *as_options(parameters), "--out", str(path), "--resume", "auto"])
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
    kept = read_json(path) if path.exists() else own
    differing = [name for name in own if name != "trials" and own[name] != kept.get(name)]
    if differing:
        raise UsageError(
            f"{folder} is of another sweep, which differs in {', '.join(differing)}: give another --out"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(own, indent=2) + "\n")


# --- all trials ---


def run_all(file: Path, sweep: Sweep, folder: Path) -> None:
    """Run the trials that have not ended one after the other, each as a process of this machine.

    Raises HpctrainError if some fail, and at once if the first ones all fail with the same error.
    """
    _keep_sweep(sweep, folder)
    errors: list[str] = []
    for number in without_end(sweep, folder):
        sweep_words = ["sweep", str(file), "--out", str(folder), "--trial", str(number)]
        subprocess.run([*SAFE_PYTHON, "-m", "hpctrain", *sweep_words], check=False)
        failed = trial_folder(folder, number) / FAILED
        errors.append(failed.read_text(encoding="utf-8") if failed.exists() else "")
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


def _choose(sweep: Sweep) -> Callable[..., Any]:
    return max if sweep.direction == "maximize" else min


def _best(sweep: Sweep, complete: list[Trial]) -> Trial:
    return _choose(sweep)(complete, key=lambda trial: trial.value)


def _describe(parameters: dict[str, Any]) -> str:
    texts = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in parameters.items()
    )
    return one_line("  ".join(texts))


def _describe_progress(sweep: Sweep, trials: list[Trial]) -> str:
    complete = [trial for trial in trials if trial.state == "complete"]
    text = f"{len(complete)} of {sweep.trials} trials have a result"
    if pruned := sum(trial.state == "pruned" for trial in trials):
        text += f", {pruned} pruned"
    if complete:
        best = _best(sweep, complete)
        text += f"; best {sweep.metric} {best.value:.4g} of trial {best.number}: {_describe(best.parameters)}"
    return text


def show(sweep: Sweep, folder: Path) -> None:
    """Print the trials, the best one last, and draw them in sweep.png."""
    trials = read_trials(sweep, folder)
    sign = 1 if sweep.direction == "maximize" else -1
    for trial in sorted(trials, key=lambda trial: (trial.value is not None, sign * (trial.value or 0))):
        text = trial.state
        if trial.state == "complete":
            text = f"{sweep.metric} {trial.value:.4f}"
        elif trial.state == "pruned":
            text = (trial_folder(folder, trial.number) / PRUNED).read_text(encoding="utf-8").strip()
        elif trial.state == "running":
            text = "no result"
        print(f"trial {trial.number:3}  {text}  {_describe(trial.parameters)}")
    print(_describe_progress(sweep, trials))
    if any(trial.state == "complete" for trial in trials):
        with folder_for_matplotlib():
            _draw(sweep, trials, folder / "sweep.png")
        say(f"picture: {folder}/sweep.png")


def _draw(sweep: Sweep, every: list[Trial], path: Path) -> None:
    """Draw the values of complete trials in their order, with the best so far, and over each parameter.

    A pruned trial is a gray circle at its last score.
    """
    from matplotlib.ticker import MaxNLocator

    trials = [trial for trial in every if trial.state == "complete"]
    pruned = [trial for trial in every if trial.state == "pruned" and trial.scores]
    last = [trial.scores[max(trial.scores)] for trial in pruned]
    hollow = {"marker": "o", "linestyle": "", "color": "gray", "fillstyle": "none", "label": "pruned"}
    numbers, values = [trial.number for trial in trials], [trial.value for trial in trials]
    figure, (first, *others) = make_charts(1 + len(sweep.parameters), str(path.parent), sharey=True)
    first.plot(numbers, values, "o", label="trial")
    if pruned:
        first.plot([trial.number for trial in pruned], last, **hollow)
    first.step(numbers, [*itertools.accumulate(values, _choose(sweep))], where="post", label="best so far")
    first.xaxis.set_major_locator(MaxNLocator(integer=True))
    first.set(xlabel="trial", ylabel=plain(sweep.metric.replace("_", " ")))
    first.legend()
    best = _best(sweep, trials)
    for axis, (name, form) in zip(others, sweep.parameters.items(), strict=True):
        seen = [trial.parameters[name] for trial in trials]
        at = form["values"].index if "values" in form else float
        axis.plot([at(value) for value in seen], values, "o")
        if pruned:
            axis.plot([at(trial.parameters[name]) for trial in pruned], last, **hollow)
        axis.plot([at(best.parameters[name])], [best.value], "*", markersize=14, label="best")
        axis.set(xlabel=name, xscale="log" if form.get("log") else "linear")  # a scale brings its own ticks
        if "values" in form:
            axis.set_xticks(range(len(form["values"])), [plain(str(value)) for value in form["values"]])
            axis.set_xlim(-0.5, len(form["values"]) - 0.5)
        axis.legend()
    save_picture(figure, path)


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
