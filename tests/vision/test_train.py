"""The trainers in one process and on two ranks, and train_horovod in the image.

test_matrix.py is about launchers.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
import slurm_cluster
import torch
from transformers import get_cosine_schedule_with_warmup

from hpctrain.checkpoints import checkpoint
from hpctrain.cli import COMMANDS, load_command
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import UsageError
from hpctrain.training.run import Run
from hpctrain.vision import data, recipe, train_horovod
from hpctrain.vision import train as train_images
from hpctrain.vision.model import MnistNet, ResNet50
from hpctrain.vision.train_horovod import HorovodOptions, learning_rate
from hpctrain.vision.train_lightning import Classifier, LightningOptions
from tests.helpers import SIF, run_command, write_digits
from tests.tools import warm_start

SRC = slurm_cluster.REPOSITORY / "src"
PYTHON = [sys.executable, "-m", "hpctrain"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--log-dir=logs"]


def run(launcher, *args, cwd, **env):
    """Run hpctrain with the words of a launcher, or on a number of warm-started ranks."""
    words, env = list(map(str, args)), os.environ | env
    if isinstance(launcher, int):
        ranks = (
            [warm_start.Rank(words, env)]
            if launcher == 1
            else warm_start.torchrun_ranks(launcher, words, env)
        )
        return warm_start.run(ranks, cwd)
    return run_command([*launcher, *words], cwd=cwd, env=env)


def train(launcher, *args, cwd, trainer="train_ddp", **env):
    """Train on few digits, unless --data is given; returns the output."""
    if "--data" not in args:
        args = ("--data", "digits", *args)
        if not (cwd / "digits").exists():
            write_digits(cwd / "digits")
    done = run(launcher, trainer, *args, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_image(*command, **env):
    """A launcher inside the image, which has Horovod, with the current sources."""
    env = {
        "PYTHONPATH": SRC,
        "OMP_NUM_THREADS": 1,
        "HOROVOD_FUSION_THRESHOLD": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29517,
        "OMPI_ALLOW_RUN_AS_ROOT": 1,
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1,
        **env,
    }
    options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    shell = [str(slurm_cluster.CLUSTER_SH), "run", "-b", str(SRC), "-b", str(SIF), "--"]
    return [*shell, "apptainer", "exec", "--bind", str(SRC), *options, str(SIF), *command]


HOROVOD_ALONE = in_image("python", "-m", "hpctrain")
HOROVOD_TWO = in_image("torchrun", "--nproc-per-node=2", "-m", "hpctrain")


def result(folder):
    return json.loads((folder / "result.json").read_text())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder, epoch):
    return checkpoint.load(checkpoint.path_of(folder, epoch), torch.device("cpu"))["model"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two epochs on digits with the same global batch.

    In one process, on two ranks, and on two ranks that torchrun has started.
    """
    cwd = tmp_path_factory.mktemp("runs")
    for name, launcher in (("one", 1), ("two", 2), ("again", [*TORCHRUN, "-m", "hpctrain"])):
        train(launcher, "--epochs", 2, "--out", name, cwd=cwd)
    return cwd


@pytest.fixture
def few(tmp_path):
    """16 and 6 images, for a ResNet-50 on a CPU."""
    return write_digits(tmp_path / "few", 16, 6)


@pytest.mark.slow
@pytest.mark.main_road("the same weights with every launcher and runtime")
def test_two_ranks_give_the_weights_of_one_process(tmp_path):
    """To float tolerance after few steps: rounding errors grow with each step, as ReLUs switch."""
    for name, launcher in (("one", 1), ("two", 2)):
        train(launcher, "--epochs", 2, "--batch-size", 106, "--out", name, cwd=tmp_path)
    one, two = weights(tmp_path / "one", 2), weights(tmp_path / "two", 2)
    assert list(one) == list(two)  # no "module." to strip
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5)
    assert result(tmp_path / "two")["test_loss"] == pytest.approx(
        result(tmp_path / "one")["test_loss"], rel=1e-4
    )


@pytest.mark.slow
def test_the_same_command_gives_the_same_weights_bit_for_bit(runs):
    assert result(runs / "two")["weights_sha256"] == result(runs / "again")["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "launcher"), [("one", 1), ("two", 2)])
def test_an_epoch_resumed_is_bit_for_bit_one_that_was_not_interrupted(runs, tmp_path, name, launcher):
    train(launcher, "--epochs", 1, "--out", tmp_path / "half", cwd=tmp_path)
    out = train(launcher, "--epochs", 2, "--resume", tmp_path / "half", cwd=tmp_path)
    assert "resuming after epoch 1" in out
    assert result(tmp_path / "half")["weights_sha256"] == result(runs / name)["weights_sha256"]
    # The metrics continue where they stopped, and the first configuration is kept.
    assert [line["epoch"] for line in metrics(tmp_path / "half") if "test_accuracy" in line] == [1, 2]
    assert json.loads((tmp_path / "half" / "config.json").read_text())["options"]["epochs"] == 1
    assert json.loads((tmp_path / "half" / "config.2.json").read_text())["options"]["epochs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_checkpoint_of_an_earlier_version_is_resumed_bit_for_bit(tmp_path, precision):
    """It has each object as an entry of its own, and of a run in fp32 an empty scaler."""
    options = ("--epochs", 2, "--precision", precision)
    train(1, *options, "--out", "whole", cwd=tmp_path)
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("result.json", "checkpoints/epoch-0002.pt"):
        (cut / name).unlink()
    path = cut / "checkpoints/epoch-0001.pt"
    state = checkpoint.load(path, torch.device("cpu"))
    for name in ("scores", "given"):
        del state[name]
    checkpoint.save(path, state | {"scaler": {}} | state.pop("tracked"))
    out = train(1, *options, "--resume", "cut", cwd=tmp_path)
    assert "resuming after epoch 1" in out and "warning" not in out
    assert result(cut)["weights_sha256"] == result(tmp_path / "whole")["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "ranks"), [("train_ddp", 4), ("train_ddp", 8), ("train_lightning", 4)])
def test_more_than_two_ranks_are_resumed_bit_for_bit(tmp_path, trainer, ranks):
    """With two ranks each sum has two terms.

    With more, its last bits depend on where in DDP's buckets a gradient lies.
    """
    for name, epochs, more in (("whole", 2, ()), ("cut", 1, ()), ("cut", 2, ("--resume", "cut"))):
        train(ranks, "--epochs", epochs, *(more or ("--out", name)), cwd=tmp_path, trainer=trainer)
    assert result(tmp_path / "cut")["weights_sha256"] == result(tmp_path / "whole")["weights_sha256"]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_resumed_in_one_process(runs, tmp_path):
    out = train(1, "--epochs", 3, "--resume", runs / "two", "--out", tmp_path / "more", cwd=tmp_path)
    assert "resuming after epoch 2" in out
    assert not (runs / "two" / "checkpoints" / "epoch-0003.pt").exists()


@pytest.mark.slow
def test_the_run_folder(runs):
    folder = runs / "two"
    config = json.loads((folder / "config.json").read_text())
    assert config["world"]["size"] == 2 and config["world"]["launcher"] == "torchrun"
    assert config["options"]["batch_size"] == 32 and config["versions"]["torch"] == torch.__version__
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0000.log", "rank-0001.log"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any((folder / "tensorboard").iterdir())
    assert metrics(folder)[0].keys() >= {"epoch", "step", "seconds", "train_loss", "examples_per_s"}
    # Each of the 80 test examples counts once: the accuracy is a multiple of 1 / 80.
    correct = result(folder)["test_accuracy"] * 80
    assert correct == pytest.approx(round(correct), abs=1e-6)


@pytest.mark.slow
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


def same_metrics(one, other):
    not_compared = ("seconds", "examples_per_s", "learning_rate", "peak_memory_mb")
    return [
        {name: value for name, value in line.items() if name not in not_compared} for line in metrics(one)
    ] == [
        {name: value for name, value in line.items() if name not in not_compared} for line in metrics(other)
    ]


@pytest.mark.slow
def test_lightning_on_two_ranks_gives_the_weights_and_metrics_of_ddp_bit_for_bit(runs, tmp_path):
    out = train(2, "--epochs", 2, "--out", "run", cwd=tmp_path, trainer="train_lightning")
    assert result(tmp_path / "run")["weights_sha256"] == result(runs / "two")["weights_sha256"]
    assert same_metrics(tmp_path / "run", runs / "two")
    assert "epoch 2 step 20  test_loss" in out and (tmp_path / "run" / "curves.png").exists()
    assert list(weights(tmp_path / "run", 2)) == list(weights(runs / "two", 2))


@pytest.mark.slow
def test_fsdp_on_two_ranks_gives_the_weights_and_metrics_of_ddp_bit_for_bit(runs, tmp_path):
    train(2, "--epochs", 2, "--out", "run", cwd=tmp_path, trainer="train_fsdp")
    assert result(tmp_path / "run")["weights_sha256"] == result(runs / "two")["weights_sha256"]
    assert same_metrics(tmp_path / "run", runs / "two")
    # In bf16 as well, and with 5 test images in two batches on rank 1, but 4 in one on rank 0.
    options = ("--data", write_digits(tmp_path / "nine", 16, 9), "--batch-size=4", "--epochs=1")
    options += ("--precision=bf16",)
    for trainer in ("train_ddp", "train_fsdp"):
        train(2, *options, "--out", trainer, cwd=tmp_path, trainer=trainer)
    assert (
        result(tmp_path / "train_ddp")["weights_sha256"] == result(tmp_path / "train_fsdp")["weights_sha256"]
    )
    assert same_metrics(tmp_path / "train_ddp", tmp_path / "train_fsdp")
    train(1, *options, "--out", "one", cwd=tmp_path, trainer="train_fsdp")
    assert result(tmp_path / "one")["test_loss"] == pytest.approx(
        result(tmp_path / "train_fsdp")["test_loss"], rel=1e-2
    )


def test_evaluation_leaves_the_model_in_training_mode(tmp_path):
    """With the loss and the accuracy of a model that gives each digit the same probability, but for 3."""
    args = recipe.parse(recipe.vision_parser("train_ddp", ""), [], recipe.ImageOptions())
    _, test_set = data.load(None)
    model = MnistNet()
    for parameter in model.fc2.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.ones_(model.fc2.bias[3:4])
    share = (test_set.labels == 3).double().mean().item()
    with Run("test", out=tmp_path / "run") as opened:
        opened.score(**recipe.evaluate(model, test_set, args, opened))
        assert opened.scores["test_loss"] == pytest.approx(math.log(9 + math.e) - share, rel=1e-5)
        assert opened.scores["test_accuracy"] == pytest.approx(share, rel=1e-9) and model.training


def test_the_learning_rate_falls_after_each_epoch():
    args = recipe.ImageOptions(lr=0.8, lr_decay=0.5, schedule=None)
    rates = [recipe.learning_rate(args, epoch, 0, 10) for epoch in range(3)]
    assert rates == pytest.approx([0.8, 0.4, 0.2])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["train_ddp", "train_lightning"])
def test_the_learning_rate_rises_and_falls_as_a_cosine(trainer, tmp_path):
    """Step by step, also when the run is resumed, for which the number of epochs must stay."""
    options = ["--schedule", "cosine", "--warmup", 0.25, "--lr", 0.1, "--out", "run", "--data", "digits"]
    write_digits(tmp_path / "digits")
    train(1, "--epochs", 2, *options, cwd=tmp_path, trainer=trainer)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    steps = max(found)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    expected = get_cosine_schedule_with_warmup(optimizer, round(0.25 * steps), steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        expected.step()
    means = {step: sum(rates[step - 2 : step]) / 2 for step in range(2, steps + 1, 2)}  # of a line
    assert found == pytest.approx(means, rel=1e-6)
    whole = result(tmp_path / "run")["weights_sha256"]
    (tmp_path / "run/checkpoints/epoch-0002.pt").unlink()
    (tmp_path / "run/result.json").unlink()
    refused = run(1, trainer, "--epochs", 3, *options, "--resume", "run", cwd=tmp_path)
    assert refused.returncode == 2 and "--epochs 3 instead of 2" in refused.stderr
    train(1, "--epochs", 2, *options, "--resume", "run", cwd=tmp_path, trainer=trainer)
    assert result(tmp_path / "run")["weights_sha256"] == whole


@pytest.mark.slow
def test_lightning_prints_nothing_of_its_own(runs, tmp_path):
    write_digits(tmp_path / "digits")
    done = run(PYTHON, "train_lightning", "--data", "digits", "--epochs", 2, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and "Tip" not in done.stdout
    assert result(tmp_path / "run")["weights_sha256"] == result(runs / "one")["weights_sha256"]


@pytest.mark.slow
def test_lightning_evaluates_fewer_images_than_ranks_as_ddp(tmp_path):
    write_digits(tmp_path / "digits", train=6, test=2)
    for trainer, ranks in (("train_ddp", 1), ("train_lightning", 3)):
        options = ["--batch-size", 6, "--epochs", 1, "--out", trainer]
        train(ranks, *options, cwd=tmp_path, trainer=trainer)
    alone, of_three = (result(tmp_path / trainer) for trainer in ("train_ddp", "train_lightning"))
    assert of_three["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
    assert of_three["test_accuracy"] == alone["test_accuracy"]


@pytest.mark.slow
def test_force_changes_within_an_epoch_what_it_says(tmp_path, monkeypatch):
    """In train_lightning as in train_ddp: Lightning restores the options of the optimizer."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    options = ["--data", str(write_digits(tmp_path / "digits", 128, 16)), "--epochs", "1"]
    for trainer in ("train_ddp", "train_lightning"):
        folder, main = tmp_path / trainer, load_command(trainer).main
        main(ALONE, [*options, "--checkpoint-every", "2", "--out", str(folder)])
        for name in ("result.json", "checkpoints/epoch-0001.pt"):
            (folder / name).unlink()
        main(ALONE, [*options, "--lr", "0.01", "--fast-kernels", "--force", "--resume", str(folder)])
    weights = [result(tmp_path / trainer)["weights_sha256"] for trainer in ("train_ddp", "train_lightning")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_sigterm_ends_lightning_at_once(tmp_path):
    command = [*PYTHON, "train_lightning", "--epochs", "500", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("epoch 1 ") for line in process.stdout)
        process.terminate()
        assert process.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.parametrize("fast", [False, True])
def test_fast_kernels_on_a_cpu_are_on_request(fast):
    args = recipe.parse(
        recipe.vision_parser("train_ddp", ""), ["--fast-kernels"] * fast, recipe.ImageOptions()
    )
    training_set, _ = data.load(None)
    model = recipe.build_model(args, training_set, torch.device("cpu"))
    optimizer = recipe.make_optimizer(args, model.parameters(), "fp32")
    assert model.conv2.weight.is_contiguous(memory_format=torch.channels_last) == fast
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [fast]
    assert recipe.uses_fast_kernels(args, torch.device("cuda"))
    if fast:
        with pytest.raises(UsageError, match="--fast-kernels is not for --strategy fsdp"):
            train_images.parse(["--fast-kernels"], ALONE, "train_fsdp")


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="torch cannot compile below a path with a space")
@pytest.mark.parametrize("trainer", ["train_ddp", "train_fsdp"])
def test_compiled_training_is_the_same_to_rounding_and_its_checkpoints_are_plain(runs, tmp_path, trainer):
    """On two ranks, from a checkpoint of a run that was not compiled."""
    shutil.copytree(runs / "two", tmp_path / "run")
    for name in ("result.json", "checkpoints/epoch-0002.pt"):
        (tmp_path / "run" / name).unlink()
    cache = tmp_path / "kernels"
    options = ("--epochs", 2, "--resume", "run", "--compile")
    out = train(2, *options, cwd=tmp_path, trainer=trainer, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert "resuming after epoch 1" in out and list(cache.rglob("*.cpp"))
    assert json.loads((tmp_path / "run/config.2.json").read_text())["options"]["compile"]
    compiled, plain = (metrics(folder) for folder in (tmp_path / "run", runs / "two"))
    for name in ("train_loss", "test_loss"):
        assert [x[name] for x in compiled if name in x] == pytest.approx(
            [x[name] for x in plain if name in x], rel=1e-3
        )
    MnistNet().load_state_dict(weights(tmp_path / "run", 2))
    assert list(weights(tmp_path / "run", 2)) == list(weights(runs / "two", 2))


@pytest.mark.slow
def test_compile_without_a_compiler_is_one_line(tmp_path):
    done = run(
        1,
        "train_ddp",
        "--compile",
        cwd=tmp_path,
        PATH="/nonexistent",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "kernels"),
    )
    assert done.returncode == 1 and not (tmp_path / "runs").exists()
    assert re.fullmatch(
        r"hpctrain: error: --compile: torch cannot compile here \(.*\): it needs g\+\+ and .*\n", done.stderr
    )


@pytest.mark.slow
def test_deterministic_training_has_the_same_weights_on_a_cpu(runs, tmp_path):
    train(1, "--epochs", 1, "--out", "run", cwd=tmp_path)
    train(1, "--epochs", 2, "--resume", "run", "--deterministic", cwd=tmp_path)
    assert result(tmp_path / "run")["weights_sha256"] == result(runs / "one")["weights_sha256"]


@pytest.mark.slow
def test_bf16_is_another_computation_and_the_same_in_lightning(few, tmp_path):
    """On few images: convolutions in bf16 are slow on a CPU that cannot compute in it."""
    cases = [("fp32", "train_ddp", ()), ("bf16", "train_ddp", ("--precision", "bf16", "--fast-kernels"))]
    for name, trainer, options in [*cases, ("lightning", "train_lightning", cases[1][2])]:
        train(
            1,
            "--data",
            few,
            "--batch-size",
            8,
            "--epochs",
            2,
            *options,
            "--out",
            name,
            cwd=tmp_path,
            trainer=trainer,
        )
    fp32, bf16, lightning = (result(tmp_path / name) for name in ("fp32", "bf16", "lightning"))
    assert bf16["weights_sha256"] == lightning["weights_sha256"] != fp32["weights_sha256"]
    assert bf16["test_loss"] == pytest.approx(fp32["test_loss"], rel=0.2)
    assert weights(tmp_path / "bf16", 2)["conv1.weight"].dtype == torch.float32


@pytest.mark.slow
def test_data_parallel_in_one_process(runs, tmp_path):
    """On a CPU, DataParallel calls the model directly. The checkpoint has no "module." in its names."""
    train(1, "--epochs", 2, "--strategy", "dp", "--out", "run", cwd=tmp_path)
    assert result(tmp_path / "run")["weights_sha256"] == result(runs / "one")["weights_sha256"]


@pytest.mark.parametrize(
    ("trainer", "alone", "two"),
    [("train_ddp", 1, 2), ("train_lightning", 1, 2), ("train_horovod", HOROVOD_ALONE, HOROVOD_TWO)],
)
def test_a_checkpoint_goes_from_two_ranks_to_one_and_back(runs, sif, tmp_path, trainer, alone, two):
    """Both end near the uninterrupted run. The same number of ranks gives exactly its weights."""
    launchers = {"one": alone, "two": two}
    for name, launcher in launchers.items():
        train(launcher, "--epochs", 1, "--out", name, cwd=tmp_path, trainer=trainer)
    for first, second in (("one", "two"), ("two", "one"), ("two", "two")):
        name = f"{first}-{second}"
        shutil.copytree(tmp_path / first, tmp_path / name)
        out = train(launchers[second], "--epochs", 2, "--resume", name, cwd=tmp_path, trainer=trainer)
        assert "resuming after epoch 1" in out
        assert result(tmp_path / name)["test_loss"] == pytest.approx(
            result(runs / "two")["test_loss"], rel=0.05
        )
        assert not any(key.startswith("module.") for key in weights(tmp_path / name, 2))
    assert result(tmp_path / "two-two")["weights_sha256"] == result(runs / "two")["weights_sha256"]


@pytest.mark.slow
def test_resnet50_is_resnet50():
    """torchvision's has 25,557,032 parameters with 3 channels and 1000 classes; here 1 and 10."""
    parameters = sum(p.numel() for p in ResNet50().parameters())
    assert parameters == 25_557_032 - 2 * 64 * 7 * 7 - (2048 + 1) * 1000 + (2048 + 1) * 10
    assert recipe.RECIPES["resnet50"].side == 128


@pytest.mark.parametrize(
    ("trainer", "launcher"),
    [("train_ddp", 2), ("train_lightning", 2), ("train_fsdp", 2), ("train_horovod", HOROVOD_TWO)],
)
def test_resnet50_is_saved_as_it_was_measured(few, sif, tmp_path, trainer, launcher):
    """The metrics of two ranks, whose statistics differ, are those of the one model in the checkpoint."""
    args = ("--model", "resnet50", "--data", few, "--batch-size", 8, "--epochs", 1, "--out", "run")
    train(launcher, *args, cwd=tmp_path, trainer=trainer)
    model = ResNet50().eval()
    model.load_state_dict(weights(tmp_path / "run", 1))
    assert model.net.resnet.embedder.embedder.normalization.num_batches_tracked == 2
    images, labels = data.load(few, 128)[1].batch(torch.arange(6), torch.device("cpu"))
    assert images.shape == (6, 1, 128, 128)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    assert result(tmp_path / "run")["test_loss"] == pytest.approx(loss, rel=1e-4)
    saved = checkpoint.load(tmp_path / "run/checkpoints/epoch-0001.pt", torch.device("cpu"))
    state = saved["tracked"]["optimizer"] if "tracked" in saved else saved["optimizer_states"][0]
    assert all(s["step"] == 2 for s in state["state"].values())  # Adam has counted the steps of training only


@pytest.mark.parametrize(
    "launcher",
    [
        HOROVOD_TWO,
        in_image("horovodrun", "-np", "2", "python", "-m", "hpctrain"),
        in_image("mpirun", "-np", "2", "python", "-m", "hpctrain"),
        in_image("mpirun", "-np", "2", "python", "-m", "hpctrain", HOROVOD_CONTROLLER="mpi"),
    ],
    ids=["torchrun", "horovodrun", "mpirun", "mpirun and MPI"],
)
def test_horovod_gives_the_weights_and_metrics_of_ddp_under_every_launcher(runs, sif, tmp_path, launcher):
    """Bit for bit: tensor fusion is off, and with two ranks every sum has two terms."""
    train(launcher, "--epochs", 2, "--out", "run", cwd=tmp_path, trainer="train_horovod")
    assert result(tmp_path / "run")["weights_sha256"] == result(runs / "two")["weights_sha256"]
    assert same_metrics(tmp_path / "run", runs / "two")


def test_compiled_training_with_horovod_is_that_of_ddp(runs, sif, tmp_path):
    """The CPU image has no compiler: the graphs are made, but not the kernels of C++."""
    code = "import functools, sys, torch; "
    code += "torch.compile = functools.partial(torch.compile, backend='aot_eager'); "
    code += "from hpctrain.__main__ import main; sys.argv[0] = 'hpctrain'; main()"
    launcher = in_image("torchrun", "--nproc-per-node=2", "--no-python", "python", "-c", code)
    train(launcher, "--epochs", 2, "--compile", "--out", "run", cwd=tmp_path, trainer="train_horovod")
    assert same_metrics(tmp_path / "run", runs / "two")


def test_the_options_of_horovod(runs, sif, tmp_path):
    """A step of two batches of 16 equals one of 32; 16-bit gradients give a similar loss."""

    def loss(name, *args):
        train(HOROVOD_TWO, "--epochs", 2, *args, "--out", name, cwd=tmp_path, trainer="train_horovod")
        return result(tmp_path / name)["test_loss"]

    exact = result(runs / "two")["test_loss"]
    assert loss("parts", "--batch-size", 16, "--batches-per-allreduce", 2) == pytest.approx(exact, rel=0.05)
    halves = loss("fp16", "--fp16-allreduce")
    assert halves != exact and halves == pytest.approx(exact, rel=0.1)


def test_the_learning_rate_warms_up_step_by_step_and_then_decays():
    args = HorovodOptions(lr=0.8, lr_decay=0.5, warmup_epochs=2, schedule=None)
    rates = [learning_rate(step, 10, World(0, 4, 0, 4, 0, 1, "torchrun"), args) for step in range(40)]
    assert (
        rates[0] == pytest.approx(0.2) and rates[10] == pytest.approx(0.5) and rates[20] == pytest.approx(0.8)
    )
    assert all(b - a == pytest.approx(0.03) for a, b in pairwise(rates[:21]))
    assert rates[29] == pytest.approx(0.8) and rates[30] == rates[39] == pytest.approx(0.4)
    args.warmup_epochs = 0
    assert learning_rate(0, 10, World(0, 4, 0, 4, 0, 1, "torchrun"), args) == 0.8
    args.schedule, args.warmup, args.epochs = "cosine", 0.5, 2
    rates = [learning_rate(step, 10, World(0, 4, 0, 4, 0, 1, "torchrun"), args) for step in (0, 10, 15)]
    assert rates == pytest.approx([0, 0.8, 0.4])


def test_the_ranks_of_horovod_share_each_batch_of_a_step_evenly():
    four = World(0, 4, 0, 4, 0, 1, "torchrun")
    options = ["--batches-per-allreduce", "2", "--batch-size"]
    assert train_horovod.parse([*options, "8"], four).batch_size == 8
    for size in ("2", "6"):
        with pytest.raises(UsageError, match=f"^--batch-size {size} is the global batch, and 4 ranks cannot"):
            train_horovod.parse([*options, size], four)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["plain_ddp.py", "plain_lightning.py"])
def test_scripts_of_users(script, tmp_path):
    done = run(TORCHRUN, slurm_cluster.REPOSITORY / "tests/scripts" / script, cwd=tmp_path)
    said = re.findall(r"rank (\d) of 2 loss ([\d.]+)", done.stdout)
    assert sorted(rank for rank, _ in said) == ["0", "1"] and len({loss for _, loss in said}) == 1, (
        done.stderr
    )


@pytest.mark.slow
def test_check(tmp_path):
    for launcher, ranks, text in ((PYTHON, 1, "1 rank"), ([*TORCHRUN, "-m", "hpctrain"], 2, "2 ranks")):
        done = run(launcher, "check", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"check passed: {text} on 1 host (" in done.stdout
        assert f"rank {ranks - 1} of {ranks}" in done.stdout


@pytest.mark.slow
def test_a_missing_main_address_is_an_error(tmp_path):
    step = {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip
    done = run(1, "train_ddp", cwd=tmp_path, **step)
    assert done.returncode == 1 and "MASTER_ADDR and MASTER_PORT are not set" in done.stderr


def test_train_single_is_train_ddp():
    """Another name of it, which the notebooks use."""
    assert COMMANDS["train_single"][0] == COMMANDS["train_ddp"][0]


BAD_INPUT = [
    (["no_such_trainer"], 2, "there is no command 'no_such_trainer': hpctrain --help lists all"),
    (["train_dpp"], 2, "there is no command 'train_dpp': did you mean train_ddp?"),
    (
        ["train_ddp", "--batch-sise=8"],
        2,
        "unrecognized arguments: --batch-sise=8: did you mean --batch-size? (hpctrain",
    ),
    (["train_ddp", "--epochs", "none"], 2, "argument --epochs: invalid int value: 'none'"),
    (["train_ddp", "--epochs", "0"], 2, "0 is not above zero"),
    (["train_ddp", "--lr", "nan"], 2, "nan is not above zero"),
    (["train_ddp", "--lr", "inf"], 2, "inf is not finite"),
    (["train_ddp", "--bogus"], 2, "unrecognized arguments: --bogus"),
    (
        ["train_lightning", "--devices", "4"],
        2,
        "--devices 4, but without a launcher there is 1 rank on this node: make them equal",
    ),
    (
        ["train_lightning", "--num-nodes", "2"],
        2,
        "--num-nodes 2, but without a launcher there is 1 rank on 1 node: make them equal",
    ),
    (
        ["train_ddp", "--schedule", "cosine", "--lr-decay", "1"],
        2,
        "--lr-decay is not for --schedule cosine",
    ),
    (["train_ddp", "--warmup", "0.1"], 2, "--warmup needs --schedule cosine"),
    (
        ["train_horovod", "--schedule", "cosine", "--warmup-epochs", "1"],
        2,
        "--warmup-epochs is not for --schedule cosine",
    ),
    (["train_horovod", "--warmup-epochs", "-1"], 2, "--warmup-epochs -1 is below zero"),
    (
        ["train_horovod"],
        1,
        "Horovod cannot be imported (No module named 'horovod'): run this in the container",
    ),
    (["train_ddp", "--batch-size", "1438"], 2, "--batch-size 1438 is more than the 1437 training examples"),
    (["train_ddp", "--data", "nowhere"], 1, "nowhere: no such folder"),
    (["train_ddp", "--resume", "nowhere"], 1, "nowhere: no checkpoint to resume from"),
    (["train_ddp", "--out", "/proc/run"], 1, "/proc/run: cannot be written"),
    (["train_ddp", "--compile", "--strategy", "dp"], 2, "--compile is not for --strategy dp"),
]


@pytest.mark.parametrize(("args", "status", "message"), BAD_INPUT)
def test_bad_input_is_one_line(tmp_path, args, status, message):
    done = run(1, *args, cwd=tmp_path)
    assert done.returncode == status
    assert (
        done.stderr.startswith("hpctrain: error:") and done.stderr.count("\n") == 1 and message in done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no_such_trainer"], "there is no command 'no_such_trainer'"),
        (
            ["train_ddp", "--batch-size", "33"],
            "2 ranks cannot share it evenly: use a multiple of 2, such as 32",
        ),
        (["train_ddp", "--data", "nowhere"], "nowhere: no such folder"),
        (["train_ddp", "--out", "/proc/run"], "/proc/run: cannot be written"),
        (["train_ddp", "--strategy", "dp"], "--strategy dp is for one process, but torchrun started 2"),
        (["train_lightning", "--devices", "4"], "--devices 4, but torchrun started 2 ranks on this node"),
        (["train_lightning", "--batch-size", "33"], "2 ranks cannot share it evenly"),
    ],
)
def test_one_of_two_ranks_prints_the_error(tmp_path, args, message):
    done = run(2, *args, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "hpctrain: error:" in line]
    assert len(said) == 1 and message in said[0], done.stderr
    # torchrun prints its own traceback; hpctrain prints none.
    assert done.returncode != 0 and "hpctrain/__main__.py" not in done.stderr


@pytest.mark.slow
def test_nothing_of_an_earlier_run_is_overwritten(runs, tmp_path):
    before = {path: path.read_bytes() for path in (runs / "one").rglob("*") if path.is_file()}
    done = run(1, "train_ddp", "--out", runs / "one", cwd=tmp_path)
    assert done.returncode == 1 and "holds a run already" in done.stderr
    assert before == {path: path.read_bytes() for path in (runs / "one").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_job_that_slurm_requeues_is_resumed(tmp_path):
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"}
    train(1, "--epochs", 1, cwd=tmp_path, **slurm)
    out = train(1, "--epochs", 2, cwd=tmp_path, SLURM_RESTART_COUNT="1", **slurm)
    assert "resuming after epoch 1 of runs/train_ddp/17/checkpoints/epoch-0001.pt" in out
    another_job = slurm | {"SLURM_JOB_ID": "18", "SLURM_RESTART_COUNT": "1"}
    for env in (slurm, another_job):
        done = run(1, "train_ddp", "--out", "runs/train_ddp/17", cwd=tmp_path, **env)
        assert done.returncode == 1 and "holds a run already" in done.stderr


@pytest.mark.slow
def test_a_bar_on_a_terminal(tmp_path):
    options = "--data digits --epochs 1 --batch-size 8 --out run"
    command = f"stty cols 120 rows 30; {shlex.quote(sys.executable)} -m hpctrain train_ddp {options}"
    write_digits(tmp_path / "digits")
    done = run_command(["script", "-qec", command, "/dev/null"], cwd=tmp_path)
    assert done.returncode == 0 and re.search(r"epoch 1: +\d+%\|.*step/s.*train_loss", done.stdout)


def test_help(tmp_path):
    for args in (["--help"], ["train_ddp", "--help"], ["check", "--help"], ["plot", "--help"]):
        done = run(1, *args, cwd=tmp_path)
        assert done.returncode == 0 and "usage: hpctrain" in done.stdout
    done = run(1, cwd=tmp_path)
    assert done.returncode == 2


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_ranks_with_one_line(tmp_path):
    done = run(2, "train_ddp", "--epochs", "2", "--lr", "1e30", "--out", "run", cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error")]
    assert done.returncode != 0 and len(lines) == 1 and "train_loss is nan" in lines[0], done.stderr


@pytest.mark.slow
def test_an_evaluation_of_lightning_that_is_not_finite_ends_the_run_with_one_line(tmp_path):
    """The only step of the epoch has a finite loss, and spoils the weights."""
    options = ["--batch-size", 1024, "--lr", 1e38, "--epochs", 1, "--out", "run"]
    done = run(1, "train_lightning", *options, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error")]
    assert done.returncode == 1 and len(lines) == 1 and "test_loss is nan" in lines[0], done.stderr
    assert "Traceback" not in done.stderr


def test_one_batch_without_a_finite_loss_counts_in_an_evaluation_of_lightning(monkeypatch):
    module = Classifier(torch.nn.Identity(), LightningOptions())
    monkeypatch.setattr(module, "log_dict", lambda _: None)
    for logit in (0.0, math.nan, 1.0):
        module.validation_step((torch.tensor([[logit, 0.0]]), torch.tensor([0])), 0)
    assert module.test_loss.compute().isnan() and module.test_accuracy.compute() > 0


def test_lightning_loads_the_weights_of_a_checkpoint_without_the_options_of_its_run(tmp_path):
    module = Classifier(torch.nn.Linear(2, 2), LightningOptions())
    saved = {"state_dict": module.state_dict(), "optimizer_states": [{"param_groups": [{}]}]}
    torch.save(saved | {"pytorch-lightning_version": "2.6.0"}, tmp_path / "epoch-0001.pt")
    loaded = Classifier.load_from_checkpoint(
        tmp_path / "epoch-0001.pt", net=torch.nn.Linear(2, 2), args=LightningOptions()
    )
    assert loaded.net.weight.equal(module.net.weight)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["/nonexistent", "home"])
def test_plot_without_scores_says_nothing_and_leaves_nothing(tmp_path, home):
    for part in ("run", "tmp", "home"):
        (tmp_path / part).mkdir()
    (tmp_path / "run/metrics.jsonl").write_text(
        '{"epoch": 1, "step": 1, "seconds": 1.0, "train_loss": 0.5}\n'
    )
    env = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR"}
    command = [sys.executable, "-m", "hpctrain", "plot", "run"]
    env |= {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path / "tmp")}
    done = run_command(command, cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "run/curves.png").exists()
    assert not [*(tmp_path / "tmp").iterdir(), *(tmp_path / "home").iterdir()]


def test_plot_of_something_else(tmp_path):
    done = run(1, "plot", tmp_path, cwd=tmp_path)
    assert done.returncode == 1 and "no run folder, it has no metrics.jsonl" in done.stderr
