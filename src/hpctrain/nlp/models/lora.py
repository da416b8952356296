"""LoRA (Hu et al. 2021, arxiv.org/abs/2106.09685), with the library peft.

Small matrices beside the layers of a frozen model are trained, together with its last layer. The result is an
adapter: these weights alone, and the name of the model.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hpctrain.errors import HpctrainError
from hpctrain.files.digests import check_digests
from hpctrain.nlp.models.hub import find_model
from hpctrain.nlp.models.model_folder import ADAPTER_CONFIG, read_json_object, refuse_foreign_files
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.task import Task
from hpctrain.text import first_line

# The names that peft has for the tasks.
TASK_TYPES = {
    "text-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
    "text-generation": "CAUSAL_LM",
}


def add_lora(
    task: Task, model: PreTrainedModel, folder: Path, args: FineTuneOptions, out: Path
) -> PreTrainedModel:
    """The model of a folder, frozen, with trainable matrices: a PeftModel, which has all that the model has.

    The matrices are those of --lora-from, or of rank --lora-rank, initialized from --seed and scaled by
    alpha / rank = 2, as in the examples of peft. The head and the pooler, which may be new, are trained
    whole; but not the head of a language model, which is its embedding. Raises HpctrainError if the model
    lacks --lora-target, or does not fit the adapter.

    The adapter, to be saved in the folder `out`, names a model folder by the path from there, so that both
    can be moved together.
    """
    assert args.model  # see parse_options()
    adapted = _continue_adapter(model, args.lora_from) if args.lora_from else _new_adapter(task, model, args)
    config: Any = adapted.peft_config["default"]
    is_folder = Path(args.model).is_dir()
    config.base_model_name_or_path = (
        os.path.relpath(folder.resolve(), out.resolve()) if is_folder else args.model
    )
    config.revision = None if is_folder else folder.name  # a folder of the cache has the name of the commit
    return adapted


def _new_adapter(task: Task, model: PreTrainedModel, args: FineTuneOptions) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model  # takes a second, and few runs need it

    whole: set[str] = set()
    if model.get_output_embeddings() is None:
        heads = (name for name, child in model.named_children() if name != model.base_model_prefix)
        whole = {name for name in heads if any(True for _ in model.get_submodule(name).parameters())}
        whole |= {"pooler" for name, _ in model.named_modules() if name.endswith(".pooler")}
    assert args.lora_rank  # see parse_options()
    config = LoraConfig(
        task_type=TASK_TYPES[task.pipeline_tag],
        r=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
        target_modules="all-linear" if args.lora_target == ["all-linear"] else args.lora_target,
        modules_to_save=sorted(whole) or None,
    )
    torch.manual_seed(args.seed)
    try:
        with without_warnings():
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise HpctrainError(
            f"--lora-target: {first_line(error)[:200]}: give all-linear, or names of layers, such as "
            f"{list_layers(model)}"
        ) from error
    return adapted  # type: ignore[return-value]  # see add_lora()


def _continue_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapter of a folder, to be trained. Raises HpctrainError, naming the folder."""
    from peft import PeftModel

    refuse_foreign_files(folder)
    check_digests(folder)
    config = read_json_object(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise HpctrainError(
            f"{folder}: an adapter of type {config.get('peft_type')}: --lora-from needs one of LoRA"
        )
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(model, folder, is_trainable=True)
    except Exception as error:  # of many kinds, for files that are missing, damaged, or for another model
        text = " ".join(str(error).split()) or first_line(error)
        raise HpctrainError(
            f"{folder}: not an adapter of --model ({text[:200]}): give the model that it is for"
        ) from error
    if any("missing adapter keys" in str(warning.message) for warning in caught):
        raise HpctrainError(f"{folder}: the adapter lacks weights for --model: give the model that it is for")
    return adapted  # type: ignore[return-value]  # see add_lora()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence what peft says on every rank about its defaults and about later versions of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def list_layers(model: torch.nn.Module) -> str:
    """The names of the linear layers of a model, each once."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def count_parameters(model: torch.nn.Module) -> str:
    """How many parameters are trained, of how many, for the log."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"


def load_adapter(task: Task, folder: Path) -> PreTrainedModel:
    """The model of an adapter that hpctrain has written, in fp32, with the adapter merged into its weights.

    Looks up the base model as --model. Raises HpctrainError for it, and errors of peft and transformers.
    """
    from peft import PeftModel

    adapter = read_json_object(folder / ADAPTER_CONFIG)
    name = str(adapter.get("base_model_name_or_path"))
    if (beside := folder.resolve() / name).is_dir():  # as add_lora() writes it
        name = str(beside.resolve())
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    try:
        base_folder = find_model(name, adapter.get("revision"))
    except HpctrainError as error:
        raise HpctrainError(
            f"{folder}: an adapter, whose model is not found: {error}, or write its new place into "
            f"base_model_name_or_path of {folder / ADAPTER_CONFIG}"
        ) from error
    check_digests(base_folder)
    base = task.model.from_pretrained(
        base_folder, config=config, dtype=torch.float32, trust_remote_code=False
    )
    with without_warnings():
        return PeftModel.from_pretrained(base, folder).merge_and_unload()
