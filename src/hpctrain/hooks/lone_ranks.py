"""Finds ranks that train alone, although a launch script started several to train together.

torch and Lightning call the functions without an underscore by the entry points in pyproject.toml, in every
script that imports them. So this file imports little, and torch in functions only.
"""

import functools
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from hpctrain.errors import UsageError, print_error
from hpctrain.hooks import count_ranks

SEPARATE = "for separate trainings, unset HPCTRAIN_WORLD_SIZE before that"
_has_fabric = False


def callbacks_of_lightning() -> list[Any]:
    """For `import lightning`: refuses a Trainer that would train alone on each rank, its default on CPUs."""
    return _make_callbacks("lightning.pytorch")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """For `import pytorch_lightning`, the same."""
    return _make_callbacks("pytorch_lightning")


def callbacks_of_fabric() -> list[Any]:
    """For each `Fabric()`: lets _check_world() refuse one that trains alone, its default on CPUs."""
    global _has_fabric
    _has_fabric = True
    return []


def _make_callbacks(package: str) -> list[Any]:
    if count_ranks() == 1:
        return []
    return [sys.modules[package].callbacks.LambdaCallback(setup=_refuse_lone_trainer)]


def _refuse_lone_trainer(trainer: Any, module: Any, stage: str) -> None:
    if stage == "fit" and trainer.world_size == 1 < count_ranks():
        _refuse("Trainer")


def _refuse(name: str) -> NoReturn:
    """End this job, because each of its ranks trains alone with this class of Lightning."""
    from hpctrain.distributed.entry import print_errors_in_one_line
    from hpctrain.distributed.world import detect

    world = detect()
    advice = f'make it with devices={world.local_size}, num_nodes={world.nodes}, strategy="ddp"'
    if name == "Fabric":
        advice += (
            ", and call its launch(); or, for a script of `fabric run`, which does not call it, "
            f"export LT_CLI_USED=1 LT_DEVICES={world.local_size} LT_NUM_NODES={world.nodes} LT_STRATEGY=ddp"
        )
    print_errors_in_one_line()
    raise UsageError(f"this {name} trains alone on each of the {world.size} ranks: {advice}; {SEPARATE}")


def watch_rank_0() -> None:
    """For `import torch`: rank 0 of a job warns at its first optimizer step if the ranks train alone.

    Such a script trains once on each rank, with exit status 0. That may be intended, so it is no error.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if count_ranks() == 1:
        return
    # On CPUs accelerate, and with it the Trainer of transformers, trains alone unless this is set.
    if torch.accelerator.current_accelerator() is None:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if os.environ.get("RANK") == "0":
        register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: object) -> None:
    import torch

    if not torch.compiler.is_compiling():  # a compiled step would trace what follows
        _check_world()


@functools.cache  # the first step only
def _check_world() -> None:
    ranks = count_ranks()
    if ranks == 1:  # the script has unset the variable, for separate trainings
        return
    joined = _count_joined(ranks)
    problem = f"each of the {ranks} ranks trains alone"
    if _is_alone_in_accelerate():
        advice = "on nodes without GPUs, give TrainingArguments(use_cpu=True) or Accelerator(cpu=True)"
    elif joined >= ranks:
        return
    elif joined > 1:
        problem = f"the process group of rank 0 has {joined} of the job's {ranks} ranks"
        advice = f"init_process_group() without arguments joins all; {SEPARATE}"
    elif _has_fabric:
        _refuse("Fabric")
    else:
        advice = (
            "call torch.distributed.init_process_group() first, or start a script for Horovod with "
            "launch/apptainer_horovod.sh; docs/guides/scripts.md shows how"
        )
    print_error(f"hpctrain: warning: {problem}: {advice}")


def _count_joined(ranks: int) -> int:
    """How many ranks are in the world of this one, the largest of those that libraries have made.

    All of them, if another process is the one to warn.
    """
    import torch.distributed as dist

    sizes = [1]
    if dist.is_available() and dist.is_initialized():
        if dist.get_rank() > 0:  # a process that rank 0 has started
            return ranks
        # With this address, the processes of each node have a group of their own.
        is_local = os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1")
        per_node = os.environ.get("HPCTRAIN_TASKS_PER_NODE", "")
        nodes = ranks // int(per_node) if per_node.isdecimal() and int(per_node) else ranks
        sizes.append(1 if is_local and nodes > 1 else dist.get_world_size())
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc:
        with suppress(RuntimeError):  # not connected
            rpc.get_worker_info()
            return ranks
    hvd, mpi = sys.modules.get("horovod.torch"), sys.modules.get("mpi4py.MPI")
    if hvd and hvd.is_initialized():
        sizes.append(hvd.size())
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        sizes.append(mpi.COMM_WORLD.size)
    return max(sizes)


def _is_alone_in_accelerate() -> bool:
    state = sys.modules.get("accelerate.state")
    if not state:
        return False
    return state.PartialState._shared_state.get("distributed_type") == state.DistributedType.NO
