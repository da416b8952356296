"""The run folder: its files appear complete or not at all, and config.json gets the image's digest."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from hpctrain.checkpoints import checkpoint, parts
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.run import record
from hpctrain.run.config import write_json
from hpctrain.run.options import RunOptions
from hpctrain.run.prepare import find_earlier_checkpoint
from tests.helpers import REPOSITORY, run_hpctrain, run_on_small_disk, write_digits

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No variables of a job; and the hook for uncaught exceptions as it was."""
    for name in [name for name in os.environ if name.startswith(("HPCTRAIN_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def start(folder, resume=None):
    options = RunOptions(out=folder, resume=resume, epochs=1, watchdog=0)
    return record.Record(ALONE, "test", options, torch.device("cpu"))


def finish(opened):
    opened.metrics(train_loss=1.0, test_accuracy=0.5)
    opened.finish(torch.nn.Linear(2, 1), test_accuracy=0.5)


def test_the_result_is_written_last(tmp_path, monkeypatch):
    """A start after it finds nothing to do."""
    monkeypatch.setattr(record, "try_to_plot", lambda folder: sys.exit(1))  # killed there
    with pytest.raises(SystemExit):
        finish(start(tmp_path / "run"))
    assert not (tmp_path / "run/result.json").exists()


def test_a_result_without_its_picture(tmp_path, monkeypatch, capsys):
    (tmp_path / "run/curves.png").mkdir(parents=True)  # cannot be replaced
    finish(start(tmp_path / "run"))
    assert json.loads((tmp_path / "run/result.json").read_text())["test_accuracy"] == 0.5
    text = f"hpctrain: curves.png is not drawn (Is a directory): see hpctrain plot {tmp_path}/run\n"
    assert text in capsys.readouterr().out


@pytest.mark.slow
def test_curves_without_a_score_and_without_a_home(tmp_path):
    """Nothing on stderr, where matplotlib spoke of a legend without artists and of a folder for its cache."""
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "step": 5, "seconds": 1.0, "train_loss": 1.0}\n')
    env = os.environ | {"HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    env = {
        name: value
        for name, value in env.items()
        if name not in ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    }
    done = run_hpctrain("plot", tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (tmp_path / "curves.png").exists()


def config(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def test_the_digest_is_added_when_it_is_known_at_the_end(tmp_path, monkeypatch):
    digest = tmp_path / "digest"
    monkeypatch.setenv("HPCTRAIN_IMAGE_DIGEST_FILE", str(digest))
    opened = start(tmp_path / "run")
    before = config(tmp_path / "run")
    assert before["image_digest"] is None
    digest.write_text(f"{DIGEST}\n")
    finish(opened)
    assert config(tmp_path / "run") == before | {"image_digest": DIGEST}
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


def test_the_digest_goes_into_the_configuration_of_this_start(tmp_path, monkeypatch):
    opened = start(tmp_path / "run")
    opened.end_epoch()
    opened.save({})
    opened._checkpointer.wait()
    digest = tmp_path / "digest"
    digest.write_text(DIGEST)
    monkeypatch.setenv("HPCTRAIN_IMAGE_DIGEST_FILE", str(digest))
    finish(start(tmp_path / "run", resume=tmp_path / "run"))
    assert config(tmp_path / "run")["image_digest"] is None
    assert config(tmp_path / "run", "config.2.json")["image_digest"] == DIGEST


def test_values_of_numpy_and_torch_are_numbers_in_the_files(tmp_path, capsys):
    opened, model = start(tmp_path / "run"), torch.nn.Linear(2, 1)
    opened.resume(torch.device("cpu"), 1, model)
    opened.start_epoch(1, 1, 1)
    opened.step(model(torch.ones(2)).square().mean())
    opened.end_epoch()
    opened.metrics(test_accuracy=torch.tensor(0.5), test_f1=numpy.float32(0.25))
    state = {"model": model.state_dict(), "optimizer": {}}
    opened.save(state, score=torch.tensor(0.5))
    opened.save(state, score=(numpy.float64(0.75), torch.tensor(0.25)))
    assert opened.best.evaluations.score == (0.75, 0.25)
    opened.finish(model, test_accuracy=torch.tensor(0.5), test_f1=numpy.float32(0.25))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for values in (lines[-1], json.loads((tmp_path / "run/result.json").read_text())):
        assert (values["test_accuracy"], values["test_f1"]) == (0.5, 0.25)
    path = tmp_path / "run/checkpoints/epoch-0001.pt"
    assert checkpoint.find_fitting(path, model, "optimizer") == path
    start(tmp_path / "other").finish(model)
    assert "\ndone  in 0." in capsys.readouterr().out


def test_a_loss_that_is_a_number_and_not_finite(tmp_path):
    opened = start(tmp_path / "run")
    opened.start_epoch(1, 1, 1)
    with pytest.raises(HpctrainError, match=r"at epoch 1, step 1, since step 1 on rank 0: training diverged"):
        opened.step(float("nan"))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {}}, "run.save.. got no 'optimizer', without which no run can be resumed"),
        ({"net": {}, "optimizer": {}}, "run.save.. got no state_dict.. of the model as 'model'"),
        (
            {"model": torch.nn.Linear(2, 1), "optimizer": {}},
            "run.save.. got no state_dict.. of the model as 'model'",
        ),
        (
            {"model": {}, "optimizer": {}, "args": argparse.Namespace()},
            "more than tensors and plain values .*Namespace",
        ),
        (
            {"model": {}, "optimizer": {}, "random": numpy.random.get_state()},
            "more than tensors and plain values .*numpy",
        ),
    ],
)
def test_a_state_that_could_not_be_resumed_from_is_refused_when_it_is_saved(tmp_path, state, message):
    """The run would have been lost when its job was requeued."""
    opened = start(tmp_path / "run")
    opened.resume(torch.device("cpu"), 1, torch.nn.Linear(2, 1))
    opened.end_epoch()
    with pytest.raises(HpctrainError, match=message):
        opened.save(state)


@pytest.mark.parametrize(("width", "error"), [(1, "has 1 epoch already"), (2, "weight")])
def test_a_finished_run_that_refuses_to_be_resumed_stays_as_it_was(tmp_path, width, error):
    """`hpctrain runs` would show it as stopped otherwise."""
    opened, model = start(tmp_path / "run"), torch.nn.Linear(2, 1)
    opened.resume(torch.device("cpu"), 1, model)
    opened.start_epoch(1, 1, 1)
    opened.step(torch.tensor(1.0))
    opened.end_epoch()
    opened.save({"model": model.state_dict(), "optimizer": {}})
    finish(opened)
    before = sorted((tmp_path / "run").iterdir())
    again = start(tmp_path / "run", resume=tmp_path / "run")
    with pytest.raises(HpctrainError, match=error):
        again.resume(torch.device("cpu"), 1, torch.nn.Linear(2, width))
    assert sorted((tmp_path / "run").iterdir()) == before
    (tmp_path / "run/checkpoints/epoch-0001.pt").write_bytes(b"")
    with pytest.raises(HpctrainError, match="every checkpoint in it is corrupt"):
        start(tmp_path / "run", resume=tmp_path / "run")
    assert sorted((tmp_path / "run").iterdir()) == before


def test_a_resume_reads_the_newest_checkpoint_once_to_verify_it_and_once_to_load_it(tmp_path):
    model = torch.nn.Linear(4096, 1024)
    size = model.weight.nbytes

    def count_bytes():  # of all read() calls of this process; reading through mmap() is not counted
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    opened = start(tmp_path / "run")
    opened.resume(torch.device("cpu"), 1, model)
    opened.end_epoch()
    opened.save({"model": model.state_dict(), "optimizer": {}})
    opened._checkpointer.wait()
    before = count_bytes()
    again = start(tmp_path / "run", resume=tmp_path / "run")
    assert size < count_bytes() - before < 1.1 * size
    assert again.resume(torch.device("cpu"), 1, model)["epoch"] == 1
    assert 2 * size < count_bytes() - before < 2.1 * size


def test_a_start_that_failed_before_its_first_step_leaves_its_folder_to_the_next(tmp_path):
    start(tmp_path / "run")
    opened = start(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").glob("config*")) == ["config.json"]
    opened.metrics(train_loss=1.0)
    with pytest.raises(HpctrainError, match="holds a run already"):
        start(tmp_path / "run")
    start(tmp_path / "an other")
    (tmp_path / "an other/notes.txt").touch()
    with pytest.raises(HpctrainError, match=f"with --resume auto --out '{tmp_path}/an other'$"):
        start(tmp_path / "an other")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(HpctrainError, match="holds a run already"):
        start(tmp_path / "model")


def test_resume_auto_without_out_is_for_jobs(tmp_path, monkeypatch):
    """Elsewhere each start would have another folder, and begin anew."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HpctrainError, match="--resume auto needs --out here"):
        start(None, "auto")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert start(None, "auto").folder == tmp_path / "runs/test/17"


def test_a_run_that_died_while_it_wrote_its_first_checkpoint_in_parts_begins_again(tmp_path):
    folder = tmp_path / "run"
    first = start(folder)
    first.metrics(train_loss=1.0)
    part = parts.path_of_rank(checkpoint.path_of(folder, 1), 0, 2)
    checkpoint.save(part, {})
    first._owner.release()
    with pytest.raises(
        HpctrainError,
        match=f"no checkpoint to resume from .* or start that run again with --resume auto --out {folder}",
    ):
        start(folder, resume=folder)
    with pytest.raises(HpctrainError, match=f"continue that run with --resume auto --out {folder}"):
        start(folder)
    again = start(folder, "auto")
    assert again.resume(torch.device("cpu"), 1, torch.nn.Linear(2, 1)) is None
    assert (folder / "metrics.jsonl").read_text() == ""
    part.write_text("corrupt")
    part.with_name("rank-0001-of-0002.pt").touch()
    with pytest.raises(HpctrainError, match="every checkpoint in it is corrupt"):
        start(folder, "auto")


def test_the_best_checkpoint_is_found_in_the_folders_of_earlier_runs(tmp_path):
    """A run that was resumed into another folder, where it was killed and resumed again."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder, before in zip(folders, [tmp_path / "third", *folders], strict=False):
        (folder / "checkpoints").mkdir(parents=True)
        write_json(folder / "config.json", {})
        write_json(folder / "config.2.json", {"resumed_from": str(checkpoint.path_of(before, 1))})
    best = checkpoint.path_of(folders[0], 1, 3)
    best.touch()
    os.mkfifo(folders[1] / "config.3.json")  # of somebody else
    signal.alarm(60)
    assert find_earlier_checkpoint([folders[2], folders[1]], 1, 3) == best
    assert find_earlier_checkpoint([folders[2]], 1, 3) == best
    assert find_earlier_checkpoint([folders[2]], 1, 4) == checkpoint.path_of(folders[2], 1, 4)
    signal.alarm(0)


@pytest.mark.parametrize("content", [None, "", "sha256:abc", "\0\xff"])
def test_a_digest_that_is_not_known_in_time_is_left_out(tmp_path, monkeypatch, content):
    monkeypatch.setenv("HPCTRAIN_IMAGE_DIGEST_FILE", str(tmp_path / "digest"))
    opened = start(tmp_path / "run")
    if content is not None:
        (tmp_path / "digest").write_bytes(content.encode("latin-1"))
    finish(opened)
    assert config(tmp_path / "run")["image_digest"] is None


def test_an_image_that_was_replaced_is_told_with_the_next_checkpoint(tmp_path, monkeypatch, capsys):
    """The launch script computes the digest while the run trains; it was in config.json at the end only."""
    monkeypatch.setenv("HPCTRAIN_IMAGE_DIGEST_FILE", str(tmp_path / "digest"))
    model = torch.nn.Linear(2, 1)
    for number, digest in enumerate((DIGEST, "sha256:" + "cd" * 32), start=1):
        opened = start(tmp_path / "run", "auto")
        opened.resume(torch.device("cpu"), 9, model)
        (tmp_path / "digest").write_text(digest)
        opened.start_epoch(number, 1, 1)
        opened.step(torch.tensor(1.0))
        opened.end_epoch()
        opened.save({"model": model.state_dict(), "optimizer": {}})
        opened.close()  # it is killed
    line = f"changed since the last start: image_digest {digest} (was {DIGEST})"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize("kind", ["link", "pipe", "of somebody else"])
def test_a_digest_that_somebody_else_may_have_put_there_is_left_out(tmp_path, monkeypatch, kind):
    """The cache may be in /tmp. A pipe there would keep the trainer from ending."""
    file = tmp_path / "digest"
    (tmp_path / "other").write_text(DIGEST)
    if kind == "link":
        file.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(file)
        opened = os.open(file, os.O_RDWR)
        threading.Timer(60, os.close, [opened]).start()  # ends what waits
    elif os.getuid() != 0:
        pytest.skip("needs root, to make a file of somebody else")
    else:
        file.write_text(DIGEST)
        os.chown(file, 12345, -1)
    monkeypatch.setenv("HPCTRAIN_IMAGE_DIGEST_FILE", str(file))
    started = time.monotonic()
    finish(start(tmp_path / "run"))
    assert config(tmp_path / "run")["image_digest"] is None and time.monotonic() - started < 50


def test_a_digest_that_was_known_at_the_start_stays(tmp_path, monkeypatch):
    (tmp_path / "digest").write_text(DIGEST)
    monkeypatch.setenv("HPCTRAIN_IMAGE_DIGEST_FILE", str(tmp_path / "digest"))
    monkeypatch.setenv("HPCTRAIN_IMAGE_DIGEST", "sha256:" + "cd" * 32)
    finish(start(tmp_path / "run"))
    assert config(tmp_path / "run")["image_digest"] == "sha256:" + "cd" * 32


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_file_that_cannot_be_written_is_named_and_not_there(tmp_path, monkeypatch, name):
    opened = start(tmp_path / "run") if name == "result.json" else None

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        HpctrainError, match=rf"run/{name}: cannot be written .*No space left on device.*--out"
    ):
        finish(opened) if opened else start(tmp_path / "run")
    assert not (tmp_path / "run" / name).exists()


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_ends_nothing(tmp_path):
    """A real one, with no byte left for metrics.jsonl, TensorBoard and the log of the rank.

    Such a run was FAILED at once.
    """
    code = """
import os, sys; sys.path[:0] = [sys.argv[1]]
import json, threading
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from hpctrain.files import atomic
from tests.run.test_record import record, start
atomic.RETRY_EVERY = 0.1
folder = Path("small/run")
opened = start(folder)
for step in range(1, 400):
    opened.metrics(train_loss=float(step))
    if step == 100:
        filler = open("small/filler", "wb", buffering=0)
        size = 1 << 20
        while size:
            try:
                filler.write(bytes(size))
            except OSError:
                size //= 2
        threading.Timer(2, lambda: os.truncate("small/filler", 0)).start()
opened.finish(record.torch.nn.Linear(2, 1))
steps = [json.loads(line)["train_loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
points = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("train_loss")
board = [point.value for point in points]
assert steps == board == [*range(1, 400)], (steps, board)
assert (folder / "logs/rank-0000.log").read_text().count("train_loss") == 399
record.os._exit(0)
"""
    done = run_on_small_disk("4m", sys.executable, "-c", code, REPOSITORY, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("hpctrain: ")]
    advice = "cannot be written (No space left on device); trying again for 300 s"
    assert said == f"hpctrain: small/run/metrics.jsonl: {advice}"


def test_the_log_of_10_000_steps_is_short(tmp_path, capsys):
    """No bar, and each line about training has the speed and the time that is left."""
    options = RunOptions(out=tmp_path / "run", epochs=20, watchdog=0)
    opened = record.Record(ALONE, "test", options, torch.device("cpu"))
    loss = torch.tensor(0.5)
    for epoch in range(1, 21):
        opened.start_epoch(epoch, 500, 32)
        for _ in range(500):
            opened.step(loss, learning_rate=0.001)
        opened.end_epoch()
        opened.metrics(test_loss=0.5, test_accuracy=0.75)
    opened.print("the first: train\x1b[2J.txt\nhpctrain: all is well")  # the name of a file
    opened.finish(torch.nn.Linear(2, 1), test_accuracy=0.75)
    said = capsys.readouterr()
    assert r"the first: train\x1b[2J.txt\nhpctrain: all is well" in said.out
    assert len(said.out) + len(said.err) < 200_000 and "\r" not in said.out + said.err
    training = [line for line in said.out.splitlines() if "train_loss" in line]
    assert len(training) == 100 and all(
        re.search(r"examples_per_s \S+  .* left$", line) for line in training
    ), training[:2]


def test_the_speed_after_a_resume_within_an_epoch_is_that_of_the_steps_since(tmp_path, monkeypatch):
    """The first line has the mean loss of ten steps, of which two are timed, at 0.5 s each."""
    now = 0.0
    monkeypatch.setattr(record.time, "perf_counter", lambda: now)
    model, cpu = torch.nn.Linear(2, 1), torch.device("cpu")
    for first, last in ((0, 8), (8, 20)):
        opened = start(tmp_path / "run", resume=tmp_path / "run" if first else None)
        opened.resume(cpu, 1, model)
        assert opened.start_epoch(1, 50, 4) == first
        for step in range(first, last):
            now += 0.5
            opened.step(torch.tensor(float(step)))
        opened.save({"model": model.state_dict(), "optimizer": {}})
        opened.close()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(line["train_loss"], line["examples_per_s"]) for line in lines] == [(4.5, 8), (14.5, 8)]


def test_every_rank_takes_part_in_a_line_of_metrics(tmp_path, monkeypatch):
    """A rank whose steps had no loss left the others waiting."""
    gathered = []
    monkeypatch.setattr(record, "gather", lambda world, value: gathered.append(value) or [value])
    opened = start(tmp_path / "run")
    opened.resume(torch.device("cpu"), 1, torch.nn.Linear(2, 1))
    opened.start_epoch(1, 5, 4)
    gathered.clear()
    opened.step(None)
    opened.step(torch.tensor(1.0))
    assert [means for means, *_ in gathered] == [{}, {"train_loss": (1.0, 1)}]


# ---- resume ----


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("small") / "digits", 64, 32)


def hpctrain(cwd, *words):
    env = os.environ | {"HPCTRAIN_CACHE": str(cwd / "cache"), "MPLCONFIGDIR": str(cwd)}
    return run_hpctrain(*words, cwd=cwd, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["train_ddp", "train_lightning", "nlp.ner"])
def test_a_run_that_died_after_its_last_checkpoint_is_finished(small, tmp_path, trainer):
    """With the result that it would have had. Only a run that has its result is refused."""
    options = ["--limit", "60"] if trainer == "nlp.ner" else ["--data", small]
    command = (trainer, "--epochs", "2", *options)
    done = hpctrain(tmp_path, *command, "--out", "run")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    before = json.loads((folder / "result.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    refused = hpctrain(tmp_path, *command, "--resume", "run")
    message = "hpctrain: error: run has 2 epochs already: give a larger --epochs to continue\n"
    assert (refused.returncode, refused.stderr) == (2, message)

    for name in ("result.json", "curves.png"):
        (folder / name).unlink()
    shutil.rmtree(folder / "model", ignore_errors=True)
    if trainer == "nlp.ner":  # it wrote the scores of the test set after its last checkpoint
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:-1]))
    fewer = hpctrain(tmp_path, trainer, "--epochs", "1", *options, "--resume", "run")
    assert (fewer.returncode, fewer.stderr) == (2, message)  # it ended as a run of one epoch
    assert not (folder / "result.json").exists()
    leftovers = [
        folder / "checkpoints/.epoch-0002.pt.0123456789ab.tmp",
        folder / ".model.0123456789ab.tmp/config.json",
    ]
    for leftover in leftovers:
        leftover.parent.mkdir(exist_ok=True)
        leftover.touch()
    done = hpctrain(tmp_path, *command, "--resume", "run")
    assert (
        done.returncode == 0 and "resuming after epoch 2 of run/checkpoints/epoch-0002.pt" in done.stdout
    ), done.stderr
    after = json.loads((folder / "result.json").read_text())
    of_the_start = {"seconds": 0, "speed": 0}
    assert before | of_the_start == after | of_the_start and after["epochs"] == 2
    assert (folder / "curves.png").exists() and not any(leftover.exists() for leftover in leftovers)
    assert (folder / "model/config.json").exists() == (trainer == "nlp.ner")
    again = (folder / "metrics.jsonl").read_text().splitlines()
    without_seconds = [{**json.loads(line), "seconds": 0} for line in again]
    assert without_seconds == [{**json.loads(line), "seconds": 0} for line in lines]


@pytest.mark.slow
def test_a_longer_run_that_died_after_its_last_checkpoint_is_finished(small, tmp_path):
    """Its result.json is that of fewer epochs."""
    command = ("train_ddp", "--data", small, "--epochs")
    for epochs, folder in ((1, "--out"), (2, "--resume")):
        assert hpctrain(tmp_path, *command, epochs, folder, "run").returncode == 0
    result = tmp_path / "run/result.json"
    complete = json.loads(result.read_text())
    result.write_text(json.dumps(complete | {"epochs": 1, "weights_sha256": "of epoch 1"}))
    done = hpctrain(tmp_path, *command, 2, "--resume", "run")
    of_the_start = {"seconds": 0, "speed": 0}
    assert (
        done.returncode == 0 and json.loads(result.read_text()) | of_the_start == complete | of_the_start
    ), done.stderr


@pytest.mark.slow
def test_a_run_that_is_interrupted(small, tmp_path):
    command = [sys.executable, "-m", "hpctrain", "train_single", "--data", small, "--epochs=9999"]
    command += ["--out=run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # tests in the background of a shell ignore it
    takes_it = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=tmp_path, **pipes, preexec_fn=takes_it) as process:
        assert any(line.startswith("epoch 1 ") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        said, status = process.stderr.read(), process.wait()
        assert re.fullmatch(r"hpctrain: interrupted in epoch \d+: --resume .*run.*\n", said), said
        assert status == 130
