"""Lets a rank of a user's script end: keeps process groups that it destroys, and waits for threads of torch.

torch calls wait_at_exit() by its entry point (see pyproject.toml), in every script that imports it. So this
file imports little, and torch in functions only.
"""

import atexit
import functools
import os
import time
from pathlib import Path
from typing import Any

from hpctrain.hooks import count_ranks

INTERVAL_S = 0.002
# A thread of the script that never rests must not delay the end for longer.
LIMIT_S = 1.0
# Groups that the script has destroyed.
_kept_groups: list[Any] = []


def wait_at_exit() -> None:
    """For `import torch`: at the end of a rank, wait until the other threads of the process rest.

    A thread of Gloo frees the tensors of a collective after the call has returned, and takes Python's lock
    for it. If the interpreter is being finalized by then, the process aborts with "terminate called without
    an active exception", after the training: github.com/pytorch/pytorch/pull/179291. DDP keeps these threads
    beyond destroy_process_group().
    """
    if count_ranks() > 1 and "RANK" in os.environ:
        atexit.register(_kept_groups.clear)  # after wait_for_threads()
        atexit.register(wait_for_threads)
        keep_destroyed_groups()


def keep_destroyed_groups() -> None:
    """Keep each process group that the script destroys until its end.

    The destructor of a Gloo group waits for its threads. Where DDP has the last reference, it holds Python's
    lock meanwhile, and a thread that needs the lock to free a tensor waits forever (torch 2.13). So a rank
    never ended that freed its model after destroy_process_group(), as at the end of a function.
    rendezvous.process_group() keeps the group of hpctrain's trainers.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            _kept_groups.extend(dist.distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = destroy_process_group


def wait_for_threads() -> None:
    """Return once no other thread of this process has run for 2 ms, or after a second.

    A thread that waits for Python's lock gets it while this one sleeps, and the next look finds that it ran.
    """
    end = time.monotonic() + LIMIT_S
    before = _count_switches()
    while time.monotonic() < end:
        time.sleep(INTERVAL_S)
        now = _count_switches()
        if now == before and None not in now.values():
            return
        before = now


def _count_switches() -> dict[str, tuple[str, ...] | None]:
    """The context switches of each other thread so far, by id; None: it runs or waits for a core."""
    switches: dict[str, tuple[str, ...] | None] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields.get("Pid") != str(os.getpid()):  # the main thread is this one
            running = fields["State"].startswith("R")
            names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            switches[task.name] = None if running else tuple(fields.get(name, "") for name in names)
    return switches
