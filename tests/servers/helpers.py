"""Servers of a job on the cluster, reached through ssh."""

import re
import signal
import time
from contextlib import contextmanager

# Asks the server by its socket, without the token.
ASK = """
import http.client, socket, sys
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("GET", "/api/status")
print(connection.getresponse().status)
"""


def words_of_the_log(cluster, log, says, how=r"ssh -N -L 8888:(\S+/socket) -J alice@login alice@(n\d)"):
    """The ssh command of a job's log, its socket and its node, when the log says this."""
    deadline = time.monotonic() + 300
    while says not in (text := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline and "error" not in text, text
        time.sleep(1)
    command = re.search(how, text)
    return text, command[0], command[1], command[2]


@contextmanager
def opened(cluster, command):
    """The ssh command runs on the login node."""
    tunnel = cluster.start("login", *command.split(), user="alice")
    try:
        deadline = time.monotonic() + 60
        listens = "import socket; socket.create_connection(('localhost', 8888))"
        while cluster.exec("login", "python3", "-c", listens, user="alice", check=False).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield
    finally:
        tunnel.send_signal(signal.SIGTERM)
        tunnel.wait()
