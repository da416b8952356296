"""hpctrain tensorboard: TensorBoard of runs on a compute node, for one user alone.

    sbatch launch/jupyter.sh tensorboard runs

TensorBoard itself has no token and listens on a port. Here its application runs in a server that asks for a
token and listens on a Unix socket: see tunnel.py.
"""

import argparse
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.parser import Parser
from hpctrain.servers.tunnel import TOKEN_PAGE, Tunnel, cookie_for, has_token

Application = Callable[[dict[str, Any], Callable], Iterable[bytes]]


def main(world: World, arguments: list[str]) -> None:
    """Show the runs until the job ends. Raises HpctrainError."""
    args = parser().parse_args(arguments)
    world.refuse_several("tensorboard")
    if not args.folder.is_dir():
        raise HpctrainError(
            f"{args.folder}: there is no such folder: name one with run folders in it, such as runs"
        )
    any(args.folder.iterdir())  # a thread of TensorBoard would print the stack of a PermissionError
    with Tunnel("tensorboard") as tunnel:
        start_board(args.folder, tunnel)
        tunnel.print_how_to_connect("TensorBoard")
        tunnel.wait()


def start_board(folder: Path, tunnel: Tunnel) -> None:
    """Let a thread serve TensorBoard on the socket of the tunnel, for requests with the token."""
    from tensorboard import program
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            """Log no requests: their addresses may have the token."""

    class Server(program.TensorBoardServer):
        def __init__(self, application: Application, flags: argparse.Namespace) -> None:
            guarded = require_token(application, tunnel.token)
            self._server = make_server(
                f"unix://{tunnel.socket}", 0, guarded, threaded=True, request_handler=Handler
            )
            tunnel.socket.chmod(0o600)

        def serve_forever(self) -> None:
            self._server.serve_forever()

        def get_url(self) -> str:
            return "http://localhost:8888/"

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    board = program.TensorBoard(server_class=Server)
    # With load_fast, a second process of TensorBoard would read the files and listen on a port.
    board.configure(logdir=str(folder), load_fast="false", window_title=f"{folder} - TensorBoard")
    board.launch()


def require_token(application: Application, token: str) -> Application:
    """Pass requests with the token to the application, and answer others with a page that asks for it."""

    def guarded(environ: dict[str, Any], start: Callable) -> Iterable[bytes]:
        target = f"{environ.get('PATH_INFO', '/')}?{environ.get('QUERY_STRING', '')}"
        if cookie := cookie_for(target, token):
            start("303 See Other", [("Location", "/"), ("Set-Cookie", cookie), ("Content-Length", "0")])
            return []
        if has_token(environ.get("HTTP_AUTHORIZATION", ""), environ.get("HTTP_COOKIE", ""), token):
            return application(environ, start)
        page = TOKEN_PAGE.encode()
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(page)),
            "Referrer-Policy": "no-referrer",
        }
        start("403 Forbidden", list(headers.items()))
        return [page]

    return guarded


def parser() -> Parser:
    parser = Parser(
        prog="hpctrain tensorboard", description="Run TensorBoard on a compute node, for you alone."
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        default=Path("runs"),
        help="run folders (default: %(default)s)",
    )
    return parser
