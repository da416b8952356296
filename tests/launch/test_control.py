"""Signals, and what is left when a task or a job ends: launch/lib/control.sh and task.sh; no cluster."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.helpers import (
    BARE,
    BY_ROOT,
    LAUNCH,
    QUOTED,
    bash,
    library,
    put,
    put_squeue,
    start,
    wait_until,
)

TASK = LAUNCH / "lib/task.sh"


def functions(*names):
    """A script that defines these functions of launch/lib alone."""
    parts = [f"source <(cat {QUOTED}/lib/*.sh | sed -n '/^{name}() {{/,/^}}/p')" for name in names]
    return "\n".join(["set -euo pipefail", *parts]) + "\n"


# ---- signals ----


def test_a_signal_to_check_sh_reaches_the_run(tmp_path):
    """Slurm sends it once, at once where the time limit is short."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    main = f"source {tmp_path}/launch/lib/main.sh"
    text = f'[ "$1" != check ] || exec kill -USR1 $PPID\nset -- --dry-run; {main}; echo "early: $EARLY_STOP"'
    put(tmp_path / "launch", **{"other.sh": text})
    done = start(tmp_path / "launch/check.sh", "other.sh", "train_ddp")
    assert done.stdout == "early: 1\n", done


@pytest.mark.parametrize("trap", ["pass_on_term", "shield_from_term"])
def test_a_signal_after_the_end_of_the_ranks_says_nothing(trap):
    """run_as_child has returned by then, and its variables are gone."""
    stubs = "has_control() { :; }; job_field() { [[ $1 == State ]] && echo RUNNING || echo N/A; }\n"
    script = f"{functions('pass_on_term', 'shield_from_term')}{stubs}trap {trap} TERM; kill -TERM $$; echo on"
    done = bash(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


def test_a_rank_that_ends_with_a_signal_is_not_waited_for(tmp_path):
    """bash 5.2 then lost it in about half of the cases, and waited for the node's container."""
    script = f"""{functions("run_as_child", "status_of_child", "is_alive")}
        ALIVE=''
        restore_users_variables() {{ :; }}
        on_term() {{ ASKED=1; [[ $(sleep 0.02; echo RUNNING) == x ]] || true; }}
        sleep 300 & container=$!
        ( until read -r pid <{tmp_path}/pid.$$; do sleep 0.1; done 2>/dev/null; kill -TERM $$ $pid ) &
        run_as_child on_term sh -c 'echo $$ >{tmp_path}/pid.'$$'; exec sleep 300' || echo $?
        kill $container"""
    command = ["bash", "-c", script]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(10)]
    try:
        assert [each.communicate(timeout=60)[0] for each in started] == ["143\n"] * 10
    finally:
        for each in started:
            each.kill()


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_the_secrets_of_horovodrun_are_gone_when_slurm_ends_the_job(tmp_path, name):
    """It may kill the script before that has cleaned up.

    Before a time limit the ranks go on, and may need them.
    """
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    script = f"HPCTRAIN_CONTROL={tmp_path}; request_stop {name}"
    done = library(script, HPCTRAIN_ENVIRONMENT=str(secrets))
    assert done.returncode == 0 and (tmp_path / "stop").exists(), done.stderr
    assert secrets.exists() == (name == "USR1")


@pytest.mark.parametrize("saved", [False, True])
def test_a_script_that_saves_nothing_for_hpctrain_is_told_before_its_time_limit(tmp_path, saved):
    """It ended at the time limit without a word, and Lightning had printed that it would be requeued."""
    if saved:
        (tmp_path / "saved").touch()
    done = library(f"HPCTRAIN_CONTROL={tmp_path}; request_stop; ask_to_stop")
    assert (done.stdout + done.stderr).count("no rank has saved a checkpoint") == (not saved), done


PREEMPTED = {"PreemptTime": "@1795176000"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shown", "folder", "ends"),
    [
        (PREEMPTED, "control", "stop"),
        ({"State": "COMPLETING"}, "control", "stop"),
        ({}, "control", "signal"),
        (PREEMPTED, "elsewhere", "nothing"),
    ],
)
def test_sigterm_to_a_task(programs, tmp_path, shown, folder, ends):
    """Slurm sends it to the tasks, not to their children, when it preempts a job, ends it, or when a rank has
    failed.

    In a job that it ends the batch script can start nothing that would remove the copies of --broadcast from
    the nodes.
    """
    (tmp_path / "control").mkdir()
    (copy := tmp_path / "copy.sif").touch()
    put_squeue(tmp_path, **shown)
    env = {"HPCTRAIN_CONTROL": f"{tmp_path}/{folder}", "SLURM_JOB_ID": "7", "HPCTRAIN_SIF_COPY": str(copy)}
    command = [TASK, "none", "--", "bash", "-c", "echo started; sleep 3; exit 5"]
    with subprocess.Popen(command, env=programs | env, stdout=subprocess.PIPE) as task:
        task.stdout.readline()
        task.terminate()
    assert task.returncode == (-signal.SIGTERM if ends == "signal" else 5)
    assert (tmp_path / "control/stop").exists() == (ends == "stop")
    assert not copy.exists()


@BY_ROOT
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_somebody_else_does_not_stop_a_job(tmp_path, monkeypatch, theirs, is_link):
    """Its name, on a node where the launch script has none, can be seen on the node where it has one."""
    from hpctrain.distributed import control

    folder = tmp_path / "control"
    folder.mkdir(mode=0o777)
    (folder / "stop").touch()
    (folder / "saved").symlink_to(tmp_path / "mine")
    if is_link:
        folder.rename(tmp_path / "folder")
        folder.symlink_to(tmp_path / "folder")
        os.chown(folder, 1234, 1234, follow_symlinks=False)
    else:
        theirs(folder)
    monkeypatch.setenv("HPCTRAIN_CONTROL", str(folder))
    assert not control.stop_requested()
    control.report_saved(None)
    control.report_failed()
    env = os.environ | {"SLURM_JOB_ID": "17", "HPCTRAIN_CACHE": str(tmp_path)}
    subprocess.run([TASK, "none", "--", "true"], env=env, check=True, timeout=100)
    assert sorted(path.name for path in folder.iterdir()) == ["saved", "stop"]


# ---- ranks of horovodrun, which sshd starts ----


def horovod_rank(script, **env):
    """The environment of a rank whose program is this script."""
    command = shlex.join(["--", "bash", "-c", script])
    world = {"HPCTRAIN_WORLD_SIZE": "2", "HPCTRAIN_TASKS_PER_NODE": "2", "MASTER_PORT": "1"}
    ranks = {"HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_CROSS_RANK": "0"}
    return BARE | world | ranks | {"HPCTRAIN_HOST_PATH": BARE["PATH"], "HPCTRAIN_COMMAND": command} | env


@pytest.mark.slow
def test_what_a_rank_of_horovodrun_leaves_does_not_keep_its_connection(tmp_path):
    """sshd closes a connection when nobody has the output of its command, and horovodrun waits for that."""
    env = horovod_rank(f"sleep 300 & echo $! >{tmp_path}/left; kill -KILL $$")
    done = start(TASK, "horovodrun", env=env, timeout=100)
    assert done.returncode == 137 and re.search(r"rank 1 on \S+ .* signal 9", done.stderr), done.stderr
    assert not Path(f"/proc/{(tmp_path / 'left').read_text().strip()}/fd/1").exists()


def test_a_rank_of_horovodrun_ends_with_its_connection(tmp_path):
    """After scancel, too: Slurm does not know what sshd has started on the other nodes."""
    (tmp_path / "sshd").symlink_to("/bin/bash")
    job = os.urandom(4).hex()
    rank = f"echo $$ >{tmp_path}/rank.part; mv {tmp_path}/rank.part {tmp_path}/rank; sleep 300 & wait"
    env = horovod_rank(rank, HPCTRAIN_JOB=job, SLURM_JOB_ID=job)
    command = [tmp_path / "sshd", "-c", f"{shlex.quote(str(TASK))} horovodrun; true"]
    # another rank, and a job that this one has submitted
    own = [{"HOROVOD_RANK": "0"}, {"SLURM_JOB_ID": "7"}]
    others = [subprocess.Popen(["sleep", "300"], env=env | each) for each in own]
    try:
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) as connection:
            wait_until(lambda: (tmp_path / "rank").exists(), 60)
            pid = (tmp_path / "rank").read_text().strip()
            connection.kill()
        wait_until(lambda: not Path(f"/proc/{pid}/fd/1").exists(), 60)
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()


# ---- the end of a job ----


def test_a_container_of_podman_that_is_still_being_made_is_removed_too(tmp_path):
    """podman run ignores SIGTERM.

    Where Slurm tracks processes by their parents, it outlives the step that Slurm ends.
    """
    folder = tmp_path.resolve()
    run = f"touch {folder}/begun; sleep 1; touch {folder}/container"
    put(
        tmp_path,
        podman=f"case $1 in --version) echo 5 ;; run) {run} ;; esac",
        podman_hpc=f"case $1 in images) echo sha256:0 ;; rm) rm {folder}/container ;; esac",
    )
    job = os.urandom(4).hex()
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}", "HPCTRAIN_IMAGE": "i"}
    words = ["run", "--rm", "-d", "--label", f"hpctrain.job={job}", "--userns=keep-id", "i"]
    with subprocess.Popen([tmp_path / "podman", *words], env=BARE | env):
        wait_until(lambda: (tmp_path / "begun").exists(), 60)
        done = library(f"JOB={job} GPUS=0; use_runtime podman-hpc; remove_podman_containers 1", **env)
    assert not done.stderr and not (tmp_path / "container").exists(), done.stderr


def test_the_end_of_a_job_does_not_wait_for_a_node_that_does_not_answer(tmp_path):
    put_squeue(tmp_path, NodeList="n1")
    put(tmp_path, srun="exec sleep 300", scontrol="echo n1")
    env = {"PATH": f"{tmp_path}:{BARE['PATH']}", "SLURM_JOB_ID": "7"}
    assert library("WITHIN=1; on_every_node true", **env).returncode == 124


# ---- what a node lacks ----


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("env --bind /none:/x A={}", "{}"),
        ("env --volume /none --bind /gone A={}", "{}"),
        ("env --env=TMPDIR=/none A={}", "{}"),
        ("env TMPDIR=/tmp A={}", "{}/tmp"),
        ("", ""),
    ],
)
def test_a_folder_that_this_node_lacks_is_left_out(tmp_path, words, seen):
    """Every job on two nodes of a real PBS died, because its TMPDIR is on the first one only."""
    env = BARE | {"TMPDIR": "/none", "HPCTRAIN_JOB_SECRET": "1"}
    command = ["--", "sh", "-c", 'printf %s "$A$TMPDIR"']
    done = start("lib/task.sh", "none", *words.format(tmp_path).split(), *command, env=env)
    assert (done.returncode, done.stdout) == (0, seen.format(tmp_path)), done
    lacked = [name for name in ("/none", "/gone") if f"{name} on " in done.stderr]
    assert lacked == [name for name in ("/none", "/gone") if name in words], done


RANK = """
import os, signal, sys, time
signal.signal(getattr(signal, sys.argv[1]), lambda number, frame: os.write(1, b"%d\\n" % number))
child = os.fork()  # as a worker of a DataLoader
os.write(1, b"ready\\n")
time.sleep(20 if child else 30)
if child:
    os.kill(child, 9)
"""


def test_ranks_with_a_handler_of_their_own_get_its_signal():
    """Once, and neither the launcher around them nor the processes that they have started."""
    env = BARE | {"HPCTRAIN_JOB": f"signals-{os.getpid()}", "RANK": "0"}
    words = {name: [sys.executable, "-S", "-c", RANK, name] for name in ("SIGUSR1", "SIGTERM")}
    words["SIGUSR1"] = ["bash", "-c", 'trap "echo bash" USR1; "$@"; true', "x", *words["SIGUSR1"]]
    ranks = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
        for command in words.values()
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks for _ in range(2)] == ["ready\n"] * 4
        done = bash(f"set -eu; source {QUOTED}/lib/control.sh; signal_ranks '[0-9]*'", env)
        assert done.returncode == 0 and not done.stderr, done
        assert [rank.stdout.readline() for rank in ranks] == ["10\n", "15\n"]
    finally:
        for rank in ranks:
            os.killpg(rank.pid, signal.SIGKILL)
    assert [rank.communicate()[0] for rank in ranks] == ["", ""]
