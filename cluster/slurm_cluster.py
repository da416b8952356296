"""The test cluster (cluster/cluster.sh) as a Python object:

with Cluster(nodes=2) as cluster:
    job = cluster.wait(cluster.submit("--nodes=2", "train.sh"))
    assert job.state == "COMPLETED"
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
CLUSTER_SH = REPOSITORY / "cluster/cluster.sh"
EXTRACT_SH = REPOSITORY / "cluster/extract_environment.sh"
BUILD = REPOSITORY / "build/cluster"

# the final states of a Slurm job
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job that has ended. If signal N killed it, its exit code is 128 + N, as in a shell."""

    id: int
    state: str
    exit_code: int
    nodes: tuple[str, ...]


def missing() -> str | None:
    """The reason why this machine cannot run a cluster, or None if it can."""
    rootfs = Path(os.environ.get("CLUSTER_ROOTFS", BUILD / "rootfs"))
    if os.geteuid() != 0:
        return "a cluster needs root"
    if not (rootfs / "etc/hpctrain-rootfs").exists():
        return f"there is no root file system for a cluster; run cluster/build_rootfs.sh {rootfs}"
    return None


def project_files() -> list[str]:
    """The project's files, relative to REPOSITORY: those that .gitignore does not name.

    Git lists them. It does not in an unpacked tarball or in a clone of another user, or is missing.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True).stdout.split(b"\0")
        names = [os.fsdecode(name) for name in found if name]
    except (OSError, subprocess.CalledProcessError):
        names = _files_not_ignored()
    return [name for name in names if (REPOSITORY / name).is_file()]


def _files_not_ignored() -> list[str]:
    lines = (REPOSITORY / ".gitignore").read_text().splitlines()
    patterns = [".git", *(line.strip("/") for line in lines if line and not line.startswith("#"))]

    def ignored(path: Path) -> bool:
        # a pattern with a slash in it is a path from here, another one any name
        names = (path.name, path.relative_to(REPOSITORY).as_posix())
        return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)

    names = []
    for folder, folders, files in os.walk(REPOSITORY):
        folders[:] = [name for name in folders if not ignored(Path(folder, name))]
        paths = [Path(folder, name) for name in files]
        names += [str(path.relative_to(REPOSITORY)) for path in paths if not ignored(path)]
    return names


def bare_binds(sif: Path) -> dict[str | Path, str | Path]:
    """The `binds` of a Cluster whose nodes have the Python environment of an image without a container.

    Then `/opt/hpctrain/bin/python` runs on the nodes, and `module load pytorch` puts its folder on PATH.
    """
    subprocess.run([EXTRACT_SH, sif, BUILD / "bare"], check=True)
    return {
        BUILD / "bare" / path: f"/{path}"
        for path in ("opt/hpctrain", "usr/bin/python3.11", "usr/lib/python3.11")
    }


class Cluster:
    """A login node and compute nodes n1, n2, ... which run until the `with` block or this process ends.

    `state` is the state folder (home/, project/, log/), which is kept; by default it is a temporary one.
    `gpus` is what each node reports to Slurm. `binds` maps files and folders of the host to the path at which
    all nodes mount them.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        state: Path | None = None,
        gpus: int = 0,
        binds: Mapping[str | Path, str | Path] | None = None,
    ) -> None:
        self.nodes = nodes
        self._keep = state is not None
        if state is None:
            BUILD.mkdir(parents=True, exist_ok=True)
            state = Path(tempfile.mkdtemp(prefix="test.", dir=BUILD))
        self.state = state.resolve()
        self._completed = self.state / "log/login/jobs.log"
        self._binds = {str(source): str(target) for source, target in (binds or {}).items()}
        self._env = {
            **os.environ,
            "CLUSTER": str(self.state),
            "CLUSTER_GPUS": str(gpus),
            "CLUSTER_BIND": "\n".join(f"{source}={target}" for source, target in self._binds.items()),
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
        """Stop all nodes."""
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
        """Run cluster.sh with these arguments; `cwd` is the folder for a command on a node.

        Raises RuntimeError.
        """
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
        """Run a command on a node in a clean environment, in the user's home folder or in `cwd`.

        Raises RuntimeError.
        """
        options = [word for name, value in (env or {}).items() for word in ("-e", f"{name}={value}")]
        return self.command(
            "exec", *options, f"{host}:{user}", *cmd, check=check, input=input, timeout=timeout, cwd=cwd
        )

    def start(self, host: str, *cmd: str | Path, user: str = "root") -> subprocess.Popen[bytes]:
        """Start a command on a node; it runs until terminate() or the end of the node."""
        return subprocess.Popen(
            [CLUSTER_SH, "exec", f"{host}:{user}", *cmd], env=self._env, stdin=subprocess.DEVNULL
        )

    def submit(
        self,
        *args: str | Path,
        user: str = "alice",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        script: str | None = None,
        command: Sequence[str] = ("sbatch", "--parsable"),
    ) -> int:
        """Submit a job with `sbatch *args` and return its number; `script` is the text of a batch script."""
        done = self.exec("login", *command, *args, user=user, env=env, cwd=cwd, input=script)
        return int(re.split("[;.]", done.stdout)[0])

    def qsub(self, *args: str | Path, **options: Any) -> int:
        """submit() with `qsub *args`; `script` is what qsub reads."""
        return self.submit(*args, command=["qsub"], **options)

    def wait(self, job: int, timeout: float = 600, on_line: Callable[[str], None] | None = None) -> Job:
        """Wait until a job has ended; pass each new line of its output to `on_line`.

        Raises TimeoutError after `timeout` s.
        """
        deadline = time.monotonic() + timeout
        seen = 0
        shown = self._show(job)
        while (state := _field("JobState", shown)) not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is still {state} after {timeout} s:\n{shown}")
            # Not sbatch --wait, which polls only after 2, 10, 42 seconds.
            time.sleep(0.2)
            if on_line:
                seen = _pass_on(self.host_path(_field("StdOut", shown)), seen, on_line, ended=False)
            # A command on a node costs more than a look into the log of slurmctld, which a job enters shortly
            # before its end, and also when it is requeued.
            if f"JobId={job} " in self._completed.read_text() or time.monotonic() > deadline:
                shown = self._show(job)
        if on_line:
            _pass_on(self.host_path(_field("StdOut", shown)), seen, on_line, ended=True)
        code, signal = _field("ExitCode", shown).split(":")
        nodes = self.exec("login", "scontrol", "show", "hostnames", _field("NodeList", shown), check=False)
        return Job(job, state, 128 + int(signal) if int(signal) else int(code), tuple(nodes.stdout.split()))

    def _show(self, job: int) -> str:
        deadline = time.monotonic() + 60  # slurmctld may be starting again
        while True:
            try:
                return self.exec("login", "scontrol", "show", "job", str(job)).stdout
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def wait_until_settled(self, seconds: float = 120) -> None:
        """Wait until every node is idle or computes, and no job is completing.

        Raises TimeoutError with the states of nodes and jobs.
        """
        deadline = time.monotonic() + seconds
        states = ["login", "sinfo", "--noheader", "--format=%T"]
        while set(self.exec(*states).stdout.split()) - {"idle", "mixed", "allocated"}:
            if time.monotonic() > deadline:
                shown = self.exec("login", "sh", "-c", "sinfo --Node --long; squeue --long").stdout
                raise TimeoutError(f"a node is neither idle nor computing after {seconds} s:\n{shown}")
            time.sleep(0.2)

    def install(self, user: str = "alice") -> None:
        """Copy the project's files into ~/hpctrain of a user, with links to the images in /project."""
        archive = subprocess.run(
            ["tar", "-c", "--null", "-T", "-"],
            cwd=REPOSITORY,
            input=b"\0".join(os.fsencode(name) for name in project_files()),
            capture_output=True,
            check=True,
        ).stdout
        packed = self.state / "home" / user / "hpctrain.tar"
        packed.write_bytes(archive)
        packed.chmod(0o644)  # the umask may be 077
        unpack = "mkdir -p hpctrain && tar -xf hpctrain.tar -C hpctrain && rm -f hpctrain.tar"
        link = "for image in /project/*.sif; do ln -sfn $image hpctrain/; done"
        self.exec("login", "sh", "-c", f"{unpack} && {link}", user=user)

    def host_path(self, path: str | Path) -> Path:
        """The path on this host of a file in /home, /project or `binds` of the nodes.

        Raises ValueError for other paths.
        """
        shared = {str(self.state / name): f"/{name}" for name in ("home", "project")}
        # the innermost one: a bind may be in /project
        for source, target in sorted((shared | self._binds).items(), key=lambda pair: -len(pair[1])):
            if Path(path).is_relative_to(target):
                return Path(source) / Path(path).relative_to(target)
        raise ValueError(f"{path} is not in a folder that all nodes share")

    def crash(self, node: str) -> None:
        """Switch off a node, as a power failure would."""
        self.command("crash", node)

    def boot(self, node: str) -> None:
        """Switch on a crashed node, with a fresh disk."""
        self.command("boot", node)

    def link(self, node: str, up: bool) -> None:
        """Connect (`up`) or disconnect the network of a node."""
        self.command("link", node, "up" if up else "down")


def load_for_podman_hpc(cluster: Cluster, tar: Path) -> dict[str, str]:
    """Load /project/`tar.name` into podman-hpc as hpctrain:cpu for alice.

    Returns the variables that select it in jobs. Loading takes a minute of processor time, so its result is
    kept for other and later clusters of this machine.
    """
    env = {"SCRATCH": "/project/alice"}
    storage, kept = cluster.host_path("/project/alice/storage"), BUILD / "podman"
    made_from = (tar, BUILD / "rootfs/etc/hpctrain-rootfs")
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists() and all(kept.stat().st_mtime > path.stat().st_mtime for path in made_from):
            subprocess.run(["cp", "-a", kept, storage], check=True)
            return env
        cluster.exec(
            "login", "podman-hpc", "load", "--quiet", f"--input=/project/{tar.name}", user="alice", env=env
        )
        cluster.exec("login", "podman-hpc", "migrate", "hpctrain:cpu", user="alice", env=env)
        # migrate returns 0 even if it fails
        assert list((storage / "overlay/l").glob("*.squash"))
        shutil.rmtree(kept, ignore_errors=True)
        subprocess.run(["cp", "-a", storage, part := kept.with_suffix(".part")], check=True)
        part.touch()
        part.rename(kept)
    return env


def unpack_for_pyxis(cluster: Cluster, sif: Path) -> None:
    """Put NAME.sqsh of a SIF and its content where the stand-in for Pyxis looks: /project, /project/unpacked.

    Both are kept for other and later clusters of this machine.
    """
    image = BUILD / f"pyxis/{sif.stem}.sqsh"
    content = image.parent / "unpacked"
    image.parent.mkdir(exist_ok=True)
    make, made_from = REPOSITORY / "containers/build_sqsh.sh", [sif, REPOSITORY / "containers/build_sqsh.sh"]
    with image.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not content.exists() or content.stat().st_mtime < max(path.stat().st_mtime for path in made_from):
            subprocess.run([make, "--output", image], check=True)
            shutil.rmtree(content, ignore_errors=True)
            part = content.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            # enroot unpacks an image as its user
            unpack = f"unsquashfs -quiet -no-progress -dest /unpacked/{image.name} /image.sqsh >/dev/null"
            unpack += " && chown -Rh 1000:1000 /unpacked"
            binds = ["-b", f"{image}:/image.sqsh", "-b", f"{part}:/unpacked"]
            subprocess.run([CLUSTER_SH, "run", *binds, "--", "sh", "-c", unpack], check=True)
            part.rename(content)
        names = [image, image.with_suffix(".sqsh.digest"), content]
        subprocess.run(["cp", "-al", *names, cluster.host_path("/project")], check=True)


def _field(name: str, shown: str) -> str:
    """One field of `scontrol show job`; only StdOut, which has a line of its own, can contain spaces.

    Raises ValueError.
    """
    found = re.search(rf"(?:^|\s){name}=(.*)" if name == "StdOut" else rf"(?:^|\s){name}=(\S*)", shown)
    if not found:
        raise ValueError(f"no {name} in the output of scontrol:\n{shown}")
    return found[1]


def _pass_on(path: Path, seen: int, on_line: Callable[[str], None], ended: bool) -> int:
    """Pass the lines after the first `seen` bytes to `on_line`; return the number of bytes seen so far."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return seen
    if len(data) < seen:  # a requeued job truncates its file
        seen = 0
    end = len(data) if ended else data.rfind(b"\n") + 1
    for line in data[seen:end].decode(errors="replace").splitlines():
        on_line(line)
    return max(seen, end)
