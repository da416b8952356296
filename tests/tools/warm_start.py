"""Ranks of hpctrain that have imported torch already, for tests that start many: that takes most of a run.

Each is a process of its own, with its own environment, working directory and output, and runs the main() of
`python -m hpctrain`.
"""

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from hpctrain.__main__ import main

TIMEOUT = 300  # s, for all ranks of a run
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000  # of <sched.h>

context = get_context("forkserver")
context.set_forkserver_preload(
    [
        "hpctrain.vision.train",
        "hpctrain.vision.train_lightning",
        "hpctrain.nlp.training.finetune",
        "torch.utils.tensorboard",
    ]
)


@dataclass(frozen=True)
class Rank:
    """A rank to start: the arguments of hpctrain, and its variables.

    With `network`, the path of a network namespace, it gets a host name and mounts of its own, and runs the
    shell commands `prepare` before hpctrain. `setup` is a function of a test module that it calls before
    hpctrain.
    """

    arguments: list[str]
    env: dict[str, str]
    network: str = ""
    prepare: str = ""
    setup: Callable[[], None] | None = None


def run(ranks: list[Rank], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run hpctrain on these ranks; the exit status is that of the first one that failed.

    After a failure the others have a minute, so that they can end by themselves.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        started = [context.Process(target=_become_hpctrain, args=(rank, cwd, outputs)) for rank in ranks]
        for process in started:
            process.start()
        deadline = time.monotonic() + TIMEOUT
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + 60)
        for process in started:
            process.kill()
            process.join()
        status = next((process.exitcode for process in started if process.exitcode), 0)
        texts = [path.read_text(errors="replace") if path.exists() else "" for path in outputs]
        return subprocess.CompletedProcess([], status, *texts)


def torchrun_ranks(
    number: int, arguments: list[str], env: dict[str, str], setup: Callable[[], None] | None = None
) -> list[Rank]:
    """Ranks as torchrun starts them on one node."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "TORCHELASTIC_RUN_ID": "warm",
        "WORLD_SIZE": number,
        "LOCAL_WORLD_SIZE": number,
        "GROUP_RANK": 0,
    }
    common |= {"GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    own = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(number)]
    return [
        Rank(arguments, env | {name: str(value) for name, value in each.items()}, setup=setup) for each in own
    ]


def _become_hpctrain(rank: Rank, cwd: Path, outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    if rank.network:
        _enter_node(rank)
    os.environ.clear()
    os.environ.update(rank.env)
    if rank.setup:
        rank.setup()
    sys.argv = ["hpctrain", *rank.arguments]
    try:
        main()
    except Exception:  # multiprocessing would print it, and not call the hook of the run
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _enter_node(rank: Rank) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(rank.network).open() as network:
        if libc.setns(network.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "no namespace for this node")
    subprocess.run(["bash", "-ec", f"mount --make-rprivate /\n{rank.prepare}"], check=True)
