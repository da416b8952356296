"""Every command in README.md runs: `bash` blocks on this machine, `bash cluster` blocks by alice on the login node."""

import os
import re
import subprocess

import pytest
from slurm_cluster import REPOSITORY

pytestmark = pytest.mark.slow

BLOCKS = re.findall(r"^```bash( cluster)?\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.M | re.S)
COMMANDS = [(bool(where), line) for where, block in BLOCKS for line in block.splitlines() if line]
HERE = [line for cluster, line in COMMANDS if not cluster]
ON_CLUSTER = [line for cluster, line in COMMANDS if cluster]
# This one runs this test, and that one is a part of it.
TESTS = {"make test", "make test-fast"}


def test_there_are_commands():
    assert {"make demo", "make sif", "make venv"} | TESTS <= set(HERE)
    assert "sbatch launch/apptainer_ddp.sh" in ON_CLUSTER


@pytest.mark.parametrize("line", [line for line in HERE if line not in TESTS])
def test_on_this_machine(line, sif, tmp_path):
    # What make has made is not made again (test_image.py looks at that); the rest writes into a folder of its own.
    cwd = REPOSITORY if line.startswith("make") else tmp_path
    done = subprocess.run(
        line.replace(".venv/", f"{REPOSITORY}/.venv/"),
        shell=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if line == "make demo":
        assert re.search(r"4 ranks on 2 hosts; test accuracy 0\.9[789]", done.stdout)


def test_on_the_cluster(cluster):
    """One after the other in one shell, as a user types them; every job that they submit completes."""
    home = "/home/alice/hpctrain"
    (cluster.host_path(home) / "mine.py").write_text("import sys\nprint(sys.argv[1:])\n")
    for line in ON_CLUSTER:
        done = cluster.exec("login", "bash", "-c", line, user="alice", cwd=home, timeout=300, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if submitted := re.search(r"^(?:Submitted batch job )?(\d+)$", done.stdout, re.M):  # sbatch, qsub
            assert cluster.wait(int(submitted[1]), timeout=300).state == "COMPLETED", line
