"""What selects the weights and ends a training: --class-weights, --patience and --eval-every."""

import os
import shutil
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import recall_score
from sklearn.utils.class_weight import compute_class_weight

from hpctrain.checkpoints import checkpoint
from hpctrain.errors import UsageError
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.tasks import classify
from hpctrain.nlp.training import finetune
from hpctrain.nlp.training.steps import compute_weighted_loss
from tests.nlp.helpers import metrics, result, run_predict, scores, train, validations
from tests.tools import warm_start

# --- --class-weights ---


def balance(labels, targets):
    lines = []
    train = SimpleNamespace(values={"labels": numpy.array(targets)})
    return finetune.balance_classes(labels, train, SimpleNamespace(print=lines.append)), lines


def test_weights_are_those_of_scikit_learn():
    """8 examples of 3 classes: 8 / (3 * 5), 8 / (3 * 1) and 8 / (3 * 2)."""
    targets = [0, 0, 0, 0, 0, 1, 2, 2]
    weights, lines = balance(["a", "b", "c"], targets)
    assert weights.tolist() == pytest.approx([8 / 15, 8 / 3, 4 / 3])
    assert weights.tolist() == pytest.approx(
        compute_class_weight("balanced", classes=numpy.arange(3), y=targets).tolist()
    )
    assert lines == [
        "class a: 5 training examples, weight 0.5333",
        "class b: 1 training examples, weight 2.667",
        "class c: 2 training examples, weight 1.333",
    ]
    assert balance(["a", "unseen", "b"], [0, 0, 2, 0])[0].tolist() == pytest.approx([4 / 6, 0, 4 / 2])


def test_loss_is_the_mean_of_the_weighted_losses_of_the_labels():
    logits, labels = torch.tensor([[2.0, 0.0], [0.5, 1.0], [1.0, 1.0]]), torch.tensor([0, 1, 0])
    weights = torch.tensor([0.75, 2.0])
    each = -logits.log_softmax(1)[range(3), labels]
    features = Features.from_lists({"input_ids": [[1]] * 3}, {"labels": labels, "units": [1] * 3})
    batch = features.batch(torch.arange(3), {})
    expected = (0.75 * each[0] + 2.0 * each[1] + 0.75 * each[2]) / 3
    assert compute_weighted_loss(logits, batch, weights).item() == pytest.approx(expected.item())
    assert compute_weighted_loss(logits, batch, torch.ones(2)).item() == pytest.approx(each.mean().item())


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """20 of 200 reviews are of the class "rare".

    These and 40 others have the word 파랑: one of three that have it is rare.
    """
    folder = tmp_path_factory.mktemp("rare")
    for name, times in (("train", 4), ("dev", 1), ("test", 1)):
        lines = [
            f"{name}{i}\t{'파랑' if i < 15 else '노랑'} {i % 7}\t{'rare' if i < 5 else 'usual'}"
            for i in range(50)
        ] * times
        (folder / f"{name}.txt").write_text("\n".join(["id\tdocument\tlabel", *lines]) + "\n")
    return folder


RARE = ("--epochs", 8, "--batch-size", 20, "--lr", 3e-3)


@pytest.mark.slow
def test_rare_class_is_found(rare, config, tmp_path, capfd):
    """Most examples with its word are of the other class; with weights, the rare class counts more."""
    recalls, runs = [], []
    examples = load_splits(classify.TASK, rare)["test"]
    for more in ((), ("--class-weights", "balanced")):
        run = train(
            "classify", tmp_path / f"run{len(more)}", *RARE, "--data", rare, "--from-scratch", config, *more
        )
        shown = capfd.readouterr().out
        answers = run_predict(capfd, run, *(example.text for example in examples))
        labels = [example.label for example in examples]
        recalls.append(recall_score(labels, [answer["label"] for answer in answers], pos_label="rare"))
        runs.append(run)
    assert recalls[0] == 0 and recalls[1] >= 0.6
    weights = [
        "class rare: 20 training examples, weight 5",
        "class usual: 180 training examples, weight 0.5556",
    ]
    assert [line for line in shown.splitlines() if line.startswith("class ")] == weights
    # The scores of a set are not weighted.
    again = train("classify", tmp_path / "again", "--epochs", 0, "--data", rare, "--model", runs[1] / "model")
    assert scores(again)["test_loss"] == pytest.approx(scores(runs[1])["test_loss"], rel=1e-6)


@pytest.mark.slow
def test_weights_do_not_depend_on_parts(rare, config, tmp_path):
    """A part of a batch without the rare class has no other weight than it has in the batch."""
    options = ("--epochs=1", *RARE[2:], "--data", rare, "--from-scratch", config, "--class-weights=balanced")
    runs = [train("classify", tmp_path / str(parts), *options, "--accumulate", parts) for parts in (1, 10)]
    losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in runs]
    assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], rel=1e-5)


# --- --patience ---


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, config):
    """A run whose best epoch is neither the first nor the last."""
    return train("classify", tmp_path_factory.mktemp("stopped") / "run", *PATIENT, "--from-scratch", config)


# A learning rate that is far too high; 10 steps an epoch.
TOO_HIGH = ("--batch-size=8", "--lr=5e-3", "--limit=80", "--keep-checkpoints=99")
PATIENT = ("--epochs=12", "--patience=2", *TOO_HIGH)


def find_best(run):
    """The best epoch, counted from 1, by the validation scores; the loss breaks ties."""
    found = [(line["validation_accuracy"], -line["validation_loss"]) for line in validations(run)]
    return found.index(max(found)) + 1, len(found)


@pytest.mark.slow
@pytest.mark.main_road
def test_training_ends_after_epochs_without_a_better_score(stopped):
    best, last = find_best(stopped)
    assert best > 1 and last == best + 2 < 12
    assert result(stopped)["epochs"] == last
    log = (stopped / "logs/rank-0000.log").read_text()
    assert f"stopped after epoch {last}: no better validation_accuracy for 2 evaluations" in log
    assert f"epoch {best} has the best validation_accuracy: using its weights" in log
    state = torch.load(stopped / f"checkpoints/epoch-{best:04d}.pt", weights_only=True)["model"]
    kept = load_file(stopped / "model/model.safetensors")
    assert kept and all(torch.equal(kept[name], state[name]) for name in kept)


@pytest.mark.slow
def test_patience_does_not_change_what_is_trained_until_then(stopped, config, tmp_path):
    whole = train("classify", tmp_path / "run", "--epochs=12", *TOO_HIGH, "--from-scratch", config)
    last = result(stopped)["epochs"]
    assert result(whole)["epochs"] == 12 and "stopped after" not in (whole / "logs/rank-0000.log").read_text()
    states = [
        torch.load(run / f"checkpoints/epoch-{last:04d}.pt", weights_only=True)["model"]
        for run in (stopped, whole)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["within an epoch", "after the best epoch", "after the last epoch"])
@pytest.mark.main_road
def test_resumed_run_stops_at_the_same_epoch(cut, stopped, config, tmp_path):
    """It counts the epochs before the cut, too. After the last epoch there is nothing to train."""
    best, last = find_best(stopped)
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    kept = last if cut == "after the last epoch" else best
    for path in (folder / "checkpoints").iterdir():
        if path.stem > f"epoch-{kept:04d}":
            path.unlink()
    (folder / "result.json").unlink()
    options = (*PATIENT, "--from-scratch", config, "--resume", folder)
    if cut == "within an epoch":
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(
                "hpctrain.run.record.Record.must_save",
                lambda run, is_best=False: run.epoch == best and run._step == 5 and stop(run),
            )
            train("classify", folder, *options)
        assert (folder / f"checkpoints/epoch-{best + 1:04d}-step-000005.pt").exists()
    train("classify", folder, *options)
    assert (
        result(folder)["epochs"] == last
        and result(folder)["weights_sha256"] == result(stopped)["weights_sha256"]
    )
    assert scores(folder) == scores(stopped) and [line["step"] for line in metrics(folder)] == [
        line["step"] for line in metrics(stopped)
    ]


def stop(run):
    """What the launch script asks for when the time of the job is up."""
    run._checkpointer.stop = True
    return True


@pytest.mark.slow
def test_run_of_a_version_without_these_options_is_continued(config, tmp_path):
    options = (*TOO_HIGH, "--from-scratch", config)
    run = train("classify", tmp_path / "run", "--epochs", 1, *options)
    path = checkpoint.path_of(run, 1)
    state = checkpoint.load(path, torch.device("cpu"))
    for name in ("columns", "class_weights", "patience"):
        assert state["options"].pop(name) == "None"
    path.unlink()
    checkpoint.save(path, state)
    (run / "result.json").unlink()
    train("classify", run, "--epochs", 1, *options, "--resume", run)
    (run / "result.json").unlink()
    with pytest.raises(UsageError, match="other options: --patience 3 instead of None"):
        train("classify", run, "--epochs", 1, *options, "--resume", run, "--patience", 3)


@pytest.mark.slow
def test_a_run_that_has_ended_is_not_continued(stopped, config, tmp_path, capsys):
    before = result(stopped)
    options = (*PATIENT, "--from-scratch", config)
    with pytest.raises(
        UsageError, match=r"has \d epochs already: give a larger --patience, with --force, to continue"
    ):
        train("classify", stopped, *options, "--resume", stopped)
    files = {path: path.stat().st_mtime_ns for path in stopped.iterdir() if path.name != "logs"}
    train("classify", stopped, *options, "--resume", "auto")
    assert f"has {before['epochs']} epochs already: nothing to do" in capsys.readouterr().out
    assert files == {path: path.stat().st_mtime_ns for path in stopped.iterdir() if path.name != "logs"}
    with pytest.raises(UsageError, match="--patience 3 instead of 2"):
        train("classify", stopped, *options, "--patience", 3, "--resume", stopped)
    more = tmp_path / "more"
    shutil.copytree(stopped, more)
    train("classify", more, *options, "--patience", 3, "--resume", more, "--force")
    assert result(more)["epochs"] > before["epochs"]


@pytest.mark.slow
def test_two_ranks_stop_at_the_same_epoch_with_the_same_losses(rare, config, tmp_path):
    """The weights never change: no epoch is better than the first, and losses differ by rounding alone."""
    options = ("--epochs=9", "--patience=2", *RARE[2:4], "--lr=1e-30", "--data", rare)
    options += ("--from-scratch", config)
    options += ("--class-weights", "balanced")
    alone = train("classify", tmp_path / "alone", *options)
    words = ["nlp.classify", *map(str, options), "--out", "two"]
    done = warm_start.run(warm_start.torchrun_ranks(2, words, dict(os.environ)), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    two = tmp_path / "two"
    assert result(two)["epochs"] == result(alone)["epochs"] == 3
    assert "stopped after epoch 3: no better validation_f1 for 2 evaluations" in done.stdout
    losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in (two, alone)]
    assert len(losses[0]) == 15 and losses[0] == pytest.approx(losses[1], rel=1e-5)


# --- --eval-every ---

# 10 steps an epoch; evaluations after step 4, 8, 10 (of the first epoch), 12, 16, 20 (of the second one) and
# so on.
EVERY = ("--epochs", 12, "--seed", 2, *TOO_HIGH)
EVERY_FOUR = (*EVERY, "--patience", 3, "--eval-every", 4)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, config):
    """A run whose best evaluation is within an epoch, and which stalls within another one."""
    return train(
        "classify", tmp_path_factory.mktemp("evaluated") / "run", *EVERY_FOUR, "--from-scratch", config
    )


def find_best_evaluation(run):
    found = [
        (line["validation_accuracy"], -line["validation_loss"], line["step"]) for line in validations(run)
    ]
    return max(found, key=lambda line: line[:2])[2], [step for *_, step in found]


@pytest.mark.slow
def test_evaluations_within_epochs_select_the_weights_and_end_the_run(evaluated):
    best, steps = find_best_evaluation(evaluated)
    assert (
        steps == [step for step in range(1, 121) if step % 4 == 0 or step % 10 == 0][: len(steps)]
        and len(steps) < 36
    )
    assert best == steps[-4] and best % 10 and steps[-1] % 10
    assert result(evaluated)["epochs"] == steps[-1] // 10
    log = (evaluated / "logs/rank-0000.log").read_text()
    place = "step {} of epoch {}"
    stalled, chosen = (place.format(step % 10, step // 10 + 1) for step in (steps[-1], best))
    assert f"stopped after {stalled}: no better validation_accuracy for 3 evaluations" in log
    assert f"{chosen} has the best validation_accuracy: using its weights" in log
    state = torch.load(checkpoint.path_of(evaluated, best // 10 + 1, best % 10), weights_only=True)["model"]
    kept = load_file(evaluated / "model/model.safetensors")
    assert kept and all(torch.equal(kept[name], state[name]) for name in kept)


@pytest.mark.slow
def test_evaluations_do_not_change_what_is_trained(evaluated, config, tmp_path):
    """Nor the losses of the training."""
    plain = train("classify", tmp_path / "run", *EVERY, "--from-scratch", config)
    states = [
        torch.load(run / "checkpoints/epoch-0003.pt", weights_only=True)["model"]
        for run in (evaluated, plain)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    lines = [
        {line["step"]: line["train_loss"] for line in metrics(run) if "train_loss" in line}
        for run in (evaluated, plain)
    ]
    assert len(lines[0]) == 16 and lines[0].items() <= lines[1].items()


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["the best", "the last", "nothing after the first epoch"])
def test_run_resumed_after_an_evaluation_ends_alike(kept, evaluated, config, tmp_path):
    best, steps = find_best_evaluation(evaluated)
    folder = tmp_path / "run"
    shutil.copytree(evaluated, folder)
    last = {"the best": best, "the last": steps[-1]}.get(kept, 10)
    newest = checkpoint.path_of(folder, -(-last // 10), last % 10)
    assert newest.exists()
    paths = checkpoint.list_newest_first(folder)
    for path in paths[: paths.index(newest)]:
        path.unlink()
    (folder / "result.json").unlink()
    train("classify", folder, *EVERY_FOUR, "--from-scratch", config, "--resume", folder)
    assert result(folder)["weights_sha256"] == result(evaluated)["weights_sha256"] and scores(
        folder
    ) == scores(evaluated)
    own, others = ([line | {"seconds": 0} for line in validations(run)] for run in (folder, evaluated))
    assert own == others


@pytest.mark.slow
def test_two_ranks_evaluate_within_epochs(rare, config, tmp_path):
    """As in the test of --patience: the first evaluation is the best, and the third one ends the run."""
    options = ("--epochs=9", "--patience=2", "--eval-every=3", "--accumulate=2", *RARE[2:4], "--lr=1e-30")
    words = ["nlp.classify", *map(str, (*options, "--data", rare, "--from-scratch", config)), "--out", "two"]
    done = warm_start.run(warm_start.torchrun_ranks(2, words, dict(os.environ)), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stopped after step 9 of epoch 1: no better validation_accuracy for 2 evaluations" in done.stdout
    assert [line["step"] for line in validations(tmp_path / "two")] == [3, 6, 9]
