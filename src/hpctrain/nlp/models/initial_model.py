"""The model that a fine-tuning starts from, existing or new: its labels, and checks that it fits the data."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.distributed.rendezvous import all_or_none
from hpctrain.errors import HpctrainError
from hpctrain.nlp.data import formats
from hpctrain.nlp.models.hub import resolve_model
from hpctrain.nlp.models.masks import agree, is_causal, skip_searches
from hpctrain.nlp.models.model_folder import (
    count_own_positions,
    describe_pickle_error,
    read_labels,
    refuse_adapter,
)
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import fit_together
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.task import Task
from hpctrain.text import first_line
from hpctrain.training.run import Run

WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before the names of weights


def get_initial_model(task: Task, args: FineTuneOptions, run: Run, train: list[Any]) -> Path:
    """The folder of the initial model; --from-scratch creates it in the run folder (collective)."""
    if args.model:
        return resolve_model(args.model, run.world)
    assert args.from_scratch  # see parse_options()
    folder = run.folder / "from-scratch"
    with all_or_none(run.world):
        # It belongs to the checkpoint that a run is resumed from. Without one it is of an attempt that
        # failed, perhaps with other options or data, and is replaced.
        if run.world.rank == 0 and not (run.resume_from and folder.exists()):
            texts = list(dict.fromkeys(text for example in train for text in task.get_texts(example)))
            vocabulary = create_model(folder, args.from_scratch, task.kind, texts, args.seed, args.max_length)
            run.print(
                f"created a {task.kind} model from scratch ({args.from_scratch}); its tokenizer has "
                f"{vocabulary:,} subword tokens, trained on the training texts"
            )
    return folder


def choose_labels(task: Task, folder: Path, train: list[Any]) -> tuple[list[str], str]:
    """The label names in the order of the model's outputs, and where that order is from, for the log.

    A model that is fine-tuned already keeps its own names and order if they cover the data: another order
    would give its outputs to other labels. Otherwise the names are those of the training data.
    """
    needed = task.collect_labels(train)
    known = read_labels(folder, task) if needed else []
    if known and set(needed) <= set(known):
        return known, " of the model"
    if task.problem == "multi-label" and not needed:
        raise HpctrainError("no training example has a label: check --data")
    if len(needed) == 1 and task.problem != "regression":
        raise HpctrainError(f"all training examples have the same label, {needed[0]!r}: check --data")
    if not known:
        return needed, ""
    if len(needed) != len(known):
        return needed, f" for a new last layer, because the model has others ({formats.list_names(known)})"
    numbers = [str(i) for i in range(len(known))]
    if set(needed) == set(numbers):  # in the order of numbers, also if there are more than ten
        needed = numbers
    return needed, f", assumed to be {formats.list_names(known)} of the model in this order"


def load_model(
    task: Task,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    labels: list[str],
    args: FineTuneOptions,
    empty: bool = False,
) -> PreTrainedModel:
    """The model with a head for these labels, in training mode.

    A head that the folder lacks is initialized from --seed. If `empty`, the model is on the meta device.
    Raises HpctrainError if the folder has no model for this task, or one shorter than --max-length.
    """
    refuse_adapter(folder)
    model = _load_weights(task, folder, labels, args.seed, empty)
    positions = _count_positions(model, tokenizer)
    if args.max_length > positions:
        raise HpctrainError(
            f"--max-length {args.max_length} is too long for {folder}, which has {positions} positions: "
            f"give --max-length {positions}"
        )
    fit_together(task, folder, model, tokenizer)
    skip_searches(model, packed=bool(args.pack))
    if not empty:
        _check_finite(folder, model)
    if task.pipeline_tag == "text-generation" and not empty:
        _check_causal(folder, model)
    model.train()  # from_pretrained() turns dropout off
    if args.gradient_checkpointing:
        _checkpoint_gradients(model, folder)
    model.config.use_cache = False  # the cache of keys and values is for generation only
    model.config.hpctrain = {
        "task": task.name,
        "problem": task.problem,
        "labels": labels,
        "max_length": args.max_length,
        "stride": args.stride,
        "positions": positions,
    }
    if args.columns:  # for `hpctrain predict`
        model.config.hpctrain["columns"] = args.columns
    return model


def _load_weights(task: Task, folder: Path, labels: list[str], seed: int, empty: bool) -> PreTrainedModel:
    torch.manual_seed(seed)
    # What other scripts have saved: tuples for outputs, more outputs, an attention that is not installed.
    settings: dict[str, Any] = {
        "return_dict": True,
        "output_attentions": False,
        "output_hidden_states": False,
        "_attn_implementation": None,
    }
    if labels:
        settings |= {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: i for i, label in enumerate(labels)},
            # a model that was trained for labels of another kind would compute another loss
            "problem_type": task.problem_type,
        }
    # transformers chooses the attention: sdpa, or eager for architectures that do not have it
    common = {"dtype": torch.float32, "trust_remote_code": False}
    missing: Collection[str] = ()
    others: Collection[str] = ()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, **settings)
        _check_architecture(task, folder, config)
        if empty:
            with torch.device("meta"):
                model = task.model.from_config(config, **common)
        else:
            model, loading = task.model.from_pretrained(
                folder,
                config=config,
                ignore_mismatched_sizes=True,  # of a head for other labels
                output_loading_info=True,
                **common,
            )
            missing, others = loading["missing_keys"], loading["unexpected_keys"]
    except HpctrainError:
        raise
    except Exception as error:  # the loaders of the many file formats raise exceptions of many kinds
        raise HpctrainError(
            describe_pickle_error(folder, error)
            or f"{folder}: not a model for nlp.{task.name} ({first_line(error)}): give another --model"
        ) from error
    _check_missing(task, folder, model, missing, others)
    return model


def _check_architecture(task: Task, folder: Path, config: PreTrainedConfig) -> None:
    """Raise HpctrainError if transformers has no model of this architecture for the task."""
    example = "skt/kogpt2-base-v2" if task.pipeline_tag == "text-generation" else "klue/bert-base"
    if task.pipeline_tag == "text-generation" and config.is_encoder_decoder:
        raise HpctrainError(
            f"{folder}: {config.model_type} has an encoder and a decoder, and nlp.{task.name} trains models "
            f"that are a decoder alone: give another --model, such as {example}"
        )
    classes = task.model._model_mapping
    assert classes is not None  # of all classes but AutoModel's base
    if type(config) not in classes:
        raise HpctrainError(
            f"{folder}: nlp.{task.name} needs {task.model.__name__}, which transformers does not have for "
            f"{config.model_type}: give another --model, such as {example}"
        )


def _check_causal(folder: Path, model: PreTrainedModel) -> None:
    """Raise HpctrainError if a token sees those after it: the loss would fall, and nothing be learned."""
    if not is_causal(model):
        raise HpctrainError(
            f"{folder}: an encoder ({model.config.model_type}), in which a token sees those that it should "
            "predict: give a causal model, such as skt/kogpt2-base-v2"
        )


def _check_finite(folder: Path, model: PreTrainedModel) -> None:
    """Raise HpctrainError if a weight is NaN or infinite: the first loss would be, and name another cause."""
    for name, weight in model.named_parameters():
        if not weight.detach().sum().isfinite():
            raise HpctrainError(
                f"{folder}: its weights {name} have NaN or infinite numbers: give a model of an earlier "
                "checkpoint, or fetch or copy it again"
            )


def _check_missing(
    task: Task, folder: Path, model: PreTrainedModel, names: Collection[str], others: Collection[str]
) -> None:
    """Raise HpctrainError if weights but the head or the pooler (absent in masked LMs) are missing.

    `others` are the names in the folder that the model does not have.
    """
    below = f"{model.base_model_prefix}."
    missing = sorted(name for name in names if name.startswith(below) and "pooler" not in name)
    wrapped = next((name for name in others if name.startswith(WRAPPERS) or name.endswith((*missing,))), None)
    if missing and wrapped:
        raise HpctrainError(
            f"{folder}: its weights have other names than those of the model, such as {wrapped}, perhaps "
            "of a wrapper (DDP, Lightning): save the model without it"
        )
    if missing and len(missing) == len(model.base_model.state_dict()):
        raise HpctrainError(
            f"{folder}: none of its weights is one of {type(model).__name__}, which nlp.{task.name} needs: "
            "give another --model, such as klue/bert-base"
        )
    if missing:
        raise HpctrainError(
            f"{folder}: {len(missing)} weights of the {model.config.model_type} model are missing, such as "
            f"{missing[0]}: fetch or copy it again"
        )


def _count_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> int:
    """The number of tokens that fit into the model.

    RoBERTa's positions begin at 2; the model_max_length of its tokenizer is the number left for tokens. The
    model_max_length of a tokenizer that hpctrain saved is the --max-length of that run.
    """
    longest = getattr(model.config, "hpctrain", {}).get("positions", tokenizer.model_max_length)
    own = count_own_positions(model)
    return min(own, longest) if own else longest


def _checkpoint_gradients(model: PreTrainedModel, folder: Path) -> None:
    if not model.supports_gradient_checkpointing:
        raise HpctrainError(
            f"{folder}: its architecture has no gradient checkpointing: leave out --gradient-checkpointing"
        )
    # earlier versions of transformers have the second one only, of which later ones warn
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@torch.no_grad()
def check_packing(folder: Path, model: PreTrainedModel) -> None:
    """Raise HpctrainError if the output for a text depends on another text before it in a packed row."""
    first, second = torch.tensor([[3, 1, 2, 0]]), torch.tensor([[1, 2, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    model.eval()
    packed = model(input_ids=torch.cat([first, second], 1), position_ids=positions).logits[:, 4:]
    alone = model(input_ids=second).logits
    model.train()
    if not agree(packed, alone):
        raise HpctrainError(
            f"{folder}: its architecture ({model.config.model_type}) does not keep the texts of a row apart: "
            "leave out --pack"
        )
