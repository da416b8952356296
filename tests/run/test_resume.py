"""A run that is cut anywhere ends with the weights and the metrics of one that was not."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from hpctrain.run.options import RunOptions
from hpctrain.run.prepare import prepare_folder
from hpctrain.run.reader import summarize
from tests.helpers import make_run, run_command, write_digits
from tests.tools import warm_start
from tests.vision.test_train import in_image, metrics, result, run, train, weights

HOROVOD_FOUR = in_image("torchrun", "--nproc-per-node=4", "-m", "hpctrain")
# Few steps with dropout, and two parts to accumulate in each of them.
NLP = ["--epochs", 2, "--limit", 80, "--batch-size", 8, "--accumulate", 2]


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def lines(folder):
    """The metrics without the time that they took."""
    return [
        {key: line[key] for key in line if key not in ("seconds", "examples_per_s", "peak_memory_mb")}
        for line in metrics(folder)
    ]


def points_in_tensorboard(folder):
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    return sorted((name, point.step) for name in board.Tags()["scalars"] for point in board.Scalars(name))


def start(launcher, trainer, *words, cwd, **env):
    if not trainer.startswith("nlp"):
        if trainer == "train_horovod":  # which accumulates, as the NLP tasks do here
            words = ("--batches-per-allreduce", 2, *words)
        return train(launcher, "--epochs", 2, *words, cwd=cwd, trainer=trainer, **env)
    done = run(launcher, trainer, *NLP, *words, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_equal(cut, whole):
    assert result(cut)["weights_sha256"] == result(whole)["weights_sha256"]
    assert lines(cut) == lines(whole)
    assert points_in_tensorboard(cut) == points_in_tensorboard(whole)


CASES = [
    pytest.param("train_ddp", 1, marks=pytest.mark.slow),
    pytest.param("train_ddp", 4, marks=pytest.mark.slow),
    pytest.param("train_lightning", 4, marks=pytest.mark.slow),
    pytest.param("train_horovod", HOROVOD_FOUR, marks=pytest.mark.slow),
    pytest.param("nlp.classify", 1, marks=pytest.mark.slow),
    pytest.param("nlp.ner", 2, marks=pytest.mark.slow),
]
IDS = ["ddp-1", "ddp-4", "lightning-4", "horovod-4", "classify-1", "ner-2"]


FSDP = pytest.param("train_fsdp", 4, marks=pytest.mark.slow)
EIGHT = pytest.param("train_ddp", 8, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A function: the folder of a whole run of a case, with checkpoints every 3 steps."""
    folders = {}

    def folder_of(trainer, launcher):
        case = trainer, str(launcher)
        if case not in folders:
            cwd = tmp_path_factory.mktemp("whole")
            start(
                launcher,
                trainer,
                "--checkpoint-every",
                3,
                "--keep-checkpoints",
                99,
                "--out",
                cwd / "run",
                cwd=cwd,
            )
            folders[case] = cwd / "run"
        return folders[case]

    return folder_of


@pytest.mark.parametrize(("trainer", "launcher"), [*CASES, FSDP, EIGHT], ids=[*IDS, "fsdp-4", "ddp-8"])
def test_a_run_cut_within_an_epoch(tmp_path, whole_run, trainer, launcher):
    """Bit for bit, in the first epoch and in the second, after a line of metrics and before one."""
    whole = whole_run(trainer, launcher)
    within = [name for name in names(whole) if "step" in name]
    assert {name[:10] for name in within} == {"epoch-0001", "epoch-0002"}
    # A start of four ranks in the image takes ten seconds of both cores.
    for name in within[-1:] if launcher is HOROVOD_FOUR else (within[0], within[-1]):
        cut = tmp_path / f"cut-{name}"
        shutil.copytree(whole, cut)
        (cut / "result.json").unlink()
        for later in names(cut)[names(cut).index(name) + 1 :]:
            if later != "epoch-0001.pt" or "epoch-0001" in name:
                checkpoint.remove(cut / "checkpoints" / later)
        out = start(launcher, trainer, "--resume", cut, cwd=tmp_path)
        assert f"of {cut}/checkpoints/{name}" in out
        assert_equal(cut, whole)


@pytest.mark.parametrize(("trainer", "launcher"), [*CASES, FSDP], ids=[*IDS, "fsdp-4"])
def test_a_run_that_is_asked_to_end_saves_and_goes_on(tmp_path, whole_run, trainer, launcher):
    """A job that is preempted right after each start, with the same command line."""
    control = tmp_path / "control"
    last = 1 if launcher is HOROVOD_FOUR or trainer == "train_fsdp" else 2
    for restart in range(last + 1):
        control.mkdir()
        if restart < last:
            (control / "stop").touch()
        job = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(restart), "HPCTRAIN_CONTROL": str(control)}
        if isinstance(launcher, int):
            out = start(launcher, trainer, "--out", "cut", cwd=tmp_path, **job)
        else:
            inside = in_image("torchrun", "--nproc-per-node=4", "-m", "hpctrain", **job)
            out = start(inside, trainer, "--out", "cut", cwd=tmp_path)
        told = {path.name: path.read_text() for path in control.iterdir()}
        if restart < last:
            empty = dict.fromkeys(("stop", "polled", "trains", "stopped"), "")
            assert told == empty | {"saved": "--resume cut\n"}, out
            assert "ending early, as the job has to: saved after epoch 0 and " in out
            assert not (tmp_path / "cut/result.json").exists() and not (tmp_path / "cut/owner.json").exists()
        else:
            assert set(told) - {"saved"} == {"polled", "trains"}
        shutil.rmtree(control)
    assert_equal(tmp_path / "cut", whole_run(trainer, launcher))


@pytest.mark.slow
def test_a_job_that_slurm_requeues_after_its_end_has_nothing_to_do(tmp_path):
    """Slurm 24.11 does that to a job that was to be preempted, and ended within its grace time."""
    job = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "1"}
    train(1, "--epochs", 1, cwd=tmp_path, **job)
    before = result(tmp_path / "runs/train_ddp/5")
    for env in (job | {"SLURM_RESTART_COUNT": "1"}, {}):
        more = () if env else ("--out", "runs/train_ddp/5", "--resume", "auto")
        out = train(1, "--epochs", 1, *more, cwd=tmp_path, **env)
        assert "runs/train_ddp/5 has 1 epoch already: nothing to do" in out
    assert result(tmp_path / "runs/train_ddp/5") == before


@pytest.mark.slow
def test_the_launch_script_is_on_another_node_than_rank_0(tmp_path):
    """torchrun numbers the nodes in the order of their names, where n10 comes before n9."""
    control = tmp_path / "control"
    control.mkdir()
    (control / "stop").touch()
    write_digits(tmp_path / "digits")
    words = ["train_ddp", "--data", "digits", "--epochs", "1", "--out", "run"]
    first, second = warm_start.torchrun_ranks(2, words, dict(os.environ))
    second.env["HPCTRAIN_CONTROL"] = str(control)
    first.env["HPCTRAIN_CONTROL"] = str(tmp_path / "not-on-this-node")
    done = warm_start.run([first, second], tmp_path)
    assert done.returncode == 0 and "ending early" in done.stdout, done.stdout + done.stderr
    assert {path.name for path in control.iterdir()} == {"stop", "saved", "stopped", "polled", "trains"}

    (control / "stop").unlink()
    words += ["--batch-size", "31"]  # not for two ranks
    first, second = warm_start.torchrun_ranks(2, words, dict(os.environ))
    second.env["HPCTRAIN_CONTROL"] = str(control)
    done = warm_start.run([first, second], tmp_path)
    assert done.returncode != 0 and (control / "failed").exists(), done.stderr


@pytest.mark.slow
def test_four_ranks_go_on_as_two_within_an_epoch(tmp_path):
    """To rounding, after the first of the two steps of a line of metrics."""
    train(4, "--epochs", 1, "--checkpoint-every", 3, "--keep-checkpoints", 99, "--out", "four", cwd=tmp_path)
    for name in names(tmp_path / "four"):
        if name != "epoch-0001-step-000003.pt":
            (tmp_path / "four/checkpoints" / name).unlink()
    (tmp_path / "four/result.json").unlink()
    whole = train(4, "--epochs", 1, "--out", "whole", cwd=tmp_path)
    assert whole
    out = train(2, "--epochs", 1, "--resume", "four", cwd=tmp_path)
    assert "resuming after epoch 0 and 3 steps" in out
    for name, weight in weights(tmp_path / "whole", 1).items():
        torch.testing.assert_close(weights(tmp_path / "four", 1)[name], weight, rtol=1e-4, atol=1e-5)
    ours, theirs = lines(tmp_path / "four"), lines(tmp_path / "whole")
    assert [(line["epoch"], line["step"], set(line)) for line in ours] == [
        (x["epoch"], x["step"], set(x)) for x in theirs
    ]
    losses = ([line["train_loss"] for line in each if "train_loss" in line] for each in (ours, theirs))
    assert next(losses) == pytest.approx(next(losses), rel=1e-4)


@pytest.mark.slow
def test_options_that_change_the_result_are_refused_by_name(tmp_path):
    train(1, "--epochs", 1, "--out", "run", cwd=tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").iterdir()}
    changed = ["--epochs", "2", "--batch-size", "16", "--seed", "2", "--resume", "run"]
    done = run(1, "train_ddp", "--data", "digits", *changed, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == (
        "hpctrain: error: run/checkpoints/epoch-0001.pt was saved with other options: "
        "--batch-size 16 instead of 32, --seed 2 instead of 1: "
        "give those of that run, or --force to go on with these\n"
    )
    assert before == {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").iterdir()}
    assert len(metrics(tmp_path / "run")) == 6
    out = train(1, *changed, "--force", "--out", "other", cwd=tmp_path)
    assert "--force: continuing with --batch-size 16 instead of 32, --seed 2 instead of 1" in out


@pytest.mark.slow
def test_the_launch_script_is_told_that_an_error_would_come_again(tmp_path):
    (tmp_path / "control").mkdir()
    for words in (["train_ddp", "--epochs", "x"], ["train_ddp", "--data", "nowhere"]):
        done = run(2, *words, cwd=tmp_path, HPCTRAIN_CONTROL=str(tmp_path / "control"))
        assert done.returncode != 0
        assert [path.name for path in (tmp_path / "control").iterdir()] == ["failed"]
        (tmp_path / "control/failed").unlink()


@pytest.mark.slow
def test_other_data_within_an_epoch(tmp_path):
    write_digits(tmp_path / "fewer", 160, 32)
    train(1, "--epochs", 1, "--checkpoint-every", 4, "--out", "run", cwd=tmp_path)
    (tmp_path / "run/checkpoints/epoch-0001.pt").unlink()
    done = run(
        1, "train_ddp", "--data", "fewer", "--epochs", 1, "--resume", "run", "--out", "more", "--force",
        cwd=tmp_path,
    )  # fmt: skip
    assert (
        done.returncode == 2
        and "with 10 steps in an epoch, and this one has 5: give the --data" in done.stderr
    )


@pytest.mark.slow
def test_other_examples_than_before_are_refused(tmp_path):
    """Labels that were swapped between two starts: it went on with exit status 0."""
    train(1, "--epochs", 1, "--out", "run", cwd=tmp_path)
    labels = tmp_path / "digits/train-labels-idx1-ubyte"
    content = labels.read_bytes()
    labels.write_bytes(content[:8] + content[:7:-1])
    again = ["--epochs", 2, "--resume", "run"]
    done = run(1, "train_ddp", "--data", "digits", *again, cwd=tmp_path)
    assert done.returncode == 2 and "other examples in --data: give those of that run, or --f" in done.stderr
    assert "--force: continuing with other examples in --data" in train(1, *again, "--force", cwd=tmp_path)

    lines = [f"{n}\ta text of {n}\t{n % 2}\n" for n in range(40)]
    (tmp_path / "texts.txt").write_text("id\tdocument\tlabel\n" + "".join(lines))
    options = ["--data", "texts.txt", "--from-scratch", "tiny", "--max-length", 16, "--batch-size", 4]
    for epochs, status in ((1, 0), (2, 2)):
        words = [*options, "--out", "texts", "--resume", "auto", "--epochs", epochs]
        done = run(1, "nlp.classify", *words, cwd=tmp_path)
        assert done.returncode == status, done.stdout + done.stderr
        swapped = [f"{line[:-1]}{1 - int(line[-1])}" for line in (line.strip() for line in lines)]
        (tmp_path / "texts.txt").write_text("\n".join(["id\tdocument\tlabel", *swapped]) + "\n")
    assert "other examples in --data" in done.stderr


@pytest.mark.slow
def test_resume_auto_starts_and_goes_on_with_one_command(tmp_path):
    command = ["--out", "run", "--resume", "auto"]
    assert "resuming" not in train(1, "--epochs", 1, *command, cwd=tmp_path)
    for path in (tmp_path / "run/checkpoints").iterdir():  # it died before its first checkpoint
        path.unlink()
    (tmp_path / "run/result.json").unlink()
    assert "resuming" not in train(1, "--epochs", 1, *command, cwd=tmp_path)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [2, 4, 6, 8, 10, 10]
    assert "resuming after epoch 1 of run/" in train(1, "--epochs", 2, *command, cwd=tmp_path)
    train(1, "--epochs", 2, "--out", "whole", cwd=tmp_path)
    assert_equal(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_is_not_overwritten(tmp_path):
    folder = make_run(tmp_path / "run", lines=[{"epoch": 3, "step": 9, "train_loss": 1.0}])
    (folder / "checkpoints").mkdir(exist_ok=True)
    before = (folder / "metrics.jsonl").read_text()
    options = RunOptions(out=folder, resume="auto")
    with pytest.raises(
        HpctrainError, match=r"its checkpoints are gone, and it was in epoch 3: put checkpoints/"
    ):
        prepare_folder("mine", options)
    assert (folder / "metrics.jsonl").read_text() == before and not (folder / "owner.json").exists()
    (folder / "metrics.jsonl").write_text('{"epoch": 2, "step": 4, "train_loss": 1.0}\n')
    prepare_folder("mine", options)[2].release()  # the first checkpoint was being written
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(HpctrainError, match="its checkpoints are gone, and it was in epoch 2"):
        prepare_folder("mine", options)


@pytest.mark.slow
def test_a_start_that_ends_by_an_error_does_not_look_as_if_it_ran(tmp_path):
    program = (
        "import hpctrain\n"
        "def start(world):\n"
        "    hpctrain.Run('mine', out='run')\n"
        "    raise hpctrain.HpctrainError('HPCTRAIN_CACHE is full')\n"
        "hpctrain.main(start)\n"
    )
    done = run_command([*SAFE_PYTHON, "-c", program], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "hpctrain: error: HPCTRAIN_CACHE is full\n")
    assert not (tmp_path / "run/owner.json").exists()
    assert summarize(tmp_path / "run")["state"] == "stopped"


def test_a_loss_that_is_not_finite_is_in_no_checkpoint(tmp_path):
    """It is noticed before the next line of metrics."""
    options = ["--lr", "1e30", "--checkpoint-every", "1", "--batch-size", "8", "--out", "run"]
    write_digits(tmp_path / "digits", 160, 8)  # 20 steps, with a line after 4
    done = run(1, "train_ddp", "--data", "digits", *options, cwd=tmp_path)
    error = r"train_loss is nan at epoch 1, step [2-5], since step [2-5] .*: training diverged"
    assert done.returncode == 1 and re.search(error, done.stderr), done
    for path in (tmp_path / "run/checkpoints").iterdir():
        assert all(
            torch.isfinite(value).all() for value in torch.load(path, weights_only=True)["model"].values()
        ), path


@pytest.mark.parametrize("value", ["0", "10 min", "often"])
def test_an_interval_that_is_none(tmp_path, value):
    done = run(1, "train_ddp", "--checkpoint-every", value, cwd=tmp_path)
    assert (
        done.returncode == 2
        and f"'{value}' is not a number of steps (500) or a time (30s, 10min, 1h)" in done.stderr
    )


@pytest.mark.slow
def test_the_best_epoch_is_kept(tmp_path):
    """Beside the newest; by the accuracy, then by the loss."""
    train(1, "--epochs=4", "--lr=0.1", "--lr-decay=1", "--keep-checkpoints=1", "--out=run", cwd=tmp_path)
    scores = [
        (line["test_accuracy"], -line["test_loss"])
        for line in metrics(tmp_path / "run")
        if "test_loss" in line
    ]
    best = scores.index(max(scores)) + 1
    assert names(tmp_path / "run") == sorted({"best.pt", f"epoch-{best:04d}.pt", "epoch-0004.pt"})
    state = torch.load(tmp_path / "run/checkpoints/epoch-0004.pt", weights_only=True)
    assert state["best"][0] == best and json.dumps(state["options"])


def test_a_start_waits_for_a_file_system_that_gives_no_answer(tmp_path, monkeypatch, capsys):
    """It was a traceback, and the job was not requeued."""
    answers, real = [errno.ESTALE, errno.EIO], Path.stat

    def stat(path, **options):
        if answers and path.name == "config.json":
            raise OSError(answers.pop(), "no answer", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(atomic, "RETRY_EVERY", 0.05)
    prepare_folder("mine", RunOptions(out=tmp_path / "run"))[2].release()
    assert capsys.readouterr().out.count("run/config.json: no answer (no answer); trying again for") == 1
    answers[:] = [errno.EACCES]
    with pytest.raises(PermissionError):
        prepare_folder("mine", RunOptions(out=tmp_path / "run"))
