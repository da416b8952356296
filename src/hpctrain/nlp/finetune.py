"""Fine-tune a model of transformers for one of the five tasks: the same flags, steps and files for all of them.

run() reads from top to bottom; what differs between the tasks is in their files (task.py says what).

Each step computes the examples of --batch-size, on however many ranks and in however many parts (--accumulate). The loss is
the mean over the labels of the whole batch, wherever they are: ranks have as many examples each, but not as many tokens.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from hpctrain import checkpoint
from hpctrain.lightning_plugins import make_trainer, quiet
from hpctrain.nlp import batches, data, models
from hpctrain.nlp.features import Features, cached, fingerprint
from hpctrain.nlp.task import Task
from hpctrain.run import Run, positive, steps_per_epoch, trainer_parser, versions
from hpctrain.world import HpctrainError, UsageError, World, all_or_none, choose_device, gather, process_group

# A new model learns faster than one that has learned before; the samples are small, and take many steps.
DEFAULTS = {"epochs": 3, "batch_size": 32, "lr": 5e-5}
FROM_SCRATCH = {"epochs": 3, "batch_size": 32, "lr": 5e-4}
SAMPLES = {"epochs": 20, "batch_size": 8, "lr": 1e-3}


def run(task: Task, world: World, arguments: list[str]) -> None:
    """Fine-tune as the flags at the foot of this file say."""
    args = parse(task, arguments)
    quiet()
    device = choose_device(world, args.device)
    with process_group(world, device):
        examples = read(task, args, world)
        run = Run(world, f"nlp.{task.name}", args, device)
        folder = start(task, args, run, examples["train"])
        with all_or_none(world):
            tokenizer = models.tokenizer_of(folder)
            labels = label_names(task, folder, examples)
            model = load_model(task, folder, tokenizer, labels, args)
            model.config.hpctrain["settings"] = task.settings(examples["train"])
        features = tokenise(task, tokenizer, labels, examples, args, run)

        padding = {**task.padding, "input_ids": tokenizer.pad_token_id}
        epoch = steps_per_epoch(len(features["train"].lengths), args.batch_size, world, args.accumulate) if args.epochs else 0
        module = FineTune(task, model, labels, args, run, steps=args.epochs * epoch)
        trainer = make_trainer(run, args, device, bare=lambda module: module.model, accumulate_grad_batches=args.accumulate)
        if args.epochs:
            run.resume(device, args.epochs)
            trainer.fit(
                module,
                loader(features["train"], padding, Shuffled(features["train"], args, world)),
                module.evaluation("validation", examples, features, padding),
                ckpt_path=run.resume_from,
            )
            if module.best["epoch"] != args.epochs:
                with all_or_none(world):
                    best = checkpoint.load(checkpoint.path_of(run.folder, module.best["epoch"]), torch.device("cpu"))
                model.load_state_dict(best["model"])
                run.print(f"epoch {module.best['epoch']} has the best validation_{task.score}: it is tested and kept")
        # The test set is looked at here, once.
        trainer.test(module, module.evaluation("test", examples, features, padding), verbose=False)
        scores = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("test_")}
        run.metrics(epoch=args.epochs, step=trainer.global_step, **scores)
        with all_or_none(world):
            if world.rank == 0:
                save(task, model, tokenizer, args, run, scores, examples["test"])
        run.finish(model, **scores)
        run.print(f"the model is {run.folder}/model: hpctrain predict {run.folder}/model {' '.join(map(str.upper, task.inputs))}")


# --- before training ---


def read(task: Task, args: argparse.Namespace, world: World) -> dict[str, list[Any]]:
    """The examples for training, validation and test; validation is a part of those for training where no file has it."""
    skipped: list[HpctrainError] | None = None if args.strict else []
    with all_or_none(world):
        found = data.load(task.name, args.data, skipped)
        if "test" not in found:  # --data is one file; its test set does not move with --seed
            found["train"], found["test"] = data.split(found["train"], args.validation_split, seed=0)
        if "validation" not in found:
            found["train"], found["validation"] = data.split(found["train"], args.validation_split, args.seed)
        found = {name: found[name][: args.limit] for name in ("train", "validation", "test")}
    if skipped and world.rank == 0:
        print(data.said(skipped), flush=True)
    return found


def start(task: Task, args: argparse.Namespace, run: Run, train: list[Any]) -> Path:
    """The folder of the model that training starts from; --from-scratch makes it in the run folder. A collective call."""
    if args.model:
        return models.local(args.model, run.world)
    folder = run.folder / "from-scratch"
    with all_or_none(run.world):
        if run.world.rank == 0 and not folder.exists():  # it is there where a run is resumed
            texts = list(dict.fromkeys(text for example in train for text in task.texts(example)))
            pieces = models.from_scratch(folder, args.from_scratch, task.kind, texts, args.seed, args.max_length)
            run.print(f"a new {task.kind} ({args.from_scratch}) with {pieces:,} pieces of the training texts")
    return folder


def label_names(task: Task, folder: Path, examples: dict[str, list[Any]]) -> list[str]:
    """Those of a model that has been fine-tuned for this task before, if they cover the data; else those of the training data."""
    needed = task.labels(examples["train"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("hpctrain", {}).get("task") == task.name:
        known = config["hpctrain"]["labels"]
        if set(needed) <= set(known):
            return known
    if len(needed) == 1:
        raise HpctrainError(f"all training examples have the label {needed[0]!r}: there is nothing to learn, look at --data")
    return needed


def load_model(
    task: Task, folder: Path, tokenizer: PreTrainedTokenizerFast, labels: list[str], args: argparse.Namespace
) -> torch.nn.Module:
    """The model with a head for these labels, which is new unless the folder has one of this size; it depends on --seed alone."""
    torch.manual_seed(args.seed)
    heads = {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": {x: i for i, x in enumerate(labels)}}
    try:
        model, found = task.model.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # a head for other labels
            output_loading_info=True,
            **(heads if labels else {}),
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise HpctrainError(
            f"{folder}: not a model for {task.name} ({str(error).splitlines()[0]}): take another --model"
        ) from error
    # The head may be new, and the pooler, which models that only guess words do not have; not what is under them.
    missing = sorted(
        name for name in found["missing_keys"] if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name
    )
    if missing:
        raise HpctrainError(
            f"{folder}: {len(missing)} weights of a {model.config.model_type} are not in it, such as {missing[0]}"
        )
    # RoBERTa's positions begin at 2, and its tokenizer knows how many there are for tokens.
    places = min(getattr(model.config, "max_position_embeddings", tokenizer.model_max_length), tokenizer.model_max_length)
    if args.max_length > places:
        raise HpctrainError(f"--max-length {args.max_length}, but {folder} has {places} positions: take --max-length {places}")
    model.train()  # from_pretrained() switches dropout off, and Lightning leaves that as it is
    model.config.use_cache = False  # of keys and values, which training has no use for
    model.config.hpctrain = {"task": task.name, "labels": labels, "max_length": args.max_length, "stride": args.stride}
    return model


def tokenise(
    task: Task,
    tokenizer: PreTrainedTokenizerFast,
    labels: list[str],
    examples: dict[str, list[Any]],
    args: argparse.Namespace,
    run: Run,
) -> dict[str, Features]:
    """The features of each set, out of the cache or made now; says how many they are, and what they lack. A collective call.

    Raises HpctrainError with --strict where texts are too long, or have a label that training never had.
    """
    features = {}
    vocabulary = (tokenizer.backend_tokenizer.to_str(), tokenizer.model_input_names)
    for name, part in examples.items():
        began = time.monotonic()
        content = [example[:-1] for example in part]  # everything but the place in a file
        key = fingerprint(task.name, vocabulary, labels, args.max_length, args.stride, content)
        make = partial(task.tokenise, tokenizer, part, labels, args.max_length, args.stride)
        found = features[name] = cached(key, make, run.world)
        lengths = found.lengths
        windows = f" in {len(lengths):,} windows" if len(lengths) != len(part) else ""
        run.print(
            f"{name}: {len(part):,} examples{windows} are {lengths.sum():,} tokens, {lengths.mean():.1f} each, the longest "
            f"{lengths.max()} ({time.monotonic() - began:.1f} s)"
        )

        too_long = [part[i] for i in found.cut]
        unseen = [example for example in part if not set(task.labels([example])) <= set(labels)] if labels else []
        for lacking, why in (
            (too_long, f"too long for --max-length {args.max_length}, and cut"),
            (unseen, "with a label that training never had, so any answer is wrong"),
        ):
            if lacking:
                text = f"{name}: {len(lacking):,} of {len(part):,} examples {why}, the first at {lacking[0].place}"
                with all_or_none(run.world):
                    if args.strict:
                        raise HpctrainError(f"{text}: mend it, or leave --strict out")
                run.print(text)
    return features


# --- batches ---


class Batches(torch.utils.data.Dataset):
    """What a sampler names a batch at a time: indices of features, and what else the batch should hold."""

    def __init__(self, features: Features, padding: dict[str, int]) -> None:
        self._features, self._padding = features, padding

    def __getitem__(self, item: tuple[Tensor, dict[str, Any]]) -> dict[str, Any]:
        index, more = item
        return self._features.batch(index, self._padding) | more


def loader(features: Features, padding: dict[str, int], sampler: Iterable[Any]) -> DataLoader:
    """Batches of features, in memory that a GPU reads while it computes."""
    return DataLoader(Batches(features, padding), sampler=sampler, batch_size=None, pin_memory=torch.cuda.is_available())


class Shuffled(torch.utils.data.Sampler):
    """The batches of this rank in the epoch that Lightning sets, counted from 0 there and from 1 here."""

    def __init__(self, features: Features, args: argparse.Namespace, world: World) -> None:
        self._features, self._args, self._world = features, args, world
        self._steps = steps_per_epoch(len(features.lengths), args.batch_size, world, args.accumulate)
        self._epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch, also when it resumes."""
        self._epoch = epoch + 1

    def __len__(self) -> int:
        return self._steps * self._args.accumulate

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        args, world = self._args, self._world
        parts = world.size * args.accumulate
        units = torch.from_numpy(self._features.values["units"].copy())
        for batch in batches.by_length(self._features.lengths, args.batch_size, args.seed, self._epoch, parts):
            # The model gives the mean over the units of its part. DDP takes the mean over the ranks and Lightning that over the
            # parts of a step; with this factor it becomes the mean over the units of the whole batch.
            total = int(units[batch].sum())
            for index in batch[world.rank * args.accumulate : (world.rank + 1) * args.accumulate]:
                yield index, {"weight": int(units[index].sum()) * parts / total}


# --- training and evaluation ---


class FineTune(LightningModule):
    """A model and how it is trained and scored; `args` are the options of the command line, `steps` those of all epochs."""

    def __init__(
        self, task: Task, model: torch.nn.Module, labels: list[str], args: argparse.Namespace, run: Run, steps: int
    ) -> None:
        super().__init__()
        self.model = model
        self.best: dict[str, float] = {"epoch": 0, "score": -math.inf, "loss": math.inf}
        self._task, self._labels, self._args, self._run, self._steps = task, labels, args, run, steps
        self._sets: dict[str, tuple[list[Any], Features]] = {}
        self._predictions: list[tuple[int, Any]] = []

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, with no decay of biases and norms; the learning rate warms up linearly and then goes down to 0, step by step."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self._args.lr, fused=True)
        warmup = round(self._args.warmup * self._steps)
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, warmup, self._steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """To a norm of 1. Lightning's own refuses fused optimizers under bf16, for fear of a scaler that bf16 does without."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        """What dropout leaves out depends on seed, step and rank, and on nothing before, so that a resumed run does the same."""
        torch.manual_seed(hash((self._args.seed, self.current_epoch, batch_idx, self._run.world.rank)))

    def forward(self, batch: dict[str, Any]) -> transformers.utils.ModelOutput:
        """The model's output for a batch; what is not its input stays out of it."""
        ours = {"units", "index", "weight", *self._task.extra}
        return self.model(**{name: value for name, value in batch.items() if name not in ours})

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss of a part of a batch; see Shuffled for the weight."""
        return self._task.loss(self(batch), batch) * batch["weight"]

    def evaluation(
        self, name: str, examples: dict[str, list[Any]], features: dict[str, Features], padding: dict[str, int]
    ) -> DataLoader:
        """The batches of this rank of the validation or the test set."""
        self._sets[name] = (examples[name], features[name])
        world, found = self._run.world, features[name]
        share = max(1, self._args.batch_size // world.size)
        # A rank that has no example gets an empty batch: without any, Lightning leaves it out of what all ranks do together.
        mine = list(batches.for_evaluation(found.lengths, share, world)) or [torch.empty(0, dtype=torch.int64)]
        sampler = [(index, {"index": index}) for index in mine]
        return loader(found, padding, sampler)

    def on_validation_epoch_start(self) -> None:
        """Begin to count."""
        self._predictions, self._sums = [], torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Keep what the model says, and the sum of the loss."""
        if not len(batch["index"]):
            return
        output = self(batch)
        units = batch["units"].sum()
        if units:
            self._sums += torch.stack([self._task.loss(output, batch) * units, units])
        self._predictions += zip(batch["index"].tolist(), self._task.predict(output, batch), strict=True)

    def on_validation_epoch_end(self, name: str = "validation") -> None:
        """Score all answers together, on one rank: no example is counted twice, none left out, whatever the number of ranks."""
        world = self._run.world
        examples, features = self._sets[name]
        if world.size > 1:
            dist.all_reduce(self._sums)
        everybody = gather(world, self._predictions)  # small: see Task.predict
        scores: list[dict[str, float]] = [{}]
        if world.rank == 0:
            predictions = [said for _, said in sorted((pair for part in everybody for pair in part), key=lambda pair: pair[0])]
            scores = [self._task.metric(examples, self._task.answers(examples, features, predictions, self._labels))]
        if world.size > 1:
            dist.broadcast_object_list(scores)
        scores[0] = {"loss": (self._sums[0] / self._sums[1]).item(), **scores[0]}
        # Lightning keeps float32, which is not enough to compare runs by.
        self.log_dict({f"{name}_{key}": torch.tensor(value, dtype=torch.float64) for key, value in scores[0].items()})
        score = scores[0][self._task.score] * (1 if self._task.higher_is_better else -1)
        loss = scores[0]["loss"]  # decides where few examples make scores equal
        if name == "validation" and (score, -loss) > (self.best["score"], -self.best["loss"]):
            self.best = {"epoch": self.current_epoch + 1, "score": score, "loss": loss}

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_test_epoch_end(self) -> None:
        """The same for the test set."""
        self.on_validation_epoch_end("test")

    def on_save_checkpoint(self, state: dict[str, Any]) -> None:
        """Which epoch was the best so far."""
        state["best"] = self.best

    def on_load_checkpoint(self, state: dict[str, Any]) -> None:
        """The same."""
        self.best = state["best"]


def save(
    task: Task,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    args: argparse.Namespace,
    run: Run,
    scores: dict[str, float],
    test: list[Any],
) -> None:
    """The result: a folder that from_pretrained() loads, with a card that has the numbers of this run. On one rank."""
    model.config.use_cache = True
    card = models.card(
        title=f"{task.title}: {run.folder}",
        task=task,
        base=args.model or f"from scratch ({args.from_scratch})",
        data=str(args.data or "the samples of hpctrain"),
        scores=scores,
        options={key: str(value) for key, value in vars(args).items()},
        versions=versions() | {"transformers": transformers.__version__},
    )
    shown = task.show(model, tokenizer, test)
    if shown:
        card += "\n## Samples\n\n" + "".join(f"- {text}\n" for text in shown)
        for text in shown:
            run.print(f"sample: {text}")
    models.save(run.folder / "model", model, tokenizer, card)


def parse(task: Task, arguments: list[str]) -> argparse.Namespace:
    """The flags, which are the same for all five tasks. Raises UsageError."""
    parser = trainer_parser(f"nlp.{task.name}", f"{task.title}: fine-tune a model of transformers, on any number of ranks.")
    add = parser.add_argument
    add("--data", type=Path, help="folder of the data as they are published, or one file to divide (default: a small sample)")
    add("--model", metavar="NAME", help="name on the Hugging Face hub, such as beomi/kcbert-base, or a local folder")
    add(
        "--from-scratch",
        metavar="CONFIG",
        help=f"a new model instead: {', '.join(models.SIZES)}, or a config.json (default for the sample: tiny)",
    )
    add("--epochs", type=int, help="passes over the training data; 0 scores the test set only (default: 3; the sample 20)")
    add("--batch-size", type=positive(int), help="global batch, shared by all ranks (default: 32; the sample 8)")
    add(
        "--accumulate",
        type=positive(int),
        default=1,
        metavar="N",
        help="compute each batch in N parts, to save memory (default: 1)",
    )
    add("--lr", type=positive(float), help="highest learning rate (default: 5e-5; from scratch 5e-4, the sample 1e-3)")
    add(
        "--warmup", type=float, default=0.1, metavar="SHARE", help="of all steps, in which --lr is reached (default: %(default)s)"
    )
    add("--max-length", type=positive(int), default=task.max_length, help="tokens of a text at most (default: %(default)s)")
    if task.stride:
        add(
            "--stride",
            type=positive(int),
            help=f"tokens that two windows share (default: {task.stride}, at most a third of them)",
        )
    add(
        "--validation-split",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of the training data where no file is for validation (default: %(default)s)",
    )
    add("--limit", type=positive(int), metavar="N", help="the first N examples of each set only, for a quick try")
    add(
        "--strict",
        action="store_true",
        help="a line that cannot be read, a text that is too long, a new label: an error, not counted",
    )
    add(
        "--precision",
        choices=["auto", "fp32", "bf16"],
        default="auto",
        help="bf16: autocast; auto: bf16 on a GPU that has it (default: auto)",
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: a GPU where there is one)")
    args = parser.parse_args(arguments)
    args.stride = getattr(args, "stride", None) or min(task.stride, args.max_length // 3)
    if args.model and args.from_scratch:
        raise UsageError("--model and --from-scratch: give one of them")
    if not args.model and not args.from_scratch:
        if args.data:
            raise UsageError(
                "--data without a model: give --model NAME, such as beomi/kcbert-base, or --from-scratch "
                f"with a size ({', '.join(models.SIZES)})"
            )
        args.from_scratch = "tiny"
    for name, value in (DEFAULTS if args.model else FROM_SCRATCH if args.data else SAMPLES).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.epochs < 0 or not 0 <= args.warmup <= 1:
        raise UsageError(f"--epochs {args.epochs} --warmup {args.warmup}: epochs are 0 or more, the warm-up a share from 0 to 1")
    if args.precision == "auto":
        bf16 = args.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bf16" if bf16 else "fp32"
    return args
