"""hpctrain sweep: search hyperparameters, as a job array whose tasks are the trials.

Nothing coordinates the trials. Each one reads what the others have in their run folders, asks Optuna for its own parameters,
writes them into its folder, and trains there as a run of its own. So any of them may be killed and run again. Optuna keeps no
file: its journal can be corrupted on NFS (github.com/optuna/optuna/issues/5138).
"""

import argparse
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpctrain import atomic
from hpctrain.cli import COMMANDS, Parser
from hpctrain.errors import DivergedError, HpctrainError, UsageError, first_line
from hpctrain.packages import SAFE_PYTHON
from hpctrain.plot import folder_for_matplotlib
from hpctrain.runs import read_json
from hpctrain.world import ALONE, World

OWN = {"out", "resume"}  # options that a trial sets itself
SAMPLERS = ("tpe", "random", "grid")
DIRECTIONS = ("minimize", "maximize")
DIVERGED = "diverged.txt"  # in the folder of a trial whose parameters do not let it train
WAIT = 120  # s, for the parameters of rank 0
FORMS = "{low: 1e-5, high: 1e-2, log: true}, {low: 1, high: 8, step: 1} or {values: [16, 32]}"


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says. `command` has the words of a command of hpctrain that trains, without --out and --resume."""

    command: list[str]
    metric: str
    direction: str
    parameters: dict[str, dict[str, Any]]
    trials: int = 20
    sampler: str = "tpe"
    seed: int = 1


def read_file(path: Path) -> Sweep:
    """Read a sweep file, in YAML. Raises UsageError, naming the file and the key."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())[:200]}): see docs/sweep.md") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: not a list of keys and values: see docs/sweep.md")
    keys = Sweep.__dataclass_fields__
    for name in content:
        if name not in keys:
            raise UsageError(f"{path}: there is no key {name!r}: choose from {', '.join(keys)}")
    for name in ("command", "metric", "direction", "parameters"):
        if not content.get(name):
            raise UsageError(f"{path}: {name} is missing: see docs/sweep.md")
    try:
        command = content["command"]
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        sweep = Sweep(**content | {"command": words, "parameters": {str(name): x for name, x in content["parameters"].items()}})
        trainer = words[0]
    except (AttributeError, IndexError, TypeError, ValueError):  # ValueError: quotes that do not end
        raise UsageError(f"{path}: give a command line as command, and the range of each option as parameters") from None
    given = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
    trainers = [name for name, (_, group, _) in COMMANDS.items() if group in ("train", "fine-tune")]
    for text, fits in (
        (f"command {trainer!r}: choose from {', '.join(trainers)}", trainer in trainers),
        ("--out and --resume are the sweep's own: leave them out", not OWN & {*given, *sweep.parameters}),
        (f"direction {sweep.direction!r}: choose from {', '.join(DIRECTIONS)}", sweep.direction in DIRECTIONS),
        (f"sampler {sweep.sampler!r}: choose from {', '.join(SAMPLERS)}", sweep.sampler in SAMPLERS),
        (f"trials {sweep.trials!r}: give a number from 1", type(sweep.trials) is int and sweep.trials > 0),
        (f"seed {sweep.seed!r}: give an integer", type(sweep.seed) is int),
        (f"metric {sweep.metric!r}: give a name in result.json, such as test_loss", isinstance(sweep.metric, str)),
    ):
        if not fits:
            raise UsageError(f"{path}: {text}")
    for name, form in sweep.parameters.items():
        _check_parameter(f"{path}: parameter {name}", form)
        if name in given:
            raise UsageError(f"{path}: parameter {name} is in command as well: leave it out there")
        if sweep.sampler == "grid" and "values" not in form:
            raise UsageError(f"{path}: parameter {name}: sampler grid needs values for each")
    return sweep


def _check_parameter(place: str, form: Any) -> None:  # noqa: ANN401 - what YAML has there
    if isinstance(form, dict) and form.keys() == {"values"} and isinstance(form["values"], list) and form["values"]:
        if all(isinstance(value, str | int | float) for value in form["values"]):
            return
    elif isinstance(form, dict) and {"low", "high"} <= form.keys() <= {"low", "high", "log", "step"}:
        try:
            for name in ("low", "high", "step"):  # YAML takes 1e-5 for a text
                if name in form:
                    number = float(form[name])  # fails for integers that are too large
                    form[name] = form[name] if type(form[name]) is int else number
            positive = [form["high"] - form["low"], form.get("step", 1), form["low"] if form.get("log") else 1]
            if all(0 < value < math.inf for value in positive) and not (form.get("log") and "step" in form):
                return
        except (OverflowError, TypeError, ValueError):
            pass
    raise UsageError(f"{place}: give {FORMS}, with low below high; log: low above 0, and no step")


# --- a trial ---


def trial_folder(folder: Path, number: int) -> Path:
    """The run folder of a trial."""
    return folder / f"trial-{number:03d}"


def has_ended(folder: Path, number: int) -> bool:
    """Whether a trial has a result, or diverged: then it would diverge again."""
    return any((trial_folder(folder, number) / name).exists() for name in ("result.json", DIVERGED))


def read_trials(sweep: Sweep, folder: Path) -> list[dict[str, Any]]:
    """The trials that have begun, in order: number, parameters, value (None without a result), and whether it diverged."""
    trials = []
    for number in range(sweep.trials):
        path = trial_folder(folder, number)
        if (path / "parameters.json").exists():
            result = read_json(path / "result.json") if (path / "result.json").exists() else {}
            if result and not isinstance(result.get(sweep.metric), int | float):
                known = ", ".join(name for name, value in result.items() if isinstance(value, int | float))
                raise HpctrainError(f"{path}/result.json has no {sweep.metric}: metric can be {known}")
            parameters = read_json(path / "parameters.json")
            value, diverged = result.get(sweep.metric), (path / DIVERGED).exists()
            trials.append({"number": number, "parameters": parameters, "value": value, "diverged": diverged})
    return trials


def suggest(sweep: Sweep, trials: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The parameters of a trial, a function of the file, its number, and the trials that have begun.

    Those without a result yet count as bad ones for TPE (constant liar), so that trials at the same time differ.
    """
    if sweep.sampler == "grid":
        combinations = [*itertools.product(*(form["values"] for form in sweep.parameters.values()))]
        return dict(zip(sweep.parameters, combinations[number % len(combinations)], strict=True))

    if find_spec("optuna") is None:
        raise HpctrainError(f"{sys.executable} has no optuna: use the image, pip install optuna, or take sampler: grid")
    import optuna
    from optuna import samplers
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = (sweep.seed * 1_000_003 + number) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of constant_liar
        sampler = samplers.TPESampler(seed=seed, constant_liar=True) if sweep.sampler == "tpe" else samplers.RandomSampler(seed)
    study = optuna.create_study(direction=sweep.direction, sampler=sampler)
    try:
        forms = {name: _distribution(form) for name, form in sweep.parameters.items()}
    except (ArithmeticError, ValueError) as error:  # such as 10^28 steps
        raise HpctrainError(f"parameters: Optuna refuses them ({first_line(error)}): give other ranges") from error
    for trial in trials:
        state = (
            TrialState.COMPLETE if trial["value"] is not None else TrialState.FAIL if trial["diverged"] else TrialState.RUNNING
        )
        study.add_trial(create_trial(state=state, params=trial["parameters"], distributions=forms, value=trial["value"]))
    return study.ask(forms).params


def _distribution(form: dict[str, Any]) -> Any:  # noqa: ANN401 - one of Optuna's three classes
    from optuna import distributions

    if "values" in form:
        return distributions.CategoricalDistribution(form["values"])
    whole = all(type(form[name]) is int for name in ("low", "high", "step") if name in form)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(**form)


def run_trial(sweep: Sweep, folder: Path, number: int, world: World) -> None:
    """Train with the parameters of a trial, on all ranks. It goes on where an earlier start of it was ended."""
    path = trial_folder(folder, number)
    if has_ended(folder, number):
        if world.rank == 0:
            print(f"trial {number} has ended already: {path}", flush=True)
        return
    if world.rank == 0:
        _keep_sweep(sweep, folder)
        if not (path / "parameters.json").exists():
            parameters = suggest(sweep, read_trials(sweep, folder), number)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic.write_text(path / "parameters.json", json.dumps(parameters, indent=2) + "\n")
    deadline = time.monotonic() + WAIT
    while not (path / "parameters.json").exists():
        if time.monotonic() > deadline:
            raise HpctrainError(f"rank {world.rank} sees no {path}/parameters.json of rank 0: is it a file system of all nodes?")
        time.sleep(0.1)
    chosen = read_json(path / "parameters.json")
    if world.rank == 0:
        print(f"trial {number}: {_describe(chosen)}", flush=True)
    options = [f"--{name}={value}" for name, value in chosen.items()]
    name, *words = sweep.command
    try:
        import_module(COMMANDS[name][0]).main(world, [*words, *options, "--out", str(path), "--resume", "auto"])
    except DivergedError as error:  # on rank 0; the others have ended
        atomic.write_text(path / DIVERGED, f"{error}\n")
        print(f"trial {number} has no result: {error}", flush=True)
    if world.rank == 0:
        trials = read_trials(sweep, folder)
        print(_describe_progress(sweep, trials), flush=True)
        if all(has_ended(folder, number) for number in range(sweep.trials)):
            show(sweep, folder)


def _keep_sweep(sweep: Sweep, folder: Path) -> None:
    """Write sweep.json, or compare with it. Raises UsageError if they differ in more than the number of trials."""
    own, path = asdict(sweep), folder / "sweep.json"
    kept = read_json(path) if path.exists() else own
    differing = [name for name in own if name != "trials" and own[name] != kept.get(name)]
    if differing:
        raise UsageError(f"{folder} is of another sweep, which differs in {', '.join(differing)}: give another --out")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(own, indent=2) + "\n")


# --- all trials ---


def run_all(file: Path, sweep: Sweep, folder: Path) -> None:
    """Run the trials without a result one after the other, in this machine's own processes. Raises HpctrainError if some fail."""
    _keep_sweep(sweep, folder)
    for number in range(sweep.trials):
        if not has_ended(folder, number):
            command = [*SAFE_PYTHON, "-m", "hpctrain", "sweep", str(file), "--out", str(folder), "--trial", str(number)]
            subprocess.run(command, check=False)
    missing = [number for number in range(sweep.trials) if not has_ended(folder, number)]
    if missing:
        raise HpctrainError(
            f"{len(missing)} of {sweep.trials} trials have not ended ({', '.join(map(str, missing[:10]))}): "
            "see what they printed, and run this again"
        )


def _best(sweep: Sweep, trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    finished = [trial for trial in trials if trial["value"] is not None]
    choose = max if sweep.direction == "maximize" else min
    return choose(finished, key=lambda trial: trial["value"]) if finished else None


def _describe(parameters: dict[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in parameters.items()
    )


def _describe_progress(sweep: Sweep, trials: list[dict[str, Any]]) -> str:
    count = sum(trial["value"] is not None for trial in trials)
    best = _best(sweep, trials)
    text = f"{count} of {sweep.trials} trials have a result"
    if best:
        text += f"; best {sweep.metric} {best['value']:.4g} of trial {best['number']}: {_describe(best['parameters'])}"
    return text


def show(sweep: Sweep, folder: Path) -> None:
    """Print the trials, the best one last, and draw them in sweep.png."""
    trials = read_trials(sweep, folder)
    sign = 1 if sweep.direction == "maximize" else -1
    for trial in sorted(trials, key=lambda trial: (trial["value"] is not None, sign * (trial["value"] or 0))):
        text = "diverged" if trial["diverged"] else "no result"
        if trial["value"] is not None:
            text = f"{sweep.metric} {trial['value']:.4f}"
        print(f"trial {trial['number']:3}  {text}  {_describe(trial['parameters'])}")
    print(_describe_progress(sweep, trials))
    finished = [trial for trial in trials if trial["value"] is not None]
    if finished:
        with folder_for_matplotlib():
            _draw(sweep, finished, folder / "sweep.png")
        print(f"picture: {folder}/sweep.png", flush=True)


def _draw(sweep: Sweep, trials: list[dict[str, Any]], path: Path) -> None:
    """The values in the order of the trials with the best so far, and over each parameter."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    choose = max if sweep.direction == "maximize" else min
    numbers, values = [trial["number"] for trial in trials], [trial["value"] for trial in trials]
    columns = min(1 + len(sweep.parameters), 4)
    rows = -(-(1 + len(sweep.parameters)) // columns)
    figure = Figure(figsize=(4 * columns, 3.2 * rows), layout="constrained")
    first, *others = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    first.plot(numbers, values, "o", label="trial")
    first.step(numbers, [*itertools.accumulate(values, choose)], where="post", label="best so far")
    first.xaxis.set_major_locator(MaxNLocator(integer=True))
    first.set(xlabel="trial", ylabel=sweep.metric.replace("_", " "))
    first.legend()
    best = _best(sweep, trials)
    for axis, (name, form) in itertools.zip_longest(others, sweep.parameters.items(), fillvalue=(None, None)):
        if name is None:
            axis.set_axis_off()
            continue
        seen = [trial["parameters"][name] for trial in trials]
        at = form["values"].index if "values" in form else float
        axis.plot([at(value) for value in seen], values, "o")
        axis.plot([at(best["parameters"][name])], [best["value"]], "*", markersize=14, label="best")
        if "values" in form:
            axis.set_xticks(range(len(form["values"])), [str(value) for value in form["values"]])
        axis.set(xlabel=name, xscale="log" if form.get("log") else "linear")
        axis.legend()
    for axis in (first, *others):
        axis.grid(alpha=0.3)
    figure.suptitle(str(path.parent))
    with atomic.file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def parser() -> Parser:
    """The options of `hpctrain sweep`."""
    parser = Parser(
        prog="hpctrain sweep",
        description="Search hyperparameters: in a job array the task is the trial, otherwise the trials run one after the other.",
    )
    parser.add_argument("file", type=Path, help="the sweep, in YAML: docs/sweep.md has its keys")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the trials (default: runs/FILE without .yaml)")
    parser.add_argument("--trial", type=int, metavar="N", help="run this trial, from 0 (default: the number of the array task)")
    parser.add_argument("--show", action="store_true", help="only print the trials, and draw sweep.png")
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Run a trial, or all; or show them. Raises HpctrainError."""
    args: argparse.Namespace = parser().parse_args(arguments)
    sweep, folder = read_file(args.file), args.out or Path("runs") / args.file.stem
    number = args.trial
    if number is None and "SLURM_ARRAY_TASK_ID" in os.environ:
        number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    if args.show:
        if world.rank == 0:
            show(sweep, folder)
    elif number is not None:
        if not 0 <= number < sweep.trials:
            raise UsageError(f"there is no trial {number}: {args.file} has {sweep.trials}, so give --array=0-{sweep.trials - 1}")
        run_trial(sweep, folder, number, world)
    elif world.size > 1 or world.launcher != ALONE.launcher:
        raise UsageError(f"submit a sweep as a job array, such as sbatch --array=0-{sweep.trials - 1}%4 ..., or give --trial N")
    else:
        run_all(args.file, sweep, folder)
