"""What tests of several folders share beside fixtures: paths, and small data sets."""

import gzip
import json
import os
from pathlib import Path

from hpctrain.checkpoints.position import Evaluations, Position

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
    losses=[0.0],
    unlogged=0,
    skipped=0,
    lines=0,
    seconds=1.5,
    options={},
).to_entries()


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
