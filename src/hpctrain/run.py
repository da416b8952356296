"""The run folder: the configuration of a run, its metrics, its checkpoints and its result.

    runs/<trainer>/<job id>/
        config.json      every option, the versions, the image, the world (config.2.json when the run is resumed)
        metrics.jsonl    one line per log step
        owner.json       the job that is writing here (see owner.py)
        result.json      the last metrics and the SHA-256 of the final weights
        curves.png       losses and scores over the steps
        checkpoints/     epoch-NNNN.pt
        logs/            rank-NNNN.log, one per rank
        tensorboard/

An earlier run is never overwritten: a folder that holds one is refused unless that run is resumed. A new folder is for its
user alone, and has no secrets (see redaction.py).
"""

import argparse
import faulthandler
import hashlib
import json
import math
import os
import platform
import re
import stat
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch
from tqdm import tqdm

from hpctrain import __version__, atomic, checkpoint
from hpctrain.errors import HpctrainError, UsageError, first_line
from hpctrain.owner import Owner
from hpctrain.plot import plot
from hpctrain.redaction import hide_secrets
from hpctrain.rendezvous import all_or_none, broadcast
from hpctrain.watchdog import Watchdog
from hpctrain.world import World, job_id, restart_count, torchrun_restarts


class Run:
    """An open run folder. Rank 0 writes metrics, checkpoints and progress; every rank writes its own log."""

    def __init__(self, world: World, trainer: str, args: argparse.Namespace, device: torch.device) -> None:
        """Create the folder, or open it again to resume. A collective call. Raises HpctrainError, naming the folder."""
        self.world = world
        paths: list[str | None] = []
        with all_or_none(world):
            if world.rank == 0:
                *found, self._owner = _prepare_folder(trainer, args)
                paths = [path and str(path) for path in found]
        folder, resume_from = broadcast(world, paths)
        self.folder, self.resume_from = Path(folder), Path(resume_from) if resume_from else None
        with all_or_none(world):
            self._log = _open_log(self.folder / "logs" / f"rank-{world.rank:04d}.log", world)
        self.log(
            f"rank {world.rank} of {world.size} on {platform.node()}, {device}, pid {os.getpid()}, torch {torch.__version__}"
        )
        with all_or_none(world):
            if world.rank == 0:
                self._config = _write_config(self.folder, world, trainer, args, device)
        if world.rank == 0:
            self.print(f"run folder {self.folder}, {world.size} ranks on {world.nodes} nodes ({world.launcher}), {device.type}")
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import: on rank 0 only

            self._tensorboard = SummaryWriter(self.folder / "tensorboard")
            self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._watchdog = Watchdog(world, args.watchdog, self._log)
        self._bar: tqdm | None = None
        self._epoch = 0
        self._started = time.monotonic()

    def resume(self, device: torch.device, epochs: int, model: torch.nn.Module, entry: str) -> dict[str, Any] | None:
        """The state to resume from, on every rank, or None if the run is new. A collective call.

        It has the weights of `model`, and the entry of this name: see checkpoint.find_fitting(). A state with all epochs is
        that of a run which died before it wrote result.json, and is to be finished without training.
        Raises UsageError if the run has all of its epochs and its result already, HpctrainError if no checkpoint fits.
        """
        if self.resume_from is None:
            return None
        chosen = ""
        with all_or_none(self.world):
            if self.world.rank == 0:
                chosen = str(checkpoint.find_fitting(self.resume_from, model, entry))
        self.resume_from = Path(broadcast(self.world, chosen))
        with all_or_none(self.world):
            state = checkpoint.load(self.resume_from, device)
        self._epoch = state["epoch"]
        if self._epoch >= epochs and self._epoch <= _finished_epochs(self.resume_from.parent.parent):
            raise UsageError(f"{self.folder} has {self._epoch} epochs already: give a larger --epochs to continue")
        self.print(f"resuming after epoch {state['epoch']} of {self.resume_from}")
        return state

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of this epoch. A collective call. Raises HpctrainError."""
        with all_or_none(self.world):
            if self.world.rank == 0:
                self._owner.check()
                checkpoint.save(checkpoint.path_of(self.folder, epoch), {"epoch": epoch, **state})

    def start_epoch(self, epoch: int, steps: int) -> None:
        """Show a progress bar with this number of steps if stderr is a terminal."""
        if self.world.rank == 0 and sys.stderr.isatty():
            self._bar = tqdm(total=steps, desc=f"epoch {epoch}", unit="step", leave=False)

    def step(self) -> None:
        """Advance the progress bar by one step. The first step starts the watchdog."""
        self._watchdog.step()
        if self._bar:
            self._bar.update()

    def metrics(self, *, epoch: int, step: int, **values: float) -> None:
        """Write a line of metrics and print it. `step` counts from the start of training.

        Every rank passes the same values, which are over all ranks. Raises HpctrainError if one is not finite.
        """
        self._epoch = epoch
        self._watchdog.pause()  # a file system may stall
        diverged = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if self.world.rank != 0:
            if diverged:
                raise SystemExit(0)  # rank 0 prints the error: see all_or_none()
            return
        if diverged:
            raise HpctrainError(
                f"{diverged} is {values[diverged]} at epoch {epoch}, step {step}: training diverged, use a smaller --lr "
                f"(earlier checkpoints are in {self.folder})"
            )
        self._owner.check()
        line = {"epoch": epoch, "step": step, "seconds": round(time.monotonic() - self._started, 3), **values}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar:
            self._bar.set_postfix_str(text)
        else:
            self.print(f"epoch {epoch} step {step}  {text}")

    def end_epoch(self) -> None:
        """Close the progress bar."""
        self._watchdog.pause()
        if self._bar:
            self._bar.close()
            self._bar = None

    def finish(self, model: torch.nn.Module, **values: float) -> None:
        """Write result.json and curves.png, and print where they are. Raises HpctrainError.

        If the launch script was still computing the image's digest when the run started, it is added to config.json now.
        """
        self._watchdog.stop()
        if self.world.rank != 0:
            return
        self._owner.check()
        result = {
            **values,
            "epochs": self._epoch,
            "seconds": round(time.monotonic() - self._started, 3),
            "weights_sha256": weights_sha256(model),
        }
        _write_json(self.folder / "result.json", result)
        _add_image_digest(self._config)
        self._tensorboard.close()
        plot(self.folder)
        self.print("  ".join(f"{name} {value:.4f}" for name, value in values.items()) + f"  in {result['seconds']:.1f} s")
        self.print(f"weights {result['weights_sha256'][:16]}, metrics, checkpoints and curves.png are in {self.folder}")
        self._owner.release()

    def print(self, text: str) -> None:
        """Print a line on rank 0, above the progress bar; every rank logs it."""
        self.log(text)
        if self.world.rank == 0:
            tqdm.write(hide_secrets(text), file=sys.stdout)
            sys.stdout.flush()

    def log(self, text: str) -> None:
        """Write a line to the log of this rank."""
        print(time.strftime("%H:%M:%S"), hide_secrets(text), file=self._log, flush=True)


def _prepare_folder(trainer: str, args: argparse.Namespace) -> tuple[Path, Path | None, Owner]:
    """Create the run folder and own it, on one rank. Returns it, the checkpoint to resume from, if any, and its owner.

    Raises HpctrainError.
    """
    folder = args.out or args.resume or Path("runs") / trainer / job_id()
    earlier_run = (folder / "config.json").exists()
    source = args.resume
    if earlier_run and (not args.resume or args.resume.resolve() != folder.resolve()):
        restarted = restart_count() > 0 or (torchrun_restarts() and Owner(folder).is_of_this_launch())
        if not (restarted and json.loads((folder / "config.json").read_text(encoding="utf-8"))["job"] == job_id()):
            raise HpctrainError(f"{folder} holds a run already: give another --out, or continue that run with --resume {folder}")
        # Slurm or torchrun has started the job again, with the same command line.
        if any((folder / "checkpoints").glob("epoch-*.pt")):
            source = folder
    own = source is not None and source.resolve() == folder.resolve()
    resume = None
    if source and not (own and (folder / "checkpoints").is_dir()):
        resume = checkpoint.find_newest(source)
    try:
        # For its user alone, with all that is in it. A folder that exists keeps its permissions.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = Owner(folder)
        owner.acquire()
        for part in ("checkpoints", "logs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        if earlier_run:
            atomic.remove_leftovers(folder / "checkpoints")
        probe = folder / f".probe.{os.getpid()}"
        probe.write_bytes(bytes(16_000))
        probe.unlink()
    except OSError as error:
        raise HpctrainError(
            f"{folder}: cannot be written ({error.strerror}): use --out to name a folder that you can write to"
        ) from error
    if own:
        resume = checkpoint.find_newest(folder)  # the last owner may have written until now
    return folder, resume, owner


def _finished_epochs(folder: Path) -> float:
    """The epochs of the result in a run folder; 0 if it has none, infinity if the result does not say."""
    try:
        return json.loads((folder / "result.json").read_text(encoding="utf-8")).get("epochs", math.inf)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):
        return math.inf


def _open_log(path: Path, world: World) -> Any:  # noqa: ANN401 - a text file
    """Open the log of this rank. Uncaught exceptions go to it as well as to stderr; crashes of the interpreter go to it alone.

    Of the exception that the death of another rank causes, stderr gets one line.
    """
    try:
        log = path.open("a", encoding="utf-8")
    except OSError as error:
        raise HpctrainError(f"{path}: cannot be written ({error.strerror}): is {path.parent} shared by all nodes?") from error
    faulthandler.enable(log)
    default_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(hide_secrets("".join(traceback.format_exception(kind, error, trace))), end="", file=log, flush=True)
        # What Gloo and NCCL say when another rank has died. Its own error is the one to read, not this stack of every other rank.
        if world.size > 1 and re.search("Connection (closed|reset) by peer|Broken pipe|ncclRemoteError", str(error)):
            print(
                f"hpctrain: error: {path.stem} on {platform.node()} lost the connection to another rank, which has probably "
                f"died: look for the first error of the job; the stack is in {path}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        default_hook(kind, error, trace)

    sys.excepthook = hook
    return log


def _write_config(folder: Path, world: World, trainer: str, args: argparse.Namespace, device: torch.device) -> Path:
    """Write config.json, or config.2.json and so on for a run that is resumed; returns its path. Raises HpctrainError."""
    earlier = len(list(folder.glob("config*.json")))
    name = f"config.{earlier + 1}.json" if earlier else "config.json"
    config = {
        "trainer": trainer,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "command": sys.argv,
        "world": asdict(world),
        "job": job_id(),
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "image": os.environ.get("HPCTRAIN_IMAGE"),
        "image_digest": os.environ.get("HPCTRAIN_IMAGE_DIGEST"),
        "revision": revision(),
        "versions": versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    _write_json(folder / name, config)
    return folder / name


def _add_image_digest(path: Path) -> None:
    """Add the image's digest to a config.json that lacks it, if the launch script has computed it by now.

    A launch script without a record of the digest computes it in the background, and names the file for it in
    HPCTRAIN_IMAGE_DIGEST_FILE. That file appears when it is complete. Its folder may be in /tmp, so only a regular file of
    this user is read. Raises HpctrainError.
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
        config["image_digest"] = digest
        _write_json(path, config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    try:
        atomic.write_text(path, json.dumps(hide_secrets(content), indent=2) + "\n")
    except OSError as error:
        raise HpctrainError(f"{path}: cannot be written ({first_line(error)}): free some space there, or use --out") from error


def versions() -> dict[str, str]:
    """The versions that the numbers of a run depend on."""
    found = {"hpctrain": __version__, "python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
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
        return subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all parameters and buffers: equal if the weights are, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
