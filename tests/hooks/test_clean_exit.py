"""A rank of a user's script ends, with exit status 0, while threads of torch still work."""

import os
import sys

import pytest

from tests.helpers import run_command

# Rank 0 of a world of one, in a job of as many ranks as the test says.
RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def run(folder, script, ranks):
    (folder / "script.py").write_text(script)
    return run_command(
        [sys.executable, folder / "script.py"],
        env=os.environ | RANK | {"HPCTRAIN_WORLD_SIZE": ranks}
    )  # fmt: skip


@pytest.mark.slow
def test_a_rank_ends_after_the_threads_of_torch(tmp_path):
    """Without hpctrain, torch 2.13 aborts: wait_at_exit() can go when it no longer does."""
    script = (
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', world_size=1)\n"
        "group = dist.group.WORLD  # DDP keeps it too\n"
        "def free_slowly(_):  # as a thread of Gloo on a busy machine: it needs Python's lock\n"
        "    end = time.monotonic() + 0.3\n"
        "    while time.monotonic() < end: pass\n"
        "dist.all_reduce(torch.zeros(1), async_op=True).get_future().then(free_slowly)\n"
        "dist.destroy_process_group()\n"
    )
    done = run(tmp_path, script, "2")
    assert (done.returncode, done.stderr) == (0, "")
    # On a busy machine Python may take longer to end than the thread.
    error = "terminate called without an active exception"
    assert any(error in run(tmp_path, script, "1").stderr for _ in range(5)), (
        "the script no longer shows the fault"
    )


@pytest.mark.slow
def test_a_rank_keeps_the_groups_that_its_script_destroys(tmp_path):
    """torch 2.13 frees them, which can wait forever: see keep_destroyed_groups().

    Examples of accelerate 1.15 on four ranks of a busy machine never ended, in 3 of 3 jobs.
    """
    script = (
        "import gc, weakref, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', world_size=1)\n"
        "group = weakref.ref(dist.group.WORLD)\n"
        "dist.destroy_process_group()\n"
        "gc.collect()\n"
        "print(group() is not None)\n"
    )
    for ranks, kept in (("2", "True"), ("1", "False")):
        done = run(tmp_path, script, ranks)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{kept}\n", "")
