"""The picture of a run."""

import os
import signal

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.run import charts, reader
from tests.helpers import make_run


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe", r"run/metrics.jsonl: cannot be read \(not a plain file"),
        ("huge", r"run/metrics.jsonl: cannot be read \(File too large"),
        ("none", "run: no run folder, it has no metrics.jsonl"),
    ],
)
def test_metrics_that_cannot_be_read_are_one_line(tmp_path, kind, reason):
    """A pipe never ends, and a picture of nothing would be useless."""
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    if kind == "pipe":
        os.mkfifo(folder / "metrics.jsonl")
    if kind == "huge":
        with (folder / "metrics.jsonl").open("wb") as file:
            file.truncate(2**42)
    signal.alarm(60)  # a reader of a pipe waits for its writer
    with pytest.raises(HpctrainError, match=reason):
        charts.plot(folder)
    signal.alarm(0)


def test_the_best_is_that_of_the_checkpoints():
    """The lower loss of equal scores, then the first; the score that the run selects by."""
    rows = [(1, 0.5, 0.9), (2, 0.7, 0.5), (3, 0.7, 0.4), (4, 0.7, 0.4), (5, 0.6, 0.1)]
    lines = [
        {"epoch": epoch, "step": epoch, "validation_accuracy": score, "validation_loss": loss}
        for epoch, score, loss in rows
    ]
    name, line = reader.best_line(lines)
    assert (name, line["epoch"]) == ("validation_accuracy", 3)
    assert reader.best_line([{"epoch": 1, "step": 1, "test_loss": 1.0}]) is None


def test_the_validation_set_selects_and_not_the_test_set():
    lines = [{"epoch": n, "step": n, "validation_f1": value} for n, value in ((1, 0.5), (2, 0.9), (3, 0.7))]
    name, line = reader.best_line([*lines, {"epoch": 3, "step": 3, "test_f1": 0.6, "test_loss": 1.0}])
    assert (name, line["epoch"]) == ("validation_f1", 2)


def test_the_best_perplexity_is_the_lowest():
    lines = [
        {"epoch": epoch, "step": epoch, "validation_loss": 1.0, "validation_perplexity": value}
        for epoch, value in ((1, 9.0), (2, 5.0), (3, 7.0))
    ]
    name, line = reader.best_line(lines)
    assert (name, line["epoch"]) == ("validation_perplexity", 2)
