"""config.json: what a run was made with, and what its numbers depend on."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from hpctrain import __version__
from hpctrain.distributed.world import World, job_id
from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from hpctrain.files.redaction import hide_secrets
from hpctrain.files.trust import is_own
from hpctrain.run.options import as_json
from hpctrain.text import first_line


def write_config(
    folder: Path, world: World, trainer: str, options: Mapping[str, Any], device: torch.device
) -> Path:
    """Write config.json, or config.2.json and so on for a run that is resumed; returns its path.

    `options` are all options of the command. Raises HpctrainError.
    """
    earlier = len(list(folder.glob("config*.json")))
    name = f"config.{earlier + 1}.json" if earlier else "config.json"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = platform.processor() or platform.machine()
    config = {
        "trainer": trainer,
        "options": as_json(options),
        "command": sys.argv,
        "world": asdict(world),
        "job": job_id(),
        "host": platform.node(),
        "device": device_name,
        "threads": torch.get_num_threads(),
        "image": os.environ.get("HPCTRAIN_IMAGE"),
        "image_digest": os.environ.get("HPCTRAIN_IMAGE_DIGEST"),
        "revision": revision(),
        "versions": versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_json(folder / name, config)
    return folder / name


def add_image_digest(path: Path) -> None:
    """Add the image's digest to a config.json that lacks it, if the launch script has computed it by now.

    The launch script computes the digest in the background and names the file for it in
    HPCTRAIN_IMAGE_DIGEST_FILE. The file appears when it is complete. Raises HpctrainError.
    """
    file = Path(os.environ.get("HPCTRAIN_IMAGE_DIGEST_FILE", ""))
    if not (is_own(file) and file.is_file()):
        return
    try:
        digest = file.read_text(encoding="utf-8").strip()
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # the digest is not known yet, or the user has removed the file
    if not config.get("image_digest") and re.fullmatch("sha256:[0-9a-f]{64}", digest):
        write_json(path, config | {"image_digest": digest})


def add_resumption(path: Path, checkpoint: Path, step: int) -> None:
    """Add to a config.N.json the checkpoint and step that the run was resumed from, for hpctrain report."""
    with suppress(OSError, ValueError, HpctrainError):  # the run does not need the entries
        config = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, config | {"resumed_from": str(checkpoint), "resumed_at": step})


def describe_changes(path: Path) -> str:
    """How world, image and versions differ from those of the start before, by the config beside this one."""
    number = int(path.suffixes[0][1:]) - 1 if len(path.suffixes) > 1 else 0
    before = path.with_name(f"config.{number}.json" if number > 1 else "config.json")
    try:
        old, new = (json.loads(file.read_text(encoding="utf-8")) for file in (before, path))
    except (OSError, ValueError):
        return ""  # no earlier start in this folder
    pairs = [("ranks", old["world"]["size"], new["world"]["size"])]
    pairs += [(name, old.get(name), new.get(name)) for name in ("image_digest", "revision")]
    pairs += [(name, old["versions"].get(name), now) for name, now in new["versions"].items()]
    return ", ".join(f"{name} {now} (was {was})" for name, was, now in pairs if was and now and was != now)


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
    """The git commit of hpctrain: recorded in the image, or the commit of the checkout of this file.

    In the image this file can be of a checkout, too, by PYTHONPATH.
    """
    if Path(__file__).is_relative_to(sys.prefix):
        with suppress(OSError):  # not in the image
            return json.loads(Path(sys.prefix, "versions.json").read_text(encoding="utf-8"))["revision"]
    try:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
