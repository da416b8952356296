"""config.json: what a run was made with, and what its numbers depend on."""

import argparse
import json
import os
import platform
import re
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from hpctrain import __version__
from hpctrain.distributed.world import World, job_id
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.files import atomic
from hpctrain.files.redaction import hide_secrets
from hpctrain.text import first_line

# Options that may differ when a run is resumed: they do not change its weights by more than rounding. A
# checkpoint of another --data with as many examples is not noticed: jobs copy their data to folders that are
# named after the job.
_FREE_OPTIONS = {
    "out",
    "resume",
    "force",
    "data",
    "watchdog",
    "checkpoint_every",
    "keep_checkpoints",
    "strict",
    "on_nan",
}
_FREE_OPTIONS |= {
    "device",
    "devices",
    "num_nodes",
    "accelerator",
    "workers",
    "strategy",
    "gradient_checkpointing",
    "wandb",
}
_FREE_OPTIONS |= {"tensor_parallel", "cpu_offload", "profile", "compile", "cuda_graphs", "deterministic"}


def write_config(
    folder: Path, world: World, trainer: str, args: argparse.Namespace, device: torch.device
) -> Path:
    """Write config.json, or config.2.json and so on for a run that is resumed; returns its path.

    Raises HpctrainError.
    """
    earlier = len(list(folder.glob("config*.json")))
    name = f"config.{earlier + 1}.json" if earlier else "config.json"
    config = {
        "trainer": trainer,
        "options": {
            key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
        },
        "command": sys.argv,
        "world": asdict(world),
        "job": job_id(),
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "image": os.environ.get("HPCTRAIN_IMAGE"),
        "image_digest": os.environ.get("HPCTRAIN_IMAGE_DIGEST"),
        "revision": revision(),
        "versions": versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_json(folder / name, config)
    return folder / name


def weighty_options(args: argparse.Namespace) -> dict[str, str]:
    """The options that change the weights by more than rounding."""
    return {name: str(value) for name, value in vars(args).items() if name not in _FREE_OPTIONS}


def list_other_options(args: argparse.Namespace, saved: dict[str, str], free: tuple[str, ...]) -> str:
    """The options that change the weights and are not those that a checkpoint has, as a text; "" if there are
    none.

    `free` names others that may differ.
    """
    own = weighty_options(args)
    # An option that the earlier version did not have yet is as if it was not given.
    names = [
        name for name in sorted({*own, *saved} - {*free}) if own.get(name, "None") != saved.get(name, "None")
    ]
    return ", ".join(
        f"--{name.replace('_', '-')} {own.get(name)} instead of {saved.get(name)}" for name in names
    )


def compare_options(
    args: argparse.Namespace, saved: dict[str, str], free: tuple[str, ...], checkpoint: Path
) -> str:
    """The text of list_other_options(). Raises UsageError if there are some, unless --force is given."""
    text = list_other_options(args, saved, free)
    if text and not args.force:
        raise UsageError(
            f"{checkpoint} was saved with other options: {text}: give those of that run, or --force to go on with these"
        )
    return text


def add_image_digest(path: Path) -> None:
    """Add the image's digest to a config.json that lacks it, if the launch script has computed it by now.

    A launch script without a record of the digest computes it in the background, and names the file for it in
    HPCTRAIN_IMAGE_DIGEST_FILE. That file appears when it is complete. Its folder may be in /tmp, so only a
    regular file of this user is read. Raises HpctrainError.
    """
    file = os.environ.get("HPCTRAIN_IMAGE_DIGEST_FILE")
    if not file:
        return
    try:
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return
        digest = Path(file).read_text(encoding="utf-8").strip()
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # the digest is not known yet, or the user has removed the file
    if not config.get("image_digest") and re.fullmatch("sha256:[0-9a-f]{64}", digest):
        write_json(path, config | {"image_digest": digest})


def add_resumption(path: Path, checkpoint: Path, step: int) -> None:
    """Add to a config.N.json the checkpoint that the run was resumed from, and its optimizer step, for `hpctrain report`."""
    with suppress(OSError, ValueError, HpctrainError):  # the run can go on without
        write_json(
            path,
            json.loads(path.read_text(encoding="utf-8"))
            | {"resumed_from": str(checkpoint), "resumed_at": step},
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file of a run folder, without secrets. Raises HpctrainError, naming the file."""
    try:
        atomic.write_text(path, json.dumps(hide_secrets(content), indent=2) + "\n")
    except OSError as error:
        raise HpctrainError(
            f"{path}: cannot be written ({first_line(error)}): free some space there, or use --out"
        ) from error


def versions() -> dict[str, str]:
    """The versions that the numbers of a run depend on."""
    found = {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def revision() -> str | None:
    """The git commit of hpctrain: the one recorded in the image, or that of the checkout that this file is in."""
    try:
        return json.loads(Path(sys.prefix, "versions.json").read_text(encoding="utf-8"))["revision"]
    except OSError:
        pass  # not in the image
    try:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
