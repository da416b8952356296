"""Train on film reviews in four ways that take turns in one run: a tutorial's loop, Hugging Face's Trainer
with its defaults and at its best, hpctrain.

    python benchmarks/nlp.py --data nsmc
    torchrun --nproc-per-node 2 benchmarks/nlp.py --data nsmc
    python benchmarks/nlp.py --data nsmc --size base --precision bf16 --kernels      on a GPU

All ways get the same tokens, initial weights, AdamW, learning rates, gradient clipping, batch size, and
number of examples. They differ in which examples share a batch, in the padding, and in the loop around the
model. Speeds are those of that loop alone: from the first forward pass to the end of the last step; whole
commands are compared by nlp_commands.py. Each turn has its own seed, so that the losses show what is chance.
With --kernels, all ways first train on as many examples again that are not timed: kernels are compiled and
recorded, except those of shapes that come later. Training ends with the last timed step, before any
checkpoint.

On a shared machine, set OMP_NUM_THREADS=1: threads that wait for each other waste most of their time there.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import records
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.distributed.device import choose_device
from hpctrain.distributed.rendezvous import all_or_none, broadcast, process_group
from hpctrain.distributed.world import World, detect
from hpctrain.nlp.batches.features import Features, load_or_make, make_cache_key
from hpctrain.nlp.batches.sampling import Selection, TrainingTexts, evaluation_batches_by_length
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models.initial_model import load_model
from hpctrain.nlp.models.scratch import SIZES, create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.options import FineTuneOptions
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.task import Task
from hpctrain.nlp.tasks.classify import TASK, Document
from hpctrain.nlp.training import finetune
from hpctrain.nlp.training.finetune import prepare_steps
from hpctrain.parser import positive
from hpctrain.training.run import Run

# Layers, hidden size and vocabulary of KcBERT; the other sizes are those of --from-scratch.
KCBERT = {"base": (12, 768, 30_000), "large": (24, 1024, 30_000)}
RATE, TIMES, OF_OURS = "examples/s", "times as fast as (a)", "hpctrain in times of it"
# The columns of the table.
DIGITS = {
    RATE: 0,
    TIMES: 2,
    OF_OURS: 2,
    "real tokens/s": 0,
    "share of real tokens": 3,
    "evaluation loss": 3,
    "accuracy": 3,
}
WARM_UP = 4  # steps of each way before the first turn, while torch chooses its kernels


See = Callable[[Tensor, Tensor], None]  # shows tokens and attention mask of a batch to the Meter


class Setting(NamedTuple):
    """What all ways have in common."""

    world: World
    device: torch.device
    args: FineTuneOptions
    tokenizer: PreTrainedTokenizerFast
    labels: list[str]
    train: Features
    held_out: Features
    texts: list[Document]  # of `train`
    untimed: int  # the first steps
    task: Task[Any] = TASK

    @property
    def share(self) -> int:
        """Examples of a batch on each rank."""
        return self.args.batch_size // self.world.size

    @property
    def steps(self) -> int:
        """Training steps: one epoch."""
        return len(self.train.lengths) // self.args.batch_size

    @property
    def warm_up(self) -> int:
        """Steps in which the learning rate rises."""
        return round(self.args.warmup * self.steps)


def make_rows(features: Features) -> list[dict[str, Any]]:
    """The features as tokenizers of transformers return them: one dictionary of lists for each example."""
    rows = []
    for i, (start, end) in enumerate(zip(features.starts[:-1], features.starts[1:], strict=True)):
        tokens = {name: flat[start:end].tolist() for name, flat in features.tokens.items()}
        values = {name: int(column[i]) for name, column in features.values.items() if name != "units"}
        rows.append(tokens | values | {"attention_mask": [1] * int(end - start)})
    return rows


# --- the ways; each trains the model for one epoch ---


class PaddedDataset(Dataset):
    """All examples padded to --max-length in advance, one at a time."""

    def __init__(self, setting: Setting) -> None:
        self._rows = make_rows(setting.train)
        for row in self._rows:
            missing = setting.args.max_length - len(row["input_ids"])
            for name in row.keys() - {"labels"}:
                row[name] += [setting.tokenizer.pad_token_id if name == "input_ids" else 0] * missing

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: torch.tensor(value) for name, value in self._rows[i].items()}


def train_as_in_tutorials(setting: Setting, model: PreTrainedModel, see: See) -> None:
    """As in notebooks for NSMC: fp32, every review padded to --max-length."""
    args, world = setting.args, setting.world
    torch.manual_seed(args.seed)
    model = model.to(setting.device)
    reviews = PaddedDataset(setting)
    sampler = DistributedSampler(reviews, seed=args.seed, drop_last=True) if world.size > 1 else None
    loader = DataLoader(
        reviews, batch_size=setting.share, shuffle=sampler is None, sampler=sampler, drop_last=True
    )
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=args.lr)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, setting.warm_up, setting.steps)
    parallel = torch.nn.parallel.DistributedDataParallel(model) if world.size > 1 else model
    for batch in loader:
        optimizer.zero_grad()
        see(batch["input_ids"], batch["attention_mask"])
        loss = parallel(**{name: column.to(setting.device) for name, column in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def train_with_trainer(
    setting: Setting, model: PreTrainedModel, see: See, best: bool = False, compiled: bool = False
) -> None:
    """The Trainer of transformers with its defaults, or with the options that make it fastest.

    It pads to the longest text of a batch. `compiled`: with torch.compile, one layer at a time.
    """
    args, on_gpu = setting.args, setting.device.type == "cuda"
    is_causal = "labels" in setting.train.tokens
    multiple = 8 if best and on_gpu else None
    collator = transformers.DataCollatorForSeq2Seq if is_causal else transformers.DataCollatorWithPadding
    pad_rows = collator(setting.tokenizer, pad_to_multiple_of=multiple)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = pad_rows(rows)
        see(batch["input_ids"], batch["attention_mask"])
        return batch

    options: dict[str, Any] = {}
    if best:
        options |= {"train_sampling_strategy": "group_by_length", "optim": "adamw_torch_fused"}
        options |= {"logging_nan_inf_filter": False}  # it waits for the GPU in each step
        options |= {"use_liger_kernel": is_causal and on_gpu and find_spec("liger_kernel") is not None}
        options |= {"dataloader_num_workers": 2 if on_gpu else 0}  # a CPU has no core to spare
    # otherwise it compiles anew for the second length, and again for more
    os.environ["ACCELERATE_DYNAMO_USE_DYNAMIC"] = "true"
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    precision = getattr(torch.backends, "fp32_precision", None)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(args.out),
            use_cpu=not on_gpu,
            bf16=args.precision == "bf16",
            torch_compile=compiled,
            num_train_epochs=1,
            per_device_train_batch_size=setting.share,
            dataloader_drop_last=True,
            learning_rate=args.lr,
            warmup_steps=setting.warm_up,
            weight_decay=0.01,
            seed=args.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            **options,
        ),
        train_dataset=make_rows(setting.train),
        data_collator=collate,
    )
    try:
        trainer.train()
    finally:
        # with torch_compile the Trainer has changed it
        if precision:
            torch.backends.fp32_precision = precision
            torch.set_float32_matmul_precision("highest")  # the default


def train_with_hpctrain(
    setting: Setting,
    model: PreTrainedModel,
    see: See,
    compiled: bool = False,
    graphs: bool = False,
    rounded: bool = True,
) -> None:
    """As `hpctrain nlp.<task>` does; on a GPU with lengths that are rounded up, if `rounded`."""
    args = dataclasses.replace(setting.args, cuda_graphs=graphs, compile=compiled)
    train, task = setting.train, setting.task
    padding = {**task.padding, "input_ids": setting.tokenizer.pad_token_id}
    with Run(f"nlp.{task.name}", **vars(args)) as run:
        steps = prepare_steps(task, model, setting.labels, train, args, run)
        steps.add_set("validation", [], setting.held_out, padding)
        texts = SeenTexts(train, padding, round_up_to=steps.round_up_to if rounded else 0)
        texts.see = see
        finetune.train(task, steps, texts, args, run)


class SeenTexts(TrainingTexts):
    """The training reviews, whose batches the Meter sees."""

    see: See

    def __getitem__(self, item: Selection) -> TextBatch:
        batch = super().__getitem__(item)
        self.see(batch.tokens["input_ids"], batch.attention_mask)
        return batch


WAYS: dict[str, Callable[[Setting, PreTrainedModel, See], None]] = {
    "(a) tutorial": train_as_in_tutorials,
    "(b1) Trainer": train_with_trainer,
    "(b2) Trainer at its best": partial(train_with_trainer, best=True),
    "(b3) Trainer at its best, torch_compile": partial(train_with_trainer, best=True, compiled=True),
    "(c) hpctrain": train_with_hpctrain,
    "(d) hpctrain --compile": partial(train_with_hpctrain, compiled=True),
    "(e1) hpctrain --cuda-graphs": partial(train_with_hpctrain, graphs=True),
    "(e2) hpctrain --compile --cuda-graphs": partial(train_with_hpctrain, compiled=True, graphs=True),
}


# --- measuring ---


class Enough(Exception):
    """The last timed step is done."""


class Meter:
    """Counts the tokens of the batches, in see(), and times the steps, with hooks of torch.

    The hooks are the same for all ways.
    """

    def __init__(self, setting: Setting, model: PreTrainedModel) -> None:
        self._setting, self._done = setting, 0
        # examples, tokens without padding, and all tokens of each batch
        self._seen: list[tuple[int, int, int]] = []
        self.began = self.ended = float("nan")
        self._hooks = [register_optimizer_step_post_hook(self._step)]
        if not setting.untimed:
            self._hooks.append(model.register_forward_pre_hook(self._start))

    def see(self, tokens: Tensor, mask: Tensor) -> None:
        """Count a batch, before it is on the GPU: input_ids and attention_mask, [b, length].

        In a process of its own, as the workers of a DataLoader are, it does not count.
        """
        self._seen.append((len(tokens), int(mask.sum()), tokens.numel()))

    def _now(self) -> float:
        if self._setting.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _start(self, *_: Any) -> None:
        if math.isnan(self.began):
            self.began = self._now()

    def _step(self, *_: Any) -> None:
        self._done += 1
        if self._done == self._setting.untimed:
            self.began = self._now()
        if self._done == self._setting.steps:
            self.ended = self._now()
            raise Enough

    def read(self) -> dict[str, float]:
        """Remove the hooks; returns the numbers over all ranks."""
        for hook in self._hooks:
            hook.remove()
        setting, timed = self._setting, self._setting.steps - self._setting.untimed
        assert self._done == setting.steps, f"{self._done} of {setting.steps} steps"
        seconds = self.ended - self.began
        examples = timed * setting.args.batch_size
        numbers = {RATE: examples / seconds, "train s": seconds}
        if not self._seen:
            return numbers
        # The last ones: hpctrain arranges DDP's buckets with an example of the first batch, which it reads
        # twice.
        total = torch.tensor(self._seen[: -timed - 1 : -1], device=setting.device).sum(0)
        if setting.world.size > 1:
            dist.all_reduce(total)
        counted, real, tokens = total.tolist()
        assert counted == examples, f"{counted} examples"
        return numbers | {"real tokens/s": real / seconds, "share of real tokens": real / tokens}


@torch.inference_mode()
def evaluate(setting: Setting, model: PreTrainedModel) -> dict[str, float]:
    """Loss and accuracy over the held-out reviews in fp32."""
    model.eval()
    world, lengths = setting.world, setting.held_out.lengths
    sums = torch.zeros(3, dtype=torch.float64, device=setting.device)
    for index in evaluation_batches_by_length(lengths, 64, world.rank, world.size):
        features = setting.held_out.batch(index, {"input_ids": setting.tokenizer.pad_token_id})
        batch = features.tokens | features.values | {"attention_mask": features.attention_mask}
        batch = {name: column.to(setting.device) for name, column in batch.items()}
        output = model(**batch)
        right = (output.logits.argmax(1) == batch["labels"]).sum()
        sums += torch.stack(
            [output.loss.double() * len(index), right.double(), right.new_tensor(len(index)).double()]
        )
    if setting.world.size > 1:
        dist.all_reduce(sums)
    loss, right, examples = sums.tolist()
    return {"evaluation loss": loss / examples, "accuracy": right / examples}


def measure(setting: Setting, way: str, seed: int, out: Path) -> dict[str, float]:
    """Train a new model in this way, and evaluate it."""
    args = dataclasses.replace(setting.args, seed=seed, out=out)
    setting = setting._replace(args=args)
    assert args.model  # see prepare()
    model = load_model(TASK, Path(args.model), setting.tokenizer, setting.labels, args)
    meter = Meter(setting, model)
    with redirect_stdout(sys.stderr), suppress(Enough):  # the progress of the trainers
        WAYS[way](setting, model, meter.see)
    numbers = meter.read() | evaluate(setting, model.to(setting.device))
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    return numbers


# --- the run ---


def prepare(args: argparse.Namespace, world: World, device: torch.device, folder: Path) -> Setting:
    """Write tokenizer and initial weights into `folder`, which all ranks share, and tokenize the reviews."""
    reviews = load_splits(TASK, args.data, [])  # malformed lines are skipped
    texts = reviews["train"]
    with all_or_none(world):  # the others wait for the folder
        if world.rank == 0:
            shape = args.size
            if args.size in KCBERT:
                config = make_bert_config(*KCBERT[args.size])
                shape = str(folder / "shape.json")
                Path(shape).write_text(json.dumps(config.to_dict()), encoding="utf-8")
            create_model(
                folder / "model",
                shape,
                TASK.kind,
                [review.text for review in texts],
                args.seed,
                args.max_length,
            )
    with all_or_none(world):
        tokenizer = load_tokenizer(folder / "model")
    options = {"--model": folder / "model", "--batch-size": args.batch_size, "--max-length": args.max_length}
    options |= {"--precision": args.precision, "--lr": args.lr, "--epochs": 1, "--watchdog": 0}
    options = parse_options(TASK, [str(x) for pair in options.items() for x in pair])

    labels = TASK.collect_labels(texts)
    began = time.perf_counter()
    if world.rank == 0:
        everything = TASK.tokenize(tokenizer, texts, labels, args.max_length, 0)
        print(
            f"tokenizing: {len(texts):,} reviews in {time.perf_counter() - began:.1f} s, "
            f"{everything.lengths.sum():,} tokens, mean {everything.lengths.mean():.1f}",
            flush=True,
        )
    os.environ["HPCTRAIN_CACHE"] = str(folder / "cache")
    untimed = args.examples // args.batch_size if args.kernels else 0
    wanted = (args.examples // args.batch_size + untimed) * args.batch_size
    parts = {"train": (texts * -(-wanted // len(texts)))[:wanted], "test": reviews["test"][: args.held_out]}
    train, held_out = (
        load_or_make(
            make_cache_key(part), partial(TASK.tokenize, tokenizer, part, labels, args.max_length, 0), world
        )
        for part in parts.values()
    )
    return Setting(world, device, options, tokenizer, labels, train, held_out, parts["train"], untimed)


def make_bert_config(layers: int, width: int, vocabulary: int) -> transformers.BertConfig:
    """A BERT with heads of 64 and the feed-forward layers of its paper."""
    return transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
    )


def take_first(features: Features, n: int) -> Features:
    """The first n features, without copying."""
    tokens = {name: flat[: features.starts[n]] for name, flat in features.tokens.items()}
    values = {name: column[:n] for name, column in features.values.items()}
    return Features(
        features.starts[: n + 1], tokens, values, features.example[:n], features.cut, features.lost
    )


def main() -> None:
    """Run all ways in turns, and print a table of medians.

    In turns, other load on the machine affects all ways equally.
    """
    parser = argparse.ArgumentParser(
        description="Compare training on film reviews: a tutorial's loop, Hugging Face's Trainer, hpctrain."
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        help="folder of NSMC (default: the sample data, repeated: only shows that everything runs)",
    )
    add(
        "--size",
        choices=[*SIZES, "large"],
        default="tiny",
        help="size of the model, which is created from scratch (default: %(default)s)",
    )
    add(
        "--examples",
        type=positive(int),
        default=9600,
        help="training examples in each turn (default: %(default)s)",
    )
    add("--held-out", type=positive(int), default=2000, help="evaluation examples (default: %(default)s)")
    add("--batch-size", type=positive(int), default=32, help="global batch size (default: %(default)s)")
    add(
        "--max-length",
        type=positive(int),
        default=128,
        help="maximum length of a text in tokens (default: %(default)s)",
    )
    add("--lr", type=positive(float), default=5e-4, help="peak learning rate (default: %(default)s)")
    add(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="precision of all ways but (a), which uses fp32 (default: %(default)s)",
    )
    add("--kernels", action="store_true", help="also with compiled kernels, on a GPU recorded in CUDA graphs")
    add("--seed", type=int, default=1, help="seed of the first turn (default: %(default)s)")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="device to train on; auto: a GPU if there is one (default: %(default)s)",
    )
    records.add_options(parser, turns=3)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    world = detect()
    device = choose_device(world, args.device)
    left_out = ("(d",) if device.type == "cuda" else ("(e",)
    ways = [way for way in WAYS if not way.startswith(left_out if args.kernels else ("(b3", "(d", "(e"))]
    if skipped := find_spec("accelerate") is None:
        ways = [way for way in ways if not way.startswith("(b")]
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with process_group(world, device), tempfile.TemporaryDirectory(prefix="hpctrain-") as temporary:
        folder = Path(broadcast(world, temporary))
        setting = prepare(args, world, device, folder)
        few = min(setting.steps, WARM_UP) * args.batch_size
        short = setting._replace(train=take_first(setting.train, few), texts=setting.texts[:few], untimed=0)
        for way in ways:
            measure(short, way, args.seed, folder / f"warm-up-{way[:4]}")
        for turn in range(args.turns):
            # The order is reversed in every second turn.
            for way in sorted(ways, reverse=turn % 2 == 1):
                numbers = measure(setting, way, args.seed + turn, folder / f"{turn}-{way[:4]}")
                results[way].append(numbers)
                if world.rank == 0:
                    text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
                    print(f"turn {turn + 1}  {way:30} {text}", flush=True)
    if world.rank == 0:
        # Ratios are taken within a turn, because the speed of the machine may change between turns.
        tutorial, ours = results[ways[0]], results[ways[-1]]
        rows = {
            way: {
                **{name: [turn[name] for turn in turns if name in turn] for name in DIGITS},
                TIMES: [this[RATE] / a[RATE] for this, a in zip(turns, tutorial, strict=True)],
                OF_OURS: [c[RATE] / this[RATE] for this, c in zip(turns, ours, strict=True)],
            }
            for way, turns in results.items()
        }
        about = (
            f"{args.size}, {setting.steps * args.batch_size:,} reviews in batches of {args.batch_size}, "
            f"{args.precision} on {world.size} x {device.type} with {torch.get_num_threads()} threads"
        )
        records.report(f"nlp-{args.precision}", "way", rows, DIGITS, about, args)
        if skipped:
            print(
                "\n(b) was skipped: Hugging Face's Trainer needs accelerate, which is not installed: "
                "pip install accelerate"
            )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("nlp.py: interrupted")
