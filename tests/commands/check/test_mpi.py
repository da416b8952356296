"""MPI in hpctrain check, and the library itself."""

import re
import sys
from pathlib import Path

import pytest

from tests.commands.check.helpers import errors, in_the_image

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
MEET = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("runtime", ["apptainer", "none"])
def test_no_rank_of_srun_complains_of_munge(cluster, runtime):
    """srun's PMIx offers munge, which Open MPI's wheel lacks."""
    env = {"HPCTRAIN_RUNTIME": runtime}
    if runtime == "none":
        env["HPCTRAIN_PYTHON_ENV"] = "/opt/hpctrain"
    script = ["--nodes=2", "--ntasks-per-node=2", "launch/apptainer_mpi.sh", "--mpi=pmix", "check"]
    number = cluster.submit(*script, cwd="/home/alice/hpctrain", env=env)
    lines: list[str] = []
    cluster.wait(number, on_line=lines.append)
    output = "\n".join(lines)
    assert "correct over MPI, too (Open MPI v5" in output, output
    assert "-" * 74 not in output, output  # around each of PMIx's complaints


def test_ring_and_all_reduce_over_mpi(sif):
    status, output = in_the_image(*MPIRUN, "python", "-m", "hpctrain", "check", MASTER_PORT="29511", **MEET)
    assert status == 0 and "check passed: 2 ranks on 1 host (openmpi)" in output, output
    assert "correct over MPI, too (Open MPI v5" in output


MISMATCHES = {
    "and gives up": ("unset PMIX_RANK", "did not get through MPI_Init"),
    "and takes each rank for a world of its own": ("unset ${!PMIX_*}", "gives each of them a world of 1"),
}


@pytest.mark.parametrize("how", MISMATCHES)
def test_an_mpi_of_another_version_than_its_mpirun(sif, how):
    """Simulated: the ranks lose the variables that mpirun has set."""
    forget, message = MISMATCHES[how]
    command = [*MPIRUN, "bash", "-c", f"{forget}; exec python -m hpctrain check"]
    status, output = in_the_image(*command, MASTER_PORT="29512", **MEET)
    said = errors(output)
    assert status != 0 and len(said) == 1, output
    assert f"PMI mismatch: mpirun started 2 ranks, but Open MPI v5.0.9 {message}: " in said[0]
    assert ": use an mpirun of the same MPI and version" in said[0]


def test_mpi_loads_with_the_libfabric_of_a_site():
    """That of sites with Slingshot, 1.22, exports FABRIC_1.7. MPI and Horovod did not load with it."""
    library = (Path(sys.prefix) / "lib/libmpi.so.40").read_bytes()
    assert max(map(int, re.findall(rb"FABRIC_1\.(\d+)\0", library))) <= 7
