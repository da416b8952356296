"""What benchmarks/launch.py submits: train_ddp up to its first step, with the time at which each part of the start ended.

Every rank prints one line of JSON: the names of the parts and the seconds since the epoch. No import of ours at the top: the
first time is that of the interpreter's first line.
"""

import time

marks = {"srun, container, Python": time.time()}

import json  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402, F401

marks["import torch"] = time.time()

from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from hpctrain.run import Run  # noqa: E402
from hpctrain.vision import train_ddp  # noqa: E402
from hpctrain.world import detect  # noqa: E402

marks["import the rest"] = time.time()
meet = train_ddp.process_group


@contextmanager
def met(*args: Any) -> Iterator[None]:  # noqa: ANN401
    """The ranks' meeting, with a mark behind it."""
    with meet(*args):
        marks["ranks meet"] = time.time()
        yield


def first_step(run: Run) -> NoReturn:
    """In the place of Run.step(): print the marks and end."""
    marks["first step"] = time.time()
    print("marks", json.dumps(marks), flush=True)
    raise SystemExit(0)


def start_epoch(run: Run, epoch: int, steps: int) -> None:
    """In the place of Run.start_epoch()."""
    marks["data, run folder, model"] = time.time()


train_ddp.process_group, Run.step, Run.start_epoch = met, first_step, start_epoch
train_ddp.main(detect(), sys.argv[1:])
