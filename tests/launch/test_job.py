"""What the scheduler granted, and what of a shell and of a job reaches a rank, without a cluster:
launch/lib/job.sh and environment.sh.

STANDINS hold back what the real programs do: mpirun and podman-hpc pass on what they are told, a SIF unsets
PYTHONPATH, and srun without --export=ALL passes on nothing. test_environment.py has the real ones.
"""

import os
import re
from pathlib import Path

import pytest

from tests.launch import helpers
from tests.launch.helpers import assert_refused, dry_run
from tests.launch.test_environment import HOSTILE, VARIABLES
from tests.launch.test_injection import LAUNCH, a_shell, split_log, what_a_rank_got

STANDINS = {
    "apptainer": """[ "$1" = exec ] || { echo apptainer version 0; exit; }
        clean=() pythonpath=()
        [ -z "$APPTAINER_CLEANENV$SINGULARITY_CLEANENV$APPTAINER_CONTAINALL" ] || clean=(-i)
        [ -z "$APPTAINERENV_PYTHONPATH" ] || pythonpath=("PYTHONPATH=$APPTAINERENV_PYTHONPATH")
        while [ "$1" != "$HPCTRAIN_IMAGE" ]; do shift; done
        exec env "${clean[@]}" -u PYTHONPATH "PATH=$PATH" "${pythonpath[@]}" "${@:2}" """,
    "podman": "echo podman version 0",
    "python": """[ "$1" != --version ] || { echo Python 3; exit; }
        [ "$1" != -c ] || { echo Open MPI v5.0.9 >&2; exit; }
        printf '%s\\0' "$#" "$@" "$PWD"
        exec env -0""",
    "podman-hpc": """[ "$1" = shared-run ] || { echo sha256:abc; exit; }
        kept=()
        while [ "$1" != "$HPCTRAIN_IMAGE" ]; do
            [[ $1 != --env || ! -v $2 ]] || kept+=("$2=${!2}")
            shift
        done
        exec env -i "PATH=$PATH" "${kept[@]}" "${@:2}" """,
    "shifter": """while [[ $1 == -* ]]; do shift; done
        exec "$@" """,
    "shifterimg": "echo 0123456789abcdef",
    "srun": """[ "$1" != --mpi=list ] || { echo "MPI plugin types are... pmix pmi2"; exit; }
        clean=(-i)
        while [ "${1%/task.sh}" = "$1" ]; do
            [ "$1" != --export=ALL ] || clean=()
            shift
        done
        exec env "${clean[@]}" "PATH=$PATH" SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "$@" """,
    "mpirun": """[ "$1" != --version ] || { echo "mpirun (Open MPI) 5.0.7"; exit; }
        kept=()
        while [ "${1%/task.sh}" = "$1" ]; do
            [ "$1" != -x ] || kept+=("$2=${!2}")
            shift
        done
        exec env -i "PATH=$PATH" "HOME=$HOME" OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 \\
            "${kept[@]}" "$@" """,
}
SCRIPTS = [
    "apptainer_ddp.sh", "apptainer_torchrun.sh", "apptainer_mpi.sh", "apptainer_mpi.sh --mpi=mpirun",
    "pbs_ddp.sh", "podman_hpc_ddp.sh", "shifter_ddp.sh", "modules_ddp.sh",
]  # fmt: skip


@pytest.fixture
def shell():
    """The shell of a job of one node, with STANDINS."""
    with a_shell() as run:
        put(run, **STANDINS)
        (run.top / "nodes").write_text("n1\n")
        yield run


def put(run, **programs):
    helpers.put(run.top / "bin", **programs)


def start(run, line, *words, **env):
    script, *options = line.split()
    if script == "pbs_ddp.sh":
        env |= {"PBS_JOBID": "17", "PBS_NODEFILE": f"{run.top}/nodes", "PBS_O_WORKDIR": str(run.job)}
    done = run(LAUNCH / script, *options, *(words or ["check"]), **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_open_mpi_has_a_folder_in_shared_memory_that_others_cannot_enter(shell):
    """Somebody had all names of its files there, and read the messages."""
    own = f"/dev/shm/hpctrain-{os.getuid()}"
    for script, folder in (("apptainer_mpi.sh", own), ("podman_hpc_ddp.sh", "")):
        _, _, variables = what_a_rank_got(start(shell, script))
        for component in ("sm", "vader"):
            assert variables.get(f"OMPI_MCA_btl_{component}_backing_directory", "") == folder
    assert Path(own).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rank_gets_what_the_user_has_exported_and_nothing_of_another_job(shell, script):
    own = shell.top / "src"
    own.mkdir()
    path = f"{own}:/sw/lib/python3.9/site-packages"
    theirs = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7", "TORCHELASTIC_RUN_ID": "another"}
    theirs |= {"PET_STANDALONE": "1"}  # an option of torchrun: each node is a world
    theirs |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}  # all ranks of a node were on one CPU
    log = start(shell, script, **VARIABLES | HOSTILE | theirs, PYTHONPATH=path)
    _, _, variables = what_a_rank_got(log)
    missing = {name for name, value in VARIABLES.items() if variables.get(name) != value}
    assert not missing, missing
    assert variables["WORLD_SIZE" if "torchrun" not in script else "HPCTRAIN_WORLD_SIZE"] == "1"
    assert variables.get("RANK", "0") == variables.get("LOCAL_RANK", "0") == "0"
    assert variables.get("TORCHELASTIC_RUN_ID") != "another"
    assert not {"SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SLURM_STEP_NUM_TASKS"} & variables.keys() or (
        script == "pbs_ddp.sh"
    )
    assert not {"OMP_PROC_BIND", "OMP_PLACES"} & variables.keys()
    # without an image the host's Python has all three, and packages of pip install --user
    if script != "modules_ddp.sh":
        assert variables["PYTHONPATH"] == str(own) and "PYTHONHOME" not in variables
    assert ("PYTHONNOUSERSITE" in variables) == (script != "modules_ddp.sh")
    (dropped,) = re.findall("not passed on to the ranks: (.*)", log)
    assert theirs.keys() <= set(dropped.split(",")), dropped


def test_the_commands_of_slurm_are_behind_those_of_the_image(shell):
    """scontrol show hostnames, from which many scripts take the first node, was not found."""
    variables = what_a_rank_got(start(shell, "apptainer_ddp.sh", APPTAINERENV_APPEND_PATH="/mine"))[2]
    assert variables["APPTAINERENV_APPEND_PATH"] == f"/mine:{LAUNCH}/lib/slurm"
    assert {"HPCTRAIN_HOSTS", "HPCTRAIN_SLURM_VERSION"} <= variables.keys()


def test_a_tilde_in_a_setting_is_the_home(shell):
    """bash leaves it in sbatch --export=ALL,HPCTRAIN_CACHE=~/cache, and a folder named ~ appeared."""
    variables = what_a_rank_got(start(shell, "apptainer_ddp.sh", HPCTRAIN_CACHE="~/cache", MINE="~/x"))[2]
    assert variables["HPCTRAIN_CACHE"] == f"{variables['HOME']}/cache" and variables["MINE"] == "~/x"


def test_no_setting_of_apptainer_keeps_something_out_of_the_image(shell):
    """With --compat the folder of the job was not there. With --hostname all nodes had one name."""
    names = ["CLEANENV", "COMPAT", "CONTAIN", "CONTAINALL", "NO_HOME", "NO_MOUNT", "WRITABLE", "HOSTNAME"]
    env = {f"{tool}_{name}": "1" for name in names for tool in ("APPTAINER", "SINGULARITY")}
    log = start(shell, "apptainer_ddp.sh", **env, APPTAINER_DEBUG="1")
    variables = what_a_rank_got(log)[2]
    assert "APPTAINER_DEBUG" in variables and not env.keys() & variables.keys()
    assert f"not passed on to the ranks: {','.join(sorted(env))}\n" in log, log


@pytest.mark.parametrize(
    "script", [["apptainer_mpi.sh", "--mpi=mpirun"], ["apptainer_horovod.sh", "--launcher=mpirun"]]
)
@pytest.mark.parametrize(
    ("version", "here", "library", "starts"),
    [
        ("4.1.4", "login", "5.0.9", False),
        ("3.1.6", "login", "5.0.9", False),
        ("4.1.4", "n1", "5.0.9", True),
        ("5.0.7", "login", "5.0.9", True),
        ("4.1.4", "login", "4.1.4", True),
    ],
)
def test_mpirun_4_starts_open_mpi_5_on_a_node_of_the_job(shell, script, version, here, library, starts):
    """From the login node, in salloc, it told the ranks wrongly who shares their node."""
    put(shell, python=STANDINS["python"].replace("5.0.9", library))
    put(shell, mpirun=STANDINS["mpirun"].replace("5.0.7", version))
    put(shell, uname=f'[ "$1" != -n ] || echo {here}.site')
    done = shell(LAUNCH / script[0], script[1], "check")
    assert (done.returncode == 0) == starts, done.stderr
    assert (f" {version} must start on a node" in done.stderr) != starts


def test_singularity_passes_on_pythonpath(shell):
    """Singularity CE knows no APPTAINERENV_ variables, and a SIF unsets PYTHONPATH."""
    standin = STANDINS["apptainer"].replace("apptainer version 0", "singularity-ce version 4.3.4")
    put(shell, singularity=standin.replace("APPTAINERENV", "SINGULARITYENV"))
    (shell.top / "bin/apptainer").unlink()
    (shell.top / "own").mkdir()
    log = start(shell, "apptainer_ddp.sh", PYTHONPATH=f"{shell.top}/own")
    assert what_a_rank_got(log)[2].get("PYTHONPATH") == f"{shell.top}/own", log


def test_packages_of_pip_install_user_are_told_where_to_go(shell):
    """They were installed for the image, as NERSC's tutorial says, and ignored without a word."""
    log = start(shell, "apptainer_ddp.sh", PYTHONUSERBASE="/global/u/me/env")
    told = [line for line in log.splitlines() if line.startswith("hpctrain: warning: ")]
    assert len(told) == 1, log
    for word in ("PYTHONUSERBASE", "/global/u/me/env", "hpctrain add", "HPCTRAIN_PACKAGES"):
        assert word in told[0]
    assert "PYTHONUSERBASE" not in what_a_rank_got(log)[2]
    assert "PYTHONUSERBASE=/e" in "".join(
        f"{name}={value} "
        for name, value in what_a_rank_got(start(shell, "modules_ddp.sh", PYTHONUSERBASE="/e"))[2].items()
    )


@pytest.mark.parametrize("spread", ["3,1", "2(x2),1"])
def test_nodes_with_different_numbers_of_tasks_are_refused(shell, spread):
    """sbatch --nodes=3 --ntasks=5 started six ranks."""
    done = shell(LAUNCH / "apptainer_ddp.sh", "check", SLURM_TASKS_PER_NODE=spread)
    assert_refused(done, f" {spread} tasks", "--ntasks-per-node")


def test_a_heterogeneous_job_is_refused(shell):
    """Its ranks were on the first component, and the others idled."""
    put(shell, squeue="case $* in *HetJobOffset*) cat offset ;; esac")
    for offset, status in (("0", 2), ("N/A", 0)):  # N/A: the variable is of a job around it
        (shell.job / "offset").write_text(offset)
        done = shell(LAUNCH / "apptainer_ddp.sh", "check", SLURM_HET_SIZE="2")
        assert done.returncode == status and (" 2 components" in done.stderr) == bool(status), done.stderr


def test_options_of_sbatch_are_those_of_the_ranks(shell):
    """srun did not start as many tasks as --overcommit allows. --export=LR=1 gave a line of the log."""
    log = start(shell, "apptainer_ddp.sh", SLURM_OVERCOMMIT="1", SLURM_GET_USER_ENV="1")
    assert what_a_rank_got(log)[2]["SLURM_OVERCOMMIT"] == "1" and "not passed on" not in log, log


def test_a_job_that_is_submitted_inside_another_one_is_itself(shell):
    """Threads, address and secret were those of the job around it."""
    outer = {"HPCTRAIN_JOB": "16", "OMP_NUM_THREADS": "40", "MASTER_ADDR": "n9", "HPCTRAIN_JOB_SECRET": "x"}
    _, _, variables = what_a_rank_got(start(shell, "apptainer_ddp.sh", **outer))
    assert (variables["OMP_NUM_THREADS"], variables["MASTER_ADDR"]) == ("1", "n1")
    assert variables["HPCTRAIN_JOB_SECRET"] != "x"


@pytest.mark.parametrize(
    ("address", "kept"),
    [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("no-such-node.invalid", False)],
)
def test_an_address_of_another_node_is_not_the_rendezvous(shell, address, kept):
    """The ranks waited for a login node, whose name ~/.bashrc had exported after a tutorial."""
    put(shell, uname='[ "$1" != -n ] || echo n1.site')
    log = start(shell, "apptainer_ddp.sh", MASTER_ADDR=address)
    assert what_a_rank_got(log)[2]["MASTER_ADDR"] == (address if kept else "n1")
    assert ("not passed on to the ranks: MASTER_ADDR\n" in log) is not kept


def test_a_job_runs_in_the_folder_in_which_slurm_starts_it(shell):
    """sbatch --chdir was ignored. Where the folder is missing, Slurm starts the script in /tmp."""
    elsewhere = shell.top / "elsewhere"
    elsewhere.mkdir()
    folders = {"SLURM_SUBMIT_DIR": str(shell.job), "cwd": elsewhere}
    put(shell, squeue=f'[[ "$*" != *--format=%Z* ]] || echo "{elsewhere}"')
    assert what_a_rank_got(start(shell, "apptainer_ddp.sh", **folders))[1] == str(elsewhere)
    put(shell, squeue='[[ "$*" != *--format=%Z* ]] || echo /not/here')
    done = shell(LAUNCH / "apptainer_ddp.sh", "check", cwd=elsewhere)
    assert_refused(done, "/not/here, ")


def test_models_and_a_login_from_before_the_job_are_found(shell):
    """The caches of the site, empty folders of the node, were in their place."""
    cache = shell.top / "home/.cache"
    (cache / "huggingface").mkdir(parents=True)
    (cache / "huggingface/token").touch()
    variables = what_a_rank_got(start(shell, "apptainer_ddp.sh"))[2]
    assert variables["HF_TOKEN_PATH"] == f"{cache}/huggingface/token"
    assert not variables["HF_HOME"].startswith(str(cache))
    (cache / "huggingface/hub/models--klue--bert-base").mkdir(parents=True)
    (cache / "torch/hub").mkdir(parents=True)
    variables = what_a_rank_got(start(shell, "apptainer_ddp.sh"))[2]
    assert (variables["HF_HOME"], variables["TORCH_HOME"]) == (f"{cache}/huggingface", f"{cache}/torch")
    own = what_a_rank_got(start(shell, "apptainer_ddp.sh", HF_HOME="/mine"))[2]
    assert own["HF_HOME"] == "/mine"


def test_a_print_is_in_the_log_when_the_job_is_killed(shell):
    assert what_a_rank_got(start(shell, "apptainer_ddp.sh"))[2]["PYTHONUNBUFFERED"] == "1"
    buffered = start(shell, "apptainer_ddp.sh", PYTHONUNBUFFERED="")
    assert what_a_rank_got(buffered)[2]["PYTHONUNBUFFERED"] == ""


def test_the_world_is_that_of_the_nodes_without_spare_ones(programs, tmp_path):
    """GPUs that are asked for the whole job are those of all nodes. NCCL takes an empty value for a name."""
    helpers.put(
        tmp_path,
        scontrol='[ "$2" != hostnames ] || printf "n%s\\n" 1 2 3 4',
        squeue=r"""case $* in *tres-per-job*) printf "%400s%-400s%400s" "" gres/gpu:8 "" ;; esac""",
    )
    env = programs | {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x4)", "NCCL_NET": ""}
    script = "OPTION[spare-nodes]=1 OPTION[dry-run]=1; read_slurm_job; "
    script += "echo ${HOSTS[*]}, $GPUS GPUs, $HPCTRAIN_WORLD_SIZE ranks, ${NCCL_NET-unset}"
    done = helpers.library(script, **env)
    assert done.stdout.splitlines()[-1] == "n1 n2 n3, 2 GPUs, 6 ranks, unset", done


PARTS = [
    ("apptainer_ddp.sh", " --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=4 ", " --nodelist=n2 "),
    (
        "apptainer_torchrun.sh",
        " --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=4 ",
        " --nodelist=n2 ",
    ),
    ("apptainer_mpi.sh --mpi=mpirun", " -np 1 --map-by ppr:1:node ", " --host n2:1 "),
    ("apptainer_horovod.sh --launcher=horovodrun", " -np 1 -H n2:1 "),
    ("pbs_ddp.sh", " -np 1 --map-by ppr:1:node ", " --host n2:1 "),
]


@pytest.mark.parametrize("part", PARTS, ids=[part[0] for part in PARTS])
def test_ranks_on_a_part_of_what_the_job_has(shell, part):
    """They have all CPUs of the node, and the rendezvous is on its first one."""
    put(shell, scontrol='[ "$2" != hostnames ] || printf "n%s\\n" 1 2')
    (shell.top / "nodes").write_text("n1\nn1\nn2\nn2\n")
    job = {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "NCPUS": "4"}
    log = start(shell, f"{part[0]} --dry-run --ranks-per-node=1 --hosts=n2.site", **job)
    assert " 1 node x 1 task x 4 threads," in log and " on n2\n" in log, log
    assert "rendezvous n2:" in log and "HPCTRAIN_WORLD_SIZE=1\n" in log, log
    assert not [words for words in part[1:] if words not in f"{log} "] and "warning" not in log, log


def test_nodes_are_in_the_order_of_the_job_and_this_one_is_localhost(shell):
    """Slurm numbers the ranks in its own order, and rank 0 listens on the first node."""
    put(shell, scontrol='[ "$2" != hostnames ] || printf "n%s\\n" 1 2 3')
    put(shell, uname='[ "$1" != -n ] || echo n2.site')
    log = start(shell, "apptainer_ddp.sh --dry-run --hosts=n3,localhost", MASTER_ADDR="localhost")
    assert " on n2 n3\n" in log and "--nodelist=n2\\,n3 " in log and "rendezvous n2:" in log, log


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--hosts=n9", ["--hosts=n9", "n1"]),
        ("--hosts=n1:2", ["n1:2", "--ranks-per-node"]),
        ("--ranks-per-node=3", ["--ranks-per-node=3", " 1 task ", "--ntasks-per-node"]),
        ("--ranks-per-node=0", ["--ranks-per-node=0"]),
    ],
)
def test_ranks_where_the_job_has_none_are_refused(shell, option, names):
    assert_refused(shell(LAUNCH / "apptainer_ddp.sh", option, "check"), *names)


@pytest.mark.parametrize(
    ("granted", "tasks", "asked", "threads", "warning"),
    [
        ("8(x2)", 2, None, 4, ""),  # --exclusive, --cpus-per-gpu
        ("8,4", 2, None, 2, ""),  # the smaller node decides
        ("8", 2, "4", 4, ""),
        ("8", 2, "2", 2, "warning: 4 CPUs of 8 per node"),
        ("8", 3, None, 2, "warning: 2 CPUs of 8 per node"),
        ("2", 4, None, 1, "warning: 4 tasks share 2 CPUs per node"),
    ],
)
def test_ranks_use_the_cpus_that_slurm_granted_and_the_log_says_if_not(
    shell, granted, tasks, asked, threads, warning
):
    put(shell, squeue=f'[[ "$*" != *cpus-per-task* ]] || echo "{asked or ""}"')
    job = {"SLURM_JOB_CPUS_PER_NODE": granted, "SLURM_TASKS_PER_NODE": f"{tasks}(x1)"}
    log = start(shell, "apptainer_ddp.sh --dry-run", **job)
    assert f" x {threads} thread" in log and f" --cpus-per-task={threads} " in log, log
    assert warning in log and log.count("warning: ") == bool(warning), log


def test_the_shell_of_srun_shares_its_cpus_with_the_ranks(shell):
    """They waited for the CPUs of the shell until the time limit."""
    hosts = '[ "$2" != hostnames ] || echo n1'
    put(shell, scontrol=f'[ "$1" != listpids ] || echo "1 17 0"; {hosts}')
    step = {"SLURM_TASK_PID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert " --overlap " in start(shell, "apptainer_ddp.sh --dry-run", **step)
    put(shell, scontrol=hosts)
    assert " --overlap " not in start(shell, "apptainer_ddp.sh --dry-run")


@pytest.mark.parametrize("nodes", ["n1 n1 n1 n2", "n1 n1 n2"])
def test_nodes_of_pbs_with_unlike_numbers_of_slots_are_refused(shell, nodes):
    """Of 3 and 1 slots, mpirun said something about its ppr and the topology."""
    (shell.top / "nodes").write_text("".join(f"{node}\n" for node in nodes.split()))
    pbs = {"PBS_JOBID": "17", "PBS_NODEFILE": f"{shell.top}/nodes"}
    done = shell(LAUNCH / "pbs_ddp.sh", "check", **pbs)
    slots = len(nodes.split())
    assert_refused(done, f"2 nodes {slots} slots", "select=N:", "place=scatter")


def test_a_script_that_mpirun_starts_several_times_is_refused(shell):
    """Each copy trained alone. A job that a rank of mpirun submits has its variables, too."""
    put(shell, mpirun='"$@"; exit $?')
    rank = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    done = shell("mpirun", LAUNCH / "apptainer_ddp.sh", "check", **rank)
    assert_refused(done, "mpirun ", " 4 times")
    assert done.stdout == ""
    other = shell("mpirun", LAUNCH / "apptainer_ddp.sh", "check", **rank | {"OMPI_COMM_WORLD_RANK": "1"})
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")
    start(shell, "apptainer_ddp.sh", **rank)
    pbs = shell("mpirun", LAUNCH / "pbs_ddp.sh", **rank | {"OMPI_COMM_WORLD_RANK": "1"})
    assert (pbs.returncode, pbs.stderr) == (0, "")  # on another node than the first one


@pytest.mark.slow
@pytest.mark.parametrize(
    "said, error",
    [
        ("MPI: 1 of 1", "each of 1 ranks is rank 0 of 1: Open MPI"),
        ("An error occurred in MPI_Init", "MPI does not start (Open MPI v5.0.9 with srun --mpi=pmix,"),
    ],
)
def test_ranks_that_mpi_does_not_join_do_not_start(shell, said, error):
    """Each trained alone, with exit status 0."""
    put(shell, python=f'[[ "$*" != *COMM_WORLD* ]] || {{ echo {said}; exit 1; }}; echo Open MPI v5.0.9')
    done = shell(LAUNCH / "apptainer_mpi.sh", "check")
    assert done.returncode == 2 and f"error: {error}" in done.stderr and "try another --mpi=" in done.stderr
    assert len(split_log(done.stdout)[0]) == 0, done.stdout
    # It would end for good a job that starts again, for example because nodes are slow.
    done = shell(LAUNCH / "apptainer_mpi.sh", "check", SLURM_RESTART_COUNT="1")
    joined = "MPI: 1 of" not in said
    assert (done.returncode == 0 and "(restart 1)" in done.stdout) == joined, done.stderr


def test_horovod_over_gloo_needs_no_mpi4py(shell):
    put(shell, python="echo ModuleNotFoundError: no mpi4py; [[ $1 != -c ]]")
    start(shell, "apptainer_horovod.sh --launcher=mpirun")
    done = shell(LAUNCH / "apptainer_horovod.sh", "check", HPCTRAIN_MPI="pmix")
    assert done.returncode == 2 and "or --launcher=mpirun\n" in done.stderr, done.stderr


# ---- half of a job, and numbers that are none ----

IN_SLURM = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "{}"}
IN_PBS = {"PBS_JOBID": "1", "PBS_NODEFILE": "{}/nodes", "PBS_O_WORKDIR": "{}"}
COPIES = IN_SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("script", "env", "names"),
    [
        ("pbs_ddp.sh", IN_PBS | {"PBS_NODEFILE": "{}/empty"}, ["{}/empty, ", "PBS_NODEFILE"]),
        ("pbs_ddp.sh", IN_PBS | {"PBS_NODEFILE": "{}/none"}, ["{}/none, ", "PBS_NODEFILE"]),
        ("pbs_ddp.sh", IN_PBS | {"PBS_O_WORKDIR": "{}/no", "PBS_ENVIRONMENT": "PBS_BATCH"}, ["{}/no, "]),
        ("apptainer_ddp.sh", IN_SLURM, ["scontrol", "SLURM_JOB_NODELIST=''"]),
        ("apptainer_ddp.sh", IN_SLURM | {"SLURM_SUBMIT_DIR": "{}/none"}, ["{}/none, "]),
        ("apptainer_ddp.sh", COPIES | {"SLURM_PROCID": "0"}, [" 4 ", "sbatch launch/apptainer_ddp.sh"]),
    ],
)
def test_half_of_a_job_ends_with_one_line(programs, tmp_path, script, env, names):
    done = dry_run(script, programs | {name: value.format(tmp_path) for name, value in env.items()})
    assert_refused(done, *[name.format(tmp_path) for name in names])


def test_the_other_tasks_of_srun_say_nothing(programs, tmp_path):
    """The srun of each task waited for the nodes of the others, until the time limit."""
    done = dry_run("apptainer_ddp.sh", programs | COPIES | {"SLURM_PROCID": "3"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("port", ["70000", "0", "http", "1$(touch made)"])
def test_a_number_that_is_no_port_is_one_line(programs, port):
    """torchrun ended in a traceback."""
    done = dry_run("apptainer_torchrun.sh", programs | {"MASTER_PORT": port}, "check")
    assert_refused(done, f"MASTER_PORT={port}: ", "65535")
    assert dry_run("apptainer_torchrun.sh", programs | {"MASTER_PORT": "65535"}, "check").returncode == 0


def test_each_job_of_a_pbs_array_has_a_port(programs, tmp_path):
    """Their numbers are like 17[4], which is no number to the shell."""
    ports = set()
    for number in ("17[3].server", "17[4].server", "0178.server"):
        env = {name: value.format(tmp_path) for name, value in IN_PBS.items()} | {"PBS_JOBID": number}
        done = dry_run("pbs_ddp.sh", programs | env)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        ports |= set(re.findall(r"export MASTER_PORT=(\d+)", done.stdout))
    assert len(ports) == 3


@pytest.mark.parametrize(("conf", "threads"), [("PBS_EXEC={}/pbs\n", 4), ("", 3)])
def test_a_pbs_job_without_a_login_shell(programs, tmp_path, conf, threads):
    """A job of qsub -- SCRIPT has no /etc/profile.d/pbs.sh, so qstat was not found, and two tasks had two
    threads each on two CPUs. PBS's OMP_NUM_THREADS is for all the slots of a chunk.
    """
    (tmp_path / "pbs.conf").write_text(conf.format(tmp_path))
    (tmp_path / "pbs/bin").mkdir(parents=True)
    helpers.put(tmp_path / "pbs/bin", qstat="echo '    Resource_List.ncpus = 16'")
    env = {name: value.format(tmp_path) for name, value in IN_PBS.items()} | {"NCPUS": "6"}
    env |= {"OMP_NUM_THREADS": "6", "PBS_CONF_FILE": f"{tmp_path}/pbs.conf"}
    done = dry_run("pbs_ddp.sh", programs | env)
    assert f"2 nodes x 2 tasks x {threads} threads" in done.stdout, done
    assert f"export OMP_NUM_THREADS={threads}\n" in done.stdout, done


# ---- this machine alone ----


def test_one_of_a_kind_has_no_plural(programs):
    """The log began with "1 nodes x 1 tasks"."""
    said = dry_run("local.sh", programs | {"HPCTRAIN_TASKS": "1"}, "check").stdout
    assert re.search(r" 1 node x 1 task x \d+ threads?, 0 GPUs per node, on localhost\n", said), said


@pytest.mark.parametrize(
    ("visible", "ranks"), [(None, 4), ("2", 1), ("1,3", 2), ("GPU-17", 1), ("0,-1,2", 1), ("", 1)]
)
def test_a_rank_for_each_gpu_that_is_visible(programs, tmp_path, visible, ranks):
    """On a shared workstation it took all of them."""
    gpus = "printf 'GPU %s: NVIDIA\\n' 0 1 2 3"
    helpers.put(tmp_path, nvidia_smi=f"[ $1 != --list-gpus ] || {gpus}")
    env = programs if visible is None else programs | {"CUDA_VISIBLE_DEVICES": visible}
    assert f" --nproc-per-node={ranks} " in dry_run("local.sh", env, "check").stdout


def test_a_machine_without_lo_is_told_at_once(programs):
    """torchrun waited for itself."""
    command = ["--map-root-user", "--net", LAUNCH / "local.sh", "--dry-run", "check"]
    assert_refused(helpers.start("/usr/bin/unshare", *command, env=programs), "interface lo ")
