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
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.tasks import classify, generate, pair, qa
from hpctrain.nlp.tasks.classify import Document
from hpctrain.nlp.tasks.pair import Pair
from tests.nlp.architectures import make_folder
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
    tokenizer = SimpleNamespace(model_max_length=384, pad_token_id=0, model_input_names=[])
    args = parse_options(qa.TASK, ["--epochs", "0"])
    with pytest.raises(HpctrainError, match=r"none of .*LlamaForQuestionAnswering, which nlp.qa"):
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


def load(task, folder, *options):
    tokenizer = load_tokenizer(folder)
    args = parse_options(task, ["--model", str(folder), "--max-length", "64", *options])
    labels = ["0", "1"] if task.one_label else []
    return initial_model.load_model(task, folder, tokenizer, labels, args), tokenizer


def test_token_types_that_the_model_does_not_have_are_left_out(tmp_path):
    """The saved tokenizer leaves them out as well."""
    for kind, names in (
        ("roberta+bert", ["input_ids", "attention_mask"]),
        ("distilbert", ["input_ids", "attention_mask"]),
        ("bert", ["input_ids", "token_type_ids", "attention_mask"]),
    ):
        _, tokenizer = load(pair.TASK, make_folder(tmp_path / kind, kind))
        assert tokenizer.model_input_names == names
        rows = [Pair("", "하나", "둘", "0"), Pair("", "셋", "넷", "1")]
        made = pair.TASK.tokenize(tokenizer, rows, ["0", "1"], 64, 0)
        assert ("token_type_ids" in made.tokens) == ("token_type_ids" in names)
        pair.TASK.prepare_tokenizer(tokenizer, 64)
        tokenizer.save_pretrained(tmp_path / "saved")
        assert load_tokenizer(tmp_path / "saved").model_input_names == names


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("bert", r"an encoder \(bert\)"),
        ("albert", "nlp.generate .*AutoModelForCausalLM.* albert"),
        ("t5", "t5 has an encoder and a decoder.*--model"),
    ],
)
def test_a_model_that_is_no_language_model_is_refused(kind, problem, tmp_path):
    with pytest.raises(HpctrainError, match=problem):
        load(generate.TASK, make_folder(tmp_path / kind, kind))


def test_an_encoder_made_a_decoder_is_a_language_model(tmp_path):
    folder = make_folder(tmp_path / "bert", "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    _, tokenizer = load(generate.TASK, folder)
    # the tokenizer of BERT names no beginning and no end of a text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("[CLS]", "[SEP]")


def test_a_tokenizer_without_any_end_of_a_text_is_one_line(gpt2, tmp_path):
    tokenizer = SimpleNamespace(
        model_input_names=[], pad_token_id=0, eos_token=None, sep_token=None, model_max_length=64
    )
    args = parse_options(generate.TASK, ["--max-length", "64"])
    with pytest.raises(HpctrainError, match=r"no eos_token, .*: set one in tokenizer_config.json"):
        initial_model.load_model(generate.TASK, gpt2, tokenizer, [], args)


def test_attention_is_the_best_that_the_architecture_has(tmp_path):
    for kind, attention in (("bert", "sdpa"), ("deberta-v2", "eager")):
        model, _ = load(classify.TASK, make_folder(tmp_path / kind, kind))
        assert model.config._attn_implementation == attention
