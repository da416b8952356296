"""Losses and gradients that are not finite: the error says where they began; --on-nan skip goes on."""

import inspect
import json
import os
import re

import pytest
import torch

from hpctrain.checkpoints.checkpoint import path_of
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.run.nonfinite import MAX_IN_A_ROW, NonFinite
from tests.helpers import write_digits
from tests.tools import warm_start

BAD = 17  # the number of a training example whose loss is not finite
NAN = torch.tensor(float("nan"))
INF = float("inf")


def poison():
    """Make the loss of every batch that has the training example BAD a NaN, in each trainer."""
    from hpctrain.nlp.batches import sampling
    from hpctrain.nlp.training.steps import Steps
    from hpctrain.vision import data, folder, train_lightning

    seen = [False]
    load = data.load

    class Poisoned(data.Images):
        def batch(self, index, *more):
            images, labels = super().batch(index, *more)
            return images * (NAN if BAD in index else 1), labels

    def loading(*words):
        training_set, test_set = load(*words)
        return Poisoned(training_set.pixels, training_set.labels), test_set

    def watched(get, indices):
        def getitem(self, item):
            seen[0] = BAD in indices(item)
            return get(self, item)

        return getitem

    def spoiled(step):
        return lambda self, *batch: step(self, *batch) * (NAN if seen[0] else 1)

    data.load = loading
    for dataset, indices in (
        (folder.ImageDataset, lambda item: item[1]),
        (sampling.FeatureDataset, lambda item: item[0]),
    ):
        dataset.__getitem__ = watched(dataset.__getitem__, indices)
    Classifier = train_lightning.Classifier
    Classifier.training_step = spoiled(Classifier.training_step)
    Steps.compute_loss = spoiled(Steps.compute_loss)


TRAINERS = {"train_ddp": [], "train_lightning": [], "nlp.classify": ["--limit", "200", "--accumulate", "2"]}


def train(trainer, folder, *options):
    data = [] if trainer.startswith("nlp.") else ["--data", "digits"]
    arguments = [trainer, *data, *TRAINERS[trainer], "--epochs=2", "--batch-size=32", "--out=run", *options]
    done = warm_start.run(warm_start.torchrun_ranks(4, arguments, dict(os.environ), poison), folder)
    return done, folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_skip(tmp_path, trainer):
    write_digits(tmp_path / "digits", train=128, test=64)
    done, run = train(trainer, tmp_path, "--on-nan", "skip")
    assert done.returncode == 0, done.stderr
    result = json.loads((run / "result.json").read_text())
    said = re.findall(r"step (\d+) is skipped: its gradients are not finite \((\d) so far\)", done.stdout)
    assert [int(count) for _, count in said] == list(range(1, result["skipped_steps"] + 1)), done.stdout
    assert 1 <= result["skipped_steps"] <= 2  # once an epoch, unless the example is in the remainder
    assert torch.isfinite(torch.tensor(result["test_loss"]))
    for path in (run / "checkpoints").iterdir():
        state = torch.load(path, weights_only=True)
        assert all(torch.isfinite(value).all() for value in state["model"].values()), path
        assert state["skipped"] <= result["skipped_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_stop_names_the_step_the_rank_and_the_examples(tmp_path, trainer):
    write_digits(tmp_path / "digits", train=128, test=64)
    done, _ = train(trainer, tmp_path)
    assert done.returncode == 1
    found = re.findall(r"hpctrain: error: (.*)", done.stderr)
    assert len(found) == 1, done.stderr
    error = r"train_loss is nan at epoch \d, step (\d+), since step (\d+) on rank \d "
    error += r"with the training examples ([\d, ]+) "
    noticed, since, examples = re.match(error, found[0]).groups()
    assert int(since) <= int(noticed) and BAD in map(int, examples.split(", ")), found
    assert "use a smaller --lr, or --on-nan skip (no checkpoint was saved before)" in found[0]


def test_horovod_skips(cluster):
    """On the cluster, because Horovod is in the image alone."""
    home = "/home/alice/hpctrain"
    text = (
        f"import torch\nBAD, NAN = {BAD}, torch.tensor(float('nan'))\n{inspect.getsource(poison)}\npoison()\n"
    )
    cluster.host_path(f"{home}/poisoned.py").write_text(text + "from hpctrain.__main__ import main\nmain()\n")
    options = ["train_horovod", "--data=digits", "--epochs=2", "--on-nan=skip", "--out=runs/poisoned"]
    env = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/opt/hpctrain"}
    number = cluster.submit("launch/modules_ddp.sh", "./poisoned.py", *options, cwd=home, env=env)
    job = cluster.wait(number)
    output = cluster.host_path(f"{home}/slurm-{number}.out").read_text()
    assert job.state == "COMPLETED" and "is skipped: its gradients are not finite (1 so far)" in output, (
        output
    )
    assert json.loads(cluster.host_path(f"{home}/runs/poisoned/result.json").read_text())[
        "skipped_steps"
    ] in (1, 2)


def watch(model, skip=True):
    nonfinite = NonFinite(ALONE, skip)
    nonfinite.model = model
    nonfinite.begin_epoch(100, lambda step: torch.tensor([step, BAD]))
    return nonfinite


def step(nonfinite, factor):
    nonfinite.model.train()
    (nonfinite.model(torch.full((4, 2), factor)).sum()).backward()
    return nonfinite.check_gradients()


def test_the_step_of_a_nan_leaves_the_model_as_it_was():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    nonfinite = watch(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not step(nonfinite, float("nan")) and nonfinite.is_skipping
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step(nonfinite, 1.0) and not nonfinite.is_skipping
    optimizer.step()
    assert not torch.equal(model[1].num_batches_tracked, before["1.num_batches_tracked"])
    assert nonfinite.skipped == 1


def scaled_step(nonfinite, optimizer, scaler, factor, loss_factor=1.0):
    """A step with a scaler: `factor` is that of the gradients, `loss_factor` that of the loss as well."""
    optimizer.zero_grad()
    loss = nonfinite.model(torch.ones(4, 2)).sum() * loss_factor
    scaler.scale(loss).backward()
    for parameter in nonfinite.model.parameters():
        parameter.grad *= factor
    scaler.unscale_(optimizer)
    passed = nonfinite.check_gradients(scaler, loss.detach())
    scaler.step(optimizer)
    scaler.update()
    nonfinite.end_step()
    return passed


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_an_overflow(skip, fused):
    nonfinite = watch(torch.nn.Linear(2, 2), skip=skip)
    optimizer = torch.optim.AdamW(nonfinite.model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, INF, 1.0, INF):
        before = nonfinite.model.weight.detach().clone()
        assert scaled_step(nonfinite, optimizer, scaler, factor) and not nonfinite.is_skipping
        assert torch.equal(nonfinite.model.weight, before) == (factor == INF)
    assert (nonfinite.overflows, nonfinite.skipped) == (2, 0)
    assert nonfinite.describe_scale() == {"loss_scale": 2**14, "overflow_steps": 2}


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_is_nan_is_no_overflow(fused):
    """--on-nan skip leaves out the step. The scale, which is not the cause, stays."""
    nonfinite = watch(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(nonfinite.model.parameters(), 0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    assert scaled_step(nonfinite, optimizer, scaler, 1.0)
    before = nonfinite.model.weight.detach().clone()
    assert not scaled_step(nonfinite, optimizer, scaler, 1.0, loss_factor=float("nan"))
    assert torch.equal(nonfinite.model.weight, before) and nonfinite.is_skipping
    assert scaled_step(nonfinite, optimizer, scaler, 1.0) and scaler.get_scale() == 2**16
    assert (nonfinite.overflows, nonfinite.skipped) == (0, 1)


def test_gradients_that_overflow_with_any_scale_end_the_run():
    """The loss is finite, so --on-nan has no say, and no step changes the weights any more."""
    nonfinite = watch(torch.nn.Linear(2, 2), skip=False)
    optimizer = torch.optim.SGD(nonfinite.model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-13)
    scaled_step(nonfinite, optimizer, scaler, 1.0)
    assert nonfinite.describe_scale()["loss_scale"] == 2**-13
    scaled_step(nonfinite, optimizer, scaler, INF)
    message = r"the gradients overflow in fp16 even with a loss scale of 6\.1\d*e-05: training diverged, use"
    with pytest.raises(HpctrainError, match=f"^{message} a smaller --lr or --precision fp32$"):
        nonfinite.describe_scale()


def test_too_many_in_a_row():
    nonfinite = watch(torch.nn.Linear(2, 2))
    for _ in range(MAX_IN_A_ROW):
        assert not step(nonfinite, float("inf"))
    with pytest.raises(
        HpctrainError, match="gradients of 10 steps in a row were not finite: training diverged"
    ):
        step(nonfinite, float("inf"))


def test_many_skipped_steps_that_are_not_in_a_row():
    nonfinite = watch(torch.nn.Linear(2, 2))
    for _ in range(MAX_IN_A_ROW + 1):
        assert not step(nonfinite, float("inf"))
        assert step(nonfinite, 1.0)
    assert nonfinite.skipped == MAX_IN_A_ROW + 1


def test_by_default_no_gradient_is_looked_at():
    nonfinite = watch(torch.nn.Linear(2, 2), skip=False)
    assert step(nonfinite, float("nan")) and nonfinite.model.weight.grad is not None


def test_the_error_names_the_first_step(tmp_path):
    nonfinite = watch(torch.nn.Linear(2, 2), skip=False)
    for number, loss in enumerate([0.5, float("inf"), float("nan")]):
        nonfinite.add(number, torch.tensor(loss))
    with pytest.raises(HpctrainError) as caught:
        nonfinite.check({"train_loss": float("nan")}, "epoch 3, step 103", True, tmp_path)
    assert str(caught.value) == (
        "train_loss is nan at epoch 3, step 103, since step 102 on rank 0 "
        "with the training examples 1, 17 (counted from 0): "
        "training diverged, use a smaller --lr, or --on-nan skip (no checkpoint was saved before)"
    )
    nonfinite.clear()
    path_of(tmp_path, epoch=1).parent.mkdir()
    path_of(tmp_path, epoch=1).touch()
    with pytest.raises(
        HpctrainError,
        match=r"^test_loss is inf at x: training diverged, use a smaller --lr \(earlier checkpoints are in /",
    ):
        nonfinite.check({"test_loss": float("inf")}, "x", True, tmp_path)


def test_the_error_names_the_rank_whose_loss_was_the_first(tmp_path, monkeypatch):
    of_ranks = [[None, []], [4, [7]], [None, []], [2, [9]]]
    monkeypatch.setattr("hpctrain.run.nonfinite.gather", lambda world, own: of_ranks)
    watching = watch(torch.nn.Linear(2, 2), skip=False)
    with pytest.raises(HpctrainError, match="since step 103 on rank 3 with the training examples 9 "):
        watching.check({"train_loss": float("nan")}, "x", True, tmp_path)


def test_a_step_is_not_to_be_skipped_where_that_is_no_option(tmp_path):
    nonfinite = watch(torch.nn.Linear(2, 2), skip=False)
    nonfinite.add(0, torch.tensor(float("nan")))
    with pytest.raises(HpctrainError, match=r"use a smaller --lr \(no checkpoint"):
        nonfinite.check({"train_loss": float("nan")}, "x", False, tmp_path)


def test_losses_of_many_steps_take_little_memory():
    nonfinite = watch(torch.nn.Linear(2, 2))
    for number in range(5000):
        nonfinite.add(number, torch.tensor(1.0))
    assert len(nonfinite._losses) < 2000
