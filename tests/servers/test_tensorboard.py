"""hpctrain tensorboard: what its user gets with the token, and nobody else."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from hpctrain.distributed.world import ALONE
from hpctrain.servers import tensorboard
from tests.helpers import ask_socket, listening_ports, make_run, run_command, run_hpctrain
from tests.launch.helpers import HOME, wait_until_idle
from tests.servers.helpers import ASK, opened, words_of_the_log

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
# Asks TensorBoard through the tunnel for its runs, with a cookie.
OPEN = """
import http.client, sys
connection = http.client.HTTPConnection("localhost", 8888)
connection.request("GET", "/data/runs", headers={"Cookie": sys.argv[1]})
print(connection.getresponse().status)
"""


def until(found, seconds=120):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return value


def test_a_folder_that_cannot_be_read_is_an_error_before_the_server_starts(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(tensorboard, "start_board", lambda *_: pytest.fail("started"))
    with pytest.raises(PermissionError):
        tensorboard.main(ALONE, [str(tmp_path)])


@pytest.mark.slow
def test_tensorboard_is_for_its_user_alone(tmp_path):
    with SummaryWriter(make_run(tmp_path / "runs/17") / "tensorboard") as board:
        board.add_scalar("train_loss", 0.5, 10)
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, "-m", "hpctrain", "tensorboard"]
    env = os.environ | {"SLURM_JOB_ID": "18", "SLURM_SUBMIT_HOST": "login1", "USER": "a"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT) as server:
        read = (tmp_path / "log").read_text
        found = until(
            lambda: re.search(
                r"ssh -N -L 8888:(/tmp/hpctrain-tensorboard\.\w+/socket) -J a@login1 a@\S+\n", read()
            )
        )
        path, note = Path(found[1]), tmp_path / "runs/tensorboard/18/token"
        until(lambda: re.search(f"http://localhost:8888/ .*{note}\n", read()))
        token = note.read_text().strip()
        assert [file.stat().st_mode & 0o777 for file in (note, path.parent, path)] == [0o600, 0o700, 0o600]
        assert listening_ports(server.pid) == []
        if os.getuid() == 0:  # somebody else
            refused = run_command(["/usr/bin/python3", "-c", CONNECT, path], user=65534, cwd="/")
            assert "PermissionError" in refused.stderr
        for target in ("/", "/data/runs", "/?token=wrong"):
            status, _, content = ask_socket(path, target, Cookie="token=wrong")
            assert status == 403 and '<form action="/">' in content
        status, headers, _ = ask_socket(path, f"/?token={token}")
        assert (status, headers["Location"]) == (303, "/") and "HttpOnly; SameSite=Strict" in headers[
            "Set-Cookie"
        ]
        cookie = headers["Set-Cookie"].split(";")[0]
        assert "<title>TensorBoard</title>" in ask_socket(path, "/", Cookie=cookie)[2]
        until(lambda: json.loads(ask_socket(path, "/data/runs", Cookie=cookie)[2]) == ["17/tensorboard"])
        assert token not in read() and token not in Path(f"/proc/{server.pid}/cmdline").read_text()
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0 and not path.parent.exists() and not note.exists()


def test_tensorboard_in_a_pbs_job_through_the_command_of_the_log(cluster):
    """By qsub over Slurm.

    From another user and from another node nothing reaches it; with ssh and the token its user does.
    """
    cluster.exec("login", "mkdir", "-p", f"{HOME}/runs", user="alice")
    options = "-N board -l select=1:ncpus=1:mpiprocs=1 -l walltime=00:10:00 -j oe -k oed"
    line = f"{HOME}/launch/jupyter.sh tensorboard runs\n"
    job = cluster.qsub(*options.split(), cwd=HOME, script=line)
    text, command, socket, node = words_of_the_log(
        cluster, cluster.host_path(f"{HOME}/board.o{job}"), "Then open"
    )
    token = cluster.host_path(re.search(r"give the token in (\S+)", text)[1]).read_text().strip()
    ask = ["python3", "-c", ASK, socket]
    assert "PermissionError" in cluster.exec(node, *ask, user="bob", check=False).stderr
    assert (
        "FileNotFoundError"
        in cluster.exec("n2" if node == "n1" else "n1", *ask, user="alice", check=False).stderr
    )
    assert cluster.exec(node, *ask, user="alice").stdout == "403\n"
    with opened(cluster, command):
        for given, status in (("wrong", "403"), (token, "200")):
            words = ["python3", "-c", OPEN, f"token={given}"]
            assert cluster.exec("login", *words, user="alice").stdout == f"{status}\n"
    cluster.exec("login", "qdel", str(job), user="alice")
    wait_until_idle(cluster, job)
    assert cluster.exec(node, "test", "-e", socket, check=False).returncode != 0


def test_a_folder_that_does_not_exist_is_one_line(tmp_path):
    done = run_hpctrain("tensorboard", "none", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "none: " in done.stderr
