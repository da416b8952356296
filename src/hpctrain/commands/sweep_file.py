"""The file of a sweep, which docs/sweep.md describes."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cli import COMMANDS, load_command
from hpctrain.errors import UsageError
from hpctrain.options import did_you_mean
from hpctrain.text import reason

OWN = {"out", "resume"}  # options that a trial sets itself
SAMPLERS = ("tpe", "random", "grid")
MOST_TRIALS = 10_000  # a trial looks for the folders of all others
PRUNERS = ("none", "median")
DIRECTIONS = ("minimize", "maximize")
FORMS = "{low: 1e-5, high: 1e-2, log: true}, {low: 1, high: 8, step: 1} or {values: [16, 32]}"


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    `command` has the words of a command of hpctrain that trains, without --out and --resume.
    """

    command: list[str]
    metric: str
    direction: str
    parameters: dict[str, dict[str, Any]]
    trials: int = 20
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = 1


def read_file(path: Path) -> Sweep:
    """Read a sweep file, in YAML. Raises UsageError, naming the file and the key."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        # A file of a few lines would otherwise unfold to gigabytes.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("it has an alias: write its value instead")
        content = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as YAML ({reason(error)}): see docs/sweep.md") from error
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
        sweep = Sweep(
            **content
            | {"command": words, "parameters": {str(name): x for name, x in content["parameters"].items()}}
        )
        trainer = words[0]
    except (AttributeError, IndexError, TypeError, ValueError):  # ValueError: quotes that do not end
        raise UsageError(
            f"{path}: give a command line as command, and the range of each option as parameters"
        ) from None
    given = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
    trainers = [name for name, (_, group, _) in COMMANDS.items() if group in ("train", "fine-tune")]
    for text, fits in (
        (
            f"command {trainer!r}: {did_you_mean(trainer, trainers) or 'choose from ' + ', '.join(trainers)}",
            trainer in trainers,
        ),
        ("--out and --resume are the sweep's own: leave them out", not OWN & {*given, *sweep.parameters}),
        (
            f"direction {sweep.direction!r}: choose from {', '.join(DIRECTIONS)}",
            sweep.direction in DIRECTIONS,
        ),
        (f"sampler {sweep.sampler!r}: choose from {', '.join(SAMPLERS)}", sweep.sampler in SAMPLERS),
        (f"pruner {sweep.pruner!r}: choose from {', '.join(PRUNERS)}", sweep.pruner in PRUNERS),
        (
            f"trials {sweep.trials!r}: give a number from 1 to {MOST_TRIALS:,}",
            type(sweep.trials) is int and 0 < sweep.trials <= MOST_TRIALS,
        ),
        (f"seed {sweep.seed!r}: give an integer", type(sweep.seed) is int),
        (
            f"metric {sweep.metric!r}: give a name in result.json, such as test_loss",
            isinstance(sweep.metric, str) and sweep.metric.isprintable(),
        ),
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


def check_options(path: Path, sweep: Sweep) -> None:
    """Let the parser of the trainer read each value of each parameter. Raises UsageError, naming the file.

    This imports the trainer, which takes seconds.
    """
    parser = load_command(sweep.command[0]).parser()
    values = {
        name: form.get("values") or [form["low"], form["high"]] for name, form in sweep.parameters.items()
    }
    for number in range(max(map(len, values.values()))):
        options = [f"--{name}={each[min(number, len(each) - 1)]}" for name, each in values.items()]
        try:
            parser.parse_args([*sweep.command[1:], *options])
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None


def _check_parameter(place: str, form: Any) -> None:
    if (
        isinstance(form, dict)
        and form.keys() == {"values"}
        and isinstance(form["values"], list)
        and form["values"]
    ):
        if all(isinstance(value, str | int | float) for value in form["values"]):
            return
    elif isinstance(form, dict) and {"low", "high"} <= form.keys() <= {"low", "high", "log", "step"}:
        try:
            for name in ("low", "high", "step"):  # YAML takes 1e-5 for a text
                if name in form:
                    number = float(form[name])  # fails for integers that are too large
                    form[name] = form[name] if type(form[name]) is int else number
            positive = [
                form["high"] - form["low"],
                form.get("step", 1),
                form["low"] if form.get("log") else 1,
            ]
            if all(0 < value < math.inf for value in positive) and not (form.get("log") and "step" in form):
                return
        except (OverflowError, TypeError, ValueError):
            pass
    raise UsageError(f"{place}: give {FORMS}, with low below high; log: low above 0, and no step")
