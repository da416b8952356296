"""The run folder: what was asked for, what came out, and a picture of it.

    runs/<trainer>/<job id>/
        config.json      every option, the versions, the image, the world (config.2.json when it is resumed)
        metrics.jsonl    one line a log step
        result.json      the last metrics and the SHA-256 of the final weights
        curves.png       losses and scores over the steps
        checkpoints/     epoch-NNNN.pt
        logs/            rank-NNNN.log, one for each rank
        tensorboard/

Nothing of an earlier run is overwritten: a folder that holds one is refused unless it is resumed.
"""

import argparse
import faulthandler
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist
from tqdm import tqdm

from hpctrain import __version__, checkpoint
from hpctrain.world import HpctrainError, UsageError, World, all_or_none, job_id, restarted

# what a line of metrics holds beside losses and scores
NOT_DRAWN = {"epoch", "step", "seconds", "learning_rate", "examples_per_s"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose error is a UsageError: one rank says it, and not all of them."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help lists the options)")


def trainer_parser(trainer: str, description: str) -> Parser:
    """A parser with the flags that every trainer has."""
    parser = Parser(prog=f"hpctrain {trainer}", description=description)
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the weights and of the order of the data (default: %(default)s)")
    add("--out", type=Path, help=f"run folder (default: runs/{trainer}/<job id>, or the one that is resumed)")
    add("--resume", type=Path, metavar="RUN", help="go on from the last whole checkpoint of this run folder")
    return parser


def positive(kind: type) -> Any:  # noqa: ANN401 - an argparse type
    """An argparse type: a number of this kind above zero."""

    def parse(text: str) -> Any:  # noqa: ANN401
        value = kind(text)
        if not value > 0 or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def steps_per_epoch(examples: int, batch_size: int, world: World, accumulate: int = 1) -> int:
    """How many global batches an epoch has; the rest, less than a batch, is left out (another rest each epoch).

    Raises UsageError where the ranks cannot share a batch evenly, in `accumulate` parts each, or the data are less than one.
    """
    parts = world.size * accumulate
    if batch_size % parts:
        near = max(parts, batch_size // parts * parts)
        ranks = f"{world.size} ranks" + (f" with --accumulate {accumulate}" if accumulate > 1 else "")
        raise UsageError(
            f"--batch-size {batch_size} is the global batch, and {ranks} cannot share it evenly: "
            f"take a multiple of {parts}, such as {near}"
        )
    if batch_size > examples:
        raise UsageError(f"--batch-size {batch_size} is more than the {examples} training examples: take a smaller one")
    return examples // batch_size


class Run:
    """An open run folder. Rank 0 writes metrics, checkpoints and progress; every rank has its log."""

    def __init__(self, world: World, trainer: str, args: argparse.Namespace, device: torch.device) -> None:
        """Make the folder, or open it again to resume; a collective call. Raises HpctrainError, naming the folder."""
        self.world = world
        places: list[Path | None] = [None, None]
        with all_or_none(world):
            if world.rank == 0:
                places = list(_prepare(trainer, args))
        if world.size > 1:
            dist.broadcast_object_list(places)
        self.folder, self.resume_from = places
        assert self.folder is not None
        with all_or_none(world):
            self._log = _open_log(self.folder / "logs" / f"rank-{world.rank:04d}.log")
        self.log(
            f"rank {world.rank} of {world.size} on {platform.node()}, {device}, pid {os.getpid()}, torch {torch.__version__}"
        )
        if world.rank == 0:
            _write_config(self.folder, world, trainer, args, device)
            self.print(f"run folder {self.folder}, {world.size} ranks on {world.nodes} nodes ({world.launcher}), {device.type}")
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import: on one rank only

            self._tensorboard = SummaryWriter(self.folder / "tensorboard")
            self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._bar: tqdm | None = None
        self._started = time.monotonic()

    def resume(self, device: torch.device, epochs: int) -> dict[str, Any] | None:
        """The state to go on from, on every rank, or None at a fresh start; a collective call.

        Raises UsageError where the run has as many epochs as are asked for.
        """
        if self.resume_from is None:
            return None
        with all_or_none(self.world):
            state = checkpoint.load(self.resume_from, device)
        if state["epoch"] >= epochs:
            raise UsageError(f"{self.folder} has {state['epoch']} epochs already: give a larger --epochs to go on")
        self.print(f"resuming after epoch {state['epoch']} of {self.resume_from}")
        return state

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of this epoch; a collective call."""
        with all_or_none(self.world):
            if self.world.rank == 0:
                checkpoint.save(checkpoint.path_of(self.folder, epoch), {"epoch": epoch, **state})

    def start_epoch(self, epoch: int, steps: int) -> None:
        """Begin to show the progress of an epoch: a bar on a terminal, lines in a log."""
        if self.world.rank == 0 and sys.stderr.isatty():
            self._bar = tqdm(total=steps, desc=f"epoch {epoch}", unit="step", leave=False)

    def step(self) -> None:
        """One more step of the epoch is done."""
        if self._bar:
            self._bar.update()

    def metrics(self, *, epoch: int, step: int, **values: float) -> None:
        """Keep a line of metrics, and show it. `step` counts from the start of training; values are over all ranks.

        Raises HpctrainError where one is not a number any more: nothing after it is worth computing.
        """
        lost = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if self.world.rank != 0:
            if lost:
                raise SystemExit(0)  # every rank has the same values; rank 0 says it, see all_or_none()
            return
        if lost:
            raise HpctrainError(
                f"{lost} is {values[lost]} at epoch {epoch}, step {step}: training has gone astray, take a smaller --lr (the "
                f"checkpoints before it are in {self.folder})"
            )
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
        """Take the bar away."""
        if self._bar:
            self._bar.close()
            self._bar = None

    def finish(self, model: torch.nn.Module, **values: float) -> None:
        """Write result.json and curves.png; the last line that rank 0 prints says where everything lies."""
        if self.world.rank != 0:
            return
        result = {**values, "seconds": round(time.monotonic() - self._started, 3), "weights_sha256": weights_sha256(model)}
        (self.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        self._tensorboard.close()
        plot(self.folder)
        self.print("  ".join(f"{name} {value:.4f}" for name, value in values.items()) + f"  in {result['seconds']:.1f} s")
        self.print(f"weights {result['weights_sha256'][:16]}, metrics, checkpoints and curves.png are in {self.folder}")

    def print(self, text: str) -> None:
        """Say something, once for all ranks."""
        self.log(text)
        if self.world.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def log(self, text: str) -> None:
        """Write a line to the log of this rank."""
        print(time.strftime("%H:%M:%S"), text, file=self._log, flush=True)


def _prepare(trainer: str, args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Make the folder of the run, on one rank. Returns it and the checkpoint to resume from, if any."""
    folder = args.out or args.resume or Path("runs") / trainer / job_id()
    earlier_run = (folder / "config.json").exists()
    resume = checkpoint.newest(args.resume) if args.resume else None
    if earlier_run and (not args.resume or args.resume.resolve() != folder.resolve()):
        if not (restarted() and json.loads((folder / "config.json").read_text(encoding="utf-8"))["job"] == job_id()):
            raise HpctrainError(f"{folder} holds a run already: give another --out, or go on with it by --resume {folder}")
        # Slurm runs the job again, with the same command line, after a node died: lose nothing.
        if any((folder / "checkpoints").glob("epoch-*.pt")):
            resume = checkpoint.newest(folder)
    try:
        for part in ("checkpoints", "logs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.write_text("room for a line?\n" * 1000, encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise HpctrainError(f"{folder}: cannot be written ({error.strerror}): give a folder of yours by --out") from error
    return folder, resume


def _open_log(path: Path) -> Any:  # noqa: ANN401 - a text file
    """Open the log of this rank; an exception and a crash of the interpreter go there too, beside stderr."""
    try:
        log = path.open("a", encoding="utf-8")
    except OSError as error:
        raise HpctrainError(f"{path}: cannot be written ({error.strerror}): is {path.parent} shared by all nodes?") from error
    faulthandler.enable(log)
    say = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace, file=log)
        log.flush()
        say(kind, error, trace)

    sys.excepthook = hook
    return log


def _write_config(folder: Path, world: World, trainer: str, args: argparse.Namespace, device: torch.device) -> None:
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
    (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """The versions that numbers depend on."""
    found = {"hpctrain": __version__, "python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def revision() -> str | None:
    """The git revision of hpctrain: as the image's build noted it, or of the checkout that this file lies in."""
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
    """SHA-256 over the names, types and bytes of all parameters and buffers: equal when the weights are, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def plot(folder: Path) -> Path:
    """Draw the losses and scores of a run folder as curves.png. Raises HpctrainError where there are no metrics."""
    os.environ.setdefault("MPLCONFIGDIR", str(Path(os.environ.get("TMPDIR", "/tmp")) / f"matplotlib-{os.getuid()}"))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise HpctrainError(f"{folder}/metrics.jsonl cannot be read ({error}): name a run folder") from error
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    names = dict.fromkeys(name for line in lines for name in line if name not in NOT_DRAWN and "/" not in name)
    for axis, of_loss, title in zip(axes, (True, False), ("loss", "score"), strict=True):
        for name in names:
            if name.endswith("_loss") != of_loss:
                continue
            # By step, the last one counts: a resumed run goes over some steps again.
            points = sorted({line["step"]: line[name] for line in lines if name in line}.items())
            axis.plot(*zip(*points, strict=True), label=name.replace("_", " "), marker=None if name == "train_loss" else "o")
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right" if of_loss else "lower right")
    if "test_accuracy" in names:
        best = max((line.get("test_accuracy", 0.0), line["epoch"]) for line in lines)
        axes[1].set_title(f"accuracy: best {best[0]:.4f} after epoch {best[1]}")
    figure.suptitle(str(folder))
    path = folder / "curves.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def main(world: World, arguments: list[str]) -> None:
    """`hpctrain plot RUN`."""
    parser = Parser(prog="hpctrain plot", description="Draw loss and accuracy of a run folder as curves.png.")
    parser.add_argument("run", type=Path, help="a run folder, such as runs/train_ddp/17")
    print(plot(parser.parse_args(arguments).run))
