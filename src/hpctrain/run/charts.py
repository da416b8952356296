"""The losses and scores of a run over its steps, as a picture; and what all pictures share."""

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.files import atomic
from hpctrain.run.best import is_loss
from hpctrain.run.reader import best_line, load_metrics, losses_and_scores, points
from hpctrain.text import one_line, reason, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# For the color-blind, too, on light and dark pages: M. Okabe, K. Ito, "Color Universal Design" (2008).
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
MAX_METRICS = 100  # each takes a tenth of a second or more


def plot(folder: Path) -> Path:
    """Draw curves.png in a run folder; returns its path. Raises HpctrainError if there are no metrics."""
    with folder_for_matplotlib():
        return _draw(folder)


def try_to_plot(folder: Path) -> None:
    """Draw curves.png at the end of a run, or print why not: a run must not lose its result then."""
    try:
        plot(folder)
    except Exception as error:  # also matplotlib's own
        command = f"hpctrain plot {shlex.quote(str(folder))}"
        say(f"hpctrain: curves.png is not drawn ({reason(error)}): see {command}")


def plain(text: str) -> str:
    """A name for matplotlib, which takes text between two $ as a formula and refuses lone surrogates."""
    return one_line(text).replace("$", r"\$")


def the_first(names: list[str]) -> list[str]:
    """The first MAX_METRICS names. Prints a line if there are more."""
    if len(names) > MAX_METRICS:
        print(
            f"hpctrain: the first {MAX_METRICS} of {len(names):,} metrics are drawn; "
            "hpctrain export csv has all",
            flush=True,
        )
    return names[:MAX_METRICS]


@contextmanager
def folder_for_matplotlib() -> Iterator[None]:
    """Give matplotlib an empty folder for its cache: the home may be read-only, or part of the image.

    Pictures look the same everywhere: matplotlib would obey a matplotlibrc of the current folder.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-matplotlib.") as folder:
        own = "MPLCONFIGDIR" not in os.environ
        os.environ.setdefault("MPLCONFIGDIR", folder)
        try:
            import matplotlib

            matplotlib.rcdefaults()
            yield
        finally:
            if own:
                del os.environ["MPLCONFIGDIR"]


def make_charts(count: int, title: str = "", **options: Any) -> tuple["Figure", list[Any]]:
    """A figure with a title and `count` empty charts, at most three in a row; `options` of subplots()."""
    from matplotlib.figure import Figure  # pyplot would keep every figure in memory

    across = min(3, count)
    down = -(-count // across)
    figure = Figure(figsize=(5.6 * across, 3.2 * down + 0.5), layout="constrained")
    if title:
        figure.suptitle(plain(title))
    axes = [*figure.subplots(down, across, squeeze=False, **options).flat]
    for axis in axes[:count]:
        axis.grid(alpha=0.3)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def _draw(folder: Path) -> Path:
    lines = load_metrics(folder)
    figure, axes = make_charts(2, str(folder))
    found = dict.fromkeys(name for line in lines for name in losses_and_scores(line))
    names = the_first([*found])
    for axis, of_loss, title in zip(axes, (True, False), ("loss", "score"), strict=True):
        for name in names:
            if is_loss(name) != of_loss:
                continue
            axis.plot(
                *zip(*points(lines, name), strict=True),
                label=plain(name.replace("_", " ")),
                marker=None if name == "train_loss" else "o",
            )
        axis.set(xlabel="step", title=title)
        if axis.has_data():
            axis.legend(loc="upper right" if of_loss else "lower right")
    if best := best_line(lines):
        name, line = best
        axes[1].plot([line["step"]], [line[name]], "*", markersize=14, label="best")
        axes[1].set_title(plain(f"best {name.replace('_', ' ')} {line[name]:.4f} in epoch {line['epoch']:g}"))
        axes[1].legend(loc="lower right")
    path = folder / "curves.png"
    save_picture(figure, path)
    return path


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG. Raises OSError."""
    with atomic.file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)
