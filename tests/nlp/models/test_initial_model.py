"""The model that a fine-tuning starts from: its labels, and what does not fit."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpctrain.errors import HpctrainError
from hpctrain.nlp.models import initial_model
from hpctrain.nlp.models.model_folder import load_tokenizer
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.tasks import classify, qa
from hpctrain.nlp.tasks.classify import Document
from hpctrain.nlp.training.options import parse_options
from tests.nlp.helpers import name_labels


def test_model_starts_in_training_mode_with_dropout():
    """from_pretrained() returns a model in evaluation mode, and Lightning does not change that."""
    args = parse_options(classify.TASK, ["--epochs", "1"])
    assert args.from_scratch == "tiny"
    folder = Path(os.environ["HPCTRAIN_CACHE"]) / "tiny"
    create_model(folder, "tiny", "bert", ["한 줄", "두 줄"], 1, 128)
    model = initial_model.load_model(classify.TASK, folder, load_tokenizer(folder), ["0", "1"], args)
    assert model.training and model.config.hidden_dropout_prob > 0
    ids = torch.tensor([[2, 5, 6, 3]])
    assert not torch.equal(model(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [None, 5])
def test_classifier_of_the_last_token_knows_what_padding_is(wrong, tmp_path):
    """Llama, GPT-2 and others classify by the last token that is not padding.

    config.json says which token is padding, and the config.json of many models does not.
    """
    rows = [
        Document("", text, label) for text, label in (("정말 재미있다, 또 보고 싶다", "1"), ("별로", "0"))
    ]
    create_model(tmp_path / "m", "tiny", "gpt2", [row.text for row in rows], 1, 64)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / "m" / name).read_text()) | (
            {"pad_token_id": wrong} if name == "config.json" else {}
        )
        settings.pop("pad_token", None)
        (tmp_path / "m" / name).write_text(json.dumps(settings))
    (tmp_path / "m/SHA256SUMS").unlink()
    tokenizer = load_tokenizer(tmp_path / "m")
    args = parse_options(classify.TASK, ["--epochs", "0", "--max-length", "64"])
    model = initial_model.load_model(classify.TASK, tmp_path / "m", tokenizer, ["0", "1"], args).eval()
    made = classify.TASK.tokenize(tokenizer, rows, ["0", "1"], 64, 0)
    padding = {**classify.TASK.padding, "input_ids": tokenizer.pad_token_id}
    both, alone = (made.batch(torch.tensor(index), padding) for index in ([0, 1], [1]))
    logits = [model(**batch.model_inputs(without={"labels"})).logits for batch in (both, alone)]
    assert torch.allclose(logits[0][1:], logits[1], atol=1e-5)


def test_a_model_none_of_whose_weights_fit_the_task_is_not_to_be_fetched_again(tmp_path):
    """transformers has question answering with Llama, but under names that weights of Llama do not have."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 99,
    }
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    tokenizer = SimpleNamespace(model_max_length=384, pad_token_id=0)
    args = parse_options(qa.TASK, ["--epochs", "0"])
    with pytest.raises(
        HpctrainError,
        match=r"none of its weights is one of LlamaForQuestionAnswering, which nlp.qa needs: give",
    ):
        initial_model.load_model(qa.TASK, tmp_path, tokenizer, [], args)


ELEVEN = [str(i) for i in range(11)]  # in alphabetical order, 10 would come before 2


LABELS = [f"LABEL_{i}" for i in ELEVEN]


@pytest.mark.parametrize(
    ("known", "needed", "labels", "origin"),
    [
        (["b", "a"], ["a", "b"], ["b", "a"], " of the model"),
        (["c", "b", "a"], ["a", "b"], ["c", "b", "a"], " of the model"),
        (
            ["LABEL_0", "LABEL_1"],
            ["a", "b"],
            ["a", "b"],
            ", assumed to be LABEL_0, LABEL_1 of the model in this order",
        ),
        (LABELS, ELEVEN, ELEVEN, f", assumed to be {', '.join(LABELS)} of the model in this order"),
        (
            ["LABEL_0"],
            ["a", "b"],
            ["a", "b"],
            " for a new last layer, because the model has others (LABEL_0)",
        ),
        (["good", "bad"], ["0", "1"], ["0", "1"], ", assumed to be good, bad of the model in this order"),
        (None, ["0", "1"], ["0", "1"], ""),
    ],
    ids=["same", "more", "nameless", "eleven", "nameless, more", "others", "no head"],
)
def test_labels_are_those_of_the_model_if_it_has_them(known, needed, labels, origin, tmp_path):
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification" if known else "BertModel"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config | (name_labels(*known) if known else {})))
    found = initial_model.choose_labels(
        classify.TASK, tmp_path, [Document("", "", label) for label in sorted(needed)]
    )
    assert found == (labels, origin)
