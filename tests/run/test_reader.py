"""What hpctrain says of run folders, whole and broken."""

import json
import os
import signal
import time
from contextlib import suppress

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.run import reader
from tests.helpers import make_run


def test_the_state(tmp_path):
    folder = make_run(tmp_path / "run", result=False)
    assert reader.summarize(folder)["state"] == "stopped"
    (folder / "owner.json").write_text("{}")
    assert reader.summarize(folder)["state"] == "running"
    os.utime(folder / "owner.json", (0, time.time() - 100))  # its job has died
    assert reader.summarize(folder)["state"] == "stopped"
    (folder / "result.json").write_text("{}")
    assert reader.summarize(folder)["state"] == "finished"
    late = json.loads((folder / "config.json").read_text()) | {"started": "2999-01-01T00:00:00+0000"}
    late["options"] = late["options"] | {"epochs": 99}
    (folder / "config.2.json").write_text(json.dumps(late))  # killed before it could go on, or was refused
    row = reader.summarize(folder)
    assert (row["state"], row["starts"]) == ("finished", 1) and row["epochs"] != 99
    (folder / "config.2.json").write_text(json.dumps(late | {"resumed_at": 9}))
    assert reader.summarize(folder)["state"] == "stopped"
    (folder / "config.2.json").unlink()
    os.utime(folder / "result.json", (0, 0))  # resumed after that, for more epochs
    assert reader.summarize(folder)["state"] == "stopped"


def test_the_speed_of_a_finished_run_is_that_of_its_result(tmp_path):
    """The last line of metrics has that of a fifth of an epoch."""
    folder = make_run(tmp_path / "run")
    for content, speed in (({"examples_per_s": 80.25}, 80.25), ({}, 99.5), (None, 99.5)):
        (folder / "result.json").write_text(json.dumps({"speed": content}))
        assert reader.summarize(folder)["examples_per_s"] == speed


def test_the_score_that_selects_the_best_epoch_is_shown(tmp_path):
    """It was the last one: the recall of nlp.ner."""
    earlier = {"epoch": 1, "step": 5, "validation_loss": 1.9, "validation_f1": 0.25, "validation_recall": 0.5}
    last = {"epoch": 1, "step": 5, "test_loss": 2.0, "test_f1": 0.75, "test_recall": 1.0, "test_f1/PS": 0.0}
    row = reader.summarize(make_run(tmp_path / "run", lines=[earlier, last]))
    assert (row["score"], row["value"]) == ("test_f1", 0.75)


def test_values_of_steps_are_no_scores(tmp_path):
    """A script may pass any to Run.step(), and call a loss just so in Run.score()."""
    steps = {"epoch": 1, "step": 3, "train_loss": 1.0, "scale": 65536.0, "examples_per_s": 9.0}
    evaluation = {"epoch": 1, "step": 3, "accuracy": 0.5, "loss": 2.0}
    lines = [steps, evaluation, steps | {"step": 6}]
    assert reader.summarize(make_run(tmp_path / "scored", lines=lines))["score"] == "accuracy"
    assert reader.best_line(lines) == ("accuracy", evaluation)
    lines = [steps, {"epoch": 1, "step": 3, "loss": 2.0}]
    assert reader.summarize(make_run(tmp_path / "lost", lines=lines))["score"] == "loss"
    assert reader.best_line(lines) is None


def test_without_a_score_the_loss_is_shown(tmp_path):
    folder = make_run(tmp_path / "run", lines=[{"epoch": 1, "step": 5, "train_loss": 0.5}])
    assert (reader.summarize(folder)["score"], reader.summarize(folder)["value"]) == ("train_loss", 0.5)


def test_a_long_file_of_metrics_is_read_from_its_end(tmp_path):
    lines = [{"epoch": 1, "step": step, "train_loss": 1.0} for step in range(5000)]
    folder = make_run(tmp_path / "run", lines=lines)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "step": 50')  # is being written
    assert reader.summarize(folder)["step"] == 4999
    assert (
        len(reader.read_metrics(folder)) == 5000 and 50 < len(reader.read_metrics(folder, reader.TAIL)) < 300
    )


@pytest.mark.parametrize("kind", ["pipe", "huge"])
@pytest.mark.parametrize("name", ["config.json", "config.2.json", "metrics.jsonl", "result.json"])
def test_what_somebody_else_put_in_the_place_of_a_file_is_not_read_without_end(tmp_path, name, kind):
    folder = make_run(tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        with (folder / name).open("wb") as file:
            file.truncate(2**42)
    signal.alarm(60)  # a reader of a pipe waits for its writer
    for read in (reader.summarize, reader.read_configs, reader.read_metrics):
        with suppress(HpctrainError):
            read(folder)
    signal.alarm(0)


def test_values_that_are_not_numbers_are_left_out(tmp_path):
    lines = [
        {"epoch": 1, "step": 1, "train_loss": 2.0},
        {"epoch": [1], "step": 1},
        {"epoch": 1, "step": 10**400},
        5,
    ]
    odd = {"test_accuracy": "\x1b[2J", "examples_per_s": {}, "seconds": None}
    lines.append({"epoch": 1, "step": 2, "train_loss": 1.0} | odd)
    folder = make_run(tmp_path / "run", lines=lines)
    (folder / "metrics.jsonl").write_text("[" * 100_000 + "\n" + (folder / "metrics.jsonl").read_text())
    (folder / "result.json").write_text(f'{{"speed": {{"examples_per_s": {10**400}}}}}')
    assert reader.read_metrics(folder) == [lines[0], {"epoch": 1, "step": 2, "train_loss": 1.0}]
    row = reader.summarize(folder)
    assert (row["score"], row["value"], row["examples_per_s"]) == ("train_loss", 1, None)
