"""Models from scratch: their tokenizers, their sizes, and unusable input."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

from hpctrain.errors import HpctrainError
from hpctrain.nlp.batches import features
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models.model_folder import check_sizes
from hpctrain.nlp.models.scratch import MAX_WORD, SIZES, create_model, cut_words, make_config
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.tasks import classify, qa
from tests.helpers import DATA
from tests.nlp.helpers import TEXTS, digests


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("bert", "SequenceClassification"), ("bert", "TokenClassification"), ("bert", "QuestionAnswering"),
        ("gpt2", "CausalLM"), ("gpt2", "SequenceClassification"),
    ],
)  # fmt: skip
def test_model_from_scratch_loads_with_every_head(kind, head, bert, gpt2):
    folder = bert if kind == "bert" else gpt2
    loader = getattr(transformers, f"AutoModelFor{head}")
    model, info = loader.from_pretrained(folder, output_loading_info=True)
    assert all(name.split(".")[0] in ("classifier", "qa_outputs", "score") for name in info["missing_keys"])
    tokenizer = load_tokenizer(folder)
    batch = tokenizer(["정말 재미있다", "별로"], padding=True, return_tensors="pt")
    assert (
        model(**batch).logits.isfinite().all()
        if head != "QuestionAnswering"
        else model(**batch).start_logits.isfinite().all()
    )


def test_bert_from_scratch_keeps_hangul_case_and_accents(tmp_path, small_config):
    texts = ["가나다 Café 가나다 Café", "마바 ABC"] * 3
    pieces = create_model(tmp_path / "m", str(small_config), "bert", texts, 1, 128)
    tokenizer = load_tokenizer(tmp_path / "m")
    assert pieces == len(tokenizer) < 900  # there are no more in such a short text
    assert tokenizer("가나다 Café", "ABC!").tokens() == [
        "[CLS]",
        "가나다",
        "Café",
        "[SEP]",
        "ABC",
        "[UNK]",
        "[SEP]",
    ]
    assert tokenizer("가나다 Café", "ABC!")["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert set(tokenizer.all_special_tokens) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    # A token within words is not a special one: it is decoded, and its spelling in a text is not recognized.
    ids = tokenizer("가나마", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) in ("가나마", "[UNK]", "")
    assert "##나" not in tokenizer("##나").tokens()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_tokenizer_trained_on_a_million_characters_without_white_space(kind, tmp_path):
    """The trainers of tokenizers would take hours for such a word, such as an image in base64."""
    long = "가나" * 500_000
    create_model(tmp_path / "m", "tiny", kind, ["가나 다라", long], 1, 128)
    tokenizer = load_tokenizer(tmp_path / "m")
    assert "가나" in tokenizer.decode(tokenizer("가나")["input_ids"])
    assert (
        cut_words(long).replace("\n", "") == long and max(map(len, cut_words(long).split("\n"))) == MAX_WORD
    )
    assert [cut_words(text) for text in (*TEXTS, "가" * MAX_WORD, " ")] == [*TEXTS, "가" * MAX_WORD, " "]


def test_gpt2_from_scratch_encodes_any_text_and_has_its_own_padding_token(gpt2):
    tokenizer = load_tokenizer(gpt2)
    text = "처음 보는 글: Ünïcödé 🎬 龍!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>" != tokenizer.pad_token
    config = transformers.AutoConfig.from_pretrained(gpt2)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert config.vocab_size == len(tokenizer)


SCRATCH = """
import sys
from pathlib import Path
from hpctrain.nlp.models.scratch import create_model

texts = Path(sys.argv[1]).read_text().splitlines()
for kind in ("bert", "gpt2"):
    create_model(Path(sys.argv[2]) / kind, "tiny", kind, texts, 1, 600)
"""


@pytest.mark.slow
def test_same_texts_and_seed_give_the_same_files_in_another_process(tmp_path):
    texts = [
        word
        for question in load_splits(qa.TASK, None)["train"]
        for word in (question.context, question.question)
    ]
    (tmp_path / "texts").write_text("\n".join(texts))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRATCH, tmp_path / "texts", tmp_path / name],
            env={**os.environ, "PYTHONHASHSEED": number, "OMP_NUM_THREADS": number},
        )
        for name, number in (("a", "1"), ("b", "2"))
    ]
    assert [process.wait(300) for process in processes] == [0, 0]
    for kind in ("bert", "gpt2"):
        create_model(tmp_path / "c" / kind, "tiny", kind, texts, 2, 600)
        a, b, c = (digests(tmp_path / name / kind) for name in "abc")
        assert a == b
        # another seed, the same tokenizer
        assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}
        config = transformers.AutoConfig.from_pretrained(tmp_path / "a" / kind)
        assert (
            config.max_position_embeddings == load_tokenizer(tmp_path / "a" / kind).model_max_length == 1024
        )


def test_own_config_gets_more_positions_only_if_needed(bert, small_config, tmp_path):
    config = transformers.AutoConfig.from_pretrained(bert)
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (32, 1, 300)
    create_model(tmp_path / "long", str(small_config), "bert", TEXTS, 1, 301)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "long").max_position_embeddings == 512


def test_sizes_match_the_paper(tmp_path):
    for name, millions in (("tiny", 4.4), ("mini", 11.2), ("small", 28.8), ("medium", 41.4), ("base", 109.5)):
        settings = make_config(name, "bert")
        settings.vocab_size = 30522
        with torch.device("meta"):
            parameters = sum(p.numel() for p in transformers.BertModel(settings).parameters())
        assert round(parameters / 1e6, 1) == pytest.approx(millions, abs=0.11), name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**63),
        ("num_hidden_layers", 1001),
        ("hidden_size", 10**9),
        ("text_config", {"vocab_size": 2**40}),
    ],
)
def test_absurd_size_is_refused_before_the_model_is_built(bert, key, value, tmp_path):
    """transformers would build layer after layer."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "bert", "max_position_embeddings": 10_000_000, "seed": 2**40, key: value})
    )
    most = "1,000" if "layers" in key else "100,000,000"
    for refuse in (lambda: make_config(str(path), "bert"), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(
            HpctrainError, match=rf"config\.json: its \w+ is over {most}, which no model has: fix the file"
        ):
            refuse()
    for folder in (bert, tmp_path):
        check_sizes(folder / "config.json", json.loads((bert / "config.json").read_text()))


def test_unusable_config_or_texts_are_named(small_config, tmp_path):
    def make(config, kind="bert", texts=TEXTS):
        create_model(tmp_path / "m", str(config), kind, texts, 1, 128)

    with pytest.raises(
        HpctrainError,
        match=r"--from-scratch big: no such size or file: give tiny, mini, small, medium, base, or",
    ):
        make("big")
    with pytest.raises(
        HpctrainError, match=r"config\.json: its model_type is 'bert', but this task needs 'gpt2'"
    ):
        make(small_config, "gpt2")
    with pytest.raises(HpctrainError, match=r"all of them are empty"):
        make("tiny", texts=["", " "])
    broken = tmp_path / "config.json"
    broken.write_text('{"model_type": "bert", "hidden_size": 33, "num_attention_heads": 2}')
    with pytest.raises(HpctrainError, match=r"config\.json: .*33"):
        make(broken)
    broken.write_text("[1]")
    with pytest.raises(HpctrainError, match=r"config\.json: .*no JSON object"):
        make(broken)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_tokenizer_trained_on_150_000_reviews(small_config, tmp_path):
    path = DATA / "nsmc/ratings_train.txt"
    if not path.exists():
        pytest.skip(f"no nsmc in {DATA}: HPCTRAIN_TEST_DATA names a folder that has it")
    texts = [document.text for document in classify.TASK.read(path)]
    # The vocabulary of "small", but not its 29 million weights.
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(json.loads(small_config.read_text()) | {"vocab_size": SIZES["small"].vocabulary})
    )
    assert create_model(tmp_path / "m", str(config), "bert", texts, 1, 128) == 16000  # in 6 s on two cores
    tokenizer = load_tokenizer(tmp_path / "m")
    ids = [i for encoding in features.encode_texts(tokenizer, texts, None) for i in encoding.ids]
    assert len(ids) / len(texts) < 17  # 16.0 measured
    assert ids.count(tokenizer.unk_token_id) / len(ids) < 1e-4
