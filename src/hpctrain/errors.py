"""Errors that a user can fix, which end a command with one line instead of a traceback."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.text import first_line, one_line, reason


class HpctrainError(Exception):
    """A problem that the user can fix; the message is one line that says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UsageError(HpctrainError):
    """An error in the command line. Every rank detects it by itself, so rank 0 alone prints it."""


class DivergedError(HpctrainError):
    """Losses, gradients or weights that are not finite: the same options would give them again."""


class EndEarly(SystemExit):
    """The end of a process without an error: its job goes on from a checkpoint, or has nothing to do."""


@contextmanager
def explain_os_error(problem: str, advice: str, also: type[Exception] = OSError) -> Iterator[None]:
    """Raise an OSError of the block, or one of class `also`, as HpctrainError: "PROBLEM (why): ADVICE"."""
    try:
        yield
    except (OSError, also) as error:
        raise HpctrainError(f"{problem} ({reason(error)}): {advice}") from error


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of a Rust library, a BaseException that `except Exception` misses, as RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(first_line(error)) from error


@contextmanager
def missing_extra_as_error() -> Iterator[None]:
    """Raise the ModuleNotFoundError of a package of the extra "image" as an error that names the extra."""
    from importlib.metadata import PackageNotFoundError, requires  # which most commands need not wait for

    try:
        yield
    except ModuleNotFoundError as error:
        try:
            extra = [line for line in requires("hpctrain") or () if 'extra == "image"' in line]
        except PackageNotFoundError:  # from a folder of sources
            extra = []
        missing = (error.name or "").partition(".")[0]
        names = {re.split(r"[^\w.-]", line, maxsplit=1)[0].replace("-", "_") for line in extra}
        # Lightning imports lightning_utilities first.
        if missing not in names and missing.partition("_")[0] not in names:
            raise
        raise HpctrainError(
            f"this needs the package {missing}, which is not installed: install the extra `image`, "
            "with pip install -e '.[image]' in the folder of hpctrain"
        ) from error


def hint_missing(path: str | Path) -> str:
    """What to add to an error about a missing path: no shell saw it, or its folder is not mounted."""
    if str(path).startswith("~") or "$" in str(path):
        return "; only a shell replaces ~ and $NAME, and not in --option=~: write the whole path"
    folder = Path(os.path.realpath(path)).parent  # of a link, that of its target
    if folder.exists() or not os.environ.keys() & {"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"}:
        return ""
    return (
        "; if it is there outside of the container, "
        f"export HPCTRAIN_BIND={folder} (apptainer exec --bind {folder})"
    )


def print_error(text: str) -> None:
    """Print lines to stderr in one write. print() makes two, and another rank may print between them."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
