"""python -m mpi4py, for launch/lib/launchers/mpi.sh and mpirun.sh: a rank that raises ends the job.

`python -m` would look for mpi4py in the current folder first, in which others may write.
This runs in any image, so it imports nothing of hpctrain.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from mpi4py.run import main

# By them MPI knows which rank a process is.
OF_A_RANK = ("OMPI_COMM_WORLD_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "PMI_", "SLURM_STEP")


class AfterStart:
    """A finder of modules by which the children of a rank are no ranks, after MPI has started in it.

    A process that multiprocessing spawns imports the script, and with it MPI. As the same rank it would hang
    or end the job. os.environ keeps the variables.
    """

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            start = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                start(module)
                for variable in os.environ:
                    if variable.startswith(OF_A_RANK):
                        os.unsetenv(variable)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, AfterStart())
    if sys.argv[1] == "-m":
        sys.path[0] = ""  # as python -m MODULE; for a script main() takes its folder
    main()
