"""The test cluster (tests/cluster/cluster.sh) as a Python object.

with Cluster(nodes=2) as cluster:
    job = cluster.wait(cluster.submit("--nodes=2", "train.sh"))
    assert job.state == "COMPLETED"
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CLUSTER_SH = REPOSITORY / "tests/cluster/cluster.sh"
BARE_SH = REPOSITORY / "tests/cluster/bare.sh"
BUILD = REPOSITORY / "build/cluster"

# the states of a job that will not change any more
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """How a job ended. The exit code of one that was killed by signal N is 128 + N, as in a shell."""

    id: int
    state: str
    exit_code: int
    nodes: tuple[str, ...]


def missing() -> str | None:
    """What this machine lacks to run a cluster, in words; None if nothing."""
    rootfs = Path(os.environ.get("CLUSTER_ROOTFS", BUILD / "rootfs"))
    if os.geteuid() != 0:
        return "a cluster needs root"
    if not (rootfs / "etc/hpctrain-rootfs").exists():
        return f"no root file system for a cluster: tests/cluster/rootfs.sh {rootfs}"
    return None


def bare_binds(sif: Path) -> dict[str | Path, str | Path]:
    """The Python environment of an image, taken out of it, as `binds` that show it on nodes, where no container is needed for it.

    Then `/opt/hpctrain/bin/python` runs there, and `module load pytorch` puts its folder on PATH.
    """
    subprocess.run([BARE_SH, sif, BUILD / "bare"], check=True)
    return {BUILD / "bare" / path: f"/{path}" for path in ("opt/hpctrain", "usr/bin/python3.11", "usr/lib/python3.11")}


class Cluster:
    """A login node and compute nodes n1, n2, ... that run from `with` to its end, or to the end of this process.

    The state folder (home/, project/, log/) is kept if you name one, and a throw-away one if you do not.
    `binds` maps folders of the host to where all machines show them.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        state: Path | None = None,
        cpus: int = 8,
        mem: int = 16000,
        gpus: int = 0,
        mpi: str = "none",
        binds: Mapping[str | Path, str | Path] | None = None,
    ) -> None:
        self.nodes = nodes
        self._keep = state is not None
        if state is None:
            BUILD.mkdir(parents=True, exist_ok=True)
            state = Path(tempfile.mkdtemp(prefix="test.", dir=BUILD))
        self.state = state.resolve()
        self._binds = {str(source): str(target) for source, target in (binds or {}).items()}
        self._env = {
            **os.environ,
            "CLUSTER": str(self.state),
            "CLUSTER_CPUS": str(cpus),
            "CLUSTER_MEM": str(mem),
            "CLUSTER_GPUS": str(gpus),
            "CLUSTER_MPI": mpi,
            "CLUSTER_BIND": " ".join(f"{source}={target}" for source, target in self._binds.items()),
            "CLUSTER_OWNER_PID": str(os.getpid()),
        }

    def __enter__(self) -> Cluster:
        try:
            self.command("up", str(self.nodes))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all machines."""
        self.command("down", *([] if self._keep else ["--purge"]))
        if not self._keep:
            shutil.rmtree(self.state, ignore_errors=True)

    def command(
        self,
        *args: str | Path,
        check: bool = True,
        input: str | None = None,
        timeout: float | None = None,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run cluster.sh with these arguments; `cwd` is where a command on a machine runs."""
        env = {**self._env, "CLUSTER_CWD": str(cwd)} if cwd else self._env
        done = subprocess.run(
            [CLUSTER_SH, *args],
            env=env,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        if check and done.returncode != 0:
            words = " ".join(str(arg) for arg in args)
            raise RuntimeError(f"{words}: exit status {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
        return done

    def exec(
        self,
        host: str,
        *cmd: str | Path,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
        input: str | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine, with a clean environment, in the user's home or `cwd`."""
        options = [word for name, value in (env or {}).items() for word in ("-e", f"{name}={value}")]
        return self.command("exec", *options, f"{host}:{user}", *cmd, check=check, input=input, timeout=timeout, cwd=cwd)

    def start(self, host: str, *cmd: str | Path, user: str = "root") -> subprocess.Popen[bytes]:
        """Start a command on a machine that goes on until it is ended, by terminate() or with the machine."""
        return subprocess.Popen([CLUSTER_SH, "exec", f"{host}:{user}", *cmd], env=self._env, stdin=subprocess.DEVNULL)

    def submit(
        self,
        *args: str | Path,
        user: str = "alice",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        script: str | None = None,
    ) -> int:
        """Submit a job with `sbatch *args` (`script`, if given, is the text of the batch script); return its id."""
        done = self.exec("login", "sbatch", "--parsable", *args, user=user, env=env, cwd=cwd, input=script)
        return int(done.stdout.split(";")[0])

    def wait(self, job: int, timeout: float = 120, on_line: Callable[[str], None] | None = None) -> Job:
        """Wait until a job has ended; pass each new line of its output to `on_line`."""
        deadline = time.monotonic() + timeout
        seen = 0
        while True:
            # not sbatch --wait, which looks only after 2, 10, 42 seconds
            shown = self.exec("login", "scontrol", "show", "job", str(job)).stdout
            state = _field("JobState", shown)
            if on_line:
                seen = _pass_on(self.host_path(_field("StdOut", shown)), seen, on_line, state in ENDED)
            if state in ENDED:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is still {state} after {timeout} s:\n{shown}")
            time.sleep(0.2)
        code, signal = _field("ExitCode", shown).split(":")
        nodes = self.exec("login", "scontrol", "show", "hostnames", _field("NodeList", shown), check=False)
        return Job(job, state, 128 + int(signal) if int(signal) else int(code), tuple(nodes.stdout.split()))

    def install(self, user: str = "alice") -> None:
        """Put the project's files, as they are now, into ~/hpctrain of a user, and beside them links to images in /project."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = [
            name for name in subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True).stdout.split(b"\0") if name
        ]
        archive = subprocess.run(
            ["tar", "-c", "--null", "-T", "-"],
            cwd=REPOSITORY,
            input=b"\0".join(name for name in files if (REPOSITORY / os.fsdecode(name)).exists()),
            capture_output=True,
            check=True,
        ).stdout
        home = self.state / "home" / user
        (home / "hpctrain.tar").write_bytes(archive)
        unpack = "mkdir -p hpctrain && tar -xf hpctrain.tar -C hpctrain && rm -f hpctrain.tar"
        link = "for image in /project/*.sif; do ln -sfn $image hpctrain/; done"
        self.exec("login", "sh", "-c", f"{unpack} && {link}", user=user)

    def host_path(self, path: str | Path) -> Path:
        """Where this host has what the machines see as `path`, in /home, /project or a folder of `binds`."""
        shared = {str(self.state / name): f"/{name}" for name in ("home", "project")}
        for source, target in (shared | self._binds).items():
            if Path(path).is_relative_to(target):
                return Path(source) / Path(path).relative_to(target)
        raise ValueError(f"{path} is in none of the folders that all machines share")

    def crash(self, node: str) -> None:
        """Switch the power of a node off."""
        self.command("crash", node)

    def boot(self, node: str) -> None:
        """Switch a node on again, with a fresh disk."""
        self.command("boot", node)

    def link(self, node: str, up: bool) -> None:
        """Plug the network cable of a node in or out."""
        self.command("link", node, "up" if up else "down")


def _field(name: str, shown: str) -> str:
    """One value of what `scontrol show job` prints; only StdOut, alone on its line, may hold spaces."""
    found = re.search(rf"(?:^|\s){name}=(.*)" if name == "StdOut" else rf"(?:^|\s){name}=(\S*)", shown)
    if not found:
        raise ValueError(f"no {name} in what scontrol shows:\n{shown}")
    return found[1]


def _pass_on(path: Path, seen: int, on_line: Callable[[str], None], ended: bool) -> int:
    """Pass the lines after the first `seen` bytes on, and return how many bytes are seen now."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return seen
    if len(data) < seen:  # a requeued job starts its file anew
        seen = 0
    end = len(data) if ended else data.rfind(b"\n") + 1
    for line in data[seen:end].decode(errors="replace").splitlines():
        on_line(line)
    return max(seen, end)
