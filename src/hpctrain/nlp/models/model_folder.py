"""Model folders of from_pretrained(): config.json, the weights, the tokenizer, a model card."""

import errno
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import EvalResult, ModelCardData
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers.utils import logging
from transformers.utils.import_utils import is_sentencepiece_available

from hpctrain.errors import HpctrainError, hint_missing, panics_as_errors
from hpctrain.files import atomic
from hpctrain.files.digests import check_digests, write_digests
from hpctrain.files.places import is_below, refuse_links_out
from hpctrain.files.plain import open_plain, read_whole, refuse_pointer
from hpctrain.files.redaction import hide_secrets
from hpctrain.text import first_line, shorten

if TYPE_CHECKING:  # importing a class of transformers takes seconds, and `hpctrain fetch` needs none
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from hpctrain.nlp.task import Task

# transformers would warn about new heads and show progress bars on every rank. Errors are exceptions anyway.
logging.set_verbosity_error()
logging.disable_progress_bar()

# More than published models have: GPT-3 has 96 layers; other sizes are at most 10 million positions.
MOST_LAYERS, LARGEST_SIZE = 1_000, 100_000_000
# in the names of sizes in config.json
SIZE = re.compile(r"layer|size|dim|head|position|emb|inner|ctx|num_|^[dn]_")
ADAPTER_CONFIG = "adapter_config.json"  # is in the folder of an adapter, and in no other
# Weights by other names or in other formats, which from_pretrained() does not read.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
)  # fmt: skip


def validate_folder(folder: Path) -> Path:
    """Return the folder if its configuration and weights are complete; else HpctrainError says what is not.

    Of a safetensors file, header and size are compared, but not the whole content.
    """
    for wanted, names in (("config.json", ("config.json",)), ("model.safetensors", WEIGHTS)):
        if not any((folder / name).exists() for name in names):
            raise HpctrainError(f"{folder}: no {wanted} in it{_describe_content(folder)}")
    refuse_foreign_files(folder)
    read_json_object(folder / "config.json")
    for part in list_parts(folder):
        if not (folder / part).is_file():
            raise HpctrainError(
                f"{folder}: {part}, a part of the weights, is missing: fetch or copy the folder again"
            )
        refuse_pointer(folder / part)
        if part.endswith(".safetensors"):
            try:
                with safe_open(folder / part, "pt"):
                    pass
            except (OSError, SafetensorError) as error:
                raise HpctrainError(f"{folder / part}: damaged ({error}): fetch or copy it again") from error
    return folder


def _describe_content(folder: Path) -> str:
    """What is in a folder that is not one of a model, and what to give instead.

    People give the folder of a run or of its checkpoints, one of a Trainer of transformers (checkpoint-500),
    one of the hub's cache (models--OWNER--NAME), or one with weights in another format.
    """
    below = {
        path.parent for pattern in ("*", "snapshots/*") for path in folder.glob(f"{pattern}/config.json")
    }
    newest = sorted(below, key=lambda place: place.stat().st_mtime, reverse=True)
    for place in (folder / "model", folder.parent / "model", *newest):
        if place != folder and all((place / name).exists() for name in ("config.json", "model.safetensors")):
            return f", but in {place}: give that folder"
    if (folder / ADAPTER_CONFIG).exists():
        return ", but an adapter: give the model that it is for, and this folder to --lora-from"
    others = sorted(path.name for path in folder.glob("*") if path.suffix.lower() in OTHER_WEIGHTS)
    found = f" (found {shorten(others)})" if others else ""
    return (
        f"{found}: give a folder with config.json, model.safetensors and the tokenizer, "
        "as hpctrain fetch and save_pretrained() write it"
    )


def list_parts(folder: Path) -> list[str]:
    """Names of the weight files that from_pretrained() reads. Raises HpctrainError if a list is broken."""
    weights = next(name for name in WEIGHTS if (folder / name).exists())
    if not weights.endswith(".json"):
        return [weights]
    index = read_json_object(folder / weights).get("weight_map")
    if not isinstance(index, dict) or not all(
        isinstance(part, str) and is_below(part) for part in index.values()
    ):
        raise HpctrainError(
            f"{folder / weights}: its weight_map must name files of the folder: fetch or copy it again"
        )
    return sorted(set(index.values()))


def refuse_foreign_files(folder: Path) -> None:
    """Raise HpctrainError for files that no model has: pipes, devices, links that leave the folder.

    Readers of pipes may wait without end. What links lead to would be copied into the run's model.
    """
    if not folder.is_dir():
        raise HpctrainError(
            f"{folder}: no such folder: give that of a model or of a run{hint_missing(folder)}"
        )
    refuse_links_out(folder)
    for path in folder.glob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise HpctrainError(
                f"{path}: a pipe or a device, which no model has: fetch or copy the folder again"
            )


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises HpctrainError that names the file."""
    try:
        with open_plain(path) as file:
            content = json.loads(read_whole(file).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise HpctrainError(
            f"{path}: cannot be read as JSON ({first_line(error)}): fetch or copy it again"
        ) from error
    if not isinstance(content, dict):
        raise HpctrainError(f"{path}: not a JSON object: fetch or copy it again")
    return content


def check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Raise HpctrainError if a size in a config.json is absurd: building such a model would not end."""
    for key, value in config.items():
        most = MOST_LAYERS if "layer" in key else LARGEST_SIZE
        if isinstance(value, dict) and key.endswith("_config"):  # such as text_config
            check_sizes(path, value)
        elif type(value) is int and value > most and SIZE.search(key):
            raise HpctrainError(
                f"{path}: its {key} is over {most:,}, which no model has: fix the file, or fetch or copy it "
                "again"
            )


def read_labels(folder: Path, task: "Task") -> list[str]:
    """The label names of a fine-tuned model in the order of its outputs, LABEL_0 ... if unnamed; else [].

    Raises HpctrainError if config.json cannot be used.
    """
    head = task.model.__name__.removeprefix("AutoModel")  # such as ForSequenceClassification
    with _explain_config(folder):
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if not any(name.endswith(head) for name in config.architectures or ()):
            return []
        return [str(config.id2label[i]) for i in sorted(config.id2label)]


@contextmanager
def _explain_config(folder: Path) -> Iterator[None]:
    """Raise any error as one of config.json: each field has its own check."""
    try:
        yield
    except Exception as error:
        raise HpctrainError(
            f"{folder}/config.json: cannot be used ({describe_error(error)}): fetch or copy the folder again"
        ) from error


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a model folder, with a padding token.

    It is the first part of a folder that is loaded. Raises HpctrainError if there is no fast tokenizer in it,
    if the folder is damaged, or if the model needs code of its own.
    """
    refuse_foreign_files(folder)
    check_digests(folder)
    config = read_json_object(folder / "config.json") if (folder / "config.json").exists() else {}
    refuse_code(folder, config)
    check_sizes(folder / "config.json", config)
    if config:  # also read for the tokenizer, whose error would name another cause
        with _explain_config(folder):
            transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    settings = folder / "tokenizer_config.json"
    named = read_json_object(settings) if settings.exists() else {}
    for key in ("vocab", "merges"):
        # transformers would take a text for a file, anywhere, which would be copied into the run's model
        if isinstance(named.get(key), str):
            raise HpctrainError(f"{settings}: its {key} is no list of tokens: fetch or copy the folder again")
    whole = folder / "tokenizer.json"  # if there, the other files are not read
    for path in [whole] if whole.exists() else [*folder.glob("*.model"), *folder.glob("vocab*")]:
        refuse_pointer(path)
    try:
        with panics_as_errors():
            tokenizer = _read_tokenizer(folder, config)
    except Exception as error:  # the loaders of the many tokenizers raise exceptions of many kinds
        if not whole.exists() and any(folder.glob("*.model")) and not is_sentencepiece_available():
            raise HpctrainError(
                f"{folder}: its tokenizer is one of sentencepiece, which is not installed: "
                "install sentencepiece, or use a model that has a tokenizer.json"
            ) from error
        raise HpctrainError(
            f"{folder}: the tokenizer cannot be loaded ({describe_error(error)}): "
            "fetch or copy the folder again"
        ) from error
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise HpctrainError(
            f"{folder}: its tokenizer ({type(tokenizer).__name__}) is not a fast one, which is needed for "
            "the position of each token in the text: use a model that has a tokenizer.json"
        )
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    # transformers 5 silently makes an empty tokenizer then
    if not any((folder / name).exists() for name in files):
        raise HpctrainError(
            f"{folder}: no tokenizer in it ({' or '.join(files)}): "
            "copy it from the model that this one is based on"
        )
    if not isinstance(tokenizer.model_max_length, int | float):
        raise HpctrainError(
            f"{folder}: the model_max_length of its tokenizer is {tokenizer.model_max_length!r}, not a "
            "number: fix tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise HpctrainError(
                f"{folder}: its tokenizer has neither a pad_token nor an eos_token: "
                "set one in tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so it may be any token
    return tokenizer


def _read_tokenizer(folder: Path, config: Mapping[str, Any]) -> Any:
    """The tokenizer of a folder, by transformers."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    path = folder / "tokenizer.json"
    if (folder / "tokenizer_config.json").exists() or not path.exists():
        return tokenizer
    # Only the architecture tells the class then. If its special tokens are not those of tokenizer.json, it is
    # of another tokenizer (skt/kogpt2-base-v2), and config.json has the special tokens.
    backend = Tokenizer.from_file(str(path))
    if all(backend.token_to_id(token) is not None for token in tokenizer.all_special_tokens):
        return tokenizer
    names: dict[str, Any] = {
        name: backend.id_to_token(id_)
        for name in ("bos_token", "eos_token", "pad_token")
        if type(id_ := config.get(f"{name}_id")) is int
    }
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder, **options, **names)


def fit_together(
    task: "Task", folder: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast"
) -> None:
    """Give model and tokenizer what each needs of the other, and what config.json often lacks.

    Raises HpctrainError if a language model has no token for the end of a text.
    """
    # KLUE's RoBERTa has the tokenizer of BERT, but one token type; DistilBERT has none
    accepted = inspect.signature(model.forward).parameters
    if "token_type_ids" not in accepted or getattr(model.config, "type_vocab_size", 2) < 2:
        names = tokenizer.model_input_names
        tokenizer.model_input_names = [name for name in names if name != "token_type_ids"]
    # Llama, GPT-2 and others classify by the last token that is not this one
    if task.pipeline_tag == "text-classification":
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    # transformers 5 saves it in generation_config.json; T5 starts with padding
    if model.config.is_encoder_decoder and getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = tokenizer.pad_token_id
    if task.pipeline_tag == "text-generation" and tokenizer.eos_token is None:
        if tokenizer.sep_token is None:
            raise HpctrainError(
                f"{folder}: its tokenizer has no eos_token, with which a text ends: "
                "set one in tokenizer_config.json"
            )
        # GPT-2 with the tokenizer of BERT
        tokenizer.eos_token, tokenizer.bos_token = tokenizer.sep_token, tokenizer.cls_token


def count_own_positions(model: "PreTrainedModel") -> int | None:
    """The longest text of a model in tokens; None for relative positions, which have no limit (XLNet: -1)."""
    positions = getattr(model.config, "max_position_embeddings", None) or -1
    return positions if positions > 0 else None


def refuse_adapter(folder: Path) -> None:
    """Raise HpctrainError if the folder has an adapter, which is no model to train."""
    if (folder / ADAPTER_CONFIG).exists():
        raise HpctrainError(f"{folder}: an adapter: give the model that it is for, and --lora-from {folder}")


def refuse_code(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise HpctrainError for an architecture that transformers does not have, and for quantized weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    why = ""
    if "auto_map" in config:
        why = "needs Python code of its own (auto_map in config.json), and code of models is not run"
    elif kind is not None:  # old ones have none
        why = f"is of the type {kind!r}, which transformers {transformers.__version__} does not have"
    if why and str(kind) not in CONFIG_MAPPING:
        raise HpctrainError(
            f"{folder}: its model {why}: use a model of an architecture that transformers has"
        )
    if config.get("quantization_config"):
        raise HpctrainError(
            f"{folder}: its weights are quantized (quantization_config in config.json), and such weights "
            "cannot be trained: give the model that it was made from"
        )


def describe_pickle_error(folder: Path, error: BaseException) -> str:
    """Why pickled weights cannot be loaded, in one line that names the file; "" for other weights."""
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        if not isinstance(error, UnpicklingError):
            return f"{folder / pickles[0]}: damaged ({describe_error(error)}): fetch or copy it again"
        return (
            f"{folder / pickles[0]}: holds other objects than weights, and code in a pickle is not run: "
            "convert the weights to safetensors, or use a model that has model.safetensors"
        )
    return ""


def save_model(
    folder: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    card: str = "",
    pipeline_tokenizer: str = "",
) -> None:
    """Write a model folder, with the card as README.md, on one rank.

    An earlier model is replaced once this one is complete. `pipeline_tokenizer` is the tokenizer.json of a
    second tokenizer, in the folder pipeline_tokenizer (Task has its use). Raises HpctrainError that names the
    folder if it cannot be written, or holds something other than a model.
    """
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
            raise HpctrainError(
                f"{folder} is not empty and not a model, so it is not replaced: give another folder"
            )
        with atomic.folder(folder) as unfinished:
            model.save_pretrained(unfinished)
            if not (unfinished / "config.json").exists():  # of an adapter
                model.config.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            if pipeline_tokenizer:
                _save_pipeline_tokenizer(unfinished / "pipeline_tokenizer", tokenizer, pipeline_tokenizer)
            if card:
                (unfinished / "README.md").write_text(card, encoding="utf-8")
            # safetensors makes files that only the owner may read
            for path in filter(Path.is_file, unfinished.rglob("*")):
                path.chmod((unfinished / "config.json").stat().st_mode)
            validate_folder(unfinished)
            write_digests(unfinished)
    except Exception as error:
        if isinstance(error, HpctrainError) or not (isinstance(error, OSError) or is_disk_error(error)):
            raise
        raise HpctrainError(
            f"{folder}: the model cannot be written ({describe_error(error)}): "
            "free some space, or give another folder"
        ) from error


def _save_pipeline_tokenizer(folder: Path, tokenizer: "PreTrainedTokenizerFast", content: str) -> None:
    """Write a tokenizer folder with this tokenizer.json.

    Its special tokens and its maximum length are those of `tokenizer`. Its class is the general one: the
    class of a model, such as BertTokenizer, ignores the model in tokenizer.json.
    """
    second = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(content),
        model_max_length=tokenizer.model_max_length,
        model_input_names=tokenizer.model_input_names,
        **tokenizer.special_tokens_map,
    )
    second.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")


def make_card(
    title: str,
    task: "Task",
    base: str,
    data: str,
    language: str | None,
    scores: Mapping[str, float],
    options: Mapping[str, Any],
    versions: Mapping[str, str],
    pipeline_tokenizer: bool = False,
    adapter: bool = False,
) -> str:
    """A model card in Markdown with YAML metadata: scores, how to use the model, and how it was trained.

    `base` is the model that was fine-tuned: a name on the hub, or that of a folder. `data` is the name of the
    data set, and `language` that of its texts in ISO 639-1, None if it is not known. `pipeline_tokenizer`:
    whether save_model() writes one; `adapter`: whether it writes an adapter of peft.
    """
    base, data, title = hide_secrets([base, data, title])
    options, versions = hide_secrets([dict(options), dict(versions)])
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()
    metadata = ModelCardData(
        language=language,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task.pipeline_tag,
        base_model=base if is_hub_name else None,
        # other data have the name of a file
        datasets=["/".join(data.split("/")[:2])] if "/" in data else None,
        model_name=title,
        eval_results=[
            EvalResult(task.pipeline_tag, Path(data).name, Path(data).name, name, float(value))
            for name, value in scores.items()
            if "/" not in name
        ],
    )
    loader = task.model.__name__
    text = task.pipeline_text if pipeline_tokenizer else task.card_text
    words = " ".join(name.upper() for name in task.inputs)
    load = f"from transformers import AutoTokenizer, {loader}\n\n"
    load += 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
    if adapter:
        quoted = json.dumps(base, ensure_ascii=False)  # people copy this code, and a folder may have any name
        load = (
            f"from peft import PeftModel\n{load.replace('AutoTokenizer, ', 'AutoConfig, AutoTokenizer, ', 1)}"
        )
        load += f'model = {loader}.from_pretrained({quoted}, config=AutoConfig.from_pretrained("FOLDER"))\n'
        load += 'model = PeftModel.from_pretrained(model, "FOLDER")'
    else:
        load += f'model = {loader}.from_pretrained("FOLDER")'
    return f"""---
{metadata.to_yaml()}
---

# {title}

`{base}`, fine-tuned on `{data}` with hpctrain ({task.name}).

## Scores

| metric | value |
|---|---|
{chr(10).join(f"| {name} | {value:.4f} |" for name, value in scores.items())}

## Use

```
hpctrain predict FOLDER {words}
```
{text and f"{chr(10)}{text}{chr(10)}"}
```python
{load}
```

## Training

```json
{json.dumps({"options": options, "versions": versions}, indent=2, ensure_ascii=False, default=str)}
```
"""


def describe_error(error: BaseException) -> str:
    """The type and the message of an error in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__} {error}".split())[:200]


def is_disk_error(error: Exception) -> bool:
    """Whether an error means that a file or folder cannot be written: a full disk, a quota, no permission.

    Libraries in Rust have the error number in the message only.
    """
    kinds = (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO,
        errno.ENOTEMPTY,
    )  # fmt: skip
    return getattr(error, "errno", None) in kinds or any(f"(os error {kind})" in str(error) for kind in kinds)
