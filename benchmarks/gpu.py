"""Everything that needs a GPU, in one command: are the trainers right on CUDA, and how fast are they.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --data nsmc
    python benchmarks/gpu.py --dry-run      on a CPU, with tiny sizes: shows only that everything runs

It runs the commands that users run, with this Python, one after the other on one GPU, and writes gpu.json and gpu.png. A GPU
adds up in another order than a CPU, so that only nearly the same weights are expected of the two; a resumed run is expected to
give the very same. The speed of text models comes from nlp.py, beside a tutorial's loop and transformers' Trainer.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from hpctrain import checkpoint
from hpctrain.config import versions
from hpctrain.nlp.model_folder import save_model
from hpctrain.nlp.scratch import create_model
from hpctrain.plot import folder_for_matplotlib

HPCTRAIN = [sys.executable, "-m", "hpctrain"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "hpctrain"]
TASKS = ("classify", "pair", "ner", "qa", "generate", "instruct")
CLOSE = 0.01  # the largest difference of a weight, or the difference of a test loss, between CPU and GPU
# Layers, hidden size, heads, key-value heads, size of the feed-forward layer: those of Llama 3.2 1B
# (huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json), and a tiny one. The vocabulary is that of the sample data.
LLAMA = {False: (16, 2048, 32, 8, 8192), True: (2, 64, 4, 2, 128)}
TIMEOUT = 600  # seconds for a command


class Failed(Exception):
    """A command failed, or a figure is not what it has to be."""


def run(command: list[str], *options: object) -> str:
    """Run a command; returns its output. Raises Failed, with the last lines of its output."""
    words = [*command, *map(str, options)]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(words)}: no end after {TIMEOUT} s") from error
    if done.returncode:
        raise Failed(f"{' '.join(words)}: exit code {done.returncode}: {' | '.join(done.stdout.splitlines()[-3:])}")
    return done.stdout


def train(folder: Path, trainer: str, device: str, *options: object, start: list[str] = HPCTRAIN) -> dict[str, Any]:
    """Run a trainer on this device with this run folder; returns its result.json."""
    where = ["--accelerator", "gpu" if device == "cuda" else device] if trainer == "train_lightning" else ["--device", device]
    run([*start, trainer], *where, *options, *([] if "--resume" in options else ["--out", folder]))
    return json.loads((folder / "result.json").read_text())


def difference(folder: Path, other: Path) -> float:
    """The largest difference of a weight between the last checkpoints of two run folders."""
    one, two = (checkpoint.load(checkpoint.find_newest(run), torch.device("cpu"))["model"] for run in (folder, other))
    return max(float((one[name].double() - two[name].double()).abs().max()) for name in one)


def need(holds: bool, what: str) -> None:
    """Raise Failed unless it holds."""
    if not holds:
        raise Failed(what)


def check_trainer(work: Path, trainer: str, device: str) -> dict[str, float]:
    """Train on the digits: nearly the weights of the CPU, and after a resumption the same, bit for bit."""
    cpu = train(work / "cpu", trainer, "cpu", "--epochs", 2)
    gpu = train(work / "gpu", trainer, device, "--epochs", 2)
    largest = difference(work / "cpu", work / "gpu")
    need(largest <= CLOSE, f"a weight differs by {largest:.3g} from the CPU's, more than {CLOSE}")
    train(work / "parts", trainer, device, "--epochs", 1)
    parts = train(work / "parts", trainer, device, "--epochs", 2, "--resume", work / "parts")
    need(parts["weights_sha256"] == gpu["weights_sha256"], "a resumed run has other weights than a run in one piece")
    return {"largest_difference": largest, "cpu_accuracy": cpu["test_accuracy"], "accuracy": gpu["test_accuracy"]}


def check_task(work: Path, task: str, device: str) -> dict[str, float]:
    """Fine-tune on a part of the sample data in fp32, on the CPU and on the device: nearly the same loss."""
    options = ["--epochs", 1, "--limit", 64, "--precision", "fp32"]
    cpu = train(work / "cpu", f"nlp.{task}", "cpu", *options)["test_loss"]
    gpu = train(work / "gpu", f"nlp.{task}", device, *options)["test_loss"]
    need(abs(cpu - gpu) <= CLOSE, f"the test loss is {gpu:.4f}, and {cpu:.4f} on the CPU")
    return {"cpu_loss": cpu, "loss": gpu}


def nccl(work: Path, device: str) -> dict[str, float]:
    """Train by torchrun, through the collectives of one rank (NCCL on a GPU): the weights of a run without them."""
    alone = train(work / "alone", "train_ddp", device, "--epochs", 1)
    ddp = train(work / "ddp", "train_ddp", device, "--epochs", 1, start=TORCHRUN)
    need(alone["weights_sha256"] == ddp["weights_sha256"], "DDP on one rank gives other weights than one process without it")
    return {"accuracy": ddp["test_accuracy"]}


def bf16(work: Path, device: str, dry_run: bool) -> dict[str, float]:
    """Train on the digits in fp32 and in bf16: nearly the same accuracy."""
    epochs = ["--epochs", 3] if dry_run else []
    both = {name: train(work / name, "train_ddp", device, "--precision", name, *epochs) for name in ("fp32", "bf16")}
    accuracy = {name: result["test_accuracy"] for name, result in both.items()}
    need(abs(accuracy["fp32"] - accuracy["bf16"]) <= 0.03, f"accuracy {accuracy}: they differ by more than 0.03")
    return accuracy


def resnet(work: Path, size: int, device: str, dry_run: bool) -> dict[str, float]:
    """The speed of ResNet-50 on images of this size, in bf16: the digits, enlarged."""
    batch = 128 if dry_run else 256
    shape = [
        "--model",
        "resnet50",
        "--image-size",
        32 if dry_run else size,
        "--batch-size",
        batch,
        "--epochs",
        1 if dry_run else 5,
    ]
    return train(work / "run", "train_ddp", device, *shape, "--precision", "bf16")["speed"]


def llama(work: Path, lora: bool, device: str, dry_run: bool) -> dict[str, float]:
    """The speed of instruction tuning of a Llama model of a billion weights, whole or with LoRA."""
    layers, hidden, heads, key_values, inner = LLAMA[dry_run]
    create_model(work / "tokenizer", "tiny", "gpt2", ["All that trains a tokenizer trains a tokenizer."], 1, 512)
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "tokenizer")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=key_values,
        intermediate_size=inner, vocab_size=len(tokenizer), max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    save_model(work / "model", transformers.LlamaForCausalLM(config), tokenizer)
    options = ["--model", work / "model", "--epochs", 1 if dry_run else 3, "--limit", 32 if dry_run else 1000]
    options += [*(["--lora-rank", 8] if lora else []), "--precision", "bf16"]
    return train(work / "run", "nlp.instruct", device, *options)["speed"]


def texts(size: str, length: int, data: Path | None, device: str, dry_run: bool) -> dict[str, float]:
    """Examples per second of each way of nlp.py, and the ratios of hpctrain to the others."""
    options = ["--size", "tiny" if dry_run else size, "--max-length", length, "--precision", "bf16", "--device", device]
    options += ["--examples", 64 if dry_run else 3200, "--held-out", 64 if dry_run else 640, "--turns", 1 if dry_run else 3]
    options += ["--data", data.resolve()] if data else []
    output = run([sys.executable, str(Path(__file__).with_name("nlp.py"))], *options)
    figures: dict[str, list[float]] = {}
    for way, value in re.findall(r"^turn \d+  (\S.*?)  +.*?examples/s ([\d.e+]+)", output, re.M):
        figures.setdefault(way.strip(), []).append(float(value))
    medians = {f"{way}, examples/s": statistics.median(values) for way, values in figures.items()}
    need(len(medians) > 1, f"nlp.py printed no speed: {output.splitlines()[-1]}")
    *others, own = medians.values()
    return medians | {"times the tutorial": own / others[0], "times the best other": own / max(others)}


def cases(data: Path | None, device: str, dry_run: bool) -> Iterator[tuple[str, Any]]:
    """The name of each case, and a function of a folder that does not exist yet, which returns its figures."""
    trainers = ["train_single", "train_ddp", "train_lightning", *(["train_horovod"] if find_spec("horovod") else [])]
    for trainer in trainers:
        yield f"{trainer}, CPU, GPU, resumed", lambda work, trainer=trainer: check_trainer(work, trainer, device)
    yield "train_ddp, one rank of NCCL", lambda work: nccl(work, device)
    yield "train_ddp, bf16", lambda work: bf16(work, device, dry_run)
    for task in TASKS:
        yield f"nlp.{task}, CPU and GPU", lambda work, task=task: check_task(work, task, device)
    for size in (128, 224):
        yield f"ResNet-50, {size} pixels", lambda work, size=size: resnet(work, size, device, dry_run)
    for size, length in (("base", 128), ("large", 384)):
        yield f"BERT-{size}, {length} tokens", lambda _, size=size, length=length: texts(size, length, data, device, dry_run)
    for lora in (True, False):
        yield f"Llama 1B, {'LoRA' if lora else 'whole'}", lambda work, lora=lora: llama(work, lora, device, dry_run)


def draw(path: Path, title: str, results: list[dict[str, Any]]) -> None:
    """A bar for the examples per second of each case that has some; of nlp.py, those of each way."""
    rows = []
    for result in results:
        for name, value in result.get("figures", {}).items():
            if name == "examples_per_s" or name.endswith("examples/s"):
                rows.append((result["case"] if name == "examples_per_s" else f"{result['case']}, {name.split(', ex')[0]}", value))
    with folder_for_matplotlib():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1 + 0.35 * len(rows)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh([name for name, _ in rows], [value for _, value in rows])
        axes.bar_label(bars, fmt="{:,.4g}")
        axes.set(title=title, xlabel="examples per second", xscale="log")
        axes.invert_yaxis()
        figure.savefig(path)


def main() -> None:
    """Run all cases, print a line for each, and write gpu.json and gpu.png. Exits 1 if one failed."""
    parser = argparse.ArgumentParser(description="Check and measure on one GPU all that needs one.")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny sizes: shows only that everything runs")
    parser.add_argument("--data", type=Path, help="folder of NSMC for the text models (default: the sample data, repeated)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the result (default: %(default)s)")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no GPU here: run it on a node with one, or with --dry-run on a CPU")
    device = "cpu" if args.dry_run else "cuda"
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, a dry run"
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as temporary:
        for number, (case, measure) in enumerate(cases(args.data, device, args.dry_run)):
            start = time.monotonic()
            work = Path(temporary, str(number))
            work.mkdir()
            try:
                result: dict[str, Any] = {"case": case, "figures": measure(work)}
            except Failed as error:
                result = {"case": case, "failed": str(error)}
            result["seconds"] = round(time.monotonic() - start, 1)
            results.append(result)
            text = result.get("failed") or "  ".join(f"{key} {value:.4g}" for key, value in result["figures"].items())
            print(f"{'FAILED' if 'failed' in result else 'ok':6} {case:28} {result['seconds']:6} s  {text}", flush=True)
    record = {"device": name, "date": time.strftime("%Y-%m-%d"), "command": sys.argv[1:], "versions": versions()}
    record |= {"seconds": round(time.monotonic() - began), "cases": results}
    (args.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(args.out / "gpu.png", f"{name}, {record['date']}", results)
    failed = sum("failed" in result for result in results)
    print(f"{len(results) - failed} of {len(results)} cases passed in {record['seconds']} s; {args.out}/gpu.json and gpu.png")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
