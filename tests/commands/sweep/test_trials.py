"""Trials as their folders have them, and their picture."""

import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from hpctrain.commands.sweep import file, sweep, trials
from hpctrain.distributed.world import ALONE
from tests.commands.sweep.helpers import SWEEP, trial


def test_the_picture_names_the_values_of_a_choice(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.extend(figure.axes))
    trials._draw(SWEEP, [trial(0, 0.5), trial(1, 0.7)], tmp_path / "sweep.png")
    axis = next(axis for axis in drawn if axis.get_xlabel() == "on-nan")
    assert [label.get_text() for label in axis.get_xticklabels()] == ["stop", "skip"]
    assert axis.get_xlim()[0] < 0 and axis.get_xlim()[1] > 1  # also the value that no trial had


def test_the_picture_shows_pruned_trials(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.extend(figure.axes))
    every = [trial(0, 0.5), trial(1, state="pruned", scores=(0.1, 0.2)), trial(2, 0.7)]
    trials._draw(SWEEP, every, tmp_path / "sweep.png")
    for axis in drawn[:3]:
        (pruned,) = [line for line in axis.get_lines() if line.get_label() == "pruned"]
        assert [*pruned.get_ydata()] == [0.2] and pruned.get_fillstyle() == "none"


def test_names_that_are_no_formulas_are_drawn(tmp_path, capsys):
    odd = r"$\frac{$"
    search = file.Sweep(["x"], odd, "minimize", {"a": {"values": [odd, "\x1b[2J"]}}, trials=1)
    trial = tmp_path / odd / "trial-000"
    trial.mkdir(parents=True)
    (trial / "parameters.json").write_text(json.dumps({"a": "\x1b[2J"}))
    (trial / "result.json").write_text(json.dumps({odd: 1.5}))
    trials.show(search, tmp_path / odd)
    assert (tmp_path / odd / "sweep.png").stat().st_size > 10_000
    assert "\x1b" not in capsys.readouterr().out


def test_a_metric_of_the_validation_is_the_best_of_the_epochs(tmp_path):
    """Fine-tuning measures it after each epoch, and result.json has the scores of the test set."""
    folder = trials.trial_folder(tmp_path, 0)
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
    values = {1: 0.5, 2: 0.75, 3: 0.625}
    lines = [
        {"epoch": epoch, "step": 4 * epoch, "validation_accuracy": value} for epoch, value in values.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"test_accuracy": 0.7}))
    trial = trials.read_trial(replace(SWEEP, metric="validation_accuracy"), tmp_path, 0)
    assert (trial.value, trial.scores, trial.state) == (0.75, values, "complete")
    assert trials.read_trial(SWEEP, tmp_path, 0).value == 0.7


@pytest.mark.parametrize("damage", [b"", b"\xff", b'{"lr": 0.01, seed"'])
def test_damaged_files_of_a_sweep_end_no_trial(tmp_path, capsys, damage):
    """One damaged parameters.json ended each start of each trial."""
    for number in range(3):
        folder = trials.trial_folder(tmp_path, number)
        folder.mkdir()
        (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
        (folder / "result.json").write_text(json.dumps({"test_accuracy": 0.5}))
    sweep._keep_sweep(SWEEP, tmp_path)
    begun = trials.trial_folder(tmp_path, 0)
    (begun / "config.json").write_text(json.dumps({"options": {"lr": 0.02, "seed": 2, "on_nan": "skip"}}))
    (begun / "parameters.json").write_bytes(damage)
    (trials.trial_folder(tmp_path, 1) / "parameters.json").write_bytes(damage)  # it had not begun
    (trials.trial_folder(tmp_path, 2) / "result.json").write_bytes(damage)
    (tmp_path / "sweep.json").write_bytes(damage)
    found = trials.read_trials(SWEEP, tmp_path)
    assert [(trial.number, trial.state) for trial in found] == [(0, "complete"), (2, "running")]
    assert sweep.choose_parameters(SWEEP, tmp_path, 0, ALONE) == {"lr": 0.02, "seed": 2, "on-nan": "skip"}
    assert json.loads((begun / "parameters.json").read_text())["lr"] == 0.02
    assert json.loads((tmp_path / "sweep.json").read_text())["metric"] == "test_accuracy"
    assert capsys.readouterr().out.count("is damaged: it is written again") == 2
