"""What of a user's shell reaches every rank: variables, paths and what Slurm granted.

By the shipped scripts, with every launcher (srun, torchrun, mpirun, horovodrun, PBS) and runtime (apptainer,
podman-hpc, bare, pyxis). With --write-table the tests write the table of docs/reference/environment.md.
"""

import json
import re
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.launch.helpers import HOME, LAUNCHERS, SCRIPT, assert_ended, job, wait
from tests.launch.test_matrix import FIXTURES, OF_PYXIS, RUNTIMES, list_runtimes, script_of

PAGE = REPOSITORY / "docs/reference/environment.md"
BEGIN = "<!-- what tests/launch/test_environment.py saw -->\n"
ALL = [
    (launcher, runtime)
    for launcher in [*LAUNCHERS, "PBS"]
    for runtime in RUNTIMES
    if runtime != "pyxis" or launcher in OF_PYXIS
]
MAIN_ROAD = pytest.mark.main_road("passes its arguments on unchanged")
CELLS_OF_MAIN_ROAD = [("srun", "apptainer"), ("horovodrun", "podman-hpc"), ("PBS", "bare")]
SHOW = """
import json, os, sys
try:
    import cats
except ImportError:
    cats = None
seen = {
    "rank": os.environ.get("RANK"), "world": os.environ.get("WORLD_SIZE"), "node": os.uname().nodename,
    "variables": dict(os.environ), "package": cats is not None, "folder": os.getcwd(),
    "paths": {path: os.path.exists(path) for path in sys.argv[2:]}, "cpus": len(os.sched_getaffinity(0)),
}
with open(f"{sys.argv[1]}/{seen['rank']}.json", "w") as out:
    json.dump(seen, out)
"""
# What people export, with values that a shell, ssh or MPI could take apart, and names that scripts may have
VARIABLES = {
    "LR_SCALE": "0.5",
    "LORA_RANK": "8",
    "TASK": "mrpc",
    "WORDS": "a b",
    "MY_PAT": "a;b $HOME 'c' \"d\", e=f",
    "TWO_LINES": "x\ny",
    "EMPTY": "",
    "WANDB_PROJECT": "cats",
    "OMP_NUM_THREADS": "3",
    "PYTHONUNBUFFERED": "1",
}
# What would take them away, or make each rank a world of its own
HOSTILE = {f"{name}_CLEANENV": "1" for name in ("APPTAINER", "SINGULARITY")}
HOSTILE |= {"APPTAINER_CONTAINALL": "1", "PYTHONHOME": "/usr", "LD_PRELOAD": ""}
HOSTILE |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
HOSTILE |= {"MASTER_ADDR": "localhost", "SLURM_MEM_PER_CPU": "17", "SLURM_STEP_NUM_TASKS": "7"}
HOSTILE |= {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_EXPORT_ENV": "NONE"}
ROWS = {
    "a variable, whatever its name and its value": "variables",
    "a package of PYTHONPATH": "package",
    "a path below a link at the top (`/scratch`)": "link",
    "the same by its name without links": "target",
    "TMPDIR, and a folder of HPCTRAIN_BIND below `/var`": "tmpdir",
    "the folder of the job, by its name": "folder",
    "one world of four ranks, whatever the shell had": "world",
}


@pytest.fixture(scope="module")
def shell(cluster):
    """A user's shell at a site where /scratch is a link, and the variables of that shell."""
    hosts = ("login", "n1", "n2", "n3", "n4")
    make = ["install", "-d", "-o", "alice"]
    for host in hosts:
        cluster.exec(host, "ln", "-sfn", "/project/lustre", "/scratch", check=False)
        cluster.exec(host, *make, "/var/spool/alice", "/var/tmp/alice", check=False)
    cluster.exec("login", *make, "/project/lustre/alice/job", "/project/lustre/alice/src")
    cluster.host_path("/project/lustre/alice/src/cats.py").touch()
    cluster.host_path("/project/lustre/alice/job/show.py").write_text(SHOW)
    yield VARIABLES | {
        "SCRATCH": "/scratch/alice",
        "TMPDIR": "/var/tmp/alice",
        "HPCTRAIN_BIND": "/var/spool/alice",
        "HPCTRAIN_ROOT": HOME,
        "PYTHONPATH": "/scratch/alice/src:/opt/site/lib/python3.9/site-packages",
    }
    for host in hosts:
        cluster.exec(host, "rm", "-f", "/scratch", check=False)


@pytest.fixture(scope="module")
def seen(cluster, shell, request):
    """A function that runs a cell once; it returns what each rank saw, and the log."""
    cells: dict[tuple[str, str], tuple[list[dict], str]] = {}

    def run(launcher: str, runtime: str) -> tuple[list[dict], str]:
        if (launcher, runtime) not in cells:
            name = re.sub(r"\W+", "-", f"{launcher}-{runtime}")
            cluster.exec("login", "install", "-d", "-o", "alice", f"/project/lustre/alice/job/{name}")
            env = shell | HOSTILE | RUNTIMES[runtime]
            if runtime in FIXTURES:
                given = request.getfixturevalue(FIXTURES[runtime])
                # podman-hpc has its images below SCRATCH, which this shell has set
                env |= given if runtime == "pyxis" else {"SQUASH_DIR": f"{given['SCRATCH']}/storage"}
            paths = ["/scratch/alice/src", "/project/lustre/alice/src", "/var/tmp/alice", "/var/spool/alice"]
            words = ["show.py", name, *paths]
            cwd = "/scratch/alice/job"
            if launcher == "PBS":
                line = " ".join([f"{HOME}/launch/pbs_ddp.sh", *words])
                options = ["-V", "-j", "oe", "-l", "select=2:ncpus=2:mpiprocs=2", "-l", "place=scatter"]
                job = cluster.qsub(*options, env=env, cwd=cwd, script=line)
            else:
                script = script_of(launcher, runtime)
                job = cluster.submit(f"{HOME}/{script[0]}", *script[1:], *words, cwd=cwd, env=env)
            ended = cluster.wait(job)
            folder = cluster.host_path("/project/lustre/alice/job")
            (log,) = [p for p in folder.iterdir() if p.name in (f"slurm-{job}.out", f"STDIN.o{job}")]
            text = log.read_text(errors="replace")
            assert ended.state == "COMPLETED", text
            ranks = [json.loads(path.read_text()) for path in sorted((folder / name).iterdir())]
            cells[launcher, runtime] = ranks, text
        return cells[launcher, runtime]

    return run


def holds(rank: dict, variables: dict[str, str]) -> dict[str, bool]:
    """Which rows of the table are true for this rank."""
    paths = rank["paths"]
    if "PBS_JOBID" in rank["variables"]:  # PBS sets these two in each job
        variables = {name: value for name, value in variables.items() if name != "OMP_NUM_THREADS"}
        paths["/var/tmp/alice"] = rank["variables"]["TMPDIR"].startswith("/var/tmp/pbs.")
    return {
        "variables": variables.items() <= rank["variables"].items(),
        "package": rank["package"],
        "link": paths["/scratch/alice/src"],
        "target": paths["/project/lustre/alice/src"],
        "tmpdir": paths["/var/tmp/alice"] and paths["/var/spool/alice"],
        "folder": Path(rank["folder"]).name == "job",
        "world": rank["world"] == "4",
    }


@pytest.mark.parametrize(
    ("launcher", "runtime"),
    [pytest.param(*cell, marks=MAIN_ROAD if cell in CELLS_OF_MAIN_ROAD else ()) for cell in ALL],
)
def test_every_rank_gets_what_the_shell_has(seen, launcher, runtime):
    ranks, log = seen(launcher, runtime)
    assert [rank["rank"] for rank in ranks] == ["0", "1", "2", "3"], log
    for rank in ranks:
        missing = [row for row, is_true in holds(rank, VARIABLES).items() if not is_true]
        assert not missing, (missing, rank["node"], log)
    # Dropped, and said: what is of the host, of another job, and what would keep the rest out
    (line,) = re.findall("not passed on to the ranks: (.*)", log)
    dropped = ["MASTER_ADDR", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"]
    if runtime != "bare":
        dropped += ["PYTHONHOME", "/opt/site/lib/python3.9/site-packages of PYTHONPATH"]
    if runtime == "apptainer":
        dropped += ["APPTAINER_CLEANENV", "APPTAINER_CONTAINALL", "SINGULARITY_CLEANENV"]
    assert set(dropped) <= set(line.split(",")), line


def test_the_table_of_the_page_is_what_was_seen(seen, check_table):
    lines = ["| | " + " | ".join([*LAUNCHERS, "PBS"]) + " |", "|---" * (len(LAUNCHERS) + 2) + "|"]
    for text, row in ROWS.items():
        cells = []
        for launcher in [*LAUNCHERS, "PBS"]:
            good = [
                runtime
                for runtime in RUNTIMES
                if (launcher, runtime) in ALL
                and all(holds(rank, VARIABLES)[row] for rank in seen(launcher, runtime)[0])
            ]
            cells.append(list_runtimes(good, launcher))
        lines.append(f"| {text} | {' | '.join(cells)} |")
    check_table(PAGE, BEGIN, lines)


# ---- what Slurm granted ----


def first_lines(cluster, *options: str) -> str:
    """The log of a job that prints its commands and ends."""
    return job(cluster, "--dry-run", "check", options=options)[1]


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ((), 1),
        (("--cpus-per-task=2",), 2),
        (("--ntasks-per-node=1", "--cpus-per-task=2"), 2),
        (("--exclusive",), 4),
    ],
)
def test_ranks_use_the_cpus_that_slurm_granted(cluster, options, threads):
    log = first_lines(cluster, *options)
    assert f" x {threads} thread" in log and f"--cpus-per-task={threads} " in log, log
    assert "warning" not in log


@pytest.mark.parametrize("export", ["NONE", "NIL", "LR=0.1"])
def test_a_job_of_sbatch_export(cluster, export):
    assert_ended(job(cluster, "check", options=[f"--export={export}"]), "COMPLETED", "check passed: 4 ranks")


@pytest.mark.main_road("passes its arguments on unchanged")
def test_a_job_submitted_inside_a_step_of_another_job(cluster):
    """It had the memory, the CPUs, the array and the number of tasks of that step."""
    line = f"(cd {HOME} && SLURM_ARRAY_JOB_ID=1 SLURM_ARRAY_TASK_ID=1 SLURM_RESTART_COUNT=3 sbatch --parsable"
    line += " --mem=400 launch/apptainer_ddp.sh --dry-run check)"
    command = ["srun", "-N1", "-n2", "--mem-per-cpu=300", "bash", "-c", f'[ "$SLURM_PROCID" != 0 ] || {line}']
    done = cluster.exec("login", *command, user="alice")
    log = assert_ended(wait(cluster, int(done.stdout.split()[-1])), "COMPLETED", " x 1 thread, ")
    assert "(restart" not in log, log
    (dropped,) = re.findall("not passed on to the ranks: (.*)", log)
    assert {"SLURM_STEP_NUM_TASKS", "SLURM_ARRAY_JOB_ID"} <= set(dropped.split(",")), log


def test_a_launch_script_in_the_shell_of_srun(cluster):
    """It waited for ever for the CPUs that its own shell had."""
    command = ["srun", "-N1", "-n1", "timeout", "100", f"{HOME}/launch/apptainer_ddp.sh", "check"]
    done = cluster.exec("login", *command, user="alice", cwd=HOME)
    assert "check passed" in done.stdout, done.stdout + done.stderr


def test_the_folder_of_sbatch_chdir(cluster):
    cluster.exec("login", "install", "-d", "-o", "alice", "/home/alice/elsewhere")
    cluster.host_path("/home/alice/elsewhere/where.py").write_text("import os; print('in', os.getcwd())\n")
    options = ["--chdir=/home/alice/elsewhere", "--ntasks-per-node=1"]
    number = cluster.submit(*options, SCRIPT, "where.py", cwd=HOME, env={"HPCTRAIN_ROOT": HOME})
    assert_ended(wait(cluster, number, "/home/alice/elsewhere"), "COMPLETED", "in /home/alice/elsewhere")
