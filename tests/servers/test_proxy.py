"""hpctrain proxy: any server behind the token, on the socket that the printed command of ssh reaches."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.servers import proxy, tunnel
from tests.helpers import ask_socket, listening_ports
from tests.launch.helpers import HOME, NO_CONTAINER, put, wait_until, wait_until_idle
from tests.servers.helpers import opened, words_of_the_log
from tests.tools.browser import Browser

# A server of the standard library on a socket, that also speaks after an upgrade, as for WebSockets.
PROGRAM = """
import http.server, socketserver, sys

class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("Upgrade"):
            self.wfile.write(b"HTTP/1.1 101 Switching Protocols\\r\\n\\r\\n")
            self.wfile.write(self.rfile.readline().upper())
            self.close_connection = True
        else:
            super().do_GET()

    def address_string(self):
        return "client"

class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

Server(sys.argv[1], Handler).serve_forever()
"""

# A page whose script opens a WebSocket, by a server that others use.
TORNADO = """
import asyncio, sys
from tornado import httpserver, netutil, web, websocket

class Page(web.RequestHandler):
    def get(self):
        self.write('''<pre></pre><script>
            const socket = new WebSocket("ws://" + location.host + "/socket")
            socket.onopen = () => socket.send("words")
            socket.onmessage = event => document.querySelector("pre").innerText = event.data
        </script>''')

class Socket(websocket.WebSocketHandler):
    def on_message(self, message):
        self.write_message("you said " + message)

async def main():
    server = httpserver.HTTPServer(web.Application([("/", Page), ("/socket", Socket)]))
    server.add_socket(netutil.bind_unix_socket(sys.argv[1]))
    await asyncio.Event().wait()

asyncio.run(main())
"""


def head(*fields, target="/"):
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: localhost:8888", *fields, "", ""]).encode()


def test_only_the_token_passes():
    cookie = tunnel.cookie_for("/?token=abc", "abc").split(";")[0]
    for passes in (
        [f"Cookie: other=1; {cookie}"],
        [f"cookie: {cookie}", "Authorization: Basic of-the-program"],
        ["Authorization: Bearer abc"],
    ):
        assert proxy.refuse(head(*passes), "abc") == b""
    for refused in ([], ["Cookie: token=abc"], ["Authorization: Bearer ab"], ["X-Cookie: " + cookie]):
        assert proxy.refuse(head(*refused), "abc").startswith(b"HTTP/1.1 403 ")
    for damaged in (b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe\r\n: \r\n\r\n"):
        assert proxy.refuse(damaged, "abc").startswith(b"HTTP/1.1 403 ")
    login = proxy.refuse(head(target="/?token=abc"), "abc").decode()
    assert login.startswith("HTTP/1.1 303 ") and f"Set-Cookie: {cookie}; HttpOnly" in login


def test_where_a_program_listens(tmp_path, capsys):
    assert proxy.place(["serve", "--uds={socket}"], tmp_path) == (
        str(tmp_path),
        ["serve", f"--uds={tmp_path}"],
    )
    port, words = proxy.place(["serve", "{port}"], tmp_path)
    assert words == ["serve", str(port)] and f"port {port} without the token" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"\{socket\}.*\{port\}"):
        proxy.place(["serve"], tmp_path)


def test_a_code_server_that_is_missing_or_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HpctrainError, match=r"\.local/bin/code-server: .*HPCTRAIN_CODE_SERVER"):
        proxy.code_server([])
    own = tmp_path / ".local/bin/code-server"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    words = proxy.code_server(["folder"])
    assert words[0] == str(own) and words[-1] == "folder" and "{socket}" in words
    assert words[words.index("--auth") + 1] == "none"


@pytest.mark.slow
@pytest.mark.parametrize("words", [[sys.executable, "program.py", "{socket}"], ["code", "."]])
def test_a_server_of_another_project_is_for_its_user_alone(tmp_path, words):
    """code-server itself cannot be had here: a program that takes its options stands in for it."""
    (tmp_path / "page.txt").write_text("the page")
    (tmp_path / "program.py").write_text(PROGRAM)
    put(tmp_path, code_server=f'[ "$3" = --socket ] && exec {sys.executable} {tmp_path}/program.py "$4"')
    words = [sys.executable, "-m", "hpctrain", "proxy", *words]
    env = os.environ | {"SLURM_JOB_ID": "18", "SLURM_SUBMIT_HOST": "login1", "USER": "a"}
    env["HPCTRAIN_CODE_SERVER"] = f"{tmp_path}/code-server"
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT) as server:
        found = []

        def printed():
            found[:] = re.findall(r"ssh -N -L 8888:(\S+/socket) -J", (tmp_path / "log").read_text())
            return found or server.poll() is not None

        wait_until(printed)
        token = (tmp_path / "runs/proxy/18/token").read_text().strip()
        assert ask_socket(found[0], "/page.txt")[0] == 403
        assert ask_socket(found[0], "/page.txt", Authorization=f"Bearer {token}")[2] == "the page"
        with socket.socket(socket.AF_UNIX) as upgraded:
            upgraded.connect(found[0])
            upgraded.sendall(head("Upgrade: websocket", f"Authorization: Bearer {token}"))
            upgraded.sendall(b"words\n")
            upgraded.shutdown(socket.SHUT_WR)
            said = b"".join(iter(lambda: upgraded.recv(1000), b""))
        assert said.startswith(b"HTTP/1.1 101 ") and said.endswith(b"WORDS\n")
        assert listening_ports(server.pid) == []
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert not (tmp_path / "runs/proxy/18").exists()


@pytest.mark.slow
def test_a_page_with_a_websocket_in_a_browser(tmp_path):
    """By the port of the node: the page asks for the token, then the page of the program talks to it."""
    (tmp_path / "program.py").write_text(TORNADO)
    words = [sys.executable, "-m", "hpctrain", "proxy", sys.executable, "program.py", "{socket}"]
    env = os.environ | {"SLURM_JOB_ID": "18", "SLURM_SUBMIT_HOST": "login1", "HPCTRAIN_NODE_PORT": "1"}
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT) as server:
        found = []

        def printed():
            found[:] = re.findall(r"ssh -N -L 8888:\S+:(\d+) ", (tmp_path / "log").read_text())
            return found or server.poll() is not None

        wait_until(printed)
        token = (tmp_path / "runs/proxy/18/token").read_text().strip()
        with Browser() as browser:
            browser.open(f"http://127.0.0.1:{found[0]}/")
            browser.wait_for("document.querySelector('[name=token]')")
            browser.evaluate(f"document.querySelector('[name=token]').value = '{token}'")
            browser.click("button")
            browser.wait_for("document.querySelector('pre')?.innerText === 'you said words'")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@pytest.mark.slow
def test_a_program_that_ends_or_is_not_there_is_named(tmp_path):
    for words, status, text in (
        (["sh", "-c", "exit 7", "{socket}"], 1, "sh ended with exit status 7"),
        (["/no/such", "{socket}"], 1, "/no/such: cannot be started"),
        (["sh"], 2, "{socket}"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", "proxy", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == status and text in done.stderr.splitlines()[-1], done


def test_a_foreign_server_in_a_job_by_a_port_through_the_login_node(cluster):
    """As at a site that closes ssh to its nodes: the command needs ssh to the login node alone."""
    serve = ["python", "-m", "http.server", "--bind", "127.0.0.1", "{port}"]
    number = cluster.submit("launch/jupyter.sh", "--port", "--", *serve, cwd=HOME, env=NO_CONTAINER)
    log = cluster.host_path(f"{HOME}/slurm-{number}.out")
    says = "and give the token in"
    text, *_ = words_of_the_log(cluster, log, says, r"ssh -N -L 8888:(n\d:\d+) (alice)@login")
    command = re.search(r"ssh -N -L 8888:n\d:\d+ alice@login", text)[0]
    folder = cluster.host_path(f"{HOME}/runs/proxy/{number}")
    assert (folder / "port_forwarding_command").read_text().startswith(f"{command}\n")
    token = (folder / "token").read_text().strip()
    ask = "import http.client, sys; c = http.client.HTTPConnection('localhost', 8888);"
    ask += "c.request('GET', '/README.md', headers={'Authorization': 'Bearer ' + sys.argv[1]});"
    ask += "print(c.getresponse().status)"
    with opened(cluster, command):
        for given, status in ((token, "200"), ("wrong", "403")):
            done = cluster.exec("login", "python3", "-c", ask, given, user="alice")
            assert done.stdout.strip() == status
    cluster.exec("login", "scancel", str(number), user="alice")
    cluster.wait(number)
    assert not folder.exists()
    wait_until_idle(cluster)
