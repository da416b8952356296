"""The part of `hpctrain check` that uses MPI, if the launcher starts MPI programs.

A launcher and an MPI library that do not use the same PMI abort, hang, or give every rank a world of one.
"""

import os
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from hpctrain.distributed.rendezvous import JOIN_TIMEOUT
from hpctrain.distributed.world import World


def mpi_library(world: World, env: Mapping[str, str] = os.environ) -> ModuleType | None:
    """mpi4py.MPI, not yet initialized, if the launcher starts MPI programs and mpi4py is installed; else None."""
    srun_offers_pmi = world.launcher == "slurm" and ("PMIX_RANK" in env or "PMI_RANK" in env)
    if "HPCTRAIN_WORLD_SIZE" in env and "HPCTRAIN_MPI_LIBRARY" not in env:
        # the launch script does not use MPI; with a default PMI in slurm.conf, every srun offers one
        return None
    if world.launcher not in ("openmpi", "mpich") and not srun_offers_pmi:
        return None
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # no mpi4py, or no MPI library that it can load
        return None
    return MPI


def mpi_name(mpi: ModuleType) -> str:
    """The name and version of the MPI library, such as "Open MPI v4.1.4"."""
    return mpi.Get_library_version().partition(",")[0].partition("\n")[0].strip()


def mpi_problems(world: World, mpi: ModuleType, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Compare MPI's world with the launcher's, then test a ring and a sum over MPI. A collective call."""
    if world.launcher == "slurm":
        launcher = f"srun --mpi={env.get('SLURM_MPI_TYPE') or ('pmix' if 'PMIX_RANK' in env else 'pmi2')}"
        advice = (
            "use a --mpi= that both support (srun --mpi=list; Open MPI needs pmix, MPICH pmi2), or mpirun"
        )
    else:
        launcher, advice = (
            "mpirun",
            "use an mpirun of the same MPI and version as the image's, or srun --mpi=pmix",
        )
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
            yield f"in MPI's ring, rank {left} sent {left}, but {received} arrived: do not train on these nodes"
        if (total := comm.allreduce(world.rank + 1)) != (expected := world.size * (world.size + 1) // 2):
            yield f"MPI's all-reduce gave {total} instead of {expected}: do not train on these nodes"
    mpi.Finalize()  # otherwise mpirun reports the end of this process as a crash


@contextmanager
def mpi_init_watchdog(world: World, message: str) -> Iterator[None]:
    """Have a child process print `message` if the block hangs or ends this process, as MPI_Init does with the
    wrong PMI.

    The child kills this process if the block takes longer than JOIN_TIMEOUT.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)  # the parent has the only writing end, which closes when the parent ends
        # srun sends it to all processes when the first rank fails
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
