"""The SHA-256 of trained weights, of one checkout beside another: moved code must not change them.

    .venv/bin/python tests/tools/weights.py [CHECKOUT]...     each with its `make venv`; default: this one

Trains digits on 1, 2 and 4 ranks, ResNet-50 on a few images, with the other trainers, and each fine-tuning
task on its samples, in a few minutes. Prints a row per run and a column per checkout; exits with 1 if a row
differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

TINY = ["--from-scratch", "tiny", "--epochs", "1", "--max-length", "32"]
SMALL = ["--epochs", "1", "--batch-size", "4"]
# name -> ranks, arguments of hpctrain
RUNS = {
    "digits, 1 rank": (1, ["train_ddp", "--epochs", "2"]),
    "digits, 2 ranks": (2, ["train_ddp", "--epochs", "2"]),
    "digits, 4 ranks": (4, ["train_ddp", "--epochs", "2"]),
    "digits, 4 ranks, FSDP2": (4, ["train_fsdp", "--epochs", "2"]),
    "digits, 2 ranks, Lightning": (2, ["train_lightning", "--epochs", "2"]),
    "ResNet-50, 2 ranks": (2, ["train_ddp", "--model", "resnet50", "--data", "images", *SMALL]),
    **{f"{task}, 2 ranks": (2, [task, *TINY]) for task in (
        "nlp.classify", "nlp.pair", "nlp.ner", "nlp.qa", "nlp.generate", "nlp.instruct",
    )},
}  # fmt: skip


def write_images(folder: Path) -> None:
    """Two classes of plain colors with a ramp: eight images for training, four for the test."""
    for split, number in (("train", 4), ("test", 2)):
        for label in ("blue", "red"):
            (folder / split / label).mkdir(parents=True)
            for n in range(number):
                image = Image.linear_gradient("L").rotate(30 * n).resize((80, 80))
                channels = [Image.new("L", (80, 80), 40 * n)] * 2
                place = 2 if label == "blue" else 0
                channels.insert(place, image)
                Image.merge("RGB", channels).save(folder / split / label / f"{n}.png")


def train(checkout: Path, ranks: int, arguments: list[str], folder: Path) -> str:
    """Train with the code of a checkout; returns the digest of the final weights."""
    python = checkout / ".venv/bin/python"
    launcher = [python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [*launcher, "-m", "hpctrain", *arguments, "--out", "run"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"weights.py: {checkout}: hpctrain {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}"
        )
    return json.loads((folder / "run/result.json").read_text())["weights_sha256"]


def main() -> None:
    """Train everything with each checkout, and print the table."""
    checkouts = [Path(word).resolve() for word in sys.argv[1:]] or [Path(__file__).resolve().parents[2]]
    same = True
    for name, (ranks, arguments) in RUNS.items():
        digests = []
        for checkout in checkouts:
            with tempfile.TemporaryDirectory(prefix="hpctrain-weights.") as folder:
                write_images(Path(folder, "images"))
                digests.append(train(checkout, ranks, arguments, Path(folder)))
        same &= len({*digests}) == 1
        print(
            f"{name:28}",
            *(digest[:16] for digest in digests),
            "" if len({*digests}) == 1 else "DIFFERENT",
            flush=True,
        )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
