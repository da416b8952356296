"""Models as people have them: a folder trains and answers, or one line says the true cause and what to do."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.nlp import predict
from hpctrain.nlp.models.hub import resolve_model
from tests.nlp.helpers import TASKS, run_predict, train

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def run(bert, tmp_path_factory):
    """A run of the smallest kind."""
    return fine_tune("classify", bert, tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def models(bert, gpt2, tmp_path):
    """Copies of a model for each kind of task."""
    shutil.copytree(bert, tmp_path / "bert")
    shutil.copytree(gpt2, tmp_path / "gpt2")
    for folder in (tmp_path / "bert", tmp_path / "gpt2"):
        (folder / "SHA256SUMS").unlink()
    return {"classify": tmp_path / "bert", "generate": tmp_path / "gpt2"}


def fine_tune(task, model, out, *options):
    data = ("--data", TASKS[task].TASK.samples, "--limit", 4, "--batch-size", 4, "--epochs", 1)
    return train(task, out, "--model", model, *data, "--device", "cpu", *options)


def set_values(name, **values):
    """A change of a JSON file."""

    def change(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_weights(change, name=WEIGHTS):
    """A change of all weights, which are then in a file of this name."""

    def apply(folder):
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        changed = dict(change(each, weight) for each, weight in weights.items())
        if name.endswith(".bin"):
            torch.save(changed, folder / name)
        else:
            save_file(changed, folder / name, metadata={"format": "pt"})

    return apply


def split_weights(folder):
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    index = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(weights))}
    for part in set(index.values()):
        names = [name for name in weights if index[name] == part]
        save_file({name: weights[name] for name in names}, folder / part, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def rename(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def add_word(*words):
    """More tokens than the model has, as of add_tokens() without resize_token_embeddings()."""

    def change(folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(list(words))
        tokenizer.save_pretrained(folder)

    return change


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def pickle_more(folder):
    weights = {"weights": load_file(folder / WEIGHTS), "args": cut}
    (folder / WEIGHTS).unlink()
    torch.save(weights, folder / "pytorch_model.bin")


WORKING = {
    "fp16": change_weights(lambda name, weight: (name, weight.half())),
    "bf16": change_weights(lambda name, weight: (name, weight.bfloat16())),
    "dtype of config.json": set_values("config.json", torch_dtype="float16"),
    "pickled": change_weights(lambda name, weight: (name, weight.clone()), "pytorch_model.bin"),
    "two files and an index": split_weights,
    "outputs as tuples": set_values("config.json", return_dict=False),
    "more outputs": set_values("config.json", output_attentions=True, output_hidden_states=True),
    "an attention of another machine": set_values("config.json", _attn_implementation="flash_attention_2"),
    "no limit of length": set_values("tokenizer_config.json", model_max_length=10**30),
    "other labels": set_values("config.json", id2label={"0": "a", "1": "b", "2": "c"}, num_labels=3),
    "truncated on the left": set_values("tokenizer_config.json", truncation_side="left"),
    "code for an architecture that transformers has": set_values(
        "config.json", auto_map={"AutoModel": "a.B"}
    ),
    "a tokenizer class of the future": set_values("tokenizer_config.json", tokenizer_class="FutureTokenizer"),
    "tokenizer.json alone": remove("tokenizer_config.json"),
    "added tokens that no text has": add_word("<extra>"),
}


@pytest.mark.parametrize("task", ["classify", pytest.param("generate", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", WORKING)
def test_a_model_trains_and_answers(models, tmp_path, capfd, kind, task):
    WORKING[kind](models[task])
    run = fine_tune(task, models[task], tmp_path / "run")
    assert len(run_predict(capfd, run, "좋다", "--max-new-tokens", 2, "--device", "cpu")) == 1
    saved = json.loads((run / "model/tokenizer_config.json").read_text())
    assert saved.get("truncation_side", "right") == "right"  # as in training


NOT_A_MODEL = r"give a folder with config\.json, model\.safetensors and the tokenizer"
REFUSED = {
    "an architecture of the future": (
        set_values("config.json", model_type="newbert"),
        rf"of the type 'newbert', which transformers {transformers.__version__} does not have: use",
    ),
    "quantized": (
        set_values("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "weights are quantized .*: give the model that it was made from",
    ),
    "labels without numbers": (
        set_values("config.json", id2label={"zero": "a"}), r"config\.json: cannot be used .*'zero'",
    ),
    "a length that is a text": (
        set_values("tokenizer_config.json", model_max_length="512"),
        "model_max_length of its tokenizer is '512'",
    ),
    "NaN": (
        change_weights(lambda name, weight: (name, weight / 0)),
        "have NaN or infinite numbers: give a model of an earlier checkpoint",
    ),
    "names with the prefix of DDP": (
        change_weights(lambda name, weight: (f"module.{name}", weight)),
        r"have other names than those of the model, such as module\..*: save the model without it",
    ),
    "a part is missing": (
        lambda folder: (split_weights(folder), (folder / "model-00002-of-00002.safetensors").unlink()),
        "model-00002-of-00002.safetensors, a part of the weights, is missing",
    ),
    "weights by another name": (
        rename(WEIGHTS, "model.fp16.safetensors"), rf"\(found model\.fp16\.safetensors\): {NOT_A_MODEL}",
    ),
    "another format": (rename(WEIGHTS, "model-Q4.gguf"), rf"\(found model-Q4\.gguf\): {NOT_A_MODEL}"),
    "a checkpoint of Lightning": (
        lambda folder: (rename(WEIGHTS, "epoch=0.ckpt")(folder), remove("config.json")(folder)),
        rf"\(found epoch=0\.ckpt\): {NOT_A_MODEL}",
    ),
    "half a pickle": (
        lambda folder: (
            change_weights(lambda name, weight: (name, weight.clone()), "pytorch_model.bin")(folder),
            cut("pytorch_model.bin", 5000)(folder),
        ),
        r"pytorch_model\.bin: damaged .*: fetch or copy it again",
    ),
    "a pickle with more than weights": (pickle_more, "code in a pickle is not run: convert the weights"),
}  # fmt: skip


@pytest.mark.parametrize("task", ["classify", "generate"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_trained_is_one_true_line(models, tmp_path, kind, task):
    change, message = REFUSED[kind]
    change(models[task])
    with pytest.raises(HpctrainError, match=message) as error:
        fine_tune(task, models[task], tmp_path / "run")
    assert "\n" not in str(error.value) and str(error.value).startswith(str(models[task]))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "model"),
        ("checkpoints", "model"),
        ("hub/models--klue--bert-base", "hub/models--klue--bert-base/snapshots/c0"),
        ("hub/models--klue--bert-base/snapshots", "hub/models--klue--bert-base/snapshots/c0"),
        ("trainer", "trainer/checkpoint-1000"),
        ("sentences", "sentences/0_Transformer"),
    ],
)
def test_a_folder_around_a_model_names_the_one_to_give(run, tmp_path, given, wanted):
    folder = tmp_path / wanted
    if wanted == "model":
        shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    else:
        (folder.parent / "checkpoint-500").mkdir(parents=True)  # without a model
        shutil.copytree(run / "model", folder)
    with pytest.raises(HpctrainError, match=f"in it, but in {re.escape(str(folder))}: give that folder$"):
        resolve_model(str(tmp_path / given), ALONE)


def test_a_file_is_no_model(bert, tmp_path):
    for path in (bert / "config.json", bert / WEIGHTS):
        with pytest.raises(HpctrainError, match=f"a file, but a model is a folder .*: give {bert}$"):
            resolve_model(str(path), ALONE)
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(HpctrainError, match=r"last\.ckpt: a file, .*: write one with save_pretrained"):
        resolve_model(str(tmp_path / "last.ckpt"), ALONE)


@pytest.mark.parametrize("name", ["~/models/bert", "$SCRATCH/bert"])
def test_a_name_that_no_shell_has_seen(name):
    with pytest.raises(HpctrainError, match=r"only a shell replaces ~ and \$NAME"):
        resolve_model(name, ALONE)
    with pytest.raises(HpctrainError, match=r"no such folder: .*; only a shell replaces ~ and \$NAME"):
        predict.main(ALONE, [name, "a"])


def test_predict_says_that_there_is_no_such_folder(tmp_path):
    with pytest.raises(HpctrainError, match=r"nowhere: no such folder: give that of a model or of a run$"):
        predict.main(ALONE, [str(tmp_path / "nowhere"), "a"])


@pytest.mark.slow
def test_an_adapter_without_configuration_is_named(bert, tmp_path):
    run = fine_tune("classify", bert, tmp_path / "run", "--lora-rank", 2)
    (run / "model/config.json").unlink()  # peft writes none
    with pytest.raises(
        HpctrainError, match=r"but an adapter: give the model that it is for, .* --lora-from$"
    ):
        resolve_model(str(run / "model"), ALONE)


@pytest.mark.slow
def test_a_token_without_embedding_is_the_cause_also_in_predict(models, tmp_path):
    """The word is in no training text."""
    add_word("누가")(models["generate"])
    run = fine_tune("generate", models["generate"], tmp_path / "run")
    with pytest.raises(HpctrainError, match=r"its tokenizer has the token .* resize_token_embeddings"):
        predict.main(ALONE, [str(run), "누가 썼는가?", "--device", "cpu"])


def test_unknown_tokens_are_named(models, tmp_path, capsys):
    """A tokenizer for lower case, as BERT's is by default, takes Hangul apart."""
    set_values("tokenizer_config.json", do_lower_case=True, strip_accents=True)(models["classify"])
    content = json.loads((models["classify"] / "tokenizer.json").read_text())
    content["normalizer"] |= {"lowercase": True, "strip_accents": True}
    (models["classify"] / "tokenizer.json").write_text(json.dumps(content))
    fine_tune("classify", models["classify"], tmp_path / "run")
    assert re.search(
        r"^\d\d% of the training tokens are \[UNK\], unknown", capsys.readouterr().out, re.MULTILINE
    )
