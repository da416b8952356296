"""hpctrain proxy: any web server on a compute node, for one user alone.

    sbatch launch/jupyter.sh -- vllm serve MODEL --uds {socket}
    sbatch launch/jupyter.sh code

The program listens where {socket} or {port} stands in its words. In front of it this process listens on the
socket of tunnel.py and asks for the token, so that the program needs no login of its own.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.distributed.control import stop_requested
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, UsageError, explain_os_error
from hpctrain.parser import Parser
from hpctrain.servers.jupyter import without_launcher
from hpctrain.servers.tunnel import TOKEN_PAGE, Tunnel, cookie_for, has_token, pass_on

MAX_HEAD = 2**16  # bytes of a request before its body
HEAD_SECONDS = 60  # for a client that sends nothing
END_SECONDS = 10  # for a program that does not end by SIGTERM


def main(world: World, arguments: list[str]) -> None:
    """Run the program until it or the job ends. Raises HpctrainError."""
    if not arguments or arguments[0] in ("-h", "--help"):  # all others are the program's
        parser().print_help()
        return
    world.refuse_several("proxy")
    words = code_server(arguments[1:]) if arguments[0] == "code" else arguments
    with Tunnel("proxy") as tunnel:
        address, command = place(words, tunnel.private / "program")
        run(command, address, tunnel)


def place(words: list[str], path: Path) -> tuple[str | int, list[str]]:
    """Replace {socket} and {port} in the words. Returns where the program listens: a socket or a port."""
    if any("{socket}" in word for word in words):
        return str(path), [word.replace("{socket}", str(path)) for word in words]
    if not any("{port}" in word for word in words):
        raise UsageError(
            f"{' '.join(words)}: write {{socket}} where the program takes the socket that it listens on, "
            "or {port} for a port: vllm serve MODEL --uds {socket}"
        )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(
        f"hpctrain: warning: other users of {os.uname().nodename} reach port {port} without the token: "
        "give {socket} to a program that can listen on one",
        flush=True,
    )
    return port, [word.replace("{port}", str(port)) for word in words]


def code_server(words: list[str]) -> list[str]:
    """The words that start the user's code-server. Raises HpctrainError if there is none."""
    own = Path.home() / ".local/bin/code-server"
    program = os.environ.get("HPCTRAIN_CODE_SERVER") or shutil.which("code-server") or str(own)
    if not os.access(program, os.X_OK):
        raise HpctrainError(
            f"{program}: there is no code-server: install the standalone release into ~/.local "
            "(coder.com/docs/code-server/install), or set HPCTRAIN_CODE_SERVER to yours"
        )
    options = ["--auth", "none", "--socket", "{socket}", "--socket-mode", "600"]
    options += ["--disable-telemetry", "--disable-update-check"]
    return [program, *options, *(words or [str(Path.cwd())])]


def run(command: list[str], address: str | int, tunnel: Tunnel) -> None:
    """Start the program, serve it on the socket of the tunnel, and end it with the job.

    Raises HpctrainError.
    """
    with explain_os_error(f"{command[0]}: cannot be started", "give its path"):
        program = subprocess.Popen(command, env=without_launcher(os.environ), start_new_session=True)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    listens = False
    try:
        while program.poll() is None and not stopped and not stop_requested():
            if not listens and (listens := answers(address)):
                threading.Thread(target=asyncio.run, args=[serve(address, tunnel)], daemon=True).start()
                while not tunnel.socket.exists():
                    time.sleep(0.05)
                tunnel.print_how_to_connect(Path(command[0]).name)
            time.sleep(0.5)
    except KeyboardInterrupt:
        stopped.append(1)
    finally:
        end(program)
    if not stopped and program.returncode > 0:
        raise HpctrainError(
            f"{Path(command[0]).name} ended with exit status {program.returncode}: its messages are above"
        )


def answers(address: str | int) -> bool:
    """Whether something listens there."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(address if isinstance(address, str) else ("127.0.0.1", address)) == 0


def end(program: subprocess.Popen) -> None:
    """End a program and what it has started."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with suppress(subprocess.TimeoutExpired):
            program.wait(seconds)
            return


async def serve(address: str | int, tunnel: Tunnel) -> None:
    """Answer on the socket of the tunnel until this process ends."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS)
            if reply := refuse(head, tunnel.token):
                writer.write(reply)
                await writer.drain()
            else:
                await pass_on(reader, writer, address, head)
        writer.close()

    server = await asyncio.start_unix_server(answer, tunnel.socket, limit=MAX_HEAD)
    tunnel.socket.chmod(0o600)
    await server.serve_forever()


def refuse(head: bytes, token: str) -> bytes:
    """The reply to a request that does not reach the program: a form for the token, or its cookie.

    `head` is all before the body. b"" if the request has the token. What follows on the same connection comes
    from the same client, and is not asked again.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    target = [*first.split(" "), "", ""][1]
    if cookie := cookie_for(target, token):
        return (
            "HTTP/1.1 303 See Other\r\nLocation: /\r\n"
            f"Set-Cookie: {cookie}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        ).encode()
    # A program may use the field Authorization for a key of its own.
    if has_token("", fields.get("cookie", ""), token) or has_token(
        fields.get("authorization", ""), "", token
    ):
        return b""
    page = TOKEN_PAGE.encode()
    return (
        "HTTP/1.1 403 Forbidden\r\nContent-Type: text/html; charset=utf-8\r\nReferrer-Policy: no-referrer\r\n"
        f"Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
    ).encode() + page


def parser() -> Parser:
    from argparse import REMAINDER

    parser = Parser(
        prog="hpctrain proxy",
        description="Run a web server on a compute node, for you alone, behind a token.",
    )
    parser.add_argument(
        "words",
        nargs=REMAINDER,
        metavar="ARGUMENT",
        help="the program and its arguments, with {socket} or {port} for where it listens; "
        "or code, for your code-server",
    )
    return parser
