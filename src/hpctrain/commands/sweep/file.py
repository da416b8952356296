"""The file of a sweep, which docs/guides/sweeps.md describes."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpctrain.cli import COMMANDS, load_command
from hpctrain.errors import UsageError
from hpctrain.files.plain import read_text
from hpctrain.parser import did_you_mean
from hpctrain.text import reason

OWN = {"out", "resume"}  # options that a trial sets itself
CHOICES = {
    "direction": ("minimize", "maximize"),
    "sampler": ("tpe", "random", "grid"),
    "pruner": ("none", "median"),
}
MAX_TRIALS = 10_000  # a trial looks for the folders of all others
FORMS = "{low: 1e-5, high: 1e-2, log: true}, {low: 1, high: 8, step: 1} or {values: [16, 32]}"


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    `command` has the words of a command of hpctrain that trains, without --out and --resume. A parameter is
    {"values": [...]}, or {"low": ..., "high": ...} with numbers and perhaps "log" or "step".
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
    content = _read_yaml(path)
    keys = Sweep.__dataclass_fields__
    for name in content:
        if name not in keys:
            raise UsageError(f"{path}: there is no key {name!r}: choose from {', '.join(keys)}")
    for name in ("command", "metric", "direction", "parameters"):
        if not content.get(name):
            raise UsageError(f"{path}: {name} is missing: see docs/guides/sweeps.md")
    command, parameters = content["command"], content["parameters"]
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except (TypeError, ValueError):  # no text and no list, or a quote without an end
        words = []
    if not words or not isinstance(parameters, dict):
        raise UsageError(
            f"{path}: give a command line as command, and the range of each option as parameters"
        )
    ranges = {str(name): _read_range(f"{path}: parameter {name}", form) for name, form in parameters.items()}
    sweep = Sweep(**content | {"command": words, "parameters": ranges})
    if problem := next(_problems(sweep), None):
        raise UsageError(f"{path}: {problem}")
    return sweep


def _read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file. Raises UsageError."""
    import yaml

    class Loader(yaml.SafeLoader):
        """As YAML 1.2, where on, off, yes and no are texts, such as the values of --tf32."""

        yaml_implicit_resolvers: ClassVar = {
            first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:bool" or first in "tTfF"]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        text = read_text(path)
        # A file of a few lines would otherwise unfold to gigabytes.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("it has an alias: write its value instead")
        content = yaml.load(text, Loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(
            f"{path}: cannot be read as YAML ({reason(error)}): see docs/guides/sweeps.md"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: not a list of keys and values: see docs/guides/sweeps.md")
    return content


def _read_range(place: str, form: Any) -> dict[str, Any]:
    """The values or the range of a parameter. Raises UsageError, which begins with `place`."""
    error = UsageError(f"{place}: give {FORMS}, with low below high; log: low above 0, and no step")
    if not isinstance(form, dict):
        raise error
    if form.keys() == {"values"}:
        values = form["values"]
        valid = isinstance(values, list) and all(isinstance(value, str | int | float) for value in values)
        if not valid or not values:
            raise error
        return form
    if not {"low", "high"} <= form.keys() <= {"low", "high", "log", "step"}:
        raise error
    try:
        numbers = {name: _number(form[name]) for name in ("low", "high", "step") if name in form}
    except (OverflowError, TypeError, ValueError):
        raise error from None
    positive = [numbers["high"] - numbers["low"], numbers.get("step", 1)]
    if form.get("log"):
        positive.append(numbers["low"])
    log = form.get("log", False)
    if (
        not all(0 < value < math.inf for value in positive)
        or (log and "step" in form)
        or type(log) is not bool
    ):
        raise error
    return form | numbers


def _number(value: Any) -> float:
    """A number, or a text such as 1e-5, which YAML takes for no number. Raises ValueError and others."""
    number = float(value)  # raises OverflowError for an integer that is too large
    return value if type(value) is int else number


def _problems(sweep: Sweep) -> Iterator[str]:
    """What is wrong with the values of a sweep."""
    trainer = sweep.command[0]
    trainers = [name for name, (_, group, _) in COMMANDS.items() if group in ("train", "fine-tune")]
    if trainer not in trainers:
        advice = did_you_mean(trainer, trainers) or f"choose from {', '.join(trainers)}"
        yield f"command {trainer!r}: {advice}"
    for key, choices in CHOICES.items():
        if getattr(sweep, key) not in choices:
            yield f"{key} {getattr(sweep, key)!r}: choose from {', '.join(choices)}"
    if type(sweep.trials) is not int or not 0 < sweep.trials <= MAX_TRIALS:
        yield f"trials {sweep.trials!r}: give a number from 1 to {MAX_TRIALS:,}"
    if type(sweep.seed) is not int:
        yield f"seed {sweep.seed!r}: give an integer"
    if not isinstance(sweep.metric, str) or not sweep.metric.isprintable():
        yield f"metric {sweep.metric!r}: give a name in result.json, such as test_loss"
    given = {word.removeprefix("--").partition("=")[0] for word in sweep.command if word.startswith("--")}
    if OWN & {*given, *sweep.parameters}:
        yield "--out and --resume are the sweep's own: leave them out"
    for name, form in sweep.parameters.items():
        if name in given:
            yield f"parameter {name} is in command as well: leave it out there"
        if sweep.sampler == "grid" and "values" not in form:
            yield f"parameter {name}: sampler grid needs values for each"


def as_options(parameters: dict[str, Any]) -> list[str]:
    """The words for a command line: of an option without a value, true gives it and false leaves it out."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in parameters.items()
        if value is not False
    ]


def check_options(path: Path, sweep: Sweep) -> None:
    """Let the trainer's parser read each value, which takes seconds. UsageError names the file."""
    parser = load_command(sweep.command[0]).parser()
    values = {
        name: form.get("values") or [form["low"], form["high"]] for name, form in sweep.parameters.items()
    }
    for name, each in values.items():
        action = parser._option_string_actions.get(f"--{name}")
        if action and action.nargs == 0 and {*map(type, each)} != {bool}:
            raise UsageError(f"{path}: --{name} takes no value: give {{values: [true, false]}}")
    for number in range(max(map(len, values.values()))):
        chosen = {name: each[min(number, len(each) - 1)] for name, each in values.items()}
        try:
            parser.parse_args([*sweep.command[1:], *as_options(chosen)])
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
