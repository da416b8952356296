"""hpctrain export: the metrics of a run for other tools, each step once however often its job was started."""

import csv
import shlex
from pathlib import Path

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files import atomic
from hpctrain.parser import Parser
from hpctrain.run.reader import read_configs, require_metrics
from hpctrain.run.wandb import folder_for_wandb, result_numbers, start_wandb
from hpctrain.text import first_line, say


def steps(run: Path) -> list[dict[str, float]]:
    """The metrics of each step, in order; of a repeated step the last. Raises HpctrainError."""
    read_configs(run)  # raises for a folder that is not one of a run
    merged: dict[float, dict[str, float]] = {}
    for line in require_metrics(run):
        merged.setdefault(line["step"], {}).update(line)
    return [merged[step] for step in sorted(merged)]


def to_csv(run: Path) -> str:
    """Write metrics.csv: a row for each step, a column for each metric; returns its path."""
    rows = steps(run)
    columns = list(dict.fromkeys(["epoch", "step", *(name for row in rows for name in row)]))
    with atomic.file(run / "metrics.csv") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        # A spreadsheet would compute such a name as a formula.
        writer.writerow({name: f"'{name}" if name[:1] in {*"=+-@"} else name for name in columns})
        writer.writerows(rows)
    return f"{run}/metrics.csv"


def to_wandb(run: Path) -> str:
    """Write an offline run of Weights & Biases; returns the command that uploads it.

    Its id comes from config.json, so that a later export of the same run replaces the earlier one at W&B.
    """
    rows = steps(run)
    with folder_for_wandb(), atomic.folder(run / "wandb") as folder:
        try:
            logged = start_wandb(run, folder, "offline")
            for row in rows:
                step = row.pop("step")
                logged.log(row, step=int(step))
            logged.summary.update(result_numbers(run))
            logged.finish()
        except HpctrainError:
            raise
        except Exception as error:  # wandb.Error
            raise HpctrainError(
                f"{run}: wandb could not write its files ({first_line(error)}): see its message above"
            ) from error
        (written,) = folder.glob("wandb/offline-run-*")
        name = written.name
        written.rename(folder / name)
        for other in (folder / "wandb").iterdir():  # links to logs
            other.unlink()
        (folder / "wandb").rmdir()
    return f"wandb sync {shlex.quote(f'{run}/wandb/{name}')}"


FORMATS = {"csv": to_csv, "wandb": to_wandb}


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain export",
        description="Write the metrics of runs for other tools, into their run folders.",
    )
    parser.add_argument(
        "format", choices=[*FORMATS], help="csv: metrics.csv; wandb: an offline run for wandb sync"
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", nargs="+", help="run folder, such as runs/train_ddp/17"
    )
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Write the files of each run, and print their paths or what uploads them. Raises HpctrainError."""
    args = parser().parse_args(arguments)
    for run in args.run:
        with explain_os_error(f"{run}: cannot be written", "copy the run folder to one of your own"):
            say(FORMATS[args.format](run))
