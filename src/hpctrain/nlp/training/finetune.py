"""Fine-tune a model of transformers for a task.

All tasks share these steps; task.py has the interface of a task.

fine_tune() reads from top to bottom, and its loop is in train(). The options are in options.py, the model
that training starts from in initial_model.py, the loss and the scores in steps.py, the batches in
sampling.py.

Each step computes --batch-size examples, on any number of ranks and in any number of parts (--accumulate).
The loss is the mean over the labels of the whole batch: ranks have equal numbers of examples, but not of
tokens.
"""

import dataclasses
import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import all_or_none, broadcast, process_group
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.files.digests import items_sha256
from hpctrain.nlp.batches.features import Features, check_tokens
from hpctrain.nlp.batches.sampling import Selection, TrainingTexts, training_batches_by_length
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.splits import describe_files, load_splits, split_examples
from hpctrain.nlp.models.hub import resolve_data
from hpctrain.nlp.models.initial_model import (
    check_packing,
    choose_labels,
    get_initial_model,
    load_model,
)
from hpctrain.nlp.models.lora import add_lora, count_parameters
from hpctrain.nlp.models.masks import needs_mask
from hpctrain.nlp.models.memory import check_memory
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.parser import check_ranks, parse_options
from hpctrain.nlp.task import Task
from hpctrain.nlp.training.result import save_result
from hpctrain.nlp.training.step_graphs import StepGraphs, check_layers
from hpctrain.nlp.training.steps import Steps, make_optimizer
from hpctrain.nlp.training.tokenize import tokenize_splits
from hpctrain.run.flops import count_text_flops
from hpctrain.run.options import DATA, Prune
from hpctrain.text import counted, one_line, say
from hpctrain.training import schedule
from hpctrain.training.batches import seed_step, steps_per_epoch
from hpctrain.training.kernels import check_compiler, compile_training, make_deterministic
from hpctrain.training.precision import HALVES, choose_precision
from hpctrain.training.run import Run
from hpctrain.training.strategies.ddp import LEAN

CLIP = 1.0  # the largest norm of the gradients


def fine_tune(task: Task, world: World, arguments: list[str], prune: Prune | None = None) -> None:
    """Run `hpctrain nlp.<task>`: read, tokenize, train, test, and save the best model."""
    args = parse_options(task, arguments)
    task = task.for_problem(args.problem)
    device = choose_device(world, args.device)
    args = dataclasses.replace(args, precision=choose_precision(args.precision, device))
    check_ranks(args, world, device)  # before hours of reading and tokenizing
    with process_group(world, device, cpu_tensors=args.cpu_offload):
        examples = read_examples(task, args, world)
        args = fit_batch_size(args, len(examples["train"]), world)
        # not of the test set, which has no effect on the weights
        digest = world.rank == 0 and items_sha256("examples", examples["train"], examples["validation"])
        options = vars(args) | {DATA: broadcast(world, digest)}
        with Run(f"nlp.{task.name}", prune=prune, **options) as run:
            folder = get_initial_model(task, args, run, examples["train"])
            make_deterministic(args.deterministic, device)
            model, tokenizer, labels = prepare_model(task, folder, examples["train"], args, run)
            features = tokenize_splits(task, folder, tokenizer, labels, examples, args, run)
            with all_or_none(world):
                check_tokens(folder, model, max(made.last_token for made in features.values()))

            steps = prepare_steps(task, model, labels, features["train"], args, run)
            padding = {**task.padding, "input_ids": tokenizer.pad_token_id}
            for name in ("validation", "test"):
                steps.add_set(name, examples[name], features[name], padding)
            texts = TrainingTexts(features["train"], padding, bool(args.pack), steps.round_up_to)
            train(task, steps, texts, args, run)
            if run.is_finished:
                return
            scores = score_test_set(steps, run)

            whole: Any = run.gather(model)
            with all_or_none(world):
                if world.rank == 0:
                    save_result(task, whole, tokenizer, args, run, scores, examples["test"])
        inputs = " ".join(map(str.upper, task.inputs))
        saved = f"{run.folder}/model"
        run.print(f"model saved in {saved}; use it: hpctrain predict {shlex.quote(saved)} {inputs}")


# --- before training ---


def read_examples(task: Task, args: FineTuneOptions, world: World) -> dict[str, list[Any]]:
    """The "train", "validation" and "test" examples; splits without a file come from training."""
    skipped: list[HpctrainError] | None = None if args.strict else []
    unlabeled: list[Path] = []
    path = resolve_data(args.data, world) if args.data else None
    with all_or_none(world):
        splits = load_splits(task, path, skipped, args.columns, unlabeled)
        tested = "other files" if "test" in splits else "a part of the training data"
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
            *[
                f"{file}: not used, because it has no labels; test scores are of {tested}"
                for file in unlabeled
            ],
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
    task: Task, folder: Path, train: list[Any], args: FineTuneOptions, run: Run
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, list[str]]:
    """The model to train, its tokenizer, and the names of its labels.

    A collective call. With --strategy fsdp only rank 0 has the weights. Raises HpctrainError if the model
    cannot be trained with these options, or not in the memory of this rank.
    """
    with all_or_none(run.world):
        if args.compile:
            check_compiler(run.world.rank)
        check_memory(folder, args, run.world, run.device)
        tokenizer = load_tokenizer(folder)
        labels, origin = choose_labels(task, folder, train)
        # shard() takes weights from rank 0; peft needs some
        empty = args.strategy == "fsdp" and run.world.rank != 0 and not args.lora_from
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


def prepare_steps(
    task: Task, model: PreTrainedModel, labels: list[str], train: Features, args: FineTuneOptions, run: Run
) -> Steps:
    """What a step computes; with --compile, the model is compiled at the first one. A collective call."""
    weights = balance_classes(labels, train, run) if args.class_weights else None
    # rank 0 decides, because others may have a model without weights
    needs_none = run.world.rank == 0 and task.pipeline_tag == "text-generation" and not needs_mask(model)
    masked = not broadcast(run.world, needs_none)
    steps = Steps(task, model, labels, args, run, class_weights=weights, masked=masked)
    if args.compile:
        compile_training(model, dynamic=True, by_block=True)  # batches are as long as their longest text
    return steps


def balance_classes(labels: list[str], train: Features, run: Run) -> Tensor:
    """The weight of each class, [labels]: examples / (classes * examples of the class), as in scikit-learn.

    Only the classes of the training set count; a class that only the model has gets 0. Prints all weights.
    """
    counts = torch.bincount(torch.from_numpy(train.values["labels"].copy()), minlength=len(labels))
    present = counts > 0
    weights = torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 0.0)
    for label, count, weight in zip(labels, counts.tolist(), weights.tolist(), strict=True):
        run.print(f"class {formats.excerpt(label)}: {count:,} training examples, weight {weight:.4g}")
    return weights


# --- training ---


def train(task: Task, steps: Steps, texts: TrainingTexts, args: FineTuneOptions, run: Run) -> None:
    """Train the epochs that are left, validate after each of them, and load the best weights."""
    model, group = steps.model, steps.group
    total = 0
    if args.epochs:
        total = args.epochs * steps_per_epoch(len(texts), args.batch_size, group, args.accumulate)
    run.count_flops(lambda: count_text_flops(model, texts.lengths, run_empty))
    parallel = share_model(steps, texts, args, run)
    compute_loss = partial(steps.compute_loss, parallel)
    optimizer = make_optimizer(model, args.lr)
    run.track(model=parallel, optimizer=optimizer)
    run.best.by, run.best.lowest = f"validation_{steps.metric}", not task.higher_is_better
    run.best.patience = args.patience
    graphs = StepGraphs(model.parameters(), compute_loss) if args.cuda_graphs else None

    def order(epoch: int) -> Tensor:
        parts = group.size * args.accumulate
        return training_batches_by_length(texts.lengths, args.batch_size, args.seed, epoch, parts)

    for _ in run.epochs(args.epochs, fixed=True):
        for batch in run.batches(texts, args.batch_size, accumulate=args.accumulate, order=order):
            lr = args.lr * schedule.linear(run.global_step, total, args.warmup)
            for parameters in optimizer.param_groups:
                parameters["lr"] = lr
            seed_step(args.seed, run.epoch, batch.number, group)  # a group of ranks has the same dropout
            if steps.counts_tokens:
                run.count_tokens(batch.real_tokens, batch.attention_mask.numel())
            with run.autocast():
                loss = graphs.run(batch) if graphs else compute_loss(batch)
            if graphs:
                graphs.give_gradients()
            else:
                run.backward(loss)
            run.update(optimizer, clip=CLIP)
            run.step(loss, learning_rate=lr)
            if run.is_due(args.eval_every):
                run.score(**steps.evaluate("validation"))
        if not run.best.has_stalled:
            run.score(**steps.evaluate("validation"))

    if run.best.has_stalled and run.epoch < args.epochs:
        run.print(f"stopped after {run.best.latest}: no better {run.best.by} for {args.patience} evaluations")
    run.load_best()


def share_model(steps: Steps, texts: TrainingTexts, args: FineTuneOptions, run: Run) -> nn.Module:
    """The model for all ranks: with DDP, or sharded and perhaps split over groups of ranks."""
    if args.strategy == "ddp":

        def compute_loss(parallel: nn.Module) -> Tensor:
            return steps.compute_loss(parallel, texts[Selection(torch.tensor([0]))].to(run.device))

        options: dict[str, Any] = {"example": compute_loss, **LEAN}
        return run.prepare(steps.model, **options)
    options = {"dtype": HALVES.get(args.precision), "cpu_offload": args.cpu_offload}
    if args.tensor_parallel > 1:
        from hpctrain.nlp.models.tensor_parallel import choose_styles  # few runs need it

        with all_or_none(run.world):
            options |= {
                "tensor_parallel": args.tensor_parallel,
                "styles": choose_styles(steps.model, args.tensor_parallel),
            }
    return run.prepare(steps.model, strategy="fsdp", **options)


def run_empty(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """The output of a model without values, for a text of this length in tokens."""
    # without a cache, transformers looks at positions, which have no values, for several texts in a row
    model.config.use_cache = True
    return model(input_ids=torch.zeros(1, length, dtype=torch.int64, device="meta"))


def score_test_set(steps: Steps, run: Run) -> dict[str, float]:
    """The scores of the test set, which has no other use. They are those of the result."""
    scores = steps.evaluate("test")
    for name in [name for name, value in scores.items() if not math.isfinite(value)]:
        run.print(f"{name} is {scores.pop(name)}: left out")  # a score is optional, the model is not
    run.scores.clear()
    run.score(**scores)
    return scores
