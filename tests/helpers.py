"""What tests of several folders share beside fixtures: paths, small data sets, run folders, sockets."""

import base64
import gzip
import hashlib
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoints.position import Evaluations, Position

# of the image of a run that make_run() writes
DIGEST = "sha256:" + 64 * "ab"
REPOSITORY = Path(__file__).resolve().parents[1]
SIF = REPOSITORY / "hpctrain-cpu.sif"
DATA = Path(os.environ.get("HPCTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
STANDINS = REPOSITORY / "tests/standins"
IMAGE_TAR = REPOSITORY / "build/hpctrain-cpu.tar"
# the Python environment of the image on a node without a container: see the fixture `site`
BARE_PYTHON = "/opt/hpctrain/bin/python"
# Threads that wait for a core that another test uses spin, and a run takes three times as long. The launch
# scripts set the other two as well.
MEMORY_AND_THREADS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "536870912",
}

# What a checkpoint holds beside the weights and the optimizer.
POSITION = Position(
    epoch=1,
    step=0,
    steps=4,
    best=Evaluations(1, (0.5,), 0, 1, 1, (1, 0)),
    means=[{}],
    skipped=0,
    lines=0,
    seconds=1.5,
    options={},
    overflows=0,
).to_entries()


def examples(number: int) -> Callable[[Callable], Callable]:
    """So many examples of a property of Hypothesis, the same ones in each run."""
    from hypothesis import HealthCheck, settings

    return settings(
        max_examples=int(os.environ.get("HPCTRAIN_TEST_EXAMPLES", number)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def write_digits(folder: Path, train: int = 320, test: int = 80) -> Path:
    """Write some of the bundled digits in the format of MNIST, for runs that are not about the accuracy."""
    from hpctrain.vision.data import load_digits

    return write_images(folder, load_digits(), train, test)


def write_images(folder: Path, both: tuple, train: int, test: int) -> Path:
    """Write the first images of a training set and of a test set in the format of MNIST."""
    folder.mkdir()
    for part, images, n in zip(("train", "t10k"), both, (train, test), strict=True):
        for name, values in (
            ("images-idx3", images.pixels[:n]),
            ("labels-idx1", images.labels[:n].to(images.pixels.dtype)),
        ):
            header = bytes([0, 0, 8, values.dim()]) + b"".join(
                size.to_bytes(4, "big") for size in values.shape
            )
            (folder / f"{part}-{name}-ubyte").write_bytes(header + values.numpy().tobytes())
    return folder


def write_fewer(source: Path, target: Path) -> None:
    """Write a part of the bundled digits, or one of four examples of a file of samples."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".gz":
        lines = gzip.decompress(source.read_bytes()).splitlines(keepends=True)
        target.write_bytes(gzip.compress(b"".join(lines[:640])))  # 16 steps an epoch: --profile needs 15
    elif source.suffix == ".json":
        content = json.loads(source.read_text())
        few = content | {"data": content["data"][::4]} if isinstance(content, dict) else content[::4]
        target.write_text(json.dumps(few, ensure_ascii=False))
    else:
        end = "\n\n" if source.suffix == ".tsv" else "\n"
        head, *examples = source.read_text().strip().split(end)
        target.write_text(end.join([head, *examples[::4]]) + "\n")


def run_command(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; what it prints is text."""
    # as long as the build of an image takes on a busy machine
    options = {"timeout": 1800, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([*map(str, command)], text=True, **options)


def run_hpctrain(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "hpctrain", *words], **{"timeout": 300} | options)


def run_on_small_disk(size: str, *command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that has a file system of this size below `small`."""
    if os.geteuid() != 0:
        pytest.skip("a small file system needs root")
    script = f'mkdir -p small; mount -t tmpfs -o size={size} none small; exec "$@"'
    return run_command(["unshare", "--mount", "bash", "-ec", script, "-", *command], cwd=cwd)


@contextmanager
def start_ranks(number: int, *command: object, cwd: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of a script of a user, with the variables of torchrun; killed at the end of the block."""
    from tests.tools.warm_start import torchrun_ranks

    env = os.environ | MEMORY_AND_THREADS
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=cwd, env=env | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for variables in ([rank.env for rank in torchrun_ranks(number, [], {})] if number > 1 else [{}])
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run_ranks(number: int, *command: object, cwd: Path, status: int = 0) -> str:
    """What the ranks of a script print; all end with this exit status."""
    with start_ranks(number, *command, cwd=cwd) as ranks, ThreadPoolExecutor() as pool:
        output = "".join(pool.map(lambda rank: rank.communicate(timeout=300)[0], ranks))
    assert [rank.returncode for rank in ranks] == [status] * number, output
    return output


def make_run(folder, *, starts=1, lines=None, result=True, started="2026-11-20T10:00:00+0000", **options):
    folder.mkdir(parents=True)
    for number in range(1, starts + 1):
        config = {
            "trainer": "train_ddp",
            "options": {"epochs": 3, "lr": 0.1, "out": str(folder), **options},
            "world": {"size": 4, "nodes": 2, "launcher": "slurm"},
            "job": str(16 + number),
            "device": "x86_64",
            "image_digest": DIGEST,
            "versions": {"torch": "2.13.0"},
            "started": started,
        } | ({"resumed_at": 10} if number > 1 else {})
        (folder / ("config.json" if number == 1 else f"config.{number}.json")).write_text(json.dumps(config))
    if lines is None:
        lines = [
            {"epoch": 1, "step": step, "seconds": step, "train_loss": 3 / step, "examples_per_s": 99.5}
            for step in (5, 10)
        ]
        lines.append(
            {
                "epoch": 1,
                "step": 10,
                "seconds": 11,
                "test_loss": 0.2,
                "test_accuracy": 0.875,
                "accuracy/part": 1.0,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result:
        (folder / "result.json").write_text("{}")
    return folder


def wandb_records(path):
    """The records of a file of wandb: a log of LevelDB (its doc/log_format.md) behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = path.read_bytes(), 7, []
    assert content[:4] == b":W&B"
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def wandb_key(item):
    return item.key or "/".join(item.nested_key)


def make_wheel(folder: Path, name: str, version: str, modules: dict[str, str], requires: str = "") -> str:
    """Write a wheel with these modules; return its file name."""
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = modules | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    files[f"{info}/RECORD"] = record
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path.name


def ask_socket(path, target, **headers):
    """The status, the headers and the content that a server on a Unix socket answers."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", target, headers=headers)
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return str(listener.getsockname()[1])


def listening_ports(pid):
    sockets = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
