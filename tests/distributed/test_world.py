"""The World from the variables of launchers, as recorded from a real run of each."""

import sys

import pytest

from hpctrain.distributed.world import ALONE, World, detect, job_id, restart_count
from hpctrain.errors import HpctrainError
from tests.helpers import run_command

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


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (OPENMPI_IN_SLURM | {"OMPI_COMM_WORLD_SIZE": "5"}, "openmpi"),
        (MPICH | {"PMI_SIZE": "5"}, "mpich"),
    ],
)
def test_the_last_node_of_mpirun_may_have_fewer_ranks(env, launcher):
    """MPI numbers no nodes."""
    assert detect(env) == World(3, 5, 1, 2, 1, 3, launcher)


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
    with pytest.raises(HpctrainError, match=r"\b4\b.*srun"):
        detect(SLURM_BATCH | step)


def test_one_process_in_a_pbs_job_of_several_slots_is_an_error_with_the_right_command(tmp_path):
    nodefile = tmp_path / "nodes"
    nodefile.write_text("n1\nn1\nn2\nn2\n")
    with pytest.raises(HpctrainError, match='mpirun -np 4 --hostfile "\\$PBS_NODEFILE"'):
        detect({"PBS_JOBID": "17.server", "PBS_NODEFILE": str(nodefile)})
    nodefile.write_text("n1\n")
    assert detect({"PBS_JOBID": "17.server", "PBS_NODEFILE": str(nodefile)}).launcher == "single"
    for image, advice in (({}, "first node"), ({"APPTAINER_CONTAINER": "x.sif"}, '--bind "\\$PBS_NODEFILE"')):
        with pytest.raises(HpctrainError, match=f"PBS_NODEFILE.*{advice}"):
            detect(image | {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(tmp_path / "gone")})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (TORCHRUN | {"RANK": "three"}, "RANK is 'three'"),
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, "LOCAL_RANK is ''"),
        (TORCHRUN | {"RANK": "4"}, "torchrun.*rank=4"),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE is 'two'"),
        (SLURM_STEP | {"SLURM_NODEID": "2"}, "SLURM_NODEID.*SLURM_STEP_TASKS_PER_NODE"),
        # the wrong PMI: each of four ranks gets a world of one
        (
            MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "HPCTRAIN_WORLD_SIZE": "4"},
            "PMI",
        ),
        ({"HPCTRAIN_WORLD_SIZE": "4"}, "4 ranks"),
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


def test_job_id():
    assert job_id(SLURM_BATCH) == "17"
    assert job_id(SLURM_BATCH | {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "2"}) == "16_2"
    assert job_id({"PBS_JOBID": "17.server"}) == "17.server"
    assert len(job_id({})) == len("20261120-113500")


def test_restarts_of_slurm_and_of_pbs():
    assert [
        restart_count(env) for env in ({}, {"SLURM_RESTART_COUNT": "2"}, {"HPCTRAIN_PBS_RERUNS": "1"})
    ] == [0, 2, 1]


@pytest.mark.slow
def test_real_torchrun():
    """Two processes of a real torchrun, to check the table above."""
    code = "from hpctrain.distributed.world import detect; w = detect(); "
    code += r"print(f'{w.rank} {w.size} {w.local_rank} {w.local_size} {w.launcher}\n', end='')"  # one write
    done = run_command(
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
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 torchrun", "1 2 1 2 torchrun"]


def test_the_ranks_of_a_group_are_one_in_the_world_of_groups():
    groups = [World(rank, 6, rank, 6, 0, 1, "torchrun").in_groups_of(2) for rank in range(6)]
    assert [(group.rank, group.size) for group in groups] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
