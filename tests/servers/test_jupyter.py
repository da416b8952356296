"""hpctrain jupyter: a server that only its user reaches, through ssh; and a kernel for a JupyterHub."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.servers import jupyter
from tests.helpers import BARE_PYTHON, run_command, run_hpctrain
from tests.launch.helpers import HOME, wait, wait_until_idle
from tests.servers.helpers import ASK, opened, words_of_the_log
from tests.tools.browser import Browser

CELL = """
import beside, os, torch
from IPython.display import Image
print(torch.__version__, "RANK" in os.environ, "SLURM_PROCID" in os.environ)
!torchrun --standalone --nproc-per-node 2 -m hpctrain train_ddp --epochs 2 --out runs/of-a-cell
Image("runs/of-a-cell/curves.png")
"""


def run_in_jupyterlab(browser, token, code):
    """Log in, run a cell of a new notebook that ends with a picture, and return what it prints."""
    browser.resize(1280, 780)
    browser.open("http://localhost:8888/lab")
    browser.wait_for("document.querySelector('#password_input')")
    browser.click("#password_input")
    browser.ask("Input.insertText", text=token)
    browser.click("#login_submit")
    launcher = ".jp-LauncherCard[data-category='Notebook']"
    browser.wait_for(f"document.querySelector({launcher!r})")
    browser.click(launcher)
    browser.wait_for("document.body.innerText.includes('Python 3 (ipykernel) | Idle')")
    browser.click(".jp-Notebook .cm-content")
    browser.wait_for("document.activeElement.matches('.cm-content')")
    browser.ask("Input.insertText", text=code)
    browser.press_shift_enter()
    browser.wait_for("document.querySelector('.jp-OutputArea img')?.naturalWidth")
    if path := os.environ.get("HPCTRAIN_PICTURE"):  # docs/jupyter.png
        browser.take_picture().save(path, optimize=True)
    assert not browser.evaluate("document.querySelector('.Toastify__toast')?.innerText")
    return browser.evaluate("document.querySelector('.jp-OutputArea').innerText")


@pytest.mark.main_road("| `jupyter.sh` |")
def test_a_cell_trains_on_two_ranks_through_the_command_of_the_log(cluster):
    cluster.host_path(f"{HOME}/beside.py").touch()  # of the notebook
    job = cluster.submit("launch/jupyter.sh", cwd=HOME)
    private = f"{HOME}/runs/jupyter/{job}"
    log = cluster.host_path(f"{HOME}/slurm-{job}.out")
    text, command, socket, node = words_of_the_log(cluster, log, "Then open")
    token = cluster.host_path(f"{private}/token").read_text().strip()
    assert f"{private}/token" in text

    # nobody else
    assert token not in text
    assert token not in cluster.exec(node, "ps", "-eo", "args").stdout
    assert cluster.exec("login", "cat", f"{private}/token", user="bob", check=False).returncode != 0
    ask = ["python3", "-c", ASK, socket]
    assert "PermissionError" in cluster.exec(node, *ask, user="bob", check=False).stderr
    assert cluster.exec(node, *ask, user="alice").stdout == "403\n"
    assert "8888" not in cluster.exec(node, "ss", "-ltn").stdout

    login = (cluster.state / "machines/login/pid").read_text().split()[0]
    with opened(cluster, command), Browser("nsenter", f"--net=/proc/{login}/ns/net") as browser:
        printed = run_in_jupyterlab(browser, token, CELL.strip())
    assert printed.startswith("2.13.0+cpu False False\n") and "2 ranks on 1 node (torchrun)" in printed, (
        printed
    )
    assert cluster.host_path(f"{HOME}/runs/of-a-cell/result.json").exists()

    cluster.exec("login", "scancel", str(job), user="alice")
    wait(cluster, job, HOME)
    wait_until_idle(cluster, job)
    assert not cluster.host_path(f"{private}/token").exists()
    assert cluster.exec(node, "test", "-e", socket, check=False).returncode != 0


def test_in_the_allocation_of_salloc(cluster):
    """Where the site starts the shell of salloc on the compute node, as a step of the job."""
    log = cluster.host_path(f"{HOME}/salloc.log")
    step = f"srun --ntasks=1 apptainer exec {HOME}/hpctrain-cpu.sif hpctrain jupyter --out {HOME}/runs/salloc"
    shell = cluster.start(
        "login", "bash", "-c", f"exec salloc --nodes=1 {step} >{HOME}/salloc.log 2>&1", user="alice"
    )
    text, _, socket, node = words_of_the_log(cluster, log, "Then open")
    assert cluster.exec(node, "python3", "-c", ASK, socket, user="alice").stdout == "403\n"
    cluster.exec("login", "scancel", re.search(r"Granted job allocation (\d+)", text)[1], user="alice")
    shell.wait(timeout=60)
    assert not list(cluster.host_path(f"{HOME}/runs/salloc").rglob("token"))


def test_a_kernel_of_a_hub_runs_in_the_image(cluster):
    written = cluster.exec(
        "login",
        "apptainer",
        "exec",
        "hpctrain-cpu.sif",
        "hpctrain",
        "jupyter",
        "--kernel",
        user="alice",
        cwd=HOME,
    )
    assert written.stdout == "/home/alice/.local/share/jupyter/kernels/hpctrain-cpu/kernel.json\n"
    program = """
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="hpctrain-cpu")
cell = "import os, torch; print(os.environ['APPTAINER_CONTAINER'], torch.__file__)"
client.execute_interactive(cell, timeout=120)
manager.shutdown_kernel(now=True)
"""
    done = cluster.exec("login", BARE_PYTHON, "-c", program, user="alice", cwd=HOME)
    image, torch = done.stdout.split()
    assert image == f"{HOME}/hpctrain-cpu.sif" and torch.startswith(
        "/opt/hpctrain/lib/python3.11/site-packages/torch/"
    )


def test_a_kernel_names_the_image(tmp_path):
    env = {"APPTAINER_CONTAINER": "/images/my image.sif", "JUPYTER_DATA_DIR": str(tmp_path)}
    path = jupyter.write_kernel(env)
    assert path == tmp_path / "kernels/my-image/kernel.json"
    kernel = json.loads(path.read_text())
    assert (
        kernel["argv"][:4] == ["apptainer", "exec", "--nv", "/images/my image.sif"]
        and kernel["display_name"] == "my image"
    )
    with pytest.raises(HpctrainError, match="--kernel"):
        jupyter.write_kernel({})
    with pytest.raises(HpctrainError, match="JUPYTER_DATA_DIR"):
        jupyter.write_kernel(env | {"JUPYTER_DATA_DIR": "/proc"})


def test_a_kernel_of_another_image_is_kept(tmp_path):
    """Two images with one file name: the second took the place of the first."""
    paths = [
        jupyter.write_kernel(
            {"APPTAINER_CONTAINER": f"/{folder}/hpctrain-cpu.sif", "JUPYTER_DATA_DIR": str(tmp_path)}
        )
        for folder in ("mine", "group", "mine")
    ]
    assert [path.parent.name for path in paths] == ["hpctrain-cpu", "hpctrain-cpu-2", "hpctrain-cpu"]
    kernels = [json.loads(path.read_text()) for path in paths]
    assert [kernel["display_name"] for kernel in kernels] == [
        "hpctrain-cpu",
        "hpctrain-cpu 2",
        "hpctrain-cpu",
    ]
    assert "/mine/hpctrain-cpu.sif" in kernels[0]["argv"] and "/group/hpctrain-cpu.sif" in kernels[1]["argv"]


def test_a_kernel_of_shifter(tmp_path):
    env = {"HPCTRAIN_IMAGE": "registry/me/hpctrain:cu130", "JUPYTER_DATA_DIR": str(tmp_path)}
    shifter = env | {"HPCTRAIN_RUNTIME": "shifter", "HPCTRAIN_SHIFTER_MODULES": "gpu,nccl-plugin"}
    kernel = json.loads(jupyter.write_kernel(shifter).read_text())
    program = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    assert kernel["argv"] == [
        "shifter",
        "--image=registry/me/hpctrain:cu130",
        "--module=gpu,nccl-plugin",
        *program,
    ]
    assert (
        kernel["display_name"] == "hpctrain:cu130"
        and (tmp_path / "kernels/hpctrain-cu130/kernel.json").exists()
    )


def test_a_kernel_of_podman_hpc(tmp_path):
    env = {
        "HPCTRAIN_RUNTIME": "podman-hpc",
        "HPCTRAIN_IMAGE": "me/hpctrain:cu130",
        "JUPYTER_DATA_DIR": str(tmp_path),
    }
    env |= {"HPCTRAIN_PODMAN_MODULES": "gpu nccl", "HPCTRAIN_BIND": "/usr /none"}
    kernel = json.loads(jupyter.write_kernel(env).read_text())
    assert kernel["argv"][4:9] == ["--gpu", "--nccl", "--volume=/usr:/usr", "me/hpctrain:cu130", "python"]


def start_kernel(cluster, name, env):
    """The folder of a kernel that Jupyter's own client starts on the login node, and then interrupts."""
    program = f"""
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="{name}", startup_timeout=300)
def interrupt(message):
    if message["content"].get("name") == "stdout":
        print(message["content"]["text"])
        manager.interrupt_kernel()
cell = "import os, time, torch; print(os.getcwd(), torch.__file__, flush=True); time.sleep(300)"
print(client.execute_interactive(cell, timeout=120, output_hook=interrupt)["content"]["ename"])
manager.shutdown_kernel()
"""
    done = cluster.exec("login", BARE_PYTHON, "-c", program, user="alice", cwd=HOME, env=env)
    folder, torch, error = done.stdout.split()[-3:]  # after what the kernel itself prints when it starts
    assert (
        torch.startswith("/opt/hpctrain/lib/python3.11/site-packages/torch/") and error == "KeyboardInterrupt"
    ), done
    return folder


def test_a_kernel_in_podman_hpc(cluster, podman_image):
    named = {
        "HPCTRAIN_RUNTIME": "podman-hpc",
        "HPCTRAIN_IMAGE": "hpctrain:cpu",
        "HPCTRAIN_BIND": "/project /none",
    }
    write = [BARE_PYTHON, "-m", "hpctrain", "jupyter", "--kernel"]
    cluster.exec("login", *write, user="alice", cwd=HOME, env=podman_image | named)
    assert start_kernel(cluster, "hpctrain-cpu", podman_image) == HOME
    assert not cluster.exec(
        "login", "podman-hpc", "ps", "--all", "--quiet", user="alice", env=podman_image
    ).stdout


def test_a_kernel_in_shifter(cluster):
    """With the stand-in: its command line."""
    env = {"PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin", "SHIFTER_SIF": "/project/hpctrain-cpu.sif"}
    named = {"HPCTRAIN_RUNTIME": "shifter", "HPCTRAIN_IMAGE": "hpctrain:in-shifter"}
    write = ["shifter", "--image=hpctrain:in-shifter", "hpctrain", "jupyter", "--kernel"]
    cluster.exec("login", *write, user="alice", cwd=HOME, env=env | named)
    assert start_kernel(cluster, "hpctrain-in-shifter", env) == HOME


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
        "PYTHONSAFEPATH": "1",
    }
    assert jupyter.without_launcher(mine | of_the_launcher) == mine


def test_where_the_home_cannot_be_written_everything_is_in_the_private_folder(tmp_path):
    """JupyterLab could not save its layout and its settings. Those in the home are still read."""
    assert jupyter.without_home({"HOME": str(tmp_path), "JUPYTER_PATH": "/kernels"}, tmp_path) == {}
    found = jupyter.without_home({"HOME": "/proc", "JUPYTER_PATH": "/kernels"}, tmp_path)
    written = {found[name] for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    assert len(written) == 3 and all(Path(folder).parent == tmp_path for folder in written)
    assert found["JUPYTER_PATH"] == "/proc/.local/share/jupyter:/kernels"
    assert found["JUPYTER_CONFIG_PATH"] == "/proc/.jupyter"


@pytest.mark.parametrize(
    ("env", "arguments", "name"),
    [
        ({}, ["--out", "/proc/x"], "/proc/x: "),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [], "--ntasks=1"),
    ],
)  # fmt: skip
def test_invalid_input_is_one_line(env, arguments, name):
    done = run_hpctrain("jupyter", *arguments, env=os.environ | env)
    assert done.returncode != 0 and name in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_the_server_reads_no_configuration_of_the_current_folder(tmp_path, monkeypatch, capfd):
    """jupyter_server_config.py is a program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jupyter, "SAFE_PYTHON", [sys.executable, "-c", "import os; print('in', os.getcwd())"])
    jupyter.serve(tmp_path / "out")
    folder = re.search("^in (.*)", capfd.readouterr().out, re.MULTILINE)[1]
    assert Path(folder).name.startswith("hpctrain-jupyter.")


@pytest.mark.parametrize(("login", "shell"), [("/bin/no-tcsh", "bash"), ("/bin/sh", "sh")])
def test_a_terminal_has_a_shell_that_is_there(tmp_path, monkeypatch, capfd, login, shell):
    """JupyterLab answered with status 500 where the login shell of the user is not in the image."""
    monkeypatch.setenv("SHELL", login)
    monkeypatch.setattr(
        jupyter, "SAFE_PYTHON", [sys.executable, "-c", "import os; print(os.environ['SHELL'])"]
    )
    jupyter.serve(tmp_path / "out")
    assert Path(capfd.readouterr().out.splitlines()[0]).name == shell


ASK_AS_BROWSER = """
import http.client, socket, sys
for method, path in (("GET", "/lab"), ("GET", "/api/contents/deep/NOTES.md"),
                     ("POST", "/api/contents/deep/NOTES.md/checkpoints"),
                     ("GET", "/api/contents/deep/NOTES.md/checkpoints")):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(sys.argv[1])
    connection.request(method, path, headers={"Authorization": "token " + open(sys.argv[2]).read().strip()})
    answer = connection.getresponse()
    text = answer.read().decode()
    print(answer.status, "@jupyterlab/debugger-extension" in text, text.count('"id"'))
"""


@pytest.mark.slow
def test_no_copy_goes_through_a_link_and_no_debugger_listens(tmp_path):
    """JupyterLab copies a file when it is opened, and followed a link that somebody else had put there."""
    folder = tmp_path / "deep"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / "NOTES.md").write_text("export X=1\n")
    (folder / ".ipynb_checkpoints/NOTES-checkpoint.md").symlink_to(tmp_path / "led")
    command = [sys.executable, "-m", "hpctrain", "jupyter", "--out", "out"]
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stdout if "ssh -N" in line)
            path = re.search(r":(/\S+/socket)", line)[1]
            ask = [sys.executable, "-c", ASK_AS_BROWSER, path, tmp_path / "out/token"]
            done = run_command(ask, timeout=100)
        finally:
            server.terminate()
    assert done.stdout.splitlines() == ["200 True 0", "200 False 0", "201 False 1", "200 False 1"], done
    assert not (tmp_path / "led").exists() and not (tmp_path / "tmp/jupyter_checkpoints").exists()


LISTENS_LATE = """
import socket, sys, time
path = next(word for word in sys.argv if word.startswith("--ServerApp.sock=")).partition("=")[2]
time.sleep(1.2)
print("listens", flush=True)
socket.socket(socket.AF_UNIX).bind(path)
time.sleep(2.5)
"""


@pytest.mark.slow
def test_how_to_connect_is_said_when_the_server_listens(tmp_path, monkeypatch, capfd):
    """On a busy node ssh connected to nothing for seconds after the line was printed."""
    monkeypatch.setattr(jupyter, "SAFE_PYTHON", [sys.executable, "-c", LISTENS_LATE])
    jupyter.serve(tmp_path / "out")
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "listens" and "ssh -N" in lines[2], lines
