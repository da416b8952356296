"""The World from the variables of launchers, as recorded from a real run of each, and the rendezvous of real processes."""

import io
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from hpctrain.distributed import rendezvous
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.world import ALONE, World, detect, job_id, restart_count
from hpctrain.errors import HpctrainError, print_error

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "17",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
# in a batch script of sbatch -N2 --ntasks-per-node=2 (Slurm 24.11)
SLURM_BATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SLURM_STEP = SLURM_BATCH | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# Open MPI's mpirun starts one daemon per node with srun: the ranks inherit the step of the daemon
OPENMPI_IN_SLURM = SLURM_BATCH | {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# set by Hydra of MPICH 5.0 and of Intel MPI 2021
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
}


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (TORCHRUN | OPENMPI_IN_SLURM, "torchrun"),
        (
            TORCHRUN | SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"},
            "torchrun",
        ),
        (HOROVODRUN, "horovodrun"),
        (SLURM_BATCH | HOROVODRUN, "horovodrun"),
        # without the address of a server this is not horovodrun
        (SLURM_STEP | {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, "slurm"),
        (OPENMPI_IN_SLURM, "openmpi"),
        (OPENMPI_IN_SLURM | {"PBS_JOBID": "17.server", "PBS_NODEFILE": "/nowhere"}, "openmpi"),
        (MPICH, "mpich"),
        (SLURM_BATCH | MPICH, "mpich"),
        (SLURM_STEP, "slurm"),
        (
            SLURM_STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.17.0", "SLURM_MPI_TYPE": "pmix"},
            "slurm",
        ),
        (SLURM_STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_MPI_TYPE": "pmi2"}, "slurm"),
        # variables that the launch scripts set for plain PyTorch scripts do not make a torchrun
        (
            SLURM_STEP | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "HPCTRAIN_WORLD_SIZE": "4"},
            "slurm",
        ),
    ],
)
def test_every_launcher_gives_rank_3_of_4(env, launcher):
    assert detect(env) == World(
        rank=3, size=4, local_rank=1, local_size=2, node_rank=1, nodes=2, launcher=launcher
    )


@pytest.mark.parametrize("env", [{}, SLURM_BATCH | {"SLURM_NTASKS": "1"}, {"SLURM_JOB_ID": "17"}])
def test_one_process_alone(env):
    assert detect(env) == World(0, 1, 0, 1, 0, 1, "single")


def test_one_of_a_kind_has_no_plural():
    """The log and `check` said "1 ranks on 1 nodes"."""
    assert (World(0, 4, 0, 2, 0, 2, "slurm").extent, ALONE.extent) == (
        "4 ranks on 2 nodes",
        "1 rank on 1 node",
    )


def test_nodes_with_unlike_numbers_of_tasks():
    env = SLURM_STEP | {
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    }
    assert detect(env) == World(4, 5, 0, 1, 2, 3, "slurm")


@pytest.mark.parametrize(
    "step",
    [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}],
)
def test_one_process_in_a_batch_script_of_four_tasks_is_an_error_with_the_right_command(step):
    with pytest.raises(HpctrainError, match=r"4 tasks.*srun"):
        detect(SLURM_BATCH | step)


def test_one_process_in_a_pbs_job_of_several_slots_is_an_error_with_the_right_command(tmp_path):
    nodefile = tmp_path / "nodes"
    nodefile.write_text("n1\nn1\nn2\nn2\n")
    with pytest.raises(HpctrainError, match='mpirun -np 4 --hostfile "\\$PBS_NODEFILE"'):
        detect({"PBS_JOBID": "17.server", "PBS_NODEFILE": str(nodefile)})
    nodefile.write_text("n1\n")
    assert detect({"PBS_JOBID": "17.server", "PBS_NODEFILE": str(nodefile)}).launcher == "single"
    with pytest.raises(HpctrainError, match="PBS_NODEFILE"):
        detect({"PBS_JOBID": "17.server", "PBS_NODEFILE": str(tmp_path / "gone")})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (TORCHRUN | {"RANK": "three"}, "RANK is 'three'"),
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, "LOCAL_RANK is ''"),
        (TORCHRUN | {"RANK": "4"}, "contradict"),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE is 'two'"),
        (SLURM_STEP | {"SLURM_NODEID": "2"}, "lists 2 nodes"),
        # the wrong PMI: each of four ranks gets a world of one
        (
            MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "HPCTRAIN_WORLD_SIZE": "4"},
            "PMI",
        ),
        ({"HPCTRAIN_WORLD_SIZE": "4"}, "started 4 ranks"),
        ({"HPCTRAIN_WORLD_SIZE": "many"}, "HPCTRAIN_WORLD_SIZE is 'many'"),
    ],
)
def test_broken_variables_are_named(env, message):
    with pytest.raises(HpctrainError, match=message):
        detect(env)


@pytest.mark.parametrize(
    ("launcher", "command"),
    [("slurm", "srun"), ("openmpi", "mpirun"), ("mpich", "mpiexec"), ("torchrun", "torchrun")],
)
def test_errors_name_the_command_that_the_user_typed(launcher, command):
    assert World(0, 2, 0, 2, 0, 1, launcher).launcher_command == command


class Pipe(io.RawIOBase):
    def __init__(self):
        self.writes = []

    def writable(self):
        return True

    def write(self, data):
        self.writes.append(bytes(data))
        return len(data)


def test_an_error_is_one_write_so_that_lines_of_ranks_do_not_mix(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(pipe := Pipe(), write_through=True))
    print_error("hpctrain: error: one\nhpctrain: two")
    assert pipe.writes == [b"hpctrain: error: one\nhpctrain: two\n"]


def test_job_id():
    assert job_id(SLURM_BATCH) == "17"
    assert job_id(SLURM_BATCH | {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "2"}) == "16_2"
    assert job_id({"PBS_JOBID": "17.server"}) == "17.server"
    assert len(job_id({})) == len("20261120-113500")


def test_restarts_of_slurm_and_of_pbs():
    assert [
        restart_count(env) for env in ({}, {"SLURM_RESTART_COUNT": "2"}, {"HPCTRAIN_PBS_RERUNS": "1"})
    ] == [0, 2, 1]


def test_a_gpu_that_is_not_there():
    assert choose_device(detect({}), "cpu").type == "cpu"
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(HpctrainError, match=r"--device cuda, but rank 0 .* sees no GPU"):
            choose_device(detect({}), "cuda")


def test_gpus_that_slurm_granted_and_this_rank_cannot_use():
    """It would train on the CPU and say nothing.

    A laptop with a GPU that this torch does not use is no allocation.
    """
    import torch

    if not torch.cuda.is_available():
        granted = {"SLURM_GPUS_ON_NODE": "4"}
        message = r"rank 0 on \S+: the job has a GPU \(SLURM_GPUS_ON_NODE=4\), but there is no /dev/nvidia.*"
        with pytest.raises(
            HpctrainError, match=message + "(is a CPU build.*: use the CUDA image, or --device cpu)?"
        ):
            choose_device(detect({}), "auto", granted)
        assert (
            choose_device(detect({}), "cpu", granted).type
            == choose_device(detect({}), "auto", {}).type
            == "cpu"
        )


def test_real_torchrun():
    """Two processes of a real torchrun, to check the table above."""
    code = "from hpctrain.distributed.world import detect; w = detect(); "
    code += r"print(f'{w.rank} {w.size} {w.local_rank} {w.local_size} {w.launcher}\n', end='')"  # one write
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--no-python",
            sys.executable,
            "-c",
            code,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 torchrun", "1 2 1 2 torchrun"]


def start_ranks(ranks, *, size=2, seconds=10, late=None, **env):
    """Start these ranks of a Slurm step as real processes, with a join time-out of `seconds`; rank `late` sleeps first."""
    code = """
import sys, time, types
from datetime import timedelta
import torch, hpctrain.distributed.rendezvous as w, hpctrain.__main__ as main
w.JOIN_TIMEOUT = timedelta(seconds=int(sys.argv[1]))
def command(world, _):
    with w.process_group(world, torch.device("cpu")):
        print(sum(w.gather(world, world.rank)))
sys.modules["meeting"] = types.SimpleNamespace(parser=None, main=command)
main.COMMANDS["meeting"] = ("meeting", "use", "")
if sys.argv.pop(2) == w.os.environ["SLURM_PROCID"]:
    time.sleep(600)
del sys.argv[1]
main.main()
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(seconds), str(late), "meeting"],
            env={
                **os.environ, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
                "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": str(size), "TORCH_CPP_LOG_LEVEL": "ERROR",
                "MASTER_ADDR": "localhost", **env,
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in ranks
    ]  # fmt: skip
    done = []
    for rank, process in zip(ranks, started, strict=True):
        if rank == late:
            continue
        out, err = process.communicate(timeout=300)
        done.append((process.returncode, out, err))
    for process in started:
        process.kill()
        process.wait()
    return done


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return str(listener.getsockname()[1])


@pytest.mark.slow
def test_a_rank_that_hangs_at_the_start_is_named_once():
    """Rank 2 sleeps.

    Rank 0 names it, and rank 1 exits with status 0, so that srun does not kill rank 0 before that.
    """
    first, second = start_ranks([0, 1, 2], size=3, late=2, MASTER_PORT=free_port())
    assert (
        first[0] == 1
        and "rank 2 of 3 did not join at localhost:" in first[2]
        and "(ranks 0-1 did)" in first[2]
    )
    assert first[2].count("\n") == 1
    assert second == (0, "", "")


@pytest.mark.slow
def test_all_ranks_join():
    assert start_ranks([0, 1, 2], size=3, seconds=200, MASTER_PORT=free_port()) == [(0, "3\n", "")] * 3


CROWD = """
import os, resource, socket, time
import torch
from hpctrain.distributed import rendezvous
from hpctrain.distributed.world import World
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
rank = 1 - bool(os.fork())
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    while not (peers := [socket.socket()])[0].connect_ex(("localhost", 29500)) == 0:
        time.sleep(0.1)
    peers += [socket.create_connection(("localhost", 29500)) for _ in range(500)]
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
world = World(rank, 2, rank, 2, 0, 1, "torchrun")
with rendezvous.process_group(world, torch.device("cpu")):
    print(rendezvous.gather(world, rank), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("device", "cpu_tensors", "backend"),
    [("cpu", True, "gloo"), ("cuda:1", False, "nccl"), ("cuda:1", True, "cpu:gloo,cuda:nccl")],
)
def test_the_backend_follows_the_device(monkeypatch, device, cpu_tensors, backend):
    """There is no GPU here, so the group is not made."""
    made = []
    monkeypatch.setattr(rendezvous, "_connect_store", lambda _: None)
    monkeypatch.setattr(
        rendezvous.dist, "init_process_group", lambda backend, **options: made.append(backend)
    )
    monkeypatch.setattr(rendezvous.dist, "destroy_process_group", lambda: None)
    with rendezvous.process_group(World(0, 2, 0, 2, 0, 1, "torchrun"), torch.device(device), cpu_tensors):
        assert made == [backend]


def test_two_ranks_on_one_gpu_are_one_line(monkeypatch):
    """The error is what torch 2.11 raised on a node with one GPU."""
    text = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60
"""

    def init_process_group(*_, **__):
        raise torch.distributed.DistBackendError(text)

    monkeypatch.setattr(rendezvous, "_connect_store", lambda world: None)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", init_process_group)
    message = r"rank 1 of 2 on .*, cuda:0: NCCL cannot start \(Duplicate GPU .* device 60\): give each rank a GPU of its own \(--gpus"
    world = World(1, 2, 1, 2, 0, 1, "torchrun")
    with (
        pytest.raises(HpctrainError, match=message),
        rendezvous.process_group(world, torch.device("cuda", 0)),
    ):
        pass


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_store_with_the_connections_of_hundreds_of_ranks():
    """Of which rank 0 has more than it may have open files, unless it asks for more.

    In a network of its own, because the store asks the name service for the name of each peer.
    """
    command = 'ip link set lo up && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", command, sys.executable, CROWD],
        capture_output=True,
        text=True,
        timeout=200,
    )
    # two processes print, and their lines can mix
    assert done.stdout.replace("\n", "") == "[0, 1]" * 2, done.stderr


def test_a_name_that_does_not_resolve_is_an_error_at_once():
    since = time.monotonic()
    [(status, _, error)] = start_ranks(
        [1], seconds=200, MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29500"
    )
    assert status == 1 and "MASTER_ADDR is no-such-host.invalid" in error and "cannot resolve" in error
    assert time.monotonic() - since < 150


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        [(status, _, error)] = start_ranks([0], MASTER_PORT=str(port))
    assert (
        status == 1
        and f"port {port} of {os.uname().nodename} (MASTER_PORT) is in use by another process" in error
    )


@pytest.mark.slow
def test_a_rank_0_that_never_starts():
    [(status, _, error)] = start_ranks([1], seconds=3, MASTER_PORT="9")
    assert (
        status == 1 and "rank 1 of 2" in error and "did not reach rank 0 at localhost:9 within 3 s" in error
    )


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("dist.TCPStore", "did not reach rank 0 at "),
        ("_wait_for_all_ranks", "lost the connection to rank 0 at "),
    ],
)
def test_an_error_of_the_store_without_a_message_is_named_by_its_type(monkeypatch, place, message):
    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(f"hpctrain.distributed.rendezvous.{place}", fail)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(HpctrainError, match=rf"rank 1 of 2 .*{message}localhost:29500.* \(RuntimeError\)"):
        rendezvous._connect_store(World(1, 2, 0, 1, 1, 2, "slurm"))


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_ranks_that_torchrun_restarts_ignore_the_keys_of_dead_ranks(tmp_path, agents):
    """torchrun keeps its store over restarts; with two agents PyTorch's own init_process_group() fails then."""
    (tmp_path / "rank.py").write_text("""
import os, torch
from pathlib import Path
from hpctrain.distributed.rendezvous import gather, process_group
from hpctrain.distributed.world import detect
world = detect()
with process_group(world, torch.device("cpu")):
    if world.rank == 1 and not Path("died").exists():
        Path("died").touch()
        os._exit(3)
    gather(world, None)
    print(f"met {world.rank}\\n", end="", flush=True)
os._exit(0)
""")
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={agents}", f"--nproc-per-node={2 // agents}",
        "--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=1", "rank.py",
    ]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(agents)
    ]
    done = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * agents, done
    assert sorted(line for out, _ in done for line in out.splitlines()) == ["met 0", "met 1"]
