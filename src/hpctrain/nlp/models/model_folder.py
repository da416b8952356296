"""Model folders of from_pretrained(): their files, config.json and weights, and how one is saved."""

import errno
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers.utils import logging

from hpctrain.errors import HpctrainError, explain_os_error, hint_missing
from hpctrain.files import atomic
from hpctrain.files.digests import write_digests
from hpctrain.files.plain import read_object, refuse_pointer
from hpctrain.files.trust import is_below, refuse_links_out
from hpctrain.text import shorten

if TYPE_CHECKING:  # importing a class of transformers takes seconds, and `hpctrain fetch` needs none
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from hpctrain.nlp.task import Task

# transformers would warn about new heads and show progress bars on every rank. Errors are exceptions anyway.
logging.set_verbosity_error()
logging.disable_progress_bar()

# More than published models have: GPT-3 has 96 layers; other sizes are at most 10 million positions.
MAX_LAYERS, MAX_SIZE = 1_000, 100_000_000
# in the names of sizes in config.json
SIZE = re.compile(r"layer|size|dim|head|position|emb|inner|ctx|num_|^[dn]_")
ADAPTER_CONFIG = "adapter_config.json"  # is in the folder of an adapter, and in no other
# Weights by other names or in other formats, which from_pretrained() does not read.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
)  # fmt: skip

# The names that transformers 4 has for the bases of rotary embeddings, and for the part of a head that turns.
ROPE_NAMES = {"global": "rope_theta", "local": "rope_local_base_freq", "partial": "partial_rotary_factor"}
ROPE_NAMES_OF = {
    "gpt_neox": {"global": "rotary_emb_base", "partial": "rotary_pct"},
    "modernbert": {"global": "global_rope_theta", "local": "local_rope_theta"},
}


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
    """Raise HpctrainError for files that no model has: pipes, devices, links that leave the folder."""
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
    with explain_os_error(f"{path}: cannot be read as JSON", "fetch or copy it again", ValueError):
        return read_object(path)


def check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Raise HpctrainError if a size in a config.json is absurd: building such a model would not end."""
    for key, value in config.items():
        most = MAX_LAYERS if "layer" in key else MAX_SIZE
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
    with explain_config(folder):
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if not any(name.endswith(head) for name in config.architectures or ()):
            return []
        return [str(config.id2label[i]) for i in sorted(config.id2label)]


@contextmanager
def explain_config(folder: Path) -> Iterator[None]:
    """Raise any error as one of config.json: each field has its own check."""
    try:
        yield
    except Exception as error:
        raise HpctrainError(
            f"{folder}/config.json: cannot be used ({describe_error(error)}): fetch or copy the folder again"
        ) from error


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
            _write_for_transformers_4(unfinished)
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


def _write_for_transformers_4(folder: Path) -> None:
    """Give a folder of transformers 5 the names that transformers 4, vLLM and llama.cpp look for, as well.

    They do not know TokenizersBackend, the new name of PreTrainedTokenizerFast. And without `rope_theta` they
    compute rotary embeddings with the default of the architecture, and other outputs without a word.
    """
    path = folder / "config.json"
    config = read_json_object(path)
    _add_rope_names(config)
    _write_json(path, config)
    for path in folder.rglob("tokenizer_config.json"):
        settings = read_json_object(path)
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        if settings.get("tokenizer_class") == "TokenizersBackend":
            _write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
            # for some architectures, transformers 5 takes a class of its own then
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, local_files_only=True)
            if type(tokenizer) is transformers.PreTrainedTokenizerFast:
                continue
        _write_json(path, settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as transformers does."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _add_rope_names(config: dict[str, Any]) -> None:
    """Add what `rope_parameters` says under its earlier names."""
    for key, part in config.items():
        if isinstance(part, dict) and key.endswith("_config"):  # such as text_config
            _add_rope_names(part)
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    whole, local = rope.get("full_attention") or rope, rope.get("sliding_attention") or {}
    names = ROPE_NAMES | ROPE_NAMES_OF.get(config.get("model_type", ""), {})
    for part, key, name in (
        (whole, "rope_theta", names["global"]),
        (whole, "partial_rotary_factor", names["partial"]),
        (local, "rope_theta", names["local"]),
    ):
        if key in part:
            config[name] = part[key]
    if whole.get("rope_type", "default") != "default":
        config["rope_scaling"] = {
            key: value for key, value in whole.items() if key not in ("rope_theta", "partial_rotary_factor")
        }


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
