"""Tokenize the splits of a data set, and say what the model cannot see or answer."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hpctrain.distributed.rendezvous import all_or_none
from hpctrain.errors import HpctrainError, panics_as_errors
from hpctrain.nlp.batches.features import Features, load_or_make, make_cache_key
from hpctrain.nlp.data import formats
from hpctrain.nlp.models.model_folder import describe_error
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.task import Task
from hpctrain.training.run import Run

MAX_UNKNOWN = 0.25  # of the tokens; with the tokenizer of another language, half of them may be


def tokenize_splits(
    task: Task,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    labels: list[str],
    examples: dict[str, list[Any]],
    args: FineTuneOptions,
    run: Run,
) -> dict[str, Features]:
    """The features of each split, from the cache or made now; prints their sizes and problems.

    A collective call.

    Raises HpctrainError if the tokenizer of the folder fails; with --strict also if texts are truncated or
    have a label that is not in the training data.
    """
    features = {}
    vocabulary = (tokenizer.backend_tokenizer.to_str(), tokenizer.model_input_names, tokenizer.chat_template)
    for name, part in examples.items():
        start = time.monotonic()
        key = make_cache_key(task.name, vocabulary, labels, args.max_length, args.stride, part)
        make = partial(_tokenize, task, folder, tokenizer, part, labels, args)
        made = features[name] = load_or_make(key, make, run.world)
        lengths = made.lengths
        windows = f" in {len(lengths):,} windows" if len(lengths) != len(part) else ""
        run.print(
            f"{name}: {len(part):,} examples{windows}, {lengths.sum():,} tokens (mean {lengths.mean():.1f}, "
            f"longest {lengths.max()}), tokenized or loaded in {time.monotonic() - start:.1f} s"
        )
        for problem in describe_problems(task, tokenizer, part, made, labels, args.max_length):
            with all_or_none(run.world):
                if args.strict:
                    raise HpctrainError(f"{name}: {problem}: fix the data, or run without --strict")
            run.print(f"{name}: {problem}")
        share = made.count_share(find_unknown(tokenizer))
        if name == "train" and share > MAX_UNKNOWN:
            run.print(
                f"{share:.0%} of the training tokens are {tokenizer.unk_token}, unknown to the tokenizer: "
                "is it for another language, or for lower case (do_lower_case), or are the texts in NFD?"
            )
    return features


def find_unknown(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The token for what a tokenizer does not know; None if it knows all, as byte-level BPE does."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    return None if unknown in others else unknown


def describe_problems(
    task: Task,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Any],
    features: Features,
    labels: list[str],
    max_length: int,
) -> Iterator[str]:
    """How many examples of a split the model cannot see whole, or cannot answer, and the first of them."""
    truncated, lost = ([examples[i] for i in indices] for indices in (features.cut, features.lost))
    reasons = [task.explain_lost(tokenizer, example) for example in lost]
    if refused := [error for error in reasons if error]:
        yield formats.describe_skipped(refused)
    lost = [example for example, error in zip(lost, reasons, strict=True) if not error]
    known = set(labels)
    unseen = [example for example in examples if labels and not set(task.collect_labels([example])) <= known]
    for affected, problem in (
        (truncated, f"{task.cut_text}too long for --max-length {max_length} and truncated"),
        (lost, task.lost_text),
        (unseen, "with a label that is not in the training data, so any answer is wrong"),
    ):
        if affected:
            first = affected[0].location
            yield f"{len(affected):,} of {len(examples):,} examples {problem}; the first: {first}"


def _tokenize(
    task: Task,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Any],
    labels: list[str],
    args: FineTuneOptions,
) -> Features:
    try:
        with panics_as_errors():
            return task.tokenize(tokenizer, examples, labels, args.max_length, args.stride)
    except HpctrainError:
        raise
    except Exception as error:  # the tokenizers of damaged files raise exceptions of many kinds
        raise HpctrainError(
            f"{folder}: its tokenizer cannot tokenize the data ({describe_error(error)}): "
            "fetch or copy the folder again"
        ) from error
