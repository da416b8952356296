"""hpctrain export: what other tools get is what metrics.jsonl says, each step once."""

import csv
import json
import sys

import pytest

from tests.helpers import make_run, run_command, run_hpctrain, run_on_small_disk, wandb_key, wandb_records

# A run that was requeued after step 10: step 10 twice, and a step of training and of evaluation in two lines.
LINES = [
    {"epoch": 1, "step": 5, "seconds": 1.0, "train_loss": 2.5, "examples_per_s": 90.0},
    {"epoch": 1, "step": 10, "seconds": 2.0, "train_loss": 9.0, "examples_per_s": 91.0},
    {"epoch": 1, "step": 10, "seconds": 0.5, "train_loss": 1.5, "examples_per_s": 92.0},
    {"epoch": 1, "step": 10, "seconds": 0.6, "test_loss": 1.25, "test_accuracy": 0.75},
    {"epoch": 2, "step": 15, "seconds": 1.5, "train_loss": 0.5, "examples_per_s": 93.0},
]
STEPS = {
    5: {"epoch": 1, "seconds": 1.0, "train_loss": 2.5, "examples_per_s": 90.0},
    10: {
        "epoch": 1,
        "seconds": 0.6,
        "train_loss": 1.5,
        "examples_per_s": 92.0,
        "test_loss": 1.25,
        "test_accuracy": 0.75,
    },
    15: {"epoch": 2, "seconds": 1.5, "train_loss": 0.5, "examples_per_s": 93.0},
}


def test_csv(tmp_path):
    folder = make_run(tmp_path / "runs/a,b", starts=2, lines=LINES)
    done = run_hpctrain("export", "csv", folder, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}/metrics.csv\n", "")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {
        int(row.pop("step")): {name: float(value) for name, value in row.items() if value} for row in rows
    }
    assert found == STEPS and len(rows) == len(STEPS)


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path):
    make_run(tmp_path / "17", lines=LINES)
    script = 'cp -r 17 small; cat /dev/zero >small/filler || "$@"'
    command = [sys.executable, "-m", "hpctrain", "export", "wandb", "small/17"]
    done = run_on_small_disk("300k", "bash", "-c", script, "-", *command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 2, done.stderr  # with that of cat
    assert (
        "hpctrain: error: small/17: " in done.stderr
        and "No space left on device" in done.stderr.splitlines()[1]
    )


@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    folder = make_run(tmp_path / "my runs/17", starts=2, lines=LINES, lr=0.5)
    (folder / "result.json").write_text(json.dumps({"test_accuracy": 0.75, "epochs": 2}))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for _ in range(2):  # the second replaces the first
        done = run_hpctrain("export", "wandb", folder, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    assert [*(tmp_path / "tmp").iterdir()] == []
    (written,) = (folder / "wandb").iterdir()
    assert done.stdout == f"wandb sync '{written}'\n"
    found = list(wandb_records(next(written.glob("*.wandb"))))

    history = {}
    for record in found:
        if record.HasField("history"):
            values = {wandb_key(item): json.loads(item.value_json) for item in record.history.item}
            assert values["_step"] not in history
            history[values["_step"]] = {name: value for name, value in values.items() if name[0] != "_"}
    assert history == STEPS
    config = {
        wandb_key(item): json.loads(item.value_json)
        for record in found
        if record.HasField("run")
        for item in record.run.config.update
    }
    assert (config["lr"], config["world"]["size"], config["job"], config["resumed_at"]) == (
        0.5,
        4,
        "18",
        [10],
    )
    summary = {}
    for record in found:
        if record.HasField("summary"):
            summary |= {wandb_key(item): json.loads(item.value_json) for item in record.summary.update}
    assert (summary["test_accuracy"], summary["epochs"]) == (0.75, 2)
    # Nothing of this machine
    kinds = {record.WhichOneof("record_type") for record in found}
    assert not kinds & {"stats", "environment", "output", "output_raw"}, kinds
    assert [
        path.name for path in written.rglob("*") if path.name in ("requirements.txt", "wandb-metadata.json")
    ] == []

    sync = run_command(
        [sys.executable, "-m", "wandb", "sync", "--dry-run", written], cwd=tmp_path, timeout=120
    )
    assert sync.returncode == 0 and written.name in sync.stdout + sync.stderr, sync.stdout + sync.stderr


def test_invalid_input_is_one_line(tmp_path):
    empty = make_run(tmp_path / "empty", lines=[])
    cases = [
        (
            ["export", "csv", tmp_path / "none"],
            "none: no run folder, it has no config.json: name a run",
        ),
        (["export", "csv", empty], "empty/metrics.jsonl has no line yet: wait for the first"),
        (["export", "xlsx", empty], "invalid choice: 'xlsx'"),
    ]
    (make_run(tmp_path / "no", lines=LINES) / "metrics.csv").mkdir()
    cases.append((["export", "csv", tmp_path / "no"], "no: cannot be written (Is a directory)"))
    for words, message in cases:
        done = run_hpctrain(*words, cwd=tmp_path)
        assert done.returncode != 0 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
