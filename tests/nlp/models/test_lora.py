"""--lora-rank: an adapter that peft loads, with the scores of the log."""

import argparse
import json
import os
import shutil
import time

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp import predict
from hpctrain.nlp.models import lora
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.tasks import classify
from tests.nlp.helpers import NO_DROPOUT, SHAPE, metrics, result, run_predict, scores, train
from tests.tools import warm_start

DATA = classify.TASK.samples


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of two epochs, of which the adapters are to make a better one."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"} | SHAPE | NO_DROPOUT))
    return (
        train("classify", folder / "run", "--epochs", 2, "--from-scratch", folder / "config.json") / "model"
    )


def options(base, *more):
    return ("--data", DATA, "--model", base, "--lora-rank", 4, "--lr", 5e-3, "--batch-size", 8, *more)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return train("classify", tmp_path_factory.mktemp("lora") / "run", *options(base, "--epochs", 2))


def test_adapter_has_the_trained_weights_alone(base, run):
    weights = load_file(run / "model/adapter_model.safetensors")
    assert {name.split(".")[-2] for name in weights} == {"lora_A", "lora_B", "classifier", "dense"}
    assert {tuple(w.shape)[name.count("lora_B")] for name, w in weights.items() if "lora" in name} == {4}
    assert not (run / "model/model.safetensors").exists()
    config = json.loads((run / "model/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (
        os.path.relpath(base.resolve(), (run / "model").resolve()),
        4,
        8,
    )
    # the weights of the base are as they were
    kept = torch.load(run / "checkpoints/epoch-0002.pt", weights_only=True)["model"]
    frozen = load_file(base / "model.safetensors")
    key = "bert.encoder.layer.0.attention.self.query"
    assert torch.equal(kept[f"base_model.model.{key}.base_layer.weight"], frozen[f"{key}.weight"])


def test_peft_loads_it_with_the_scores_of_the_log(base, run, capfd):
    assert "from peft import PeftModel" in (run / "model/README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForSequenceClassification.from_pretrained(
        base, config=AutoConfig.from_pretrained(run / "model")
    )
    model = PeftModel.from_pretrained(model, run / "model").eval()
    lines = [line.split("\t") for line in (DATA / "ratings_test.txt").read_text().splitlines()[1:]]
    right = 0
    for _, text, label in lines:
        with torch.no_grad():
            right += model(**tokenizer(text, return_tensors="pt")).logits.argmax(1).item() == int(label)
    assert right / len(lines) == pytest.approx(scores(run)["test_accuracy"])
    assert right / len(lines) > scores(base.parent)["test_accuracy"]
    answers = run_predict(capfd, run, *(text for _, text, _ in lines))
    assert (
        sum(answer["label"] == label for answer, (_, _, label) in zip(answers, lines, strict=True)) == right
    )


@pytest.mark.slow
def test_merged_is_a_model_with_the_same_scores(base, run, tmp_path):
    merged = train("classify", tmp_path / "merged", *options(base, "--epochs", 2, "--lora-merge"))
    assert scores(merged) == scores(run)
    assert (merged / "model/model.safetensors").exists() and not (
        merged / "model/adapter_config.json"
    ).exists()
    again = train("classify", tmp_path / "again", "--epochs", 0, "--data", DATA, "--model", merged / "model")
    assert scores(again) == pytest.approx(scores(run), rel=1e-5)


@pytest.mark.slow
def test_resumed_within_an_epoch_and_on_two_ranks(base, tmp_path):
    whole = tmp_path / "whole"
    train(
        "classify", whole, *options(base, "--epochs", 2, "--checkpoint-every", 10, "--keep-checkpoints", 99)
    )
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    (cut / "result.json").unlink()
    for path in sorted((cut / "checkpoints").glob("epoch-0002*")):
        path.unlink()
    (cut / "checkpoints/epoch-0001.pt").unlink()
    train("classify", cut, *options(base, "--epochs", 2, "--resume", cut))
    assert result(cut)["weights_sha256"] == result(whole)["weights_sha256"]
    words = ["nlp.classify", *map(str, options(base, "--epochs", 2)), "--out", "two"]
    done = warm_start.run(warm_start.torchrun_ranks(2, words, dict(os.environ)), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "parameters are trained" in done.stdout and "Warning" not in done.stderr
    losses = [
        [line["train_loss"] for line in metrics(folder) if "train_loss" in line]
        for folder in (tmp_path / "two", whole)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_a_language_model_and_all_linear_layers(tmp_path, capfd):
    first = train("generate", tmp_path / "first", "--epochs", 1)
    data = ("--data", first.parent / "text.txt", "--model", first / "model")
    (tmp_path / "text.txt").write_text("".join(f"아이들은 {i}번 공을 찼다.\n" for i in range(40)))
    run = train(
        "generate", tmp_path / "run", *data, "--epochs", 1, "--lora-rank", 2, "--lora-target", "all-linear"
    )
    assert {name.split(".")[-2] for name in load_file(run / "model/adapter_model.safetensors")} == {
        "lora_A",
        "lora_B",
    }
    assert run_predict(capfd, run, "아이들은")[0]["text"] == "아이들은"


@pytest.mark.slow
def test_an_adapter_is_trained_further(base, run, tmp_path):
    """With --epochs 0 its scores stay.

    After another epoch with a small learning rate they are close, and only the adapter's weights differ.
    """
    more = ("--data", DATA, "--model", base, "--lora-from", run / "model", "--batch-size", 8)
    again = train("classify", tmp_path / "again", *more, "--epochs", 0)
    assert scores(again) == pytest.approx(scores(run), rel=1e-5)
    on = train("classify", tmp_path / "on", *more, "--epochs", 1, "--lr", 1e-4)
    assert scores(on)["test_loss"] == pytest.approx(scores(run)["test_loss"], rel=0.3)
    first, second = (load_file(folder / "model/adapter_model.safetensors") for folder in (run, on))
    assert first.keys() == second.keys() and not all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((on / "model/adapter_config.json").read_text())["r"] == 4


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_is_one_line(base, run, tmp_path):
    with pytest.raises(UsageError, match="--lora-from trains an adapter with its own rank"):
        parse_options(classify.TASK, ["--model", "x", "--lora-from", "y", "--lora-rank", "4"])
    other = tmp_path / "other"
    shutil.copytree(run / "model", other)
    (other / "SHA256SUMS").unlink()
    config = other / "adapter_config.json"
    for text, message in (
        ('"peft_type": "IA3"', "other: an adapter of type IA3: --lora-from needs one of LoRA"),
        ('"r": 5', "other: not an adapter of --model .*: give the model that it is for"),
    ):
        name = text.split(":")[0]
        kept = json.loads((run / "model/adapter_config.json").read_text())
        config.write_text(json.dumps(kept | json.loads(f"{{{text}}}")))
        with pytest.raises(HpctrainError, match=message):
            train(
                "classify", tmp_path / name.strip('"'), "--data", DATA, "--model", base, "--lora-from", other
            )
    with pytest.raises(HpctrainError, match=r"nothing: no such folder: give that of a model"):
        train(
            "classify", tmp_path / "no", "--data", DATA, "--model", base, "--lora-from", tmp_path / "nothing"
        )


def test_a_flipped_bit_in_an_adapter_or_its_model_is_found(base, run, tmp_path):
    for source, name in ((run / "model", "adapter_model.safetensors"), (base, "model.safetensors")):
        shutil.copytree(source, tmp_path / name)
        content = bytearray((tmp_path / name / name).read_bytes())
        content[-9] ^= 1
        (tmp_path / name / name).write_bytes(content)
    damaged = tmp_path / "adapter_model.safetensors"
    with pytest.raises(HpctrainError, match=r"adapter_model.safetensors: not the file that was written"):
        lora.add_lora(
            classify.TASK, None, base, argparse.Namespace(model=str(base), lora_from=damaged), damaged
        )
    config = damaged / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"base_model_name_or_path": "../model.safetensors"}))
    with pytest.raises(HpctrainError, match=r"/model.safetensors: not the file that was written"):
        predict.load_model(classify.TASK, damaged, torch.device("cpu"))


def test_invalid_use_is_one_line(base, run, tmp_path):
    with pytest.raises(UsageError, match=r"LoRA needs a trained model, .*: give --model NAME"):
        parse_options(classify.TASK, ["--lora-rank", "4"])
    with pytest.raises(UsageError, match="--lora-target and --lora-merge need --lora-rank"):
        parse_options(classify.TASK, ["--model", "x", "--lora-merge"])
    with pytest.raises(HpctrainError, match=r"--lora-target: .*such as query, key, value, dense, classifier"):
        train("classify", tmp_path / "no", *options(base, "--lora-target", "nothing"))
    with pytest.raises(
        HpctrainError, match=r"model: an adapter: give the model that it is for, and --lora-from .*/model"
    ):
        train("classify", tmp_path / "further", *options(run / "model"))
    moved = tmp_path / "moved"
    shutil.copytree(run / "model", moved)
    config = moved / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"base_model_name_or_path": "/nowhere/model"}))
    with pytest.raises(
        HpctrainError, match=r"whose model is not found: /nowhere/model: .*into base_model_name_or_path of"
    ):
        predict.load_model(classify.TASK, moved, torch.device("cpu"))
    # transformers tries for 46 s to connect to a hub that cannot be reached.
    config.write_text(config.read_text().replace("/nowhere/model", "nobody/no-model"))
    began = time.monotonic()
    with pytest.raises(HpctrainError, match=r"whose model is not found: nobody/no-model \(no folder in .*\)"):
        predict.load_model(classify.TASK, moved, torch.device("cpu"))
    assert time.monotonic() - began < 20


def test_an_adapter_and_its_model_can_be_moved(base, run, tmp_path, capfd):
    """Together they need nothing; for another place, the advice of the error is enough."""
    assert str(tmp_path.parent) not in (run / "model/adapter_config.json").read_text()
    name = json.loads((run / "model/adapter_config.json").read_text())["base_model_name_or_path"]
    adapter = tmp_path / "a/b/c/d/adapter"
    shutil.copytree(run / "model", adapter)
    with pytest.raises(HpctrainError, match="write its new place into base_model_name_or_path of"):
        predict.load_model(classify.TASK, adapter, torch.device("cpu"))
    shutil.copytree(base, adapter / name)
    assert "label" in run_predict(capfd, adapter, "재미있다")[0]
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace(name, str(base.resolve())))
    shutil.rmtree(adapter / name)
    assert "label" in run_predict(capfd, adapter, "재미있다")[0]
