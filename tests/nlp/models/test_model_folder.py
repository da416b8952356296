"""Model folders: what is missing in them, their tokenizers, and saving them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import metadata_load
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.files.digests import weights_sha256
from hpctrain.nlp.models.card import make_card
from hpctrain.nlp.models.hub import resolve_model
from hpctrain.nlp.models.model_folder import save_model, validate_folder
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.predict import find_task
from hpctrain.nlp.tasks import ner
from tests.helpers import run_command
from tests.nlp.helpers import TEXTS, digests

NAME = "beomi/kcbert-base"


def test_model_folder_is_validated_and_missing_parts_are_named(bert, tmp_path):
    assert resolve_model(str(bert), ALONE) == bert
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    with pytest.raises(HpctrainError, match=rf"no config\.json in it, but in {folder}: give that folder$"):
        resolve_model(str(tmp_path), ALONE)
    (folder / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(HpctrainError, match=r"model/model\.safetensors: damaged .*: fetch or copy it again"):
        resolve_model(str(folder), ALONE)
    (folder / "model.safetensors").unlink()
    with pytest.raises(HpctrainError, match=r"model: no model\.safetensors in it"):
        resolve_model(str(folder), ALONE)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )
    with pytest.raises(
        HpctrainError, match=r"model-00001-of-00002\.safetensors, a part of the weights, is missing"
    ):
        resolve_model(str(folder), ALONE)
    (folder / "config.json").write_text("{")
    with pytest.raises(HpctrainError, match=r"model/config\.json: cannot be read as JSON"):
        resolve_model(str(folder), ALONE)
    (folder / "config.json").unlink()
    with pytest.raises(HpctrainError, match=r"model: no config\.json in it: give a folder with config\.json"):
        resolve_model(str(folder), ALONE)


def test_a_link_to_a_secret_is_not_copied_into_the_model_of_a_run(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "model")
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "model/chat_template.jinja").symlink_to(tmp_path / "secret")
    for read in (load_tokenizer, validate_folder):
        with pytest.raises(HpctrainError, match=r"chat_template\.jinja: a link that leads out of the folder"):
            read(tmp_path / "model")


def test_files_outside_of_a_model_folder_are_not_read(bert, tmp_path):
    """A list of weights, and the vocabulary of a tokenizer, can name any file."""
    folder = shutil.copytree(bert, tmp_path / "model")
    (folder / "SHA256SUMS").unlink()
    (tmp_path / "private.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    for part in ("../private.safetensors", str(tmp_path / "private.safetensors"), ".."):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": part}}))
        with pytest.raises(HpctrainError, match="its weight_map must name files of the folder"):
            validate_folder(folder)
    (tmp_path / "secret").write_text("[UNK]\npassword\n")
    (folder / "tokenizer.json").unlink()
    for key in ("vocab", "merges"):
        settings = {"tokenizer_class": "BertTokenizer", key: str(tmp_path / "secret")}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(HpctrainError, match=rf"tokenizer_config\.json: its {key} is no list of tokens"):
            load_tokenizer(folder)


def test_a_configuration_of_a_terabyte_is_one_line(bert, tmp_path):
    """A file with a hole takes no place on the disk."""
    folder = shutil.copytree(bert, tmp_path / "model")
    os.truncate(folder / "config.json", 2**40)
    with pytest.raises(HpctrainError, match=r"config\.json: cannot be read as JSON"):
        validate_folder(folder)
    with pytest.raises(HpctrainError, match="model: not a model fine-tuned by hpctrain"):
        find_task(folder)


def test_vocabulary_file_alone_is_a_tokenizer_as_in_kcbert(bert, tmp_path):
    vocabulary = sorted(load_tokenizer(bert).get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece, _ in vocabulary))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "model_max_length": 300}')
    shutil.copy(bert / "config.json", tmp_path)
    for text in ("정말 재미있다 Wow", "별로!"):
        assert load_tokenizer(tmp_path)(text)["input_ids"] == load_tokenizer(bert)(text)["input_ids"]


def test_missing_padding_token_becomes_the_end_token(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "m")
    config = json.loads((gpt2 / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "m/SHA256SUMS").unlink()
    assert load_tokenizer(tmp_path / "m").pad_token == "<|endoftext|>"


@pytest.mark.slow
def test_slow_or_missing_tokenizer_is_an_error(bert, tmp_path):
    shutil.copy(bert / "config.json", tmp_path)
    with pytest.raises(HpctrainError, match=r"no tokenizer in it \(tokenizer.json or vocab.txt\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(HpctrainError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "canine"}')
    with pytest.raises(HpctrainError, match=r"its tokenizer \(CanineTokenizer\) is not a fast one"):
        load_tokenizer(tmp_path)


TASK = SimpleNamespace(
    name="classify",
    pipeline_tag="text-classification",
    model=transformers.AutoModelForSequenceClassification,
    inputs=("text",),
    card_text="",
)


def test_saved_model_loads_unchanged_and_its_card_is_valid(bert, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        bert, num_labels=3, id2label={0: "a", 1: "b", 2: "c"}
    )
    tokenizer = load_tokenizer(bert)
    scores = {"accuracy": 0.9123456, "f1": torch.tensor(0.5).item(), "f1/PS": 0.25}
    options = {"lr": 5e-5, "data": Path("../nsmc"), "name": "한글"}
    card = make_card(
        "Reviews: good or bad?",
        TASK,
        NAME,
        "../data/nsmc",
        "ko",
        scores,
        options,
        {"torch": torch.__version__},
    )
    save_model(tmp_path / "out" / "model", model, tokenizer, card)

    folder = tmp_path / "out" / "model"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert weights_sha256(again) == weights_sha256(model)
    text = "정말 재미있다 Wow"
    assert load_tokenizer(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.config.id2label == {0: "a", 1: "b", 2: "c"}
    # no file names the temporary folder, .model.<random>
    assert not [
        path.name
        for path in folder.glob("*.json")
        if str(tmp_path) in path.read_text() or ".model." in path.read_text()
    ]

    for base in ("from scratch (sizes/own.json)", str(tmp_path), "../models/kc"):
        assert "base_model" not in make_card("x", TASK, base, "data", None, {}, {}, {}).split("---")[1]
    metadata = metadata_load(folder / "README.md")
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-classification"
    assert metadata["base_model"] == NAME and metadata["language"] == "ko"
    results = metadata["model-index"][0]["results"][0]
    assert (
        results["dataset"]["name"] == "nsmc"
        and {m["type"]: m["value"] for m in results["metrics"]}["accuracy"] == 0.9123456
    )
    text = (folder / "README.md").read_text()
    assert (
        "| f1/PS | 0.2500 |" in text and "hpctrain predict FOLDER TEXT" in text and '"name": "한글"' in text
    )
    assert "AutoModelForSequenceClassification.from_pretrained" in text
    # A pipeline of transformers finds another F1 for named entities, so the card says which call gives the
    # score.
    assert "pipeline(" not in text
    card = make_card("x", ner.TASK, NAME, "data", None, {}, {}, {})
    assert (
        "hpctrain predict FOLDER TEXT\n```\n\n`hpctrain predict` gives the scores above. `pipeline(" in card
    )


def test_earlier_model_stays_until_the_new_one_is_complete(bert, tmp_path, monkeypatch):
    model, tokenizer = transformers.AutoModel.from_pretrained(bert), load_tokenizer(bert)
    folder = tmp_path / "model"
    save_model(folder, model, tokenizer, "first")
    before = digests(folder)

    def fail(*args, **kwargs):
        assert digests(folder) == before  # the new one is written beside it
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(tokenizer, "save_pretrained", fail)
        with pytest.raises(HpctrainError, match="model: the model cannot be written"):
            save_model(folder, model, tokenizer, "second")
    assert digests(folder) == before and [path.name for path in tmp_path.iterdir()] == ["model"]
    save_model(folder, model, tokenizer, "third")
    assert (folder / "README.md").read_text() == "third" and [path.name for path in tmp_path.iterdir()] == [
        "model"
    ]


def test_folder_without_a_model_is_not_replaced(bert, tmp_path):
    (tmp_path / "thesis.txt").write_text("five years")
    with pytest.raises(HpctrainError, match="is not empty and not a model, so it is not replaced"):
        save_model(tmp_path, transformers.AutoModel.from_pretrained(bert), load_tokenizer(bert), "card")
    assert (tmp_path / "thesis.txt").exists()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 438021336\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named(name, bert, tmp_path):
    folder = tmp_path / "clone"
    shutil.copytree(bert, folder)
    (folder / "SHA256SUMS").unlink()
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(POINTER)
    with pytest.raises(HpctrainError, match=rf"{name}: a pointer of Git LFS, .*: run git lfs pull"):
        load_tokenizer(validate_folder(folder))


def test_a_pointer_that_is_not_read_is_no_error(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "clone")
    for name in ("tf_model.h5", "pytorch_model.bin", "vocab.txt"):
        (tmp_path / "clone" / name).write_text(POINTER)
    (tmp_path / "clone/SHA256SUMS").unlink()
    load_tokenizer(validate_folder(tmp_path / "clone"))


def test_a_tokenizer_without_a_configuration_of_another_kind_than_its_architecture(tmp_path):
    """As skt/kogpt2-base-v2: GPT-2 with SentencePiece's spaces; only config.json has special tokens."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "</s>", "<usr>", "<pad>", "<unk>"]
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, special_tokens=special))
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    config = transformers.GPT2Config(
        vocab_size=backend.get_vocab_size(), n_layer=1, n_embd=8, n_head=1, n_positions=64, **ids
    )
    config.save_pretrained(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert len(tokenizer) == config.vocab_size
    text = "정말 재미있다"
    assert tokenizer(text)["input_ids"] == backend.encode(text).ids
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text((tmp_path / "config.json").read_text())
    again = load_tokenizer(tmp_path / "saved")
    assert again(text) == tokenizer(text) and again.eos_token == "</s>"


def test_sentencepiece_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{load_tokenizer.__module__}.is_sentencepiece_available", lambda: False)
    transformers.XLMRobertaConfig().save_pretrained(tmp_path)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"\x0a\x0e\x0a")
    with pytest.raises(HpctrainError, match=r"is one of sentencepiece, which is not installed: install"):
        load_tokenizer(tmp_path)


DOUBLING = [normalizers.Replace("a", "aa")] * 40
GROWING = {
    "normalizer": [
        normalizers.Sequence(DOUBLING),
        normalizers.Sequence([normalizers.Sequence(DOUBLING)]),
        normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.Replace("b", "aa")] * 20),
        normalizers.Replace(Regex("."), "b" * 2000),
        normalizers.Prepend("a" * 10**5),
    ],
    "decoder": [decoders.Sequence([decoders.Replace("a", "aa")] * 40)],
    "post_processor": [
        processors.TemplateProcessing(
            single="<|pad|> " * 5000 + "$A", pair="$A $B", special_tokens=[("<|pad|>", 1)]
        )
    ],
}


@pytest.mark.parametrize("part", GROWING)
def test_a_tokenizer_that_grows_its_text_is_refused(gpt2, tmp_path, part):
    """The 40 steps of the first make 10^12 characters of one, and the process is killed."""
    folder = shutil.copytree(gpt2, tmp_path / "model")
    (folder / "SHA256SUMS").unlink()
    backend = Tokenizer.from_file(str(gpt2 / "tokenizer.json"))
    for value in GROWING[part]:
        setattr(backend, part, value)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        backend.save(str(folder / "tokenizer.json"))
        with pytest.raises(HpctrainError, match=r"model: its tokenizer .* over 1,000 .*: use another model$"):
            load_tokenizer(folder)


def test_a_tokenizer_of_many_small_replacements_is_used(gpt2, tmp_path):
    """As those that write ligatures as letters: no step replaces what another one has written."""
    folder = shutil.copytree(gpt2, tmp_path / "model")
    (folder / "SHA256SUMS").unlink()
    backend = Tokenizer.from_file(str(gpt2 / "tokenizer.json"))
    steps = [normalizers.Replace(chr(0x100 + i), "ss") for i in range(40)]
    blanks = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁"), normalizers.Prepend("▁")]
    backend.normalizer = normalizers.Sequence([*steps, *blanks])
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder)("a b")["input_ids"]


# --- transformers 4 ---

SMALL = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip
PART = {"rope_theta": 9000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BY_LAYER = {
    "full_attention": {"rope_theta": 9000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 700.0, "rope_type": "default"},
}
LINEAR = BY_LAYER | {"full_attention": {"rope_theta": 9000.0, "rope_type": "linear", "factor": 4.0}}
# A class of configurations, its rope_parameters, and what transformers 4 reads for them.
ROTARY = {
    "LlamaConfig": (YARN | {"rope_theta": 9000.0}, {"rope_theta": 9000.0, "rope_scaling": YARN}),
    "StableLmConfig": (PART, {"rope_theta": 9000.0, "partial_rotary_factor": 0.5}),
    "GPTNeoXConfig": (PART, {"rotary_emb_base": 9000.0, "rotary_pct": 0.5}),
    "ModernBertConfig": (BY_LAYER, {"global_rope_theta": 9000.0, "local_rope_theta": 700.0}),
    "Gemma3TextConfig": (
        LINEAR,
        {"rope_theta": 9000.0, "rope_local_base_freq": 700.0,
         "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "BertConfig": (None, {}),
}  # fmt: skip


def make_config(name):
    rope = ROTARY[name][0]
    return getattr(transformers, name)(**SMALL, **({"rope_parameters": rope} if rope else {}))


@pytest.fixture
def tokenizer(gpt2):
    """One without a class of its own, as that of Llama 3."""
    backend = Tokenizer.from_file(str(gpt2 / "tokenizer.json"))
    special = {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|user|>"]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.parametrize("name", ROTARY)
def test_a_model_has_the_names_that_transformers_4_reads(tokenizer, tmp_path, name):
    """The tokenizer could not be loaded, and rotary embeddings had the default base, without a word."""
    config = make_config(name)

    class Model:
        def save_pretrained(self, folder):
            config.save_pretrained(folder)
            save_file({"a": torch.zeros(1)}, folder / "model.safetensors")

    folder = tmp_path / "model"
    save_model(folder, Model(), tokenizer, "", tokenizer.backend_tokenizer.to_str())
    found = json.loads((folder / "config.json").read_text())
    names = set().union(*(expected for _, expected in ROTARY.values()))
    assert {key: found[key] for key in names & found.keys()} == ROTARY[name][1]
    again = transformers.AutoConfig.from_pretrained(folder)
    assert getattr(again, "rope_parameters", None) == getattr(config, "rope_parameters", None)
    for part, special in ((folder, ["<|user|>"]), (folder / "pipeline_tokenizer", None)):
        settings = json.loads((part / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert settings.get("additional_special_tokens") == special
        again = transformers.AutoTokenizer.from_pretrained(part)
        assert type(again) is transformers.PreTrainedTokenizerFast
        assert ("<|user|>" in again.all_special_tokens) == bool(special)


LOAD = """
import sys, torch, transformers
from pathlib import Path
print(transformers.__version__)
for folder in Path(sys.argv[1]).iterdir():
    for tokenizer in (folder, folder / "pipeline_tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b", tokenizer
    assert "<|user|>" in transformers.AutoTokenizer.from_pretrained(folder).all_special_tokens
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        found = model(input_ids=torch.arange(40)[None]).last_hidden_state
    difference = (found - torch.load(folder / "output.pt")).abs().max().item()
    assert difference < 1e-5, (folder, difference)
"""


@pytest.mark.slow
def test_transformers_4_loads_a_model_with_the_same_outputs(tokenizer, tmp_path):
    """An earlier release, from PyPI in a folder of its own, before those of the environment."""
    packages = ["transformers==4.57.3", "tokenizers==0.22.1", "huggingface_hub==0.36.0"]
    where = ["--no-deps", "--target", str(tmp_path / "old")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *where, *packages]
    if subprocess.run(pip, check=False).returncode:
        pytest.skip("transformers 4 cannot be installed: no PyPI")
    (tmp_path / "load.py").write_text(LOAD)
    for name in ROTARY:
        folder, model = (
            tmp_path / "models" / name,
            transformers.AutoModel.from_config(make_config(name)).eval(),
        )
        save_model(folder, model, tokenizer, "", tokenizer.backend_tokenizer.to_str())
        with torch.no_grad():
            output = model(input_ids=torch.arange(40)[None]).last_hidden_state
        torch.save(output, folder / "output.pt")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "old")}
    done = run_command([sys.executable, "load.py", "models"], cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.startswith("4.57.3\n"), done.stderr[-3000:]
