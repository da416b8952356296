"""Finds ranks of a user's script that work alone: started by a launch script, but without a process group,
Horovod or MPI.

torch and Lightning call the functions at the end by their entry points (see pyproject.toml), in every script
that imports them. So this imports little.
"""

import atexit
import contextlib
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.errors import UsageError, print_error


def _make_callbacks(package: str) -> list[Any]:
    """A callback of this package, in a job of more than one rank that a launch script has started."""
    if int(os.environ.get("HPCTRAIN_WORLD_SIZE") or 1) == 1:
        return []

    class OneWorld(sys.modules[package].Callback):
        """Compares the number of processes of a Trainer, before it trains, with that of the job."""

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            """Raise UsageError if the Trainer has one process and the job has more."""
            from hpctrain.distributed.entry import print_errors_in_one_line
            from hpctrain.distributed.world import detect

            world = detect()
            if stage == "fit" and trainer.world_size == 1 < world.size:
                print_errors_in_one_line()
                raise UsageError(
                    f"this Trainer trains alone on each of the {world.size} ranks: make it with devices={world.local_size}, "
                    f'num_nodes={world.nodes}, strategy="ddp"; for separate trainings, unset HPCTRAIN_WORLD_SIZE before that'
                )

    return [OneWorld()]


def callbacks_of_lightning() -> list[Any]:
    """For `import lightning`: refuses a Trainer that would train alone on every rank, as its defaults do on CPUs."""
    return _make_callbacks("lightning.pytorch")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """For `import pytorch_lightning`, the same."""
    return _make_callbacks("pytorch_lightning")


def watch_rank_0() -> None:
    """For `import torch`: lets rank 0 of a job say at its end that it never joined the other ranks.

    Such a script trains N times on its own, with exit status 0. It may be meant so, and is no error. Does
    nothing without a launch script. A process that the script starts, as by torch.multiprocessing.spawn(),
    tells it that it has joined.

    accelerate, and with it the Trainer of transformers, sees one rank on CPUs unless it is told that there is
    no GPU. With a torch that is built for CPUs it is told so, on every rank.
    """
    ranks = os.environ.get("HPCTRAIN_WORLD_SIZE") or "1"
    if ranks == "1":
        return
    if sys.modules["torch"].accelerator.current_accelerator() is None:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    script = os.environ.get("HPCTRAIN_RANK_0")
    if os.environ.get("RANK") != "0" and not script:
        return
    from torch.distributed import distributed_c10d

    # every way to make a process group leads there
    original = getattr(distributed_c10d, "_new_process_group_helper", None)
    if original is None:
        return
    joined = exited = False
    told, tell = (-1, -1) if script else os.pipe()
    path = script or f"/proc/{os.getpid()}/fd/{tell}"
    original_exit = sys.exit

    def leave(status: object = None) -> NoReturn:
        nonlocal exited
        exited = exited or status not in (None, 0)
        original_exit(status)

    def join(*args: Any, **kwargs: Any) -> Any:
        nonlocal joined
        joined = True
        distributed_c10d._new_process_group_helper = original
        # A world of processes on this node alone has one of these addresses.
        if not path.startswith(f"/proc/{os.getpid()}/") and os.environ.get("MASTER_ADDR") not in (
            "localhost",
            "127.0.0.1",
        ):
            with contextlib.suppress(OSError):
                if Path(path).is_fifo():
                    Path(path).write_bytes(b"1")
        return original(*args, **kwargs)

    def ask_horovod() -> None:
        nonlocal joined
        joined = joined or _joined_by_horovod()

    def is_told() -> bool:
        with contextlib.suppress(OSError, ValueError):  # the script has closed it
            return bool(select.select([told], [], [], 0)[0])
        return False

    def report() -> None:
        failed = exited or hasattr(sys, "last_type")  # Python has printed a traceback
        if not (joined or failed or _joined_by_mpi() or _joined_by_rpc() or is_told()):
            print_error(
                f"hpctrain: {ranks} ranks ran this script, and rank 0 never joined the others: each did the same work alone. "
                "Call torch.distributed.init_process_group(), or start a script for Horovod by launch/apptainer_horovod.sh; "
                "docs/own-script.md shows how"
            )
        elif not failed and _is_alone_in_accelerate():
            print_error(
                f"hpctrain: {ranks} ranks ran this script, and accelerate, which transformers uses, let each train alone: give "
                "TrainingArguments(use_cpu=True) or Accelerator(cpu=True) on nodes without GPUs"
            )

    distributed_c10d._new_process_group_helper = join
    if script:
        return
    os.environ["HPCTRAIN_RANK_0"] = path
    sys.exit = leave  # argparse and others report a wrong option, and call it
    atexit.register(report)
    # Python calls this before the functions of atexit, of which Horovod's shutdown comes first.
    threading._register_atexit(ask_horovod)


def _is_alone_in_accelerate() -> bool:
    state = sys.modules.get("accelerate.state")
    return (
        state is not None
        and state.PartialState._shared_state.get("distributed_type") == state.DistributedType.NO
    )


def _joined_by_horovod() -> bool:
    """Whether Horovod has several ranks, or had: after a shutdown by the script it does not tell."""
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and (not hvd.is_initialized() or hvd.size() > 1)


def _joined_by_rpc() -> bool:
    """Whether torch.distributed.rpc has connected the ranks, which it does without a process group; also after its shutdown."""
    rpc = sys.modules.get("torch.distributed.rpc.api")
    return bool(getattr(rpc, "_ALL_WORKER_NAMES", None))


def _joined_by_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and (mpi.Is_finalized() or mpi.COMM_WORLD.size > 1)
