"""Load the tokenizer of a model folder, and fit it to its model."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_sentencepiece_available

from hpctrain.errors import HpctrainError, panics_as_errors
from hpctrain.files.digests import check_digests
from hpctrain.files.plain import refuse_pointer
from hpctrain.nlp.models.limits import refuse_growth
from hpctrain.nlp.models.model_folder import (
    check_sizes,
    describe_error,
    explain_config,
    read_json_object,
    refuse_code,
    refuse_foreign_files,
)
from hpctrain.nlp.task import Task


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
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
        with explain_config(folder):
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
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
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
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
    refuse_growth(folder, tokenizer.backend_tokenizer)
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
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
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
    return PreTrainedTokenizerFast.from_pretrained(folder, **options, **names)


def fit_together(
    task: Task, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
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
