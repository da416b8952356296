"""The speed of a step and the peak memory in result.json."""

import json
import os
import re
import sys
import time
import traceback
from types import SimpleNamespace

import pytest
import torch

from hpctrain.checkpoints import checkpoint
from hpctrain.checkpoints.checkpoint import with_plain_names
from hpctrain.distributed.world import ALONE
from hpctrain.nlp.batches.sampling import FeatureDataset
from hpctrain.nlp.tasks import classify
from hpctrain.nlp.training import finetune
from hpctrain.nlp.training.steps import Steps
from hpctrain.parser import trainer_parser
from hpctrain.run import record, speed
from hpctrain.run.reader import read_metrics
from hpctrain.training.batches import seed_torch
from hpctrain.vision import train as train_images
from hpctrain.vision.data import Images
from hpctrain.vision.folder import ImageDataset
from tests.helpers import write_digits
from tests.tools import warm_start


def test_times_are_those_of_the_steps_alone(monkeypatch):
    clock = iter([0.0, 0.1, 0.2, 9.0, *(9.0 + 0.01 * n for n in range(1, 19))])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    times = speed.StepTimes()
    assert times.figures(64) == {}
    times.start()
    times.step()
    times.step()
    times.start()  # after an evaluation of 8.8 s
    for _ in range(18):
        times.step()
    figures = times.figures(64)
    expected = {"step_ms_p50": 10, "step_ms_p95": 100, "examples_per_s": 64 * 20 / 0.38}
    assert figures == pytest.approx(expected, rel=1e-3)
    of_texts = {"tokens_per_s": 950 / 0.38, "padding_share": 0.05}
    assert times.figures(64, 950, 1000) == pytest.approx(expected | of_texts, rel=1e-3)


def test_waiting_for_data_is_a_share_of_the_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now)

    def load(*seconds):
        nonlocal now
        for wait in seconds:
            now += wait
            yield wait
        now += 5  # workers end

    times = speed.StepTimes()
    assert times.data_share is None
    times.start()
    for _ in times.time_data(load(1, 2)):
        now += 3
        times.step()
    assert times.data_share == pytest.approx(3 / 9)
    times.start()  # after the workers have ended
    for _ in times.time_data(load(0)):
        now += 1
        times.step()
    assert times.data_share == pytest.approx(3 / 10)


def load_slowly():
    """In a rank: each batch takes half a second on rank 1, for which rank 0 waits in the all-reduce."""

    def slowly(function):
        def wait(*arguments):
            time.sleep(0.5 * int(os.environ["RANK"]))
            return function(*arguments)

        return wait

    Images.batch = slowly(Images.batch)
    ImageDataset.__getitem__ = slowly(ImageDataset.__getitem__)
    FeatureDataset.__getitem__ = slowly(FeatureDataset.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["train_ddp", "train_lightning", "nlp.classify"])
def test_result_has_the_time_in_data_of_the_rank_that_waits_most(tmp_path, trainer):
    data = (
        ["--limit", "64"]
        if trainer == "nlp.classify"
        else ["--data", str(write_digits(tmp_path / "data", 64, 16))]
    )
    arguments = [trainer, *data, "--epochs", "1", "--batch-size", "8", "--out", "run"]
    done = warm_start.run(warm_start.torchrun_ranks(2, arguments, dict(os.environ), load_slowly), tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "run/result.json").read_text())["speed"]
    share = figures["data_share"]
    # Half a second of each step, whatever else runs on this machine. Lightning has the first batch before the
    # first step. The share is of the time of the slower rank, and the steps are timed on the other one, which
    # may begin a little later.
    steps = 64 / figures["examples_per_s"]
    assert share * steps >= 0.5 * 6.5
    assert 0.2 < share < 1
    assert f"data_share {share:.4g}" in done.stdout


def test_checkpoints_are_no_part_of_a_step(tmp_path, monkeypatch):
    """Each takes a quarter of an hour of a clock that the test sets: no real step of a busy machine does."""
    clock, saved = time.perf_counter, []

    def save_slowly(state, model):
        saved.append(900)
        return with_plain_names(state, model)

    monkeypatch.setattr(checkpoint, "with_plain_names", save_slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(saved))
    data = str(write_digits(tmp_path / "data", 64, 16))
    train_images.main(
        ALONE, ["--data", data, "--epochs", "1", "--checkpoint-every", "1", "--out", str(tmp_path / "run")]
    )
    figures = json.loads((tmp_path / "run/result.json").read_text())["speed"]
    assert saved and 64 / figures["examples_per_s"] < 900


def need_memory():
    if os.environ["RANK"] == "1":
        torch.ones(200_000_000)  # 800 MB


@pytest.mark.slow
def test_result_has_the_memory_of_the_rank_that_needs_most(tmp_path):
    data = write_digits(tmp_path / "data")
    arguments = ["train_ddp", "--data", str(data), "--epochs", "1", "--out", "run"]
    done = warm_start.run(warm_start.torchrun_ranks(2, arguments, dict(os.environ), need_memory), tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "run/result.json").read_text())["speed"]
    assert figures.keys() == {"step_ms_p50", "step_ms_p95", "examples_per_s", "data_share", "peak_memory_mb"}
    assert 900 < figures["peak_memory_mb"] < 3000
    assert 0 < figures["step_ms_p50"] <= figures["step_ms_p95"]
    assert f"peak_memory_mb {figures['peak_memory_mb']:.4g}" in done.stdout
    lines = [line for line in read_metrics(tmp_path / "run") if "train_loss" in line]
    assert (
        all(900 < line["peak_memory_mb"] <= figures["peak_memory_mb"] for line in lines) and len(lines) == 5
    )
    assert "gpu_percent" not in lines[0] and {line["learning_rate"] for line in lines} == {0.03}


def test_the_use_of_a_gpu(monkeypatch):
    """With an imitation of NVML, because there is no GPU here."""
    assert speed.gpu_percent(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87 if device.index == 1 else 0)
    assert speed.gpu_percent(torch.device("cuda:1")) == 87.0

    def raises(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", raises)
    assert speed.gpu_percent(torch.device("cuda:1")) is None


def test_a_line_of_metrics_has_memory_and_use_and_the_log_has_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "gpu_percent", lambda device: 87.0)
    monkeypatch.setattr(record, "peak_memory", lambda device: 1234.56)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    args = trainer_parser("test", "").parse_args(["--out", str(tmp_path / "run"), "--watchdog", "0"])
    args.epochs = 1
    opened = record.Record(ALONE, "test", args, torch.device("cpu"))
    opened.start_epoch(1, 1, 8)
    opened.step(torch.tensor(2.5))
    (line,) = read_metrics(tmp_path / "run")
    assert (line["train_loss"], line["peak_memory_mb"], line["gpu_percent"]) == (2.5, 1234.6, 87.0)
    printed = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"epoch 1 step 1  train_loss 2\.5  examples_per_s [\d.e+]+  0 s left", printed)


def test_tokens_of_steps_in_a_profile_do_not_count():
    profile = SimpleNamespace(is_running=True, step=lambda waited, left: "")
    times = speed.StepTimes(profile)
    times.count_tokens(5, 6)
    times.step()
    profile.is_running = False
    times.count_tokens(2, 3)  # two parts of a step
    times.count_tokens(1, 1)
    times.step()
    assert times.tokens == [3, 4]


def count_tokens(monkeypatch, counts):
    """Let each training step count what the model gets."""

    def compute_loss(steps, parallel, batch, plain=Steps.compute_loss):
        mask = batch.attention_mask
        counts.append((len(mask), int(mask.sum()), mask.numel()))
        return plain(steps, parallel, batch)

    monkeypatch.setattr(Steps, "compute_loss", compute_loss)


@pytest.mark.slow
def test_result_has_tokens_without_padding(tmp_path, monkeypatch):
    """One of 65 examples is left out in each epoch, and an evaluation does not count."""
    counts = []
    count_tokens(monkeypatch, counts)
    options = ["--epochs=2", "--limit=65", "--batch-size=16", "--accumulate=2", "--eval-every=3"]
    finetune.fine_tune(classify.TASK, ALONE, [*options, "--out", str(tmp_path / "run")])
    figures = json.loads((tmp_path / "run/result.json").read_text())["speed"]
    examples, real, padded = map(sum, zip(*counts, strict=True))
    assert examples == 2 * 64
    assert figures["tokens_per_s"] / figures["examples_per_s"] == pytest.approx(real / examples, rel=1e-4)
    assert 0 < figures["padding_share"] == pytest.approx(1 - real / padded, abs=1e-4)


@pytest.mark.slow
def test_tokens_are_those_of_all_ranks(tmp_path):
    options = ["nlp.classify", "--epochs", "1", "--limit", "64", "--batch-size", "16", "--out", "run"]
    done = warm_start.run(warm_start.torchrun_ranks(2, options, dict(os.environ)), tmp_path)
    assert done.returncode == 0, done.stderr
    # 64 of 64 examples are trained on
    mean = float(re.search(r"train: .* \(mean ([0-9.]+),", done.stdout)[1])
    figures = json.loads((tmp_path / "run/result.json").read_text())["speed"]
    assert figures["tokens_per_s"] / figures["examples_per_s"] == pytest.approx(mean, abs=0.06)


@pytest.mark.parametrize("number", [0, 5, -(2**63), 2**63 - 1])
def test_seed_of_a_step_is_that_of_torch_without_its_cost(number, monkeypatch):
    """torch formats the stack for each kind of device that it has not found."""
    torch.manual_seed(number)
    expected = torch.rand(3)
    monkeypatch.setattr(traceback, "format_stack", None)
    seed_torch(number)
    assert torch.equal(torch.rand(3), expected)
