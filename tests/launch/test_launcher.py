"""What starts the ranks, without a cluster: srun, mpirun, torchrun, and what they are told."""

import re
import shutil
import sys

import pytest

from tests.helpers import run_command
from tests.launch.helpers import BARE, BY_ROOT, LAUNCH, QUOTED, assert_refused, dry_run, library, put, start

# ---- srun ----


@pytest.mark.parametrize(
    ("node", "job", "task", "gpus"),
    [
        ("gres/gpu:a100:4", "N/A", "N/A", 4),
        ("gres:gpu", "N/A", "N/A", 1),
        ("gpu:2080ti:4", "N/A", "N/A", 4),
        ("gres/gpu:3g.20gb", "N/A", "N/A", 1),
        ("gres/gpu:a100:2,gres/gpu:v100:1", "N/A", "N/A", 3),
        ("gres/gpumem:20G", "gres/gpu:a100:8", "N/A", 4),
        ("N/A", "gres/gpu:8", "N/A", 4),
        ("N/A", "N/A", "cpu=2,gres/gpu=1", 2),
        ("N/A", "N/A", "cpu=2", 0),
    ],
)
def test_a_command_of_salloc_on_the_login_node_has_gpus(node, job, task, gpus):
    """It started the image without --nv, as Slurm sets SLURM_GPUS_ON_NODE on the nodes only."""
    request = "".join(text.ljust(400) for text in (node, job, task))
    done = library(f"HOSTS=(n1 n2) TASKS=2 REQUEST='{request}'; gpus_of_request")
    assert done.stdout == f"{gpus}\n", done.stderr


@pytest.mark.parametrize(
    ("tasks", "job", "gpus"),
    [
        (4, "JOB_TASKS=4 JOB_HOSTS=(a b)", False),
        (1, "JOB_TASKS=4 JOB_HOSTS=(a b)", True),
        (4, "JOB_TASKS=4 JOB_HOSTS=(a b c)", True),
        (4, "JOB_TASKS=8 JOB_HOSTS=(a b)", True),
    ],
)
def test_a_step_of_another_shape_than_the_job_asks_for_its_gpus(tasks, job, gpus):
    """With --gpus-per-task=1 all ranks of torchrun had one GPU; with --gpus=12 srun refused 2 of 3 nodes."""
    script = f"NODES=2 TASKS=4 THREADS=1 GPUS=4 HOSTS=(a b) {job}"
    done = library(f'{script}; set_srun {tasks}; echo "${{LAUNCH[@]}}"')
    assert done.returncode == 0 and ("--gpus=8" in done.stdout.split()) == gpus, done


def test_each_version_of_pmix_that_srun_offers(programs, tmp_path):
    """The second one of the list was refused, and the error quoted srun's words between the names."""
    versions = "specific pmix plugin versions available: pmix_v4,pmix_v5"
    put(tmp_path, srun=f"echo 'MPI plugin types are...\n\tnone\n\tpmix\n{versions}'")
    assert_refused(dry_run("apptainer_mpi.sh", programs, "--mpi=pmi2"), " none pmix pmix_v4 pmix_v5")
    assert dry_run("apptainer_mpi.sh", programs, "--mpi=pmix_v5", "check").returncode == 0


PROGRAMS = """bash sed seq dirname awk tr date id uname hostname tail env python readlink find timeout sort
    paste"""


def test_a_pmi_without_slurm(programs, tmp_path):
    """The error held the shell's own: srun: command not found."""
    for name in PROGRAMS.split():
        (tmp_path / name).symlink_to(shutil.which(name, path=BARE["PATH"]))
    done = dry_run("apptainer_mpi.sh", programs | {"PATH": str(tmp_path)}, "--mpi=pmix", "check")
    assert_refused(done, "srun", "--mpi=mpirun")


# ---- scripts for MPI ----


@pytest.mark.parametrize(
    ("script", "line", "status", "told"),
    [
        ("apptainer_ddp.sh", "    from mpi4py import MPI", 1, "mpi4py"),
        ("apptainer_torchrun.sh", "import horovod.torch as hvd", 143, "horovod"),
        ("apptainer_ddp.sh", "from dask_mpi import initialize", 1, "dask_mpi"),
        ("apptainer_ddp.sh", "import horovod.torch as hvd", 0, ""),
        ("apptainer_ddp.sh", "# import mpi4py", 1, ""),
    ],
)
def test_a_script_for_mpi_that_fails_under_srun_is_told_by_what_to_start_it(
    programs, tmp_path, script, line, status, told
):
    """The last words were those of Open MPI, which advise to build Slurm again."""
    put(tmp_path, srun=f"exit {status}")
    (tmp_path / "mine.py").write_text(f"import os\n{line}\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    last = start(script, "mine.py", env=programs | job, cwd=tmp_path).stdout.splitlines()[-1]
    if told:
        assert f"mine.py imports {told}," in last and " launch/apptainer_" in last, last
    else:
        assert last.startswith("hpctrain: command: "), last


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("from mpi4py import MPI", f"python {QUOTED}/lib/mpi4py_main.py"),
        ("try:\n    import mpi4py", "python"),
        ("import torch", "python"),
    ],
)
def test_a_script_for_mpi_in_a_pbs_job(programs, tmp_path, line, program):
    """A rank that raised waited in MPI_Finalize for the others, and they for it, until the time limit."""
    (tmp_path / "mine.py").write_text(f"{line}\n")
    env = {"PBS_NODEFILE": f"{tmp_path}/nodes", "PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "1"}
    done = dry_run("pbs_ddp.sh", programs | env, f"{tmp_path}/mine.py")
    assert done.stdout.rstrip().endswith(f" -- {program} {tmp_path}/mine.py"), done


# ---- torchrun ----


def torchrun(*words, **env):
    command = [sys.executable, LAUNCH / "lib/torchrun.py", *words]
    return run_command(command, env=BARE | env)


ONE_RANK = ("--standalone", "--no-python", "sh", "-c")
ALONE = ("--nnodes=2", "--rdzv-id=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((*ONE_RANK, "echo my error >&2; exit 3"), r"rank 0 .* on \S+: process \d+ .* status 3\b"),
        ((*ONE_RANK, "echo my error >&2; kill -9 $$$$"), r"rank 0 .* on \S+: process \d+ .* signal 9\b"),
        # Ended while it starts a rank, torchrun does not end that rank, whose output is then waited for.
        ((*ONE_RANK, "sleep 1; kill -TERM $PPID; exec sleep 60"), r"torchrun on \S+ .* signal 15"),
        # without the first node
        (
            (*ALONE, "--rdzv-conf=is_host=0,read_timeout=1", "--no-python", "true"),
            r"torchrun on \S+ .* first node",
        ),
    ],
)
def test_torchrun_says_in_one_line_which_rank_failed(words, names):
    done = torchrun(*words)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.match(f"hpctrain: {names}", done.stderr.splitlines()[-1]), done.stderr
    assert "my error" not in words[-1] or done.stderr.startswith("my error\n"), done.stderr


@pytest.mark.slow
def test_ranks_of_torchrun_meet_at_the_name_that_slurm_gives_the_node():
    """It was the full name, such as n1.localdomain, which is in /etc/hosts of that node alone."""
    done = torchrun(*ONE_RANK, "echo $MASTER_ADDR", SLURMD_NODENAME="127.0.0.1")
    assert done.stdout == "127.0.0.1\n", done.stderr


TWO_NETWORKS = """
ip link set lo up
ip address add 10.99.0.1/32 dev lo
exec "$@"
"""


@pytest.mark.slow
@BY_ROOT
def test_torchrun_meets_at_an_address_of_a_second_network():
    """It looked for MASTER_ADDR among the addresses of the host's name, and gave up after a minute."""
    rendezvous = ["--rdzv-id=1", "--rdzv-backend=c10d", "--rdzv-endpoint=10.99.0.1:29500"]
    command = [sys.executable, LAUNCH / "lib/torchrun.py", *rendezvous, "--no-python", "echo", "met"]
    started = ["unshare", "--net", "sh", "-ec", TWO_NETWORKS, "sh", *command]
    env = BARE | {"SLURM_NODEID": "0", "SLURMD_NODENAME": "localhost"}
    done = run_command(started, env=env, timeout=50)
    assert done.stdout == "met\n", done.stderr


SPAWNS = """
import multiprocessing, os
from mpi4py import MPI
size = MPI.COMM_WORLD.size
def size_in_child(_):
    return size
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(MPI.COMM_WORLD.allreduce(1), pool.map(size_in_child, [0]), "OMPI_COMM_WORLD_RANK" in os.environ)
"""


@pytest.mark.slow
def test_a_process_that_a_rank_of_mpi_spawns_is_no_rank(tmp_path):
    """As a worker of a DataLoader or a pool, which imports the script. It hung as a second rank 0."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "python"]
    words = [*mpirun, LAUNCH / "lib/mpi4py_main.py", "spawns.py"]
    done = run_command(words, env=BARE, cwd=tmp_path, timeout=60)
    assert done.stdout.splitlines() == ["2 [1] True"] * 2, done
