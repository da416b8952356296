"""The lines of a run's metrics."""

import json
import os

import pytest

from hpctrain.files import atomic
from hpctrain.run.metrics import Metrics, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (99, "99 s"),
        (100, "2 min"),
        (5900, "98 min"),
        (6000, "1 h 40 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_a_time_as_people_say_it(seconds, text):
    assert format_seconds(seconds) == text


def test_a_file_whose_handle_is_lost_is_opened_again(tmp_path, monkeypatch, capsys):
    """After a server of NFS has lost it, every write to an open file fails."""
    monkeypatch.setattr(atomic, "RETRY_EVERY", 0.05)
    metrics = Metrics(tmp_path)
    metrics.add({"step": 1}, {})
    lost = os.open("/dev/full", os.O_WRONLY)
    os.dup2(lost, metrics._file.fileno())
    metrics.add({"step": 2}, {})
    metrics.close()
    os.close(lost)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "metrics.jsonl: cannot be written" in capsys.readouterr().out
