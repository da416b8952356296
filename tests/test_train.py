"""The trainer as users start it: alone, and on the ranks of a real torchrun."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ALONE = [sys.executable, "-m", "hpctrain"]


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--log-dir=logs", "-m", "hpctrain"]


def run(launcher, *args, cwd, **env):
    # One thread a rank, as torchrun sets it: sums in another order would be other weights.
    return subprocess.run(
        [*launcher, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def train(launcher, *args, cwd, **env):
    done = run(launcher, "train_ddp", *args, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(folder):
    return json.loads((folder / "result.json").read_text())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder, epoch):
    return torch.load(folder / "checkpoints" / f"epoch-{epoch:04d}.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two epochs on digits with the same global batch: by one process, by two ranks, and by two ranks again."""
    cwd = tmp_path_factory.mktemp("runs")
    for name, launcher in (("one", ALONE), ("two", torchrun(2)), ("again", torchrun(2))):
        train(launcher, "--epochs", 2, "--out", name, cwd=cwd)
    return cwd


def test_two_ranks_give_the_weights_of_one_process(tmp_path):
    """To float tolerance, while few steps have been taken: rounding errors grow with each (a ReLU flips here and there)."""
    for name, launcher in (("one", ALONE), ("two", torchrun(2))):
        train(launcher, "--epochs", 2, "--batch-size", 478, "--out", name, cwd=tmp_path)
    one, two = weights(tmp_path / "one", 2), weights(tmp_path / "two", 2)
    assert list(one) == list(two)  # no "module." to strip
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5)
    assert result(tmp_path / "two")["test_loss"] == pytest.approx(result(tmp_path / "one")["test_loss"], rel=1e-4)


def test_the_same_command_gives_the_same_weights_bit_for_bit(runs):
    assert result(runs / "two")["weights_sha256"] == result(runs / "again")["weights_sha256"]


@pytest.mark.parametrize(("name", "launcher"), [("one", ALONE), pytest.param("two", torchrun(2), marks=pytest.mark.slow)])
def test_an_epoch_resumed_is_bit_for_bit_one_that_was_not_interrupted(runs, tmp_path, name, launcher):
    train(launcher, "--epochs", 1, "--out", tmp_path / "half", cwd=tmp_path)
    out = train(launcher, "--epochs", 2, "--resume", tmp_path / "half", cwd=tmp_path)
    assert "resuming after epoch 1" in out
    assert result(tmp_path / "half")["weights_sha256"] == result(runs / name)["weights_sha256"]
    # The metrics go on where they stopped, and the first configuration is still there.
    assert [line["epoch"] for line in metrics(tmp_path / "half") if "test_accuracy" in line] == [1, 2]
    assert json.loads((tmp_path / "half" / "config.json").read_text())["options"]["epochs"] == 1
    assert json.loads((tmp_path / "half" / "config.2.json").read_text())["options"]["epochs"] == 2


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(runs, tmp_path):
    out = train(ALONE, "--epochs", 3, "--resume", runs / "two", "--out", tmp_path / "more", cwd=tmp_path)
    assert "resuming after epoch 2" in out
    assert not (runs / "two" / "checkpoints" / "epoch-0003.pt").exists()


def test_the_run_folder(runs):
    folder = runs / "two"
    config = json.loads((folder / "config.json").read_text())
    assert config["world"]["size"] == 2 and config["world"]["launcher"] == "torchrun"
    assert config["options"]["batch_size"] == 32 and config["versions"]["torch"] == torch.__version__
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0000.log", "rank-0001.log"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any((folder / "tensorboard").iterdir())
    assert metrics(folder)[0].keys() >= {"epoch", "step", "seconds", "train_loss", "examples_per_s"}
    # Every one of the 360 test examples is counted once: the accuracy is a whole number of them.
    correct = result(folder)["test_accuracy"] * 360
    assert correct == pytest.approx(round(correct), abs=1e-6)


def test_the_mean_over_ranks_is_that_of_the_whole_batch(runs):
    losses = [
        [
            line["train_loss"]
            for line in map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
            if "train_loss" in line
        ]
        for name in ("one", "two")
    ]
    assert losses[0][:5] == pytest.approx(losses[1][:5], rel=1e-4)


def test_check():
    for launcher, ranks in ((ALONE, 1), (torchrun(2), 2)):
        done = run(launcher, "check", cwd=Path("/tmp"))
        assert done.returncode == 0, done.stderr
        assert f"check passed: {ranks} ranks on 1 hosts" in done.stdout
        assert f"rank {ranks - 1} of {ranks}" in done.stdout


def test_a_rank_that_never_comes_is_an_error_and_not_a_hang(tmp_path):
    """Rank 1 of a Slurm step whose rank 0 is not there."""
    step = {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip
    done = run(ALONE, "check", cwd=tmp_path, **step)
    assert done.returncode == 1 and "MASTER_ADDR and MASTER_PORT are not set" in done.stderr
    code = "from datetime import timedelta; import hpctrain.world as w, hpctrain.__main__ as m; "
    code += "w.JOIN_TIMEOUT = timedelta(seconds=3); m.main()"
    done = run([sys.executable, "-c", code], "check", cwd=tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT="9", **step)
    assert done.returncode == 1 and "rank 1 of 2" in done.stderr and "did not meet the others at 127.0.0.1:9" in done.stderr


BAD_INPUT = [
    (["no_such_trainer"], 2, "there is no command 'no_such_trainer': choose from train_ddp"),
    (["train_ddp", "--epochs", "none"], 2, "argument --epochs: invalid int value: 'none'"),
    (["train_ddp", "--epochs", "0"], 2, "0 is not above zero"),
    (["train_ddp", "--lr", "nan"], 2, "nan is not above zero"),
    (["train_ddp", "--bogus"], 2, "unrecognized arguments: --bogus"),
    (["train_ddp", "--batch-size", "1438"], 2, "--batch-size 1438 is more than the 1437 training examples"),
    (["train_ddp", "--data", "nowhere"], 1, "nowhere: no such folder"),
    (["train_ddp", "--resume", "nowhere"], 1, "nowhere: no checkpoint to resume from"),
    (["train_ddp", "--out", "/proc/run"], 1, "/proc/run: cannot be written"),
]


@pytest.mark.parametrize(("args", "status", "message"), BAD_INPUT)
def test_bad_input_is_one_line(tmp_path, args, status, message):
    done = run(ALONE, *args, cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr.startswith("hpctrain: error:") and done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no_such_trainer"], "there is no command 'no_such_trainer'"),
        (["train_ddp", "--batch-size", "33"], "2 ranks cannot share it evenly: take a multiple of 2, such as 32"),
        (["train_ddp", "--data", "nowhere"], "nowhere: no such folder"),
        (["train_ddp", "--out", "/proc/run"], "/proc/run: cannot be written"),
    ],
)
def test_one_of_two_ranks_says_what_is_wrong(tmp_path, args, message):
    done = run(torchrun(2), *args, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "hpctrain: error:" in line]
    assert len(said) == 1 and message in said[0], done.stderr
    # torchrun adds a traceback of its own, but there is none of ours.
    assert done.returncode != 0 and "hpctrain/__main__.py" not in done.stderr


def test_nothing_of_an_earlier_run_is_overwritten(runs, tmp_path):
    before = {path: path.read_bytes() for path in (runs / "one").rglob("*") if path.is_file()}
    done = run(ALONE, "train_ddp", "--out", runs / "one", cwd=tmp_path)
    assert done.returncode == 1 and "holds a run already" in done.stderr
    assert before == {path: path.read_bytes() for path in (runs / "one").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_job_that_slurm_runs_again_goes_on(tmp_path):
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"}
    train(ALONE, "--epochs", 1, cwd=tmp_path, **slurm)
    out = train(ALONE, "--epochs", 2, cwd=tmp_path, SLURM_RESTART_COUNT="1", **slurm)
    assert "resuming after epoch 1 of runs/train_ddp/17/checkpoints/epoch-0001.pt" in out
    another_job = slurm | {"SLURM_JOB_ID": "18", "SLURM_RESTART_COUNT": "1"}
    for env in (slurm, another_job):
        done = run(ALONE, "train_ddp", "--out", "runs/train_ddp/17", cwd=tmp_path, **env)
        assert done.returncode == 1 and "holds a run already" in done.stderr


def test_a_bar_on_a_terminal(tmp_path):
    command = f"stty cols 120 rows 30; {sys.executable} -m hpctrain train_ddp --epochs 1 --batch-size 8 --out run"
    done = subprocess.run(["script", "-qec", command, "/dev/null"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"epoch 1: +\d+%\|.*step/s.*train_loss", done.stdout)


def test_help():
    for args in (["--help"], ["train_ddp", "--help"], ["check", "--help"], ["plot", "--help"]):
        done = run(ALONE, *args, cwd=Path("/tmp"))
        assert done.returncode == 0 and "usage: hpctrain" in done.stdout
    done = run(ALONE, cwd=Path("/tmp"))
    assert done.returncode == 2


def test_plot_of_something_else(tmp_path):
    done = run(ALONE, "plot", tmp_path, cwd=tmp_path)
    assert done.returncode == 1 and "metrics.jsonl cannot be read" in done.stderr
