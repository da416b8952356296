"""Finds ranks that train alone, although a launch script started several to train together.

torch and Lightning call the functions without an underscore by the entry points in pyproject.toml, in every
script that imports them. So this file imports little, and torch in functions only.
"""

import functools
import os
import sys
from contextlib import suppress
from typing import Any

from hpctrain.errors import UsageError, print_error


def callbacks_of_lightning() -> list[Any]:
    """For `import lightning`: refuses a Trainer that would train alone on each rank, its default on CPUs."""
    return _make_callbacks("lightning.pytorch")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """For `import pytorch_lightning`, the same."""
    return _make_callbacks("pytorch_lightning")


def _make_callbacks(package: str) -> list[Any]:
    if _count_ranks() == 1:
        return []
    return [sys.modules[package].callbacks.LambdaCallback(setup=_refuse_lone_trainer)]


def _refuse_lone_trainer(trainer: Any, module: Any, stage: str) -> None:
    from hpctrain.distributed.entry import print_errors_in_one_line
    from hpctrain.distributed.world import detect

    world = detect()
    if stage == "fit" and trainer.world_size == 1 < world.size:
        print_errors_in_one_line()
        raise UsageError(
            f"this Trainer trains alone on each of the {world.size} ranks: "
            f'make it with devices={world.local_size}, num_nodes={world.nodes}, strategy="ddp"; '
            "for separate trainings, unset HPCTRAIN_WORLD_SIZE before that"
        )


def watch_rank_0() -> None:
    """For `import torch`: rank 0 of a job warns at its first optimizer step if the ranks train alone.

    Such a script trains once on each rank, with exit status 0. That may be intended, so it is no error.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if _count_ranks() == 1:
        return
    # On CPUs accelerate, and with it the Trainer of transformers, trains alone unless this is set.
    if torch.accelerator.current_accelerator() is None:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if os.environ.get("RANK") == "0":
        register_optimizer_step_pre_hook(_before_step)


def _count_ranks() -> int:
    """How many ranks a launch script started; 1 without one."""
    return int(os.environ.get("HPCTRAIN_WORLD_SIZE") or 1)


def _before_step(*_: object) -> None:
    import torch

    if not torch.compiler.is_compiling():  # a compiled step would trace what follows
        _warn_of_lone_ranks()


@functools.cache  # the first step only
def _warn_of_lone_ranks() -> None:
    if _count_ranks() == 1:  # the script has unset the variable, for separate trainings
        return
    if not _has_joined():
        advice = (
            "call torch.distributed.init_process_group() first, or start a script for Horovod with "
            "launch/apptainer_horovod.sh; docs/guides/scripts.md shows how"
        )
    elif _is_alone_in_accelerate():
        advice = "on nodes without GPUs, give TrainingArguments(use_cpu=True) or Accelerator(cpu=True)"
    else:
        return
    print_error(f"hpctrain: warning: each of the {_count_ranks()} ranks trains alone: {advice}")


def _has_joined() -> bool:
    """Whether this process is connected to other ranks, by any library."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        # With this address, the processes of each node have a group of their own, whose first one warns.
        is_local = os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1")
        nodes = _count_ranks() // int(os.environ.get("HPCTRAIN_TASKS_PER_NODE") or 1)
        return not (is_local and nodes > 1 and dist.get_rank() == 0)
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc:
        with suppress(RuntimeError):  # not connected
            rpc.get_worker_info()
            return True
    hvd, mpi = sys.modules.get("horovod.torch"), sys.modules.get("mpi4py.MPI")
    if hvd and hvd.is_initialized() and hvd.size() > 1:
        return True
    return bool(mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1)


def _is_alone_in_accelerate() -> bool:
    state = sys.modules.get("accelerate.state")
    if not state:
        return False
    return state.PartialState._shared_state.get("distributed_type") == state.DistributedType.NO
