"""Train MNIST's net and ResNet-50 on this CPU in the loop of a tutorial and with hpctrain, in turns.

    python benchmarks/vision.py

The tutorial has a DataLoader of PIL images with their transforms, and `loss.item()` in each step. Both are
measured in fp32 and in bf16, with the settings of the allocator that the launch scripts make; the tutorial
also without them. All ways get the same images, model, optimizer and batch size. Each turn of a way is a
process of its own, because the allocator reads its settings when a process starts. The time of a step is the
median of the times from step to step, loading included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import records
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from hpctrain.vision.data import load_digits, load_mnist
from hpctrain.vision.recipe import RECIPES

RATIO = "times as fast as the tutorial of its precision, same allocator"
FP32, BF16 = "tutorial, same allocator", "tutorial, bf16, same allocator"
# Options of hpctrain, and of tutorials those of this file.
WAYS = {
    "tutorial": [],
    FP32: [],
    BF16: ["--bf16"],
    "hpctrain": [],
    "hpctrain, bf16": ["--precision", "bf16", "--fast-kernels"],
}
# of launch/lib/job.sh
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "536870912"}
# Training images, epochs and batch size.
SIZES = {"mnist": (1280, 4, 32), "resnet50": (192, 1, 32)}


class PilImages(Dataset):
    """Images as torchvision's MNIST returns them, with its transforms Resize, ToTensor and Normalize."""

    def __init__(self, folder: Path, side: int) -> None:
        self._images, self._side = load_mnist(folder)[0], side

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self._images.pixels[number].numpy())
        if image.size != (self._side, self._side):
            image = image.resize((self._side, self._side), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(numpy.array(image)).float().div(255)[None]
        return pixels.sub(0.1307).div(0.3081), int(self._images.labels[number])


def train_as_in_tutorials(model_name: str, folder: Path, bf16: bool) -> None:
    """Train, and print the median time of a step in milliseconds."""
    recipe = RECIPES[model_name]
    _, epochs, batch_size = SIZES[model_name]
    loader = DataLoader(PilImages(folder, recipe.side), batch_size, shuffle=True, drop_last=True)
    torch.manual_seed(1)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters(), lr=recipe.lr)
    times = []
    for _ in range(epochs):
        running, last = 0.0, time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
            now = time.perf_counter()
            times.append(now - last)
            last = now
    print(1e3 * statistics.median(times))


def write_idx(folder: Path, train: int, test: int) -> None:
    """Write this many of the bundled digits, repeated if there are fewer, as MNIST's files."""
    folder.mkdir()
    for part, images, n in zip(("train", "t10k"), load_digits(), (train, test), strict=True):
        number = torch.arange(n) % len(images)
        pixels, labels = images.pixels[number], images.labels[number].byte()
        for name, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, values.dim()]) + b"".join(
                size.to_bytes(4, "big") for size in values.shape
            )
            (folder / f"{part}-{name}-ubyte").write_bytes(header + values.numpy().tobytes())


def measure(model: str, way: str, folder: Path, out: Path) -> float:
    """The median of a step in milliseconds, in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    env |= ALLOCATOR if way != "tutorial" else {}
    if way.startswith("tutorial"):
        command = [sys.executable, __file__, "--model", model, "--tutorial", str(folder), *WAYS[way]]
        return float(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)
    _, epochs, batch_size = SIZES[model]
    command = [sys.executable, "-m", "hpctrain", "train_single", "--model", model, "--data", str(folder)]
    command += ["--epochs", str(epochs), "--batch-size", str(batch_size), "--device", "cpu"]
    command += ["--out", str(out), *WAYS[way]]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "result.json").read_text())["speed"]["step_ms_p50"]


def main() -> None:
    """Run all ways in turns, so that other load affects all equally; report medians for each model."""
    parser = argparse.ArgumentParser(
        description="Compare training of images on a CPU: a tutorial's loop, and hpctrain."
    )
    parser.add_argument("--model", choices=RECIPES, help="only this model (default: both)")
    parser.add_argument("--tutorial", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    records.add_options(parser, turns=3)
    args = parser.parse_args()
    if args.tutorial:
        train_as_in_tutorials(args.model, args.tutorial, args.bf16)
        return
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as temporary:
        for model in [args.model] if args.model else RECIPES:
            folder = Path(temporary, model)
            write_idx(folder, SIZES[model][0], 16)
            steps: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(args.turns):
                # the order is reversed in every second turn
                for number, way in enumerate(sorted(WAYS, reverse=turn % 2 == 1)):
                    out = Path(temporary, f"{model}-{turn}-{number}")
                    steps[way].append(measure(model, way, folder, out))
                    print(f"{model} turn {turn + 1}  {way:32}  {steps[way][-1]:8.2f} ms", flush=True)
            rows = {}
            for way, values in steps.items():
                plain = steps[BF16 if "bf16" in way else FP32]
                ratios = [other / own for other, own in zip(plain, values, strict=True)]
                rows[way] = {"ms a step": values, RATIO: ratios}
            about = f"{model}, batches of {SIZES[model][2]}, {torch.get_num_threads()} threads"
            digits = {"ms a step": 1, RATIO: 2}
            records.report(f"vision-{model}", "way", rows, digits, about, args)


if __name__ == "__main__":
    main()
