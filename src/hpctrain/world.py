"""Which launcher started this process, its place in the world, and joining the others.

This is the only file that reads the variables of launchers and schedulers. The launcher is picked
first and then every field is taken from it: mixing them is how four ranks come to believe that each
of them is rank 0. (`mpirun` inside a Slurm job, say, leaves SLURM_PROCID=0 in every rank.)
"""

import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Step ids that Slurm gives to a batch script's own environment and to the shell that salloc opens on
# a node (slurm.h: SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP): one process each, whatever the job asked for.
NOT_A_STEP = {"4294967291", "4294967290", "batch", "interactive"}
# All ranks of a job should be there within this time; what takes longer is an error and not patience.
JOIN_TIMEOUT = timedelta(seconds=60)
# A rank may wait this long for the others at a collective: evaluation and checkpoints happen in between.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class HpctrainError(Exception):
    """Something the user can mend; the message is one line that says what is wrong and what to do."""


class UsageError(HpctrainError):
    """The command line is wrong; every rank finds that out by itself, and one of them says it."""


@dataclass(frozen=True)
class World:
    """The place of this process among all processes of the job.

    Ranks run from 0 to size - 1 over the whole job, local ranks from 0 to local_size - 1 on one node,
    node ranks from 0 to nodes - 1. `launcher` is torchrun, horovodrun, openmpi, mpich, slurm or single.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    launcher: str


def detect(env: Mapping[str, str] = os.environ) -> World:
    """Read this process's place in the world from the environment that its launcher made.

    The order is torchrun, horovodrun, MPI, a Slurm step, single: the innermost launcher wins. The launch scripts
    export HPCTRAIN_WORLD_SIZE, the number of ranks that they start; another number is refused.

    Raises HpctrainError where a variable is missing or broken, where one process runs in a job
    that was given several tasks, and where the size is not the one that the launch script stated.
    """
    world = None
    for read in (_torchrun, _horovodrun, _openmpi, _mpich, _slurm_step):
        world = read(env)
        if world:
            break
    if world is None:
        _refuse_one_process_in_a_larger_job(env)
        world = World(0, 1, 0, 1, 0, 1, "single")
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size):
        raise HpctrainError(f"the variables of {world.launcher} contradict each other: {world}; start the job again")
    if "HPCTRAIN_WORLD_SIZE" in env and _number(env, "HPCTRAIN_WORLD_SIZE") != world.size:
        raise HpctrainError(
            f"the launch script started {env['HPCTRAIN_WORLD_SIZE']} ranks, but {world.launcher} tells this one that it is rank "
            f"{world.rank} of {world.size}: the launcher and the image do not speak the same PMI; "
            "try another --mpi= for srun (srun --mpi=list shows them), or run without apptainer's --containall"
        )
    return world


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise HpctrainError(f"{name} is {value!r} and should be a number: unset what you exported, or start by a launcher")
    return int(value)


def _torchrun(env: Mapping[str, str]) -> World | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    return World(*(_number(env, name) for name in names), "torchrun")


def _horovodrun(env: Mapping[str, str]) -> World | None:
    # The address of its server is asked for as well: train_horovod sets the ranks itself under the other launchers.
    if "HOROVOD_RANK" not in env or "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in env:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return World(*(_number(env, f"HOROVOD_{name}") for name in names), "horovodrun")


def _openmpi(env: Mapping[str, str]) -> World | None:
    # Not PMIX_RANK: `srun --mpi=pmix` sets it too, and PMIx puts no size into the environment.
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _in_blocks(*(_number(env, f"OMPI_COMM_WORLD_{name}") for name in names), "openmpi")


def _mpich(env: Mapping[str, str]) -> World | None:
    # Hydra's own names are asked for, because `srun --mpi=pmi2` sets PMI_RANK as well; that is a Slurm step.
    if "MPI_LOCALNRANKS" not in env:
        return None
    return _in_blocks(*(_number(env, name) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")), "mpich")


def _in_blocks(rank: int, size: int, local_rank: int, local_size: int, launcher: str) -> World:
    """The world of an MPI launcher, which names no nodes: ranks fill one node after the other (mpirun's default)."""
    per_node = max(local_size, 1)
    return World(rank, size, local_rank, local_size, rank // per_node, -(-size // per_node), launcher)


def _slurm_step(env: Mapping[str, str]) -> World | None:
    if env.get("SLURM_STEP_ID", "batch") in NOT_A_STEP:
        return None
    node = _number(env, "SLURM_NODEID")
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node >= len(counts):
        raise HpctrainError(f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE counts {len(counts)} nodes: use srun")
    return World(
        rank=_number(env, "SLURM_PROCID"),
        size=_number(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=counts[node],
        node_rank=node,
        nodes=len(counts),
        launcher="slurm",
    )


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form of a list, a node each: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise HpctrainError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, not a list of counts such as 2(x3),1: use srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _refuse_one_process_in_a_larger_job(env: Mapping[str, str]) -> None:
    if "SLURM_JOB_ID" in env:
        tasks = _number(env, "SLURM_NTASKS") if "SLURM_NTASKS" in env else 1
        if tasks > 1:
            raise HpctrainError(
                f"this Slurm job has {tasks} tasks, but this process runs alone in it: put srun before the command, "
                "or submit launch/apptainer_ddp.sh"
            )
    elif "PBS_NODEFILE" in env:
        try:
            slots = len(Path(env["PBS_NODEFILE"]).read_text().split())
        except OSError as error:
            raise HpctrainError(f"PBS_NODEFILE cannot be read ({error}): run this on the first node of the job") from error
        if slots > 1:
            raise HpctrainError(
                f"this PBS job has {slots} slots, but this process runs alone in it: "
                f'put mpirun -np {slots} --hostfile "$PBS_NODEFILE" before the command'
            )


def job_id(env: Mapping[str, str] = os.environ) -> str:
    """The scheduler's number of this job ("17", "17_3" in a Slurm array, "17.server" on PBS), or the time without one."""
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or time.strftime("%Y%m%d-%H%M%S")


def restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm has requeued this job and runs it again, after a node died or it was preempted."""
    return env.get("SLURM_RESTART_COUNT", "0") != "0"


def choose_device(world: World, wanted: str = "auto") -> torch.device:
    """The device of this rank: "cpu", "cuda", or "auto" for a GPU where there is one.

    With several GPUs in sight a rank takes the one of its local rank, modulo what it can see, because
    --gpus-per-task=1 shows each rank just its own. Raises HpctrainError for "cuda" without a GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HpctrainError(
            f"--device cuda, but rank {world.rank} on {os.uname().nodename} sees no GPU: "
            "ask the scheduler for one (--gpus-per-node), start the container with --nv, or use --device cpu"
        )
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


_ended: list[dist.ProcessGroup] = []


@contextmanager
def process_group(world: World, device: torch.device) -> Iterator[None]:
    """Join the other ranks for the length of the block; nothing at all in a world of one.

    The backend follows the device: nccl on CUDA, gloo on CPU. Raises HpctrainError, naming the ranks that are
    missing, where not all are there within JOIN_TIMEOUT.
    """
    if world.size == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"device_id": device} if device.type == "cuda" else {}
    store = _meet(world)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT, **options)
    try:
        yield
    finally:
        # The end of a group of Gloo waits for its threads and, before torch 2.13 (seen in 2.7.1), holds the lock of the
        # interpreter, for which a thread may wait to let go of its last tensor. So the group stays, to the end of the process.
        if backend == "gloo" and torch.__version__ < "2.13":
            _ended.append(dist.group.WORLD)
        dist.destroy_process_group()


def main_address(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, where rank 0 is to be found.

    Raises HpctrainError where they are not set, and at once where the name does not resolve.
    """
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise HpctrainError(
            "MASTER_ADDR and MASTER_PORT are not set: use a script of launch/, or in the batch script "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500; '
            "on one machine, MASTER_ADDR=localhost"
        )
    try:
        socket.getaddrinfo(address, int(port))
    except (OSError, OverflowError) as error:
        raise HpctrainError(
            f"MASTER_ADDR is {address} and MASTER_PORT {port}, which {os.uname().nodename} cannot resolve ({error}): "
            "give a name or an address of rank 0's node that every node knows"
        ) from error
    return address, int(port)


def _meet(world: World) -> dist.Store:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT, in a store that rank 0 keeps, or torchrun's agent where it has one."""
    address, port = main_address()
    agent_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address, port, is_master=world.rank == 0 and not agent_keeps_it, wait_for_workers=False, timeout=JOIN_TIMEOUT
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            raise HpctrainError(
                f"port {port} of {os.uname().nodename}, where the ranks are to meet, is taken by another process: "
                "set MASTER_PORT to another number"
            ) from error
        raise HpctrainError(
            f"rank {world.rank} of {world.size} on {os.uname().nodename} did not reach rank 0 at {address}:{port} within "
            f"{JOIN_TIMEOUT.seconds} s ({reason}): "
            f"look whether rank 0 started, and whether {address} is its node and can be reached"
        ) from error
    try:
        return _call_the_roll(world, store, f"{address}:{port}")
    except (dist.DistError, RuntimeError) as error:  # the store has gone, or says nothing
        raise HpctrainError(
            f"rank {world.rank} of {world.size} on {os.uname().nodename} lost rank 0 at {address}:{port} "
            f"({str(error).splitlines()[0]}): look at the log of rank 0"
        ) from error


def _call_the_roll(world: World, store: dist.Store, place: str) -> dist.Store:
    """Wait until every rank is here; returns a part of the store that is new to this start of the job.

    torchrun keeps its store when it starts the ranks again, so that "rank 3 is here" may be the word of a rank 3 that has
    died since. Each start of a rank therefore has a name that nobody had before: it gives it, rank 0 answers to that name
    with its own, and who hears that answer belongs to this start.
    """
    name = uuid.uuid4().hex
    if world.rank == 0:
        missing = set(range(1, world.size))
        deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if store.check([f"name of {rank}"]):
                    store.set(f"answer to {store.get(f'name of {rank}').decode()}", name)
                if store.check([f"{name} has {rank}"]):
                    missing.remove(rank)
            time.sleep(0.02)
        verdict = ""
        if missing:
            verdict = (
                f"{in_words(missing)} of {world.size} did not come to {place} within {JOIN_TIMEOUT.seconds} s "
                f"({in_words(set(range(world.size)) - missing)} did): look whether every rank started, and at its node"
            )
        store.set(f"{name} verdict", verdict)
        if verdict:
            time.sleep(1)  # the others hear it before the store ends with this process
            raise HpctrainError(verdict)
    else:
        store.set(f"name of {world.rank}", name)
        patience = JOIN_TIMEOUT + timedelta(seconds=10)  # rank 0 may have begun to wait a little later
        store.wait([f"answer to {name}"], patience)
        name = store.get(f"answer to {name}").decode()
        store.set(f"{name} has {world.rank}", "")
        store.wait([f"{name} verdict"], patience)
        if store.get(f"{name} verdict"):
            raise SystemExit(0)  # rank 0 says it; see all_or_none()
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return dist.PrefixStore(name, store)


def in_words(ranks: Iterable[int]) -> str:
    """Such as "rank 3" or "ranks 0-2,5"; of many pieces the first six."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    pieces = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    text = ",".join(pieces if len(pieces) <= 8 else [*pieces[:6], f"... and {len(pieces) - 6} more"])
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def gather(world: World, mine: Any) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
    """What every rank has, in the order of ranks, on every rank; a collective call."""
    everybody = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(everybody, mine)
    return everybody


@contextmanager
def all_or_none(world: World) -> Iterator[None]:
    """Run the block on every rank; where it raises HpctrainError on any, every rank ends and rank 0 says why.

    Without this, the ranks that have no error would wait for the others, and an error that all of
    them have would be printed once a rank. Needs the process group.
    """
    message = None
    try:
        yield
    except HpctrainError as error:
        message = str(error)
    messages = gather(world, message)
    ranks = {text: [r for r, m in enumerate(messages) if m == text] for text in messages if text}
    if not ranks:
        return
    if world.rank != 0:
        # Not a failure: at the first one srun kills the other ranks, and rank 0 is to finish its sentence.
        raise SystemExit(0)
    everywhere = len(ranks) == 1 and len(next(iter(ranks.values()))) == world.size
    raise HpctrainError(next(iter(ranks)) if everywhere else "; ".join(f"on {in_words(r)}: {m}" for m, r in ranks.items()))
