"""The trials of a sweep: read from their folders, described, and drawn."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.commands.sweep.file import Sweep
from hpctrain.errors import HpctrainError
from hpctrain.files.plain import read_text
from hpctrain.run.charts import folder_for_matplotlib, make_charts, plain, save_picture
from hpctrain.run.reader import DIVERGED, PRUNED, read_json, read_metrics, read_record
from hpctrain.text import one_line, say

# A file in the folder of a trial, and how a trial with this file has ended. The first one counts.
ENDINGS = {"result.json": "complete", PRUNED: "pruned", DIVERGED: "diverged"}


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


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial-{number:03d}"


def read_state(folder: Path, number: int) -> str:
    """How a trial has ended, or "running": its job may also have been killed."""
    for name, state in ENDINGS.items():
        path = trial_folder(folder, number) / name
        if path.exists() and (path.suffix != ".json" or read_record(path)):  # a damaged one is written again
            return state
    return "running"


def without_end(sweep: Sweep, folder: Path) -> list[int]:
    """The numbers of the trials that have not ended, or not begun."""
    return [number for number in range(sweep.trials) if read_state(folder, number) == "running"]


def read_parameters(sweep: Sweep, folder: Path, number: int) -> dict[str, Any]:
    """The parameters of a trial, which are also in its config.json if parameters.json is damaged.

    {} if the trial has not begun.
    """
    path = trial_folder(folder, number)
    if parameters := read_record(path / "parameters.json"):
        return parameters
    options = read_record(path / "config.json").get("options")
    options = options if isinstance(options, dict) else {}
    found = {name: options.get(name.replace("-", "_")) for name in sweep.parameters}
    return {} if None in found.values() else found


def read_trial(sweep: Sweep, folder: Path, number: int) -> Trial:
    """A trial that has begun. Raises HpctrainError if it is complete and has no such metric.

    The value is that of result.json. If only metrics.jsonl has the metric, it is the best one of all epochs.
    """
    path, state = trial_folder(folder, number), read_state(folder, number)
    parameters, lines = read_parameters(sweep, folder, number), read_metrics(path)
    if parameters.keys() != sweep.parameters.keys() or any(
        "values" in form and parameters[name] not in form["values"] for name, form in sweep.parameters.items()
    ):
        raise HpctrainError(f"{path}/parameters.json is of another sweep: give the --out of this one")
    scores = {int(line["epoch"]): line[sweep.metric] for line in lines if sweep.metric in line}
    if state != "complete":
        return Trial(number, parameters, state, scores=scores)
    result = read_json(path / "result.json")
    value = result.get(sweep.metric, choose(sweep)(scores.values()) if scores else None)
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
    begun = [number for number in range(sweep.trials) if read_parameters(sweep, folder, number)]
    return [read_trial(sweep, folder, number) for number in begun]


def choose(sweep: Sweep) -> Callable[..., Any]:
    return max if sweep.direction == "maximize" else min


def _best(sweep: Sweep, complete: list[Trial]) -> Trial:
    return choose(sweep)(complete, key=lambda trial: trial.value)


def describe_parameters(parameters: dict[str, Any]) -> str:
    texts = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in parameters.items()
    )
    return one_line("  ".join(texts))


def describe_progress(sweep: Sweep, trials: list[Trial]) -> str:
    complete = [trial for trial in trials if trial.state == "complete"]
    text = f"{len(complete)} of {sweep.trials} trials have a result"
    if pruned := sum(trial.state == "pruned" for trial in trials):
        text += f", {pruned} pruned"
    if complete:
        best = _best(sweep, complete)
        parameters = describe_parameters(best.parameters)
        text += f"; best {sweep.metric} {best.value:.4g} of trial {best.number}: {parameters}"
    return text


def read_line(path: Path) -> str:
    """The line in a file that says how a trial has ended; "" without one, or if it is large or a pipe."""
    try:
        return one_line(read_text(path, errors="replace").strip())
    except OSError:
        return ""


def show(sweep: Sweep, folder: Path) -> None:
    """Print the trials, the best one last, and draw them in sweep.png."""
    trials = read_trials(sweep, folder)
    sign = 1 if sweep.direction == "maximize" else -1
    for trial in sorted(trials, key=lambda trial: (trial.value is not None, sign * (trial.value or 0))):
        text = trial.state
        if trial.state == "complete":
            text = f"{sweep.metric} {trial.value:.4f}"
        elif trial.state == "pruned":
            path = trial_folder(folder, trial.number) / PRUNED
            text = read_line(path) or text
        elif trial.state == "running":
            text = "no result"
        print(f"trial {trial.number:3}  {text}  {describe_parameters(trial.parameters)}")
    print(describe_progress(sweep, trials))
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
    first.step(numbers, [*itertools.accumulate(values, choose(sweep))], where="post", label="best so far")
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
