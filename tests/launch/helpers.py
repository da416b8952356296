"""What the tests of launch/ share: launch scripts without a cluster, and jobs on the test cluster."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command

LAUNCH = REPOSITORY / "launch"
QUOTED = str(LAUNCH).replace(" ", "\\ ")  # for a shell, and as the launch scripts print it
BARE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/root"}
BY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


# ---- without a cluster ----


def bash(script, env=BARE, **options):
    return run_command(["bash", "-c", script], env=env, **options)


def library(script, **env):
    """Run a script with the functions of launch/lib/main.sh."""
    return bash(f"set -euo pipefail; source {QUOTED}/lib/main.sh; {script}", BARE | env)


def start(script, *words, env=BARE, **options):
    """Run a script of launch/, or another one by its path."""
    options = {"timeout": 300} | options
    return run_command([LAUNCH / script, *words], env=env, **options)


def dry_run(script, env, *words, **options):
    return start(script, "--dry-run", *words, env=env, **options)


def last_words(done):
    """The words of the command that a dry run prints last."""
    return bash(f"printf '%s\\0' {done.stdout.splitlines()[-1]}", check=True).stdout.split("\0")[:-1]


def assert_refused(done, *names, status=2):
    """The script ended with one line, an error that has these names."""
    assert done.returncode == status and done.stderr.startswith("hpctrain: error: "), done
    assert done.stderr.count("\n") == 1 and not [name for name in names if name not in done.stderr], done


def put(folder, **programs):
    """Write programs into a folder: their names, with _ for -, and the text of a shell script of each."""
    for name, text in programs.items():
        path = Path(folder, name.replace("_", "-"))
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)


def put_squeue(folder, **fields):
    """A squeue in the folder that prints these fields of the only job, by the names of --Format."""
    fields = {"State": "RUNNING", "RestartCnt": 0, "PreemptTime": "N/A", "ArrayTaskID": "N/A"} | fields
    cases = "".join(f"{name}) printf '%-9s ' '{value}' ;;\n" for name, value in fields.items())
    text = f"""for word; do case $word in --Format=*) names=${{word#*=}} ;; esac; done
        for name in $(echo "$names" | tr , ' '); do case ${{name%%:*}} in
        {cases}esac; done; [ -z "$names" ] || echo"""
    put(folder, squeue=text)


def zone_with_clocks_back_in(seconds):
    """A value of TZ, where clocks go back by an hour in so many seconds."""
    then = time.gmtime(time.time() + seconds + 3600)  # by the clock of summer
    return f"AAA0BBB,0/0,{then.tm_yday - 1}/{then.tm_hour}:{then.tm_min}:{then.tm_sec}"


class Stranger:
    """A user that this machine does not have, with a copy of launch/ and the name of a folder in /tmp."""

    def __init__(self, folder: Path) -> None:
        self.number = 2_000_000_000 + os.getpid()
        self.own = Path(f"/tmp/hpctrain-{self.number}")
        self.folder = folder
        self.launch = shutil.copytree(LAUNCH, folder / "launch")

    def run(self, *command, env=BARE):
        user = ["setpriv", f"--reuid={self.number}", f"--regid={self.number}", "--clear-groups"]
        return run_command([*user, *command], env=env, cwd="/")

    def folders(self) -> list[Path]:
        return sorted(Path("/tmp").glob(f"{self.own.name}*"))


@contextmanager
def a_stranger() -> Iterator[Stranger]:
    # not in the folders of pytest, which are for its user alone
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        stranger = Stranger(Path(folder))
        try:
            yield stranger
        finally:
            for path in stranger.folders():
                path.unlink() if path.is_symlink() else shutil.rmtree(path)


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


# ---- on the cluster ----

HOME = "/home/alice/hpctrain"
SCRIPT = "launch/apptainer_ddp.sh"
FEW = "--data=digits"  # for jobs that are not about the accuracy
# For jobs whose nodes a test names: Slurm gives a job other nodes while an earlier one has not ended
# completely.
HERE = "--nodelist=n1,n2"
# The starts of ranks take most of the suite's time, so jobs that are about something else have few, and no
# container.
ONE_EACH = (HERE, "--ntasks-per-node=1")  # a rank on each node
NO_CONTAINER = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/opt/hpctrain"}
STANDIN_PATH = "/opt/standins:/usr/local/bin:/usr/bin:/bin"
LAUNCHERS = {
    "srun": ["launch/apptainer_ddp.sh"],
    "torchrun": ["launch/apptainer_torchrun.sh"],
    "mpirun": ["launch/apptainer_mpi.sh", "--mpi=mpirun"],
    "srun + PMI": ["launch/apptainer_mpi.sh", "--mpi=pmix"],
    "horovodrun": ["launch/apptainer_horovod.sh", "--launcher=horovodrun"],
}


def folder(cluster, path):
    return cluster.host_path(f"{HOME}/{path}")


def result(run):
    return json.loads((run / "result.json").read_text())


def wait(cluster, number, cwd=HOME, on_line=None):
    """Wait for a submitted job; returns its end state and all of its output."""
    ended = cluster.wait(number, on_line=on_line)
    return ended, cluster.host_path(f"{cwd}/slurm-{number}.out").read_text(errors="replace")


def wait_and_act(cluster, number, text, act):
    """Wait for a job, and call the function when the log first has the text."""
    acted = []

    def look(line):
        if text in line and not acted:
            acted.append(line)
            act()

    ended, output = wait(cluster, number, on_line=look)
    assert acted, output
    return ended, output


def job(cluster, *args, options=(HERE,), env=None, cwd=HOME, script=SCRIPT):
    """Submit a job and wait for it; returns its end state and all of its output."""
    return wait(cluster, cluster.submit(*options, script, *args, cwd=cwd, env=env), cwd)


def assert_ended(done, state, *texts):
    """The job ended in this state, and its log has these texts."""
    ended, output = done
    assert ended.state == state and not [text for text in texts if text not in output], output
    return output


def wait_until_saved(cluster, node="n1"):
    """Wait until the launch script knows of a checkpoint of this attempt, seconds after its file is there."""
    saved = node, "sh", "-c", "ls /tmp/hpctrain-control.*/saved"
    wait_until(lambda: cluster.exec(*saved, check=False).returncode == 0)


def signal_rank(cluster, name, pattern, node="n2"):
    """Send a signal to the last rank on the node whose command line matches."""
    cluster.exec(node, "sh", "-c", f"kill -{name} $(pgrep -f '[h]pctrain {pattern}' | tail -n 1)")


def wait_until_idle(cluster, number=None, nodes=("n1", "n2")):
    """Wait until no step, launcher, trainer or container of a job is left on any node, for as long as an
    unmount may take.

    Without a number, of any job: processes are then found by their names, and not by their environment. The
    mounts of an image by podman-hpc do not count: its wrapper of fuse-overlayfs misses the end of a container
    now and then, on a busy machine.
    """
    if number is None:
        ours = (
            "[h]pctrain|[s]run |[p]ython|[m]pirun|[p]rted|[h]orovodrun|[s]quashfuse|[c]onmon|[f]use-overlayfs"
        )
        show = f"ps -eo args | grep -E '{ours}'"
    else:
        show = (
            f"grep -slzxE '(SLURM_JOB_ID|HPCTRAIN_JOB)={number}' /proc/[0-9]*/environ | "
            "while read -r path; do tr '\\0' ' ' <${path%environ}cmdline; echo; done 2>/dev/null | grep ."
        )
    for node in nodes:
        for _ in range(300):
            left = cluster.exec(node, "sh", "-c", f"{show} | grep -v /storage/overlay/ || true").stdout
            if not left:
                break
            time.sleep(0.2)
        assert left == "", f"left on {node}: {left}"
