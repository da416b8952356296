"""How a rank ends: with one-line errors, exit statuses that launchers understand, and no checkpoint lost.

The commands of hpctrain run by main(), and scripts of users may. In a script that does not, an error of
hpctrain is one line as well once it has used a name of `import hpctrain`: see print_errors_in_one_line().
"""

import errno
import functools
import io
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from types import TracebackType
from typing import NoReturn

from hpctrain.distributed.control import report_failed
from hpctrain.distributed.python import shadowed_packages
from hpctrain.distributed.world import World, detect, torchrun_restarts
from hpctrain.errors import EndEarly, HpctrainError, UsageError, print_error
from hpctrain.files.redaction import hide_secrets
from hpctrain.text import first_line, reason

# Called when an error ends this process: what others should not wait for.
on_failure: list[Callable[[], object]] = []
# Errors of a path that a user has given: the folder of another user, a link in a circle, and the like.
_PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
# The exit status of a script that wants to be started again: see docs/guides/scripts.md.
REQUEUE = 75


def main(function: Callable[[World], object], world: World | None = None) -> NoReturn:
    """Call function(world), and end this process; `world` is the detected one unless given.

    Exit status 0 after the function, and on ranks that leave an error to rank 0; 1 after an error, and 2 if
    it is in the command line, which rank 0 prints. Python prints the traceback of other exceptions.
    """
    _open_streams()
    status, rank = 0, 0
    try:
        world = world or detect()
        rank = world.rank
        function(world)
        sys.stdout.flush()
    except BaseException as error:
        handled = _handle(error, rank)
        if handled is None:
            raise
        status = handled
    # An error must not lose a checkpoint that is being written in the background.
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    if status != 0:
        _call_on_failure()
    # Skip the finalization of the interpreter. DDP keeps threads of Gloo beyond destroy_process_group(), and
    # a thread that frees its last tensor during finalization aborts the process: seen in 3 of 30 runs on a
    # busy machine with torch 2.13; github.com/pytorch/pytorch/pull/179291 describes the same.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _open_streams() -> None:
    """Let print() never fail, whatever the shell has made of stdout and stderr.

    A closed one (`>&-`, as some daemons start their jobs) becomes /dev/null: the next file would get its
    number, and what libraries print. Text that the encoding of the terminal does not have is escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the smallest number that is free
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _call_on_failure() -> None:
    if not torchrun_restarts():  # a restart finds by owner.json that it goes on with its own run
        for call in on_failure:
            call()


def _handle(error: BaseException, rank: int) -> int | None:
    """Print what the user has to know; returns the exit status, or None if that is a traceback."""
    if isinstance(error, EndEarly):
        return 0
    if isinstance(error, SystemExit):
        return _handle_exit(error)
    if isinstance(error, KeyboardInterrupt):
        if rank == 0:
            print_error(f"hpctrain: interrupted {error}".rstrip())
        return 130
    if isinstance(error, BrokenPipeError):  # the reader of the output has ended, such as `| head`
        _discard_output()
        return 141
    if isinstance(error, ImportError | AttributeError):
        for text in shadowed_packages():  # may be why
            print_error(f"hpctrain: error: {text}")
    explained = _explain(error)
    return _report(explained, rank) if explained else None


def _handle_exit(end: SystemExit) -> int:
    if end.code != REQUEUE:
        report_failed()  # another rank prints the error, or the script has
    if isinstance(end.code, str):
        print_error(end.code)
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _explain(error: BaseException) -> HpctrainError | None:
    """The error for the user, if it is one that the user can fix."""
    if isinstance(error, HpctrainError):
        return error
    # torch has no class for this error. Its text names the operation, then the setting (torch 2.13).
    setting = "you set 'torch.use_deterministic_algorithms(True)'"
    if isinstance(error, RuntimeError) and setting in (text := first_line(error)):
        return HpctrainError(f"--deterministic: {text.partition(',')[0]}: leave the option out")
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return HpctrainError(
            f"the name of a file is not in the encoding of this locale ({sys.getfilesystemencoding()}): "
            "export LC_ALL=C.UTF-8"
        )
    # print() names no file
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and not error.filename:
        _discard_output()
        return HpctrainError(f"the output cannot be written ({reason(error)}): free some space there")
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return HpctrainError(_describe_limit("files can be opened", "-n", resource.RLIMIT_NOFILE))
    if _cannot_start(error):
        return HpctrainError(
            _describe_limit("threads or processes can be started", "-u", resource.RLIMIT_NPROC)
        )
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and error.filename:
        path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename
        return HpctrainError(f"{path}: {reason(error)}: name another path, or ask its owner for access")
    return None


def _cannot_start(error: BaseException) -> bool:
    """Whether a thread or a child process could not be started. Other calls raise BlockingIOError, too."""
    if not isinstance(error, BlockingIOError):
        return isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("subprocess", "multiprocessing")


def _describe_limit(what: str, option: str, limit: int) -> str:
    return (
        f"no more {what} on {os.uname().nodename}, where your limit is {resource.getrlimit(limit)[0]}: "
        f"raise it with ulimit {option} where you submit, or use fewer --workers"
    )


def _discard_output() -> None:
    """Let what is still buffered for stdout go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: HpctrainError, rank: int) -> int:
    """Print an error for the user, and tell the launch script; returns the exit status."""
    report_failed()
    is_usage = isinstance(error, UsageError)
    # Every rank has the same command line. Rank 0 prints the error and fails; the others exit with status 0,
    # because srun kills all ranks at the first failure, perhaps before rank 0 has printed its error.
    if is_usage and rank != 0:
        return 0
    print_error(f"hpctrain: error: {hide_secrets(str(error))}")
    return 2 if is_usage else 1


@functools.cache
def print_errors_in_one_line() -> None:
    """From now on, an HpctrainError that nothing catches ends this process as in main()."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        is_interrupt = isinstance(error, KeyboardInterrupt) and error.args  # within a run
        if not (isinstance(error, HpctrainError) or is_interrupt):
            before(kind, error, traceback)
            return
        try:
            rank = detect().rank
        except HpctrainError:
            rank = 0
        _call_on_failure()
        # The hook of torch.distributed redirects stderr, and would print it if this one returned.
        with redirect_stderr(sys.__stderr__):
            status = _handle(error, rank)
        raise SystemExit(status)  # Python takes the status from it

    sys.excepthook = hook
