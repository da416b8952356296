"""Models and data from elsewhere: no code or pickle in them is run, and no JSON crashes a reader."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from hpctrain.errors import HpctrainError
from hpctrain.nlp import predict
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models.model_folder import read_json_object
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.tasks import classify, pair, qa
from tests.helpers import run_hpctrain


def hpctrain(cwd, *words, stdin=""):
    env = {"HPCTRAIN_CACHE": str(cwd / "cache"), "MPLCONFIGDIR": str(cwd), "HF_HUB_OFFLINE": "1"}
    return run_hpctrain(*words, cwd=cwd, env=os.environ | env, input=stdin)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small model of nlp.classify."""
    folder = tmp_path_factory.mktemp("model") / "model"
    texts = [document.text for document in load_splits(classify.TASK, None)["train"]]
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    (config := folder.with_name("config.json")).write_text(
        json.dumps({"model_type": "bert", "vocab_size": 600} | shape)
    )
    create_model(folder, str(config), "bert", texts, seed=1, max_length=128)
    ours = {"task": "classify", "labels": ["0", "1"], "max_length": 128, "stride": 0, "settings": {}}
    change_config(folder, hpctrain=ours)
    (folder / "SHA256SUMS").unlink()  # a folder from elsewhere
    return folder


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def copy(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / "copy"))


COMMANDS = [("predict", "copy", "text"), ("nlp.classify", "--model", "copy", "--epochs", "0", "--out", "run")]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_a_model_is_not_run_and_nobody_is_asked(copy, tmp_path, command):
    """Not where the folder has a tokenizer of its own either."""
    evil = {"AutoConfig": "evil.EvilConfig", "AutoModelForSequenceClassification": "evil.EvilModel"}
    change_config(copy, model_type="evil", auto_map=evil)
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    done = hpctrain(tmp_path, *command, stdin="y\n" * 9)
    assert not (tmp_path / "executed").exists() and "[y/N]" not in done.stdout
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("hpctrain: error: copy: ") and "auto_map in config.json" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_pickle_of_a_model_is_not_executed(copy, tmp_path, command):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    (copy / "model.safetensors").unlink()
    torch.save({"evil": Evil()}, copy / "pytorch_model.bin")
    done = hpctrain(tmp_path, *command)
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("hpctrain: error: copy/pytorch_model.bin: "), done.stderr
    assert "safetensors" in done.stderr


def test_json_that_is_nested_too_deeply_is_one_line(tmp_path):
    path = tmp_path / "train.json"
    path.write_text("[" * 200_000 + "]" * 200_000)
    readers = (
        pair.TASK.read,
        qa.TASK.read,
        read_json_object,
        lambda path: formats.read_json(path, list, "a list"),
    )
    for read in readers:
        with pytest.raises(HpctrainError, match=r"train\.json: .*") as error:
            read(path)
        assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(HpctrainError, match="not a model fine-tuned by hpctrain"):
        predict.find_task(tmp_path)
