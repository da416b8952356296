"""A rank that is lost, and a job that is stuck, are noticed; one that is only slow is left alone."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpctrain.distributed.rendezvous import process_group
from hpctrain.distributed.watchdog import Watchdog, describe_line
from hpctrain.distributed.world import detect
from tests.helpers import write_digits
from tests.tools import warm_start

LIMIT = 6.0  # s; on a busy machine a rank may be without the processor for seconds


def become_rank(rank, size, port, folder, behave, own_nodes):
    """Five steps; then `behave` gets the watchdog and the rank; then another step."""
    if own_nodes:
        platform.node = lambda: f"n{rank}"
        os.environ["HPCTRAIN_NODE_TIMEOUT"] = str(3 * LIMIT)
    common = {
        "TORCHELASTIC_RUN_ID": "1",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
    }
    own = common | {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in own.items()}
    log = (folder / f"rank-{rank}.log").open("a")
    os.dup2(log.fileno(), sys.stdout.fileno())
    os.dup2(log.fileno(), sys.stderr.fileno())
    with process_group(detect(), torch.device("cpu")):
        watchdog = Watchdog(detect(), LIMIT, log)
        for step in range(6):
            if step == 0 and rank == 1 and behave is evaluate_on_rank_0:
                time.sleep(2 * LIMIT)  # its first batch is slow
            if step == 5:
                time.sleep(LIMIT / 4)  # until the ranks have told that they live
                behave(watchdog, rank)
            dist.all_reduce(torch.ones(1))
            watchdog.step()
        watchdog.stop()
        dist.barrier()
    os._exit(0)


def start(size, folder, behave, own_nodes=False):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    arguments = [(rank, size, port, folder, behave, own_nodes) for rank in range(size)]
    started = [warm_start.context.Process(target=become_rank, args=each) for each in arguments]
    for process in started:
        process.start()
    return started


def finish(started, folder, ends):
    """The exit status and the log of each rank, when the ranks `ends` have ended; None for those that run."""
    for rank in ends:
        started[rank].join(20 * LIMIT)
    statuses = [process.exitcode for process in started]
    for process in started:
        process.kill()
        process.join()
    return statuses, [(folder / f"rank-{rank}.log").read_text() for rank in range(len(started))]


def hang_on_rank_1(watchdog, rank):
    if rank == 1:
        time.sleep(1000)


def evaluate_on_rank_0(watchdog, rank):
    if rank == 0:
        watchdog.pause()
        time.sleep(2 * LIMIT)


def stop_rank_1(watchdog, rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_rank_0(watchdog, rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_all(watchdog, rank):
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.main_road
def test_a_job_without_a_step_ends_and_says_where_each_rank_was(tmp_path):
    statuses, logs = finish(start(2, tmp_path, hang_on_rank_1), tmp_path, ends=[0])
    assert statuses[0] == 1
    said = [line for line in logs[0].splitlines() if line.startswith("hpctrain: ")]
    assert (
        said[0]
        == f"hpctrain: error: no rank has finished a step for {LIMIT:.0f} s; --watchdog sets another limit"
    )
    assert re.search(
        r"rank 0 on \S+ had finished 5 steps and was at test_watchdog.py:\d+ become_rank\(\)", said[1]
    )
    assert re.search(
        r"rank 1 on \S+ had finished 5 steps and was at test_watchdog.py:\d+ hang_on_rank_1\(\)", said[2]
    )
    for log in logs:  # the stacks of all threads, on each rank
        assert "most recent call first" in log and "become_rank" in log


@pytest.mark.slow
def test_a_long_evaluation_and_a_slow_first_batch_are_no_alarm(tmp_path):
    statuses, logs = finish(start(2, tmp_path, evaluate_on_rank_0), tmp_path, ends=[0, 1])
    assert (statuses, logs) == ([0, 0], ["", ""])


def write_on_rank_1(watchdog, rank):
    if rank == 1:
        Path("/proc/self/cwd/stalls/file").write_text("x")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_file_system_that_stalls_is_no_alarm(tmp_path, monkeypatch):
    """As Lustre does while a server restarts."""
    monkeypatch.chdir(tmp_path)
    Path("disk").write_bytes(b"")
    os.truncate("disk", 64 * 2**20)
    Path("stalls").mkdir()
    for command in ("mkfs.ext4 -q disk", "mount -o loop disk stalls", "fsfreeze --freeze stalls"):
        subprocess.run(command.split(), check=True)
    started = start(2, tmp_path, write_on_rank_1)
    until = time.monotonic() + 2.5 * LIMIT
    while time.monotonic() < until and all(process.is_alive() for process in started):
        time.sleep(0.1)
    alive = [process.is_alive() for process in started]
    subprocess.run(["fsfreeze", "--unfreeze", "stalls"], check=True)
    ended = finish(started, tmp_path, ends=[0, 1])
    subprocess.run(["umount", "stalls"], check=True)
    assert (alive, ended) == ([True, True], ([0, 0], ["", ""]))


@pytest.mark.slow
@pytest.mark.parametrize(("behave", "lost", "watchers"), [(stop_rank_1, 1, [0]), (stop_rank_0, 0, [1, 2])])
@pytest.mark.main_road
def test_a_rank_that_is_stopped_ends_the_job_and_is_named(tmp_path, behave, lost, watchers):
    statuses, logs = finish(start(3, tmp_path, behave), tmp_path, ends={0, 1, 2} - {lost})
    message = rf"hpctrain: error: rank {lost} on \S+ has not answered for 6 s: look at its node"
    assert any(re.search(message, logs[rank]) for rank in watchers), logs
    assert statuses[lost] is None and set(statuses) == {1, None}


@pytest.mark.slow
@pytest.mark.parametrize(("behave", "lost"), [(stop_rank_1, 1), (stop_rank_0, 0)])
def test_a_node_that_may_be_dead_is_left_to_the_scheduler_first(tmp_path, behave, lost):
    """Which requeues the job of a dead node, but not one that has ended."""
    started = start(2, tmp_path, behave, own_nodes=True)
    other = 1 - lost
    started[other].join(2 * LIMIT)
    assert started[other].is_alive(), (tmp_path / f"rank-{other}.log").read_text()
    statuses, logs = finish(started, tmp_path, ends=[other])
    assert (
        statuses[other] == 1
        and f"hpctrain: error: rank {lost} on n{lost} has not answered for 18 s" in logs[other]
    ), logs


@pytest.mark.slow
@pytest.mark.main_road
def test_a_job_that_is_suspended_as_a_whole_is_no_alarm(tmp_path):
    """As by scontrol suspend, or when a laptop sleeps."""
    started = start(2, tmp_path, stop_all)
    while any(Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T" for process in started):
        time.sleep(0.1)
    time.sleep(2 * LIMIT)
    for process in started:
        os.kill(process.pid, signal.SIGCONT)
    assert finish(started, tmp_path, ends=[0, 1]) == ([0, 0], ["", ""])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["train_fsdp", "train_lightning"])
def test_the_trainers_have_a_watchdog(tmp_path, trainer):
    """tests/launch/test_failures.py stops ranks of train_ddp."""
    write_digits(tmp_path / "digits")
    options = [trainer, "--data", "digits", "--epochs", "1000", "--out", "run", "--watchdog", str(LIMIT)]
    ranks = warm_start.torchrun_ranks(4, options, dict(os.environ))
    stopped = threading.Thread(target=end_rank, args=(tmp_path / "run", 3, signal.SIGSTOP))
    stopped.start()
    done = warm_start.run(ranks, tmp_path)
    stopped.join()
    assert done.returncode == 1, done.stderr
    assert re.search(r"^hpctrain: error: rank 3 on \S+ .*\b6 s", done.stderr, re.M), done.stderr
    assert len(re.findall(r"^hpctrain: rank \d on \S+ .* \d+ steps .*\S+:\d+ ", done.stderr, re.M)) >= 4
    assert (tmp_path / "run/checkpoints/epoch-0001.pt").exists()


@pytest.mark.slow
def test_the_death_of_a_rank_is_one_line_from_each_of_the_others(tmp_path):
    write_digits(tmp_path / "digits")
    ranks = warm_start.torchrun_ranks(
        4, ["train_ddp", "--data", "digits", "--epochs", "1000", "--out", "run"], dict(os.environ)
    )
    killer = threading.Thread(target=end_rank, args=(tmp_path / "run", 3, signal.SIGKILL))
    killer.start()
    done = warm_start.run(ranks, tmp_path)
    killer.join()
    said = re.findall("^hpctrain: error: (rank-\\d+) ", done.stderr, re.M)
    assert sorted(said) == [f"rank-000{rank}" for rank in range(3)], done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "run/logs/rank-0000.log").read_text()


def end_rank(run, rank, number):
    while not (run / "metrics.jsonl").exists() or '"epoch": 2' not in (run / "metrics.jsonl").read_text():
        time.sleep(0.1)
    pid = re.search(r"pid (\d+)", (run / f"logs/rank-{rank:04d}.log").read_text())[1]
    os.kill(int(pid), number)
    if number != signal.SIGKILL:
        time.sleep(3 * LIMIT)  # until the others have ended
        os.kill(int(pid), signal.SIGKILL)


def test_without_other_ranks_or_with_0_there_is_no_thread(tmp_path):
    before = threading.active_count()
    Watchdog(detect({}), 60, sys.stderr).step()
    Watchdog(detect({}), 0, sys.stderr).step()
    assert threading.active_count() == before


def test_the_line_is_that_of_the_script():
    lines = []

    def ask():
        lines.append(describe_line(threading.get_ident()))

    ask()
    assert re.fullmatch(r"test_watchdog.py:\d+ describe_line\(\)", lines[0])  # the function called
    assert describe_line(-1) == "its end"
    # a thread that waits in a part of Python without a file
    began, go_on = threading.Event(), threading.Event()
    code = compile("began.set(); go_on.wait()", "<frozen importlib._bootstrap>", "exec")

    def import_something():
        exec(code, {"began": began, "go_on": go_on})

    thread = threading.Thread(target=import_something)
    thread.start()
    began.wait()
    line = describe_line(thread.ident)
    go_on.set()
    thread.join()
    assert re.fullmatch(r"test_watchdog.py:\d+ import_something\(\)", line)
