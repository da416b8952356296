"""--wandb: the metrics of a run at Weights & Biases (W&B) while it trains.

A separate process follows metrics.jsonl, so neither W&B nor the network can end a training or slow it down.
It logs to the service if it has a key and reaches it, and otherwise into an offline run in the run folder. A
restarted job sends the same steps to the same W&B run, whose id comes from config.json; W&B ignores steps
that it has.
"""

import hashlib
import json
import logging
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.errors import HpctrainError, print_error
from hpctrain.files.redaction import hide_secrets
from hpctrain.run.reader import read_configs, read_record, summarize
from hpctrain.text import as_given, first_line, one_line, say, show_as

if TYPE_CHECKING:
    import wandb

MAX_START_SECONDS = 30  # for the service to accept the run
MAX_END_SECONDS = 20  # for the last metrics to arrive after the training


class Mirror:
    """Follows a run folder's metrics. Methods raise no exception, and wait at most MAX_END_SECONDS."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_started = folder, False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, at the first call, in a session of its own: Ctrl-C is for the trainer."""
        if self._is_started:
            return
        self._is_started = True
        command = [*SAFE_PYTHON, "-m", "hpctrain.run.wandb", str(self._folder), as_given(str(self._folder))]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            _print_failure(self._folder, first_line(error))

    def close(self) -> None:
        """Let the process send the last metrics and end. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(b"end\n", MAX_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _print_failure(self._folder, f"W&B has not ended within {MAX_END_SECONDS} s")


def _print_failure(run: Path, reason: str) -> None:
    text = (
        f"{reason}: the training goes on without W&B, and this command makes an offline run of all metrics:"
    )
    print_error(one_line(f"hpctrain: --wandb: {hide_secrets(f'{text} hpctrain export wandb {run}')}"))


@contextmanager
def folder_for_wandb() -> Iterator[None]:
    """Give wandb a folder for its temporary folders, and remove them at the end.

    wandb makes two at import, and removes them at finalization, which hpctrain skips: see entry.py.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-wandb.") as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = None
            if "wandb" in sys.modules and hasattr(sys.modules["wandb"], "teardown"):
                sys.modules["wandb"].teardown()  # ends its process, which has its socket there


def start_wandb(run: Path, folder: Path, mode: str) -> "wandb.Run":
    """Start the W&B run of a run folder, in `mode` online or offline; wandb writes below `folder`.

    W&B gets the run folder's configuration, without secrets, and nothing about this process or its machine.
    Raises HpctrainError if wandb is missing or `run` is not a run folder, and whatever wandb raises.
    """
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    logging.raiseExceptions = False  # on a full disk, each line of wandb's log would print a stack
    try:
        import wandb

        _read_settings(wandb)
    except ImportError as error:
        raise HpctrainError(
            f"wandb cannot be imported ({error}): run this in the image, or pip install wandb"
        ) from error
    configs, summary = read_configs(run), summarize(run)
    last = configs[-1]
    config = {
        **last["options"],
        **{name: last.get(name) for name in ("world", "job", "image_digest", "revision")},
    }
    config["resumed_at"] = [each["resumed_at"] for each in configs[1:] if "resumed_at" in each]
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, save_code=False, init_timeout=MAX_START_SECONDS,
        x_disable_machine_info=True, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
    )  # fmt: skip
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "hpctrain"),
        dir=folder.absolute(),  # wandb's process is in the empty folder of _read_settings()
        id=identity(configs[0]),
        config=config,
        mode=mode,  # type: ignore[arg-type]  # of WANDB_MODE: wandb checks it
        resume="allow" if mode == "online" else None,
        name=f"{summary['trainer']} {summary['job']}",
        job_type=str(summary["trainer"]),
        settings=settings,
    )


def _read_settings(wandb: ModuleType) -> None:
    """Let wandb read its settings, once in a process, in an empty folder: ./wandb/settings names a server."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            wandb.setup()
        finally:
            os.chdir(before)


def identity(config: dict[str, Any]) -> str:
    """The id of a run at W&B, from entries of its first config.json that never change."""
    stable = [config.get(name) for name in ("trainer", "job", "host", "started", "command")]
    return hashlib.sha256(json.dumps(stable).encode()).hexdigest()[:16]


def result_numbers(run: Path) -> dict[str, Any]:
    """The numbers and texts of result.json; {} before the end of the run."""
    content = read_record(run / "result.json")
    return {name: value for name, value in content.items() if isinstance(value, (int, float, str))}


def _start_where_possible(run: Path) -> "wandb.Run":
    """Start the W&B run in WANDB_MODE, or online if that works, else offline. Prints where it is."""
    _remove_pieces(run)  # of earlier starts of the job: the new piece gets their steps, too
    mode, reason = os.environ.get("WANDB_MODE", "online"), ""
    if mode == "online":
        try:
            logged = start_wandb(run, run, mode)
            say(f"hpctrain: --wandb: live at {logged.url}")
            return logged
        except HpctrainError:
            raise
        except Exception as error:  # no network, no key, or an error of the service
            mode, reason = "offline", f" ({first_line(error)})"
            _remove_pieces(run)
    logged = start_wandb(run, run, mode)
    upload = f"wandb sync {shlex.quote(str(run / 'wandb' / Path(logged.dir).parent.name))}"
    say(f"hpctrain: --wandb: {mode}{hide_secrets(reason)}; to upload it: {upload}")
    return logged


def _remove_pieces(run: Path) -> None:
    for piece in (run / "wandb").glob(f"*run-*-{identity(read_configs(run)[0])}"):
        shutil.rmtree(piece)


def follow(run: Path) -> None:
    """Log the lines of metrics.jsonl as they appear, until stdin has a line or ends.

    The trainer is done when it writes the line, or dead when stdin ends without a line. A step may have
    several lines. W&B takes each step once, so a step is logged when the next one begins. The last step of a
    dead trainer may lack lines: it is logged after the resume.
    """
    logged = _start_where_possible(run)
    ended, text = False, b""
    step: dict[str, float] = {}
    with (run / "metrics.jsonl").open("rb") as file:
        while True:
            text += file.read()
            *lines, text = text.split(b"\n")
            for line in map(json.loads, lines):
                if step and step["step"] != line["step"]:
                    _log(logged, step)
                    step = {}
                step |= line
            if ended:
                break
            ended = bool(select.select([sys.stdin], [], [], 1.0)[0])
    threading.Timer(MAX_END_SECONDS, os._exit, [1]).start()
    finished = sys.stdin.readline() != ""
    if finished:
        _log(logged, step)
        logged.summary.update(result_numbers(run))
    logged.finish(exit_code=0 if finished else 1)


def _log(logged: "wandb.Run", step: dict[str, float]) -> None:
    logged.log({name: value for name, value in step.items() if name != "step"}, step=int(step["step"]))


def main() -> None:
    """Follow the run folder that the command line names, and then as the user wrote it."""
    run = Path(sys.argv[1])
    show_as(run, sys.argv[2])
    try:
        with folder_for_wandb():
            follow(run)
    except Exception as error:
        _print_failure(run, first_line(error))
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
