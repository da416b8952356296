"""Files and folders of other users that a launch script does not use: launch/lib/trust.sh, without a cluster.

tests/launch/test_other_users.py has a second user of the cluster.
"""

import hashlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import run_command
from tests.launch.helpers import (
    BARE,
    BY_ROOT,
    LAUNCH,
    QUOTED,
    assert_refused,
    bash,
    dry_run,
    last_words,
    library,
    put,
    put_squeue,
    start,
)

# ---- what is run ----


@BY_ROOT
@pytest.mark.parametrize(
    "case", ["SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "standard input", "own copy", "environment.sh alone"]
)
def test_functions_of_somebody_else_are_not_run(programs, tmp_path, case):
    """Another user had put launch/lib into the folder of the job, or where the script, a copy of it, or
    sbatch < script, was taken to belong.
    """
    theirs, work = tmp_path / "shared/launch/lib", tmp_path / "shared/sub"
    for folder in (theirs, work, tmp_path / "spool"):
        folder.mkdir(parents=True)
    for name in ("main.sh", "environment.sh"):
        (theirs / name).write_text(f"touch {tmp_path}/executed\n")
    if case == "environment.sh alone":
        (theirs / "main.sh").unlink()
        (theirs / "main.sh").symlink_to(LAUNCH / "lib/main.sh")
    for path in (theirs.parent, theirs, *theirs.iterdir()):
        os.chown(path, 12345, -1, follow_symlinks=False)
    put_squeue(tmp_path)
    env = programs | {"HPCTRAIN_ROOT": "", "SLURM_JOB_ID": "1"}
    script = shutil.copy(LAUNCH / "apptainer_ddp.sh", tmp_path / "spool/slurm_script")
    if case.isupper():
        done = dry_run(script, env | {case: str(theirs.parents[1])})
        assert done.returncode == 2, done
    else:
        put(tmp_path, squeue="echo '(null)'")
        if case != "standard input":
            script = shutil.copy(script, work / "copy.sh")
        folder = theirs.parents[1] if case == "environment.sh alone" else work
        dry_run(script, env | {"SLURM_SUBMIT_DIR": str(folder)}, cwd=work)
    assert not (tmp_path / "executed").exists()


@BY_ROOT
@pytest.mark.parametrize("link", [False, True])
def test_the_name_of_an_environment_is_no_folder_of_somebody_else(tmp_path, theirs, link):
    """HPCTRAIN_PYTHON_ENV=torch may be an environment of conda, but bin/activate of ./torch was run.

    With their link to the folder, where they can write, it was of the user.
    """
    (activate := tmp_path / f"{'.' if link else 'torch'}/bin/activate").parent.mkdir(parents=True)
    if link:
        (tmp_path / "torch").symlink_to(".")
    activate.write_text("touch executed; exit 7\n")
    env = os.environ | {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_TASKS": "1", "HPCTRAIN_PYTHON_ENV": "torch"}
    assert start("local.sh", "check", env=env, cwd=tmp_path).returncode == 7  # one of your own
    (tmp_path / "executed").unlink()
    theirs(activate if link else tmp_path / "torch")
    os.chown(tmp_path / "torch", 1234, 1234, follow_symlinks=False)
    done = start("local.sh", "check", env=env, cwd=tmp_path)
    assert "HPCTRAIN_PYTHON_ENV=torch" in done.stderr and "conda" in done.stderr, done
    assert not (tmp_path / "executed").exists()


def test_a_script_for_mpi_imports_no_mpi4py_of_the_current_folder(tmp_path):
    """As `python -m mpi4py SCRIPT` does. A module that is named by -m may be there, as for `python -m`."""
    for folder in ("shared/mpi4py", "own"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "shared/mpi4py/__init__.py").write_text("print('of somebody else')\n")
    (tmp_path / "own/beside.py").write_text("print('beside the script')\n")
    (tmp_path / "own/mine.py").write_text("import beside, sys; print(sys.argv[1:])\n")
    for words, cwd in (([tmp_path / "own/mine.py"], "shared"), (["-m", "mine"], "own")):
        command = [sys.executable, LAUNCH / "lib/mpi4py_main.py", *words, "-m", "b c"]
        done = run_command(command, cwd=tmp_path / cwd, timeout=100)
        assert done.stdout == "beside the script\n['-m', 'b c']\n", done


# ---- folders in /tmp ----


@pytest.mark.parametrize("part", ["main.sh", "task.sh"])
def test_a_folder_that_somebody_else_removes_between_two_looks_is_not_taken(tmp_path, part):
    """They held /tmp/hpctrain-UID while mkdir failed, removed it before the next look, and made it again."""
    put(tmp_path, mkdir="exit 1")
    parts = ENTER if part == "task.sh" else f"source {QUOTED}/lib/main.sh"
    code = f"{parts}; PATH={tmp_path}:$PATH; make_own {tmp_path}/own"
    done = bash(code)
    assert (done.returncode, done.stderr) == (1, "")
    (tmp_path / "own").mkdir()
    assert bash(code).returncode == 0
    (tmp_path / "own").rename(tmp_path / "other")
    (tmp_path / "own").symlink_to(tmp_path / "other")
    assert bash(code).returncode == 1


@BY_ROOT
@pytest.mark.parametrize("trick", ["folder", "link", "both", None])
def test_a_folder_in_tmp_that_somebody_else_made_is_not_used(stranger, trick):
    """All tasks of a job use another one, which the next job finds.

    "both": as if its name, made from the secret, were known.
    """
    own, number = stranger.own, stranger.number
    names = ["HPCTRAIN_CACHE", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"]
    env = BARE | {"HPCTRAIN_CACHE": f"{own}/cache", "HF_HOME": f"{own}/cache/huggingface"}

    def task(secret="17"):
        command = [stranger.launch / "lib/task.sh", "none", "--", "printenv", *names]
        return stranger.run(*command, env=env | {"HPCTRAIN_JOB_SECRET": secret * 16})

    if trick == "link":
        (mine := stranger.folder / "mine").mkdir()
        os.chown(mine, number, number)
        own.symlink_to(mine)
    elif trick:
        own.mkdir()
        own.chmod(0o777)
    own.with_suffix(".000").mkdir()  # not the user's either
    hidden = hashlib.sha256(f"{os.uname().nodename} {'17' * 16}".encode()).hexdigest()[:16]
    if trick == "both":
        own.with_suffix(f".{hidden}").mkdir()
    done = [task(), task(), task("18")]
    assert not trick or list(own.iterdir()) == []
    if trick == "both":
        assert_refused(done[0], str(own), f"{own}.{hidden}", "HPCTRAIN_CACHE", status=127)
        done = done[2:]
    (used,) = [path for path in stranger.folders() if path.lstat().st_uid == number]
    assert used.stat().st_mode & 0o777 == 0o700 and (used == own) == (trick is None)
    for each in done:
        folders = [f"{used}/cache", f"{used}/cache/huggingface", f"{used}/inductor"]
        assert each.stdout.split() == folders, each.stderr
        assert each.stderr.count("\n") == bool(trick)
        assert not trick or (f"{own} " in each.stderr and f" {used} " in each.stderr)


@pytest.mark.parametrize("theirs", ["/mine/kernels", "", None])
def test_the_kernels_of_torch_are_in_a_folder_of_the_user(theirs):
    env = BARE | {"HPCTRAIN_CACHE": "/scratch/cache"}
    env |= {} if theirs is None else {"TORCHINDUCTOR_CACHE_DIR": theirs}
    done = start("lib/task.sh", "none", "--", "printenv", "TORCHINDUCTOR_CACHE_DIR", env=env)
    assert done.stdout == (theirs or f"/tmp/hpctrain-{os.getuid()}/inductor") + "\n", done.stderr


# ---- the container of a node ----

# what the ranks source, in their order
PARTS = re.findall(r'^source "\$\(dirname "\$0"\)/(\w+\.sh)"$', (LAUNCH / "lib/task.sh").read_text(), re.M)
ENTER = "set -euo pipefail; " + "; ".join(f"source {QUOTED}/lib/{part}" for part in PARTS)


@BY_ROOT
@pytest.mark.parametrize("what", ["folder", "link to a folder of the user"])
def test_no_container_is_entered_that_somebody_else_names(tmp_path, theirs, what):
    """The folder has everything that the tasks of this node expect, before the first of them has made it."""
    folder = tmp_path / "container"
    (folder / "tasks").mkdir(parents=True)
    (folder / "name").write_text("theirs\n")
    os.mkfifo(folder / "alive")
    if what == "folder":
        theirs(folder)
    else:
        folder = tmp_path / "link"
        folder.symlink_to("container")
        os.chown(folder, 12345, -1, follow_symlinks=False)
    code = "ALIVE='' WORDS=(apptainer exec x.sif -- true); enter_node_container; echo \"${WORDS[*]}$ALIVE\""
    env = os.environ | {"HPCTRAIN_NODE_CONTAINER": str(folder), "RANK": "1"}
    done = bash(f"{ENTER}; {code}", env)
    assert done.stdout == "apptainer exec x.sif -- true\n", done.stderr


@BY_ROOT
def test_a_name_of_apptainer_that_somebody_else_has_taken():
    """The ranks of the node start without a common container, and at once."""
    # Both shells are one process.
    code = f"""
        touch "$shm"$$
        exec setpriv --reuid=1234 --regid=1234 --clear-groups bash -c '{ENTER}
            WORDS=(sleep exec x.sif -- true)
            enter_node_container
            echo "$SECONDS ${{WORDS[*]}} $shm$$"
            leave_node_container'
    """
    # not in the folders of pytest, which are for its user alone
    folder = f"/tmp/hpctrain-container-0-{os.urandom(8).hex()}"
    env = os.environ | {"HPCTRAIN_NODE_CONTAINER": folder, "RANK": "0", "shm": "/dev/shm/sharens_instance_"}
    done = bash(code, env, cwd="/")
    seconds, *words, taken = done.stdout.split() or pytest.fail(done.stderr)
    Path(taken).unlink()
    assert (
        int(seconds) < 30 and words == ["sleep", "exec", "x.sif", "--", "true"] and not Path(folder).exists()
    )
    assert re.fullmatch(r"hpctrain: on .*: .*Operation not permitted\n", done.stderr), done.stderr


# ---- secrets ----

SECRET = "0123456789abcdef" * 2


def test_the_launch_scripts_make_a_secret_and_print_none(programs):
    hidden = {"HF_TOKEN": "hf_abcdefgh", "Hf_Api_Key": "shhh", "DATABASE_URL": "postgres://me:shhh@host/"}
    hidden |= {"HPCTRAIN_JOB_SECRET": SECRET, "NCCL_IB_PKEY": "0"}
    done = dry_run("apptainer_ddp.sh", programs | hidden, "train_ddp")
    assert done.returncode == 0 and not re.search(f"hf_abcdefgh|shhh|{SECRET}", done.stdout), done.stderr
    # The shell that the commands are pasted into has the user's own variables.
    assert not re.search(rf"export ({'|'.join(hidden)})=", done.stdout)
    assert "\nexport MASTER_PORT=" in done.stdout

    main = f"set -euo pipefail; source {QUOTED}/lib/main.sh"
    code = f"{main}; make_local_job; forwarded_names; printenv HPCTRAIN_JOB_SECRET"
    secrets = set()
    for _ in range(2):
        *names, secret = bash(code, programs).stdout.split()
        assert "HPCTRAIN_JOB_SECRET" in names and len(secret) == 32 and int(secret, 16)
        secrets.add(secret)
    assert len(secrets) == 2


def test_the_log_of_a_job_shows_no_secret_of_the_command_line(programs):
    """The command to paste of a dry run has it; what a job prints, and how to go on with it, has not."""
    words = ["train_ddp", "--api-key=sesame street", "--hub-token", "sesame street"]
    done = dry_run("apptainer_ddp.sh", programs, *words)
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("hpctrain: command: ")]
    assert command.endswith(" train_ddp --api-key=*** --hub-token ***")
    assert "sesame" not in done.stdout[: done.stdout.index("\ncd ")] and last_words(done)[-4:] == words
    code = "SCRIPT=local.sh SLURM_JOB_ID=7 NODES=1 TASKS=1 THREADS=1 GPUS=0; how_to_resume '--resume x'"
    done = library(f"ARGUMENTS=({' '.join(map(shlex.quote, words))}); {code}")
    assert done.stdout.endswith(" train_ddp --api-key=*** --hub-token *** --resume x\n"), done


@pytest.mark.parametrize("replaced_by", [None, "a file", "a link", "a pipe"])
def test_no_variables_are_read_from_a_file_of_somebody_else(tmp_path, replaced_by):
    """Who can write the submit folder can replace the folder whose name horovodrun shows in ps.

    A new file would be for those as well whom a default ACL of the submit folder names.
    """
    code = (
        f"set -euo pipefail; source {QUOTED}/lib/main.sh; source {QUOTED}/lib/launchers/horovodrun.sh; JOB=7"
    )
    code += "; trap() { :; }; hide_environment; echo $HPCTRAIN_ENVIRONMENT"
    made = bash(code, os.environ | {"HF_TOKEN": "from the file"}, cwd=tmp_path, check=True)
    secrets = Path(made.stdout.strip())
    assert secrets.stat().st_mode & 0o777 == 0o700 and secrets.parent == tmp_path
    file, mine = secrets / "variables", tmp_path / "mine"
    mine.write_text(f"touch {tmp_path}/executed\n")  # what somebody else wrote, and this user copied
    if replaced_by:
        secrets.rename(tmp_path / "moved")
        secrets.mkdir()
    if replaced_by == "a file":
        shutil.copy(mine, file)
    elif replaced_by == "a link":
        file.symlink_to(mine)
    elif replaced_by == "a pipe":
        os.mkfifo(file)
        put(tmp_path, timeout='exec /usr/bin/timeout 0.5 "${@:2}"')
    env = {"HPCTRAIN_ENVIRONMENT": str(secrets), "HPCTRAIN_COMMAND": "-- printenv HF_TOKEN "}
    env |= {"HPCTRAIN_HOST_PATH": os.environ["PATH"], "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"HPCTRAIN_WORLD_SIZE": "1", "HPCTRAIN_TASKS_PER_NODE": "1", "MASTER_PORT": "1"}
    env |= {f"HOROVOD_{name}": "0" for name in ("RANK", "LOCAL_RANK", "CROSS_RANK")} | {"HPCTRAIN_JOB": "7"}
    done = start("lib/task.sh", "horovodrun", env=os.environ | env)
    assert not (tmp_path / "executed").exists()
    if replaced_by:
        assert_refused(done, str(secrets), status=127)
    assert (done.returncode, done.stdout) == ((127, "") if replaced_by else (0, "from the file\n")), done


# ---- where the questions are asked ----


def test_owners_and_links_are_asked_about_in_one_file():
    """Besides it, each script asks whose its functions are, and site.sh runs in the user's shell."""
    question = re.compile(r"\[ .*-[OL] |\[\[.* -[OL] |stat -\S+ \S*%[uUA]")
    found = {
        f"{path.relative_to(LAUNCH)}: {line.strip()}"
        for path in LAUNCH.rglob("*.sh")
        if path.name not in ("trust.sh", "site.sh")
        for line in path.read_text().splitlines()
        if question.search(line) and '"$_of" "$_main"' not in line
    }
    assert not found


def test_the_kind_of_a_path_is_no_word_of_a_language():
    """stat translates its %F: with a Korean locale no folder was the user's own."""
    texts = [path.read_text() for path in LAUNCH.rglob("*.sh")]
    assert not [text for text in texts if re.search(r"stat .*%F", text)]
