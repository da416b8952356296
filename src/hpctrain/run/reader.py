"""Read run folders, of this user or of others: configurations, metrics, state and score."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files.plain import open_plain, read_object, read_whole
from hpctrain.run.best import Best, is_loss

# The entries of a line of metrics that are neither losses nor scores; the measured ones as charts show them.
POSITION = ("epoch", "step", "seconds")
MEASURED = (
    "examples_per_s",
    "learning_rate",
    "loss_scale",
    "overflow_steps",
    "peak_memory_mb",
    "gpu_percent",
)
NOT_SCORES = {*POSITION, *MEASURED}
PRUNED = "pruned.txt"  # in the folder of a trial that its sweep has ended early
DIVERGED = "diverged.txt"  # in that of a trial whose parameters do not let it train
# owner.json is touched every two seconds; clocks of nodes and file servers differ by less than this.
SIGN_OF_LIFE = 60.0  # s
# More than the last lines of metrics.jsonl, which has a few hundred bytes a line.
TAIL = 8192  # bytes
MAX_NAME_LENGTH = 200  # of a metric
MAX_VALUE = 1e307  # the axis of a chart cannot have a larger range


def find(folder: Path) -> Iterator[Path]:
    """The run folders in a folder, or the folder itself, in the order of their names."""
    for path, folders, files in os.walk(folder):
        if "config.json" in files:
            folders.clear()  # a run folder has no other in it
            yield Path(path)
        folders.sort()


def read_configs(run: Path) -> list[dict[str, Any]]:
    """Read config.json and, for resumed runs, config.2.json ... Raises HpctrainError, naming the file.

    A start that was killed before it resumed a finished run is left out.
    """
    configs: list[dict[str, Any]] = []
    path = run / "config.json"
    while not configs or path.exists():  # if the folder is closed to this user, read_json() raises
        configs.append(read_json(path))
        last = configs[-1]
        if not isinstance(last.get("options"), dict) or not all(
            isinstance(last.get(x) or {}, dict) for x in ("world", "versions")
        ):
            raise HpctrainError(
                f"{path}: not a file of hpctrain: name a run folder, such as runs/train_ddp/17"
            )
        path = run / f"config.{len(configs) + 1}.json"
    with suppress(OSError):
        finished = (run / "result.json").stat().st_mtime
        while len(configs) > 1 and "resumed_at" not in configs[-1] and _started(configs[-1]) > finished:
            configs.pop()
    return configs


def _started(config: dict[str, Any]) -> float:
    """When a start began, in seconds since 1970; not a number if the file does not say."""
    try:
        return datetime.strptime(str(config.get("started")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return math.nan


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder. Raises HpctrainError, naming the file."""
    with _explain_missing_run(path):
        return read_object(path)


@contextmanager
def _explain_missing_run(path: Path) -> Iterator[None]:
    advice = "name a run folder, such as runs/train_ddp/17"
    with explain_os_error(f"{path}: cannot be read", advice, ValueError):
        try:
            yield
        except FileNotFoundError as error:
            raise HpctrainError(f"{path.parent}: no run folder, it has no {path.name}: {advice}") from error


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file that a run does without: {} if it is not there, or damaged."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def read_metrics(run: Path, tail: int | None = None) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, or of its last `tail` bytes; [] if the file cannot be read.

    Skips incomplete lines, values that is_number() refuses, and too long or unprintable names.
    """
    try:
        return _read_lines(run, tail)
    except OSError:
        return []


def load_metrics(run: Path) -> list[dict[str, float]]:
    """As read_metrics(). Raises HpctrainError if the file cannot be read."""
    with _explain_missing_run(run / "metrics.jsonl"):
        return _read_lines(run)


def require_metrics(run: Path) -> list[dict[str, float]]:
    """As load_metrics(). Raises HpctrainError also if there is no line."""
    if not (lines := load_metrics(run)):
        raise HpctrainError(f"{run}/metrics.jsonl has no line yet: wait for the first, or leave this run out")
    return lines


def _read_lines(run: Path, tail: int | None = None) -> list[dict[str, float]]:
    with open_plain(run / "metrics.jsonl") as file:
        if tail is not None and file.seek(0, os.SEEK_END) > tail:
            file.seek(-tail, os.SEEK_END)
            content = file.read(tail).partition(b"\n")[2]
        else:
            file.seek(0)
            content = read_whole(file)
    return [line for line in map(read_line, content.splitlines()) if line]


def read_line(text: bytes) -> dict[str, float]:
    """The numbers in a line of metrics.jsonl; {} if it is incomplete or damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(line, dict):
        return {}
    line = {name: value for name, value in line.items() if _is_metric(name, value)}
    return line if {"epoch", "step"} <= line.keys() else {}


def _is_metric(name: str, value: object) -> bool:
    if not is_number(value):
        return False
    if name in POSITION:
        return math.isfinite(value)
    return name.isprintable() and len(name) <= MAX_NAME_LENGTH


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a chart can draw a value of JSON. NaN and infinity count: a run that diverged has them."""
    return (isinstance(value, int) and abs(value) < 2**63) or (
        isinstance(value, float) and not MAX_VALUE < abs(value) < math.inf
    )


def losses_and_scores(line: dict[str, float]) -> list[str]:
    """The losses and scores in a line of metrics. Of a line about steps, which has a speed, the losses."""
    of_steps = "examples_per_s" in line
    names = [name for name in line if name not in NOT_SCORES and "/" not in name]
    return [name for name in names if is_loss(name) or not of_steps]


def points(lines: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
    """The steps and values of a metric. If a step occurs twice, in a resumed run, the last value counts."""
    return sorted({line["step"]: line[name] for line in lines if name in line}.items())


def _score(lines: list[dict[str, float]]) -> tuple[str | None, float | None]:
    """The first score of the last line with a score; it selects the best epoch. Otherwise the last loss."""
    found = [(name, line[name]) for line in reversed(lines) for name in losses_and_scores(line)]
    return min(found, key=lambda item: (is_loss(item[0]), item[0] == "train_loss"), default=(None, None))


def best_line(lines: list[dict[str, float]]) -> tuple[str, dict[str, float]] | None:
    """The score that selects checkpoints, and the line of its best value; None if only losses are measured.

    The evaluations are counted anew as the run has counted them, with the loss as the second score. Where
    there is a validation set, it selects, and the test set comes after that.
    """
    validations = [line for line in lines if any(name.startswith("validation_") for name in line)]
    name, _ = _score(validations or lines)
    if name is None or is_loss(name):
        return None
    sign, loss = (-1 if name.endswith("perplexity") else 1), f"{name.partition('_')[0]}_loss"
    best, chosen = Best(), None
    for line in lines:
        if name in line and not math.isnan(line[name]):
            score = sign * line[name], -line.get(loss, 0.0)
            chosen = line if best.add(int(line["epoch"]), int(line["step"]), score) else chosen
    return (name, chosen) if chosen else None


def summarize(run: Path) -> dict[str, Any]:
    """A table row: state, job, position, score, speed, start, image of a run. Raises HpctrainError."""
    configs = read_configs(run)
    last = configs[-1]
    lines, state = read_metrics(run, TAIL), _state(run, _started(last))
    score, value = _score(lines)
    return {
        "run": str(run),
        "state": state,
        "trainer": configs[0].get("trainer"),
        "job": last.get("job"),
        "starts": len(configs),
        "epoch": lines[-1]["epoch"] if lines else 0,
        "epochs": last["options"].get("epochs"),
        "step": lines[-1]["step"] if lines else 0,
        "score": score,
        "value": value,
        "examples_per_s": _speed(run, state, lines),
        "started": configs[0].get("started"),
        "image_digest": last.get("image_digest"),
    }


def _state(run: Path, begun: float) -> str:
    """running, finished, pruned or diverged (in a sweep), or stopped: work is left, and no job does it."""
    try:
        if time.time() - (run / "owner.json").stat().st_mtime < SIGN_OF_LIFE:
            return "running"
    except OSError:
        pass
    for name in (PRUNED, DIVERGED):
        if (run / name).exists():
            return Path(name).stem
    try:
        finished = (run / "result.json").stat().st_mtime
    except OSError:
        return "stopped"
    return "finished" if finished >= begun else "stopped"  # resumed for more epochs since


def _speed(run: Path, state: str, lines: list[dict[str, float]]) -> float | None:
    """The examples per second: of the whole run if it is finished, else between its last lines of metrics."""
    if state == "finished":
        with suppress(HpctrainError):
            speed = read_json(run / "result.json").get("speed")
            if isinstance(speed, dict) and is_number(speed.get("examples_per_s")):
                return speed["examples_per_s"]
    return next((line["examples_per_s"] for line in reversed(lines) if "examples_per_s" in line), None)
