"""hpctrain plot."""

import os
from pathlib import Path

import pytest

import hpctrain
from hpctrain.commands import plot
from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from tests.helpers import make_run, run_command


def test_the_picture(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    plot.main(ALONE, [str(folder)])
    assert capsys.readouterr().out == f"{folder}/curves.png\n"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_line_of_metrics_has_no_picture(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(HpctrainError, match=r"run/metrics\.jsonl"):
        plot.main(ALONE, [str(folder)])
    with pytest.raises(HpctrainError, match=r"metrics\.jsonl"):
        plot.main(ALONE, [str(tmp_path / "nothing")])


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "curves.png").symlink_to("/proc/self/no-such-file")
    with pytest.raises(HpctrainError, match=r"run/curves\.png.*--out"):
        plot.main(ALONE, [str(folder)])


def test_pictures_and_printed_names_do_not_depend_on_where_one_stands(tmp_path, monkeypatch, capsys):
    """A matplotlibrc of another user's folder; a folder name with control characters."""
    import matplotlib

    folder = tmp_path / "run\x1b[2J"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "step": 1, "train_loss": 1.0}\n')
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # as a matplotlibrc sets it
    plot.main(ALONE, [str(folder)])
    assert capsys.readouterr().out == f"{tmp_path}/run\\x1b[2J/curves.png\n"
    assert not matplotlib.rcParams["text.usetex"]


@pytest.mark.slow
def test_an_empty_entry_of_pythonpath_imports_nothing_from_the_current_folder(tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')\n")
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "step": 1, "train_loss": 1.0}\n')
    source = str(Path(hpctrain.__file__).parents[1])
    for path in (f":{source}", f"{source}:", f"{source}::/nowhere"):
        done = run_command(
            [*SAFE_PYTHON, "-m", "hpctrain", "plot", "."],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        assert (done.returncode, done.stdout) == (0, "curves.png\n"), done.stderr
