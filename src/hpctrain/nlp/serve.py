"""A fine-tuned model as a web page and a JSON service, for its user alone: `hpctrain serve FOLDER`.

The page needs no script. Programs send the texts of one example, or a list of them, and get the answers of
`hpctrain predict`:

    curl --header "Authorization: Bearer TOKEN" --data '{"text": "다시 보고 싶은 영화"}' http://127.0.0.1:8000/answer
"""

import argparse
import html
import itertools
import json
import queue
import secrets
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

from hpctrain.distributed.device import choose_device
from hpctrain.distributed.world import ALONE, World, in_job
from hpctrain.errors import HpctrainError, explain_os_error, panics_as_errors
from hpctrain.files.trust import write_private
from hpctrain.nlp.data.formats import SURROGATE
from hpctrain.nlp.models.model_folder import describe_error
from hpctrain.nlp.models.tokenizer import fit_together, load_tokenizer
from hpctrain.nlp.page import describe, make_page, read_meanings, show_answer
from hpctrain.nlp.predict import (
    add_answer_options,
    add_model_folder,
    find_model_folder,
    find_task,
    load_model,
)
from hpctrain.parser import Parser
from hpctrain.servers.tunnel import TOKEN_PAGE, Tunnel, cookie_for, has_token
from hpctrain.text import first_line

MAX_BODY = 2**20  # bytes of a request
MAX_DIGITS = 100  # of a length; Python refuses to read thousands
MAX_ROWS = 256  # examples of a request


class Model:
    """A fine-tuned model that answers the requests of many threads, as many at a time as fit a batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model. Raises HpctrainError, naming the folder."""
        device, folder = choose_device(ALONE, args.device), find_model_folder(args.folder)
        self.task, self._config = find_task(folder)
        self.about = {"Model": str(args.folder)} | describe(self.task, self._config)
        self.meanings = read_meanings(self._config)
        self._tokenizer = load_tokenizer(folder)
        self._model = load_model(self.task, folder, device)
        fit_together(self.task, folder, self._model, self._tokenizer)
        self._args, self._numbers = args, itertools.count(1)
        self._waiting: queue.SimpleQueue[tuple[list[tuple[str, ...]], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def answer(self, rows: list[tuple[str, ...]]) -> list[dict[str, Any]]:
        """The answers for rows of task.inputs. Raises HpctrainError."""
        future: Future = Future()
        self._waiting.put((rows, future))
        return future.result()

    def _work(self) -> None:
        while True:
            requests = [self._waiting.get()]
            with suppress(queue.Empty):
                while sum(len(rows) for rows, _ in requests) < self._args.batch_size:
                    requests.append(self._waiting.get_nowait())
            if len(requests) > 1 and not self._try(requests):  # one bad request must not fail the others
                for request in requests:
                    self._try([request], last=True)
            elif len(requests) == 1:
                self._try(requests, last=True)

    def _try(self, requests: list[tuple[list[tuple[str, ...]], Future]], last: bool = False) -> bool:
        """Answer requests together; returns whether that succeeded. The last error goes to the first."""
        self._args.seed = next(self._numbers)  # each request gets another generated text
        rows = [row for rows, _ in requests for row in rows]
        try:
            with panics_as_errors():
                answers, _ = self.task.answer(self._model, self._tokenizer, rows, self._config, self._args, 0)
        except Exception as error:
            if last:
                if not isinstance(error, HpctrainError):
                    error = HpctrainError(f"the model cannot answer this ({describe_error(error)})")
                requests[0][1].set_exception(error)
            return False
        found = iter(answers)
        for own, future in requests:
            future.set_result(list(itertools.islice(found, len(own))))
        return True


class Handler(BaseHTTPRequestHandler):
    """The page at /, and the JSON service at /answer, for whoever has the token."""

    model: ClassVar[Model]
    token: ClassVar[str]
    protocol_version = "HTTP/1.1"
    server_version = "hpctrain"
    sys_version = ""
    timeout = 60  # s, for a client that sends nothing

    def do_GET(self) -> None:
        """The page. With ?token=, which the printed address has, it stores the token in a cookie."""
        if self.path.partition("?")[0] != "/":
            self._send_error(
                HTTPStatus.NOT_FOUND,
                "there is nothing here: the page is at /, the JSON service at /answer (POST)",
            )
        elif cookie := cookie_for(self.path, self.token):
            self._send(HTTPStatus.SEE_OTHER, "", Location="/", Set_Cookie=cookie)
        elif self._is_allowed():
            self._send(HTTPStatus.OK, make_page(self.model.task, self.model.about))
        else:
            self._send(HTTPStatus.FORBIDDEN, TOKEN_PAGE)

    def do_POST(self) -> None:
        """The page with an answer, or the answers as JSON."""
        if not self._is_allowed():
            self.close_connection = True  # the body of the request is not read
            self._send_error(
                HTTPStatus.FORBIDDEN,
                "the token is missing or not of this server: "
                "send that of its address in a header, Authorization: Bearer TOKEN",
            )
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > MAX_DIGITS or int(length) > MAX_BODY:
            self.close_connection = True
            self._send_error(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a request has at most {MAX_BODY:,} bytes, with Content-Length",
            )
            return
        content = self.rfile.read(int(length))
        if self.path == "/":
            self._answer_form(content)
        elif self.path == "/answer":
            self._answer_json(content)
        else:
            self._send_error(HTTPStatus.NOT_FOUND, "there is nothing here: POST to / or /answer")

    def _answer_form(self, content: bytes) -> None:
        names = self.model.task.inputs
        try:
            fields = parse_qs(
                content.decode(errors="replace"), keep_blank_values=True, max_num_fields=len(names) + 1
            )
        except ValueError:
            fields = {}
        row = tuple(fields.get(name, [""])[0].replace("\r\n", "\n") for name in names)
        with suppress(KeyError, ValueError, IndexError):
            row = self.model.task.examples[int(fields["example"][0])]
        try:
            if not all(text.strip() for text in row):
                raise HpctrainError("a field is empty: write a text in each")
            shown = show_answer(row, self.model.answer([row])[0], self.model.meanings)
        except HpctrainError as error:
            shown = f'<span class="error">{html.escape(str(error))}</span>'
        answer = f'<div class="answer">{shown}</div>'
        self._send(HTTPStatus.OK, make_page(self.model.task, self.model.about, row, answer))

    def _answer_json(self, content: bytes) -> None:
        names = self.model.task.inputs
        try:
            given = json.loads(content)
            rows = [
                tuple(item[name] for name in names)
                for item in (given if isinstance(given, list) else [given])
            ]
            valid = all(isinstance(text, str) and not SURROGATE.search(text) for row in rows for text in row)
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid or not 0 < len(rows) <= MAX_ROWS:
            expected = f"a JSON object with {' and '.join(names)}, or a list of at most {MAX_ROWS} of them"
            self._send_error(HTTPStatus.BAD_REQUEST, f"expected {expected}")
            return
        try:
            answers = self.model.answer(rows)
        except HpctrainError as error:
            self._send_error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        found = answers if isinstance(given, list) else answers[0]
        self._send(HTTPStatus.OK, json.dumps(found, ensure_ascii=False) + "\n", "application/json")

    def _is_allowed(self) -> bool:
        return has_token(self.headers.get("Authorization", ""), self.headers.get("Cookie", ""), self.token)

    def _send_error(self, status: HTTPStatus, text: str) -> None:
        self._send(status, json.dumps({"error": text}, ensure_ascii=False) + "\n", "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/html", **headers: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header(
            "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'"
        )
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address of a request may have the token."""


def parser() -> Parser:
    options = Parser(
        prog="hpctrain serve", description="Show a fine-tuned model as a web page and a JSON service."
    )
    add_model_folder(options)
    add = options.add_argument
    add(
        "--host",
        help="address to listen on; any but 127.0.0.1 is open to the network "
        "(default: 127.0.0.1; in a job a Unix socket)",
    )
    add("--port", type=int, help="port to listen on; 0: a free one (default: 8000; in a job a Unix socket)")
    add_answer_options(options)
    return options


def main(world: World, arguments: list[str]) -> None:
    """Serve until a signal. Raises HpctrainError if the model cannot be loaded or the port cannot be used."""
    world.refuse_several("serve")
    args = parser().parse_args(arguments)
    Handler.model = Model(args)
    if args.host is None and args.port is None and in_job():
        with Tunnel("serve") as tunnel:
            Handler.token = tunnel.token
            server = UnixServer(tunnel.socket, Handler)
            tunnel.print_how_to_connect(f"the page of {Handler.model.task.name}")
            threading.Thread(target=server.serve_forever, daemon=True).start()
            tunnel.wait()
    else:
        serve_on_port(args)


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    # Connections that may wait for a thread. With Python's 5, Linux resets some of 200 programs.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, but no stack when a client ends its connection early, which anybody can do."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class UnixServer(Server):
    """Listens on a Unix socket of this user."""

    address_family = socket.AF_UNIX

    def __init__(self, path: Path, handler: type[BaseHTTPRequestHandler]) -> None:
        self._path = path
        super().__init__((str(path), 0), handler)

    def server_bind(self) -> None:
        """Bind the socket to its path; HTTPServer would bind it to an address and a port."""
        self.socket.bind(str(self._path))
        self._path.chmod(0o600)


def serve_on_port(args: argparse.Namespace) -> None:
    """Listen on --host and --port until a signal. Raises HpctrainError if the port cannot be used."""
    Handler.token = secrets.token_urlsafe(24)
    host, port = args.host or "127.0.0.1", 8000 if args.port is None else args.port
    try:
        server = Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise HpctrainError(
            f"{host}:{port} cannot be listened on ({first_line(error)}): give another --port, or 0"
        ) from error
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/?token={Handler.token}"
    note = args.folder / "serve.url"
    if not sys.stdout.isatty():  # the log of a job may be open to others
        with explain_os_error(f"{note}: cannot be written", "copy the run folder, or use a terminal"):
            write_private(note, address + "\n")
        print(
            f"serving {Handler.model.task.name}; the address is in {note}, which you alone can read",
            flush=True,
        )
    else:
        print(f"serving {Handler.model.task.name} at {address}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that `finally` runs
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        if not sys.stdout.isatty():
            note.unlink(missing_ok=True)
