"""The picture of a run."""

import os
import signal

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.run import charts
from tests.helpers import make_run


@pytest.mark.parametrize(
    ("kind", "reason"), [("pipe", "not a plain file"), ("huge", "File too large"), ("none", "No such file")]
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
    with pytest.raises(HpctrainError, match=rf"metrics.jsonl cannot be read \({reason}"):
        charts.plot(folder)
    signal.alarm(0)
