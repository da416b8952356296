"""Which process is a rank."""

import subprocess
import sys

import pytest

SAY = "from hpctrain.hooks import is_child_of_rank; print(is_child_of_rank())"
START = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {SAY!r}]))"


@pytest.mark.parametrize(
    ("words", "env", "is_child"),
    [
        ([sys.executable, "-c", SAY], {"RANK": "0"}, False),
        (["sh", "-c", f'{sys.executable} -c "$1"; :', "sh", SAY], {"RANK": "0"}, False),  # as task.sh does
        ([sys.executable, "-c", START], {"RANK": "0"}, True),
        ([sys.executable, "-c", START], {"A_RANK": "RANK=0"}, False),  # as torchrun starts ranks
    ],
)
def test_a_process_that_a_rank_starts_is_none(words, env, is_child):
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.stdout == f"{is_child}\n", done
