"""hpctrain scaling: how the throughput of a trainer grows with its ranks, as a table, JSON and a picture."""

import json
import math
from pathlib import Path
from typing import Any

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files import atomic
from hpctrain.parser import Parser
from hpctrain.run.charts import folder_for_matplotlib, make_charts, plain, save_picture
from hpctrain.run.reader import find, is_number, read_configs, read_json
from hpctrain.text import one_line, say, table

COLUMNS = {
    "strategy": "STRATEGY", "launcher": "LAUNCHER", "nodes": "NODES", "ranks": "RANKS", "devices": "DEVICES",
    "batch_size": "BATCH", "step_ms": "STEP (MS)", "examples_per_s": "EXAMPLES/S", "speedup": "SPEEDUP",
    "efficiency": "EFFICIENCY", "seconds": "RUNTIME (S)",
}  # fmt: skip
# Of trainers without an option for it
STRATEGIES = {"train_horovod": "horovod", "train_lightning": "ddp"}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """A row of COLUMNS for each finished run in a folder, in the order of strategies, launchers and devices.

    Speedup and efficiency compare with the run of the same strategy and launcher that has the fewest devices,
    or with a run on one device, where neither matters: examples per second, and those per second and device.
    The comparison holds for strong scaling (one batch size) and for weak scaling (one batch size per device).
    Raises HpctrainError.
    """
    rows = [row for run in find(folder) if (row := read_row(run))]
    if not rows:
        raise HpctrainError(
            f"{folder}: no run with a result in it: submit them with launch/scaling.sh and wait for their end"
        )
    rows.sort(key=lambda row: (*curve_of(row), row["devices"]))
    single = {row["trainer"]: row for row in rows if row["devices"] == 1}
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        base = first.setdefault(curve_of(row), row)
        if row["trainer"] != base["trainer"]:
            raise HpctrainError(
                f"{row['run']} is of {row['trainer']} and another run with {row['launcher']} of "
                f"{base['trainer']}: compare runs of one trainer, as launch/scaling.sh makes them"
            )
        if base["devices"] > 1:
            base = single.get(row["trainer"], base)
        row["speedup"] = row["examples_per_s"] / base["examples_per_s"]
        row["efficiency"] = row["speedup"] * base["devices"] / row["devices"]
    return rows


def curve_of(row: dict[str, Any]) -> tuple[str, str]:
    """The strategy and the launcher, of which a curve is."""
    return row["strategy"], row["launcher"]


def read_row(run: Path) -> dict[str, Any] | None:
    """What a run folder itself says; None, and a line, if it has no result yet. Raises HpctrainError."""
    config = read_configs(run)[-1]
    result = read_json(run / "result.json") if (run / "result.json").exists() else {}
    speed = result.get("speed")
    if not speed or "examples_per_s" not in speed:
        say(f"{run}: left out, as it has no result yet")
        return None
    try:
        world = World(**config["world"])
        options = config["options"]
        strategy = options.get("strategy") or STRATEGIES.get(str(config.get("trainer")), "-")
        row = {
            "strategy": one_line(strategy),
            "launcher": one_line(world.launcher_command),
            "nodes": world.nodes,
            "ranks": world.size,
            "devices": config.get("devices", world.size),
            "batch_size": options.get("batch_size"),
            "step_ms": speed["step_ms_p50"],
            "examples_per_s": speed["examples_per_s"],
            "seconds": result.get("seconds", 0.0),
        }
        numbers = (row[name] for name in ("ranks", "nodes", "devices", "step_ms", "examples_per_s"))
        valid = all(is_number(value) and 0 < value < math.inf for value in numbers)
        valid = valid and type(row["batch_size"]) in (int, type(None)) and is_number(row["seconds"])
    except (AttributeError, KeyError, TypeError):
        valid = False
    if not valid:
        raise HpctrainError(
            f"{run}: config.json or result.json is not of hpctrain: remove this run, or move it elsewhere"
        )
    return row | {"trainer": config.get("trainer"), "run": str(run)}


def describe(rows: list[dict[str, Any]]) -> str:
    """Whether the runs are strong or weak scaling, by their batch sizes."""
    if len({row["batch_size"] for row in rows}) == 1:
        return f"strong scaling: {rows[0]['batch_size']} examples in a step"
    per_rank = {(row["batch_size"] or 0) / row["devices"] for row in rows}
    if len(per_rank) == 1:
        return f"weak scaling: {per_rank.pop():g} examples in a step of a device"
    return "different batch sizes"


def format_cell(name: str, value: Any) -> str:
    if name == "efficiency":
        return f"{value:.1%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Throughput and efficiency over the devices, a line for each curve_of(), with the ideal."""
    figure, axes = make_charts(2, title)
    for curve in dict.fromkeys(map(curve_of, rows)):
        own, label = [row for row in rows if curve_of(row) == curve], plain(" ".join(curve))
        devices = [row["devices"] for row in own]
        (line,) = axes[0].plot(devices, [row["examples_per_s"] for row in own], "o-", label=label)
        ideal = [row["examples_per_s"] / row["efficiency"] for row in own]
        axes[0].plot(devices, ideal, "--", color=line.get_color(), alpha=0.5, label=f"{label}, ideal")
        axes[1].plot(devices, [100 * row["efficiency"] for row in own], "o-", label=label)
    axes[0].set(xscale="log", yscale="log", ylabel="examples/s")
    axes[1].set(xscale="log", ylabel="efficiency (%)", ylim=(0, None))
    ticks = sorted({row["devices"] for row in rows})
    for axis in axes:
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.minorticks_off()
        axis.set_xlabel("devices")
        axis.legend()
    save_picture(figure, path)


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain scaling",
        description="Compare runs on 1, 2, 4, ... ranks: throughput, speedup, efficiency.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder with the runs, as launch/scaling.sh makes it"
    )
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Print the table; write scaling.json and scaling.png into the folder. Raises HpctrainError."""
    folder = parser().parse_args(arguments).folder
    rows = read_rows(folder)
    title = f"{folder}: {describe(rows)}"
    cells = [[format_cell(name, row[name]) for name in COLUMNS] for row in rows]
    print(one_line(title), table([[*COLUMNS.values()], *cells], str.rjust), sep="\n")
    with explain_os_error(f"{folder}: cannot be written", "copy it to a folder of your own"):
        atomic.write_text(folder / "scaling.json", json.dumps(rows, indent=2) + "\n")
        with folder_for_matplotlib():
            draw(rows, title, folder / "scaling.png")
    say(f"scaling.json and scaling.png are in {folder}")
