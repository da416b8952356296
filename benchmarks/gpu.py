"""Everything that needs a GPU, in one command: are the trainers right on CUDA, and how fast are they.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --data nsmc
    python benchmarks/gpu.py --dry-run      on a CPU, with tiny sizes: shows only that everything runs

It runs the commands that users run, with this Python, one after the other on one GPU, and writes gpu.json and
gpu.png. The same command again runs what failed or is missing in that gpu.json, if it is of this GPU and
these versions. A GPU adds up in another order than a CPU, so that only nearly the same weights are expected
of the two; a resumed run is expected to give the very same. The speed of text models comes from nlp.py,
beside a tutorial's loop and transformers' Trainer.
"""

import argparse
import copy
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoints import checkpoint
from hpctrain.files.digests import weights_sha256
from hpctrain.files.plain import open_plain
from hpctrain.nlp.models.model_folder import save_model
from hpctrain.nlp.models.scratch import create_model, make_config
from hpctrain.run.charts import folder_for_matplotlib
from hpctrain.run.config import revision, versions, write_json
from hpctrain.vision.data import load_digits
from hpctrain.vision.model import MnistNet

HPCTRAIN = [sys.executable, "-m", "hpctrain"]
TASKS = ("classify", "pair", "ner", "qa", "generate", "instruct")
# Without TF32, in which cuDNN computes convolutions of fp32 by default. A CPU has nothing of the kind.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
CLOSE = 0.01  # the largest difference of a weight, or the difference of a test loss, between CPU and GPU
# Layers, hidden size, heads, key-value heads, size of the feed-forward layer: those of Llama 3.2 1B
# (huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json), and a tiny one. The vocabulary is that of
# the sample data.
LLAMA = {False: (16, 2048, 32, 8, 8192), True: (2, 64, 4, 2, 128)}
TIMEOUT = 600  # seconds for a command
WINDOW = 384  # tokens of a window of KorQuAD, whose contexts fill most windows


class Failed(Exception):
    """A command failed, or a figure is not what it has to be."""


def run(command: list[str], *options: object, **variables: str) -> str:
    """Run a command, with more environment variables; returns its output.

    Raises Failed, with the last lines of its output.
    """
    words = [*command, *map(str, options)]
    env = os.environ | variables
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(words)}: no end after {TIMEOUT} s") from error
    if done.returncode:
        lines = done.stdout.splitlines()
        told = [line for line in lines if re.search(r"error: |^\S*(Error|Failed): ", line)] or lines
        raise Failed(f"{' '.join(words)}: exit code {done.returncode}: {' | '.join(told[-3:])}")
    return done.stdout


def train(folder: Path, trainer: str, device: str, *options: object, **variables: str) -> dict[str, Any]:
    """Run a trainer on this device with this run folder; returns its result.json."""
    where = (
        ["--accelerator", "gpu" if device == "cuda" else device]
        if trainer == "train_lightning"
        else ["--device", device]
    )
    run(
        [*HPCTRAIN, trainer],
        *where,
        *options,
        *([] if "--resume" in options else ["--out", folder]),
        **variables,
    )
    return json.loads((folder / "result.json").read_text())


def speed(folder: Path) -> dict[str, float]:
    """The speed of a finished run without its start: the median over its lines of metrics but the first.

    At each line the GPU has finished its steps. In the steps before the first one, libraries choose their
    kernels.
    """
    figures = json.loads((folder / "result.json").read_text())["speed"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    _, *rates = [line["examples_per_s"] for line in lines if "examples_per_s" in line]
    need(len(rates) > 1, f"the run has {len(rates) + 1} lines of metrics with a speed: too few steps")
    warm = statistics.median(rates) / figures["examples_per_s"]
    per_second = {
        name: value * warm
        for name, value in figures.items()
        if name.endswith(("_per_s", "_per_gpu")) or name == "mfu"
    }
    return figures | per_second


def difference(folder: Path, other: Path) -> float:
    """The largest difference of a weight between two run folders after epoch 1; later, rounding has grown."""
    paths = (run / "checkpoints/epoch-0001.pt" for run in (folder, other))
    one, two = (checkpoint.load(path, torch.device("cpu"))["model"] for path in paths)
    return max(float((one[name].double() - two[name].double()).abs().max()) for name in one)


def need(holds: bool, what: str) -> None:
    """Raise Failed unless it holds."""
    if not holds:
        raise Failed(what)


def check_trainer(work: Path, trainer: str, device: str) -> dict[str, float]:
    """Train on the digits: nearly the weights of the CPU, and after a resumption the same, bit for bit."""
    cpu = train(work / "cpu", trainer, "cpu", "--epochs", 2)
    gpu = train(work / device, trainer, device, "--epochs", 2, **EXACT) if device != "cpu" else cpu
    largest = difference(work / "cpu", work / device)
    need(largest <= CLOSE, f"a weight differs by {largest:.3g} from the CPU's, more than {CLOSE}")
    # The state after the first epoch, as a run has it that ended there.
    shutil.copytree(work / device, work / "parts")
    for path in (work / "parts/checkpoints/epoch-0002.pt", work / "parts/result.json"):
        path.unlink()
    parts = train(work / "parts", trainer, device, "--epochs", 2, "--resume", work / "parts", **EXACT)
    need(
        parts["weights_sha256"] == gpu["weights_sha256"],
        "a resumed run has other weights than a run in one piece",
    )
    return {
        "largest_difference": largest,
        "cpu_accuracy": cpu["test_accuracy"],
        "accuracy": gpu["test_accuracy"],
    }


def check_task(work: Path, task: str, device: str) -> dict[str, float]:
    """Fine-tune on a part of the sample data in fp32, on the CPU and on the device: nearly the same loss.

    The model has no dropout: a GPU draws other random numbers than a CPU.
    """
    kind = "gpt2" if task in ("generate", "instruct") else "bert"
    config = make_config("tiny", kind).to_dict()
    config |= {name: 0.0 for name in config if name.endswith(("dropout", "dropout_prob", "pdrop"))}
    (work / "config.json").write_text(json.dumps(config))
    options = ["--epochs", 1, "--limit", 64, "--precision", "fp32", "--from-scratch", work / "config.json"]
    cpu = train(work / "cpu", f"nlp.{task}", "cpu", *options)["test_loss"]
    gpu = (
        train(work / device, f"nlp.{task}", device, *options, **EXACT)["test_loss"]
        if device != "cpu"
        else cpu
    )
    need(abs(cpu - gpu) <= CLOSE, f"the test loss is {gpu:.4f}, and {cpu:.4f} on the CPU")
    return {"cpu_loss": cpu, "loss": gpu}


def graphs(work: Path, task: str, device: str, dry_run: bool) -> dict[str, float]:
    """Fine-tuning with dropout gives the same bits with and without CUDA graphs.

    All batches have --max-length tokens.
    """
    options = ["--epochs", 2, "--limit", 64, "--max-length", 8, "--deterministic"]
    more = {"plain": [], "graphs": [] if dry_run else ["--cuda-graphs"]}
    results = {
        name: train(work / name, f"nlp.{task}", device, *options, *words) for name, words in more.items()
    }
    same = len({result["weights_sha256"] for result in results.values()}) == 1
    need(same, "with --cuda-graphs the weights are others than without it")
    return {name: result["test_loss"] for name, result in results.items()}


def nccl(device: str) -> dict[str, float]:
    """DDP on one rank of NCCL, in a process of its own: hpctrain needs no process group for one rank."""
    return json.loads(
        run(
            [sys.executable, __file__], "--nccl-rank", device, CUBLAS_WORKSPACE_CONFIG=":4096:8"
        ).splitlines()[-1]
    )


def nccl_rank(device: torch.device) -> dict[str, float]:
    """DDP gives the weights of a model without it, exactly: a collective of one rank returns its input."""
    torch.use_deterministic_algorithms(True)
    options = {"device_id": device} if device.type == "cuda" else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    torch.manual_seed(1)
    images, labels = torch.randn(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device)
    plain = MnistNet().to(device)
    models = [plain, DistributedDataParallel(copy.deepcopy(plain))]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    need(
        weights_sha256(plain) == weights_sha256(models[1].module),
        "DDP on one rank gives other weights than a model without it",
    )
    values = torch.randn(2**22, device=device)
    result = values.clone()
    dist.all_reduce(result)
    gathered = [torch.empty_like(values)]
    dist.all_gather(gathered, values)
    need(
        torch.equal(result, values) and torch.equal(gathered[0], values),
        "a collective of one rank changed its input",
    )
    dist.destroy_process_group()
    return {"ranks": 1}


def bf16(work: Path, device: str, dry_run: bool) -> dict[str, float]:
    """Train on the digits in fp32 and in bf16: nearly the same accuracy."""
    epochs = ["--epochs", 3] if dry_run else []
    both = {
        name: train(work / name, "train_ddp", device, "--precision", name, *epochs)
        for name in ("fp32", "bf16")
    }
    accuracy = {name: result["test_accuracy"] for name, result in both.items()}
    need(
        abs(accuracy["fp32"] - accuracy["bf16"]) <= 0.03,
        f"accuracy {accuracy}: they differ by more than 0.03",
    )
    return accuracy


def resnet(work: Path, size: int, device: str, dry_run: bool, *more: str) -> dict[str, float]:
    """The speed of ResNet-50 on images of this size, in bf16: the digits, repeated and enlarged."""
    batch = 4 if dry_run else 256
    write_digits(work / "data", batch * (12 if dry_run else 40))
    options = ["--data", work / "data", "--model", "resnet50", "--image-size", 32 if dry_run else size, *more]
    train(
        work / "run",
        "train_ddp",
        device,
        *options,
        "--batch-size",
        batch,
        "--epochs",
        1,
        "--precision",
        "bf16",
    )
    return speed(work / "run")


def write_digits(folder: Path, train: int) -> None:
    """Write the bundled digits, repeated, as MNIST's files: this many for training, 64 for the evaluation."""
    folder.mkdir()
    for part, images, n in zip(("train", "t10k"), load_digits(), (train, 64), strict=True):
        number = torch.arange(n) % len(images)
        for name, values in (
            ("images-idx3", images.pixels[number]),
            ("labels-idx1", images.labels[number].byte()),
        ):
            header = bytes([0, 0, 8, values.dim()]) + b"".join(
                length.to_bytes(4, "big") for length in values.shape
            )
            (folder / f"{part}-{name}-ubyte").write_bytes(header + values.numpy().tobytes())


def bert_qa(work: Path, device: str, dry_run: bool, *more: str) -> dict[str, float]:
    """The speed of BERT-large (as KcBERT) on questions about long texts with nearly full windows."""
    words = [f"{chr(0xAC00 + n)}{chr(0xAC00 + n * 7 % 11000)}" for n in range(0, 11000, 5)]
    chance = random.Random(1)
    texts = [
        " ".join(chance.choices(words, k=300 if dry_run else 1500)) for _ in range(24 if dry_run else 240)
    ]
    paragraphs = [
        {
            "context": text,
            "qas": [{"id": str(n), "question": text[:9], "answers": [{"text": text[:5], "answer_start": 0}]}],
        }
        for n, text in enumerate(texts)
    ]
    (work / "data").mkdir()
    for name, part in (("train", paragraphs[4:]), ("dev", paragraphs[:4])):
        content = {
            "version": "1",
            "data": [{"title": str(n), "paragraphs": [one]} for n, one in enumerate(part)],
        }
        (work / f"data/{name}.json").write_text(json.dumps(content))
    layers, hidden = (2, 64) if dry_run else (24, 1024)
    config = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
    }
    (work / "shape.json").write_text(
        json.dumps(config | {"intermediate_size": 4 * hidden, "vocab_size": 30_000})
    )
    create_model(work / "model", str(work / "shape.json"), "bert", texts, 1, WINDOW)
    options = [
        "--data",
        work / "data",
        "--model",
        work / "model",
        "--epochs",
        1,
        "--batch-size",
        4 if dry_run else 64,
        *more,
    ]
    train(
        work / "run",
        "nlp.qa",
        device,
        *options,
        "--max-length",
        WINDOW,
        "--precision",
        "bf16",
        "--keep-checkpoints",
        1,
    )
    return speed(work / "run")


def llama(work: Path, lora: bool, device: str, dry_run: bool) -> dict[str, float]:
    """The speed of instruction tuning of a Llama model of a billion weights, whole or with LoRA."""
    layers, hidden, heads, key_values, inner = LLAMA[dry_run]
    chance = random.Random(1)
    lines = [" ".join(str(chance.randrange(1000)) for _ in range(240)) for _ in range(48 if dry_run else 320)]
    with (work / "data.jsonl").open("w") as file:
        for line in lines:
            messages = [{"role": "user", "content": line[:40]}, {"role": "assistant", "content": line}]
            file.write(json.dumps({"messages": messages}) + "\n")
    create_model(work / "tokenizer", "tiny", "gpt2", lines, 1, 512)
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "tokenizer")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden,
        num_attention_heads=heads, num_key_value_heads=key_values,
        intermediate_size=inner, vocab_size=len(tokenizer), max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.device(device):  # a processor would draw a billion random numbers for half a minute
        save_model(work / "model", transformers.LlamaForCausalLM(config), tokenizer)
    torch.cuda.empty_cache()
    options = [
        "--data",
        work / "data.jsonl",
        "--model",
        work / "model",
        "--epochs",
        1,
        "--batch-size",
        4 if dry_run else 16,
    ]
    options += [*(["--lora-rank", 8] if lora else []), "--precision", "bf16", "--keep-checkpoints", 1]
    train(work / "run", "nlp.instruct", device, *options)
    return speed(work / "run")


def texts(data: Path | None, device: str, dry_run: bool) -> dict[str, float]:
    """Examples per second of each way of nlp.py, and the ratios of hpctrain's fastest to the others."""
    options = ["--size", "tiny" if dry_run else "base", "--precision", "bf16", "--device", device]
    options += [
        "--examples",
        64 if dry_run else 1600,
        "--held-out",
        64 if dry_run else 640,
        "--turns",
        1 if dry_run else 2,
    ]
    options += ["--data", data.resolve()] if data else []
    options += [] if dry_run else ["--kernels"]
    output = run([sys.executable, str(Path(__file__).with_name("nlp.py"))], *options)
    figures: dict[str, list[float]] = {}
    for way, value in re.findall(r"^turn \d+  (\(.*?) +examples/s ([\d.e+]+)", output, re.M):
        figures.setdefault(way.strip(), []).append(float(value))
    need(len(figures) > 1, f"nlp.py printed no speed: {output.splitlines()[-1]}")
    medians = {way: statistics.median(values) for way, values in figures.items()}
    best = {
        own: max(value for way, value in medians.items() if ("hpctrain" in way) is own)
        for own in (True, False)
    }
    ratios = {
        "times the tutorial": best[True] / medians["(a) tutorial"],
        "times the best other": best[True] / best[False],
    }
    return {f"{way}, examples/s": value for way, value in medians.items()} | ratios


def checks(device: str, dry_run: bool) -> Iterator[tuple[str, Any]]:
    """The name of each check, and a function of an empty folder, which returns its figures."""
    trainers = [
        "train_ddp",
        "train_fsdp",
        "train_lightning",
        *(["train_horovod"] if find_spec("horovod") else []),
    ]
    for trainer in trainers:
        yield (
            f"{trainer}, CPU, GPU, resumed",
            lambda work, trainer=trainer: check_trainer(work, trainer, device),
        )
    yield "DDP, one rank of NCCL", lambda _: nccl(device)
    yield "train_ddp, bf16", lambda work: bf16(work, device, dry_run)
    for task in ("classify",) if dry_run else ("classify", "generate"):
        yield f"nlp.{task}, CUDA graphs", lambda work, task=task: graphs(work, task, device, dry_run)
    for task in TASKS:
        yield f"nlp.{task}, CPU and GPU", lambda work, task=task: check_task(work, task, device)


def measurements(data: Path | None, device: str, dry_run: bool) -> Iterator[tuple[str, Any]]:
    """The same for what is measured, and must have the GPU for itself."""
    yield "ResNet-50, 224 pixels", lambda work: resnet(work, 224, device, dry_run)
    yield "BERT-base, reviews", lambda _: texts(data, device, dry_run)
    if not dry_run:
        fast = ["--compile", "--cuda-graphs"]
        yield f"BERT-large, {WINDOW} tokens, compiled", lambda work: bert_qa(work, device, dry_run, *fast)
    for lora in (True, False):
        yield (
            f"Llama 1B, {'LoRA' if lora else 'whole'}",
            lambda work, lora=lora: llama(work, lora, device, dry_run),
        )
    if not dry_run:
        yield "ResNet-50, 224 pixels, compiled", lambda work: resnet(work, 224, device, dry_run, "--compile")
        yield (
            f"BERT-large, {WINDOW} tokens, --deterministic",
            lambda work: bert_qa(work, device, dry_run, "--deterministic"),
        )
    yield f"BERT-large, {WINDOW} tokens", lambda work: bert_qa(work, device, dry_run)
    yield "ResNet-50, 128 pixels", lambda work: resnet(work, 128, device, dry_run)


def run_case(case: str, measure: Callable[[Path], dict[str, float]]) -> dict[str, Any]:
    """Run a case in a folder of its own, and print a line about it.

    No error of it must cost the others their results.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as work:
        try:
            result: dict[str, Any] = {"case": case, "figures": measure(Path(work))}
        except Failed as error:
            result = {"case": case, "failed": str(error)}
        except Exception as error:
            result = {"case": case, "failed": f"{type(error).__name__}: {error}"}
    result |= {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - start, 1)}
    text = result.get("failed") or "  ".join(f"{key} {value:.4g}" for key, value in result["figures"].items())
    print(
        f"{'FAILED' if 'failed' in result else 'ok':6} {case:28} {result['seconds']:6} s  {text}", flush=True
    )
    return result


def draw(path: Path, title: str, results: list[dict[str, Any]]) -> None:
    """A bar for the examples per second of each case that has some; of nlp.py, those of each way."""
    rows = []
    for result in results:
        for name, value in result.get("figures", {}).items():
            if name == "examples_per_s" or name.endswith("examples/s"):
                rows.append(
                    (
                        result["case"]
                        if name == "examples_per_s"
                        else f"{result['case']}, {name.split(', ex')[0]}",
                        value,
                    )
                )
    with folder_for_matplotlib():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1 + 0.35 * len(rows)), layout="constrained")
        axes = figure.subplots()
        values = [value for _, value in rows]
        bars = axes.barh([name for name, _ in rows], values)
        axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=3)
        axes.set(
            title=title,
            xlabel="examples per second",
            xscale="log",
            xlim=(min(values, default=1) / 10, max(values, default=1) * 3),
        )
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.invert_yaxis()
        figure.savefig(path)


def main() -> None:
    """Run all cases, print a line for each, and write gpu.json and gpu.png. Exits 1 if one failed."""
    parser = argparse.ArgumentParser(description="Check and measure on one GPU all that needs one.")
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU, with tiny sizes: shows only that everything runs"
    )
    parser.add_argument(
        "--data", type=Path, help="folder of NSMC for the text models (default: the sample data, repeated)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="folder of the result (default: %(default)s)"
    )
    parser.add_argument("--nccl-rank", type=torch.device, metavar="DEVICE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nccl_rank:
        device = torch.device("cuda", 0) if args.nccl_rank.type == "cuda" else args.nccl_rank
        print(json.dumps(nccl_rank(device)))
        return
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no GPU here: run it on a node with one, or with --dry-run on a CPU")
    device = "cpu" if args.dry_run else "cuda"
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, a dry run"
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"device": name, "date": time.strftime("%Y-%m-%d"), "command": sys.argv[1:]}
    record |= {"versions": versions() | {"transformers": transformers.__version__}, "revision": revision()}
    results = read_earlier(args.out / "gpu.json", record)
    found = {result["case"] for result in results}

    def add(result: dict[str, Any]) -> None:
        results.append(result)
        seconds = round(sum(each["seconds"] for each in results))
        write_json(args.out / "gpu.json", record | {"seconds": seconds, "cases": results})

    cpus = len(os.sched_getaffinity(0))
    own_threads = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    missing = [case for case in checks(device, args.dry_run) if case[0] not in found]
    with ThreadPoolExecutor(max(1, min(8, cpus // 2))) as pool:  # they mostly import, on CPUs
        for result in pool.map(lambda case: run_case(*case), missing):
            add(result)
    if own_threads:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cpus // 2))
    for case in measurements(args.data, device, args.dry_run):
        if case[0] not in found:
            add(run_case(*case))
    draw(args.out / "gpu.png", f"{name}, {record['date']}", results)
    failed = sum("failed" in result for result in results)
    print(f"{len(results) - failed} of {len(results)} cases passed; {args.out}/gpu.json and gpu.png")
    sys.exit(1 if failed else 0)


def read_earlier(path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases that passed in an earlier run with the same device, versions, revision and options.

    Exits if the file is not one that this program has written: it would be overwritten.
    """
    try:
        with open_plain(path) as file:
            earlier = json.load(file)
        if any(earlier.get(key) != record[key] for key in ("device", "command", "versions", "revision")):
            return []
        passed = [result for result in earlier["cases"] if "failed" not in result]
        kinds = {"case": str, "seconds": int | float, "figures": dict}
        if not all(isinstance(result[name], kind) for result in passed for name, kind in kinds.items()):
            raise ValueError("its cases are of another kind")
        return passed
    except FileNotFoundError:
        return []
    except Exception as error:
        sys.exit(
            f"gpu.py: cannot continue {path} ({type(error).__name__}: {error}): "
            "remove it, or give another --out"
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("gpu.py: interrupted; the same command runs what is missing")
