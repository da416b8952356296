"""World from the environments of launchers; the variables are those that each launcher really set, read off real runs."""

import os
import socket
import subprocess
import sys
import time

import pytest

from hpctrain.world import HpctrainError, World, choose_device, detect, job_id

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
# OpenMPI's mpirun starts its daemons by srun, one a node: the ranks inherit the step of the daemon
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
# Hydra of MPICH 5.0 sets these, and Intel MPI 2021's the same
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
        (TORCHRUN | SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"}, "torchrun"),
        (HOROVODRUN, "horovodrun"),
        (SLURM_BATCH | HOROVODRUN, "horovodrun"),
        # the ranks alone, without the address of a server, are no horovodrun
        (SLURM_STEP | {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, "slurm"),
        (OPENMPI_IN_SLURM, "openmpi"),
        (OPENMPI_IN_SLURM | {"PBS_JOBID": "17.server", "PBS_NODEFILE": "/nowhere"}, "openmpi"),
        (MPICH, "mpich"),
        (SLURM_BATCH | MPICH, "mpich"),
        (SLURM_STEP, "slurm"),
        (SLURM_STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.17.0", "SLURM_MPI_TYPE": "pmix"}, "slurm"),
        (SLURM_STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_MPI_TYPE": "pmi2"}, "slurm"),
        # what the launch scripts add for plain PyTorch scripts does not make a torchrun
        (SLURM_STEP | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "HPCTRAIN_WORLD_SIZE": "4"}, "slurm"),
    ],
)
def test_every_launcher_gives_rank_3_of_4(env, launcher):
    assert detect(env) == World(rank=3, size=4, local_rank=1, local_size=2, node_rank=1, nodes=2, launcher=launcher)


@pytest.mark.parametrize("env", [{}, SLURM_BATCH | {"SLURM_NTASKS": "1"}, {"SLURM_JOB_ID": "17"}])
def test_one_process_alone(env):
    assert detect(env) == World(0, 1, 0, 1, 0, 1, "single")


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
    "step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}]
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
        (SLURM_STEP | {"SLURM_NODEID": "2"}, "counts 2 nodes"),
        # the wrong PMI: each of four ranks believes to be alone
        (MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "HPCTRAIN_WORLD_SIZE": "4"}, "PMI"),
        ({"HPCTRAIN_WORLD_SIZE": "4"}, "started 4 ranks"),
        ({"HPCTRAIN_WORLD_SIZE": "many"}, "HPCTRAIN_WORLD_SIZE is 'many'"),
    ],
)
def test_broken_variables_are_named(env, message):
    with pytest.raises(HpctrainError, match=message):
        detect(env)


def test_job_id():
    assert job_id(SLURM_BATCH) == "17"
    assert job_id(SLURM_BATCH | {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "2"}) == "16_2"
    assert job_id({"PBS_JOBID": "17.server"}) == "17.server"
    assert len(job_id({})) == len("20261120-113500")


def test_a_gpu_that_is_not_there():
    assert choose_device(detect({}), "cpu").type == "cpu"
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(HpctrainError, match=r"--device cuda, but rank 0 .* sees no GPU"):
            choose_device(detect({}), "cuda")


def test_real_torchrun():
    """Two processes of a real torchrun, so that the table above does not only test itself."""
    code = "from hpctrain.world import detect; w = detect(); "
    code += r"print(f'{w.rank} {w.size} {w.local_rank} {w.local_size} {w.launcher}\n', end='')"  # one write
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 torchrun", "1 2 1 2 torchrun"]


def meet(ranks, *, size=2, seconds=3, late=None, **env):
    """Start these ranks of a Slurm step, as real processes that meet within `seconds`; rank `late` sleeps first."""
    code = """
import sys, time
from datetime import timedelta
import torch, hpctrain.world as w, hpctrain.__main__ as main
w.JOIN_TIMEOUT = timedelta(seconds=int(sys.argv[1]))
def command(world, _):
    with w.process_group(world, torch.device("cpu")):
        print(sum(w.gather(world, world.rank)))
sys.modules["meeting"] = type(sys)("meeting")
sys.modules["meeting"].main = command
main.COMMANDS["meeting"] = ("meeting", "")
if sys.argv.pop(2) == w.os.environ["SLURM_PROCID"]:
    time.sleep(60)
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
        out, err = process.communicate(timeout=60)
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
    """Rank 2 sleeps; rank 0 says so, and rank 1 leaves quietly, so that srun does not kill rank 0 in its sentence."""
    first, second = meet([0, 1, 2], size=3, late=2, MASTER_PORT=free_port())
    assert first[0] == 1 and "rank 2 of 3 did not come to localhost:" in first[2] and "(ranks 0-1 did)" in first[2]
    assert first[2].count("\n") == 1
    assert second == (0, "", "")


@pytest.mark.slow
def test_ranks_that_all_come_meet():
    assert meet([0, 1, 2], size=3, seconds=20, MASTER_PORT=free_port()) == [(0, "3\n", "")] * 3


def test_a_name_that_does_not_resolve_is_said_at_once():
    since = time.monotonic()
    [(status, _, error)] = meet([1], seconds=60, MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29500")
    assert status == 1 and "MASTER_ADDR is no-such-host.invalid" in error and "cannot resolve" in error
    assert time.monotonic() - since < 30


def test_a_port_that_another_process_has_is_said():
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        [(status, _, error)] = meet([0], MASTER_PORT=str(port))
    assert status == 1 and f"port {port} of {os.uname().nodename}" in error and "is taken by another process" in error


@pytest.mark.slow
def test_a_rank_whose_rank_0_never_comes_says_it():
    [(status, _, error)] = meet([1], MASTER_PORT="9")
    assert status == 1 and "rank 1 of 2" in error and "did not reach rank 0 at localhost:9 within 3 s" in error


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_ranks_that_torchrun_starts_again_do_not_mistake_the_dead_for_the_living(tmp_path, agents):
    """torchrun keeps its store; PyTorch's own init_process_group() does not get over this with two agents."""
    (tmp_path / "rank.py").write_text("""
import os, torch
from pathlib import Path
from hpctrain.world import detect, gather, process_group
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
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(agents)
    ]
    done = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0] * agents, done
    assert sorted(line for out, _ in done for line in out.splitlines()) == ["met 0", "met 1"]
