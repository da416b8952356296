"""Run a fine-tuning or `hpctrain predict` in this process, and read what it wrote."""

import hashlib
import json
import sys

from hpctrain.distributed.world import ALONE
from hpctrain.nlp import predict
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.tasks import classify, generate, instruct, ner, pair, qa
from hpctrain.nlp.training import finetune

TASKS = {module.TASK.name: module for module in (classify, pair, ner, qa, generate, instruct)}

# without randomness, so that different ways to the same numbers can be compared
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 600,
}

# two of each text of the samples
TEXTS = [document.text for document in load_splits(classify.TASK, None)["train"]] * 2


def train(task, out, *options):
    """Run a fine-tuning in this process; returns its folder."""
    hook = sys.excepthook
    try:
        finetune.fine_tune(TASKS[task].TASK, ALONE, [*map(str, options), "--out", str(out)])
    finally:
        sys.excepthook = hook  # the run has replaced it
    return out


def result(folder):
    return json.loads((folder / "result.json").read_text())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scores(folder, of="test_"):
    return {name: value for name, value in result(folder).items() if name.startswith(of)}


def validations(folder):
    return [line for line in metrics(folder) if "validation_loss" in line]


def run_predict(capfd, *arguments):
    """Run `hpctrain predict` in this process; returns what it prints."""
    capfd.readouterr()
    predict.main(ALONE, [str(argument) for argument in arguments])
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def name_labels(*names):
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def digests(folder):
    """The SHA-256 of each file, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    }
