"""How a task enters the image: which image, its driver, the folders in it, and each runtime; no cluster."""

import os
import shlex
import shutil
import time
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import STANDINS
from tests.launch.helpers import (
    BARE,
    LAUNCH,
    QUOTED,
    assert_refused,
    bash,
    dry_run,
    last_words,
    library,
    put,
    start,
)

# ---- the image ----


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({}, ["{}/hpctrain-cpu.sif", "make sif,", "HPCTRAIN_IMAGE"]),
        ({"HPCTRAIN_FLAVOR": "cu130"}, ["{}/hpctrain-cu130.sif", "make sif FLAVOR=cu130,"]),
        ({"HPCTRAIN_FLAVOR": "cpu-mpich"}, ["{}/hpctrain-cpu-mpich.sif", "make sif MPI=mpich,"]),
        (
            {"HPCTRAIN_FLAVOR": "cuda"},
            ["HPCTRAIN_FLAVOR", "'cuda'", "cpu cpu-mpich cu128 cu128-mpich cu130 "],
        ),
        ({"HPCTRAIN_FLAVOR": "mpich"}, ["HPCTRAIN_FLAVOR", "'mpich'", "cpu cpu-mpich"]),
        ({"HPCTRAIN_FLAVOR": "cuda", "HPCTRAIN_RUNTIME": "shifter"}, ["HPCTRAIN_FLAVOR", "'cuda'", " cpu"]),
        ({"HPCTRAIN_IMAGE": "mine.sif"}, ["mine.sif", "HPCTRAIN_IMAGE", "hpctrain-cpu"]),
    ],
)
def test_an_image_that_is_not_there(project, programs, env, names):
    shutil.copytree(REPOSITORY / "containers/locks", project / "containers/locks")
    own = {"HPCTRAIN_ROOT": str(project), "HPCTRAIN_IMAGE": "", "PATH": f"{programs['PATH']}:{STANDINS}"}
    done = dry_run("local.sh", programs | own | env, "check")
    assert_refused(done, *[name.format(project) for name in names])


def test_without_a_container_the_venv_beside_the_scripts_is_taken(project):
    """It took three variables to start two ranks beside the venv that `make venv` had just made."""
    folder = project / ".venv/bin"
    folder.mkdir(parents=True)
    put(folder, activate=f"PATH={folder}:$PATH", python='[ "$1" != --version ] || echo Python 3.11.2')
    env = BARE | {"HPCTRAIN_ROOT": str(project), "PATH": "/usr/bin:/bin"}
    for asked in ({}, {"HPCTRAIN_RUNTIME": "none"}):
        done = dry_run("local.sh", env | asked, "check")
        assert f"hpctrain: no container: taking {project}/.venv\n" in done.stdout + done.stderr, done
        assert f"runtime none (Python 3.11.2), image {project}/.venv/bin/python\n" in done.stdout, done
    other = dry_run("local.sh", env | {"VIRTUAL_ENV": "/else", "HPCTRAIN_RUNTIME": "none"}, "check")
    assert "taking" not in other.stdout + other.stderr
    (folder / "activate").unlink()
    assert_refused(dry_run("local.sh", env, "check"), "apptainer")


def test_a_flavor_that_an_installation_does_not_have(project, programs):
    """It has no locks, only images. Where none is named, the only one is taken, or of two the default."""
    env = programs | {"HPCTRAIN_ROOT": str(project), "HPCTRAIN_IMAGE": ""}
    (project / "hpctrain-cu130-mpich.sif").touch()
    done = dry_run("local.sh", env | {"HPCTRAIN_FLAVOR": "cpu"}, "check")
    assert_refused(done, "HPCTRAIN_FLAVOR", "'cpu'", " cu130-mpich\n")
    done = dry_run("local.sh", env, "check")
    assert f"image {project}/hpctrain-cu130-mpich.sif\n" in done.stdout, done
    (project / "hpctrain-cu128.sif").touch()
    assert_refused(dry_run("local.sh", env, "check"), "HPCTRAIN_FLAVOR", "'cpu'", " cu128 cu130-mpich\n")


# ---- the driver of the GPUs ----


def start_on_gpus(folder, driver, image):
    """A dry run of local.sh on a machine with four GPUs of this driver."""
    list_gpus = "printf 'GPU %s: NVIDIA A100\n' 0 1 2 3"
    query = f'--query-gpu=driver_version) echo "{driver}"'
    put(folder, apptainer="echo apptainer version 1.4.5")
    put(folder, nvidia_smi=f"case $1 in --list-gpus) {list_gpus} ;; {query} ;; esac")
    for name in (image, "mine.py"):
        (folder / name).touch()
    env = BARE | {"PATH": f"{folder}:{BARE['PATH']}", "HPCTRAIN_IMAGE": f"{folder}/{image}"}
    return dry_run("local.sh", env | {"HPCTRAIN_CACHE": str(folder)}, "mine.py", cwd=folder)


@pytest.mark.parametrize(
    ("driver", "image", "advice"),
    [
        ("570.86.15", "hpctrain-cu130.sif", ["580", "525", "HPCTRAIN_FLAVOR=cu128"]),
        ("580.105.08", "hpctrain-cu130.sif", None),  # of Perlmutter
        ("525.60.13", "hpctrain-cu128.sif", None),  # older than CUDA 12.8
        ("470.57.02", "hpctrain-cu130-mpich.sif", ["580", "no image"]),
        ("NVIDIA-SMI has failed because it couldn't communicate", "hpctrain-cu130.sif", None),
        ("470.57.02", "mine.sif", None),
    ],
)
def test_a_driver_that_is_too_old_for_the_image(tmp_path, driver, image, advice):
    done = start_on_gpus(tmp_path, driver, image)
    if advice:
        assert_refused(done, f"{tmp_path}/{image}", os.uname().nodename, driver, *advice)
    else:
        assert done.returncode == 0 and "apptainer exec --nv" in done.stdout, done


def test_an_image_for_cpus_and_gpus(tmp_path):
    """Own scripts choose their device themselves, and would use none of the GPUs."""
    done = start_on_gpus(tmp_path, "580.105.08", "hpctrain-cpu.sif")
    (line,) = [line for line in done.stdout.splitlines() if "warning" in line]
    assert "hpctrain-cpu.sif" in line and "4 GPUs" in line and "HPCTRAIN_FLAVOR" in line


# ---- folders in the image ----


def binds(folder, launch=LAUNCH, **env):
    """The folders to bind for a job in this folder, by the functions of a clone."""
    script = "find_folders_to_bind; printf '%s\\n' \"${BINDS[@]}\""
    main = f"set -euo pipefail; source {shlex.quote(str(launch))}/lib/main.sh"
    done = bash(f"{main}; {script}", BARE | {"HOME": str(folder)} | env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def in_tmp():
    """A folder of the host's /tmp, which all runtimes show in the image, wherever TMPDIR is."""
    folder = Path(f"/tmp/hpctrain-test-{os.urandom(4).hex()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_folders_of_the_host_have_their_names_in_the_image(in_tmp):
    """A path of the user's shell was right in the image only below a few folders, and never below a link."""
    tops = [path for path in Path("/").iterdir() if path.is_dir() and not path.name.startswith(".")]
    images = {"bin", "boot", "dev", "etc", "opt", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"}
    expected = {
        f"{path}" if path == path.resolve() else f"{path.resolve()}:{path}"
        for path in tops
        if path.name not in images and not path.name.startswith("lib")
    }
    clone = shutil.copytree(LAUNCH, in_tmp / "launch")
    assert set(binds(in_tmp, clone)) == expected


@pytest.mark.parametrize("name", ["hpctrain", "with space/hpctrain"])
def test_a_clone_below_a_folder_of_the_image_is_bound(in_tmp, below_var, name):
    """By its name, as /opt/hpctrain, and by that without links."""
    clone, link = below_var / name, below_var / "link"
    shutil.copytree(LAUNCH, clone / "launch")
    link.symlink_to(clone)
    assert {path for path in binds(in_tmp, clone / "launch") if path.startswith("/var")} == {str(clone)}
    found = {path for path in binds(in_tmp, link / "launch") if path.startswith("/var")}
    assert found == {str(clone), f"{clone}:{link}"}


def test_folders_below_those_of_the_image(in_tmp, below_var):
    """Each by its name and by that without links. CDPATH has no part in it."""
    for name in ("here", "other/here", "target", "src", "tmp"):
        (below_var / name).mkdir(parents=True)
    (below_var / "link").symlink_to(below_var / "target")
    for name in ("cert.pem", "nodes"):
        (below_var / name).touch()
    env = {"CDPATH": f"{below_var}/other", "PYTHONPATH": f"src::{below_var}/none"}
    env |= {"HPCTRAIN_BIND": f"none here {below_var}/link /usr /", "SSL_CERT_FILE": f"{below_var}/cert.pem"}
    env |= {"TMPDIR": f"{below_var}/tmp", "HOME": str(in_tmp), "PBS_NODEFILE": f"{below_var}/nodes"}
    clone = shutil.copytree(LAUNCH, in_tmp / "launch")
    found = {path for path in binds(below_var, clone, **env) if path.startswith("/var")}
    target = f"{below_var}/target"
    names = ["", "/here", "/src", "/tmp", "/cert.pem", "/nodes"]
    assert found == {*(f"{below_var}{name}" for name in names), target, f"{target}:{below_var}/link"}


@pytest.mark.parametrize(
    "name",
    ["a b", "quote's\"", "$(touch made)", "`touch made`", "-rf", "semi;colon", "*", "back\\slash", "한글"],
)
def test_a_folder_of_any_name_is_bound_as_it_is(programs, tmp_path, below_var, name):
    (folder := below_var / name).mkdir()
    done = dry_run("apptainer_ddp.sh", programs, "check", cwd=folder)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    words = last_words(done)
    assert words[words.index(str(folder)) - 1] == "--bind"
    assert not [*tmp_path.rglob("made"), *below_var.rglob("made"), *Path.cwd().glob("made")]


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\nb"])
def test_a_folder_that_no_container_can_have_is_one_line(programs, tmp_path, name):
    """To apptainer and podman, these characters separate a folder from its place in the image."""
    (tmp_path / name).mkdir()
    done = dry_run("apptainer_ddp.sh", programs, "check", cwd=tmp_path / name)
    assert_refused(done, "comma", "colon", "line break")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HPCTRAIN_BIND", "/usr:/etc"),
        ("HPCTRAIN_BIND", "/usr,/etc"),
        ("HPCTRAIN_BIND", "/usr:/mnt:ro"),
        ("HPCTRAIN_PACKAGES", "/usr:/etc"),
    ],
)
def test_folders_in_the_way_of_apptainer_or_of_path(programs, name, value):
    """They were taken for one folder that does not exist, which is skipped."""
    assert_refused(dry_run("local.sh", programs | {name: value}, "check"), f"{name}={value}: ")


# ---- shifter ----


def test_shifter_gets_what_the_loader_takes_from_a_setuid_program(programs, tmp_path):
    """The TMPDIR of the user did not arrive."""
    put(tmp_path, shifter="", shifterimg="echo 0123456789abcdef")
    env = programs | {"HPCTRAIN_IMAGE": "hpctrain:cpu", "TMPDIR": "/scratch/a b"}
    command = shlex.split(dry_run("shifter_ddp.sh", env, "check").stdout.splitlines()[-1])
    inside = command[command.index("shifter") : command.index("python")]
    assert "--env=TMPDIR=/scratch/a b" in inside and "--env=MALLOC_TRIM_THRESHOLD_=536870912" in inside
    del env["TMPDIR"]
    assert "--env=TMPDIR" not in dry_run("shifter_ddp.sh", env, "check").stdout


@pytest.mark.parametrize(
    ("gateway", "names"),
    [
        ("up", ["nothing:1", "shifterimg pull", "HPCTRAIN_IMAGE"]),
        ("down", ["shifterimg lookup: ERROR: failed to contact the image gateway", "again later"]),
        ("slow", ["shifterimg lookup: err 28", "again later"]),
    ],
)
def test_an_image_that_shifter_cannot_look_up(gateway, names):
    """A gateway that timed out ("err 28") was reported as an image that does not exist."""
    env = {"PATH": f"{STANDINS}:{BARE['PATH']}", "HPCTRAIN_IMAGE": "nothing:1", "SHIFTER_GATEWAY": gateway}
    assert_refused(library("GPUS=0; use_runtime shifter", **env), *names)


# ---- pyxis ----


@pytest.fixture
def with_pyxis(programs, tmp_path):
    """Programs of a cluster whose srun has the options of Pyxis, and the shell of a job there."""
    said = "case $1 in --help) echo --container-image ;; --mpi=list) echo none pmix ;; esac"
    put(tmp_path, srun=said, enroot="echo 4.1.2")
    for name in ("hpctrain.sqsh", "mine.sif"):
        (tmp_path / name).touch()
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    env = {"HPCTRAIN_RUNTIME": "pyxis", "HPCTRAIN_IMAGE": "hpctrain.sqsh", "HPCTRAIN_CACHE": str(tmp_path)}
    return programs | job | env


@pytest.mark.parametrize("image", ["hpctrain.sqsh", "ghcr.io#me/hpctrain:cpu-0.1.0"])
def test_pyxis_gets_options_of_srun(with_pyxis, tmp_path, image):
    """A file by its path, or it would be a name at Docker Hub, and the variables that beat the image's."""
    env = with_pyxis | {"LANG": "C", "PYXIS_CONTAINER_IMAGE": "other", "ENROOT_MOUNT_HOME": "yes"}
    env["HPCTRAIN_IMAGE"] = image
    done = dry_run("apptainer_ddp.sh", env, "check", cwd=tmp_path)
    words = last_words(done)
    options = dict(word.partition("=")[::2] for word in words if "container-" in word)
    path = image if "#" in image else f"{tmp_path}/{image}"
    assert options["--container-image"] == path, done
    assert options["--container-workdir"] == str(tmp_path)
    assert {"LANG", "PYTHONNOUSERSITE", "OMP_NUM_THREADS"} < {*options["--container-env"].split(",")}
    assert {"PATH", "SLURM_JOB_ID"}.isdisjoint(options["--container-env"].split(","))
    assert {"/tmp:/tmp", "/home:/home"} < {*options["--container-mounts"].split(",")}
    assert words[words.index("srun", 1) + 1 :] == ["--", "python", "-m", "hpctrain", "check"]
    assert "not passed on to the ranks: ENROOT_MOUNT_HOME,PYXIS_CONTAINER_IMAGE\n" in done.stdout
    assert "runtime pyxis (enroot 4.1.2)" in done.stdout


@pytest.mark.parametrize(
    ("script", "env", "names"),
    [
        ("local.sh", {}, ["torchrun", "HPCTRAIN_RUNTIME=pyxis", "srun"]),
        ("apptainer_mpi.sh --mpi=mpirun", {}, ["mpirun", "HPCTRAIN_RUNTIME=pyxis", "srun"]),
        ("apptainer_horovod.sh --launcher=horovodrun", {}, ["horovodrun", "HPCTRAIN_RUNTIME=pyxis", "srun"]),
        ("pbs_ddp.sh", {"PBS_JOBID": "1"}, ["HPCTRAIN_RUNTIME", "no Slurm job"]),
        ("jupyter.sh", {"PBS_JOBID": "1"}, ["HPCTRAIN_RUNTIME", "no Slurm job"]),
        ("apptainer_ddp.sh", {"HPCTRAIN_IMAGE": "mine.sif"}, ["mine.sif", "make sqsh", "HPCTRAIN_IMAGE"]),
        ("apptainer_ddp.sh", {"HPCTRAIN_IMAGE": "none.sqsh"}, ["none.sqsh", "hpctrain-cpu.sqsh"]),
        ("apptainer_ddp.sh --broadcast", {}, ["--broadcast", "pyxis"]),
    ],
)
def test_what_pyxis_cannot_do_is_one_line(with_pyxis, tmp_path, script, env, names):
    env = with_pyxis | env
    if "PBS_JOBID" in env:
        env |= {"PBS_NODEFILE": f"{tmp_path}/nodes", "PBS_O_WORKDIR": str(tmp_path), "SLURM_JOB_ID": ""}
    words = script.split()
    # no dry run in a PBS job, where even that would not be right
    dry = [] if "PBS_JOBID" in env else ["--dry-run"]
    assert_refused(start(words[0], *words[1:], *dry, env=env, cwd=tmp_path), *names)


def test_a_site_without_pyxis(with_pyxis, tmp_path):
    put(tmp_path, srun="")
    assert_refused(dry_run("apptainer_ddp.sh", with_pyxis, cwd=tmp_path), "--container-image", "Pyxis")


def test_a_launch_script_in_an_image_names_the_variable_of_pyxis(tmp_path):
    """sbatch runs the script itself there, without squeue, and without the folder of submission."""
    copy = shutil.copy(LAUNCH / "apptainer_ddp.sh", tmp_path)
    done = start(copy, env=BARE | {"PYXIS_CONTAINER_IMAGE": "x.sqsh"})
    assert_refused(done, "HPCTRAIN_ROOT", "PYXIS_CONTAINER_IMAGE")


# ---- adding a runtime and a launcher ----

FORK_SCRIPT = r"""#!/bin/bash
# Run a trainer on this machine, with one process per rank and nothing else.
#
# usage: launch/fork.sh [OPTION]... [TRAINER | SCRIPT.py] [ARGUMENT]...
set -euo pipefail
source "${HPCTRAIN_ROOT:-$(dirname "$0")/..}/launch/lib/main.sh"
parse_options fork.sh "$@"
make_local_job
use_runtime "${HPCTRAIN_RUNTIME:-apptainer}"
set_program
use_launcher fork
launch
"""
FORK_LAUNCHER = """
launch_with_fork() {
    LAUNCHER_TEXT='fork'
    LAUNCH=(bash -c 'for ((i = 0; i < HPCTRAIN_WORLD_SIZE; i++)); do FORK_RANK=$i "$@" & done; wait' -
        "$TASK" fork)
}
task_fork() {
    set_ranks FORK_RANK FORK_RANK
    export_torchrun_env
}
"""
TOY_RUNTIME = """
toy_box_command() {
    HPCTRAIN_IMAGE=toy:1 RUNTIME_VERSION=1
    CONTAINER=(env "TOY=a toy")
}
"""


def test_a_runtime_is_one_file_and_so_is_a_launcher(project):
    (project / "launch/lib/runtimes/toy_box.sh").write_text(TOY_RUNTIME)
    (project / "launch/lib/launchers/fork.sh").write_text(FORK_LAUNCHER)
    (project / "launch/fork.sh").write_text(FORK_SCRIPT)
    (project / "launch/fork.sh").chmod(0o755)
    # hpctrain's own commands detect their rank as well, although world.py has no reader for this launcher
    code = "from hpctrain.distributed import world; w = world.detect()\n"
    (project / "world.py").write_text(f"{code}print(f'{{w.rank}} {{w.size}} {{w.launcher}}\\n', end='')")
    env = BARE | {"HPCTRAIN_RUNTIME": "toy-box", "HPCTRAIN_TASKS": "3", "PYTHONPATH": f"{project}/src"}
    for program, line in (("mine.py", "{0} {0} 0 3 3 a toy"), ("world.py", "{0} 3 torchrun")):
        done = start(project / "launch/fork.sh", program, env=env, cwd=project)
        assert done.returncode == 0 and "launcher fork" in done.stdout, done
        assert "runtime toy-box (1), image toy:1" in done.stdout
        ranks = sorted(text for text in done.stdout.splitlines() if not text.startswith("hpctrain:"))
        assert ranks == [line.format(rank) for rank in range(3)]
    for name in ("docker", "", "podman_hpc", "../launchers/srun", "none toy-box", "x\ny"):
        done = library(f"GPUS=0; use_runtime {shlex.quote(name)}", HPCTRAIN_ROOT=str(project))
        known = "apptainer, none, podman-hpc, pyxis or shifter"
        assert_refused(done, "HPCTRAIN_RUNTIME", f"'{name.replace(chr(10), '?')}'", known)


def test_what_belongs_to_the_host_does_not_enter_an_image(tmp_path):
    ours = f"{tmp_path}/src::relative"
    theirs = "/sw/lib/python3.9/site-packages:/usr/lib/python3/dist-packages:/opt/site"
    script = "drop_isolation_settings; separate_host_variables; echo $PYTHONPATH; "
    script += "printf '%s\\n' \"${DROPPED[@]}\""
    env = {"PYTHONPATH": f"{ours}:{theirs}", "PYTHONHOME": "/usr", "APPTAINER_CLEANENV": "1"}
    kept, *dropped = library(script, **env).stdout.splitlines()
    assert kept == ours
    of_python = [f"{folder} of PYTHONPATH" for folder in theirs.split(":")]
    assert dropped == ["APPTAINER_CLEANENV", "PYTHONHOME", *of_python]


def test_another_torch_in_pythonpath_is_named(tmp_path):
    for name in ("mine/torch", "other/data/torch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mine/torch/__init__.py").touch()
    said = library("separate_host_variables", PYTHONPATH=f"{tmp_path}/other:{tmp_path}/mine").stdout
    assert said.startswith(f"hpctrain: warning: {tmp_path}/mine of PYTHONPATH ") and said.count("\n") == 1


OF_A_JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "HPCTRAIN_HOSTS": "n1 n2", "MASTER_ADDR": "n1"}
OF_A_JOB |= {"HPCTRAIN_SLURM_VERSION": "slurm 24.11.5"}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("scontrol show hostnames", "n1\nn2\n"),
        ("scontrol show hostname n[1-2]", "n1\nn2\n"),
        ("scontrol show hostnames a,b", "a\nb\n"),
        ("scontrol show hostnames a[1-2]", ""),
        ("scontrol show job 7", ""),
        ("scontrol requeue 7", ""),
        ("srun --version", "slurm 24.11.5\n"),
        ("srun hostname", ""),
        ("squeue -h -j 7 -o %L", "1-01:01:0"),
        ("squeue --me", ""),
    ],
)
def test_what_scripts_ask_slurm_in_an_image(words, answer):
    """Of their own job, or one line says that there is no Slurm."""
    env = BARE | OF_A_JOB | {"SLURM_JOB_END_TIME": str(int(time.time()) + 90069)}
    done = bash(f"{QUOTED}/lib/slurm/{words}", env)
    if answer:
        assert done.returncode == 0 and done.stdout.startswith(answer), done
    else:
        assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1, done
        assert done.stderr.startswith("hpctrain: error: there is no Slurm in the image: "), done


def test_a_script_may_requeue_its_job_itself(tmp_path):
    """As Lightning's handler of SIGUSR1 does. The option that resumes stays."""
    (tmp_path / "saved").write_text("--resume x\n")
    env = BARE | {"HPCTRAIN_CONTROL": str(tmp_path)}
    assert bash(f"{QUOTED}/lib/slurm/scontrol requeue 7", env).returncode == 0
    assert (tmp_path / "saved").read_text() == "--resume x\n" and (tmp_path / "stopped").exists()
