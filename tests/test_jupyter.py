"""hpctrain jupyter: a server that its user reaches through ssh, and nobody else; and a kernel for a JupyterHub."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import BARE_PYTHON
from test_launch import HOME, wait, wait_until_idle

from hpctrain import jupyter
from hpctrain.errors import HpctrainError

# Asks the server by its socket, without the token.
ASK = """
import http.client, socket, sys
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("GET", "/api/status")
print(connection.getresponse().status)
"""
# As a browser does: runs a cell through the socket of a kernel, and prints what the cell prints.
BROWSER = """
import json, sys, urllib.request, uuid
import websocket
token, code = sys.argv[1:]
def ask(path, data=None):
    request = urllib.request.Request("http://localhost:8888" + path, data, {"Authorization": "token " + token})
    return json.load(urllib.request.urlopen(request))
kernel = ask("/api/kernels", b"{}")["id"]
channels = websocket.create_connection(f"ws://localhost:8888/api/kernels/{kernel}/channels?token={token}", timeout=300)
head = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "s", "username": "", "version": "5.3"}
content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
channels.send(json.dumps({"header": head, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}))
while True:
    message = json.loads(channels.recv())
    if message["parent_header"].get("msg_id") != head["msg_id"]:
        continue
    print(message["content"].get("text", "") or "\\n".join(message["content"].get("traceback", [])), end="")
    if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
        break
"""
CELL = """
import os, torch
print(torch.__version__, "RANK" in os.environ, "SLURM_PROCID" in os.environ)
!torchrun --standalone --nproc-per-node 2 -m hpctrain train_ddp --data digits --epochs 1 --out runs/of-a-cell
"""


@pytest.mark.slow
def test_a_cell_trains_on_two_ranks_through_the_command_of_the_log(cluster):
    job = cluster.submit("launch/jupyter.sh", cwd=HOME)
    private = f"{HOME}/runs/jupyter/{job}"
    log = cluster.host_path(f"{HOME}/slurm-{job}.out")
    deadline = time.monotonic() + 300
    while "Jupyter Server" not in (text := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline and "error" not in text, text
        time.sleep(1)
    token = cluster.host_path(f"{private}/token").read_text().strip()
    command = re.search(r"ssh -N -L 8888:(\S+/socket) -J alice@login alice@(n\d)", text)
    assert f"give the token in {private}/token" in text
    socket, node = command[1], command[2]

    # nobody else
    assert token not in text
    assert token not in cluster.exec(node, "ps", "-eo", "args").stdout
    assert cluster.exec("login", "cat", f"{private}/token", user="bob", check=False).returncode != 0
    ask = ["python3", "-c", ASK, socket]
    assert "PermissionError" in cluster.exec(node, *ask, user="bob", check=False).stderr
    assert cluster.exec(node, *ask, user="alice").stdout == "403\n"
    assert "8888" not in cluster.exec(node, "ss", "-ltn").stdout

    tunnel = cluster.start("login", *command[0].split(), user="alice")
    try:
        deadline = time.monotonic() + 60
        listens = "import urllib.request; urllib.request.urlopen('http://localhost:8888/api')"
        while cluster.exec("login", "python3", "-c", listens, user="alice", check=False).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        printed = cluster.exec("login", BARE_PYTHON, "-c", BROWSER, token, CELL, user="alice", cwd=HOME).stdout
    finally:
        tunnel.send_signal(signal.SIGTERM)
        tunnel.wait()
    assert printed.startswith("2.13.0+cpu False False\n") and "2 ranks on 1 nodes (torchrun)" in printed, printed
    assert cluster.host_path(f"{HOME}/runs/of-a-cell/result.json").exists()

    cluster.exec("login", "scancel", str(job), user="alice")
    wait(cluster, job, HOME)
    wait_until_idle(cluster, job)
    assert not cluster.host_path(f"{private}/token").exists()
    assert cluster.exec(node, "test", "-e", socket, check=False).returncode != 0


@pytest.mark.slow
def test_a_kernel_of_a_hub_runs_in_the_image(cluster):
    written = cluster.exec(
        "login", "apptainer", "exec", "hpctrain-cpu.sif", "hpctrain", "jupyter", "--kernel", user="alice", cwd=HOME
    )
    assert written.stdout == "/home/alice/.local/share/jupyter/kernels/hpctrain-cpu/kernel.json\n"
    program = """
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="hpctrain-cpu")
client.execute_interactive("import os, torch; print(os.environ['APPTAINER_CONTAINER'], torch.__file__)", timeout=120)
manager.shutdown_kernel(now=True)
"""
    done = cluster.exec("login", BARE_PYTHON, "-c", program, user="alice", cwd=HOME)
    image, torch = done.stdout.split()
    assert image == f"{HOME}/hpctrain-cpu.sif" and torch.startswith("/opt/hpctrain/lib/python3.11/site-packages/torch/")


def test_a_kernel_names_the_image(tmp_path):
    env = {"APPTAINER_CONTAINER": "/images/my image.sif", "JUPYTER_DATA_DIR": str(tmp_path)}
    path = jupyter.write_kernel(env)
    assert path == tmp_path / "kernels/my-image/kernel.json"
    kernel = json.loads(path.read_text())
    assert kernel["argv"][:4] == ["apptainer", "exec", "--nv", "/images/my image.sif"] and kernel["display_name"] == "my image"
    with pytest.raises(HpctrainError, match="--kernel works in a container of apptainer or singularity only"):
        jupyter.write_kernel({})
    with pytest.raises(HpctrainError, match="set JUPYTER_DATA_DIR to a folder of your own"):
        jupyter.write_kernel(env | {"JUPYTER_DATA_DIR": "/proc"})


def test_a_notebook_is_no_rank():
    mine = {"PATH": "/bin", "SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "0", "RANKS_OF_MINE": "1"}
    of_the_launcher = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
        "PMIX_RANK": "0",
        "MASTER_ADDR": "n1",
        "HPCTRAIN_WORLD_SIZE": "1",
        "HPCTRAIN_JOB_SECRET": "x",
    }
    assert jupyter.without_launcher(mine | of_the_launcher) == mine


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        ({}, ["--out", "/proc/x"], "/proc/x: cannot be written"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [], "one server is enough"),
    ],
)  # fmt: skip
def test_invalid_input_is_one_line(env, arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "jupyter", *arguments],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
