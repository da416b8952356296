"""config.json: what a run was made with, and what its numbers depend on."""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from hpctrain import __version__
from hpctrain.distributed.world import World, job_id
from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files import atomic
from hpctrain.files.redaction import hide_secrets
from hpctrain.files.trust import is_own
from hpctrain.run.options import as_json
from hpctrain.run.owner import launch_id
from hpctrain.run.reader import read_record
from hpctrain.text import as_given, say

FACTS = ("image_digest", "revision", "code")  # entries of config.json


def write_config(
    folder: Path, world: World, trainer: str, options: Mapping[str, Any], device: torch.device
) -> Path:
    """Write config.json, or config.2.json and so on for a run that is resumed; returns its path.

    `options` are all options of the command. An earlier file that is damaged is kept under another name, and
    gets the same content. Raises HpctrainError.
    """
    number = max(map(_number, folder.glob("config*.json")), default=0) + 1
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = platform.processor() or platform.machine()
    config = {
        "trainer": trainer,
        "options": as_json(options),
        "command": sys.argv,
        "world": asdict(world),
        "devices": count_devices(world, options, device),
        "job": job_id(),
        "launch": launch_id(),
        "host": platform.node(),
        "device": device_name,
        "threads": torch.get_num_threads(),
        "image": os.environ.get("HPCTRAIN_IMAGE"),
        "image_digest": os.environ.get("HPCTRAIN_IMAGE_DIGEST"),
        "revision": revision(),
        "code": code_digest(),
        "versions": versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    for path in [_path(folder, each) for each in range(1, number + 1)]:
        if read_record(path):
            continue
        if path.exists():
            aside = path.with_name(f"{path.name}.damaged")
            with suppress(OSError):
                shutil.copyfile(path, aside)
            say(f"hpctrain: {path} is damaged: kept as {aside.name}, and written anew")
        write_json(path, config)
    return path


def count_devices(world: World, options: Mapping[str, Any], device: torch.device) -> int:
    """How many GPUs, or CPU ranks, a run computes on: one a rank, but with DataParallel all that it sees."""
    is_parallel = options.get("strategy") == "dp" and device.type == "cuda"
    return world.size * (torch.cuda.device_count() if is_parallel else 1)


def _path(folder: Path, number: int) -> Path:
    return folder / ("config.json" if number == 1 else f"config.{number}.json")


def _number(path: Path) -> int:
    """Of a start, from 1, by the name of its config.json."""
    number = path.name.split(".")[1]
    return int(number) if number.isdecimal() else 1


def add_image_digest(path: Path) -> bool:
    """Add the image's digest to a config.json that lacks it, if the launch script has computed it by now.

    Returns whether it was added. The launch script computes the digest in the background and names the file
    for it in HPCTRAIN_IMAGE_DIGEST_FILE. The file appears when it is complete. Raises HpctrainError.
    """
    file = Path(os.environ.get("HPCTRAIN_IMAGE_DIGEST_FILE", ""))
    if not (is_own(file) and file.is_file()):
        return False
    try:
        digest = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return False  # the digest is not known yet
    config = read_record(path)  # {} if the user has removed the file
    if not config or config.get("image_digest") or not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        return False
    write_json(path, config | {"image_digest": digest})
    return True


def add_resumption(path: Path, checkpoint: Path, step: int) -> None:
    """Add to a config.N.json the checkpoint and step that the run was resumed from, for hpctrain report."""
    with suppress(HpctrainError):  # the run does not need the entries
        config = read_record(path)
        write_json(path, config | {"resumed_from": as_given(str(checkpoint)), "resumed_at": step})


def describe_changes(path: Path, names: Collection[str] = ()) -> str:
    """How world, image, code and versions differ from those of the starts before, by their config.json.

    `names`: of these facts only.
    """
    before: dict[str, Any] = {}
    for number in range(1, _number(path)):
        before |= _list_facts(_path(path.parent, number))
    now = _list_facts(path)
    return ", ".join(
        f"{name} {value} (was {before[name]})"
        for name, value in now.items()
        if value != before.get(name, value) and (not names or name in names)
    )


def _list_facts(path: Path) -> dict[str, Any]:
    """What the numbers of a start depend on beside its options, as far as it is known."""
    config = read_record(path)
    world, known = config.get("world"), config.get("versions")
    facts = {"ranks": world.get("size") if isinstance(world, dict) else None}
    facts |= {name: config.get(name) for name in FACTS} | (known if isinstance(known, dict) else {})
    return {name: value for name, value in facts.items() if value}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file of a run folder, without secrets. Raises HpctrainError, naming the file."""
    with explain_os_error(f"{path}: cannot be written", "free some space there, or use --out"):
        atomic.write_text(path, json.dumps(hide_secrets(content), indent=2) + "\n")


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


def code_digest() -> str | None:
    """SHA-256 (16 digits) of the script and of the modules below its folder that it has imported by now.

    None without a script, as in a notebook, and for the commands of hpctrain, which have a revision.
    """
    files = {vars(module).get("__file__") for module in [*sys.modules.values()]}
    script = vars(sys.modules["__main__"]).get("__file__")
    installed = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
    if not script or str(script).startswith(installed):
        return None
    folder, digest = Path(script).absolute().parent, hashlib.sha256()
    for name in sorted(str(file) for file in files if file and not str(file).startswith(installed)):
        with suppress(OSError):
            if Path(name).is_relative_to(folder) and "site-packages" not in Path(name).parts:
                content = Path(name).read_bytes()
                digest.update(f"{Path(name).relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


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
