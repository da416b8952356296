import os
import socket
import subprocess
import sys
from pathlib import Path

import hpctrain


def test_ranks_print_whole_lines():
    """Through a socket that keeps each write apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "from hpctrain.hooks.whole_lines import write_whole_lines; write_whole_lines()\n"
    code += "print('epoch', 1, 'of', 2); print('loss', 0.5); import os; os._exit(0)"
    env = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "HPCTRAIN_WORLD_SIZE": "2"}
    env["PYTHONPATH"] = str(Path(hpctrain.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], env=env, stdout=theirs, check=True)
    theirs.close()
    assert list(iter(lambda: ours.recv(1000), b"")) == [b"epoch 1 of 2\n", b"loss 0.5\n"]
    ours.close()
