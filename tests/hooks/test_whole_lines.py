import os
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import hpctrain
from hpctrain.hooks import count_ranks


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


@pytest.mark.parametrize("value", ["abc", "", "-1"])
def test_a_number_of_ranks_that_is_none_does_not_end_each_import_of_torch(monkeypatch, value):
    """hpctrain itself refuses it in one line: see distributed/world.py."""
    for name in ("HPCTRAIN_WORLD_SIZE", "HPCTRAIN_TASKS_PER_NODE"):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    hooks = {entry.name: entry.load() for entry in entry_points(group="torch.backends")}
    assert {name for name in hooks if name.startswith("hpctrain")} == {
        "hpctrain", "hpctrain_exit", "hpctrain_lines",
    }  # fmt: skip
    hooks["hpctrain"]()
    hooks["hpctrain_exit"]()
    assert count_ranks() == 1
