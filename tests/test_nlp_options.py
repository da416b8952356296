"""Options of fine-tuning that change what is trained: --class-weights."""

import json
from types import SimpleNamespace

import numpy
import pytest
import torch
from sklearn.metrics import recall_score
from sklearn.utils.class_weight import compute_class_weight
from test_nlp import NO_DROPOUT, SHAPE, metrics, run_predict, scores, train
from test_nlp import cache as cache  # a fixture, for each test

from hpctrain.errors import UsageError
from hpctrain.nlp import classify, data, finetune, ner, pair
from hpctrain.nlp.options import parse_options


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({"model_type": "bert"} | SHAPE | NO_DROPOUT))
    return path


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
    assert weights.tolist() == pytest.approx(compute_class_weight("balanced", classes=numpy.arange(3), y=targets).tolist())
    assert lines == [
        "class a: 5 training examples, weight 0.5333",
        "class b: 1 training examples, weight 2.667",
        "class c: 2 training examples, weight 1.333",
    ]
    assert balance(["a", "unseen", "b"], [0, 0, 2, 0])[0].tolist() == pytest.approx([4 / 6, 0, 4 / 2])


def test_loss_is_the_mean_of_the_weighted_losses_of_the_labels():
    logits, labels = torch.tensor([[2.0, 0.0], [0.5, 1.0], [1.0, 1.0]]), torch.tensor([0, 1, 0])
    weights = torch.tensor([0.75, 1.5])
    each = -logits.log_softmax(1)[range(3), labels]
    batch = {"labels": labels, "units": torch.ones(3, dtype=torch.int64), "class_weights": weights}
    output = SimpleNamespace(logits=logits, loss=each.mean())
    expected = (0.75 * each[0] + 1.5 * each[1] + 0.75 * each[2]) / 3
    for task in (classify.TASK, pair.TASK):
        assert task.compute_loss(output, batch).item() == pytest.approx(expected.item())
        assert task.compute_loss(output, {"labels": labels}) is output.loss  # evaluation
    equal = batch | {"class_weights": torch.ones(2)}
    assert classify.TASK.compute_loss(output, equal).item() == pytest.approx(each.mean().item())


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """20 of 200 reviews are of the class "rare". These and 40 others have the word 파랑: one of three that have it is rare."""
    folder = tmp_path_factory.mktemp("rare")
    for name, times in (("train", 4), ("dev", 1), ("test", 1)):
        lines = [f"{name}{i}\t{'파랑' if i < 15 else '노랑'} {i % 7}\t{'rare' if i < 5 else 'usual'}" for i in range(50)] * times
        (folder / f"{name}.txt").write_text("\n".join(["id\tdocument\tlabel", *lines]) + "\n")
    return folder


RARE = ("--epochs", 8, "--batch-size", 20, "--lr", 3e-3)


def test_rare_class_is_found(rare, config, tmp_path, capfd):
    """Most examples with its word are of the other class; with weights they count less than those of the rare one."""
    recalls, runs = [], []
    examples = data.load_splits(classify.TASK, rare)["test"]
    for more in ((), ("--class-weights", "balanced")):
        run = train("classify", tmp_path / f"run{len(more)}", *RARE, "--data", rare, "--from-scratch", config, *more)
        shown = capfd.readouterr().out
        answers = run_predict(capfd, run, *(example.text for example in examples))
        labels = [example.label for example in examples]
        recalls.append(recall_score(labels, [answer["label"] for answer in answers], pos_label="rare"))
        runs.append(run)
    assert recalls[0] == 0 and recalls[1] >= 0.6
    weights = ["class rare: 20 training examples, weight 5", "class usual: 180 training examples, weight 0.5556"]
    assert [line for line in shown.splitlines() if line.startswith("class ")] == weights
    # The scores of a set are not weighted.
    again = train("classify", tmp_path / "again", "--epochs", 0, "--data", rare, "--model", runs[1] / "model")
    assert scores(again)["test_loss"] == pytest.approx(scores(runs[1])["test_loss"], rel=1e-6)


def test_weights_do_not_depend_on_parts(rare, config, tmp_path):
    """A part of a batch without the rare class has no other weight than it has in the batch."""
    options = ("--epochs", 1, *RARE[2:], "--data", rare, "--from-scratch", config, "--class-weights", "balanced")
    runs = [train("classify", tmp_path / str(parts), *options, "--accumulate", parts) for parts in (1, 10)]
    losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in runs]
    assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_only_tasks_with_one_label_have_weights():
    assert parse_options(pair.TASK, ["--class-weights", "balanced"]).class_weights == "balanced"
    assert parse_options(classify.TASK, []).class_weights is parse_options(ner.TASK, []).class_weights is None
    with pytest.raises(UsageError, match="unrecognized arguments: --class-weights"):
        parse_options(ner.TASK, ["--class-weights", "balanced"])
    with pytest.raises(UsageError, match="invalid choice: 'none'"):
        parse_options(classify.TASK, ["--class-weights", "none"])
