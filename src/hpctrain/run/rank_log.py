"""The log of a rank, which also gets uncaught exceptions and crashes of the interpreter."""

import faulthandler
import os
import platform
import re
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from hpctrain.distributed.world import World
from hpctrain.errors import explain_os_error, print_error
from hpctrain.files import atomic
from hpctrain.files.redaction import hide_secrets


def open_log(path: Path, world: World) -> IO[str]:
    """Open the log of this rank.

    Uncaught exceptions also go to stderr (one line if another rank's death causes it), crashes do not.
    """
    with explain_os_error(f"{path}: cannot be written", f"is {path.parent} shared by all nodes?"):
        log = atomic.open_to_append(path)
    faulthandler.enable(log)
    default_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _write(log, "".join(traceback.format_exception(kind, error, trace)))
        # Gloo and NCCL say this when another rank has died, whose error alone the user has to read.
        if world.size > 1 and re.search(
            "Connection (closed|reset) by peer|Broken pipe|ncclRemoteError", str(error)
        ):
            print_error(
                f"hpctrain: error: {path.stem} on {platform.node()} lost the connection to another rank, "
                f"which has probably died: look for the first error of the job; the stack is in {path}"
            )
            os._exit(1)
        default_hook(kind, error, trace)

    sys.excepthook = hook
    return log


def write_line(log: IO[str], text: str) -> None:
    """Write a line with the time of day."""
    _write(log, f"{time.strftime('%H:%M:%S')} {text}\n")


def _write(log: IO[str], text: str) -> None:
    with suppress(OSError):  # a full disk must not end the training
        print(hide_secrets(text), end="", file=log, flush=True)
