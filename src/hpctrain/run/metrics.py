"""The metrics of a run, as lines of metrics.jsonl and in TensorBoard."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from hpctrain.run.reader import POSITION, read_line, read_metrics
from hpctrain.run.wandb import Mirror
from hpctrain.text import counted, say

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """The metrics of a run folder, on one rank. `lines` is the number of lines in metrics.jsonl.

    With `wandb` they go to Weights & Biases as well. `check` is called while the file system cannot be
    written; it raises HpctrainError if this job may no longer write.
    """

    def __init__(self, folder: Path, wandb: bool = False, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._path, self._board_folder = folder / "metrics.jsonl", folder / "tensorboard"
        self._mirror = Mirror(folder) if wandb else None
        self.lines = 0
        self._open()

    def add(self, position: dict[str, float], values: dict[str, float]) -> None:
        """Append a line with the position, which has "step", and the values. Raises HpctrainError."""
        try:
            self._file.write(json.dumps(position | values) + "\n")
            self._flush()
        except OSError as error:
            problem = f"{self._path}: cannot be written ({error.strerror}): free some space"
            raise HpctrainError(problem) from error
        self.lines += 1
        if self._mirror:
            self._mirror.start()
        try:
            self._show(position["step"], values)
        except OSError:  # earlier values could not be written
            self._show_again()

    def rewind(self, step: int, lines: int | None = None) -> None:
        """Keep the first lines only, until this step: a resumed run repeats those of the others.

        Without a number of lines, the steps decide. They also do if lines are damaged or missing, as after
        the crash of a node, which a line says. Raises OSError.
        """
        if self._file.tell() == 0 and not lines:
            return
        self._close_files()
        texts = self._path.read_bytes().splitlines()[:lines]
        kept = [text for text in texts if read_line(text)]
        if lost := (len(texts) if lines is None else lines) - len(kept):
            say(f"hpctrain: {self._path}: {counted(lost, 'line')} damaged or missing: the others are kept")
        if lost or lines is None:
            kept = [text for text in kept if read_line(text)["step"] <= step]
        atomic.write_text(self._path, "".join(f"{text.decode()}\n" for text in kept))
        self._open()
        self.lines = len(kept)
        self._show_again()

    def close(self) -> None:
        """Write what is still in memory."""
        self._close_files()
        if self._mirror:
            self._mirror.close()

    def _flush(self) -> None:
        """Write what is in memory; after an error, try again with what is left. Raises OSError."""
        retry = atomic.Retry()
        while True:
            try:
                return self._file.flush()
            except OSError as error:
                retry.wait(error, f"{self._path}: cannot be written ({error.strerror})")
                self._check()
                # A stale handle stays stale. What is left is in the buffer of this file object.
                with suppress(OSError), atomic.open_to_append(self._path) as again:
                    os.dup2(again.fileno(), self._file.fileno())

    def _close_files(self) -> None:
        self._file.close()
        if self._board:
            try:
                self._board.flush()
            except OSError:
                self._show_again()
        with suppress(OSError):
            if self._board:
                self._board.close()

    def _open(self) -> None:
        self._board: SummaryWriter | None = None
        self._file = atomic.open_to_append(self._path)

    def _show(self, step: float, values: dict[str, float]) -> None:
        if self._board is None:
            # takes up to a second to import: after the first step, on rank 0
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self._board_folder)
            hide_errors_of_writers()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def _show_again(self) -> None:
        """Write the files of TensorBoard anew, from metrics.jsonl."""
        self._board = None
        shutil.rmtree(self._board_folder, ignore_errors=True)
        with suppress(OSError):  # the next line of metrics tries again
            for line in read_metrics(self._path.parent):
                self._show(line["step"], {name: line[name] for name in line if name not in POSITION})


def hide_errors_of_writers() -> None:
    """Print no stack when the thread of a SummaryWriter cannot write: its next call raises the error."""
    default_hook = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if not (type(error.thread).__name__ == "_AsyncWriterThread" and isinstance(error.exc_value, OSError)):
            default_hook(error)

    threading.excepthook = hook


def format_seconds(seconds: float) -> str:
    """Such as 40 s, 12 min, 3 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def plain_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with scalars of numpy and torch as numbers of Python."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
