"""Measure one case of gpu.py: its ways take turns in this process, and each turn is a line of JSON.

gpu.py starts it: it gets ready, prints a line, and waits for a line before it uses the GPU, so that it can
get ready while another case is measured. All models are made from scratch. Those of texts train from the
first step on in one loop, of which the last steps are timed, as in nlp.py; training of images is the command
`train_ddp` as it is.
"""

import argparse
import dataclasses
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nlp
import numpy
import torch
import transformers
import vision
from gpu_checks import wait_for_start
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import PreTrainedTokenizerFast

from hpctrain.distributed.world import detect
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models.lora import add_lora
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.task import IGNORED, Task
from hpctrain.nlp.tasks import classify, instruct, qa
from hpctrain.nlp.training.finetune import run_empty
from hpctrain.run.flops import count_flops, count_text_flops, utilization
from hpctrain.text import first_line
from hpctrain.training.kernels import make_deterministic
from hpctrain.vision import train
from hpctrain.vision.recipe import RECIPES

Figures = dict[str, float | str]
Way = Callable[[], Figures]

WINDOW = 384  # tokens of each window of BERT-large
SHAPES = nlp.KCBERT | {"tiny": (2, 64, 1000)}
# Layers, hidden size, heads, key-value heads, size of the feed-forward layer, vocabulary: Llama 3.2 1B's
# (huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json), and tiny ones.
LLAMA = {"1b": (16, 2048, 32, 8, 8192, 128_256), "tiny": (2, 64, 4, 2, 128, 1000)}


class Steps(NamedTuple):
    """Batch size, steps before those that are timed, and timed steps."""

    batch_size: int
    untimed: int
    timed: int

    @property
    def examples(self) -> int:
        return self.batch_size * (self.untimed + self.timed)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the machine ---


def look_at_machine(device: torch.device) -> Figures:
    """What every other figure depends on, such as the time that the processor takes to launch a kernel."""
    on_gpu = device.type == "cuda"
    size, side, launches = (2**30, 8192, 20_000) if on_gpu else (2**22, 256, 100)
    driver = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    figures: Figures = {
        "driver": subprocess.check_output(driver.split(), text=True).strip() if on_gpu else "none"
    }
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    seconds = time_calls(device, 10, lambda: copied.copy_(source))
    figures["copy, GB/s (read and written)"] = 2 * size / seconds / 1e9
    one, two = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    figures["matrix product in bf16, TFLOP/s"] = (
        2 * side**3 / time_calls(device, 10, lambda: one @ two) / 1e12
    )
    few = torch.zeros(1, device=device)
    figures["launch of a kernel, us"] = 1e6 * time_calls(device, launches, lambda: few.add_(1))
    figures["attention kernel, no padding"] = name_attention(device, padded=False)
    figures["attention kernel, padding"] = name_attention(device, padded=True)
    return figures


def time_calls(device: torch.device, calls: int, call: Callable[[], object]) -> float:
    """Seconds for a call, of so many after a tenth as many."""
    for _ in range(max(1, calls // 10)):
        call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def name_attention(device: torch.device, padded: bool) -> str:
    """The kernel in which BERT-large's attention in bf16 spends most of its time."""
    query = torch.randn(8, 16, WINDOW, 64, device=device, dtype=torch.bfloat16)
    mask = torch.ones(8, 1, 1, WINDOW, dtype=torch.bool, device=device) if padded else None
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        scaled_dot_product_attention(query, query, query, mask)
        synchronize(device)
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return max(profiler.key_averages(), key=lambda row: getattr(row, kind)).key[:70]


def measure_use(flops_per_s: float, device: torch.device) -> dict[str, float]:
    """TFLOP/s and MFU in bf16; nothing if the operations of the model could not be counted."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return utilization(flops_per_s, name, "bf16") if flops_per_s else {}


# --- texts ---


class Texts(NamedTuple):
    """What the ways of training on texts have in common."""

    setting: nlp.Setting
    make_model: Callable[[torch.device], Any]
    flops: float | None  # to train on a text


def prepare_texts(
    task: Task[Any],
    train: Features,
    labels: list[str],
    tokenizer: PreTrainedTokenizerFast,
    config: transformers.PretrainedConfig,
    steps: Steps,
    device: torch.device,
    *options: str,
) -> Texts:
    """All that is known before the GPU is used. `options`: further ones of `hpctrain nlp.<task>`."""
    args = parse_options(
        task,
        [
            *("--batch-size", str(steps.batch_size), "--precision", "bf16", "--epochs", "1"),
            *("--watchdog", "0", *options),
        ],
    )
    setting = nlp.Setting(detect(), device, args, tokenizer, labels, train, train, [], steps.untimed, task)

    def make_model(device: torch.device) -> Any:
        torch.manual_seed(1)
        with device:  # a processor would draw a billion random numbers for half a minute
            model = task.model.from_config(config, attn_implementation="sdpa").train()
        model.config.use_cache = False
        if args.uses_lora:
            model = add_lora(task, model, Path(), args, Path())
        return model

    # before anything has replaced layers by kernels that need values
    flops = count_text_flops(make_model(torch.device("meta")), train.lengths, run_empty)
    return Texts(setting, make_model, flops)


def train_texts(texts: Texts, way: Callable[..., None], folder: Path, deterministic: bool = False) -> Figures:
    """Train a new model; returns its speed, and the seconds until the timed steps began."""
    setting = texts.setting
    setting = setting._replace(args=dataclasses.replace(setting.args, out=folder))
    make_deterministic(deterministic, setting.device)
    model = texts.make_model(setting.device)
    began = time.perf_counter()
    meter = nlp.Meter(setting, model)
    with suppress(nlp.Enough):
        way(setting, model, meter.see)
    numbers = meter.read()
    torch.use_deterministic_algorithms(False)
    timed = setting.steps - setting.untimed
    figures: Figures = {
        "a second": numbers["examples/s"],
        "ms a step": 1e3 * numbers["train s"] / timed,
        "s before": meter.began - began,
    }
    return figures | measure_use((texts.flops or 0) * numbers["examples/s"], setting.device)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One that only pads, for texts that are numbers of tokens from the start."""
    backend = Tokenizer(models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", eos_token="[PAD]")


def prepare_reviews(
    args: argparse.Namespace, device: torch.device, folder: Path, steps: Steps | None = None
) -> Texts:
    """Film reviews of NSMC, and a BERT-base with the vocabulary of KcBERT."""
    steps = steps or (Steps(8, 2, 4) if args.dry_run else Steps(32, 100, 100))
    task = classify.TASK
    reviews = load_splits(task, args.data, [])["train"]
    shape = folder / "shape.json"
    # the weights of this tiny model are not used, its tokenizer is
    config = nlp.make_bert_config(*SHAPES["tiny"]).to_dict() | {"vocab_size": SHAPES["base"][-1]}
    shape.write_text(json.dumps(config), encoding="utf-8")
    create_model(folder / "model", str(shape), "bert", [review.text for review in reviews[:20_000]], 1, 128)
    tokenizer = load_tokenizer(folder / "model")
    reviews = (reviews * -(-steps.examples // len(reviews)))[: steps.examples]
    labels = task.collect_labels(reviews)
    train = task.tokenize(tokenizer, reviews, labels, 128, 0)
    bert = nlp.make_bert_config(*SHAPES["tiny" if args.dry_run else "base"])
    bert.vocab_size, bert.num_labels = len(tokenizer), len(labels)
    return prepare_texts(task, train, labels, tokenizer, bert, steps, device, "--max-length", "128")


def prepare_windows(args: argparse.Namespace, device: torch.device, _: Path) -> Texts:
    """Windows of WINDOW tokens each, and a BERT-large with the vocabulary of KcBERT."""
    steps = Steps(4, 2, 4) if args.dry_run else Steps(64, 8, 24)
    bert = nlp.make_bert_config(*SHAPES["tiny" if args.dry_run else "large"])
    chance = numpy.random.default_rng(1)
    shape = steps.examples, 32 if args.dry_run else WINDOW
    tokens = {
        "input_ids": chance.integers(5, bert.vocab_size, shape),
        "token_type_ids": numpy.zeros(shape, int),
        "start": numpy.zeros(shape, int),
        "end": numpy.zeros(shape, int),
    }
    position = chance.integers(0, shape[1], steps.examples)
    values = {"start_positions": position, "end_positions": position, "units": numpy.ones(shape[0], int)}
    train = Features.from_lists({name: table.tolist() for name, table in tokens.items()}, values)
    return prepare_texts(qa.TASK, train, [], make_tokenizer(), bert, steps, device)


def prepare_conversations(args: argparse.Namespace, device: torch.device, _: Path, *, lora: bool) -> Texts:
    """Conversations of 128 to 512 tokens, and a Llama of 1.2 billion weights; a third is a question."""
    steps = Steps(4, 2, 4) if args.dry_run else Steps(16, 6, 16)
    layers, hidden, heads, key_values, inner, vocabulary = LLAMA["tiny" if args.dry_run else "1b"]
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=key_values, head_dim=hidden // heads, intermediate_size=inner,
        vocab_size=vocabulary, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    chance = random.Random(1)
    lengths = [chance.randint(128, 512) for _ in range(steps.examples)]
    texts = [[chance.randrange(1, vocabulary) for _ in range(length)] for length in lengths]
    labels = [[IGNORED] * (len(text) // 3) + text[len(text) // 3 :] for text in texts]
    units = [len(text) - len(text) // 3 for text in texts]
    train = Features.from_lists({"input_ids": texts, "labels": labels}, {"units": units})
    more = ["--lora-rank", "8", "--model", "none"] if lora else []
    return prepare_texts(instruct.TASK, train, [], make_tokenizer(), config, steps, device, *more)


# --- images ---


def prepare_images(args: argparse.Namespace, _: torch.device, folder: Path) -> Steps:
    """The bundled digits, repeated, as MNIST's files: 10 lines of metrics of four steps each."""
    steps = Steps(4, 2, 18) if args.dry_run else Steps(256, 8, 40)
    vision.write_idx(folder / "data", steps.examples, 64)
    return steps


def train_plain(steps: Steps, device: torch.device, pixels: int) -> Figures:
    """The loop of PyTorch's documentation of AMP at its best: images on the GPU, channels last, bf16."""
    torch.manual_seed(1)
    torch.backends.cudnn.benchmark = True
    model = RECIPES["resnet50"].model().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    channels = next(model.parameters()).shape[1]
    images = torch.randn(steps.batch_size, channels, pixels, pixels, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(10, (steps.batch_size,), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    seconds = time_calls(device, steps.timed, step)
    torch.backends.cudnn.benchmark = False
    speed = steps.batch_size / seconds
    flops = count_flops(model, lambda empty: empty(images[:1].to("meta"))) or 0
    return {"a second": speed, "ms a step": 1e3 * seconds} | measure_use(flops * speed, device)


def train_images(
    steps: Steps, device: torch.device, pixels: int, data: Path, out: Path, *more: str
) -> Figures:
    """`hpctrain train_ddp`: the median of its lines of metrics but the first, the start."""
    train.main(
        detect(),
        [
            *("--data", str(data), "--model", "resnet50", "--image-size", str(pixels), "--out", str(out)),
            *("--batch-size", str(steps.batch_size), "--epochs", "1", "--precision", "bf16"),
            *("--device", device.type, "--watchdog", "0", *more),
        ],
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    _, *rates = [line["examples_per_s"] for line in lines if "examples_per_s" in line]
    speed = statistics.median(rates)
    figures = json.loads((out / "result.json").read_text())["speed"]
    share = speed / figures["examples_per_s"]
    use = {name: figures[name] * share for name in ("tflops_per_gpu", "mfu") if name in figures}
    return {"a second": speed, "ms a step": 1e3 * steps.batch_size / speed} | use


# --- the cases ---


def ways_of(case: str, args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Way]:
    """The ways of a case by name, prepared as far as they can be without the GPU."""
    if case == "machine":
        return {"": partial(look_at_machine, device)}
    if case == "images":
        steps, pixels = prepare_images(args, device, folder), 32 if args.dry_run else 224
        number = iter(range(100))

        def train(*more: str) -> Figures:
            return train_images(steps, device, pixels, folder / "data", folder / f"{next(number)}", *more)

        ways: dict[str, Way] = {
            "AMP, channels last": partial(train_plain, steps, device, pixels),
            "hpctrain": train,
        }
        return ways if args.dry_run else ways | {"hpctrain --compile": lambda: train("--compile")}
    best, ours = partial(nlp.train_with_trainer, best=True), nlp.train_with_hpctrain
    on_gpu = device.type == "cuda"
    several: dict[str, tuple[Callable[..., Texts], dict[str, Callable[..., None]]]] = {
        "reviews": (
            prepare_reviews,
            {
                "tutorial": nlp.train_as_in_tutorials,
                "Trainer at its best": best,
                "hpctrain": ours,
                "hpctrain --cuda-graphs": partial(ours, graphs=on_gpu),
            },
        ),
        "shapes": (
            partial(prepare_reviews, steps=None if args.dry_run else Steps(32, 30, 100)),
            {
                "hpctrain": ours,
                "hpctrain, all lengths": partial(ours, rounded=False),
                "hpctrain, all lengths, no attention of cuDNN": partial(
                    without_cudnn_attention, partial(ours, rounded=False)
                ),
            },
        ),
        "windows": (
            prepare_windows,
            {
                "Trainer at its best": best,
                "hpctrain": ours,
                "hpctrain --cuda-graphs": partial(ours, graphs=on_gpu),
            },
        ),
        "deterministic": (prepare_windows, {"hpctrain --deterministic": ours}),
        "lora": (
            partial(prepare_conversations, lora=True),
            {"Trainer at its best, liger": best, "hpctrain": ours},
        ),
        "whole": (
            partial(prepare_conversations, lora=False),
            {"Trainer at its best, liger": best, "hpctrain": ours},
        ),
        "windows-compiled": (
            prepare_windows,
            {
                "hpctrain --compile": partial(ours, compiled=on_gpu),
                "hpctrain --compile --cuda-graphs": partial(ours, compiled=on_gpu, graphs=on_gpu),
                "Trainer at its best, torch_compile": partial(best, compiled=on_gpu),
            },
        ),
        "whole-compiled": (
            partial(prepare_conversations, lora=False),
            # liger's kernels fail within the Trainer's torch_compile (liger-kernel 0.8.5, accelerate 1.15)
            {"hpctrain --compile": partial(ours, compiled=on_gpu)},
        ),
        "reviews-compiled": (
            prepare_reviews,
            {
                "hpctrain --compile": partial(ours, compiled=on_gpu),
                "hpctrain --compile --cuda-graphs": partial(ours, compiled=on_gpu, graphs=on_gpu),
                "Trainer at its best, torch_compile": partial(best, compiled=on_gpu),
            },
        ),
    }
    prepare, named = several[case]
    texts = prepare(args, device, folder)
    outs = (folder / f"{number}" for number in range(100))
    return {
        name: lambda way=way: train_texts(texts, way, next(outs), case == "deterministic")
        for name, way in named.items()
    }


def without_cudnn_attention(way: Callable[..., None], *arguments: Any) -> None:
    """Train without cuDNN's attention, which plans anew for each shape."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        way(*arguments)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def main() -> None:
    """Measure each way in each turn. A way that fails has no further turns, and costs no other its own."""
    parser = argparse.ArgumentParser(description="Measure one case of gpu.py.")
    parser.add_argument("case")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    lines = sys.stdout
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", 0)
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as temporary:
        ways = ways_of(args.case, args, device, Path(temporary))
        wait_for_start(lines)
        for turn in range(args.turns):
            # the order is reversed in every second turn
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                line: dict[str, Any] = {"way": name, "turn": turn + 1}
                try:
                    line["figures"] = ways[name]()
                except Exception as error:  # of any library
                    traceback.print_exc()
                    line["failed"] = f"{type(error).__name__}: {first_line(error)}"
                    del ways[name]
                print(json.dumps(line), file=lines, flush=True)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
