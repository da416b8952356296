"""hpctrain report: runs side by side on one HTML page that needs no network, or in one picture."""

import html
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.commands.runs import format_score, format_start
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError, explain_os_error
from hpctrain.files import atomic
from hpctrain.parser import Parser
from hpctrain.run.best import is_loss
from hpctrain.run.charts import COLORS, folder_for_matplotlib, make_charts, plain, save_picture, the_first
from hpctrain.run.metrics import format_seconds
from hpctrain.run.reader import (
    MEASURED,
    NOT_SCORES,
    best_line,
    find,
    is_number,
    points,
    read_configs,
    read_metrics,
    require_metrics,
    summarize,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Drawn in place of the color of the page's text, and then replaced by "currentColor", which matplotlib lacks.
TEXT = "#010203"
FIRST = ("train_loss", "test_loss")  # of the charts; those of scores come next, and last what is measured
TITLES = {"peak_memory_mb": "peak memory (MB)", "gpu_percent": "GPU use (%)"}

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 1800px; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1.05rem; margin-top: 1.5rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{
  padding: .2rem .8rem .2rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid #8884;
}}
.charts {{
  display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 350px), 1fr));
}}
.charts svg {{ width: 100%; height: auto; }}
.color {{ display: inline-block; width: .8rem; height: .8rem; border-radius: 50%; margin-right: .4rem; }}
</style>
<h1>{title}</h1>
<div class="wide">{runs}</div>
<h2>Curves</h2>
<p>Over optimizer steps. A star marks the best score, a dotted line where a run was resumed.</p>
<div class="charts">{charts}</div>
<h2>Differences</h2>
{differences}
"""


class Content(NamedTuple):
    """A run in a report: `row` of hpctrain runs, `configs` (one per start), `lines` of its metrics."""

    row: dict[str, Any]
    configs: list[dict[str, Any]]
    lines: list[dict[str, float]]


def read(run: Path) -> Content:
    """Read a run folder. Raises HpctrainError if the folder is not one of a run, or has no metrics yet."""
    return Content(summarize(run), read_configs(run), require_metrics(run))


def metric_names(runs: list[Content]) -> list[str]:
    """The metrics that get a chart, in order. "score/part", a detail of a score, gets none."""
    found = dict.fromkeys(name for run in runs for line in run.lines for name in line if "/" not in name)
    scores = [name for name in found if name not in NOT_SCORES and name not in FIRST]
    return the_first([name for name in (*FIRST, *scores, *MEASURED) if name in found])


def draw(axis: "Axes", runs: list[Content], name: str) -> None:
    """Draw a metric of all runs over the steps, and a star at the best value of the score that selects."""
    for number, run in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        found = [(step, value) for step, value in points(run.lines, name) if math.isfinite(value)]
        if found:
            steps, values = zip(*found, strict=True)
            marker, label = "o" if len(found) < 30 else None, plain(run.row["run"])
            axis.plot(steps, values, color=color, marker=marker, markersize=3, label=label)
        if (best := best_line(run.lines)) and best[0] == name:
            axis.plot([best[1]["step"]], [best[1][name]], "*", color=color, markersize=11)
        for config in run.configs[1:]:
            if is_number(config.get("resumed_at")):
                axis.axvline(config["resumed_at"], color=color, linestyle=":", linewidth=2)
    axis.set(xlabel="step", title=TITLES.get(name, plain(name.replace("_", " "))))
    every = [value for run in runs for _, value in points(run.lines, name)]
    if is_loss(name) and 0 < 20 * min(every) < max(every) < math.inf:
        axis.set_yscale("log")


def chart(runs: list[Content], name: str) -> str:
    """The chart of a metric as an SVG element, in the colors of the page."""
    from matplotlib import rc_context

    settings = rc_context(
        {
            "text.color": TEXT,
            "axes.labelcolor": TEXT,
            "axes.edgecolor": TEXT,
            "xtick.color": TEXT,
            "ytick.color": TEXT,
            "grid.color": "gray",
            "svg.fonttype": "none",  # text instead of paths
            "svg.hashsalt": name,  # no two charts of a page may give their parts the same ids
        }
    )
    with settings:
        figure, (axis,) = make_charts(1)
        draw(axis, runs, name)
        if len(runs) > 1:
            axis.legend(fontsize="small", framealpha=0)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = svg.replace(TEXT, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(name)}"', 1)


def format_best(run: Content) -> str:
    """The best score of a run and its epoch; the last loss if a run has no score."""
    if not (best := best_line(run.lines)):
        return format_score(run.row)
    name, line = best
    return f"{name} {line[name]:.4g} in epoch {line['epoch']:g}"


def differences(runs: list[Content]) -> list[tuple[str, ...]]:
    """Rows of a fact that differs between runs, such as an option or version, and its value in each run."""
    facts = []
    for run in runs:
        config = run.configs[-1]
        own = {
            f"--{name.replace('_', '-')}": value
            for name, value in config["options"].items()
            if name not in ("out", "resume")
        }
        own |= {f"{name} (version)": value for name, value in (config.get("versions") or {}).items()}
        own |= {name: config.get(name) for name in ("trainer", "device", "image_digest", "revision")}
        world = config.get("world") or {}
        facts.append(
            own | {"ranks": world.get("size"), "nodes": world.get("nodes"), "launcher": world.get("launcher")}
        )
    names = dict.fromkeys(name for own in facts for name in own)
    rows = [(name, *(str(own.get(name, "")) for own in facts)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def page(runs: list[Content]) -> str:
    """The report as HTML."""
    rows = []
    for number, run in enumerate(runs):
        row, color = run.row, COLORS[number % len(COLORS)]
        position = f"epoch {row['epoch']}/{row['epochs']}, step {row['step']}"
        time = format_seconds(run.lines[-1].get("seconds", 0))
        cells = [row["state"], row["job"], position, format_best(run), time, format_start(row)]
        cells.append(row["image_digest"] or "")
        mark = f'<span class="color" style="background:{color}"></span>'
        rows.append([mark + html.escape(row["run"]), *(html.escape(str(cell)) for cell in cells)])
    heads = ("run", "state", "job", "position", "best", "time", "started", "image")
    unequal = differences(runs)
    if len(runs) == 1:
        text = "<p>There is only one run.</p>"
    elif not unequal:
        text = "<p>None: options, versions, image and ranks are the same.</p>"
    else:
        text = _table(
            ["", *(html.escape(run.row["run"]) for run in runs)],
            [[html.escape(cell) for cell in row] for row in unequal],
        )
    title = "Runs" if len(runs) > 1 else str(runs[0].row["run"])
    return PAGE.format(
        title=html.escape(title),
        runs=_table(heads, rows),
        charts="\n".join(chart(runs, name) for name in metric_names(runs)),
        differences=f'<div class="wide">{text}</div>',
    )


def _table(heads: Sequence[str], rows: list[list[str]]) -> str:
    """A table as HTML, of cells that are HTML already."""
    lines = ["".join(f"<th>{head}</th>" for head in heads)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def picture(runs: list[Content]) -> "Figure":
    """The charts of the report as one figure, with a legend."""
    from matplotlib.lines import Line2D

    names = metric_names(runs)
    figure, axes = make_charts(len(names))
    for axis, name in zip(axes, names, strict=True):
        draw(axis, runs, name)
    marks = [Line2D([], [], color=COLORS[number % len(COLORS)]) for number in range(len(runs))]
    figure.legend(marks, [plain(run.row["run"]) for run in runs], loc="outside upper left", ncols=3)
    return figure


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain report", description="Compare runs on one HTML page, which needs no network."
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        nargs="+",
        help="run folder, such as runs/train_ddp/17, or a folder of runs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="file to write, .html or .png (default: %(default)s)",
    )
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Write the report, and print its path. Raises HpctrainError."""
    args = parser().parse_args(arguments)
    if args.out.suffix not in (".html", ".png"):
        raise UsageError(f"--out {args.out}: give a name that ends in .html or .png")
    runs = [read(run) for given in args.run for run in [*filter(read_metrics, find(given))] or [given]]
    with (
        explain_os_error(f"{args.out}: cannot be written", "use --out to name another file"),
        folder_for_matplotlib(),
    ):
        if args.out.suffix == ".png":
            save_picture(picture(runs), args.out)
        else:
            # A name may hold half of a character, which UTF-8 cannot encode.
            text = page(runs).encode(errors="backslashreplace").decode()
            atomic.write_text(args.out, text)
    print(args.out)
