"""Fine-tune a model of transformers for a task.

All tasks share these steps; task.py has the interface of a task.

fine_tune() reads from top to bottom. The options are in options.py, the model that training starts from in
initial_model.py, the training and evaluation steps in lightning_module.py, the batches in sampling.py.

Each step computes --batch-size examples, on any number of ranks and in any number of parts (--accumulate).
The loss is the mean over the labels of the whole batch: ranks have equal numbers of examples, but not of
tokens.
"""

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.lazy_imports import import_of_lightning
from hpctrain.distributed.rendezvous import all_or_none, broadcast, process_group
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, panics_as_errors
from hpctrain.files.redaction import hide_secrets
from hpctrain.lightning.trainer import JsonStrategy, make_trainer, quiet
from hpctrain.nlp.batches.features import Features, check_tokens, load_or_make, make_cache_key
from hpctrain.nlp.batches.sampling import LengthGroupedSampler, make_loader
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.splits import describe_files, load_splits, split_examples
from hpctrain.nlp.models.card import make_card
from hpctrain.nlp.models.hub import resolve_data
from hpctrain.nlp.models.initial_model import (
    check_packing,
    choose_labels,
    get_initial_model,
    load_model,
)
from hpctrain.nlp.models.lora import add_lora, count_parameters, without_warnings
from hpctrain.nlp.models.masks import needs_mask
from hpctrain.nlp.models.memory import check_memory
from hpctrain.nlp.models.model_folder import describe_error, save_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.parser import check_ranks, parse_options
from hpctrain.nlp.task import Task
from hpctrain.nlp.training.lightning_module import FineTuneModule
from hpctrain.nlp.training.step_graphs import check_layers
from hpctrain.run.config import versions
from hpctrain.run.flops import count_text_flops
from hpctrain.run.options import RunOptions
from hpctrain.run.prepare import find_earlier_checkpoint
from hpctrain.run.record import Record
from hpctrain.text import counted, one_line, say
from hpctrain.training.batches import steps_per_epoch
from hpctrain.training.kernels import check_compiler, compile_training, make_deterministic
from hpctrain.training.precision import HALVES, set_precision

MOST_UNKNOWN = 0.25  # of the tokens; with the tokenizer of another language, half of them may be

with import_of_lightning():
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy


def fine_tune(task: Task, world: World, arguments: list[str]) -> None:
    """Run `hpctrain nlp.<task>`: read, tokenize, train, test, and save the best model."""
    args = parse_options(task, arguments)
    task = task.for_problem(args.problem)
    device = choose_device(world, args.device)
    precision = set_precision(args.precision, args.tf32, world, device)
    args = dataclasses.replace(args, precision=precision)
    check_ranks(args, world, device)  # before hours of reading and tokenizing
    quiet()
    with process_group(world, device, cpu_tensors=args.cpu_offload):
        examples = read_examples(task, args, world)
        args = fit_batch_size(args, len(examples["train"]), world)
        run = Record(world, f"nlp.{task.name}", RunOptions.from_args(vars(args)), device)
        run.best.patience = args.patience
        run.in_parts = args.strategy == "fsdp" and world.size > 1

        folder = get_initial_model(task, args, run, examples["train"])
        make_deterministic(args.deterministic, device)
        model, tokenizer, labels = prepare_model(task, folder, examples["train"], args, run, device)
        features = tokenize_splits(task, folder, tokenizer, labels, examples, args, run)
        with all_or_none(world):
            check_tokens(folder, model, max(made.last_token for made in features.values()))

        module = prepare_module(task, model, labels, features["train"], args, run)
        trainer = prepare_trainer(module, args, run, device)
        padding = {**task.padding, "input_ids": tokenizer.pad_token_id}
        test, validation = (
            module.make_evaluation_loader(name, examples[name], features[name], padding)
            for name in ("test", "validation")
        )
        if args.epochs:
            train(trainer, module, features["train"], padding, validation, args, run)
            use_best_weights(model, f"validation_{module.choose_metric(examples['validation'])}", args, run)
        scores = score_test_set(trainer, module, test, run)

        if run.in_parts:
            model = trainer.strategy.gather_model()  # type: ignore[attr-defined]  # a ShardedStrategy
        with all_or_none(world):
            if world.rank == 0:
                save_result(task, model, tokenizer, args, run, scores, examples["test"])
        run.finish(model, **scores)
        inputs = " ".join(map(str.upper, task.inputs))
        saved = f"{run.folder}/model"
        run.print(f"model saved in {saved}; use it: hpctrain predict {shlex.quote(saved)} {inputs}")


# --- before training ---


def read_examples(task: Task, args: FineTuneOptions, world: World) -> dict[str, list[Any]]:
    """The "train", "validation" and "test" examples; splits without a file come from training."""
    skipped: list[HpctrainError] | None = None if args.strict else []
    path = resolve_data(args.data, world) if args.data else None
    with all_or_none(world):
        splits = load_splits(task, path, skipped, args.columns)
        if "test" not in splits:  # --data is a single file; its test set must not depend on --seed
            splits["train"], splits["test"] = split_examples(
                task, splits["train"], args.validation_split, seed=0
            )
        if "validation" not in splits:
            splits["train"], splits["validation"] = split_examples(
                task, splits["train"], args.validation_split, args.seed
            )
        splits = {name: splits[name][: args.limit] for name in ("train", "validation", "test")}
        remarks = [
            formats.describe_skipped(skipped or ()),
            *describe_files(path, tables=args.columns is not None),
        ]
    if world.rank == 0:
        print(*(f"{one_line(remark)}\n" for remark in remarks if remark), sep="", end="", flush=True)
    return splits


def fit_batch_size(args: FineTuneOptions, examples: int, world: World) -> FineTuneOptions:
    """The options with a batch that is not larger than the training set, if its ranks can share one."""
    parts = world.in_groups_of(args.tensor_parallel).size * args.accumulate
    fitting = examples // parts * parts
    if not args.epochs or args.batch_size <= examples or not fitting:
        return args
    if world.rank == 0:
        say(
            f"--batch-size is {fitting} instead of {args.batch_size}, "
            f"because there are {counted(examples, 'training example')}"
        )
    return dataclasses.replace(args, batch_size=fitting)


def prepare_model(
    task: Task, folder: Path, train: list[Any], args: FineTuneOptions, run: Record, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, list[str]]:
    """The model to train, its tokenizer, and the names of its labels.

    A collective call. With --strategy fsdp only rank 0 has the weights. Raises HpctrainError if the model
    cannot be trained with these options, or not in the memory of this rank.
    """
    with all_or_none(run.world):
        if args.compile:
            check_compiler(run.world.rank)
        check_memory(folder, args, run.world, device)
        tokenizer = load_tokenizer(folder)
        labels, origin = choose_labels(task, folder, train)
        # shard() takes weights from rank 0; peft needs some
        empty = run.in_parts and run.world.rank != 0 and not args.lora_from
        model = load_model(task, folder, tokenizer, labels, args, empty)
        if args.pack and not empty:
            check_packing(folder, model)
        if args.cuda_graphs:
            check_layers(model.config)
        model.config.hpctrain["settings"] = task.collect_settings(train)
        if args.uses_lora:
            model = add_lora(task, model, folder, args, run.folder / "model")
    if labels:
        run.print(f"{counted(len(labels), 'label')}{origin}: {formats.list_names(labels)}")
    if args.uses_lora:
        run.print(f"LoRA: {count_parameters(model)}")
    return model, tokenizer, labels


def tokenize_splits(
    task: Task,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    labels: list[str],
    examples: dict[str, list[Any]],
    args: FineTuneOptions,
    run: Record,
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
        if name == "train" and share > MOST_UNKNOWN:
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


def prepare_module(
    task: Task, model: PreTrainedModel, labels: list[str], train: Features, args: FineTuneOptions, run: Record
) -> FineTuneModule:
    """The model with its training and evaluation steps; with --compile, it is compiled at the first one.

    A collective call.
    """
    steps = 0
    if args.epochs:
        group = run.world.in_groups_of(args.tensor_parallel)
        steps = args.epochs * steps_per_epoch(len(train.lengths), args.batch_size, group, args.accumulate)
    weights = balance_classes(labels, train, run) if args.class_weights else None
    # rank 0 decides, because others may have a model without weights
    needs_none = run.world.rank == 0 and task.pipeline_tag == "text-generation" and not needs_mask(model)
    masked = not broadcast(run.world, needs_none)
    module = FineTuneModule(task, model, labels, args, run, steps, class_weights=weights, masked=masked)
    if args.compile:
        compile_training(model, dynamic=True, by_block=True)  # batches are as long as their longest text
    return module


def balance_classes(labels: list[str], train: Features, run: Record) -> Tensor:
    """The weight of each class, [labels]: examples / (classes * examples of the class), as in scikit-learn.

    Only the classes of the training set count; a class that only the model has gets 0. Prints all weights.
    """
    counts = torch.bincount(torch.from_numpy(train.values["labels"].copy()), minlength=len(labels))
    present = counts > 0
    weights = torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 0.0)
    for label, count, weight in zip(labels, counts.tolist(), weights.tolist(), strict=True):
        run.print(f"class {formats.excerpt(label)}: {count:,} training examples, weight {weight:.4g}")
    return weights


def prepare_trainer(
    module: FineTuneModule, args: FineTuneOptions, run: Record, device: torch.device
) -> Trainer:
    """A Trainer with DDP, or with the strategy that shards the model. A collective call."""
    strategy: Callable[..., DDPStrategy] = JsonStrategy
    if run.in_parts:
        # imports much of torch, few runs need it
        from hpctrain.nlp.models.tensor_parallel import choose_strategy

        with all_or_none(run.world):
            strategy = choose_strategy(
                module.model, args.tensor_parallel, args.cpu_offload, HALVES.get(args.precision)
            )
    return make_trainer(
        run, args, device, module.model, module.score,
        evaluate_every=args.eval_every, accumulate_grad_batches=args.accumulate, strategy=strategy,
    )  # fmt: skip


# --- training ---


def train(
    trainer: Trainer,
    module: FineTuneModule,
    features: Features,
    padding: dict[str, int],
    validation: DataLoader,
    args: FineTuneOptions,
    run: Record,
) -> None:
    """Train the epochs that are left; validate after each of them."""
    model = module.model
    state = run.resume(torch.device("cpu"), args.epochs, model, "state_dict", free=())
    if state and (run.epoch >= args.epochs or run.best.has_stalled):  # resumed after the last epoch
        set_weights(model, state["model"], run)
        return
    sampler = LengthGroupedSampler(features, module.group, args.batch_size, args.seed, args.accumulate)
    run.count_flops(lambda: count_text_flops(model, features.lengths, run_empty))
    if state:
        sampler.skip(run.epoch + 1, state["step"])
        del state  # as large as the model and its optimizer
    batches = make_loader(features, padding, sampler, bool(args.pack), module.round_up_to)
    trainer.fit(module, batches, validation, ckpt_path=run.resume_from)


def run_empty(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """The output of a model without values, for a text of this length in tokens."""
    # without a cache, transformers looks at positions, which have no values, for several texts in a row
    model.config.use_cache = True
    return model(input_ids=torch.zeros(1, length, dtype=torch.int64, device="meta"))


# --- after training ---


def use_best_weights(model: PreTrainedModel, metric: str, args: FineTuneOptions, run: Record) -> None:
    """Load the weights of the evaluation with the best validation score, unless it is the last evaluation."""
    if run.best.has_stalled and run.epoch < args.epochs:
        run.print(f"stopped after {run.best.latest}: no better {metric} for {args.patience} evaluations")
    if weights := load_best(metric, run):
        set_weights(model, weights, run)


def load_best(metric: str, run: Record) -> dict[str, Tensor] | None:
    """The weights of the best validation, None if it is the last (collective).

    Raises HpctrainError, naming the checkpoint, if it is damaged.
    """
    best = run.best
    if best.since == 0:
        return None
    earlier = [run.resume_from.parent.parent] if run.resume_from else []  # of another run, perhaps
    path = find_earlier_checkpoint([run.folder, *earlier], best.epoch, best.step)
    with all_or_none(run.world):
        if run.world.rank == 0:
            checkpoint.check_intact(path)
        state = checkpoint.load(path, torch.device("cpu"), lazily=run.in_parts)
    run.print(f"{best.place} has the best {metric}: using its weights")
    return state["model"]


def set_weights(model: PreTrainedModel, weights: dict[str, Any], run: Record) -> None:
    """Load the weights of a checkpoint into the model; of a sharded model, the part of this rank."""
    if run.in_parts:
        from hpctrain.training.strategies.fsdp import load_parts  # imports much of torch, few runs need it

        load_parts(model, weights)
    else:
        model.load_state_dict(weights)


def score_test_set(
    trainer: Trainer, module: FineTuneModule, batches: DataLoader, run: Record
) -> dict[str, float]:
    """The scores of the test set, which has no other use."""
    trainer.test(module, batches, verbose=False)
    scores = {
        name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("test_")
    }
    for name in [name for name, value in scores.items() if not math.isfinite(value)]:
        run.print(f"{name} is {scores.pop(name)}: left out")  # a score is optional, the model is not
    run.metrics(**scores)
    return scores


def save_result(
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    args: FineTuneOptions,
    run: Record,
    scores: dict[str, float],
    test: list[Any],
) -> None:
    """Save the model folder, with a model card that has the scores of this run. On one rank."""
    model.config.use_cache = True
    pipeline_tokenizer = task.make_pipeline_tokenizer(tokenizer, model.config.hpctrain["settings"])
    options = {name: _hide_folders(value) for name, value in vars(args).items()}
    base = options["model"] if args.model else f"from scratch ({options['from_scratch']})"
    data = options["data"] if args.data else "the sample data of hpctrain"
    # for the page of `hpctrain serve`
    model.config.hpctrain["about"] = hide_secrets({"base": base, "data": data, "scores": scores})
    model.config.hpctrain["meanings"] = task.explain_labels(test)
    card = make_card(
        title=f"{task.title}: {run.folder.name}",
        task=task,
        base=base,
        data=data,
        language=formats.find_language(text for example in test for text in task.get_texts(example)),
        scores=scores,
        options=options,
        versions=versions() | {"transformers": transformers.__version__},
        pipeline_tokenizer=bool(pipeline_tokenizer),
        adapter=args.uses_lora and not args.lora_merge,
    )
    # a token may control a terminal
    samples = [one_line(text) for text in task.generate_samples(model, tokenizer, test)]
    task.prepare_tokenizer(tokenizer, args.max_length)
    if samples:
        card += "\n## Samples\n\n" + "".join(f"- {text}\n" for text in samples)
        for text in samples:
            run.print(f"sample: {text}")
    if args.lora_merge:
        model = model.merge_and_unload()  # type: ignore[operator]  # a PeftModel
    with without_warnings():  # peft looks for the model of an adapter from the working folder
        save_model(run.folder / "model", model, tokenizer, card, pipeline_tokenizer)


def _hide_folders(value: Any) -> str:
    """The value of an option for the model card, which may be published: of a path, only its last part."""
    path = Path(str(value))
    return path.absolute().name if path.exists() or path.is_absolute() else str(value)
