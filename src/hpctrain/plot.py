"""hpctrain plot: the losses and scores of a run over its steps, as a picture."""

import json
import os
from pathlib import Path

from hpctrain import atomic
from hpctrain.cli import Parser
from hpctrain.errors import HpctrainError
from hpctrain.world import World

# The entries of a line of metrics that are neither losses nor scores.
NOT_PLOTTED = {"epoch", "step", "seconds", "learning_rate", "examples_per_s"}


def plot(folder: Path) -> Path:
    """Draw curves.png in a run folder; returns its path. Raises HpctrainError if there are no metrics."""
    os.environ.setdefault("MPLCONFIGDIR", str(Path(os.environ.get("TMPDIR", "/tmp")) / f"matplotlib-{os.getuid()}"))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise HpctrainError(
            f"{folder}/metrics.jsonl cannot be read ({error}): give a run folder, such as runs/train_ddp/17"
        ) from error
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    names = dict.fromkeys(name for line in lines for name in line if name not in NOT_PLOTTED and "/" not in name)
    for axis, of_loss, title in zip(axes, (True, False), ("loss", "score"), strict=True):
        for name in names:
            if name.endswith("_loss") != of_loss:
                continue
            # A resumed run repeats some steps; the last value of a step counts.
            points = sorted({line["step"]: line[name] for line in lines if name in line}.items())
            axis.plot(*zip(*points, strict=True), label=name.replace("_", " "), marker=None if name == "train_loss" else "o")
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right" if of_loss else "lower right")
    if "test_accuracy" in names:
        best = max((line.get("test_accuracy", 0.0), line["epoch"]) for line in lines)
        axes[1].set_title(f"accuracy: best {best[0]:.4f} after epoch {best[1]}")
    figure.suptitle(str(folder))
    path = folder / "curves.png"
    with atomic.file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)
    pyplot.close(figure)
    return path


def parser() -> Parser:
    """The options of `hpctrain plot`."""
    parser = Parser(prog="hpctrain plot", description="Draw the losses and scores of a run over its steps as curves.png.")
    parser.add_argument("run", type=Path, help="run folder, such as runs/train_ddp/17")
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Draw curves.png and print its path."""
    print(plot(parser().parse_args(arguments).run))
