"""The fine-tuning tasks as a whole: training, scores, the saved model, `hpctrain predict`, and errors.

Small models, trained here from scratch on the sample data. test_ner.py and test_qa.py test a single task
each.
"""

import json
import os
import re
import shutil
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from hpctrain.checkpoints import checkpoint
from hpctrain.cli import COMMANDS, load_command
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp import predict
from hpctrain.nlp.batches import features
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models import hub
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.task import IGNORED, SAMPLES
from hpctrain.nlp.tasks import classify, generate, pair
from hpctrain.nlp.tasks.classify import Document
from hpctrain.nlp.tasks.generate import Passage
from hpctrain.nlp.training import finetune, steps
from hpctrain.nlp.training.steps import Steps
from hpctrain.run.reader import summarize
from tests.nlp.helpers import (
    TASKS,
    metrics,
    name_labels,
    result,
    run_predict,
    scores,
    train,
    validations,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config):
    """A run of four epochs, which other runs are compared with."""
    return train("classify", tmp_path_factory.mktemp("trained") / "run", *FOUR, "--from-scratch", config)


# of 216 training and 60 test examples
FOUR = ("--epochs", 4, "--batch-size", 8, "--lr", 2e-3, "--limit", 120)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A run with a checkpoint of each step, which others go on with."""
    out = tmp_path_factory.mktemp("earlier") / "run"
    return train("classify", out, *IN_STEPS, "--checkpoint-every", 1, "--keep-checkpoints", 99)


def cut_after(run, last, tmp_path):
    """A copy of a run as it was after this checkpoint."""
    cut = shutil.copytree(run, tmp_path / "cut")
    for path in [cut / "result.json", *(cut / "checkpoints").iterdir()]:
        if path.name > last:
            path.unlink()
    return cut


# 15 steps
IN_STEPS = ("--epochs", 3, "--batch-size", 8, "--limit", 40, "--from-scratch", "tiny")


# --- training ---


def test_sigterm_ends_a_rank_at_once(config, tmp_path, monkeypatch):
    """A handler in Python would wait for a collective call to return, and that for the other ranks."""
    handlers = set()
    real = Steps.forward

    def forward(self, model, batch):
        handlers.add((model.training, signal.getsignal(signal.SIGTERM)))
        return real(self, model, batch)

    monkeypatch.setattr(Steps, "forward", forward)
    train("classify", tmp_path / "run", "--epochs", 1, "--limit", 8, "--from-scratch", config)
    assert handlers == {(training, signal.SIG_DFL) for training in (True, False)}


def test_the_metric_that_selects_the_best_epoch_comes_first(config, tmp_path):
    """So `hpctrain runs` and the pictures show it: that of questions had been the exact match."""
    run = train("qa", tmp_path / "qa", "--epochs", 1, "--limit", 8, "--from-scratch", config)
    assert [name for name in validations(run)[0] if name.startswith("validation_")][:3] == [
        "validation_loss",
        "validation_f1_char",
        "validation_exact_match",
    ]
    assert summarize(run)["score"] == "test_f1_char"


@pytest.mark.slow
@pytest.mark.main_road
def test_accumulate_does_not_change_losses_and_scores(trained, config, tmp_path):
    """Neither of classes, nor if the loss is a mean over tokens and the parts differ in their number."""
    in_parts = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config, "--accumulate", 4)
    assert [line["step"] for line in metrics(in_parts)] == [line["step"] for line in metrics(trained)]
    for name, value in scores(trained).items():
        assert scores(in_parts)[name] == pytest.approx(value, abs=1e-4), name
    for task in ("ner", "qa"):
        options = ["--epochs", 1, "--batch-size", 8, "--lr", 1e-3, "--limit", 40, "--from-scratch", config]
        runs = [train(task, tmp_path / f"{task}{parts}", *options, "--accumulate", parts) for parts in (1, 4)]
        losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in runs]
        assert losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-5), task
        assert scores(runs[1])["test_loss"] == pytest.approx(scores(runs[0])["test_loss"], rel=1e-4), task


def test_batch_size_is_global(trained):
    epoch = validations(trained)[0]["step"]
    examples = int(
        (trained / "logs/rank-0000.log")
        .read_text()
        .split("train: ")[1]
        .split(" examples")[0]
        .replace(",", "")
    )
    assert epoch == examples // 8


@pytest.mark.slow
@pytest.mark.main_road
def test_bf16_reaches_the_loss_of_fp32(trained, config, tmp_path):
    """With a fused optimizer and gradients that are clipped."""
    half = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config, "--precision", "bf16")
    assert load_file(half / "model/model.safetensors")["classifier.weight"].dtype == torch.float32
    assert result(half)["weights_sha256"] != result(trained)["weights_sha256"]
    assert scores(half)["test_loss"] == pytest.approx(scores(trained)["test_loss"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--gradient-checkpointing"]])
def test_compiled_training_has_the_losses_of_one_that_is_not(trained, config, tmp_path, monkeypatch, more):
    """With the same kernels for batches of all lengths. Those of C++ would take a minute."""
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()  # forget what other tests compiled
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config, "--compile", *more)
    losses = [
        [line["train_loss"] for line in metrics(folder) if "train_loss" in line] for folder in (run, trained)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # and that of check_compiler()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", "generate"])
@pytest.mark.main_road
def test_resumed_run_ends_with_the_same_weights(task, tmp_path):
    """With dropout, and although an earlier epoch is the best so far."""
    options = ["--epochs", 3, "--batch-size", 8, "--limit", 40, "--from-scratch", "tiny"]
    whole = train(task, tmp_path / "whole", *options)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for gone in (
        "checkpoints/epoch-0002.pt",
        "checkpoints/epoch-0003.pt",
        "result.json",
        "model/model.safetensors",
    ):
        (cut / gone).unlink()
    train(task, cut, *options, "--resume", cut)
    states = [
        torch.load(run / "checkpoints/epoch-0003.pt", weights_only=True)["model"] for run in (whole, cut)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert result(cut)["weights_sha256"] == result(whole)["weights_sha256"] and scores(cut) == scores(whole)


@pytest.mark.slow
def test_an_attempt_that_failed_leaves_no_model_to_the_next_one(trained, config, tmp_path):
    """--resume auto without a checkpoint starts anew, with the data and the options of now."""
    first = tmp_path / "a.txt"
    first.write_text("id\tdocument\tlabel\n" + "1\t좋다\t1\n" * 20)
    out = tmp_path / "run"
    with pytest.raises(HpctrainError, match="all training examples have the same label"):
        train("classify", out, *FOUR, "--from-scratch", "tiny", "--seed", 2, "--data", first)
    train("classify", out, *FOUR, "--from-scratch", config, "--resume", "auto")
    assert result(out)["weights_sha256"] == result(trained)["weights_sha256"] and scores(out) == scores(
        trained
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "other"),
    [
        ("epoch-0002-step-000002.pt", ("--lr", 3e-4)),
        ("epoch-0002-step-000002.pt", ("--warmup", 0.5)),
        ("epoch-0001.pt", ("--epochs", 4)),
        ("epoch-0001.pt", ("--batch-size", 20)),
    ],
)
def test_force_sets_the_learning_rates_of_the_new_options(earlier, tmp_path, kept, other):
    """Those of a run that had them from the start."""
    cut = cut_after(earlier, kept, tmp_path)
    train("classify", cut, *IN_STEPS, *other, "--resume", cut, "--force")
    whole = train("classify", tmp_path / "whole", *IN_STEPS, *other)
    rates = [
        {line["step"]: line["learning_rate"] for line in metrics(run) if "learning_rate" in line}
        for run in (cut, whole)
    ]
    steps = 40 // (20 if "--batch-size" in other else 8)
    later = [step for step in rates[1] if step > steps + 2]  # the line of a step has the mean since the last
    assert later and [rates[0][step] for step in later] == [rates[1][step] for step in later]


@pytest.mark.slow
def test_a_checkpoint_of_the_time_of_lightning_is_refused(earlier, tmp_path):
    """In one line. It has the state of the optimizer elsewhere."""
    cut = cut_after(earlier, "epoch-0001.pt", tmp_path)
    for path in checkpoint.list_newest_first(cut):
        state = checkpoint.load(path, torch.device("cpu"))
        optimizer = state.pop("tracked")["optimizer"]
        checkpoint.save(path, state | {"state_dict": state["model"], "optimizer_states": [optimizer]})
    before = (cut / "metrics.jsonl").read_text()
    with pytest.raises(HpctrainError, match=r"can be resumed .*epoch-0001\.pt: it is of another trainer"):
        train("classify", cut, *IN_STEPS, "--resume", cut)
    assert (cut / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_other_parts_of_a_batch_go_on_within_an_epoch(earlier, tmp_path):
    """Steps are counted, not parts: the same steps are left."""
    cut = cut_after(earlier, "epoch-0002-step-000002.pt", tmp_path)
    options = [*IN_STEPS, "--accumulate", 2, "--resume", cut]
    with pytest.raises(UsageError, match="--accumulate 2 instead of 1"):
        train("classify", cut, *options)
    train("classify", cut, *options, "--force")
    assert [line["step"] for line in metrics(cut)] == [line["step"] for line in metrics(earlier)]


@pytest.mark.slow
@pytest.mark.main_road
def test_saved_model_is_the_epoch_with_the_best_validation_score(tmp_path):
    """With a learning rate that is far too high, the last epoch is not the best."""
    run = train("classify", tmp_path / "run", "--epochs", 3, "--batch-size", 8, "--lr", 5e-3)
    accuracies = [line["validation_accuracy"] for line in validations(run)]
    best = accuracies.index(max(accuracies)) + 1
    state = torch.load(run / f"checkpoints/epoch-{best:04d}.pt", weights_only=True)["model"]
    kept = load_file(run / "model/model.safetensors")
    assert (run / "model/model.safetensors").stat().st_mode == (run / "model/config.json").stat().st_mode
    assert kept and all(torch.equal(kept[name], state[name]) for name in kept)


# --- scores ---


def test_scores_are_in_metrics_tensorboard_and_model_card(trained):
    names = {
        f"{part}_{name}"
        for part in ("validation", "test")
        for name in ("loss", "accuracy", "precision", "recall", "f1")
    }
    assert {name for line in metrics(trained) for name in line} >= names | {"train_loss", "learning_rate"}
    board = EventAccumulator(str(trained / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) >= names
    card = (trained / "model/README.md").read_text()
    assert f"| test_accuracy | {result(trained)['test_accuracy']:.4f} |" in card
    assert (trained / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_test_set_is_scored_once_and_does_not_affect_training(trained, config, tmp_path):
    assert [("test_loss" in line) for line in metrics(trained)] == [False] * (len(metrics(trained)) - 1) + [
        True
    ]
    folder = tmp_path / "data"
    shutil.copytree(SAMPLES / "classify", folder)
    lines = (folder / "ratings_test.txt").read_text().splitlines()
    (folder / "ratings_test.txt").write_text("\n".join(lines[:9]) + "\n")
    other = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config, "--data", folder)
    assert result(other)["weights_sha256"] == result(trained)["weights_sha256"]
    losses = [[line["validation_loss"] for line in validations(run)] for run in (other, trained)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@torch.no_grad()
def test_perplexity_counts_each_token_of_the_text_once_without_padding(tmp_path):
    folder = tmp_path / "gpt"
    passages = [*load_splits(generate.TASK, None)["train"][:12], Passage("긍정: ", "좋다")]
    create_model(folder, "tiny", "gpt2", [p.text for p in passages], 1, 64)
    tokenizer = load_tokenizer(folder)
    model = generate.TASK.model.from_pretrained(folder).eval()

    def perplexity(max_length, batch_size):
        made = generate.TASK.tokenize(tokenizer, passages, [], max_length, 0)
        predictions = []
        for rows in torch.arange(len(made.lengths)).split(batch_size):
            batch = made.batch(rows, {**generate.TASK.padding, "input_ids": tokenizer.pad_token_id})
            output = model(**batch.model_inputs(without={"labels"}))
            predictions += generate.TASK.predict(output, batch).tolist()
        answers = generate.TASK.make_answers(passages, made, predictions, [])
        return generate.TASK.score(passages, answers)["perplexity"], [answer["tokens"] for answer in answers]

    padded, tokens = perplexity(64, 13)
    alone, _ = perplexity(64, 1)
    assert padded == pytest.approx(alone, rel=1e-5)
    text = [len(tokenizer(p.text, add_special_tokens=False)["input_ids"]) + 1 for p in passages]
    assert tokens == text  # and the end token; the prompt is not counted
    _, in_windows = perplexity(7, 4)
    assert in_windows == text


class Fetched(Exception):
    """The predictions of an evaluation are copied from the device."""


@pytest.mark.parametrize("task", ["classify", "multi-label", "regression", "ner", "qa", "generate"])
def test_evaluation_reads_no_value_of_a_batch(task, monkeypatch):
    """Reading one waits for a GPU; tensors without values refuse it."""
    problem = task if task in ("multi-label", "regression") else None
    chosen = TASKS["classify" if problem else task].TASK.for_problem(problem)
    shape = {"ner": (4, 9, 5), "qa": (4, 9), "generate": (4, 9, 50), "regression": (4, 1)}.get(task, (4, 2))
    names = {"ner": ["unit"], "qa": ["start", "end"], "generate": ["labels"]}.get(task, [])
    labels = {"multi-label": [[0.0, 1.0]] * 4, "regression": [0.5] * 4}.get(task, [1] * 4)
    made = features.Features.from_lists(
        {name: [[1] * 9] * 4 for name in ["input_ids", *names]},
        {"labels": labels, "start_positions": [1] * 4, "end_positions": [2] * 4, "units": [1] * 4},
    )
    batch = made.batch(torch.arange(4), {}).to(torch.device("meta"))
    logits = torch.zeros(shape, device="meta")
    output = SimpleNamespace(loss=logits.sum(), logits=logits, start_logits=logits, end_logits=logits)

    def fetch(predictions):
        raise Fetched(predictions)

    args = SimpleNamespace(tensor_parallel=1, max_length=9)
    run = SimpleNamespace(
        world=ALONE, device=torch.device("meta"), evaluation=nullcontext, autocast=nullcontext
    )
    steps = Steps(chosen, torch.nn.Module(), [], args, run)
    monkeypatch.setattr(steps, "forward", lambda model, batch: output)
    monkeypatch.setattr(type(chosen), "fetch_predictions", staticmethod(fetch))
    steps._sets["test"] = [], made, [batch]
    with pytest.raises(Fetched) as caught:  # after all batches, where it may wait
        steps.evaluate("test")
    (((index, predictions),),) = caught.value.args
    assert index.shape == (4,) and len(predictions) == 4


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", "ner", "qa"])
def test_predictions_do_not_depend_on_the_batches_of_an_evaluation(task, config, tmp_path, monkeypatch):
    """Evaluated are 8 times as many examples at once as trained, with --gradient-checkpointing as many."""
    monkeypatch.setattr(steps, "MIN_BATCHES", 1)
    kind, found, sizes = type(TASKS[task].TASK), [], []
    make, forward = kind.make_answers, Steps.forward
    monkeypatch.setattr(kind, "make_answers", lambda *words: found.append(words[3]) or make(*words))
    monkeypatch.setattr(
        Steps, "forward", lambda self, *words: sizes.append(len(words[1].index)) or forward(self, *words)
    )
    options = ["--epochs", 0, "--batch-size", 8, "--accumulate", 4, "--limit", 40, "--from-scratch", config]
    many, few = (
        train(task, tmp_path / name, *options, *more)
        for name, more in (("many", ()), ("few", ("--gradient-checkpointing",)))
    )
    assert sizes[:2] == [16, 16] and sizes[-2:] == [2, 2]
    of_many, of_few = scores(many), scores(few)
    assert of_many.pop("test_loss") == pytest.approx(of_few.pop("test_loss"), rel=1e-5)
    assert of_many == of_few
    assert all(numpy.allclose(one, other, atol=1e-5) for one, other in zip(*found, strict=True))


# --- the cache of tokenized texts ---


@pytest.mark.slow
def test_second_run_maps_the_cached_features(trained, config, tmp_path, monkeypatch):
    monkeypatch.setattr(classify.Classify, "tokenize", lambda *_: pytest.fail("tokenized again"))
    again = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config)
    assert result(again)["weights_sha256"] == result(trained)["weights_sha256"]
    found = features.load_or_make(
        "key", lambda: features.Features.from_lists({"input_ids": [[1, 2], [3]]}, {"units": [1, 1]}), ALONE
    )
    assert isinstance(found.tokens["input_ids"], numpy.memmap)
    batch = found.batch(torch.tensor([1, 0]), {"input_ids": 9})
    assert batch.tokens["input_ids"].tolist() == [[3, 9], [1, 2]]


# --- the saved model ---


def test_saved_model_loads_in_transformers_with_its_label_names(trained):
    model = AutoModelForSequenceClassification.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert model.config.id2label == {0: "0", 1: "1"} and model.config.label2id == {"0": 0, "1": 1}
    examples = load_splits(classify.TASK, None)["test"]
    with torch.no_grad():
        predicted = [
            model(**tokenizer(example.text, return_tensors="pt")).logits.argmax().item()
            for example in examples
        ]
    right = sum(
        model.config.id2label[i] == example.label for i, example in zip(predicted, examples, strict=True)
    )
    assert right / len(examples) == pytest.approx(result(trained)["test_accuracy"])


def test_fine_tuned_model_keeps_its_labels_when_tested_or_trained_again(trained, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(SAMPLES / "classify", folder)
    lines = (folder / "ratings_train.txt").read_text().splitlines(keepends=True)
    only = [line for line in lines[1:] if line.rstrip("\n").endswith("\t1")]
    (folder / "ratings_train.txt").write_text("".join([lines[0], *only]))
    again = train("classify", tmp_path / "run", "--epochs", 0, "--model", trained / "model", "--data", folder)
    assert scores(again) == pytest.approx(scores(trained), abs=1e-6)
    with pytest.raises(HpctrainError, match="all training examples have the same label, '1'"):
        train("classify", tmp_path / "other", "--from-scratch", "tiny", "--data", folder)


def copy_model(source, folder, **config):
    """A model as from elsewhere: without hpctrain's part of config.json and digests, with other entries."""
    shutil.copytree(source / "model", folder)
    (folder / "SHA256SUMS").unlink()
    content = json.loads((folder / "config.json").read_text())
    content.pop("hpctrain")
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def swap_rows(folder):
    """Swap the two outputs of a classifier."""
    state = load_file(folder / "model.safetensors")
    state |= {f"classifier.{name}": state[f"classifier.{name}"].flip(0) for name in ("weight", "bias")}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_model_from_elsewhere_keeps_the_order_of_its_labels(trained, tmp_path, capsys):
    """In alphabetical order, each answer of a classifier would count as the opposite."""
    model = swap_rows(copy_model(trained, tmp_path / "model", **name_labels("1", "0")))
    again = train("classify", tmp_path / "run", "--epochs", 0, "--model", model)
    assert "2 labels of the model: 1, 0\n" in capsys.readouterr().out
    assert result(again)["test_loss"] == pytest.approx(result(trained)["test_loss"], rel=1e-6)
    assert json.loads((again / "model/config.json").read_text())["id2label"] == {"0": "1", "1": "0"}
    once_more = train("classify", tmp_path / "more", "--epochs", 1, "--limit", 64, "--model", model)
    assert json.loads((once_more / "model/config.json").read_text())["id2label"] == {"0": "1", "1": "0"}


def test_model_for_several_labels_of_a_text_is_trained_for_one(trained, tmp_path):
    """Its own loss takes no numbers of classes."""
    model = copy_model(trained, tmp_path / "model", problem_type="multi_label_classification")
    run = train(
        "classify", tmp_path / "run", "--epochs", 1, "--limit", 40, "--batch-size", 8, "--model", model
    )
    assert (
        json.loads((run / "model/config.json").read_text())["problem_type"] == "single_label_classification"
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model for each task, trained for a few steps."""
    folder = tmp_path_factory.mktemp("models")
    # more than any test set has
    few = ("--epochs", 1, "--batch-size", 8, "--limit", 64, "--from-scratch", "tiny")
    return {task: train(task, folder / task, *few) / "model" for task in TASKS}


QUESTIONS = {
    "classify": ["또 보고 싶다", ""],
    "pair": ["비가 온다", "날씨가 맑다", "한 사람", "두 사람"],
    "ner": ["김민수는 서울에 산다", "둘"],
    "qa": ["누가 사나?", "김민수는 서울에 산다", "어디에?", "긴 글 " * 300],
    "generate": ["오늘은", "내일은"],
    "instruct": ["눈의 색은?", "개의 소리는?"],
}
KEYS = {
    "classify": {"text", "label", "probability"},
    "pair": {"first", "second", "label", "probability"},
    "ner": {"text", "entities"},
    "qa": {"question", "context", "answer", "start", "score"},
    "generate": {"text", "generated"},
    "instruct": {"text", "generated"},
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_predict_gives_the_same_answers_for_arguments_and_files(task, models, capfd, tmp_path):
    words = QUESTIONS[task]
    answers = run_predict(capfd, models[task], *words)
    names = TASKS[task].TASK.inputs
    assert len(answers) == 2 and all(set(each) == KEYS[task] for each in answers)
    assert [text for each in answers for text in (each[name] for name in names)] == words
    rows = [words[i : i + len(names)] for i in range(0, len(words), len(names))]
    (tmp_path / "texts.txt").write_text("".join("\t".join(row) + "\n" for row in rows))
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    )
    for name in ("texts.txt", "texts.jsonl"):
        assert (
            run_predict(
                capfd, models[task].parent, "--file", tmp_path / name, "--out", tmp_path / "answers.jsonl"
            )
            == []
        )
        assert [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()] == answers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "texts.jsonl", "texts.txt"]


@torch.no_grad()
def test_tokenizer_in_transformers_gives_what_the_model_was_trained_on(models, tmp_path, capfd):
    """It truncates at --max-length of the run, and adds the token with which a text begins."""
    tokenizers = {task: AutoTokenizer.from_pretrained(models[task]) for task in TASKS}
    assert {task: t.model_max_length for task, t in tokenizers.items()} == {
        task: m.TASK.max_length for task, m in TASKS.items()
    }
    text = "긴 글 " * 200
    (answer,) = run_predict(capfd, models["classify"], text)
    model = AutoModelForSequenceClassification.from_pretrained(models["classify"])
    logits = model(**tokenizers["classify"](text, truncation=True, return_tensors="pt")).logits
    assert logits.softmax(-1).max().item() == pytest.approx(answer["probability"], abs=1e-6)
    made = generate.TASK.tokenize(load_tokenizer(models["generate"]), [Passage("", "오늘은")], [], 64, 0)
    tokenizer = tokenizers["generate"]
    assert made.tokens["input_ids"].tolist() == [*tokenizer("오늘은")["input_ids"], tokenizer.eos_token_id]
    # which does not limit the next run
    longer = train(
        "classify", tmp_path / "run", "--model", models["classify"], "--epochs", 0, "--max-length", 512
    )
    assert AutoTokenizer.from_pretrained(longer / "model").model_max_length == 512


@pytest.mark.slow
def test_questions_without_an_answer_are_trained_scored_and_answered(tmp_path, capfd):
    """Of the sample data every second question has lost its answer, as in SQuAD 2.0."""
    for name in ("train", "dev"):
        content = json.loads((SAMPLES / f"qa/sample-qa_{name}.json").read_text())
        questions = [
            item for article in content["data"] for part in article["paragraphs"] for item in part["qas"]
        ]
        for i, item in enumerate(questions):
            item |= {"is_impossible": True, "answers": []} if i % 2 else {"is_impossible": False}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    run = train("qa", tmp_path / "run", *QUICK, "--data", tmp_path, "--limit", 40)
    assert {
        f"test_{name}{part}"
        for name in ("exact_match", "f1_char", "f1_word")
        for part in ("", "/HasAns", "/NoAns")
    } < {*result(run)}
    assert json.loads((run / "model/config.json").read_text())["hpctrain"]["settings"] == {"optional": True}
    assert {*run_predict(capfd, run, *QUESTIONS["qa"][:2])[0]} == KEYS["qa"]


def test_log_says_whether_a_question_or_an_answer_is_too_long(config, tmp_path, capsys):
    for name, extra in (("train", {"question": "무엇? " * 200}), ("dev", {})):
        content = json.loads((SAMPLES / f"qa/sample-qa_{name}.json").read_text())
        paragraph = content["data"][0]["paragraphs"][0]
        text = " ".join(f"{i}" for i in range(100))
        paragraph["context"] += text
        answers = [{"text": text, "answer_start": paragraph["context"].index(text)}]
        paragraph["qas"].append({"id": "long", "question": "?", "answers": answers} | extra)
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    train(
        "qa",
        tmp_path / "run",
        "--epochs",
        0,
        "--data",
        tmp_path,
        "--from-scratch",
        config,
        "--validation-split",
        0.01,
    )
    shown = capsys.readouterr().out
    lost = "examples with an answer longer than 64 tokens or than a window, "
    lost += "so no prediction can be right; the first: "
    assert re.search(rf"test: 1 of .* {lost}.*dev\.json, question long", shown), shown
    assert re.search(
        r"train: 1 of .* examples with a question too long for --max-length 384 and truncated; .*long", shown
    )
    assert "test: 1 of 39 examples with a question" not in shown


def test_options_of_predict_may_stand_between_the_folder_and_the_texts():
    for words in (
        ["--seed", "3", "첫째", "둘째"],
        ["첫째", "--seed", "3", "둘째"],
        ["첫째", "둘째", "--seed", "3"],
    ):
        args = predict.parser().parse_args(["model", *words])
        assert (args.folder, args.text, args.seed) == (Path("model"), ["첫째", "둘째"], 3)
    with pytest.raises(UsageError, match=r"unrecognized arguments: --sed 3 첫째: did you mean --seed\?"):
        predict.parser().parse_args(["model", "--sed", "3", "첫째"])


@pytest.mark.parametrize("length", [512, 513, 10_000])
def test_text_longer_than_the_positions_is_refused(models, length):
    """With 512, it depended on the seed whether the text ended before."""
    message = (
        rf"--max-new-tokens {length} leaves no room for a text in the 512 positions of the model: "
        "give at most 511"
    )
    with pytest.raises(UsageError, match=message):
        predict.main(ALONE, [str(models["generate"]), "오늘은", "--max-new-tokens", str(length)])


def test_text_as_long_as_the_positions_is_generated(models):
    model = generate.TASK.model.from_pretrained(models["generate"])
    model.config.n_positions = 16
    for prompt in ("오늘은", "오늘은 " * 40):
        assert generate.TASK.generate_texts(model, load_tokenizer(models["generate"]), [prompt], 15, seed=1)


@pytest.mark.slow
def test_model_card_has_names_instead_of_paths(config, tmp_path):
    folder = tmp_path / "some/where/reviews"
    shutil.copytree(SAMPLES / "classify", folder)
    run = train("classify", tmp_path / "here/run", "--epochs", 0, "--from-scratch", config, "--data", folder)
    card = (run / "model/README.md").read_text()
    assert str(tmp_path) not in card and "/" not in "".join(
        re.findall(r"^# .*|fine-tuned on .*", card, re.MULTILINE)
    )
    assert "# Text classification: run\n" in card and "language: ko\n" in card
    assert "`from scratch (config.json)`, fine-tuned on `reviews`" in card
    again = train("classify", tmp_path / "again", "--epochs", 0, "--model", run / "model", "--data", folder)
    assert "`model`, fine-tuned on `reviews`" in (again / "model/README.md").read_text()


def test_predict_agrees_with_the_scored_test_set(models, capfd, tmp_path):
    examples = load_splits(classify.TASK, None)["test"]
    (tmp_path / "texts.txt").write_text("".join(example.text + "\n" for example in examples))
    answers = run_predict(capfd, models["classify"], "--file", tmp_path / "texts.txt", "--batch-size", 5)
    assert (
        classify.TASK.score(examples, answers)["accuracy"]
        == result(models["classify"].parent)["test_accuracy"]
    )


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("pair", ["one text"], "1 text given, but each answer of pair needs first and second"),
        ("classify", [], "0 texts given, but each answer of classify needs text"),
        ("classify", ["a", "--file", "b"], "TEXT and --file exclude each other: give only one"),
        ("classify", ["--file", "missing.txt"], "missing.txt: cannot be read"),
        ("classify", ["--file", "empty.txt"], "empty.txt: the file is empty"),
        ("pair", ["--file", "tabs.txt"], "tabs.txt, line 2: expected first and second, separated by a tab"),
        # NSMC's own file: its number and label became part of the text
        ("classify", ["--file", "tabs.txt"], "tabs.txt, line 1: expected a text without tabs, or --columns"),
        (
            "pair",
            ["--file", "broken.jsonl"],
            "broken.jsonl, line 1: expected a JSON object with first and second",
        ),
        ("classify", ["a", "--out", "missing/out"], "missing/out: cannot be written"),
        ("classify", ["--file", "reviews.csv"], "reviews.csv: no column 'text', but id, review: give"),
        ("classify", ["--file", "reviews.csv", "--columns", "a=b"], "--columns a=b: give FIELD=COLUMN"),
        ("classify", ["a", "--columns", "id=id"], "--columns needs --file: give the table"),
    ],
)
def test_predict_explains_bad_input(task, arguments, message, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("tabs.txt").write_text("a\tb\nc\n")
    Path("broken.jsonl").write_text('{"first": 1}\n')
    Path("reviews.csv").write_text("id,review\n0,good\n")
    with pytest.raises(HpctrainError, match=re.escape(message)):
        predict.main(ALONE, [str(models[task]), *arguments])


@pytest.mark.slow
def test_a_contest_of_kaggle_from_its_tables_to_its_submission(tmp_path, config, capfd):
    """Its test set has no labels: a part of the training data is scored, and predict answers it."""
    rows = [f"{i},{'fire' if i % 2 else 'sun'} in the valley {i},{i % 2}" for i in range(64)]
    (tmp_path / "train.csv").write_text("id,tweet,target\n" + "\n".join(rows))
    (tmp_path / "test.csv").write_text('id,tweet\n64,"sun, and sea"\n65,fire\n')
    (tmp_path / "sample_submission.csv").write_text("id,target\n64,0\n65,0\n")
    columns = ["--columns", "text=tweet", "label=target"]
    options = ["--data", tmp_path, *columns, "--from-scratch", config, "--epochs", 1, "--batch-size", 16]
    run = train("classify", tmp_path / "run", *options)
    said = capfd.readouterr().out
    assert f"{tmp_path}/test.csv: not used, because it has no labels" in said and scores(run)
    table = ["--file", tmp_path / "test.csv", "--columns", "id=id"]
    assert [answer["id"] for answer in run_predict(capfd, run, *table)] == ["64", "65"]
    run_predict(capfd, run, *table, "--out", tmp_path / "submission.csv")
    header, *lines = (tmp_path / "submission.csv").read_text().splitlines()
    assert header == "id,target" and [line.split(",")[0] for line in lines] == ["64", "65"]
    assert {line.split(",")[1] for line in lines} <= {"0", "1"}


@pytest.mark.parametrize("trainer", ["train_ddp", "nlp.ner"])
def test_predict_names_a_run_without_a_model(tmp_path, trainer):
    """Also beside a link out of the folder, as wandb makes one."""
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer}))
    (tmp_path / "wandb").symlink_to("/")
    with pytest.raises(HpctrainError, match=rf"a run of {trainer} that has no model/: a fine-tuning \(nlp"):
        predict.main(ALONE, [str(tmp_path), "text"])


def test_predict_refuses_other_and_damaged_model_folders(models, tmp_path):
    with pytest.raises(HpctrainError, match="not a model fine-tuned by hpctrain"):
        predict.main(ALONE, [str(tmp_path), "text"])
    (tmp_path / "config.json").write_text('{"hpctrain": {"task": "../classify"}}')
    with pytest.raises(HpctrainError, match="not a model fine-tuned by hpctrain"):
        predict.main(ALONE, [str(tmp_path), "text"])
    shutil.copytree(models["classify"], tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(
        HpctrainError,
        match=r"model/model.safetensors: not the file that was written, according to SHA256SUMS",
    ):
        predict.main(ALONE, [str(tmp_path / "model"), "text"])
    (tmp_path / "model/SHA256SUMS").unlink()  # as in a folder from elsewhere
    with pytest.raises(HpctrainError, match="model: the model cannot be loaded"):
        predict.main(ALONE, [str(tmp_path / "model"), "text"])
    with pytest.raises(UsageError, match="predict runs in one process, but the launcher started 2"):
        predict.main(World(0, 2, 0, 2, 0, 1, "torchrun"), [str(tmp_path), "text"])


def test_every_task_is_found_by_its_command():
    """No other table lists the tasks: `hpctrain predict` finds them in COMMANDS."""
    commands = {name: module for name, (module, *_) in COMMANDS.items() if name.startswith("nlp.")}
    assert commands == {f"nlp.{name}": module.__name__ for name, module in TASKS.items()}
    for name in TASKS:
        assert load_command(f"nlp.{name}").parser().prog == f"hpctrain nlp.{name}"
    assert (predict.parser().prog, hub.parser().prog) == ("hpctrain predict", "hpctrain fetch")


# --- bad input ---


def fail_without_message(*args, **kwargs):
    raise ValueError


def test_exception_without_a_message_is_named_by_its_type(models, monkeypatch, tmp_path):
    """str(error).splitlines()[0] would be an IndexError."""
    monkeypatch.setattr(
        classify.Classify,
        "model",
        SimpleNamespace(
            from_pretrained=fail_without_message,
            __name__="AutoModel",
            _model_mapping={BertConfig: None},
        ),
    )
    with pytest.raises(HpctrainError, match=r"model: the model cannot be loaded \(ValueError\)"):
        predict.main(ALONE, [str(models["classify"]), "text"])
    with pytest.raises(HpctrainError, match=r"model: not a model for nlp.classify \(ValueError\)"):
        train("classify", tmp_path / "run", "--model", models["classify"])


def test_task_without_sample_data_needs_data(monkeypatch):
    monkeypatch.setattr(classify.Classify, "name", "classify_in_a_hurry")
    with pytest.raises(UsageError, match=r"nlp\.classify_in_a_hurry has no sample data: give --data"):
        load_splits(classify.TASK, None)


def add_lines(tmp_path, **files):
    """The first reviews of the sample data, and in these files one more line each."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test"):
        lines = (SAMPLES / f"classify/ratings_{name}.txt").read_text().splitlines(keepends=True)[:41]
        (folder / f"ratings_{name}.txt").write_text("".join(lines) + files.get(name, ""))
    return folder


QUICK = ("--epochs", 1, "--batch-size", 8, "--from-scratch", "tiny")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train": "1\t한 줄\n"}, "skipped 1 example "),
        ({"test": "1\t글\t7\n"}, "1 of .* examples with a label that is not in the training data"),
        (
            {"train": "1\t" + "긴 글 " * 300 + "\t1\n"},
            "1 of .* examples too long for --max-length 128 and truncated",
        ),
    ],
    ids=["broken line", "unseen label", "too long"],
)
def test_bad_examples_are_reported_or_with_strict_an_error(tmp_path, capsys, files, message):
    folder = add_lines(tmp_path, **files)
    name = {"train": "ratings_train.txt", "test": "ratings_test.txt"}[next(iter(files))]
    number = (folder / name).read_text().count("\n")
    train("classify", tmp_path / "run", *QUICK, "--data", folder, "--validation-split", 0.02)
    shown = capsys.readouterr().out
    assert re.search(message, shown) and f"{name}, line {number}" in shown, shown
    with pytest.raises(HpctrainError, match=rf"{name}, line {number}"):
        train(
            "classify", tmp_path / "strict", *QUICK, "--data", folder, "--strict", "--validation-split", 0.02
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test", "dev"])
def test_run_ends_with_a_model_although_a_set_has_only_unseen_labels(name, tmp_path, capsys):
    """Its loss is a mean over no labels."""
    folder = add_lines(tmp_path)
    (folder / f"ratings_{name}.txt").write_text("id\tdocument\tlabel\n1\t좋다\t7\n2\t나쁘다\t8\n")
    run = train("classify", tmp_path / "run", *QUICK, "--data", folder)
    assert "2 of 2 examples with a label that is not in the training data" in capsys.readouterr().out
    assert (run / "model/model.safetensors").exists() and ("test_loss" in result(run)) == (name != "test")
    assert (result(run)["test_accuracy"] == 0) == (name == "test")


@pytest.mark.slow
def test_score_that_is_not_finite_is_left_out(tmp_path, monkeypatch, capsys):
    def score(_, examples, answers):
        return {"accuracy": 0.5, "f1": float("nan") if len(examples) == 30 else 0.5}  # of the test set

    monkeypatch.setattr(pair.PairClassify, "score", score)
    run = train("pair", tmp_path / "run", *QUICK, "--limit", 30)
    assert "test_f1 is nan: left out" in capsys.readouterr().out
    assert (run / "model/model.safetensors").exists() and set(scores(run)) == {"test_loss", "test_accuracy"}


def test_validation_score_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pair.PairClassify, "score", lambda *_: {"accuracy": float("nan")})
    with pytest.raises(HpctrainError, match=r"^validation_accuracy is nan at epoch 1, .*training diverged"):
        train("pair", tmp_path / "run", *QUICK, "--limit", 30)


def test_nan_loss_ends_the_run(config, tmp_path):
    error = (
        r"train_loss is nan at epoch \d, step \d+, since step \d+ .*: training diverged, "
        r"use a smaller --lr.* \(no checkpoint was saved before\)"
    )
    with pytest.raises(HpctrainError, match=error):
        train(
            "classify",
            tmp_path / "run",
            "--epochs",
            3,
            "--batch-size",
            8,
            "--lr",
            1e30,
            "--from-scratch",
            config,
        )
    assert not (tmp_path / "run/model").exists()


def test_test_split_of_a_single_file_does_not_depend_on_the_seed():
    file = str(SAMPLES / "classify/ratings_train.txt")
    sets = [
        finetune.read_examples(
            classify.TASK, parse_options(classify.TASK, ["--data", file, "--model", "x", *seed]), ALONE
        )
        for seed in (["--seed", "1"], ["--seed", "2"])
    ]
    assert sets[0]["test"] == sets[1]["test"] and sets[0]["validation"] != sets[1]["validation"]
    assert not set(sets[0]["test"]) & {*sets[0]["train"], *sets[0]["validation"]}


def test_max_length_beyond_the_positions_of_the_model_is_refused(trained, tmp_path):
    with pytest.raises(
        HpctrainError,
        match=r"--max-length 600 is too long for .*, which has 512 positions: give --max-length 512",
    ):
        train("classify", tmp_path / "run", "--model", trained / "model", "--max-length", 600)


def test_model_with_missing_weights_is_refused(trained, tmp_path):
    """transformers would only warn, and initialize them at random."""
    shutil.copytree(trained / "model", tmp_path / "model")
    (tmp_path / "model/SHA256SUMS").unlink()
    state = load_file(tmp_path / "model/model.safetensors")
    save_file(
        {name: state[name] for name in state if "layer.1" not in name},
        tmp_path / "model/model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        HpctrainError,
        match=r"model: 16 weights of the bert model are missing, such as bert\.encoder\.layer\.1",
    ):
        train("classify", tmp_path / "run", "--model", tmp_path / "model")


def change_vocabulary(model, change):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = change(tokenizer["model"]["vocab"])
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda vocabulary: {"[PAD]": 0},
            r"its tokenizer cannot tokenize the data \(.*\): fetch or copy the folder again",
        ),
        (
            lambda vocabulary: {token: i if i < 5 else i + 10_000 for token, i in vocabulary.items()},
            r"its tokenizer has the token 10\d{3}, but its model only \d+ tokens: "
            ".* fetch or copy the folder again",
        ),
    ],
    ids=["broken", "of another model"],
)
def test_tokenizer_that_does_not_work_is_one_line_that_names_the_folder(trained, tmp_path, change, message):
    model = copy_model(trained, tmp_path / "model")
    change_vocabulary(model, change)
    with pytest.raises(HpctrainError, match=f"{model}: {message}"):
        train("classify", tmp_path / "run", "--model", model, "--epochs", 0)


def test_label_not_in_training_data_counts_as_wrong():
    labels = ["0", "1"]
    examples = [Document("", "글", "7"), Document("", "글", "1")]
    create_model(Path(os.environ["HPCTRAIN_CACHE"]) / "seven", "tiny", "bert", ["글 글"], 1, 128)
    tokenizer = load_tokenizer(Path(os.environ["HPCTRAIN_CACHE"]) / "seven")
    made = classify.TASK.tokenize(tokenizer, examples, labels, 128, 0)
    assert made.values["labels"].tolist() == [IGNORED, 1] and made.values["units"].tolist() == [0, 1]
    assert classify.TASK.score(examples, [{"label": "1"}, {"label": "1"}])["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("size", "words", "batch"),
    [
        (1, [], 7),
        (2, [], 6),
        (2, ["--accumulate", "2"], 4),
        (8, [], 32),  # they cannot share one: check_batch_size() says so
        (1, ["--batch-size", "4"], 4),
        (1, ["--epochs", "0"], 32),
    ],
)
def test_a_batch_is_not_larger_than_the_training_set(capsys, size, words, batch):
    """Seven reviews of a user's own ended with the advice to use a smaller batch than the default."""
    args = parse_options(classify.TASK, ["--data", "x", "--model", "y", *words])
    assert finetune.fit_batch_size(args, 7, World(0, size, 0, size, 0, 1, "slurm")).batch_size == batch
    changed = f"--batch-size is {batch} instead of 32, because there are 7 training examples\n"
    assert capsys.readouterr().out == (changed if batch in (7, 6) or "--accumulate" in words else "")
