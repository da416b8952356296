"""Which launcher started this process, and the place of this process among all ranks of the job.

This is the only file that takes ranks from the variables of launchers and schedulers. It picks the launcher
first and then reads every field from that launcher's variables. Mixing them makes several processes rank 0:
`mpirun` inside a Slurm job, for example, leaves SLURM_PROCID=0 in the environment of every rank.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.text import counted, reason

# Step ids in the environment of a batch script and of the shell that salloc opens on a node (slurm.h:
# SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP): one process each, however many tasks the job has.
NOT_A_STEP = {"4294967291", "4294967290", "batch", "interactive"}


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

    @property
    def launcher_command(self) -> str:
        """The command that the user started the ranks with, for error messages."""
        return {"slurm": "srun", "openmpi": "mpirun", "mpich": "mpiexec"}.get(self.launcher, self.launcher)

    @property
    def extent(self) -> str:
        """How many ranks and nodes there are, such as "4 ranks on 2 nodes"."""
        return f"{counted(self.size, 'rank')} on {counted(self.nodes, 'node')}"

    def refuse_several(self, command: str) -> None:
        """Raise UsageError if a launcher has started several ranks of a command that runs in one process."""
        if self.size > 1:
            raise UsageError(
                f"{command} runs in one process, but the launcher started {self.size}: "
                "give --nodes=1 --ntasks-per-node=1, or srun --ntasks=1"
            )

    def in_groups_of(self, number: int) -> "World":
        """This rank's place in its group of so many ranks. Raises UsageError if a rank is left over."""
        if self.size % number:
            raise UsageError(
                f"--tensor-parallel {number} does not divide the number of ranks, {self.size}: "
                "give a divisor of it"
            )
        return replace(self, rank=self.rank // number, size=self.size // number)


ALONE = World(0, 1, 0, 1, 0, 1, "single")


def detect(env: Mapping[str, str] = os.environ) -> World:
    """Read this process's place in the world from the variables that its launcher set.

    The order is torchrun, horovodrun, MPI, a Slurm step, single: the innermost launcher wins. The launch
    scripts export HPCTRAIN_WORLD_SIZE, the number of ranks that they start; a world of another size is
    refused.

    Raises HpctrainError where a variable is missing or malformed, where one process runs in a job that has
    several tasks, and where the world size is not HPCTRAIN_WORLD_SIZE.
    """
    world = None
    for read in (_torchrun, _horovodrun, _openmpi, _mpich, _slurm_step):
        world = read(env)
        if world:
            break
    if world is None:
        _refuse_one_process_in_a_larger_job(env)
        world = ALONE
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size):
        raise HpctrainError(
            f"the variables of {world.launcher} contradict each other: {world}; start the job again"
        )
    if "HPCTRAIN_WORLD_SIZE" in env and world.size != _read_number(env, "HPCTRAIN_WORLD_SIZE"):
        raise HpctrainError(
            f"the launch script started {env['HPCTRAIN_WORLD_SIZE']} ranks, but according to "
            f"{world.launcher} this is rank {world.rank} of {world.size}: "
            "the launcher and the image do not use the same PMI; "
            "try another --mpi= for srun (srun --mpi=list shows them), "
            "or run without apptainer's --containall"
        )
    return world


def _read_numbers(env: Mapping[str, str], *names: str) -> list[int]:
    return [_read_number(env, name) for name in names]


def _read_number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise HpctrainError(
            f"{name} is {value!r}, not a number: "
            "unset it, or start this with a launcher (srun, torchrun, ...)"
        )
    return int(value)


def _torchrun(env: Mapping[str, str]) -> World | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    rank, size, local_rank, local_size = _read_numbers(
        env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    )
    node_rank, nodes = _read_numbers(env, "GROUP_RANK", "GROUP_WORLD_SIZE")
    return World(rank, size, local_rank, local_size, node_rank, nodes, "torchrun")


def _horovodrun(env: Mapping[str, str]) -> World | None:
    # The server's address, too: under other launchers train_horovod sets HOROVOD_RANK itself.
    if "HOROVOD_RANK" not in env or "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in env:
        return None
    rank, size, local_rank, local_size = _read_numbers(
        env, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    )
    node_rank, nodes = _read_numbers(env, "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
    return World(rank, size, local_rank, local_size, node_rank, nodes, "horovodrun")


def _openmpi(env: Mapping[str, str]) -> World | None:
    # Not PMIX_RANK: `srun --mpi=pmix` sets it, too, and PMIx has no variable for the size.
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _mpi_world("openmpi", *_read_numbers(env, *names))


def _mpich(env: Mapping[str, str]) -> World | None:
    # A variable that only Hydra sets: `srun --mpi=pmi2` sets PMI_RANK as well, and that is a Slurm step.
    if "MPI_LOCALNRANKS" not in env:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _mpi_world("mpich", *_read_numbers(env, *names))


def _mpi_world(launcher: str, rank: int, size: int, local_rank: int, local_size: int) -> World:
    """The world of an MPI launcher that does not number nodes; ranks fill one node after the other."""
    per_node = max(local_size, 1)
    return World(rank, size, local_rank, local_size, rank // per_node, -(-size // per_node), launcher)


def _slurm_step(env: Mapping[str, str]) -> World | None:
    if env.get("SLURM_STEP_ID", "batch") in NOT_A_STEP:
        return None
    node = _read_number(env, "SLURM_NODEID")
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node >= len(counts):
        raise HpctrainError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE lists {len(counts)} nodes: "
            "start this with srun"
        )
    return World(
        rank=_read_number(env, "SLURM_PROCID"),
        size=_read_number(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=_read_number(env, "SLURM_LOCALID"),
        local_size=counts[node],
        node_rank=node,
        nodes=len(counts),
        launcher="slurm",
    )


def _tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from Slurm's short form: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise HpctrainError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, not a list such as 2(x3),1: start this with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _refuse_one_process_in_a_larger_job(env: Mapping[str, str]) -> None:
    if "SLURM_JOB_ID" in env:
        tasks = _read_number(env, "SLURM_NTASKS") if "SLURM_NTASKS" in env else 1
        if tasks > 1:
            raise HpctrainError(
                f"this Slurm job has {tasks} tasks, but this process is not one of them: "
                "put srun before the command, or submit launch/apptainer_ddp.sh"
            )
    elif "PBS_NODEFILE" in env:
        try:
            slots = len(Path(env["PBS_NODEFILE"]).read_text().split())
        except OSError as error:
            advice = "run this on the first node of the job"
            if env.get("APPTAINER_CONTAINER") or env.get("SINGULARITY_CONTAINER"):
                advice = 'show it to the image (apptainer exec --bind "$PBS_NODEFILE")'
            raise HpctrainError(f"PBS_NODEFILE cannot be read ({reason(error)}): {advice}") from error
        if slots > 1:
            raise HpctrainError(
                f"this PBS job has {slots} slots, but this process was started without mpirun: "
                f'put mpirun -np {slots} --hostfile "$PBS_NODEFILE" before the command'
            )


def job_id(env: Mapping[str, str] = os.environ) -> str:
    """The scheduler's job id: "17" or "17_3" (array) in Slurm, "17.server" in PBS; else the time."""
    if "SLURM_ARRAY_TASK_ID" in env and "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or time.strftime("%Y%m%d-%H%M%S")


def in_job() -> bool:
    """Whether a scheduler has started this, so that job_id() is the same when it starts it again."""
    return bool(os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID"))


def restart_count(env: Mapping[str, str] = os.environ) -> int:
    """How often Slurm or PBS has started this job again, after a node failure or a preemption."""
    return int(env.get("SLURM_RESTART_COUNT") or env.get("HPCTRAIN_PBS_RERUNS") or 0)


def torchrun_restarts() -> bool:
    """Whether torchrun may start these ranks again. Its count of restarts differs between nodes."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
