"""Servers on a compute node for one user alone: `hpctrain jupyter`, `tensorboard` and `serve`.

A server listens on a Unix socket in a folder that only its user can enter, not on a port that everybody on
the cluster can reach. ssh forwards the socket to a port of the user's machine, which other users of that
machine can reach, so each server has a new token, too. The token is in a file that only the user can read:
everybody on the node can read command lines, and perhaps the log.

Where a site closes ssh to its nodes, launch/jupyter.sh --port opens a port of the node as well, which ssh
reaches through the login node. Other users of the cluster reach it, too; they lack the token.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.cookies import SimpleCookie
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs

from hpctrain.distributed.control import control_folder, stop_requested
from hpctrain.distributed.world import job_id
from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files.trust import make_private_folder, write_private

# A request without the token gets this page, whose form sends the token as ?token=.
TOKEN_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Token</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.6 system-ui, sans-serif; margin: 2rem auto; padding: 1rem; max-width: 30rem }
input, button { font: inherit; box-sizing: border-box; width: 100%; padding: .4rem; margin-top: .5rem }
</style>
<p>Here the token is missing or not of this server. Paste it from the file that the log names.
<form action="/"><input type="password" name="token" aria-label="Token" autofocus><button>Open</button></form>
"""

COMMAND_FILE = "port_forwarding_command"


class Tunnel:
    """The socket and the token of a server, in a with block; both are gone after it.

    `name`: the command. The token is in `folder`/token, by default in runs/<name>/<job id>.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._name, self._is_default = name, folder is None
        self._folder = folder or Path("runs") / name / job_id()
        self.token = secrets.token_urlsafe(32)

    def __enter__(self) -> "Tunnel":
        self._is_new = not self._folder.exists()
        with explain_os_error(
            f"{self._folder}: cannot be written", "start this in a folder of your own, or name one by --out"
        ):
            make_private_folder(self._folder, foreseen=self._is_default)
            self.token_file = self._folder.resolve() / "token"
            write_private(self.token_file, self.token + "\n")
        # On the disk of the node, because a socket works there only and needs a short name. In a batch job it
        # is in a folder that the launch script removes, because scancel can kill this process first.
        folder = folder_that_ssh_sees()
        control = control_folder() if folder == Path("/tmp") else None
        prefix = f"{self._name}." if control else f"hpctrain-{self._name}."
        self.private = Path(tempfile.mkdtemp(prefix=prefix, dir=control or folder))
        self.socket = self.private / "socket"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.private, ignore_errors=True)
        self.token_file.unlink(missing_ok=True)
        self.token_file.with_name(COMMAND_FILE).unlink(missing_ok=True)
        if self._is_new:
            with suppress(OSError):  # the user may have put something there
                self.token_file.parent.rmdir()

    def print_how_to_connect(self, title: str, path: str = "/") -> None:
        """Print the lines for the log of the job, and write the command into a file beside the token."""
        port = open_port(self.socket) if os.environ.get("HPCTRAIN_NODE_PORT") == "1" else None
        write_private(self.token_file.with_name(COMMAND_FILE), "\n".join(commands(self.socket, port)) + "\n")
        print(how_to_connect(title, self.socket, self.token_file, path, port=port), flush=True)

    def wait(self) -> None:
        """Wait for SIGTERM, Ctrl-C, or the end of the job, while threads of this process answer requests."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # for the end of the with block
        with suppress(KeyboardInterrupt):
            # scancel kills the ranks of a job without a signal before.
            while not stop_requested():
                time.sleep(1)


def folder_that_ssh_sees(mounts: str | None = None) -> Path:
    """A folder on the disk of the node that is not a job's own: /tmp, /var/tmp or TMPDIR.

    A site may give each job its own /tmp (job_container/tmpfs of Slurm, pam_namespace), by mounting another
    folder there, and ssh to the node sees the node's. `mounts` is /proc/self/mountinfo. Raises HpctrainError.
    """
    if mounts is None:
        mounts = Path("/proc/self/mountinfo").read_text()
    # lines as in proc(5): number, parent, device, folder in the file system, where it is mounted
    roots = {line.split()[4]: line.split()[3] for line in mounts.splitlines()}
    names = ["/tmp", "/var/tmp", os.environ.get("TMPDIR", "")]
    for name in [name for name in names if os.access(name, os.W_OK)]:
        root = roots.get(name, name)
        if (root == "/" or root.endswith(name)) and "/systemd-private-" not in root:
            return Path(name)
    raise HpctrainError(
        "this job has its own /tmp and /var/tmp, where ssh to the node does not see the socket: "
        "set TMPDIR to a folder of the node's disk that all its users see"
    )


def how_to_connect(
    title: str,
    socket: Path,
    token_file: Path,
    path: str = "/",
    env: Mapping[str, str] = os.environ,
    port: int | None = None,
) -> str:
    """The lines for the log: one command to paste, and what to open."""
    # the name by which other machines know the login node, from the file of the site
    advice = "" if env.get("HPCTRAIN_LOGIN_HOST") else " (with the name that it knows the login node by)"
    return (
        f"hpctrain: {title} starts on {os.uname().nodename}. On your own machine{advice}:\n"
        f"    {commands(socket, port, env)[0]}\n"
        f"Then open http://localhost:8888{path} and give the token in {token_file}"
    )


def commands(socket: Path, port: int | None, env: Mapping[str, str] = os.environ) -> list[str]:
    """The lines of the file port_forwarding_command: the ssh command, and what to give PuTTY."""
    user, node = env.get("USER") or str(os.getuid()), os.uname().nodename
    login = env.get("HPCTRAIN_LOGIN_HOST") or env.get("SLURM_SUBMIT_HOST") or env.get("PBS_O_HOST") or node
    if port is None:
        jump = f" -J {user}@{login}" if login != node else ""
        lines = [f"ssh -N -L 8888:{socket}{jump} {user}@{node}"]
        return [*lines, "# PuTTY reaches no sockets: submit with launch/jupyter.sh --port"]
    return [
        f"ssh -N -L 8888:{node}:{port} {user}@{login}",
        f"# PuTTY: Connection, SSH, Tunnels: source port 8888, destination {node}:{port}; or",
        f"# plink -N -L 8888:{node}:{port} {user}@{login}",
    ]


def open_port(path: Path) -> int:
    """Let a thread pass the connections to a port of this node on to the socket; returns the port."""
    server = socket.create_server(("", 0))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await pass_on(reader, writer, str(path))
        writer.close()

    async def serve() -> None:
        await (await asyncio.start_server(answer, sock=server)).serve_forever()

    threading.Thread(target=asyncio.run, args=[serve()], daemon=True).start()
    return int(server.getsockname()[1])


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str | int, head: bytes = b""
) -> None:
    """Pass a connection on to a socket, or a port of this node, in both directions, until one side ends it.

    `head`: what has been read of it already.
    """
    if isinstance(address, str):
        answers, requests = await asyncio.open_unix_connection(address)
    else:
        answers, requests = await asyncio.open_connection("127.0.0.1", address)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                sink.write(data)
                await sink.drain()
        with suppress(OSError):
            sink.write_eof()

    requests.write(head)
    try:
        await asyncio.gather(copy(reader, requests), copy(answers, writer))
    finally:
        requests.close()


def cookie_for(target: str, token: str) -> str:
    """The cookie for a request whose address has ?token= and the token; "" for others."""
    given = parse_qs(target.partition("?")[2]).get("token", [""])[0]
    return f"{'='.join(_cookie(token))}; HttpOnly; SameSite=Strict; Path=/" if _is_equal(given, token) else ""


def has_token(authorization: str, cookie: str, token: str) -> bool:
    """Whether a request has the token, in its header Authorization or in its cookie."""
    if authorization:
        return _is_equal(authorization.removeprefix("Bearer "), token)
    name, value = _cookie(token)
    with suppress(Exception):  # somebody may send a malformed cookie
        return _is_equal(SimpleCookie(cookie)[name].value, value)
    return False


def _cookie(token: str) -> tuple[str, str]:
    """The name and the value of a server's cookie. A browser sends it to all ports of the host.

    So servers have different names, and another user's server there learns no token.
    """
    digest = hashlib.sha256(f"cookie {token}".encode()).hexdigest()
    return f"hpctrain-{digest[:16]}", digest[16:]


def _is_equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())
