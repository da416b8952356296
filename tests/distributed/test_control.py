"""What a rank writes for the launch script; tests/launch/test_requeue.py has the other side."""

from pathlib import Path

import pytest

from hpctrain.distributed import control


def test_a_rank_reports_to_the_folder_of_its_job(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CONTROL", str(tmp_path))
    assert not control.stop_requested()
    control.report_saved(Path("runs/a b"))
    assert (tmp_path / "saved").read_text() == "--resume 'runs/a b'\n"
    control.report_saved(None)
    control.report_stopped()
    control.report_failed()
    control.report_training.cache_clear()
    control.report_training()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("saved", "stopped", "failed", "trains", "polled"), ""
    )
    (tmp_path / "stop").touch()
    assert control.stop_requested()


@pytest.mark.parametrize("name", [None, "", "missing", "/missing"])
def test_without_a_folder_on_this_node_nothing_happens(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name is None:
        monkeypatch.delenv("HPCTRAIN_CONTROL", raising=False)
    else:
        monkeypatch.setenv("HPCTRAIN_CONTROL", name)
    control.report_failed()
    assert not control.stop_requested() and list(tmp_path.iterdir()) == []
