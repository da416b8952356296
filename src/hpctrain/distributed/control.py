"""Files by which the launch script and the ranks agree that a job ends in time and is requeued.

The launch script names a folder of this job in HPCTRAIN_CONTROL, on its own node; launch/lib/control.sh lists
the files there. The option in `saved` is empty if the same command resumes the run.

The launch script requeues the job after `stopped`. It also does after a failure without `failed`, if there is
a checkpoint of this start, and after any failure without `trains`, if there is one of an earlier start. Every
rank calls these functions, because rank 0 may be on another node: torchrun numbers the nodes by their names.
On other nodes, and without a launch script, they do nothing.
"""

import os
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path

from hpctrain.files import atomic
from hpctrain.files.trust import is_own
from hpctrain.text import as_given


def stop_requested() -> bool:
    """Whether the launch script has asked this job to save and to end, as the ranks on its node can see."""
    folder = control_folder()
    if folder is None:
        return False
    _report_polling(folder)
    return (folder / "stop").exists()


def report_saved(resume_with: Path | None) -> None:
    """Tell the launch script that a checkpoint is complete. `resume_with`: folder for --resume, if needed."""
    _write("saved", f"--resume {shlex.quote(as_given(str(resume_with)))}\n" if resume_with else "")


@cache
def report_training() -> None:
    """Tell the launch script that this start has come to its first optimizer step."""
    _write("trains", "")


def report_stopped() -> None:
    """Tell the launch script that this program ends early, and is to be started again."""
    _write("stopped", "")


def report_failed() -> None:
    """Tell the launch script that it is of no use to start this program again."""
    _write("failed", "")


@cache
def _report_polling(folder: Path) -> None:
    """Tell the launch script, once, that the ranks look for `stop`, so that it sends them no signal."""
    _write("polled", "")


def control_folder() -> Path | None:
    """HPCTRAIN_CONTROL, if this node has that folder of this user."""
    folder = Path(os.environ.get("HPCTRAIN_CONTROL", ""))
    return folder if folder.is_absolute() and is_own(folder) and folder.is_dir() else None


def _write(name: str, text: str) -> None:
    if folder := control_folder():
        with suppress(OSError):  # a full /tmp is no reason to end the training
            atomic.write_text(folder / name, text)
