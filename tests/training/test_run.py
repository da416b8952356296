"""hpctrain.Run in a training script of a user: each shape of a loop is resumed bit for bit, anywhere."""

import copy
import json
import os
import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, IterableDataset, default_collate

import hpctrain
from hpctrain.checkpoints import checkpoint
from hpctrain.errors import EndEarly, HpctrainError, UsageError
from hpctrain.files.digests import weights_sha256
from hpctrain.run.reader import read_configs, summarize
from tests.helpers import REPOSITORY, start_ranks


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No variables of a job; and the hook for uncaught exceptions as it was."""
    for name in [name for name in os.environ if name.startswith(("HPCTRAIN_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(tmp_path)


class Points:
    """40 points [4] of two classes, with noise that differs in each pass."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(index % 2)) + torch.randn(4), index % 2


def make_net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def open_run(folder, **options):
    options = {"checkpoint_every": 1, "watchdog": 0} | options
    return hpctrain.Run("mine", out=folder, resume="auto", **options)


def evaluate(run, model):
    """Whether each point of this rank is classified as it should be."""
    model.eval()
    with torch.no_grad():
        hits = [model(points).argmax(1) == labels for points, labels in run.evaluation_batches(Points(), 16)]
    model.train()
    return torch.cat(hits)


# ---- shapes of loops; each calls at_step(run) somewhere in a step ----


def plain(run, at_step, epochs=2):
    """A scheduler after run.step(), random numbers of numpy and Python, and an evaluation after an epoch."""
    model = run.prepare(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(epochs):
        for points, labels in run.batches(Points(), 8):
            share = numpy.random.beta(1, 1) * random.random()
            loss = cross_entropy(model(points * share), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss, learning_rate=scheduler.get_last_lr()[0])
            at_step(run)
            scheduler.step()
        run.score(accuracy=evaluate(run, model))


def two_optimizers(run, at_step):
    """A GAN, whose generator is trained in every second step."""
    critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    generator, critic = run.prepare(nn.Linear(2, 4)), run.prepare(critic)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (generator, critic)]
    run.track(generator=generator, critic=critic, of_generator=optimizers[0], of_critic=optimizers[1])
    for _ in run.epochs(2):
        for points, _ in run.batches(Points(), 8):
            made = generator(torch.randn(len(points), 2))
            real, fake = critic(points), critic(made.detach())
            d_loss = binary_cross_entropy_with_logits(real, torch.ones_like(real))
            d_loss = d_loss + binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
            optimizers[1].zero_grad()
            d_loss.backward()
            optimizers[1].step()
            values = {}
            at_step(run)
            if run.global_step % 2:
                optimizers[0].zero_grad()
                values["g_loss"] = binary_cross_entropy_with_logits(critic(made), torch.ones_like(fake))
                values["g_loss"].backward()
                optimizers[0].step()
            run.step(d_loss, **values)


def mix(batch):
    """Collate with random numbers, as MixUp does."""
    points, labels = default_collate(batch)
    return points + torch.randn(4) * random.random(), labels


def accumulation(run, at_step):
    """Each batch in two parts, of a loader that draws random numbers to collate it."""
    model = run.prepare(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for batch in run.batches(Points(), 16, collate_fn=mix):
            optimizer.zero_grad()
            losses = []
            for points, labels in zip(*(each.chunk(2) for each in batch), strict=True):
                losses.append(cross_entropy(model(points), labels) / 2)
                losses[-1].backward()
                at_step(run)
            optimizer.step()
            run.step(sum(losses))


def mixed_precision(run, at_step):
    """With a scaler that skips a step because of an overflow."""
    model = run.prepare(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    for _ in run.epochs(2):
        for points, labels in run.batches(Points(), 8):
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(points), labels)
            optimizer.zero_grad()
            scaler.scale(loss * 1e3).backward()
            scaler.step(optimizer)
            scaler.update()
            at_step(run)
            run.step(loss, scale=scaler.get_scale())


def steps(run, at_step):
    """Steps instead of passes, with evaluations in between, and an average of the weights."""
    model = run.prepare(make_net())
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, average=average, optimizer=optimizer)
    for _ in run.epochs(2):
        for points, labels in run.batches(Points(), 8, steps=7):
            loss = cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
            average.update_parameters(model)
            if run.global_step % 3 == 0:
                run.score(loss=cross_entropy(average(points), labels), accuracy=evaluate(run, average))
            at_step(run)


def parts(run, at_step):
    """Each batch in two parts, and gradients that are clipped."""
    model = run.prepare(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for points, labels in run.batches(Points(), 8, accumulate=2):
            loss = cross_entropy(model(points), labels)
            run.backward(loss)
            at_step(run)
            run.update(optimizer, clip=0.1)
            run.step(loss)
        run.score(accuracy=evaluate(run, model))


def halves(run, at_step):
    """With the run's own scaler, which skips the first steps because of overflows, and steps in parts."""
    model = run.prepare(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for points, labels in run.batches(Points(), 8, accumulate=2):
            with run.autocast():
                loss = cross_entropy(model(points), labels)
            run.backward(loss * 4)
            run.update(optimizer)
            run.step(loss)
            at_step(run)


class Listed(Points):
    """The points without noise. It makes the batches itself."""

    def load_batches(self, parts, device):
        for part in parts:
            yield torch.stack([part.examples / 40] * 4, 1).to(device), (part.examples % 2).to(device)


def shuffle(epoch):
    """32 of the points in four steps: an order of the script's own."""
    return torch.randperm(40, generator=torch.Generator().manual_seed(epoch))[:32].view(4, 2, 4)


def within_epochs(run, at_step):
    """bf16, batches and an order of the script's own, an evaluation in every third step, the best weights."""
    model = run.prepare(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.track(model=model, optimizer=optimizer)
    run.best.by, run.best.lowest = "error", True
    for _ in run.epochs(3):
        for points, labels in run.batches(Listed(), 8, accumulate=2, order=shuffle):
            with run.autocast():
                loss = cross_entropy(model(points), labels)
            run.backward(loss)
            run.update(optimizer)
            run.step(loss)
            if run.is_due(3):
                run.score(error=1 - evaluate(run, model).double())
            at_step(run)
        run.score(error=1 - evaluate(run, model).double())
    run.load_best()


def patience(run, at_step):
    """It ends within its second epoch."""
    model = run.prepare(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    run.best.patience = 4
    for _ in run.epochs(9):
        for points, labels in run.batches(Points(), 8):
            loss = cross_entropy(model(points), labels)
            run.backward(loss)
            run.update(optimizer)
            run.step(loss)
            if run.is_due(1):
                run.score(f1=-abs(run.global_step - 3))
            at_step(run)
        run.score(f1=-9)
    run.load_best()


OPTIONS = {halves: {"precision": "fp16"}, within_epochs: {"precision": "bf16"}}
SHAPES = [plain, two_optimizers, accumulation, mixed_precision, steps, parts, *OPTIONS, patience]


def lines_of(folder):
    """The metrics without the time that they took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    vary = {"seconds", "examples_per_s", "peak_memory_mb"}
    return [{name: line[name] for name in line.keys() - vary} for line in lines]


def result_of(folder):
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in result.keys() - {"seconds", "speed"}}


class Interrupt:
    """Raises KeyboardInterrupt in the n-th step from now, as a user does in a notebook."""

    def __init__(self, after):
        self.left = after

    def __call__(self, run):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.main_road
def test_a_run_that_is_interrupted_again_and_again_ends_as_one_that_was_not(tmp_path, shape):
    """Each start in the same process, as in a notebook, and with new objects."""
    hooks, options = len(_global_optimizer_pre_hooks), OPTIONS.get(shape, {})
    with open_run(tmp_path / "whole", **options) as run:
        shape(run, lambda run: None)
    assert not dist.is_initialized()
    folder, starts = tmp_path / "cut", 0
    while not (folder / "result.json").exists():
        starts += 1
        try:
            with open_run(folder, **options) as run:
                shape(run, Interrupt(after=3 + starts % 2))
        except KeyboardInterrupt:
            assert not (folder / "owner.json").exists()
    assert 3 <= starts <= 12
    assert ("overflow_steps" in result_of(folder)) == (shape is halves)
    assert result_of(folder) == result_of(tmp_path / "whole")
    assert lines_of(folder) == lines_of(tmp_path / "whole")
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert len(_global_optimizer_pre_hooks) == hooks  # which would keep a copy of the weights


def test_a_run_that_is_asked_to_end_goes_on(tmp_path, monkeypatch):
    """Each start is asked at once, and ends with status 0 after its first step."""
    with open_run(tmp_path / "whole") as run:
        plain(run, lambda run: None)
    monkeypatch.setenv("HPCTRAIN_CONTROL", str(tmp_path / "control"))
    (tmp_path / "control").mkdir()
    (tmp_path / "control/stop").touch()
    for _ in range(3):
        with pytest.raises(EndEarly, match="0"), open_run(tmp_path / "cut") as run:
            plain(run, lambda run: None)
        assert {"saved", "stopped"} < {path.name for path in (tmp_path / "control").iterdir()}
    (tmp_path / "control/stop").unlink()
    with open_run(tmp_path / "cut") as run:
        plain(run, lambda run: None)
    assert result_of(tmp_path / "cut") == result_of(tmp_path / "whole")
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")


def test_a_run_that_has_ended_is_finished_or_has_nothing_to_do(tmp_path, capsys):
    with open_run(tmp_path / "run") as run:
        plain(run, lambda run: None)
    before = result_of(tmp_path / "run")
    files = sorted((tmp_path / "run").iterdir())
    with open_run(tmp_path / "run") as run:
        plain(run, pytest.fail)
        run.score(accuracy=0.1)  # as in the work after the loop
    assert run.is_finished and "has 2 epochs already: nothing to do" in capsys.readouterr().out
    assert result_of(tmp_path / "run") == before
    assert sorted((tmp_path / "run").iterdir()) == files
    assert summarize(tmp_path / "run")["state"] == "finished"
    (tmp_path / "run/result.json").unlink()  # it died after its last checkpoint
    refused = pytest.raises(UsageError, match="run has 2 epochs already: give a larger --epochs to continue")
    with refused, open_run(tmp_path / "run") as run:
        plain(run, lambda run: None, epochs=1)
    with open_run(tmp_path / "run") as run:
        plain(run, lambda run: None)
    assert result_of(tmp_path / "run") == before and before["accuracy"] > 0.5


@pytest.mark.slow
def test_a_resume_says_what_is_not_as_it_was(tmp_path, capsys):
    """A script that was edited went on with the learning rate of its checkpoint without a word."""

    def train(epochs, lr, batch_size):
        with open_run(tmp_path / "run") as run:
            model = run.prepare(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            run.track(model=model, optimizer=optimizer)
            for _ in run.epochs(epochs):
                for points, labels in run.batches(Points(), batch_size):
                    cross_entropy(model(points), labels).backward()
                    optimizer.step()
                    run.step(torch.tensor(0.0))
        return re.findall("hpctrain: warning: (.*)|(run.batches.*)", capsys.readouterr().out)

    assert train(1, 0.1, 8) == train(2, 0.1, 8) == []
    (_, batch), (rate, _) = train(3, 5.0, 10)
    assert rate.startswith("lr of optimizer stays 0.1, as in ")
    assert rate.endswith(".pt: for 5.0 start a new run, with another out")
    assert batch == "run.batches(): 10 examples in a batch, and 8 in the epoch before"
    assert len(train(4, 5.0, 10)) == 1  # the learning rate has not changed


def test_an_optimizer_that_is_not_tracked_is_told(tmp_path, capsys):
    class Wrapper(torch.optim.SGD):
        """As those that step another one."""

        def __init__(self, inner):
            super().__init__(inner.param_groups[0]["params"], lr=0.1)
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    for track, lines in ((lambda optimizer: {}, 1), (lambda optimizer: {"optimizer": Wrapper(optimizer)}, 0)):
        with hpctrain.Run("mine", out=tmp_path / f"run-{lines}", watchdog=0) as run:
            model = run.prepare(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            tracked = track(optimizer)
            run.track(model=model, **tracked)
            for _ in run.epochs(1):
                for points, labels in run.batches(Points(), 8):
                    cross_entropy(model(points), labels).backward()
                    tracked.get("optimizer", optimizer).step()
                    run.step(torch.tensor(0.0))
        told = "hpctrain: warning: this SGD starts anew when the run resumes: name it in run.track()"
        assert capsys.readouterr().out.count(told) == lines
    another = torch.optim.SGD(model.parameters(), lr=0.1)
    another.step()  # no run is open
    assert told not in capsys.readouterr().out


@pytest.mark.slow
def test_the_state_of_an_epoch_that_ends_by_break_is_saved(tmp_path):
    def train(folder, last, epochs=9):
        with open_run(folder) as run:
            train_simply(run, epochs, ends_after=last)
        return result_of(folder)

    whole = train(tmp_path / "whole", 3)
    assert whole["epochs"] == 3 and (tmp_path / "whole/checkpoints/epoch-0003.pt").exists()
    train(tmp_path / "parts", 2, epochs=8)
    assert train(tmp_path / "parts", 3) == whole


def test_a_run_whose_loop_has_ended_by_itself_is_finished(tmp_path):
    """A script that is started again, for its other runs, trained another epoch."""
    folder = tmp_path / "run"
    with open_run(folder) as run:
        train_simply(run, 9, ends_after=2)
    result, lines = result_of(folder), lines_of(folder)
    assert (result["epochs"], result["of_epochs"]) == (2, 9)
    for is_finished in (True, False):
        with open_run(folder) as run:
            train_simply(run, 9, at_step=pytest.fail)
            assert run.is_finished == is_finished
        assert (result_of(folder), lines_of(folder)) == (result, lines)
        (folder / "result.json").unlink()  # it died before it wrote its result
    with open_run(folder) as run:
        train_simply(run, 10, ends_after=3)
    assert result_of(folder)["epochs"] == 3


def test_a_script_changes_its_folder(tmp_path, monkeypatch, capsys):
    """As to the data on the node's disk. It waited for a file system, or wrote its result there."""
    (tmp_path / "start").mkdir()
    (tmp_path / "local").mkdir()
    for epochs in (1, 2):
        monkeypatch.chdir(tmp_path / "start")
        with open_run("run") as run:
            monkeypatch.chdir(tmp_path / "local")
            train_simply(run, epochs)
            run.load_best()
    assert result_of(tmp_path / "start/run")["epochs"] == 2 and not [*(tmp_path / "local").iterdir()]
    printed = capsys.readouterr().out
    assert "run folder run, 1 rank" in printed and "resuming after epoch 1 of run/check" in printed


def spoil(path, damage):
    """What the crash of a node or a flipped bit makes of a file."""
    content = path.read_bytes() if path.exists() else b'{"job": "5", "id": "a"}'
    half = len(content) // 2
    spoiled = {
        "byte": content[:half] + b"\xff" + content[half + 1 :],
        "quote": content.replace(b'"', b"", 1),
        "nul": content[:half] + bytes(len(content) - half),
        "torn": content[:half],
        "empty": b"",
        "other": b"[1]",
    }
    path.write_bytes(spoiled[damage])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["byte", "quote", "nul", "torn", "empty", "other"])
def test_a_run_whose_records_are_damaged_goes_on(tmp_path, monkeypatch, capsys, damage):
    """All checkpoints are intact, and it was a traceback at each start that Slurm made."""
    folder = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for restart, after in enumerate((4, 3, 99)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        options = {"out": folder, "checkpoint_every": 1, "watchdog": 0}
        with suppress(KeyboardInterrupt), hpctrain.Run("mine", **options) as run:
            train_simply(run, 2, at_step=Interrupt(after))
        if restart == 1:
            for name in ("metrics.jsonl", "config.json", "config.2.json", "owner.json"):
                spoil(folder / name, damage)
    printed = capsys.readouterr().out
    assert printed.count("is damaged: kept as config") == 2 and "config.json.damaged" in printed
    assert re.search("metrics.jsonl: . lines? damaged or missing: the others are kept", printed)
    assert lines_of(folder)[-1]["step"] == 10 and len(read_configs(folder)) == 3

    spoil(folder / "result.json", damage)
    with open_run(folder) as run:
        train_simply(run, 2, at_step=pytest.fail)
    assert "result.json is damaged: it is written again" in capsys.readouterr().out
    with open_run(tmp_path / "whole") as run:
        train_simply(run, 2)
    assert result_of(folder) == result_of(tmp_path / "whole")


@pytest.mark.slow
def test_other_data_than_before_the_resume_are_told(tmp_path, capsys):
    """Refused within an epoch, whose other batches would be of another order."""

    class More(Points):
        def __len__(self):
            return 42

    for epochs, data in ((1, Points()), (2, More()), (3, More())):
        with open_run(tmp_path / "run") as run:
            train_simply(run, epochs, data)
    assert capsys.readouterr().out.count("run.batches(): 42 examples in the data, and 40 in the epoch") == 1
    with suppress(KeyboardInterrupt), open_run(tmp_path / "within") as run:
        train_simply(run, 1, at_step=Interrupt(2))
    with pytest.raises(UsageError, match=r"42 examples .*, and 40 "), open_run(tmp_path / "within") as run:
        train_simply(run, 1, More())
    with open_run(tmp_path / "within", force=True) as run:
        train_simply(run, 1, More())


@pytest.mark.parametrize(
    ("name", "scores", "best", "more"),
    [("loss", (3, 1, 2, 2, 4), 2, {"other_loss": 0}), ("f1", (1, 2, 5, 3, 3), 3, {"other": 0, "loss": 1})],
)
def test_the_checkpoint_of_the_lowest_loss_or_the_highest_score_is_kept(tmp_path, name, scores, best, more):
    folder, left, bests = tmp_path / "run", iter(scores), []

    def score(run):
        if run.score(**{f"validation_{name}": next(left)}, **more):
            bests.append(run.epoch)
        assert run.best.epoch == bests[-1]

    with hpctrain.Run("mine", out=folder, keep_checkpoints=1, watchdog=0) as run:
        train_simply(run, 5, after=score)
    assert bests[-1] == best
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "best.pt",
        f"epoch-{best:04}.pt",
        "epoch-0005.pt",
    }
    result = result_of(folder)
    assert result[f"validation_{name}"] == scores[-1]
    path = f"checkpoints/epoch-{best:04}.pt"
    value = scores[best - 1]
    named = {"epoch": best, "step": best * 5, f"validation_{name}": value, "checkpoint": path}
    assert result["best"] == named
    loaded, saved = nn.Linear(4, 2), torch.load(folder / path)["model"]
    hpctrain.load_weights(loaded, folder)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(saved), rtol=0, atol=0)
    assert summarize(folder)["score"] == f"validation_{name}"


@pytest.mark.slow
@pytest.mark.main_road
def test_the_weights_are_read_back(tmp_path):
    """Of one model, and of several by their names."""
    for shape in (plain, two_optimizers):
        folder = tmp_path / shape.__name__
        with open_run(folder) as run:
            shape(run, lambda run: None)
            trained = run._tracked.model
        loaded = copy.deepcopy(trained)
        for value in loaded.state_dict().values():
            value.zero_()
        hpctrain.load_weights(loaded, checkpoint.find_newest(folder))
        assert weights_sha256(loaded) == weights_sha256(trained) == result_of(folder)["weights_sha256"]
    assert {name.partition(".")[0] for name in loaded.state_dict()} == {"generator", "critic"}


class Spoiled(Points):
    """The points, of which one has no value."""

    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point if index != 7 else point * float("nan"), label


def nothing(run):
    pass


def train_simply(run, epochs=1, data=None, *, at_step=nothing, after=nothing, ends_after=None):
    model = run.prepare(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for points, labels in run.batches(data or Points(), 8):
            loss = cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
            at_step(run)
        after(run)
        if run.epoch == ends_after:
            break


def test_a_run_goes_on_with_its_own_options_alone(tmp_path):
    with open_run(tmp_path / "run", lr=0.1) as run:
        train_simply(run)
    (tmp_path / "run/result.json").unlink()
    with pytest.raises(UsageError, match="--lr"), open_run(tmp_path / "run", lr=0.2) as run:
        train_simply(run, epochs=2)
    with open_run(tmp_path / "run", lr=0.1) as run:
        train_simply(run, epochs=2)
    assert result_of(tmp_path / "run")["epochs"] == 2


def test_a_step_whose_gradients_are_not_finite_is_skipped(tmp_path):
    with open_run(tmp_path / "run", on_nan="skip") as run:
        train_simply(run, data=Spoiled())
    assert result_of(tmp_path / "run")["skipped_steps"] == 1
    saved = checkpoint.load(checkpoint.find_newest(tmp_path / "run"), torch.device("cpu"))
    assert saved["skipped"] == 1  # for a resume
    message = "train_loss is nan at epoch 1, step .*, since step . on rank 0 with the training examples .*7"
    with pytest.raises(HpctrainError, match=message), open_run(tmp_path / "stop") as run:
        train_simply(run, data=Spoiled())


def test_a_scaler_is_refused_beside_on_nan_skip(tmp_path):
    """It calls no optimizer.step() where a loss is NaN, or one whose gradients merely overflow."""
    message = 'on_nan="skip" is not for a GradScaler, .* precision="fp16"'
    with pytest.raises(UsageError, match=message), open_run(tmp_path / "run", on_nan="skip") as run:
        run.track(**of_net(scaler=torch.amp.GradScaler("cpu")))
    with open_run(tmp_path / "other", on_nan="skip") as run:
        run.track(**of_net(scaler=torch.amp.GradScaler("cpu", enabled=False)))


def test_the_best_evaluation_within_an_epoch_is_kept(tmp_path):
    with hpctrain.Run("mine", out=tmp_path / "run", keep_checkpoints=1, watchdog=0) as run:
        train_simply(run, 2, at_step=lambda run: run.score(validation_loss=abs(run.global_step - 3)))
    kept = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert kept == {"best.pt", "epoch-0001-step-000003.pt", "epoch-0002.pt"}
    assert (tmp_path / "run/checkpoints/best.pt").readlink() == Path("epoch-0001-step-000003.pt")
    assert (
        result_of(tmp_path / "run")["best"] | {"step": 3, "validation_loss": 0}
        == result_of(tmp_path / "run")["best"]
    )


def test_the_best_checkpoint_may_be_that_of_an_earlier_run(tmp_path, capsys):
    """And a run without scores has none: its last weights are loaded."""
    with hpctrain.Run("mine", out=tmp_path / "first", watchdog=0) as run:
        train_simply(run, 3, after=lambda run: run.score(f1=5 - run.epoch))
    first = tmp_path / "first/checkpoints/epoch-0001.pt"
    with hpctrain.Run("mine", out=tmp_path / "second", resume=tmp_path / "first", watchdog=0) as run:
        train_simply(run, 5, after=lambda run: run.score(f1=0))
    assert result_of(tmp_path / "second")["best"] == {
        "epoch": 1,
        "step": 5,
        "f1": 4,
        "checkpoint": str(first),
    }
    assert (tmp_path / "second/checkpoints/best.pt").readlink() == first
    with hpctrain.Run("mine", out=tmp_path / "third", watchdog=0) as run:
        train_simply(run)
        assert not run.score(test_f1=1)
    assert "best" not in result_of(tmp_path / "third")
    loaded = nn.Linear(4, 2)
    hpctrain.load_weights(loaded, tmp_path / "third")
    assert weights_sha256(loaded) == result_of(tmp_path / "third")["weights_sha256"]
    assert "third has no best checkpoint: loading the newest one, epoch-0001.pt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "epochs", "after", "said"),
    [
        (
            {"resume": "auto"},
            2,
            6,
            "in epoch 2: the same command continues from mine/checkpoints/epoch-0001.pt",
        ),
        ({}, 2, 6, "in epoch 2: --resume mine continues from mine/checkpoints/epoch-0001.pt"),
        ({}, 1, 2, "in epoch 1: --resume auto --out mine begins again, as no checkpoint is saved yet"),
    ],
)
def test_an_interrupt_says_what_is_saved_and_what_continues(options, epochs, after, said):
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        hpctrain.Run("x", out="mine", watchdog=0, **options) as run,
    ):
        train_simply(run, epochs, at_step=Interrupt(after))
    assert str(caught.value) == said


def test_random_numbers_at_the_begin_of_an_epoch_are_those_of_the_epoch(tmp_path):
    """Also in an epoch that is resumed."""
    drawn = {}
    for _ in range(3):
        with suppress(KeyboardInterrupt), open_run(tmp_path / "run") as run:
            interrupt, optimizer = Interrupt(after=4), torch.optim.SGD([nn.Parameter(torch.ones(1))])
            run.track(model=nn.Linear(1, 1), optimizer=optimizer)
            for epoch in run.epochs(2):
                numbers = torch.rand(1).item(), random.random(), numpy.random.rand()
                assert drawn.setdefault(epoch, numbers) == numbers
                for _ in run.batches(Points(), 8):
                    interrupt(run)
                    optimizer.step()
                    run.step(torch.tensor(1.0))
    assert len({*drawn.values()}) == 2


def test_a_run_whose_score_does_not_improve_ends(tmp_path):
    with open_run(tmp_path / "run") as run:
        run.best.patience = 2
        train_simply(run, 9, after=lambda run: run.score(f1=1 / run.epoch))
    assert result_of(tmp_path / "run")["epochs"] == 3
    with open_run(tmp_path / "run") as run:
        run.best.patience = 2
        train_simply(run, 9, at_step=pytest.fail)
    assert run.is_finished


# ---- options ----


class Config(Mapping):
    """What a DictConfig of Hydra is: a mapping with mappings in it, and no dict."""

    def __init__(self, **content):
        self._content = content

    def __getitem__(self, name):
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self):
        return len(self._content)

    def __repr__(self):
        return str(self._content)


def test_options_of_hydra(tmp_path):
    def options(lr):
        optimizer = Config(name="adam", lr=lr, betas=[0.9, 0.99], api_token="geheim")
        return Config(
            out=str(tmp_path / "run"), resume="auto", seed=3, name="x", optimizer=optimizer, path=tmp_path
        )

    with hpctrain.Run("mine", **options(0.1)) as run:
        plain(run, lambda run: None)
    recorded = json.loads((tmp_path / "run/config.json").read_text())["options"]
    assert recorded["optimizer"] == {"name": "adam", "lr": 0.1, "betas": [0.9, 0.99], "api_token": "***"}
    assert (recorded["seed"], recorded["path"], recorded["checkpoint_every"]) == (3, str(tmp_path), "10min")
    with pytest.raises(UsageError) as error, hpctrain.Run("mine", **options(0.2)) as run:
        plain(run, lambda run: None)
    assert re.search(r"other options: --optimizer .*'lr': 0.2.* instead of .*'lr': 0.1", str(error.value))
    assert b"geheim" not in checkpoint.find_newest(tmp_path / "run").read_bytes()


@pytest.mark.slow
def test_the_seed_decides_on_weights_and_order(tmp_path):
    results = []
    for name, seed in (("a", {}), ("b", {"seed": 1}), ("c", {"seed": 2})):
        with open_run(tmp_path / name, **seed) as run:
            plain(run, lambda run: None)
        results.append(result_of(tmp_path / name)["weights_sha256"])
    assert results[0] == results[1] != results[2]


class Masked(nn.Linear):
    """A model with a mask, and with the least and the greatest value so far, as observers have them."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("least", torch.tensor(torch.inf))


@pytest.mark.parametrize("lr", [0.1, 1e38])
def test_buffers_may_be_infinite_and_weights_may_not(lr):
    ends = pytest.raises(HpctrainError, match="not finite: training diverged") if lr > 1 else nullcontext()
    with ends, open_run("run") as run:
        model = run.prepare(Masked())
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        run.track(model=model, optimizer=optimizer)
        for _ in run.epochs(1):
            for points, labels in run.batches(Points(), 40):
                loss = cross_entropy(model(points), labels) * 10
                loss.backward()
                optimizer.step()
                run.step(loss)
    assert Path("run/checkpoints/epoch-0001.pt").exists() == (lr < 1)


# ---- what cannot be resumed is refused in one line ----


class Odd:
    """An object whose state no checkpoint can hold."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise KeyError("epochs")


def of_net(**more):
    net = nn.Linear(4, 1)
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)} | more


def no_step(run):
    run.track(**of_net())
    for _ in run.epochs(1):
        for _ in run.batches(Points(), 8):
            pass


def two_steps(run):
    objects = of_net()
    run.track(**objects)
    for _ in run.epochs(1):
        for _ in run.batches(Points(), 8):
            objects["optimizer"].step()
            run.step(torch.tensor(1.0))
            run.step(torch.tensor(1.0))


def step_without_optimizer(run):
    """As a script that accumulates the gradients of several batches would do."""
    run.track(**of_net())
    for _ in run.epochs(1):
        for _ in run.batches(Points(), 8):
            run.step(torch.tensor(1.0))


def in_parts(step):
    """A loop whose batches come in two parts, with step(run, optimizer, loss)."""

    def use(run):
        objects = of_net()
        run.track(**objects)
        for _ in run.epochs(1):
            for points, _ in run.batches(Points(), 8, accumulate=2):
                step(run, objects["optimizer"], objects["model"](points).mean())

    return use


def score_before_step(run):
    run.track(**of_net())
    for _ in run.epochs(1):
        for _ in run.batches(Points(), 8):
            run.score(accuracy=1.0)


def batches_twice(run):
    run.track(**of_net(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))])))
    for _ in run.epochs(1):
        for data in (Points(), Points()):
            for _ in run.batches(data, 40):
                run._tracked.others["optimizer"].step()
                run.step(torch.tensor(1.0))


def take(batches):
    def use(run):
        run.track(**of_net())
        for _ in run.epochs(1):
            next(batches(run))

    return use


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


BAD_USES = [
    (
        lambda run: (run.track(**of_net()), run.track(**of_net())),
        "run.track() is called a second time: name all",
    ),
    (lambda run: run.track(optimizer=of_net()["optimizer"]), "run.track() got no model: name it, too"),
    (
        lambda run: run.track(**of_net(data=Points())),
        "run.track(data=...): a Points has no state_dict() and load",
    ),
    (lambda run: run.track(**of_net(mine=Odd({"f": lambda: 1}))), "(Can't pickle "),
    (
        lambda run: run.track(**of_net(mine=Odd({"f": lambda: 1}))),
        "remove it from the state of mine in run.track()",
    ),
    (
        lambda run: run.track(**of_net(mine=Odd(numpy.random.get_state()))),
        "more than tensors and plain values (numpy",
    ),
    (lambda run: run.track(**of_net(mine=Odd(threading.Lock()))), "(cannot pickle '_thread.lock' object)"),
    (
        lambda run: run.track(model=nn.Linear(1, 1, device="meta")),
        "this Linear has weights that are sharded or have",
    ),
    (
        lambda run: next(run.epochs(1)),
        "run.epochs() needs something to save: call run.track(model=model, ...)",
    ),
    (
        lambda run: next(run.batches(Points(), 8)),
        "call run.batches() once in each epoch: for epoch in run.epochs(",
    ),
    (batches_twice, "call run.batches() once in each epoch"),
    (
        lambda run: (run.track(**of_net()), list(run.epochs(1))),
        "this epoch had no steps: call run.batches() in",
    ),
    (
        lambda run: run.step(torch.tensor(1.0)),
        "call run.step(loss) once for each batch of run.batches(), after",
    ),
    (no_step, "run.step() was not called after step 1: call run.step(loss) once for each batch"),
    (two_steps, "call run.step(loss) once for each batch of run.batches(), after optimizer.step()"),
    (step_without_optimizer, "run.step() came before the first optimizer.step(): call it after that"),
    (
        in_parts(lambda run, optimizer, loss: (loss.backward(), optimizer.step(), run.step(loss))),
        "optimizer.step() came before the last part of a batch: with accumulate, call run.backward(loss) and",
    ),
    (
        in_parts(lambda run, optimizer, loss: (run.backward(loss), run.step(loss))),
        "run.step() came before the first optimizer.step(): call it after that",
    ),
    (
        in_parts(lambda run, optimizer, loss: (run.backward(loss), run.step(loss), run.score(f1=1))),
        "or after run.step() in the loop, if run.is_due(steps)",
    ),
    (
        lambda run: run.prepare(nn.Linear(1, 1), strategy="zero"),
        "there is no strategy 'zero': choose from ddp, dp, fsdp, horovod",
    ),
    (
        lambda run: train_simply(run, 2, after=lambda run: run.score(**{f"f{run.epoch}": 0.5})),
        "the scores f2 lack f1, which decides on the best checkpoint",
    ),
    (score_before_step, "call run.score() after the batches of an epoch, or after run.step() in the loop"),
    (
        take(lambda run: run.batches(Stream(), 2)),
        "run.batches() cannot resume within a Stream, which has no examples",
    ),
    (
        take(lambda run: run.batches(DataLoader(Points()), 2)),
        "cannot resume within a DataLoader, which has no",
    ),
    (
        take(lambda run: run.batches(Points(), 8, shuffle=True)),
        "decides on the order of the examples, and its seed: leave out shuffle",
    ),
    (
        take(lambda run: run.batches(Points(), 8, generator=torch.Generator())),
        "and its seed: leave out generator",
    ),
    (
        take(lambda run: run.batches(Points(), 10, accumulate=4)),
        "--batch-size 10 is the global batch, and 1 ranks with --accumulate 4 cannot share it evenly",
    ),
    (take(lambda run: run.batches(Points(), 80)), "batch-size 80 is more than the 40 training examples"),
]


@pytest.mark.parametrize(("use", "message"), BAD_USES)
def test_a_bad_use_is_one_line(tmp_path, use, message):
    with pytest.raises(UsageError) as error, open_run(tmp_path / "run") as run:
        use(run)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run/owner.json").exists()


def test_a_run_that_is_not_opened_is_refused(tmp_path):
    with pytest.raises(UsageError, match="open the run with `with"):
        open_run(tmp_path / "run").track(**of_net())


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            {},
            "has the states of optimizer, mine, and run.track() got optimizer beside the model: track",
        ),
        (
            {"mine": Odd({})},
            "epoch-0001-step-000001.pt: the state of mine does not fit ('epochs'): track the",
        ),
    ],
)
def test_objects_that_do_not_fit_the_checkpoint_are_named(tmp_path, later, message):
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path / "run") as run:
        objects = of_net(mine=Odd({"a": 1}))
        run.track(**objects)
        for _ in run.epochs(1):
            for _ in run.batches(Points(), 8):
                if run.global_step:
                    raise KeyboardInterrupt
                objects["optimizer"].step()
                run.step(torch.tensor(1.0))
                run._state_is_checked = True
    with pytest.raises(HpctrainError) as error, open_run(tmp_path / "run") as run:
        run.track(**of_net(**later))
    assert message in str(error.value)


# ---- several ranks ----

TWO_RUNS = """
import sys; sys.path[:0] = [sys.argv[1]]
import hpctrain, torch
from tests.training.test_run import Points, evaluate, make_net, plain, two_optimizers
from torch.utils.data import Subset

with hpctrain.Run("gan", out="gan") as run:
    two_optimizers(run, lambda run: None)
with hpctrain.Run("net", out="net") as run:
    plain(run, lambda run: None)
    # 2 and 3 of 5 examples: the ranks have different numbers of batches
    hits = run.evaluation_batches(Subset(range(5), range(5)), 2)
    run.score(mean=torch.cat([*hits]))
    model = run._tracked.model
    same = hpctrain.gather(run.world, [value.double().sum().item() for value in model.state_dict().values()])
    assert same[0] == same[1], same
with hpctrain.Run("alone", out="alone") as run:
    model = make_net()
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1))
"""


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """Three runs of a script, one after the other; the last one forgets prepare()."""
    (tmp_path / "script.py").write_text(TWO_RUNS)
    with start_ranks(2, "script.py", REPOSITORY, cwd=tmp_path) as ranks:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 0], outputs
    error = "hpctrain: error: run.track(): an optimizer has parameters that each rank would train alone: "
    assert outputs[0].splitlines()[-1].startswith(error)
    assert lines_of(tmp_path / "net")[-1]["mean"] == result_of(tmp_path / "net")["mean"] == 2
    assert "run folder" not in outputs[1]


APART = """
import sys; sys.path[:0] = [sys.argv[1]]
import hpctrain
from tests.training.test_run import Points, evaluate, train_simply

def use(number, after=lambda run: None, within=lambda run: None):
    try:
        with hpctrain.Run("apart", out=str(number), watchdog=0) as run:
            train_simply(run, 2, at_step=lambda run: run.global_step == 1 and within(run), after=after)
    except hpctrain.UsageError as error:
        print(error)

zero = hpctrain.detect().rank == 0
use(1, lambda run: zero and run.score(accuracy=1))
use(2, lambda run: zero and evaluate(run, run._tracked.model))
use(3, lambda run: run.score(**{"accuracy" if zero else "loss": 1}))
use(4, lambda run: zero and hpctrain.broadcast(run.world, 1))
use(5, within=lambda run: zero and run.score(accuracy=1))
use(6)
"""


@pytest.mark.slow
def test_a_call_on_one_rank_alone_is_named_beside_that_of_the_others(tmp_path):
    """Also an evaluation, which scored this rank's part of the test set alone."""
    (tmp_path / "apart.py").write_text(APART)
    with start_ranks(2, "apart.py", REPOSITORY, cwd=tmp_path) as ranks:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    calls = [
        ("Run.score(accuracy) (apart.py:14)", "Run.epochs() (test_run.py:"),
        ("Run.evaluation_batches() (test_run.py:", "Run.epochs() (test_run.py:"),
        ("Run.score(accuracy) (apart.py:16)", "Run.score(loss) (apart.py:16)"),
        ("broadcast() (apart.py:17)", "Run.epochs() (test_run.py:"),
        ("Run.score(accuracy) (apart.py:18)", "Run.batches() (test_run.py:"),
    ]
    for output in outputs:
        errors = [line for line in output.splitlines() if " called " in line]
        for line, (first, second) in zip(errors, calls, strict=True):
            assert line.startswith(f"rank 0 called {first}") and f" where rank 1 called {second}" in line
    assert (tmp_path / "6/result.json").exists()


@pytest.mark.slow
def test_a_notebook(tmp_path):
    """A cell that is interrupted, the same again, and another run in the next cell."""
    import nbclient  # takes seconds, and other tests do without it
    import nbformat

    setup = f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / 'src')!r}]\n"
    setup += "import hpctrain\nfrom tests.training.test_run import Interrupt, plain\n"
    cell = """with hpctrain.Run("mine", out="{}", resume="auto", checkpoint_every=1) as run:
        plain(run, {})"""
    cells = [setup, cell.format("cut", "Interrupt(after=8)")]
    cells += [cell.format(name, "lambda run: None") for name in ("cut", "whole")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.cells[1].metadata.tags = ["raises-exception"]
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, startup_timeout=300, resources=resources).execute()
    assert notebook.cells[1].outputs[-1].ename == "KeyboardInterrupt"
    assert "resuming after epoch 1 and 2 steps" in "".join(
        each.get("text", "") for each in notebook.cells[2].outputs
    )
    assert result_of(tmp_path / "cut") == result_of(tmp_path / "whole")
