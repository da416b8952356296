"""The token of a server, its folder, and the lines of the log."""

import os
import re
import socket
from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.servers import tunnel


def test_the_token():
    own = tunnel.cookie_for("/?token=abc", "abc").split("; ")
    assert own[1:] == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert [
        tunnel.cookie_for(target, "abc") for target in ("/", "/?token=ab", "/?token=", "/token=abc", "//[")
    ] == [""] * 5
    assert tunnel.has_token("Bearer abc", "", "abc") and tunnel.has_token("", f"other=1; {own[0]}", "abc")
    for authorization, cookie in (
        ("", ""),
        ("Bearer ab", own[0]),
        ("", "token=abc"),
        ("", own[0].replace("=", "=0")),
        ("", "token=\udcff"),
        ("", "\x01;=;"),
        ("é", ""),
    ):
        assert not tunnel.has_token(authorization, cookie, "abc")


def test_the_cookie_of_a_server_is_its_own_and_not_its_token():
    """Browsers send it to every port of the host: a neighbor's server read the token, and two servers of a
    user logged each other out.
    """
    cookies = [tunnel.cookie_for(f"/?token={token}", token).split(";")[0] for token in ("abc", "def")]
    assert "abc" not in cookies[0] and len({cookie.split("=")[0] for cookie in cookies}) == 2
    assert [tunnel.has_token("", "; ".join(cookies), token) for token in ("abc", "def")] == [True, True]
    assert not tunnel.has_token(f"Bearer {cookies[0].split('=')[1]}", "", "abc")


def test_the_lines_of_the_log():
    paths = "JupyterLab", Path("/tmp/x/socket"), Path("/home/a/token")
    lines = tunnel.how_to_connect(*paths, "/lab", {"USER": "a", "SLURM_SUBMIT_HOST": "login1"})
    assert f"\n    ssh -N -L 8888:/tmp/x/socket -J a@login1 a@{os.uname().nodename}\n" in lines
    assert "http://localhost:8888/lab " in lines and lines.endswith(" /home/a/token")
    assert " -J a@login2 " in tunnel.how_to_connect(*paths, env={"USER": "a", "PBS_O_HOST": "login2"})
    assert " -J " not in tunnel.how_to_connect(*paths, env={"USER": "a"})
    job = {"USER": "a", "SLURM_SUBMIT_HOST": "glogin01", "HPCTRAIN_LOGIN_HOST": "neuron.ksc.re.kr"}
    assert " -J a@neuron.ksc.re.kr " in tunnel.how_to_connect(*paths, env=job)
    node = os.uname().nodename
    lines = tunnel.how_to_connect(*paths, env=job, port=4711)
    assert f"\n    ssh -N -L 8888:{node}:4711 a@neuron.ksc.re.kr\n" in lines and "login node by" not in lines


def test_the_command_is_in_a_file_for_putty(tmp_path, monkeypatch, capsys):
    """Beside the token, as users of Neuron know it from the scripts of its tutorials."""
    monkeypatch.setenv("HPCTRAIN_NODE_PORT", "1")
    monkeypatch.setenv("HPCTRAIN_LOGIN_HOST", "login.example.org")
    with tunnel.Tunnel("jupyter", tmp_path / "out") as own, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(own.socket))
        server.listen()
        own.print_how_to_connect("JupyterLab")
        path = tmp_path / "out/port_forwarding_command"
        ssh, *putty = path.read_text().splitlines()
        assert f"    {ssh}\n" in capsys.readouterr().out and path.stat().st_mode & 0o777 == 0o600
        found = re.fullmatch(r"ssh -N -L (8888:\S+:(\d+)) \w+@login.example.org", ssh)
        assert all(line.startswith("#") for line in putty) and f"plink -N -L {found[1]} " in putty[-1]
        with socket.create_connection(("127.0.0.1", int(found[2]))) as client:
            client.sendall(b"question")
            through, _ = server.accept()
            assert through.recv(100) == b"question"
            through.sendall(b"answer")
            through.close()
            assert client.recv(100) == b"answer" and client.recv(100) == b""
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize(
    ("tmp", "var", "folder"),
    [
        ("/tmp", "/var/tmp", "/tmp"),
        ("/", "/", "/tmp"),
        ("/nodes/n1/tmp", "/var/tmp", "/tmp"),
        ("/jobs/17/.17", "/var/tmp", "/var/tmp"),  # job_container/tmpfs
        ("/tmp/systemd-private-0-x/tmp", "/var/tmp", "/var/tmp"),
        ("/tmp-inst/alice", "/jobs/17/.17", None),
    ],
)
def test_ssh_sees_the_folder_of_the_socket(monkeypatch, tmp, var, folder):
    """Where a job had its own /tmp, the printed command of ssh found no socket, and nothing said why."""
    monkeypatch.delenv("TMPDIR", raising=False)
    mounts = f"1 0 8:1 / / rw - ext4\n2 1 8:1 {tmp} /tmp rw - ext4\n3 1 8:1 {var} /var/tmp rw - ext4\n"
    if folder is None:
        with pytest.raises(HpctrainError, match="TMPDIR"):
            tunnel.folder_that_ssh_sees(mounts)
    else:
        assert tunnel.folder_that_ssh_sees(mounts) == Path(folder)
