"""Real processes join, or say which ranks are missing; entries of the store are signed."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from hpctrain.distributed import rendezvous
from hpctrain.distributed.rendezvous import seal, verify
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from tests.helpers import free_port, run_command


def start_ranks(ranks, *, size=2, seconds=10, late=None, **env):
    """Start these ranks of a Slurm step as real processes, which join within `seconds`.

    Rank `late` sleeps first.
    """
    code = """
import sys, time, types
from datetime import timedelta
import torch, hpctrain.distributed.rendezvous as w, hpctrain.__main__ as main
w.JOIN_TIMEOUT = timedelta(seconds=int(sys.argv[1]))
def command(world, _):
    with w.process_group(world, torch.device("cpu")):
        print(sum(w.gather(world, world.rank)))
sys.modules["meeting"] = types.SimpleNamespace(parser=None, main=command)
main.COMMANDS["meeting"] = ("meeting", "use", "")
if sys.argv.pop(2) == w.os.environ["SLURM_PROCID"]:
    time.sleep(600)
del sys.argv[1]
main.main()
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(seconds), str(late), "meeting"],
            env={
                **os.environ, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": str(size),
                "SLURM_STEP_TASKS_PER_NODE": str(size),
                "TORCH_CPP_LOG_LEVEL": "ERROR", "MASTER_ADDR": "localhost", **env,
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in ranks
    ]  # fmt: skip
    done = []
    for rank, process in zip(ranks, started, strict=True):
        if rank == late:
            continue
        out, err = process.communicate(timeout=300)
        done.append((process.returncode, out, err))
    for process in started:
        process.kill()
        process.wait()
    return done


@pytest.mark.parametrize("restart", [False, True])
def test_a_job_that_starts_again_waits_for_a_name(monkeypatch, restart):
    """A name service that was away for a moment ended the job for good."""
    answers = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), []]

    def resolve(*_):
        if isinstance(answer := answers.pop(0), OSError):
            raise answer

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for name, value in {
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "7",
        "SLURM_RESTART_COUNT": str(+restart),
    }.items():
        monkeypatch.setenv(name, value)
    if restart:
        assert rendezvous.main_address() == ("n1", 7)
    else:
        with pytest.raises(HpctrainError, match=r"MASTER_ADDR is n1 .*Temporary failure"):
            rendezvous.main_address()


@pytest.mark.slow
def test_a_rank_that_hangs_at_the_start_is_named_once():
    """Rank 2 sleeps.

    Rank 0 names it, and rank 1 exits with status 0, so that srun does not kill rank 0 before that.
    """
    first, second = start_ranks([0, 1, 2], size=3, late=2, MASTER_PORT=free_port())
    assert (
        first[0] == 1
        and "rank 2 of 3 did not join at localhost:" in first[2]
        and "(ranks 0-1 did)" in first[2]
    )
    assert first[2].count("\n") == 1
    assert second == (0, "", "")


@pytest.mark.slow
def test_all_ranks_join():
    assert start_ranks([0, 1, 2], size=3, seconds=200, MASTER_PORT=free_port()) == [(0, "3\n", "")] * 3


CROWD = """
import os, resource, socket, time
import torch
from hpctrain.distributed import rendezvous
from hpctrain.distributed.world import World
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
rank = 1 - bool(os.fork())
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    while not (peers := [socket.socket()])[0].connect_ex(("localhost", 29500)) == 0:
        time.sleep(0.1)
    peers += [socket.create_connection(("localhost", 29500)) for _ in range(500)]
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
world = World(rank, 2, rank, 2, 0, 1, "torchrun")
with rendezvous.process_group(world, torch.device("cpu")):
    print(rendezvous.gather(world, rank), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("device", "cpu_tensors", "backend"),
    [("cpu", True, "gloo"), ("cuda:1", False, "nccl"), ("cuda:1", True, "cpu:gloo,cuda:nccl")],
)
def test_the_backend_follows_the_device(monkeypatch, device, cpu_tensors, backend):
    """There is no GPU here, so the group is not made."""
    made = []
    monkeypatch.setattr(rendezvous, "_connect_store", lambda _: None)
    monkeypatch.setattr(
        rendezvous.dist, "init_process_group", lambda backend, **options: made.append(backend)
    )
    monkeypatch.setattr(rendezvous.dist, "destroy_process_group", lambda: None)
    with rendezvous.process_group(World(0, 2, 0, 2, 0, 1, "torchrun"), torch.device(device), cpu_tensors):
        assert made == [backend]


def test_two_ranks_on_one_gpu_are_one_line(monkeypatch):
    """The error is what torch 2.11 raised on a node with one GPU."""
    text = """NCCL error in: NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60
"""

    def init_process_group(*_, **__):
        raise torch.distributed.DistBackendError(text)

    monkeypatch.setattr(rendezvous, "_connect_store", lambda world: None)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", init_process_group)
    world = World(1, 2, 1, 2, 0, 1, "torchrun")
    with (
        pytest.raises(HpctrainError, match=r"rank 1 of 2.*cuda:0.*Duplicate GPU .* device 60"),
        rendezvous.process_group(world, torch.device("cuda", 0)),
    ):
        pass


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_store_with_the_connections_of_hundreds_of_ranks():
    """Of which rank 0 has more than it may have open files, unless it asks for more.

    In a network of its own, because the store asks the name service for the name of each peer.
    """
    command = 'ip link set lo up && exec "$0" -c "$1"'
    done = run_command(["unshare", "--net", "sh", "-c", command, sys.executable, CROWD], timeout=200)
    # two processes print, and their lines can mix
    assert done.stdout.replace("\n", "") == "[0, 1]" * 2, done.stderr


@pytest.mark.slow
def test_a_name_that_does_not_resolve_is_an_error_at_once():
    since = time.monotonic()
    [(status, _, error)] = start_ranks(
        [1], seconds=200, MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29500"
    )
    assert status == 1 and "MASTER_ADDR" in error and "no-such-host.invalid" in error
    assert time.monotonic() - since < 150


@pytest.mark.slow
def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        [(status, _, error)] = start_ranks([0], MASTER_PORT=str(port))
    assert status == 1 and all(name in error for name in (str(port), os.uname().nodename, "MASTER_PORT"))


@pytest.mark.slow
def test_a_rank_0_that_never_starts():
    [(status, _, error)] = start_ranks([1], seconds=3, MASTER_PORT="9")
    assert status == 1 and all(name in error for name in ("rank 1 of 2", "localhost:9 ", " 3 s"))


@pytest.mark.parametrize("place", ["TCPStore", "_wait_for_all_ranks"])
def test_an_error_of_the_store_without_a_message_is_named_by_its_type(monkeypatch, place):
    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(f"hpctrain.distributed.rendezvous.{place}", fail)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(HpctrainError, match=r"rank 1 of 2.*localhost:29500.*RuntimeError"):
        rendezvous._connect_store(World(1, 2, 0, 1, 1, 2, "slurm"))


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_ranks_that_torchrun_restarts_ignore_the_keys_of_dead_ranks(tmp_path, agents):
    """torchrun keeps its store over restarts; with two agents torch's init_process_group() fails then."""
    (tmp_path / "rank.py").write_text("""
import os, torch
from pathlib import Path
from hpctrain.distributed.rendezvous import gather, process_group
from hpctrain.distributed.world import detect
world = detect()
with process_group(world, torch.device("cpu")):
    if world.rank == 1 and not Path("died").exists():
        Path("died").touch()
        os._exit(3)
    gather(world, None)
    print(f"met {world.rank}\\n", end="", flush=True)
os._exit(0)
""")
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={agents}",
        f"--nproc-per-node={2 // agents}", "--max-restarts=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=1", "rank.py",
    ]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(agents)
    ]
    done = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * agents, done
    assert sorted(line for out, _ in done for line in out.splitlines()) == ["met 0", "met 1"]


def test_signatures_hold_for_one_rank_and_one_purpose(monkeypatch):
    plain = seal("id", "id of", 1).encode()
    assert verify(plain, "id of", 1) == "id"
    monkeypatch.setenv("HPCTRAIN_JOB_SECRET", "secret")
    entry = seal("id", "id of", 1).encode()
    assert verify(entry, "id of", 1) == "id"
    assert not any(verify(entry, *context) for context in (("id of", 2), ("joined by", 1), ()))
    assert verify(plain, "id of", 1) is None and verify(entry[:-1], "id of", 1) is None
    monkeypatch.setenv("HPCTRAIN_JOB_SECRET", "another")
    assert verify(entry, "id of", 1) is None and verify(b"\xff", "id of", 1) is None
