"""Check on one GPU what needs one: are the trainers right on CUDA. gpu.py starts it.

It runs the commands that users run, with this Python, several side by side, and prints a line of JSON for
each check. A GPU adds up in another order than a CPU, so that only nearly the same weights are expected of
the two; a resumed run is expected to give the very same.
"""

import argparse
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoints import checkpoint
from hpctrain.files.digests import weights_sha256
from hpctrain.nlp.models.scratch import make_config
from hpctrain.vision.model import MnistNet

HPCTRAIN = [sys.executable, "-m", "hpctrain"]
TASKS = ("classify", "pair", "ner", "qa", "generate", "instruct")
# Without TF32, in which cuDNN computes convolutions of fp32 by default. A CPU has nothing of the kind.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
CLOSE = 0.01  # the largest difference of a weight, or the difference of a test loss, between CPU and GPU
TIMEOUT = 600  # seconds for a command


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


def halves(work: Path, device: str, dry_run: bool) -> dict[str, float]:
    """Train on the digits in fp32, bf16 and fp16: nearly the same accuracy. A dry run leaves out fp16.

    A CPU takes minutes for its convolutions in fp16.
    """
    names, epochs = (("fp32", "bf16"), ["--epochs", 3]) if dry_run else (("fp32", "bf16", "fp16"), [])
    results = {name: train(work / name, "train_ddp", device, "--precision", name, *epochs) for name in names}
    accuracy = {name: result["test_accuracy"] for name, result in results.items()}
    need(
        max(accuracy.values()) - min(accuracy.values()) <= 0.03,
        f"accuracy {accuracy}: they differ by more than 0.03",
    )
    return accuracy


def profile(work: Path, device: str, dry_run: bool) -> dict[str, float]:
    """--profile of a BERT-base: the share of a step in which the GPU has no work, as the page says."""
    size = "tiny" if dry_run else "base"
    train(work, "nlp.classify", device, "--epochs", 1, "--from-scratch", size, "--batch-size", 8, "--profile")
    (page,) = work.rglob("summary.txt")
    shares = dict(re.findall(r"^(\S.*?) +[\d.]+ +([\d.]+) %", page.read_text(), re.M))
    need("waiting for data" in shares, f"{page} does not say how long steps waited for data")
    need(device == "cpu" or "GPU without work" in shares, f"{page} does not say when the GPU had no work")
    return {name: float(share) for name, share in list(shares.items())[:4]}


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
    yield "nlp.classify --profile, %", lambda work: profile(work / "run", device, dry_run)
    yield "DDP, one rank of NCCL", lambda _: nccl(device)
    yield "train_ddp, bf16, fp16", lambda work: halves(work, device, dry_run)
    for task in ("classify",) if dry_run else ("classify", "generate"):
        yield f"nlp.{task}, CUDA graphs", lambda work, task=task: graphs(work, task, device, dry_run)
    for task in TASKS:
        yield f"nlp.{task}, CPU and GPU", lambda work, task=task: check_task(work, task, device)


def run_check(check: tuple[str, Callable[[Path], dict[str, float]]]) -> None:
    """Run a check in a folder of its own, and print a line. No error of it must cost the others theirs."""
    name, measure = check
    began = time.monotonic()
    line: dict[str, Any] = {"way": name, "turn": 1}
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as work:
        try:
            line["figures"] = measure(Path(work))
        except Failed as error:
            line["failed"] = str(error)
        except Exception as error:
            line["failed"] = f"{type(error).__name__}: {error}"
    print(json.dumps(line | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


def wait_for_start(lines: TextIO) -> None:
    """Say that this process is ready, and wait for a line. Its process group ends when its input does.

    So it ends with gpu.py, whatever ends that.
    """

    def watch() -> None:
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    print(json.dumps({"ready": True}), file=lines, flush=True)
    if not sys.stdin.readline():
        sys.exit("gpu.py has ended")
    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run all checks side by side: they mostly import, on CPUs."""
    parser = argparse.ArgumentParser(description="Check on one GPU what needs one.")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, without a GPU to compare with")
    parser.add_argument("--nccl-rank", type=torch.device, metavar="DEVICE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nccl_rank:
        device = torch.device("cuda", 0) if args.nccl_rank.type == "cuda" else args.nccl_rank
        print(json.dumps(nccl_rank(device)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wait_for_start(sys.stdout)
    with ThreadPoolExecutor(max(1, min(12, len(os.sched_getaffinity(0)) - 2))) as pool:
        list(pool.map(run_check, checks("cpu" if args.dry_run else "cuda", args.dry_run)))


if __name__ == "__main__":
    main()
