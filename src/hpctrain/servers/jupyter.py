"""hpctrain jupyter: JupyterLab of the image on a compute node, for one user alone.

    sbatch launch/jupyter.sh

No other user reaches it: see tunnel.py. The server has the token in its environment.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from shutil import which

from hpctrain.distributed.control import stop_requested
from hpctrain.distributed.python import SAFE_PYTHON
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files import atomic
from hpctrain.parser import Parser
from hpctrain.servers.tunnel import Tunnel

# Prefixes of variables that a launcher sets. Launchers that a notebook starts must not find them.
OF_THE_LAUNCHER: tuple[str, ...] = ("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
OF_THE_LAUNCHER += ("SLURM_GTIDS", "PMI", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_orte_", "PRTE_")
OF_THE_LAUNCHER += ("TORCHELASTIC_", "MASTER_", "HPCTRAIN_WORLD_SIZE", "HPCTRAIN_TASKS_PER_NODE")
OF_THE_LAUNCHER += ("HPCTRAIN_CONTROL", "HPCTRAIN_JOB_SECRET", "HPCTRAIN_NODE_TASK")
# With it a cell could not import a module that is beside its notebook.
OF_THE_LAUNCHER += ("PYTHONSAFEPATH",)
OF_A_RANK = {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"}
OF_A_RANK |= {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
LAB_SETTINGS = {
    "default_setting_overrides": {
        # Otherwise JupyterLab asks everybody whether it may fetch news.
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}
    },
    # The debugger of a kernel listens on a TCP port without a password, until the kernel ends.
    "page_config": {"disabledExtensions": {"@jupyterlab/debugger-extension": True}},
}
# HOME and PWD are expanded when a kernel starts: then the folder of its notebook is known.
ENTER_PODMAN_HPC = """\
exec podman-hpc run --rm --userns=keep-id --network=host --ipc=host --env HOME \
--volume /tmp:/tmp --volume "$HOME:$HOME" --workdir "$PWD" "$@\""""


def main(world: World, arguments: list[str]) -> None:
    """Start the server and wait for its end, or write a kernel. Raises HpctrainError."""
    args = parser().parse_args(arguments)
    world.refuse_several("jupyter")
    if find_spec("jupyterlab") is None:
        raise HpctrainError("there is no JupyterLab here: run this in the image, or pip install jupyterlab")
    if args.kernel:
        print(write_kernel())
    else:
        serve(args.out)


def serve(folder: Path | None) -> None:
    """Run the server until it ends or this process gets SIGTERM. `folder` is for the token: see Tunnel."""
    with Tunnel("jupyter", folder) as tunnel:
        environment = without_launcher(os.environ)
        environment |= {"JUPYTER_TOKEN": tunnel.token, "JUPYTER_RUNTIME_DIR": str(tunnel.private)}
        # Terminals start it, and the image may not have the user's login shell, such as tcsh.
        if not which(environment.get("SHELL", "")):
            environment["SHELL"] = which("bash") or "/bin/sh"
        (tunnel.private / "labconfig").mkdir()
        for name, settings in LAB_SETTINGS.items():
            (tunnel.private / f"labconfig/{name}.json").write_text(json.dumps(settings))
        environment |= without_home(environment, tunnel.private)
        folders = (str(tunnel.private), environment.get("JUPYTER_CONFIG_PATH"))
        environment["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, folders))
        command = [
            *SAFE_PYTHON, "-m", "jupyterlab", "--no-browser",
            f"--ServerApp.sock={tunnel.socket}",
            "--ServerApp.sock_mode=0600",
            f"--ServerApp.root_dir={Path.cwd()}",
            "--KernelManager.transport=ipc",  # kernels listen on sockets in the private folder, too
            "--ContentsManager.checkpoints_class=hpctrain.servers.checkpoints.PrivateCheckpoints",
            "--LabApp.news_url=None",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]  # fmt: skip
        if os.geteuid() == 0:
            command.append("--allow-root")
        # Jupyter runs the jupyter_server_config.py of its current folder.
        server = subprocess.Popen(command, env=environment, cwd=tunnel.private)
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        listens = False
        while server.poll() is None:
            # Before, ssh would connect to nothing.
            if not listens and (listens := tunnel.socket.exists()):
                tunnel.print_how_to_connect("JupyterLab", "/lab")
            if stop_requested():  # scancel kills the ranks of a job without a signal before
                server.terminate()
            time.sleep(1)
    if server.returncode > 0:
        raise HpctrainError(f"JupyterLab ended with exit status {server.returncode}: its messages are above")


def without_home(env: Mapping[str, str], private: Path) -> dict[str, str]:
    """The variables by which Jupyter writes below `private` only; {} where it can write to the home.

    Some sites mount the home read-only on compute nodes. Configuration and kernels in it are still read.
    """
    home = Path(env.get("HOME") or "/")
    config = env.get("JUPYTER_CONFIG_DIR") or str(home / ".jupyter")
    data = env.get("JUPYTER_DATA_DIR") or str(home / ".local/share/jupyter")
    ipython = env.get("IPYTHONDIR") or str(home / ".ipython")
    with suppress(OSError):
        for folder in {atomic.existing_part(Path(each)) for each in (config, data, ipython)}:
            atomic.probe(folder)
        return {}
    return {
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, (config, env.get("JUPYTER_CONFIG_PATH")))),
        "JUPYTER_DATA_DIR": str(private / "data"),
        "JUPYTER_PATH": os.pathsep.join(filter(None, (data, env.get("JUPYTER_PATH")))),
        "IPYTHONDIR": str(private / "ipython"),
    }


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The variables without those by which this process is a rank."""
    return {
        name: value
        for name, value in env.items()
        if name not in OF_A_RANK and not name.startswith(OF_THE_LAUNCHER)
    }


def write_kernel(env: Mapping[str, str] = os.environ) -> Path:
    """Write kernel.json, with which notebooks of a site's JupyterHub run in this image; returns its path.

    It has the image's name, with a number if another image's kernel has that. Raises HpctrainError.
    """
    image, enter = enter_image(env)
    data = Path(env.get("JUPYTER_DATA_DIR") or Path.home() / ".local/share/jupyter")
    first = image.rpartition("/")[2].removesuffix(".sif")
    for name in chain([first], (f"{first} {number}" for number in count(2))):
        folder = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)
        path = data / "kernels" / folder / "kernel.json"
        if not path.exists() or _enters(path, image):
            break
    kernel = {
        "argv": [*enter, "python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": name,
        "language": "python",
    }
    with explain_os_error(f"{path}: cannot be written", "set JUPYTER_DATA_DIR to a folder of your own"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(kernel, indent=1) + "\n")
    return path


def enter_image(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """The image of a kernel, and the command that runs a program in it.

    The image is that of HPCTRAIN_RUNTIME and HPCTRAIN_IMAGE, as for the launch scripts, or by default the
    Apptainer container that this process runs in. Raises HpctrainError outside of a container.
    """
    runtime, image = env.get("HPCTRAIN_RUNTIME", "apptainer"), env.get("HPCTRAIN_IMAGE", "")
    if runtime == "shifter" and image:
        modules = env.get("HPCTRAIN_SHIFTER_MODULES")
        return image, ["shifter", f"--image={image}", *([f"--module={modules}"] if modules else [])]
    if runtime == "podman-hpc" and image:
        options = [f"--{module}" for module in env.get("HPCTRAIN_PODMAN_MODULES", "").split()]
        folders = [path for path in env.get("HPCTRAIN_BIND", "").split() if Path(path).is_dir()]
        options += [f"--volume={path}:{path}" for path in folders]
        return image, ["sh", "-c", ENTER_PODMAN_HPC, "sh", *options, image]
    for program, variable in (("apptainer", "APPTAINER_CONTAINER"), ("singularity", "SINGULARITY_CONTAINER")):
        if image := env.get(variable, ""):
            return image, [program, "exec", "--nv", image]
    raise HpctrainError(
        "--kernel cannot tell the image: run it in a container of apptainer "
        "(apptainer exec SIF hpctrain jupyter ...), or set HPCTRAIN_RUNTIME to shifter or podman-hpc, "
        "and HPCTRAIN_IMAGE to the image's name"
    )


def _enters(path: Path, image: str) -> bool:
    """Whether a kernel.json starts a kernel in this image."""
    try:
        return image in json.loads(path.read_text(encoding="utf-8"))["argv"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain jupyter", description="Run JupyterLab of the image on a compute node, for you alone."
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for the token (default: runs/jupyter/<job id>)"
    )
    parser.add_argument(
        "--kernel",
        action="store_true",
        help="write a kernel for the JupyterHub of the site instead, and exit",
    )
    return parser
