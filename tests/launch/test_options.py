"""The words of a launch script: its options, its help, and the program that it starts."""

import functools
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.launch.helpers import (
    BARE,
    LAUNCH,
    QUOTED,
    assert_refused,
    dry_run,
    last_words,
    library,
    put,
    start,
)

# ---- the program ----


@pytest.mark.parametrize("script", ["apptainer_ddp.sh", "apptainer_torchrun.sh"])
def test_a_mistyped_trainer_does_not_wait_for_a_job(programs, script):
    """--dry-run printed the commands for it."""
    assert_refused(
        dry_run(script, programs, "train_dpp"), "'train_dpp'", "train_ddp, train_lightning, ", ".py"
    )
    assert dry_run(script, programs, "train_ddp").returncode == 0


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("python -u train.py --lr 1", " train.py --lr 1"),
        ("/usr/bin/python3 -m pkg.train x", " -m pkg.train x"),
        ("torchrun --nproc-per-node 2 train.py", " train.py"),
        ("accelerate launch --config_file a.yaml train.py 'a b'", " train.py a\\ b"),
        ("fabric run train.py --devices=2", " train.py --devices=2"),
        ("mpirun -np 4 ./train", " SCRIPT.py"),
        ("python -m", " SCRIPT.py"),
        ("timm/distributed_train.sh 4 --model vit", " SCRIPT.py"),
        ("./train", " SCRIPT.py"),
        ("bash run.sh train.py --lr 1", " train.py --lr 1"),
        # Each task started a world of its own, with exit status 0.
        ("-m torch.distributed.run --nproc_per_node 2 mine.py --lr 1", " mine.py --lr 1"),
        ("-m accelerate.commands.launch --nproc_per_node 2 mine.py --lr 1", " mine.py --lr 1"),
    ],
)
def test_a_launcher_or_shell_script_as_the_program_is_one_line_of_advice(programs, words, instead):
    done = dry_run("apptainer_torchrun.sh", programs, *shlex.split(words))
    name = re.match(r"(-m )?\S+", words)[0]
    assert_refused(done, f"error: {name}: ", f" launch/apptainer_torchrun.sh{instead}\n")


def test_a_module_is_started_as_by_python(programs):
    done = dry_run("apptainer_ddp.sh", programs, "-m", "pkg.train", "--dry-run")
    assert last_words(done)[-5:] == ["--", "python", "-m", "pkg.train", "--dry-run"]
    assert "PYTHONSAFEPATH" not in done.stdout
    own = {"-m pkg.train": "yes", "-m hpctrain check": "no", "a.py": "yes", "-c 1": "no"}
    for words, answer in own.items():
        done = library(f"WORDS=(x -- python {words}); is_users_script && echo yes || echo no")
        assert done.stdout == f"{answer}\n"
    assert_refused(dry_run("apptainer_ddp.sh", programs, "-m"), "-m: ")


def test_jupyter_starts_no_trainer(programs):
    assert_refused(dry_run("jupyter.sh", programs, "train_ddp"), "train_ddp", "tensorboard", "serve")
    for words in ([], ["tensorboard", "runs"]):
        command = last_words(dry_run("jupyter.sh", programs, *words))
        inside = ["-m", "hpctrain", *(words or ["jupyter"])]
        assert command[-len(inside) :] == inside


def test_check_without_a_script(programs):
    done = dry_run("check.sh", programs, "train_ddp")
    assert done.returncode == 0, done.stderr
    commands = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("srun ")]
    assert commands == ["check", "train_ddp"], done.stdout


def test_check_with_the_options_before_the_script(programs):
    """It checked with the wrong launcher, and said that a script of launch/ is no Python script."""
    done = dry_run("check.sh", programs, "--mpi=pmix", "apptainer_mpi.sh", "train_ddp")
    assert_refused(done, "check.sh apptainer_mpi.sh --dry-run --mpi=pmix train_ddp\n")


# ---- options and help ----


@functools.cache
def help_of(script):
    return start(script, "--help", check=True).stdout


@functools.cache
def all_options():
    return re.findall(r"^--.*", library('printf "%s\\n" "${OPTIONS[@]}"').stdout, re.M)


SCRIPTS = sorted({path.name for path in LAUNCH.glob("*.sh")} - {"site.sh", "scaling.sh"})


@pytest.mark.parametrize(
    ("script", "option", "names"),
    [
        ("apptainer_mpi.sh", "--mpi", ["--mpi: ", "--mpi=HOW"]),
        ("apptainer_mpi.sh", "--mpi=", ["--mpi=: ", "--mpi=HOW"]),
        ("apptainer_torchrun.sh", "--max-restarts=x", ["--max-restarts=x: ", "--max-restarts=N"]),
        ("apptainer_ddp.sh", "--spare-nodes=08", ["--spare-nodes=08: ", "--spare-nodes=N"]),
        ("apptainer_ddp.sh", "--dry-run=yes", ["--dry-run=yes: "]),
        ("apptainer_ddp.sh", "--max-restarts=1", ["--max-restarts", "--help"]),
        ("check.sh", "lib", ["launch/lib"]),
        ("apptainer_ddp.sh", "--epochs", ["--epochs", "after"]),
    ],
)
def test_options_that_are_wrong_end_with_one_line(script, option, names):
    assert_refused(start(script, option), *names)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_options_that_the_script_takes_and_no_others(programs, tmp_path, script):
    """--broadcast was in the help of every script."""
    put(
        tmp_path,
        apptainer='[ "$1" = exec ] && echo 2.13.0 || echo apptainer version 0',
        srun="echo MPI plugin types are... none pmi2 pmix",
        podman_hpc="echo sha256:abc",
        podman="echo podman version 0",
        shifter="",
        shifterimg="echo abc",
        python="echo Python 3",
    )
    (tmp_path / "image.sif").touch()
    given = {"--mpi=HOW": "--mpi=pmix", "--launcher=HOW": "--launcher=mpirun"}
    given |= {"--hosts=NAME,NAME": "--hosts=node1", "--spare-nodes=N": "--spare-nodes=0"}
    listed = [option for option in re.findall(r"^  (--\S+)", help_of(script), re.M) if option != "--help"]
    words = [given.get(option, option.replace("=N", "=1")) for option in listed]
    env = programs | {"HPCTRAIN_IMAGE": f"{tmp_path}/image.sif", "HPCTRAIN_CACHE": str(tmp_path)}
    done = dry_run(script, env, *words)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    others = [option for option in all_options() if option not in [*listed, "--help"]]
    name = script.replace("check", "apptainer_ddp")
    taken = f'for i in {" ".join(others)}; do (parse_options {name} "$i" 2>/dev/null) && echo "$i"; done'
    assert library(f"{taken}; true").stdout == ""


def test_help_lists_the_settings_of_the_script():
    """Those of local.sh lacked HPCTRAIN_TASKS, and had what only sbatch reads."""
    scripts = ("local.sh", "apptainer_ddp.sh")
    local, ddp = (set(re.findall(r"^  ([A-Z_]+)", help_of(script), re.M)) for script in scripts)
    assert local - ddp == {"HPCTRAIN_TASKS"}
    assert ddp - local == {"HPCTRAIN_CONTINUES", "HPCTRAIN_REQUEUES", "HPCTRAIN_NODE_TIMEOUT", "SBATCH_"}
    assert "sbatch" not in help_of("local.sh").lower()
    assert [script for script in ("local.sh", "pbs_ddp.sh") if "--broadcast" in help_of(script)] == []


# What the launch scripts set for themselves and their ranks.
OF_THE_JOB = """
    BEFORE COMMAND CONTAINER_ON CONTAINER_VARIABLES CONTROL EARLY_STOP END_TASK ENVIRONMENT
    GPU_OPTION HOSTS HOST_PATH IMAGE_DIGEST IMAGE_DIGEST_FILE JOB JOB_SECRET MPI_LIBRARY
    NODE_CONTAINER NODE_PORT NODE_TASK NODE_TASKS OWN_TASK PBS_RERUNS RESTARTS SIF_COPY SLURM_VERSION
    TASKS_PER_NODE WORLD_SIZE
"""


def test_the_documents_have_every_option_and_every_variable():
    """A variable that a launch script reads is one of the job, or it is a setting, in --help and in docs/."""
    pages = "".join(path.read_text() for path in (REPOSITORY / "docs").rglob("*.md"))
    scripts = [path for path in LAUNCH.rglob("*.sh") if path.parent.name != "modulefiles"]
    read = set(re.findall(r"\bHPCTRAIN_[A-Z_]*[A-Z]\b", "".join(path.read_text() for path in scripts)))
    read -= {f"HPCTRAIN_{name}" for name in OF_THE_JOB.split()}
    settings = set(re.findall(r"^HPCTRAIN_\w+$", library('printf "%s\\n" "${SETTINGS[@]}"').stdout, re.M))
    assert read == settings | {"HPCTRAIN_ROOT"}
    assert [name for name in [*sorted(read), *all_options()] if not re.search(rf"`{name}\b", pages)] == []


# ---- the user's variables ----


def own_names():
    return library('echo "$OWN_NAMES"').stdout.split()


@pytest.mark.slow
def test_a_variable_of_the_user_that_the_scripts_have_as_well(tmp_path):
    """TASK=mrpc arrived as the path of task.sh."""
    show = "import json, os\nprint('got', json.dumps(dict(os.environ)), flush=True)\n"
    (tmp_path / "show.py").write_text(show)
    theirs = {name: f"mine of {name}" for name in own_names()}
    env = BARE | theirs | {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_CACHE": str(tmp_path)}
    done = start("local.sh", "show.py", env=env, cwd=tmp_path)
    (line,) = re.findall("got (.*)", done.stdout)
    assert theirs.items() <= json.loads(line).items(), done.stderr


# ---- where the functions of a script are ----


def spooled(tmp_path):
    """The copy that Slurm runs, with no other files beside it."""
    (tmp_path / "spool").mkdir(exist_ok=True)
    return Path(shutil.copy(LAUNCH / "local.sh", tmp_path / "spool/slurm_script"))


def test_a_job_submitted_from_another_folder_names_what_is_missing(programs, tmp_path):
    put(tmp_path, squeue="echo")  # the script came from the standard input of sbatch
    wrong = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    for root in ("", f"{tmp_path}/\x1b[2J\n"):
        done = dry_run(spooled(tmp_path), programs | wrong | {"HPCTRAIN_ROOT": root}, "check")
        assert_refused(done, "HPCTRAIN_ROOT=FOLDER")
        assert done.stdout == "" and done.stderr[:-1].isprintable()


@pytest.mark.parametrize("name", ["HPCTRAIN_ROOT", "SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "Command"])
def test_the_copy_that_a_scheduler_runs_finds_the_other_files(programs, tmp_path, name):
    put(tmp_path, squeue="exit 1" if name == "HPCTRAIN_ROOT" else "echo")  # slurmctld does not answer
    if name == "Command":
        (link := tmp_path / "ddp.sh").symlink_to(LAUNCH / "local.sh")
        # The options of the user's squeue would hide the job
        put(tmp_path, squeue=f"echo ${{SQUEUE_USERS-{link}}}")
    env = programs | {"HPCTRAIN_ROOT": "", "SQUEUE_USERS": "bob", name: str(REPOSITORY)}
    env |= {} if name == "PBS_O_WORKDIR" else {"SLURM_JOB_ID": "1"}
    done = dry_run(spooled(tmp_path), env, "check")
    assert done.returncode == 0 and "launcher torchrun" in done.stdout, done.stderr


def test_a_job_whose_functions_were_updated_since_it_was_submitted(programs, tmp_path):
    """Slurm runs the script as it was: launch: command not found."""
    put(tmp_path, squeue="echo")
    script = spooled(tmp_path)
    script.write_text(script.read_text().replace("\nlaunch\n", "\nlaunch_as_before\n"))
    env = programs | {"HPCTRAIN_ROOT": str(REPOSITORY), "SLURM_JOB_ID": "1"}
    done = dry_run(script, env, "check")
    assert_refused(done, "launch_as_before", os.uname().nodename, str(LAUNCH), status=127)


def test_a_script_runs_by_its_name_alone_in_its_own_folder():
    """$0 has no slash then."""
    done = start("/bin/bash", "local.sh", "--help", cwd=LAUNCH)
    assert done.returncode == 0 and done.stdout.startswith("Run a trainer"), done.stderr


def test_an_older_bash():
    """RHEL 8 has bash 4.4, without EPOCHREALTIME."""
    done = start("/bin/bash", "-euc", f"unset EPOCHREALTIME; source {QUOTED}/lib/main.sh; echo $BEGAN")
    assert done.returncode == 0 and re.fullmatch(r"\d{13}\n", done.stdout), done.stderr
