"""hpctrain export: the metrics of a run for other tools, each step once however often its job was started."""

import csv
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from hpctrain import atomic
from hpctrain.cli import Parser
from hpctrain.errors import HpctrainError, first_line
from hpctrain.runs import read_configs, read_metrics, summarize
from hpctrain.world import World


def steps(run: Path) -> list[dict[str, float]]:
    """The metrics of each step, in order; of a step that was repeated after a restart, the last ones. Raises HpctrainError."""
    read_configs(run)  # names the folder that is no run
    merged: dict[float, dict[str, float]] = {}
    for line in read_metrics(run):
        merged.setdefault(line["step"], {}).update(line)
    if not merged:
        raise HpctrainError(f"{run}/metrics.jsonl has no line yet: wait for the first, or leave this run out")
    return [merged[step] for step in sorted(merged)]


def to_csv(run: Path) -> str:
    """Write metrics.csv: a row for each step, a column for each metric; returns what to do with it."""
    rows = steps(run)
    columns = list(dict.fromkeys(["epoch", "step", *(name for row in rows for name in row)]))
    with atomic.file(run / "metrics.csv") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return f"{run}/metrics.csv"


def to_wandb(run: Path) -> str:
    """Write an offline run of Weights & Biases; returns the command that uploads it.

    Its id comes from config.json, so that a later export of the same run replaces the earlier one at W&B.
    """
    # Nothing of this process, its machine or its folder goes into the run, and nothing over the network.
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    try:
        import wandb
    except ImportError as error:
        raise HpctrainError(f"wandb cannot be imported ({error}): run this in the image, or pip install wandb") from error
    rows, configs, summary = steps(run), read_configs(run), summarize(run)
    identity = hashlib.sha256((run / "config.json").read_bytes()).hexdigest()[:16]
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, save_code=False,
        x_disable_machine_info=True, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
    )  # fmt: skip
    last = configs[-1]
    config = {**last["options"], **{name: last.get(name) for name in ("world", "job", "image_digest", "revision")}}
    config["resumed_at"] = [each["resumed_at"] for each in configs[1:] if "resumed_at" in each]
    with atomic.folder(run / "wandb") as folder:
        try:
            logged = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "hpctrain"), dir=folder, id=identity, config=config,
                name=f"{summary['trainer']} {summary['job']}", job_type=str(summary["trainer"]), settings=settings,
            )  # fmt: skip
            for row in rows:
                logged.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))
            logged.summary.update(_result(run))
            logged.finish()
        except wandb.Error as error:
            raise HpctrainError(f"{run}: wandb could not write its files ({first_line(error)}): see its message above") from error
        (written,) = folder.glob("wandb/offline-run-*")
        name = written.name
        written.rename(folder / name)
        for other in (folder / "wandb").iterdir():  # links to logs
            other.unlink()
        (folder / "wandb").rmdir()
    return f"wandb sync {run}/wandb/{name}"


def _result(run: Path) -> dict[str, Any]:
    """The numbers of result.json, if the run has ended."""
    try:
        content = json.loads((run / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in content.items() if isinstance(value, (int, float, str))}


FORMATS = {"csv": to_csv, "wandb": to_wandb}


def parser() -> Parser:
    """The options of `hpctrain export`."""
    parser = Parser(prog="hpctrain export", description="Write the metrics of runs for other tools, into their run folders.")
    parser.add_argument("format", choices=[*FORMATS], help="csv: metrics.csv; wandb: an offline run for wandb sync")
    parser.add_argument("run", type=Path, nargs="+", help="run folder, such as runs/train_ddp/17")
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Write the files of each run, and print their paths or what uploads them. Raises HpctrainError."""
    args = parser().parse_args(arguments)
    for run in args.run:
        try:
            print(FORMATS[args.format](run), flush=True)
        except OSError as error:
            raise HpctrainError(f"{run}: cannot be written ({error.strerror}): copy the run folder to one of your own") from error
