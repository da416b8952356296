"""hpctrain runs: a table of the run folders below a folder."""

import json
from pathlib import Path
from typing import Any

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.parser import Parser
from hpctrain.run.reader import find, summarize
from hpctrain.text import table


def describe_runs(rows: list[dict[str, Any]]) -> str:
    """The rows as lines of text, the run that started last at the end."""
    cells = [("RUN", "STATE", "JOB", "EPOCH", "STEP", "SCORE", "EXAMPLES/S", "STARTED", "IMAGE")]
    for row in sorted(rows, key=lambda row: str(row["started"])):
        cells.append(
            (
                row["run"],
                row["state"],
                str(row["job"]) + (f" ({row['starts']} starts)" if row["starts"] > 1 else ""),
                f"{row['epoch']}/{row['epochs'] or '?'}",
                str(row["step"]),
                format_score(row) or "-",
                f"{row['examples_per_s']:.4g}" if row["examples_per_s"] else "-",
                format_start(row),
                str(row["image_digest"] or "-").removeprefix("sha256:")[:12],
            )
        )
    return table(cells)


def format_score(row: dict[str, Any]) -> str:
    """The name and the value of a run's score; "" if it has none."""
    return f"{row['score']} {row['value']:.4g}" if row["score"] else ""


def format_start(row: dict[str, Any]) -> str:
    """The date and the time to the minute at which a run was started first."""
    return str(row["started"])[:16].replace("T", " ")


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain runs",
        description="List the run folders below a folder: state, position, score, speed.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        default=Path("runs"),
        help="where to look (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the whole digest of each image")
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Print the table. Raises HpctrainError if there is no run folder."""
    args = parser().parse_args(arguments)
    rows = [summarize(run) for run in find(args.folder)]
    if not rows:
        problem = "no run folder in it that you can read" if args.folder.exists() else "no such folder"
        raise HpctrainError(f"{args.folder}: {problem}: name the folder of your runs")
    print(json.dumps(rows, indent=2) if args.json else describe_runs(rows))
