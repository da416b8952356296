"""--pack: several texts in a row, without attention between them."""

import json
import os
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.batches.features import Features, pack_rows
from hpctrain.nlp.models.initial_model import check_packing
from hpctrain.nlp.models.masks import skip_searches
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.task import IGNORED
from hpctrain.nlp.tasks import classify
from hpctrain.nlp.tasks.instruct import TASK
from tests.nlp.helpers import metrics, result, train
from tests.tools import warm_start

NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
SHAPES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, **NO_DROPOUT},
    "llama": {**LLAMA, "max_position_embeddings": 128},
}


def test_rows_are_full_and_have_each_length_once():
    lengths = [3, 9, 1, 4, 4, 2, 10, 5]
    rows = pack_rows(lengths)
    assert sorted(i for row in rows for i in row) == list(range(8))
    assert all(sum(lengths[i] for i in row) <= 10 for row in rows) and len(rows) == 4  # 38 tokens
    assert pack_rows([7]) == [[0]] and len(pack_rows([5, 5, 5])) == 3


def test_packed_features_are_those_that_were_put_in():
    texts = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]
    labels = [[IGNORED, *text[1:]] for text in texts]
    features = Features.from_lists({"input_ids": texts, "labels": labels}, {"units": [2, 0, 3, 1]})
    batch = features.pack(torch.tensor([2, 0, 1]), {"input_ids": 99, "labels": IGNORED})
    assert batch.tokens["input_ids"].tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert batch.tokens["labels"].tolist() == [[IGNORED, 6, 7, 8], [IGNORED, 2, 3, IGNORED]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert batch.units.tolist() == [3, 2, 0] and not batch.is_padded
    batch = features.pack(torch.tensor([2, 3]), {"input_ids": 99, "labels": IGNORED})
    assert batch.tokens["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 99, 99]]
    assert batch.tokens["labels"][1].tolist() == [IGNORED, 10, IGNORED, IGNORED]
    assert batch.position_ids[1].tolist() == [0, 1, 0, 1]
    assert batch.attention_mask[1].tolist() == [1, 1, 0, 0] and batch.real_tokens == 6
    assert batch.model_inputs().keys() == {"input_ids", "labels", "position_ids"}


def make_model(kind, vocabulary=50, **shape):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, vocab_size=vocabulary, use_cache=False, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for weight in model.parameters():  # larger than those of a new model, for which attention hardly matters
        torch.nn.init.normal_(weight, std=0.1 if weight.ndim > 1 else 0.3)
    skip_searches(model, packed=True)
    return model


@pytest.mark.parametrize("kind", SHAPES)
def test_models_keep_the_texts_of_a_row_apart(kind, tmp_path):
    model = make_model(kind, **SHAPES[kind])
    check_packing(tmp_path, model)
    assert model.training


def test_model_that_does_not_is_refused(tmp_path):
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    }
    with pytest.raises(HpctrainError, match=r"\(opt\) .*--pack"):
        check_packing(tmp_path, make_model("opt", **shape))


def test_only_tasks_with_texts_to_continue_have_it():
    assert parse_options(classify.TASK, []).pack is None
    with pytest.raises(UsageError, match="unrecognized arguments: --pack"):
        parse_options(classify.TASK, ["--pack"])


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations of very different lengths, some with two answers."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    draw = random.Random(1)
    lines = []
    for i in range(100):
        turns = [
            ("user", "하늘 " * draw.choice([1, 1, 2, 9]) + str(i)),
            ("assistant", "파란색 " * draw.choice([1, 1, 3, 14])),
        ]
        messages = [{"role": role, "content": text} for role, text in turns * (1 + i % 2)]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_losses_are_those_without_it_on_one_rank_and_on_two(kind, chats, tmp_path):
    texts = [text for example in TASK.read(chats) for text in TASK.get_texts(example)]
    create_model(tmp_path / "gpt2", "tiny", "gpt2", texts, 1, 128)
    tokenizer = load_tokenizer(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(kind, len(tokenizer), **SHAPES[kind]).save_pretrained(tmp_path / "model")
    options = ("--data", chats, "--model", tmp_path / "model", "--epochs=2", "--batch-size=20")
    options += ("--max-length=128",)
    plain = train("instruct", tmp_path / "plain", *options)
    packed = train("instruct", tmp_path / "packed", *options, "--pack")
    words = ["nlp.instruct", *map(str, options), "--pack", "--accumulate", "2", "--out", "two"]
    done = warm_start.run(warm_start.torchrun_ranks(2, words, dict(os.environ)), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [
        [line["train_loss"] for line in metrics(run) if "train_loss" in line]
        for run in (plain, packed, tmp_path / "two")
    ]
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)
    shares = [result(run)["speed"]["padding_share"] for run in (plain, packed)]
    assert shares[0] > 0.3 > shares[1] + 0.1
    assert result(plain)["test_loss"] == pytest.approx(result(packed)["test_loss"], rel=1e-4)


@pytest.mark.slow
def test_losses_of_plain_texts_and_of_a_resumed_run(tmp_path):
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 400, **SHAPES["gpt2"]}))
    options = ("--epochs", 2, "--batch-size", 24, "--from-scratch", shape)
    runs = [train("generate", tmp_path / f"run{len(more)}", *options, *more) for more in ((), ("--pack",))]
    losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in runs]
    assert len(losses[0]) == 10 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    first, sha = runs[1], result(runs[1])["weights_sha256"]
    (first / "result.json").unlink()
    (first / "checkpoints/epoch-0002.pt").unlink()
    train("generate", first, *options, "--pack", "--resume", first)
    assert result(first)["weights_sha256"] == sha
