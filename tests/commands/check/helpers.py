"""Ranks of `hpctrain check` on faulty nodes.

The nodes are namespaces of this machine, each with its own host name, /etc/hosts and mounts, in one private
network.
"""

import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import slurm_cluster

from tests.helpers import run_command
from tests.tools import warm_start

CHECK = [sys.executable, "-m", "hpctrain", "check"]
HOSTS = "127.0.0.1 localhost\n10.9.9.1 n1\n10.9.9.2 n2\n"


def rank(
    number, *, node=None, size=2, per_node=1, prepare="", hosts=HOSTS, program=None, arguments=(), **env
):
    """A rank as srun starts it, on node n1, n2, ...; `prepare` is a command that breaks the node.

    `program` is what starts it, if that matters: it is a process with its imports behind it otherwise.
    """
    node = number // per_node if node is None else node
    env = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % per_node),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{-(-size // per_node)})",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **env,
    }
    lines = [
        f"hostname n{node + 1}",
        "mkdir -p private",
        "mount -t tmpfs none private",
        f"printf %s {shlex.quote(hosts)} >private/hosts",
        "mount --bind private/hosts /etc/hosts",
        prepare,
    ]
    return SimpleNamespace(
        prepare="\n".join(lines), env=env, program=program, arguments=["check", *arguments]
    )


def run(tmp_path, *ranks):
    """Run the ranks in a network with n1 and n2; returns the worst exit status and all output."""
    if os.geteuid() != 0:
        pytest.skip("nodes of namespaces need root")
    with network() as path:
        # The dynamic loader reads LD_LIBRARY_PATH when a process starts only.
        if any(each.program or "LD_LIBRARY_PATH" in each.env for each in ranks):
            return run_programs(tmp_path, path, *ranks)
        warm = [
            warm_start.Rank(each.arguments, clean_environment() | each.env, path, each.prepare)
            for each in ranks
        ]
        done = warm_start.run(warm, tmp_path)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def network():
    """The path of a network namespace with the addresses of n1 and n2."""
    addresses = "ip addr add 10.9.9.1/32 dev lo; ip addr add 10.9.9.2/32 dev lo"
    script = f"ip link set lo up; {addresses}; echo ready; exec cat"
    with subprocess.Popen(
        ["unshare", "--net", "bash", "-ec", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "ready\n"
        yield f"/proc/{holder.pid}/ns/net"
        holder.stdin.close()


def run_programs(tmp_path, path, *ranks):
    """Start each rank by its program."""
    started = ""
    for each in ranks:
        command = each.program or [*CHECK, *each.arguments[1:]]
        words = shlex.join(["env", *(f"{name}={value}" for name, value in each.env.items()), *command])
        node = shlex.join(
            ["unshare", "--mount", "--uts", "bash", "-c", f"set -e\n{each.prepare}\nexec {words}"]
        )
        started += f"{node} & pids+=($!)\n"
    script = f'{started}worst=0\nfor pid in "${{pids[@]}}"; do wait "$pid" || worst=$?; done; exit $worst'
    command = ["nsenter", f"--net={path}", "bash", "-c", script]
    done = run_command(command, cwd=tmp_path, env=clean_environment())
    return done.returncode, done.stdout + done.stderr


def clean_environment():
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "PYTHON", "HF_", "CUDA_"))
    }


def errors(output):
    assert "Traceback" not in output, output
    return [
        line.removeprefix("hpctrain: error: ")
        for line in output.splitlines()
        if line.startswith("hpctrain: error: ")
    ]


def refused(tmp_path, *ranks):
    """The errors of the check on these ranks, whose exit status has to be 1."""
    status, output = run(tmp_path, *ranks)
    assert status == 1, output
    return errors(output)


def full(folder, options="size=1m"):
    return f"mkdir -p {folder}\nmount -t tmpfs -o {options} none {folder}"


def in_the_image(*command, **env):
    """Run a command in the image, with this checkout of hpctrain."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    source = slurm_cluster.REPOSITORY / "src"
    apptainer = ["apptainer", "exec", "--env", f"PYTHONPATH={source}"]
    apptainer += [*options, slurm_cluster.REPOSITORY / "hpctrain-cpu.sif"]
    done = run_command(
        [slurm_cluster.CLUSTER_SH, "run", "--", *apptainer, *command],
        cwd=slurm_cluster.REPOSITORY, env=clean_environment()
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr
