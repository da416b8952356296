"""Trials as their folders have them, and their picture."""

import json
from dataclasses import replace

from matplotlib.figure import Figure

from hpctrain.commands.sweep import file, trials
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
