"""Servers of one user on a compute node: the socket and the token that TensorBoard gets, and the lines of the log."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from hpctrain.errors import HpctrainError
from hpctrain.servers import tunnel
from tests.commands.test_runs import make_run

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def ask(path, target, **headers):
    """The status, the headers and the content that a server on a Unix socket answers."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", target, headers=headers)
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()


def until(found, seconds=120):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return value


def listening_ports(pid):
    sockets = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]


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
        until(lambda: f"Then open http://localhost:8888/ and give the token in {note}\n" in read())
        token = note.read_text().strip()
        assert [file.stat().st_mode & 0o777 for file in (note, path.parent, path)] == [0o600, 0o700, 0o600]
        assert listening_ports(server.pid) == []
        if os.getuid() == 0:  # somebody else
            refused = subprocess.run(
                ["/usr/bin/python3", "-c", CONNECT, path], user=65534, capture_output=True, text=True, cwd="/"
            )
            assert "PermissionError" in refused.stderr
        for target in ("/", "/data/runs", "/?token=wrong"):
            status, _, content = ask(path, target, Cookie="token=wrong")
            assert status == 403 and "the token is missing" in content and '<form action="/">' in content
        status, headers, _ = ask(path, f"/?token={token}")
        assert (status, headers["Location"]) == (303, "/") and "HttpOnly; SameSite=Strict" in headers[
            "Set-Cookie"
        ]
        cookie = headers["Set-Cookie"].split(";")[0]
        assert "<title>TensorBoard</title>" in ask(path, "/", Cookie=cookie)[2]
        until(lambda: json.loads(ask(path, "/data/runs", Cookie=cookie)[2]) == ["17/tensorboard"])
        assert token not in read() and token not in Path(f"/proc/{server.pid}/cmdline").read_text()
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0 and not path.parent.exists() and not note.exists()


def test_the_token():
    assert tunnel.cookie_for("/?token=abc", "abc") == "token=abc; HttpOnly; SameSite=Strict; Path=/"
    assert [
        tunnel.cookie_for(target, "abc") for target in ("/", "/?token=ab", "/?token=", "/token=abc", "//[")
    ] == [""] * 5
    assert tunnel.has_token("Bearer abc", "", "abc") and tunnel.has_token("", "other=1; token=abc", "abc")
    for authorization, cookie in (
        ("", ""),
        ("Bearer ab", "token=abc"),
        ("", "token=\udcff"),
        ("", "\x01;=;"),
        ("é", ""),
    ):
        assert not tunnel.has_token(authorization, cookie, "abc")


def test_the_lines_of_the_log():
    paths = "JupyterLab", Path("/tmp/x/socket"), Path("/home/a/token")
    lines = tunnel.how_to_connect(*paths, "/lab", {"USER": "a", "SLURM_SUBMIT_HOST": "login1"})
    assert f"\n    ssh -N -L 8888:/tmp/x/socket -J a@login1 a@{os.uname().nodename}\n" in lines
    assert lines.endswith("\nThen open http://localhost:8888/lab and give the token in /home/a/token")
    assert " -J a@login2 " in tunnel.how_to_connect(*paths, env={"USER": "a", "PBS_O_HOST": "login2"})
    assert " -J " not in tunnel.how_to_connect(*paths, env={"USER": "a"})


def test_only_a_folder_of_its_own_is_removed_at_the_end(tmp_path):
    """Each job of jupyter.sh left an empty folder in runs."""
    (tmp_path / "theirs").mkdir()
    for name in ("new", "used", "theirs"):
        with tunnel.Tunnel("jupyter", tmp_path / name):
            assert (tmp_path / name / "token").exists()
            if name == "used":
                (tmp_path / name / "notes").touch()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "theirs",
        "used",
        "used/notes",
    ]


def test_a_folder_that_cannot_be_written(tmp_path):
    with (
        pytest.raises(HpctrainError, match="/proc/x: cannot be written"),
        tunnel.Tunnel("jupyter", Path("/proc/x")),
    ):
        pass


def test_invalid_input_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "tensorboard", "none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (
        1,
        1,
    ) and "none: there is no such folder" in done.stderr
