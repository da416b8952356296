"""Fine-tune a model of transformers for a task. All tasks share these steps; task.py has the interface of a task.

fine_tune() reads from top to bottom. The options are in options.py, the training and evaluation steps in lightning_module.py,
the batches in sampling.py.

Each step computes --batch-size examples, on any number of ranks and in any number of parts (--accumulate). The loss is the mean
over the labels of the whole batch: ranks have equal numbers of examples, but not of tokens.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from hpctrain import checkpoint
from hpctrain.batches import steps_per_epoch
from hpctrain.errors import HpctrainError, first_line
from hpctrain.lightning_plugins import make_trainer, quiet
from hpctrain.nlp import data
from hpctrain.nlp.features import Features, load_or_make, make_cache_key
from hpctrain.nlp.hub import resolve_model
from hpctrain.nlp.lightning_module import FineTuneModule
from hpctrain.nlp.model_folder import describe_pickle_error, load_tokenizer, make_card, save_model
from hpctrain.nlp.options import parse_options
from hpctrain.nlp.sampling import BatchSampler, make_loader
from hpctrain.nlp.scratch import create_model
from hpctrain.nlp.task import Task
from hpctrain.rendezvous import all_or_none, process_group
from hpctrain.run import Run, versions
from hpctrain.world import World, choose_device


def fine_tune(task: Task, world: World, arguments: list[str]) -> None:
    """Run `hpctrain nlp.<task>` with these arguments: read, tokenize, train, test, and save the model of the best epoch."""
    args = parse_options(task, arguments)
    quiet()
    device = choose_device(world, args.device)
    with process_group(world, device):
        examples = read_examples(task, args, world)
        run = Run(world, f"nlp.{task.name}", args, device)
        folder = get_initial_model(task, args, run, examples["train"])
        with all_or_none(world):
            tokenizer = load_tokenizer(folder)
            labels = choose_labels(task, folder, examples["train"])
            model = load_model(task, folder, tokenizer, labels, args)
            model.config.hpctrain["settings"] = task.collect_settings(examples["train"])
        features = tokenize_splits(task, tokenizer, labels, examples, args, run)

        padding = {**task.padding, "input_ids": tokenizer.pad_token_id}
        train = features["train"]
        epoch_steps = steps_per_epoch(len(train.lengths), args.batch_size, world, args.accumulate) if args.epochs else 0
        module = FineTuneModule(task, model, labels, args, run, steps=args.epochs * epoch_steps)
        trainer = make_trainer(run, args, device, bare=lambda module: module.model, accumulate_grad_batches=args.accumulate)
        epochs, steps = args.epochs, 0
        if args.epochs:
            state = run.resume(device, args.epochs, model, "state_dict")
            if state and state["epoch"] >= args.epochs:  # resumed after the last epoch
                model.load_state_dict(state["model"])
                module.on_load_checkpoint(state)
                epochs, steps = state["epoch"], state["global_step"]
            else:
                trainer.fit(
                    module,
                    make_loader(train, padding, BatchSampler(train, world, args.batch_size, args.seed, args.accumulate)),
                    module.make_evaluation_loader("validation", examples, features, padding),
                    ckpt_path=run.resume_from,
                )
                steps = trainer.global_step
            load_best_epoch(task, module, epochs, run)
        # The only use of the test set.
        trainer.test(module, module.make_evaluation_loader("test", examples, features, padding), verbose=False)
        scores = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("test_")}
        run.metrics(epoch=epochs, step=steps, **scores)
        with all_or_none(world):
            if world.rank == 0:
                save_result(task, model, tokenizer, args, run, scores, examples["test"])
        run.finish(model, **scores)
        inputs = " ".join(map(str.upper, task.inputs))
        run.print(f"model saved in {run.folder}/model; use it: hpctrain predict {run.folder}/model {inputs}")


# --- before training ---


def read_examples(task: Task, args: argparse.Namespace, world: World) -> dict[str, list[Any]]:
    """The examples of "train", "validation" and "test"; a split without a file is taken from the training data."""
    skipped: list[HpctrainError] | None = None if args.strict else []
    with all_or_none(world):
        splits = data.load_splits(task, args.data, skipped)
        if "test" not in splits:  # --data is a single file; its test set must not depend on --seed
            splits["train"], splits["test"] = data.split_examples(task, splits["train"], args.validation_split, seed=0)
        if "validation" not in splits:
            splits["train"], splits["validation"] = data.split_examples(task, splits["train"], args.validation_split, args.seed)
        splits = {name: splits[name][: args.limit] for name in ("train", "validation", "test")}
    if skipped and world.rank == 0:
        print(data.describe_skipped(skipped), flush=True)
    return splits


def get_initial_model(task: Task, args: argparse.Namespace, run: Run, train: list[Any]) -> Path:
    """The folder of the model that training starts from; --from-scratch creates it in the run folder. A collective call."""
    if args.model:
        return resolve_model(args.model, run.world)
    folder = run.folder / "from-scratch"
    with all_or_none(run.world):
        if run.world.rank == 0 and not folder.exists():  # it exists if the run is resumed
            texts = list(dict.fromkeys(text for example in train for text in task.get_texts(example)))
            vocabulary = create_model(folder, args.from_scratch, task.kind, texts, args.seed, args.max_length)
            run.print(
                f"created a {task.kind} model from scratch ({args.from_scratch}); its tokenizer has {vocabulary:,} subword "
                "tokens, trained on the training texts"
            )
    return folder


def choose_labels(task: Task, folder: Path, train: list[Any]) -> list[str]:
    """The label names of a model already fine-tuned for this task if they cover the data, else those of the training data."""
    needed = task.collect_labels(train)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("hpctrain", {}).get("task") == task.name:
        known = config["hpctrain"]["labels"]
        if set(needed) <= set(known):
            return known
    if len(needed) == 1:
        raise HpctrainError(f"all training examples have the same label, {needed[0]!r}: check --data")
    return needed


def load_model(
    task: Task, folder: Path, tokenizer: PreTrainedTokenizerFast, labels: list[str], args: argparse.Namespace
) -> torch.nn.Module:
    """The model with a head for these labels, in training mode. A head that the folder lacks is initialized from --seed.

    Raises HpctrainError if the folder has no model for this task, or the model is shorter than --max-length.
    """
    torch.manual_seed(args.seed)
    heads = {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": {x: i for i, x in enumerate(labels)}}
    try:
        model, loading = task.model.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=False,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # of a head for other labels
            output_loading_info=True,
            **(heads if labels else {}),
        )
    except Exception as error:  # the loaders of the many file formats raise exceptions of many kinds
        raise HpctrainError(
            describe_pickle_error(folder, error)
            or f"{folder}: not a model for nlp.{task.name} ({first_line(error)}): give another --model"
        ) from error
    # The head may be missing, and the pooler, which masked language models do not have; but nothing below them.
    missing = sorted(
        name for name in loading["missing_keys"] if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name
    )
    if missing:
        raise HpctrainError(
            f"{folder}: {len(missing)} weights of the {model.config.model_type} model are missing, such as {missing[0]}: "
            "fetch or copy it again"
        )
    # RoBERTa's positions begin at 2; the model_max_length of its tokenizer is the number left for tokens.
    positions = min(getattr(model.config, "max_position_embeddings", tokenizer.model_max_length), tokenizer.model_max_length)
    if args.max_length > positions:
        raise HpctrainError(
            f"--max-length {args.max_length} is too long for {folder}, which has {positions} positions: "
            f"give --max-length {positions}"
        )
    model.train()  # from_pretrained() turns dropout off, and Lightning does not turn it on
    model.config.use_cache = False  # the cache of keys and values is for generation only
    model.config.hpctrain = {"task": task.name, "labels": labels, "max_length": args.max_length, "stride": args.stride}
    return model


def tokenize_splits(
    task: Task,
    tokenizer: PreTrainedTokenizerFast,
    labels: list[str],
    examples: dict[str, list[Any]],
    args: argparse.Namespace,
    run: Run,
) -> dict[str, Features]:
    """The features of each split, from the cache or made now; prints their sizes and problems. A collective call.

    Raises HpctrainError with --strict if texts are truncated or have a label that is not in the training data.
    """
    features = {}
    vocabulary = (tokenizer.backend_tokenizer.to_str(), tokenizer.model_input_names)
    for name, part in examples.items():
        start = time.monotonic()
        content = [example[:-1] for example in part]  # everything but the location in a file
        key = make_cache_key(task.name, vocabulary, labels, args.max_length, args.stride, content)
        make = partial(task.tokenize, tokenizer, part, labels, args.max_length, args.stride)
        made = features[name] = load_or_make(key, make, run.world)
        lengths = made.lengths
        windows = f" in {len(lengths):,} windows" if len(lengths) != len(part) else ""
        run.print(
            f"{name}: {len(part):,} examples{windows}, {lengths.sum():,} tokens (mean {lengths.mean():.1f}, longest "
            f"{lengths.max()}), tokenized or loaded in {time.monotonic() - start:.1f} s"
        )

        truncated = [part[i] for i in made.cut]
        unseen = [example for example in part if not set(task.collect_labels([example])) <= set(labels)] if labels else []
        for affected, problem in (
            (truncated, f"too long for --max-length {args.max_length} and truncated"),
            (unseen, "with a label that is not in the training data, so any answer is wrong"),
        ):
            if affected:
                text = f"{name}: {len(affected):,} of {len(part):,} examples {problem}; the first: {affected[0].location}"
                with all_or_none(run.world):
                    if args.strict:
                        raise HpctrainError(f"{text}: fix the data, or run without --strict")
                run.print(text)
    return features


# --- after training ---


def load_best_epoch(task: Task, module: FineTuneModule, epochs: int, run: Run) -> None:
    """Load the weights of the epoch with the best validation score into the model, which has the last. A collective call."""
    best = module.best["epoch"]
    if best == epochs:
        return
    path = checkpoint.path_of(run.folder, best)
    if run.resume_from and not path.exists():  # an epoch of the earlier run, whose folder may be another
        path = checkpoint.path_of(run.resume_from.parent.parent, best)
    with all_or_none(run.world):
        state = checkpoint.load(path, torch.device("cpu"))
    module.model.load_state_dict(state["model"])
    run.print(f"epoch {best} has the best validation_{task.selection_metric}: using its weights")


def save_result(
    task: Task,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    args: argparse.Namespace,
    run: Run,
    scores: dict[str, float],
    test: list[Any],
) -> None:
    """Save the model folder, with a model card that has the scores of this run. On one rank."""
    model.config.use_cache = True
    card = make_card(
        title=f"{task.title}: {run.folder}",
        task=task,
        base=args.model or f"from scratch ({args.from_scratch})",
        data=str(args.data or "the sample data of hpctrain"),
        scores=scores,
        options={key: str(value) for key, value in vars(args).items()},
        versions=versions() | {"transformers": transformers.__version__},
    )
    samples = task.generate_samples(model, tokenizer, test)
    if samples:
        card += "\n## Samples\n\n" + "".join(f"- {text}\n" for text in samples)
        for text in samples:
            run.print(f"sample: {text}")
    save_model(run.folder / "model", model, tokenizer, card)
