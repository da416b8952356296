"""hpctrain.Run computes what a loop by hand does: parts of a batch, clipping, scores, shared models."""

import hashlib
import json
import math
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain
from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import UsageError
from tests.helpers import POSITION, REPOSITORY, run_ranks
from tests.training.test_run import (
    Listed,
    Points,
    clean,
    lines_of,
    make_net,
    open_run,
    result_of,
    train_simply,
)

__all__ = ["clean"]  # a fixture, for each test


def weights_of(folder):
    return checkpoint.load(checkpoint.find_newest(folder), torch.device("cpu"))["model"]


def train(folder, update, data=None, net=make_net, accumulate=1, **options):
    """Train with update(run, model, optimizer, loss) as the step."""
    with open_run(folder, **options) as run:
        model = run.prepare(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for points, labels in run.batches(data or Points(), 8, accumulate=accumulate):
                with run.autocast():
                    loss = cross_entropy(model(points), labels)
                update(run, model, optimizer, loss)
                run.step(loss)
    return result_of(folder)


def by_run(run, model, optimizer, loss, clip=None):
    run.backward(loss)
    run.update(optimizer, clip=clip)


def by_hand(run, model, optimizer, loss, clip=None):
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_that_of_a_loop_by_hand_bit_for_bit(tmp_path, precision, clip):
    results = [
        train(tmp_path / step.__name__, lambda *words, step=step: step(*words, clip), precision=precision)
        for step in (by_run, by_hand)
    ]
    assert results[0] == results[1]
    assert lines_of(tmp_path / "by_run") == lines_of(tmp_path / "by_hand")
    assert clip is None or results[0] != train(tmp_path / "whole", by_run, precision=precision)


class Precise(Points):
    """40 points in float64, with noise of which each bit is the same on every kind of processor."""

    def __getitem__(self, index):
        point = torch.full((4,), float(index % 2), dtype=torch.float64)
        return point + 2 * torch.rand(4, dtype=torch.float64), index % 2


def make_precise():
    """Initial weights in float32 would differ in their last bit."""
    kind = {"dtype": torch.float64}
    layers = [nn.Linear(4, 8, **kind), nn.BatchNorm1d(8, **kind), nn.Tanh(), nn.Linear(8, 2, **kind)]
    return nn.Sequential(*layers)


def test_the_weights_of_a_training_stay_what_they_are(tmp_path):
    """Initial weights, order and noise of the examples, parts of a batch, momentum, clipping: in float64, on
    one thread, rounded to nine digits behind the point, where processors do not differ.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(tmp_path / "run", lambda *words: by_run(*words, clip=0.5), Precise(), make_precise, accumulate=2)
    torch.set_num_threads(threads)
    weights = [value.double().flatten() for value in weights_of(tmp_path / "run").values()]
    numbers = (torch.cat(weights) * 1e9).round().to(torch.int64).tolist()
    digest = hashlib.sha256(json.dumps(numbers).encode()).hexdigest()
    assert digest.startswith("ea9cb54ce0f4a0d8"), numbers
    losses = [line["train_loss"] for line in lines_of(tmp_path / "run")]
    expected = [0.738837, 0.591334, 0.57916, 0.501869, 0.488752, 0.584203, 0.327011, 0.257474, 0.277447]
    assert losses == pytest.approx([*expected, 1.013371], abs=1e-5)


def test_the_scaler_is_that_of_torch(tmp_path):
    """Bit for bit, from the same scale, with a first step that overflows."""
    scaler = torch.amp.GradScaler("cpu")

    def by_torch(run, model, optimizer, loss):
        scaler.scale(loss * 16).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def by_the_run(run, model, optimizer, loss):
        by_run(run, model, optimizer, loss * 16, clip=0.5)

    def linear():
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    ours = train(tmp_path / "ours", by_the_run, net=linear, precision="fp16")
    with open_run(tmp_path / "theirs", precision="fp16") as run:
        model = run.prepare(linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=optimizer, of_script=scaler)
        for _ in run.epochs(2):
            for points, labels in run.batches(Points(), 8):
                with run.autocast():
                    loss = cross_entropy(model(points), labels)
                by_torch(run, model, optimizer, loss)
                run.step(loss)
    assert 1 <= ours.pop("overflow_steps") < 9
    assert ours["weights_sha256"] == result_of(tmp_path / "theirs")["weights_sha256"]


def test_parts_of_a_batch_give_the_weights_of_the_whole(tmp_path):
    """Of a model whose examples do not depend on each other."""

    def linear():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    for accumulate in (1, 2, 4):
        train(
            tmp_path / str(accumulate),
            lambda *words: by_run(*words, clip=0.1),
            Listed(),
            linear,
            accumulate,
        )
        torch.testing.assert_close(
            weights_of(tmp_path / str(accumulate)), weights_of(tmp_path / "1"), rtol=1e-5, atol=1e-6
        )
        losses = [line["train_loss"] for line in lines_of(tmp_path / str(accumulate))]
        assert losses == pytest.approx([line["train_loss"] for line in lines_of(tmp_path / "1")], rel=1e-5)
        assert len(losses) == 10  # steps, not parts


def test_a_part_without_a_finite_loss_skips_the_step(tmp_path):
    """With on_nan="skip": the other part of the batch counts as little."""
    seen = []

    def update(run, model, optimizer, loss):
        seen.append(loss)
        by_run(run, model, optimizer, loss * float("nan") if len(seen) == 3 else loss)

    result = train(tmp_path / "run", update, accumulate=2, on_nan="skip")
    assert result["skipped_steps"] == 1 and len(seen) == 20


def test_an_evaluation_is_due_once_in_a_step(tmp_path):
    """Not for each part of a batch, and not after the last step of an epoch, whose end has its own."""
    due = []
    with open_run(tmp_path / "run") as run:
        model = run.prepare(make_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for points, labels in run.batches(Points(), 8, accumulate=2):
                by_run(run, model, optimizer, cross_entropy(model(points), labels))
                assert not run.is_due(1)  # before run.step()
                run.step(torch.tensor(1.0))
                assert not run.is_due(None) and not run.is_due(0)
                due += [run.global_step] * run.is_due(2)
            assert not run.is_due(1)
    assert due == [2, 4, 6, 8]


# ---- the best evaluation ----


def test_another_score_decides_and_the_best_weights_are_loaded(tmp_path, capsys):
    scores, kept = iter([(0.1, 3), (0.2, 1), (0.3, 2)]), []

    def score(run):
        accuracy, error = next(scores)
        run.best.by, run.best.lowest = "error", True
        run.score(accuracy=accuracy, error=error)
        kept.append({name: value.clone() for name, value in run._tracked.model.state_dict().items()})

    with open_run(tmp_path / "run") as run:
        train_simply(run, 3, after=score)
        assert run.load_best() and not run.best.has_stalled
        for name, value in run._tracked.model.state_dict().items():
            assert torch.equal(value, kept[1][name])
    assert "epoch 2 has the best error: using its weights" in capsys.readouterr().out
    assert (tmp_path / "run/checkpoints/best.pt").readlink() == Path("epoch-0002.pt")
    best = checkpoint.load(tmp_path / "run/checkpoints/best.pt", torch.device("cpu"))["model"]
    assert all(torch.equal(value, kept[1][name]) for name, value in best.items())
    assert result_of(tmp_path / "run")["error"] == 2  # the last scores


def test_the_last_weights_are_the_best_already(tmp_path):
    with open_run(tmp_path / "run") as run:
        train_simply(run, 2, after=lambda run: run.score(f1=run.epoch))
        assert not run.load_best()


def test_a_run_that_stalls_within_an_epoch_computes_no_further_step(tmp_path):
    """Nor does it score these weights again. A resumed one has nothing left to train."""

    def score(run):
        if run.is_due(1):
            run.score(f1=-run.global_step)

    for _ in range(2):
        with open_run(tmp_path / "run") as run:
            run.best.patience = 2
            train_simply(run, 9, at_step=score, after=lambda run: run.score(f1=1))
            assert (run.global_step, run.epoch, run.best.has_stalled) == (3, 0, True)
            assert run.load_best() and run.best.step == 1
        assert result_of(tmp_path / "run")["f1"] == -3
        (tmp_path / "run/result.json").unlink()  # it died before it wrote its result
    with open_run(tmp_path / "run") as run:
        run.best.patience = 2
        train_simply(run, 9)
    with open_run(tmp_path / "run") as run:
        run.best.patience = 2
        train_simply(run, 9, at_step=pytest.fail)
    assert run.is_finished


# ---- resume ----


def test_a_run_whose_number_of_epochs_is_fixed(tmp_path, capsys):
    """Its learning rate depends on it."""

    def run_for(epochs, **options):
        with open_run(tmp_path / "run", **options) as run:
            model = run.prepare(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for epoch in run.epochs(epochs, fixed=True):
                for points, labels in run.batches(Points(), 8):
                    by_run(run, model, optimizer, cross_entropy(model(points), labels))
                    run.step(torch.tensor(1.0))
                if epoch == 1 and epochs == 2:
                    raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_for(2)
    with pytest.raises(UsageError, match="other options: --epochs 3 instead of 2"):
        run_for(3)
    run_for(3, force=True)
    assert "--force: continuing with --epochs 3 instead of 2" in capsys.readouterr().out
    assert result_of(tmp_path / "run")["epochs"] == 3


def test_a_resume_that_is_refused_leaves_the_metrics(tmp_path):
    """Its last line has a score that followed the last checkpoint."""
    with open_run(tmp_path / "run", lr=0.1) as run:
        train_simply(run, 2, after=lambda run: run.score(accuracy=0.5))
        run.score(test_accuracy=0.25)
    (tmp_path / "run/result.json").unlink()
    before = (tmp_path / "run/metrics.jsonl").read_text()
    assert json.loads(before.splitlines()[-1])["test_accuracy"] == 0.25
    files = sorted((tmp_path / "run").iterdir())
    for epochs, lr in ((1, 0.1), (2, 0.2)):
        with pytest.raises(UsageError), open_run(tmp_path / "run", lr=lr) as run:
            train_simply(run, epochs)
        assert (tmp_path / "run/metrics.jsonl").read_text() == before
        assert sorted((tmp_path / "run").iterdir()) == files
    with open_run(tmp_path / "run", lr=0.1) as run:
        train_simply(run, 2)
    assert "test_accuracy" not in (tmp_path / "run/metrics.jsonl").read_text()


def test_options_of_an_optimizer_stay_those_of_its_checkpoint(tmp_path, capsys):
    """But not those that choose a kernel, nor a learning rate that the script sets itself."""

    def run_for(epochs, sets_lr, **options):
        with open_run(tmp_path / "run") as run:
            model = run.prepare(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), **options)
            run.track(model=model, optimizer=optimizer)
            (group,) = optimizer.param_groups
            for _ in run.epochs(epochs):
                for points, labels in run.batches(Points(), 8):
                    if sets_lr:
                        group["lr"] = options["lr"]
                    by_run(run, model, optimizer, cross_entropy(model(points), labels))
                    run.step(torch.tensor(1.0))
            said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
            return group, [line.split(", as in ")[0] for line in said]

    assert run_for(1, False, lr=0.1, momentum=0.9, foreach=True)[1] == []
    group, said = run_for(2, True, lr=0.2, momentum=0.5, foreach=False)
    assert (group["lr"], group["momentum"], group["foreach"]) == (0.2, 0.9, False)
    assert said == ["hpctrain: warning: momentum of optimizer stays 0.9"]


def write_old_checkpoint(folder, **more):
    """A checkpoint of a trainer that had a loop of its own: each object is an entry."""
    torch.manual_seed(5)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    position = POSITION | {"steps": 5}
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {}}
    checkpoint.path_of(folder, 1).parent.mkdir(parents=True)
    checkpoint.save(checkpoint.path_of(folder, 1), position | state | more)
    return net, optimizer


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_checkpoint_of_a_trainer_with_a_loop_of_its_own_is_resumed(tmp_path, precision):
    saved = torch.amp.GradScaler("cpu", init_scale=512.0)
    saved.scale(torch.ones(1))
    scaler = {"scaler": saved.state_dict()} if precision == "fp16" else {}
    net, optimizer = write_old_checkpoint(tmp_path / "old", **scaler)
    options = {"out": tmp_path / "run", "resume": tmp_path / "old", "force": True, "watchdog": 0}
    with hpctrain.Run("mine", precision=precision, **options) as run:
        model = run.prepare(nn.Linear(4, 2))
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.track(model=model, optimizer=own)
        assert run.epoch == 1 and torch.equal(model.weight, net.weight)
        buffers = [each.state[each.param_groups[0]["params"][0]] for each in (own, optimizer)]
        assert torch.equal(*(each["momentum_buffer"] for each in buffers))
        assert run._scaler.get_scale() == (512 if precision == "fp16" else 1)
        for _ in run.epochs(2):
            for points, labels in run.batches(Points(), 8):
                with run.autocast():
                    loss = cross_entropy(model(points), labels)
                by_run(run, model, own, loss)
                run.step(loss)
    assert result_of(tmp_path / "run")["epochs"] == 2


def test_random_numbers_before_the_batches_of_an_epoch_depend_on_seed_and_epoch(tmp_path):
    """As those that choose what an epoch is about: a resumed run draws them again."""

    def draw(folder, number, **options):
        drawn = []
        with suppress(KeyboardInterrupt), open_run(tmp_path / folder, **options) as run:
            model = run.prepare(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for epoch in run.epochs(3):
                drawn.append(torch.rand(1).item())
                if epoch > number:
                    raise KeyboardInterrupt
                for points, labels in run.batches(Points(), 20):
                    by_run(run, model, optimizer, cross_entropy(model(points), labels))
                    run.step(torch.tensor(1.0))
        return drawn

    whole = draw("whole", 3)
    assert draw("cut", 1) == whole[:2] and draw("cut", 3) == whole[1:] and len({*whole}) == 3
    assert not {*draw("other", 3, seed=2)} & {*whole}


# ---- evaluations and shared models ----


@pytest.mark.parametrize("examples", [1, 8, 9, 10, 40])
def test_all_ranks_with_a_sharded_model_evaluate_the_same_number_of_batches(tmp_path, monkeypatch, examples):
    """Each forward pass gathers weights: a rank that has fewer would leave the others waiting."""
    monkeypatch.setattr("hpctrain.training.run.meet", lambda world: None)  # one rank after the other
    for size in (2, 3, 8):
        numbers, counted = set(), []
        with open_run(tmp_path / f"{size}") as run:
            run._record.in_parts = True
            for rank in range(size):
                run.world = World(rank, size, rank, size, 0, 1, "torchrun")
                batches = list(run.evaluation_batches(Numbers(examples), 4))
                numbers.add(len(batches))
                counted += [run._sum_up(batches)]
            run.world = ALONE
        assert numbers == {math.ceil(math.ceil(examples / size) / 4)}
        assert [*map(sum, zip(*counted, strict=True))] == [sum(range(examples)), examples]


class Numbers:
    """So many examples, each of which is its number."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return float(index)


class Layers(nn.Module):
    """Two blocks, which FSDP shards one by one. Its examples do not depend on each other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 2)

    def forward(self, points):
        for layer in self.layers:
            points = layer(points).tanh()
        return self.head(points)


@torch.no_grad()
def number_examples(run, model, examples):
    """The numbers of this rank's examples, of which the model computes something."""
    numbers = []
    model.eval()
    for batch in run.evaluation_batches(Numbers(examples), 1):
        model(batch.float().view(-1, 1).expand(-1, 4))
        numbers.append(batch)
    model.train()
    return numbers


def train_shared(folder, strategy, last):
    """In a rank: train in parts, with an evaluation of five and of one example, and die after a step."""
    with open_run(folder) as run:
        model = run.prepare(Layers(), strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)
        for _ in run.epochs(2):
            for points, labels in run.batches(Listed(), 8, accumulate=2):
                loss = cross_entropy(model(points), labels)
                run.backward(loss)
                run.update(optimizer, clip=0.1)
                run.step(loss)
                if run.is_due(2):
                    run.score(mean_loss=number_examples(run, model, 5))
                if last and run.global_step == last:
                    os.kill(os.getpid(), signal.SIGKILL)
            run.score(mean_loss=number_examples(run, model, 1))


BUFFERS = """
import torch, hpctrain
torch.manual_seed(0)
with hpctrain.Run("mine", out="run", watchdog=0) as run:
    model = run.prepare(torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for points in run.batches(torch.rand(40, 4), 8):
            loss = model(points).sum()
            run.backward(loss)
            run.update(optimizer)
            run.step(loss)
        own = model.module.running_mean.tolist()
        with run.evaluation():
            print("MEANS", own, model.module.running_mean.tolist())
"""


@pytest.mark.slow
@pytest.mark.main_road
def test_all_ranks_evaluate_with_the_statistics_of_rank_0(tmp_path):
    """Of batch normalization: those are saved."""
    (tmp_path / "script.py").write_text(BUFFERS)
    out = run_ranks(2, "script.py", cwd=tmp_path)
    found = [tuple(map(json.loads, re.findall(r"\[.*?\]", line))) for line in re.findall("MEANS.*", out)]
    assert len(found) == 2 and found[0][0] != found[1][0] and found[0][1] == found[1][1], out


SHARED = """
import sys; sys.path[:0] = [sys.argv[1]]
from tests.training.test_run_numbers import train_shared
train_shared(*sys.argv[2:4], int(sys.argv[4]))
"""


@pytest.mark.slow
@pytest.mark.main_road
def test_a_sharded_model_has_the_numbers_of_ddp_and_is_resumed_on_other_ranks(tmp_path):
    """Ranks differ in their number of batches to evaluate, and some have none."""
    (tmp_path / "script.py").write_text(SHARED)

    def start(ranks, folder, strategy="fsdp", last=0):
        status = -signal.SIGKILL if last else 0
        run_ranks(ranks, "script.py", REPOSITORY, folder, strategy, last, cwd=tmp_path, status=status)
        return tmp_path / folder

    whole, ddp = start(2, "whole"), start(2, "ddp", "ddp")
    torch.testing.assert_close(weights_of(whole), weights_of(ddp), rtol=1e-4, atol=1e-6)
    assert len([*(whole / "checkpoints/epoch-0002.pt").iterdir()]) == 2
    for folder in (whole, ddp):
        means = [line["mean_loss"] for line in lines_of(folder) if "mean_loss" in line]
        assert means == [2, 2, 0, 2, 2, 0]
    for ranks in (2, 1, 4):
        cut = start(2, f"cut-{ranks}", last=7)
        start(ranks, cut.name)
        if ranks == 2:
            assert result_of(cut) == result_of(whole) and lines_of(cut) == lines_of(whole)
        torch.testing.assert_close(weights_of(cut), weights_of(whole), rtol=1e-4, atol=1e-6)
