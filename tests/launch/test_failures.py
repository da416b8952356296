"""When an input is bad or a rank fails, the whole job is FAILED within 120 s, its log names the rank and the
reason, and no process is left.
"""

import re
from functools import partial

import pytest

from tests.launch.helpers import (
    FEW,
    HERE,
    HOME,
    LAUNCHERS,
    NO_CONTAINER,
    ONE_EACH,
    SCRIPT,
    assert_ended,
    folder,
    job,
    signal_rank,
    wait,
    wait_and_act,
    wait_until,
    wait_until_idle,
)


@pytest.fixture(scope="module", autouse=True)
def start_slow_jobs(request):
    """Before the first test, so that they have ended when their tests run."""
    if any(item.name.startswith("test_a_rank_that_hangs_at_start") for item in request.session.items):
        request.getfixturevalue("hanging")


# ---- bad input ----

NO_VENV = NO_CONTAINER | {"HPCTRAIN_PYTHON_ENV": "/usr"}
# Of the script on the first node, and of the ranks. tests/launch/test_options.py and tests/vision have more.
BAD_INPUT = {
    "no such environment": (["check"], NO_VENV, "HPCTRAIN_PYTHON_ENV=/usr "),
    "no torch without a container": (["check"], {"HPCTRAIN_RUNTIME": "none"}, "n1 has no torch"),
    "nothing to broadcast": (["--broadcast", "check"], NO_CONTAINER, "--broadcast"),
    "broken data": (["train_ddp", "--data", "/project/broken"], {}, "train-images-idx3-ubyte"),
    "a folder that cannot be written": (["train_ddp", "--out", "/usr/run"], {}, "/usr/run"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_ends_the_job_with_one_line(cluster, ahead, name):
    broken = cluster.state / "project/broken"
    broken.mkdir(exist_ok=True)
    (broken / "train-images-idx3-ubyte").write_text("<html>not found</html>")

    def submit(name):
        args, env, _ = BAD_INPUT[name]
        return cluster.submit(*ONE_EACH, SCRIPT, *args, cwd=HOME, env=env)

    number = ahead(submit)
    ended, output = wait(cluster, number)
    assert ended.state == "FAILED" and ended.exit_code != 0, output
    (line,) = [line for line in output.splitlines() if "hpctrain: error:" in line]
    assert BAD_INPUT[name][2] in line and "Traceback" not in output, output
    wait_until_idle(cluster, number)


# ---- a rank ----

RAISES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000000):
    x = torch.ones(1)
    dist.all_reduce(x)
    if step == 2 and dist.get_rank() == 3:
        raise ValueError("boom")
"""
# Without torch, whose import takes most of the time of such a job. The others do not notice, and the launcher
# ends them.
KILLED = """
import os, time
time.sleep(1)
if os.environ["RANK"] == "3":
    os.kill(os.getpid(), 9)
time.sleep(1000)
"""
# It waited in MPI_Finalize for the others, and they for it, until the time limit.
RAISES_IN_MPI = """
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 3:
    raise ValueError("boom")
world.allreduce(1)
"""
FAULTS = {"kill": KILLED, "raise": RAISES, "raise_in_mpi": RAISES_IN_MPI}
WHO = {  # how each launcher names a rank that was killed
    "srun": r"n2: task 3: Killed",
    "torchrun": r"rank 3 was the first to fail on n2: process \d+ was killed by signal 9",
    "mpirun": r"rank 3 with PID \d+ on node n2 exited on\s+signal 9",
    "srun + PMI": r"n2: task 3: Killed",
    "horovodrun": r"rank 3 on n2 was ended by signal 9",
}
BOOM = r"(rank3\]|^3|\[3\]<stderr>): .*ValueError: boom|^ValueError: boom"


@pytest.mark.parametrize(
    ("fault", "launcher"),
    [
        *((fault, launcher) for fault in ("kill", "raise") for launcher in LAUNCHERS),
        *(("raise_in_mpi", launcher) for launcher in ("mpirun", "srun + PMI")),
    ],
)
def test_a_rank_that_dies_fails_the_job_and_is_named(cluster, ahead, launcher, fault):
    def submit(launcher, fault):
        folder(cluster, f"{fault}.py").write_text(FAULTS[fault])
        # the default, and given
        restarts = ["--max-restarts=0"] if (launcher, fault) == ("torchrun", "kill") else []
        return cluster.submit(HERE, *LAUNCHERS[launcher], *restarts, f"{fault}.py", cwd=HOME)

    number = ahead(submit)
    ended, output = wait(cluster, number)
    assert ended.state == "FAILED" and ended.exit_code != 0, output
    assert re.search(WHO[launcher] if fault == "kill" else BOOM, output, re.M), output
    if launcher == "srun + PMI" and fault == "raise_in_mpi":
        assert re.search("task 3 on n2 failed first: .* exit code 1.* ValueError: boom", output), output
    wait_until_idle(cluster, number)


def train(cluster, *words, launcher="srun"):
    """A job that trains until something happens to it, and is not requeued."""
    command = ["train_ddp", FEW, "--epochs", "5000", *words]
    return cluster.submit(HERE, *LAUNCHERS[launcher], *command, cwd=HOME, env={"HPCTRAIN_REQUEUES": "0"})


@pytest.mark.main_road
def test_a_killed_rank_ends_the_whole_job_and_is_named(cluster):
    number = train(cluster)
    ended, output = wait_and_act(
        cluster, number, "epoch 2 step", partial(signal_rank, cluster, "KILL", "train_ddp")
    )
    assert ended.state == "FAILED" and ended.exit_code != 0 and "Traceback" not in output, output
    assert re.search("task [23] on n2 failed first: Killed", output), output
    # The epochs before it are not lost.
    assert (folder(cluster, f"runs/train_ddp/{number}") / "checkpoints/epoch-0001.pt").exists()
    wait_until_idle(cluster)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_rank_that_is_stopped_ends_the_job_and_is_named(cluster, ahead, launcher):
    """Nobody closes its connections, so that the others would wait for it."""

    def submit(launcher):
        return train(cluster, "--watchdog", "10", "--out", f"runs/stopped-{launcher}", launcher=launcher)

    number = ahead(submit)
    stop = partial(signal_rank, cluster, "STOP", f"train_ddp.*stopped-{launcher}")
    output = assert_ended(wait_and_act(cluster, number, "epoch 2 step", stop), "FAILED")
    assert re.search(r"error: rank [23] on n2 has not answered for 10 s", output), output
    # and not the last line of the list of what the ranks were doing
    last = r"failed first: .* Its last line: hpctrain: error: rank [23] on n2 has not answered"
    assert launcher != "srun" or re.search(last, output), output
    wait_until_idle(cluster, number)


# The ranks of each job. Those of srun share a container of their node.
HANGING = {"srun": 4, "torchrun": 2, "mpirun": 2, "srun + PMI": 2, "horovodrun": 2}
HANG = """
import os, sys, time
last = str(int(os.environ.get('WORLD_SIZE', 0)) - 1)
if os.environ.get('RANK') == last and 'train_ddp' in sys.orig_argv: time.sleep(1000)
"""


@pytest.fixture(scope="module")
def hanging(cluster):
    """The numbers of jobs, one for each launcher, whose last rank hangs before it does anything.

    They run on other nodes than those of most tests, because rank 0 waits for a minute.
    """
    hang = folder(cluster, "hang")
    hang.mkdir(exist_ok=True)
    (hang / "sitecustomize.py").write_text(HANG)  # Python imports it first
    env = {"APPTAINERENV_PYTHONPATH": f"{HOME}/hang"}
    numbers = {}
    for launcher in LAUNCHERS:
        # Two at a time: more ranks that start at once take longer to start than the time limit of the test
        # allows.
        after = [f"--dependency=afterany:{list(numbers.values())[-2]}"] if len(numbers) >= 2 else []
        options = ["--nodelist=n3,n4", f"--ntasks-per-node={HANGING[launcher] // 2}", *after]
        numbers[launcher] = cluster.submit(*options, *LAUNCHERS[launcher], "train_ddp", cwd=HOME, env=env)
    return numbers


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_hangs_at_start_fails_the_job_and_is_named(cluster, hanging, launcher):
    number, size = hanging[launcher], HANGING[launcher]
    output = assert_ended(wait(cluster, number), "FAILED")
    shown = cluster.exec("login", "scontrol", "show", "job", str(number)).stdout
    hours, minutes, seconds = map(int, re.search(r"RunTime=(\d+):(\d+):(\d+)", shown).groups())
    assert hours * 3600 + minutes * 60 + seconds < 400
    assert re.search(rf"error: rank {size - 1} of {size} .* n3:\d+ within 60 s", output), output
    wait_until_idle(cluster, number, nodes=("n3", "n4"))


def test_no_container_of_podman_hpc_is_left_when_a_rank_dies(cluster, podman_image):
    folder(cluster, "kill.py").write_text(KILLED)
    done = job(cluster, "kill.py", script="launch/podman_hpc_ddp.sh", env=podman_image)
    assert_ended(done, "FAILED", "n2: task 3")
    wait_until_idle(cluster)


def test_nothing_of_podman_hpc_trains_on_after_scancel(cluster, podman_image):
    """Slurm ends podman-hpc, but not the containers; and it lets an ended job start nothing that could."""
    text = "import time\nprint('goes on', flush=True)\nwhile True: time.sleep(0.1)\n"
    folder(cluster, "goes_on.py").write_text(text)
    number = cluster.submit(HERE, "launch/podman_hpc_ddp.sh", "goes_on.py", cwd=HOME, env=podman_image)
    output = folder(cluster, f"slurm-{number}.out")
    wait_until(lambda: output.exists() and output.read_text().count("goes on") == 4)
    cluster.exec("login", "scancel", str(number))
    assert cluster.wait(number).state == "CANCELLED"
    wait_until_idle(cluster)


@pytest.mark.main_road
def test_nothing_is_left_of_any_job(cluster):
    """The last test of this file. It finds processes by their command lines, not by their variables."""
    wait_until_idle(cluster)
