"""The MPI library of ranks that their launcher starts as an MPI program."""

import os
from types import ModuleType

from hpctrain.distributed.world import World


def mpi_library(world: World) -> ModuleType | None:
    """mpi4py.MPI, not yet initialized; None if the launcher starts no MPI programs, or mpi4py is missing."""
    srun_offers_pmi = world.launcher == "slurm" and ("PMIX_RANK" in os.environ or "PMI_RANK" in os.environ)
    if "HPCTRAIN_WORLD_SIZE" in os.environ and "HPCTRAIN_MPI_LIBRARY" not in os.environ:
        # The launch script does not use MPI. With a default PMI in slurm.conf, every srun offers one.
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
    """The name and version of the MPI library, such as "Open MPI v5.0.9"."""
    return mpi.Get_library_version().partition(",")[0].partition("\n")[0].strip()
