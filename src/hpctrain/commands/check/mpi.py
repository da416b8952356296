"""Whether MPI sees the ranks that the launcher has started.

An MPI library with another PMI than the launcher's aborts, hangs, or gives every rank a world of one.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from hpctrain.distributed.mpi import mpi_name
from hpctrain.distributed.rendezvous import JOIN_TIMEOUT
from hpctrain.distributed.world import World


def mpi_problems(world: World, mpi: ModuleType) -> Iterator[str]:
    """Compare MPI's world with the launcher's, then test a ring and a sum over MPI. A collective call."""
    if world.launcher == "slurm":
        offered = "pmix" if "PMIX_RANK" in os.environ else "pmi2"
        launcher = f"srun --mpi={os.environ.get('SLURM_MPI_TYPE') or offered}"
        advice = (
            "use a --mpi= that both support (srun --mpi=list; Open MPI needs pmix, MPICH pmi2), or mpirun"
        )
    else:
        launcher = "mpirun"
        advice = "use an mpirun of the same MPI and version as the image's, or srun --mpi=pmix"
    mismatch = f"PMI mismatch: {launcher} started {world.size} ranks, but {mpi_name(mpi)} "
    here = f"rank {world.rank} on {os.uname().nodename}"
    with mpi_init_watchdog(world, f"{here}: {mismatch}did not get through MPI_Init: {advice}"):
        mpi.Init()
    comm = mpi.COMM_WORLD
    if (comm.rank, comm.size) != (world.rank, world.size):
        yield f"{mismatch}gives each of them a world of {comm.size}: {advice}"
    else:
        left = (world.rank - 1) % world.size
        received = comm.sendrecv(world.rank, dest=(world.rank + 1) % world.size, source=left)
        if received != left:
            yield (
                f"in MPI's ring, rank {left} sent {left}, but {received} arrived: do not train on these nodes"
            )
        total, expected = comm.allreduce(world.rank + 1), world.size * (world.size + 1) // 2
        if total != expected:
            yield f"MPI's all-reduce gave {total} instead of {expected}: do not train on these nodes"
    mpi.Finalize()  # otherwise mpirun reports the end of this process as a crash


@contextmanager
def mpi_init_watchdog(world: World, message: str) -> Iterator[None]:
    """Let a child process print `message` if the block hangs or ends this process.

    MPI_Init does either with a wrong PMI. After JOIN_TIMEOUT the child kills this process.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)  # only the parent has the writing end, which closes when the parent ends
        # srun sends SIGTERM to all processes when the first rank fails.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready, _, _ = select.select([reader], [], [], JOIN_TIMEOUT.seconds)
        if not ready or not os.read(reader, 1):
            if world.local_rank == 0:  # once per node
                os.write(2, f"hpctrain: error: {message}\n".encode())
            if not ready:
                os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.close(reader)
    yield
    os.write(writer, b"1")
    os.close(writer)
