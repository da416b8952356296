"""No word, name, variable or line of a site file is executed or changed on its way through the launch
scripts.

Hypothesis makes them of pieces that are syntax to a shell. STANDINS are the two ends of the way: the
scheduler, and what enters the image. Everything between them is real. HPCTRAIN_TEST_EXAMPLES=1000 tries that
many of each.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from slurm_cluster import REPOSITORY

from tests.helpers import examples
from tests.launch.helpers import BARE, LAUNCH, QUOTED, put

pytestmark = pytest.mark.slow

PIECES = [
    "$(touch canary)", "`touch canary`", "touch canary", ";", "&", "|", "\n", "\r", "\t", " ", "'", '"', "\\",
    "$", "${HOME}", "$HOME", "$((1))", "HOME[$(touch canary)]", "*", "?", "[a-z]", "[0]=", "{a,b}", "~", "!",
    "!!", "#", "<", ">", "(", ")", "-", "--", "-P", "=", ":", ",", "%s", "\\n", "\\c", "é", "한", "\u2028",
    "\x01", "\x1b[2J", "\x7f", "\udcff", "/", "..", "x", "1", ".py",
]  # fmt: skip
WORD = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
WORDS = st.lists(WORD, min_size=3, max_size=12)
FILE_NAME = WORD.map(lambda word: word.replace("/", "")).filter(lambda name: name not in ("", ".", ".."))

STANDINS = {
    "apptainer": """[ "$1" = exec ] || { echo apptainer version 0; exit; }
        while [ "$1" != "$HPCTRAIN_IMAGE" ]; do shift; done
        shift
        exec "$@" """,
    "scontrol": '[ "$2" != hostnames ] || echo n1',
    "srun": """[ "$1" != --mpi=list ] || { echo "MPI plugin types are... pmix pmi2"; exit; }
        while [ "${1%/task.sh}" = "$1" ]; do shift; done
        SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 exec "$@" """,
    "mpirun": """[ "$1" != --version ] || { echo "mpirun (Open MPI) 5.0.7"; exit; }
        while [ "${1%/task.sh}" = "$1" ]; do shift; done
        OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 exec "$@" """,
    # what a rank gets
    "python": """[ "$1" != -c ] || { echo Open MPI v5.0.9; exit; }
        printf '%s\\0' "$#" "$@" "$PWD"
        exec env -0""",
    "module": "LOADEDMODULES=",
}


@contextmanager
def a_shell():
    """A function that runs a command as in the shell of a job of one node, and fails if a canary appears."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(os.path.realpath(folder))
        for name in ("bin", "home", "job", "image"):
            (top / name).mkdir()
        put(top / "bin", **STANDINS)
        variables = {
            "PATH": f"{top}/bin:{os.environ['PATH']}", "HOME": f"{top}/home", "TMPDIR": str(top),
            "LC_ALL": "C.UTF-8", "HPCTRAIN_ROOT": str(REPOSITORY), "HPCTRAIN_IMAGE": f"{top}/image",
            "HPCTRAIN_CACHE": f"{top}/cache",
            "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "1",
        }  # fmt: skip

        def run(*command, cwd=top / "job", **env):
            env = variables | {"SLURM_SUBMIT_DIR": str(cwd)} | env
            done = subprocess.run(
                command, cwd=cwd, env=env, capture_output=True, timeout=300, stdin=subprocess.DEVNULL
            )
            assert not list(top.rglob("canary*")), f"{command} with {env} executed a part of it"
            done.stdout, done.stderr = os.fsdecode(done.stdout), os.fsdecode(done.stderr)
            return done

        run.top, run.job = top, top / "job"
        yield run


def split_log(text):
    """The lines of the log, and what follows: the commands of a dry run, or what the rank got."""
    lines = text.split("\n")
    count = next((i for i, line in enumerate(lines) if not line.startswith("hpctrain: ")), len(lines))
    return lines[:count], "\n".join(lines[count:])


def what_a_rank_got(text):
    """The words after python, the folder, and the variables."""
    count, *rest = split_log(text)[1].split("\0")
    return (
        rest[: int(count)],
        rest[int(count)],
        dict(entry.split("=", 1) for entry in rest[int(count) + 1 : -1]),
    )


def is_refused(done):
    """Whether the script ended with an error, which is then one line."""
    assert done.returncode == 0 or (
        done.stderr.startswith("hpctrain: error: ") and done.stderr.count("\n") == 1
    ), done.stderr
    assert all(c.isprintable() or c in "\n\udcff" for c in done.stderr), repr(done.stderr)
    return done.returncode != 0


# ---- words and variables, to the rank and to the commands of a dry run ----

FAST = ["apptainer_ddp.sh", "pbs_ddp.sh"]


@examples(10)
@given(script=st.sampled_from(FAST), words=WORDS, value=WORD, name=WORD)
@example("apptainer_ddp.sh", ["!!", "!x", "a\n!b"], "a:~root=~", "interactive")
@example("pbs_ddp.sh", [], "\udcff\nNCCL_NET=x", "")
def test_words_and_variables_reach_the_rank_and_the_dry_run(script, words, value, name):
    with a_shell() as run:
        (run.top / "nodes").write_text("n1\n")
        env = {"HPCTRAIN_X": value, "SLURM_JOB_NAME": name, "NCCL_DEBUG_FILE": value, "HF_TOKEN": value}
        env |= {"PBS_JOBID": "17", "PBS_NODEFILE": f"{run.top}/nodes", "PBS_O_WORKDIR": str(run.job)}
        done = run(LAUNCH / script, "check", *words, **env)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        got, folder, variables = what_a_rank_got(done.stdout)
        assert got == ["-m", "hpctrain", "check", *words] and folder == str(run.job)
        del env["SLURM_JOB_NAME"]
        assert env.items() <= variables.items()

        done = run(LAUNCH / script, "--dry-run", "check", *words, **env, SLURM_JOB_NAME=name)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        commands = split_log(done.stdout)[1]
        # as in an interactive shell, where ! is syntax as well, and which has the user's own variables
        own = {name: env[name] for name in ("HPCTRAIN_X", "NCCL_DEBUG_FILE")}
        line = f"set -o history; set -H; history -s x\n{commands}"
        pasted = run("bash", "-c", line, cwd=run.top, SLURM_JOB_ID="17", **own)
        assert pasted.returncode == 0 and pasted.stderr == "", pasted.stderr
        again, folder, exported = what_a_rank_got(pasted.stdout)
        assert again == got and folder == str(run.job) and "HF_TOKEN" not in exported
        prefixes = ("HPCTRAIN_", "MASTER_", "NCCL_", "HF_HOME")
        ours = {key: variables[key] for key in variables if key.startswith(prefixes)}
        del ours["HPCTRAIN_JOB_SECRET"]
        assert {key: exported.get(key) for key in ours} == ours


# ---- names of folders and files ----


@examples(8)
@given(folder=FILE_NAME, name=FILE_NAME, words=WORDS)
@example("x\n", "y", [])
@example("-P", "-P", ["-P"])
def test_folders_and_scripts_of_any_name(folder, name, words):
    """The submit folder, the packages, the folders to bind, and a script of the user's."""
    # below /var, as all of /tmp is in the image anyway
    with a_shell() as run, tempfile.TemporaryDirectory(dir="/var/tmp") as top:
        place = Path(top, folder)
        place.mkdir()
        (place / name).mkdir()
        script = f"./{name[:200]}.py"
        (place / script).touch()
        env = {"HPCTRAIN_PACKAGES": name, "HPCTRAIN_BIND": name}
        done = run(LAUNCH / "apptainer_ddp.sh", script, *words, cwd=place, **env)
        if set(folder + name) & set(",:\n"):
            assert is_refused(done) and "comma" in done.stderr and "colon" in done.stderr
            return
        assert done.returncode == 0 and done.stderr == "", done.stderr
        got, where, variables = what_a_rank_got(done.stdout)
        assert (got, where) == ([script, *words], str(place))
        assert variables["HPCTRAIN_PACKAGES"] == str(place / name)
        line = run(LAUNCH / "apptainer_ddp.sh", "--dry-run", script, cwd=place, **env).stdout.splitlines()[-1]
        bound = shlex.split(run("bash", "-c", f"printf '%q ' {line}").stdout) if "$'" not in line else []
        assert not bound or {str(place), str(place / name)} <= set(bound)


@examples(6)
@given(name=FILE_NAME, is_file=st.booleans())
@example("-x.sif", True)
@example("x.sif\n", True)
def test_images_of_any_name(name, is_file):
    with a_shell() as run:
        (run.job / name).touch() if is_file else (run.job / name).mkdir()
        done = run(LAUNCH / "apptainer_ddp.sh", "--dry-run", "check", HPCTRAIN_IMAGE=name)
        if "\n" in name:
            assert is_refused(done) and "line break" in done.stderr
        else:
            assert done.returncode == 0 and done.stderr == "", done.stderr
            words = run("bash", "-c", f"printf '%s\\0' {done.stdout.splitlines()[-1]}").stdout.split("\0")
            image = words[words.index("--") - 1]
            assert image == (f"./{name}" if name.startswith("-") else name)


# ---- variables that the scripts read ----

NAMES = [
    "HPCTRAIN_IMAGE", "HPCTRAIN_FLAVOR", "HPCTRAIN_RUNTIME", "HPCTRAIN_BIND", "HPCTRAIN_PACKAGES",
    "HPCTRAIN_MODULES", "HPCTRAIN_PYTHON_ENV", "HPCTRAIN_SITE", "HPCTRAIN_CACHE", "HPCTRAIN_TASKS",
    "HPCTRAIN_MPI", "HPCTRAIN_NODE_TIMEOUT", "HPCTRAIN_INTERFACE", "HPCTRAIN_ROOT", "MASTER_ADDR",
    "MASTER_PORT", "OMP_NUM_THREADS", "SCRATCH", "SLURM_JOB_ID", "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT",
    "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "PBS_JOBID", "NCPUS", "CC_CLUSTER", "NERSC_HOST", "SIF_COPY",
    "CDPATH",
]  # fmt: skip
NUMBERS = ["SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"]


@examples(20)
@given(
    script=st.sampled_from([*FAST, "local.sh", "apptainer_torchrun.sh"]),
    name=st.sampled_from(NAMES),
    value=WORD,
)
@example("local.sh", "HPCTRAIN_TASKS", "18446744073709551616")
@example("apptainer_ddp.sh", "SLURM_JOB_ID", "1 --all")
@example("pbs_ddp.sh", "SLURM_RESTART_COUNT", "HOME[$(touch canary)]")
def test_a_variable_is_taken_as_it_is_or_refused_in_one_line(script, name, value):
    with a_shell() as run:
        (run.top / "nodes").write_text("n1\n")
        env = {"PBS_JOBID": "17", "PBS_NODEFILE": f"{run.top}/nodes", "PBS_O_WORKDIR": str(run.job)}
        done = run(LAUNCH / script, "--dry-run", "check", **env | {name: value})
        if not is_refused(done):
            log, commands = split_log(done.stdout)
            assert log[-1].startswith("hpctrain: command:") and commands.startswith("cd ")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["HOME[$(touch canary)]", "08"])
def test_a_number_that_is_none_is_refused(name, value):
    """In an expression the shell would evaluate it."""
    with a_shell() as run:
        done = run(LAUNCH / "apptainer_ddp.sh", "--dry-run", "check", **{name: value})
        assert is_refused(done) and value in done.stderr


@examples(8)
@given(
    script=st.sampled_from(["apptainer_mpi.sh", "apptainer_horovod.sh", "apptainer_torchrun.sh", "check.sh"]),
    word=WORD,
)
def test_an_option_is_taken_or_refused_in_one_line(script, word):
    option = {
        "apptainer_mpi.sh": "--mpi=",
        "apptainer_horovod.sh": "--launcher=",
        "apptainer_torchrun.sh": "--max-restarts=",
    }
    with a_shell() as run:
        # For check.sh, the name of a script, which stands first.
        words = ["--dry-run", option[script] + word + "x"] if script in option else [f"_{word}x"]
        assert is_refused(run(LAUNCH / script, *words))
        if not word.startswith("--dry-run"):
            assert is_refused(run(LAUNCH / script, f"-{word}"))


# ---- site files ----

LINE = st.tuples(
    st.sampled_from(["NCCL_NET", "SCRATCH", "SITE_DETECT", "HPCTRAIN_BIND", "FI_X"]) | WORD, WORD
)


@examples(25)
@given(lines=st.lists(LINE.map("=".join) | WORD, min_size=1, max_size=3))
@example(["NCCL_NET=$HOME/a b*", "NCCL_NET=later"])
@example(["NCCL_HOME[$(touch canary)]=1"])
@example(["NCCL_NET=\x1b[2J\x01"])
def test_a_site_file_is_data(lines):
    """Each value is the text of its line, with variables replaced. Any other file is refused in one line."""
    with a_shell() as run:
        launch = shutil.copytree(LAUNCH, run.top / "hpctrain/launch")
        (launch / "sites/mine.env").write_bytes(os.fsencode("\n".join(lines)))
        script = f"source {launch}/site.sh mine || exit; env -0"
        done = run("bash", "-c", script, HPCTRAIN_CACHE="x", HPCTRAIN_ROOT="")
        if is_refused(done):
            return
        got = dict(entry.split("=", 1) for entry in done.stdout.split("\0")[:-1])
        seen = set()
        for line in "\n".join(lines).split("\n"):
            line = line.removesuffix("\r")
            key, _, value = line.partition("=")
            plain = value.replace("${HOME}", f"{run.top}/home").replace("$HOME", f"{run.top}/home")
            if line and not line.startswith("#") and key != "SITE_DETECT" and key not in seen:
                assert got[key] == plain
                seen.add(key)


@examples(8)
@given(name=FILE_NAME, entry=WORD)
def test_names_of_site_files_and_what_detects_them_are_not_executed(name, entry):
    with a_shell() as run:
        launch = shutil.copytree(LAUNCH, run.top / "hpctrain/launch")
        (launch / "sites" / f"{name[:200]}.env").write_bytes(os.fsencode(f"SITE_DETECT=TOY_HOST={entry}\n"))
        script = f'source {launch}/site.sh "$@" 2>&1 >/dev/null | grep -a error: >&2; exit $PIPESTATUS'
        for site in ([], [name]):
            is_refused(run("bash", "-c", script, "-", *site, TOY_HOST=entry))


# ---- launchers that pass words on in their own way ----


@examples(8)
@given(words=WORDS, secret=WORD)
def test_words_and_secrets_pass_horovodrun(words, secret):
    """It starts ranks by a line for the shell of ssh.

    The command is in a variable there, and secrets in a file.
    """
    with a_shell() as run:
        script = f"""
            set -euo pipefail
            source {QUOTED}/lib/main.sh
            source {QUOTED}/lib/launchers/horovodrun.sh
            JOB=17 COMMAND_IN_VARIABLE=1 CONTAINER=(apptainer exec "$HPCTRAIN_IMAGE") SIF=""
            LAUNCH=("$TASK" horovodrun)
            compose python "$@"
            hide_environment
            command=$(printf %s "$HPCTRAIN_COMMAND" | {sys.executable} -c '
import shlex, sys
print(shlex.quote(sys.stdin.read()))')
            env "${{HIDDEN[@]/#/--unset=}}" sh -c "export HPCTRAIN_COMMAND=$command; $TASK horovodrun"
        """
        ranks = {"HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_CROSS_RANK": "0"}
        ranks |= {"HPCTRAIN_WORLD_SIZE": "1", "HPCTRAIN_TASKS_PER_NODE": "1", "MASTER_PORT": "1"}
        ranks |= {"HPCTRAIN_HOST_PATH": f"{run.top}/bin:{os.environ['PATH']}"}
        done = run("bash", "-c", script, "-", *words, HF_TOKEN=secret, **ranks)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        got, _, variables = what_a_rank_got(done.stdout)
        assert got == words and variables["HF_TOKEN"] == secret
        assert not list(run.job.iterdir())


def test_words_pass_torchrun():
    """Words that look like options of torchrun, too. torchrun is real here, and starts a real Python."""
    words = ["a b", "x\n", "$(touch canary)", "`touch canary`", "", "--", "--nnodes=7", "-m", "\udcff"]
    words += ["*", "[0]=", "~", "'\"\\"]
    with a_shell() as run:
        (run.top / "bin/python").unlink()
        (run.job / "show.py").write_text("import os, sys\nprint(repr(sys.argv[1:]))\n")
        env = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_TASKS": "1", "PATH": BARE["PATH"]}
        done = run(LAUNCH / "local.sh", "./show.py", *words, **env)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == repr(words), done.stderr
