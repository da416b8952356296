"""The job of benchmarks/launch.py: train_ddp up to its first step, with the end of each part of the start.

Every rank prints one line of JSON: the names of the parts, and the end of each in seconds since 1970. The
first mark is taken before anything else is imported.
"""

import time

marks = {"srun, container, Python": time.time()}

import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402

gc.set_threshold(100_000, 50, 100)  # as hpctrain does (__main__.py)

import torch  # noqa: E402

marks["import torch"] = time.time()

from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from hpctrain.distributed.world import detect  # noqa: E402
from hpctrain.run.record import Record  # noqa: E402
from hpctrain.training.run import Run  # noqa: E402
from hpctrain.vision import train  # noqa: E402

marks["import the rest"] = time.time()
process_group = train.process_group


@contextmanager
def marked_process_group(*args: Any) -> Iterator[None]:
    """process_group() with a mark after the rendezvous."""
    with process_group(*args):
        marks["rendezvous of the ranks"] = time.time()
        yield


def first_step(run: Run, loss: torch.Tensor, **values: float) -> NoReturn:
    """Replaces Run.step(): print the marks and exit."""
    marks["first step"] = time.time()
    print("marks", json.dumps(marks), flush=True)
    raise SystemExit(0)


def start_epoch(record: Record, epoch: int, *_: object) -> int:
    """Replaces Record.start_epoch(): set a mark."""
    marks["data, run folder, model"] = time.time()
    return 0


train.process_group, Run.step, Record.start_epoch = marked_process_group, first_step, start_epoch
train.main(detect(), sys.argv[1:])
