"""make test-mpich: the image with MPICH on the cluster, with its own MPI and with other MPIs of the same ABI.

At a site, shifter and podman-hpc mount Cray MPICH into the container and put it first in LD_LIBRARY_PATH.
Cray MPICH is not available here. MPICH 3.4, from which it derives, MPICH 5 and Intel MPI are available as
wheels. Not a part of `make test`, which would have to build a second image.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from slurm_cluster import REPOSITORY, Cluster

SIF = REPOSITORY / "hpctrain-cpu-mpich.sif"
IMAGE = f"/project/{SIF.name}"
HOME = "/home/alice/hpctrain"
# stand-ins for a site's MPI, and the start of their version strings
OTHERS = {
    "mpich==3.4.3.post1": r"MPICH Version:\s+3\.4\.3",
    "mpich==5.0.2": r"MPICH Version:\s+5\.0\.2",
    "impi-rt==2021.16.2": r"Intel\(R\) MPI Library 2021\.16",
}
# prints the MPI library that mpi4py and Horovod have loaded, and their sums
SUMS = """
import horovod.torch as hvd, torch
from mpi4py import MPI
hvd.init()
hvd.mpi_threads_supported()  # fails unless Horovod uses MPI
total = hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum).item()
world = MPI.COMM_WORLD
library = MPI.Get_library_version().splitlines()[0]
files = sorted({line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line})
sums = f"sum {world.allreduce(world.rank + 1)} {total}"
print(f"[{library}] [{' '.join(files)}] size {world.size} {hvd.size()} {sums}", flush=True)
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with the MPICH image, and the other MPIs in /project/site/NAME."""
    folder = tmp_path_factory.mktemp("site")
    folder.chmod(0o755)  # readable by alice
    for wheel in OTHERS:
        to = folder / wheel
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--prefix", to, wheel]
        subprocess.run(pip, check=True)
        assert (to / "lib/libmpi.so.12").exists()
    with Cluster(nodes=2, binds={SIF: IMAGE, folder: "/project/site"}) as cluster:
        cluster.install("alice")
        (cluster.host_path(HOME) / "sums.py").write_text(SUMS)
        yield cluster


def site_mpi(wheel: str) -> dict[str, str]:
    """The variables that mount another MPI in the container, as shifter and podman-hpc do."""
    return {
        "APPTAINER_BIND": f"/project/site/{wheel}:/opt/udiImage/modules/mpich",
        "APPTAINERENV_LD_LIBRARY_PATH": "/opt/udiImage/modules/mpich/lib",
    }


def job(cluster: Cluster, *command: str, env: dict[str, str]) -> str:
    number = cluster.submit(
        *command, cwd=HOME, env={"HPCTRAIN_IMAGE": IMAGE, "HOROVOD_CONTROLLER": "mpi", **env}
    )
    ended = cluster.wait(number, timeout=300)
    output = cluster.host_path(f"{HOME}/slurm-{number}.out").read_text(errors="replace")
    assert ended.state == "COMPLETED", output
    print(output)
    return output


def test_the_image_has_mpich_and_passes_its_check(cluster):
    shown = cluster.exec(
        "n1", "apptainer", "exec", IMAGE, "cat", "/opt/hpctrain/versions.json", user="alice"
    ).stdout
    versions = json.loads(shown)
    assert versions["mpich"] and "openmpi" not in versions
    done = cluster.exec(
        "n1", "apptainer", "exec", IMAGE, "/opt/hpctrain/libexec/check_image.sh", user="alice", timeout=900
    )
    print(done.stdout)
    assert f"check: MPI is MPICH Version: {versions['mpich']}, with UCX and libfabric" in done.stdout
    for way in ("mpi4py, mpirun", "Horovod over MPI, mpirun"):
        assert f"check: {way}: size 2, sum 3" in done.stdout


# Not MPICH 5: its ranks on two nodes could not reach each other with srun --mpi=pmi2.
@pytest.mark.parametrize("wheel", [None, "mpich==3.4.3.post1", "impi-rt==2021.16.2"])
def test_mpi4py_and_horovod_load_the_mpi_that_comes_first(cluster, wheel):
    """Four ranks on two nodes with srun; the script chooses --mpi=pmi2, which MPICH supports."""
    env = site_mpi(wheel) if wheel else {}
    library = OTHERS[wheel] if wheel else r"MPICH Version:\s+4\.3\.2"
    folder = "/opt/udiImage/modules/mpich" if wheel else "/opt/hpctrain/lib"
    output = job(cluster, "launch/apptainer_mpi.sh", "./sums.py", env=env)
    said = re.findall(r"\[([^]]*)\] \[([^]]*)\] size (\d) (\d) sum (\d+) (\d+)", output)
    assert len(said) == 4, output
    for name, files, *numbers in said:
        assert re.match(library, name) and files.startswith(folder) and len(files.split()) == 1
        assert numbers == ["4", "4", "10", "10"]
    assert "srun --mpi=pmi2 for " in output and "UCX  ERROR" not in output


@pytest.mark.parametrize("wheel", [None, *OTHERS])
def test_two_ranks_with_the_mpirun_of_the_image(cluster, wheel):
    env = site_mpi(wheel) if wheel else {}
    command = ["apptainer", "exec", IMAGE, "mpirun", "-np", "2", "python", "sums.py"]
    done = cluster.exec(
        "n1",
        *command,
        user="alice",
        cwd=HOME,
        env=env | {"APPTAINERENV_HOROVOD_CONTROLLER": "mpi"},
        timeout=120,
    )
    said = re.findall(r"\[([^]]*)\] \[[^]]*\] size (\d) (\d) sum (\d+) (\d+)", done.stdout)
    assert [numbers for _, *numbers in said] == [["2", "2", "3", "3"]] * 2, done.stdout
    print(done.stdout)


@pytest.mark.parametrize("wheel", [None, "mpich==3.4.3.post1"])
def test_it_trains(cluster, wheel):
    env = site_mpi(wheel) if wheel else {}
    output = job(cluster, "launch/apptainer_mpi.sh", "train_horovod", "--epochs", "2", env=env)
    assert float(re.findall(r"test_accuracy (0\.\d+)", output)[-1]) > 0.9, output


def test_without_mpi4py_libmpi_the_image_s_own_mpi_is_loaded(cluster):
    """MPI4PY_LIBMPI exists because mpi4py by default loads the MPI of its own environment."""
    env = site_mpi("mpich==5.0.2")
    code = ["python", "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    for command, version in ((code, "5.0.2"), (["env", "-u", "MPI4PY_LIBMPI", *code], "4.3.2")):
        done = cluster.exec("n1", "apptainer", "exec", IMAGE, *command, user="alice", env=env)
        assert re.match(rf"MPICH Version:\s+{re.escape(version)}\s", done.stdout), done.stdout
