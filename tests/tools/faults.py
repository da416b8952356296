"""Faults on a real Slurm cluster: does the job go on by itself, how soon, and with the same weights?

    .venv/bin/python tests/tools/faults.py                      every fault, into faults.md beside it
    .venv/bin/python tests/tools/faults.py --only SIGKILL       those whose row matches this
    .venv/bin/python tests/tools/faults.py --soak 20 --seed 1   20 minutes, with a random fault each minute

Each fault happens to a job of its own: a bundled trainer, 4 ranks on 2 nodes. Its weights are compared with
those of a job with the same command to which nothing happened.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cluster"))

from slurm_cluster import BUILD, REPOSITORY, Cluster, Job, bare_binds, load_for_podman_hpc

HOME = "/home/alice/hpctrain"
RUNS = f"{HOME}/runs"
PAGE = Path(__file__).with_suffix(".md")
SMALL = "/project/small"  # a file system of SMALL_SIZE, which a fault fills
SMALL_SIZE, SMALL_FILES = "400m", 2000
BARE = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/opt/hpctrain"}
PODMAN = {"SCRATCH": "/project/alice"}
SHIFTER = {"PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin", "SHIFTER_SIF": "/project/hpctrain-cpu.sif"}


@dataclass(frozen=True)
class Way:
    """A trainer, and what starts it."""

    trainer: str
    launcher: str
    runtime: str
    command: str
    env: dict[str, str] = field(default_factory=dict)


MPIRUN = "launch/apptainer_mpi.sh --mpi=mpirun"
HOROVODRUN = "launch/apptainer_horovod.sh --launcher=horovodrun"
DDP = Way("train_ddp", "srun", "apptainer", "launch/apptainer_ddp.sh train_ddp --epochs=8")
# Each trainer, launcher and runtime is in one of them at least.
WAYS = [
    DDP,
    Way(
        "train_lightning", "srun", "podman-hpc", "launch/podman_hpc_ddp.sh train_lightning --epochs=8", PODMAN
    ),
    # With fusion the weights of Horovod depend on timing, in the last bits, also without a fault.
    Way(
        "train_horovod",
        "horovodrun",
        "apptainer",
        f"{HOROVODRUN} train_horovod --epochs=8",
        {"HOROVOD_FUSION_THRESHOLD": "0"},
    ),
    Way("train_ddp", "torchrun", "none", "launch/apptainer_torchrun.sh train_ddp --epochs=8", BARE),
    Way("nlp.classify", "mpirun", "apptainer", f"{MPIRUN} nlp.classify --epochs=6"),
    Way("nlp.ner", "srun + PMI", "none", "launch/apptainer_mpi.sh --mpi=pmix nlp.ner --epochs=6", BARE),
    Way("nlp.pair", "srun", "apptainer", "launch/apptainer_ddp.sh nlp.pair --epochs=6"),
    Way("nlp.qa", "torchrun", "apptainer", "launch/apptainer_torchrun.sh nlp.qa --epochs=6"),
    Way("nlp.generate", "srun", "none", "launch/modules_ddp.sh nlp.generate --epochs=6", BARE),
    Way("nlp.instruct", "srun", "none", "launch/modules_ddp.sh nlp.instruct --epochs=6", BARE),
]


@dataclass
class Experiment:
    """A job, and when its lines appeared: (seconds, line)."""

    cluster: Cluster
    name: str
    way: Way
    options: list[str] = field(default_factory=list)  # of sbatch
    env: dict[str, str] = field(default_factory=dict)
    parent: str = RUNS
    saves: str = "--checkpoint-every=1s"
    lines: list[tuple[float, str]] = field(default_factory=list)
    happened: float = 0.0
    job: int = 0
    problem: str = ""

    @property
    def folder(self) -> Path:
        """The run folder, on this host."""
        return self.cluster.host_path(f"{self.parent}/{self.name}")

    def submit(self) -> int:
        """Submit the job."""
        trainer = f"{self.way.command} {self.saves} --watchdog=10 --out {self.parent}/{self.name}"
        return self.cluster.submit(*self.options, *trainer.split(), cwd=HOME, env=self.way.env | self.env)

    def run(
        self, act: "Callable[[Experiment], None] | None", when: str = r"epoch 2 step", timeout: float = 1200
    ) -> Job:
        """Submit the job, let the fault happen when a line matches, and wait for its end."""
        self.job = self.submit()
        thread: threading.Thread | None = None

        def happen() -> None:
            try:
                act(self)
            except Exception as error:  # of any kind: the row of this fault says so
                self.problem = str(error).splitlines()[0]

        def watch(line: str) -> None:
            nonlocal thread
            self.lines.append((time.monotonic(), line))
            if act and thread is None and re.search(when, line):
                self.happened = time.monotonic()
                thread = threading.Thread(target=happen)
                thread.start()

        job = self.cluster.wait(self.job, timeout=timeout, on_line=watch)
        if thread:
            thread.join()
        return job

    def root(self, node: str, script: str) -> str:
        """Run a shell script as root on a node."""
        return self.cluster.exec(node, "bash", "-c", script, check=False).stdout

    def pid(self, rank: int) -> tuple[str, str]:
        """The node and the process number there of the Python process of a rank."""
        node = "n1" if rank < 2 else "n2"
        found = self.root(
            node,
            f"for p in $(pgrep -f -- '[-]-out {self.parent}/{self.name}$'); do "
            "[[ $(readlink /proc/$p/exe) == *python* ]] || continue; "
            "! grep -qE 'torchrun|distributed.run|horovodrun|podman-hpc' /proc/$p/cmdline || continue; "
            "for name in RANK HOROVOD_RANK OMPI_COMM_WORLD_RANK PMIX_RANK SLURM_PROCID; do "
            "value=$(tr '\\0' '\\n' </proc/$p/environ | sed -n s/^$name=//p); "
            "[[ -z $value ]] || break; done; "
            f"[[ $value != {rank} ]] || echo $p; done",
        ).split()
        if not found:
            raise RuntimeError(f"no process of rank {rank} on {node}")
        return node, found[0]

    def kill(self, signal: str, rank: int) -> None:
        """Send a signal to the Python process of a rank."""
        node, pid = self.pid(rank)
        self.root(node, f"kill -{signal} {pid}")

    def after(self, pattern: str, since: float) -> float | None:
        """When the first line matched, in seconds after `since`."""
        return next((at - since for at, line in self.lines if at > since and re.search(pattern, line)), None)

    def wait_for(self, pattern: str, since: float, timeout: float = 120) -> None:
        """Wait for a line after the time `since`. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while self.after(pattern, since) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no line like {pattern} in {timeout} s")
            time.sleep(0.05)

    def repeated(self) -> int:
        """The most steps that a restart repeated, as far as the log tells: it has five lines an epoch."""
        metrics = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        steps = max(line["step"] for line in metrics if line["epoch"] == 1)
        most = reached = 0
        for _, line in self.lines:
            if step := re.search(r"epoch \d+ step (\d+) ", line):
                reached = max(reached, int(step[1]))
            elif place := re.search(r"resuming after epoch (\d+)(?: and (\d+) steps)?", line):
                most = max(most, reached - int(place[1]) * steps - int(place[2] or 0))
        return most

    def result(self) -> dict[str, Any] | None:
        """The content of result.json, if the run has it."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def compare(self, whole: dict[str, Any]) -> str:
        """Whether the final weights are those of a job to which nothing happened."""
        own = self.result()
        if own is None:
            return "no result"
        if own["weights_sha256"] == whole["weights_sha256"]:
            return "equal"
        return "DIFFERENT"


# ---- the faults ----


def usr1(run: Experiment) -> None:
    """As Slurm sends it before the time limit."""
    run.cluster.exec("login", "scancel", "--signal=USR1", "--batch", str(run.job), user="alice")


def preempt(run: Experiment) -> None:
    run.cluster.submit("--partition=urgent", "--nodelist=n1,n2", "--exclusive", script="#!/bin/sh\nsleep 5\n")


def requeue(run: Experiment) -> None:
    run.cluster.exec("login", "scontrol", "requeue", str(run.job), user="alice")


def cancel(run: Experiment) -> None:
    run.cluster.exec("login", "scancel", str(run.job), user="alice")


def kill_a_rank(run: Experiment) -> None:
    run.kill("KILL", 3)


def kill_rank_0(run: Experiment) -> None:
    run.kill("KILL", 0)


def kill_rank_0_while_it_saves(run: Experiment) -> None:
    """When the file of a checkpoint is there and has not got its final name yet."""
    node, pid = run.pid(0)
    part = f"{run.parent}/{run.name}/checkpoints/.*.tmp"
    look = f"files=({part}); ((${{#files[@]}}))"
    if not run.root(
        node, f"shopt -s nullglob; until {look}; do :; done; kill -KILL {pid}; {look} && echo left"
    ):
        raise RuntimeError("the checkpoint was complete")


def kill_rank_0_often(run: Experiment) -> None:
    """At random moments of its saves, which take the most of each second."""
    moments = random.Random(1)
    for attempt in range(20):
        began = time.monotonic()
        run.wait_for("epoch [0-9]+ step", began)
        time.sleep(2 + moments.random())
        run.kill("KILL", 0)
        run.wait_for(rf"\(restart {attempt + 1}\)", began)


def stop_a_rank(run: Experiment) -> None:
    run.kill("STOP", 3)


def kill_the_launcher(run: Experiment) -> None:
    run.root("n1", "kill -KILL $(pgrep -o srun)")


def stop_the_launcher(run: Experiment) -> None:
    run.root("n1", "kill -STOP $(pgrep srun)")


def kill_slurmd(run: Experiment) -> None:
    run.root("n2", "kill -KILL $(pidof slurmd)")
    time.sleep(25)
    run.root("n2", "slurmd")


def kill_slurmstepd(run: Experiment) -> None:
    """The keeper of the ranks of one node: they train on, and srun is never told how they end."""
    step = f"[s]lurmstepd: .{run.job}[.][0-9]"
    if "killed" not in run.root("n2", f"pkill -KILL -f '{step}' && echo killed"):
        raise RuntimeError("n2 has no slurmstepd of this job")


def kill_prted(run: Experiment) -> None:
    """The daemon of mpirun on one node; mpirun then ends with exit status 0."""
    run.root("n2", "pkill -KILL 'prted|orted'")


def kill_image_server(run: Experiment) -> None:
    """What unpacks the image on one node. Its ranks end with "Bus error"."""
    run.root("n2", "pkill -KILL squashfuse")


def suspend(run: Experiment) -> None:
    run.cluster.exec("login", "scontrol", "suspend", str(run.job))
    time.sleep(10)
    run.cluster.exec("login", "scontrol", "resume", str(run.job))


def fill_tmp(run: Experiment) -> None:
    """Before the job starts again."""
    usr1(run)
    run.wait_for("requeuing the job", run.happened)
    run.root("n2", "mount -t tmpfs -o size=64k,mode=1777 tmpfs /tmp; cat /dev/zero >/tmp/fill")
    try:
        run.wait_for("epoch 4 step", run.happened)
    finally:
        run.root("n2", "umount -l /tmp")


def replace_image(run: Experiment) -> None:
    """It is copied again while the job starts again."""
    sif = run.cluster.host_path(f"{HOME}/hpctrain-cpu.sif")  # a link
    usr1(run)
    run.wait_for("requeuing the job", run.happened)
    whole = sif.with_name("whole.sif")
    sif.rename(whole)
    try:
        with (REPOSITORY / "hpctrain-cpu.sif").open("rb") as file:
            sif.write_bytes(file.read(1 << 20))
        run.wait_for("to start in", run.happened)
    finally:
        whole.rename(sif)


def unplug(run: Experiment) -> None:
    run.cluster.link("n2", up=False)
    time.sleep(60)
    run.cluster.link("n2", up=True)


def crash(run: Experiment) -> None:
    run.cluster.crash("n2")


def crash_and_boot(run: Experiment) -> None:
    run.cluster.crash("n2")
    time.sleep(30)
    run.cluster.boot("n2")


def restart_slurmctld(run: Experiment) -> None:
    run.root("login", "kill $(pidof slurmctld); sleep 3; slurmctld")


def lose_slurmctld(run: Experiment) -> None:
    """While a rank dies."""
    run.root("login", "kill $(pidof slurmctld)")
    kill_a_rank(run)
    time.sleep(240)
    run.root("login", "slurmctld")


def start_late(run: Experiment) -> None:
    """A rank, when the job starts again."""
    usr1(run)
    run.wait_for(r"\(restart", run.happened)
    process = ""
    while not process:
        try:
            node, process = run.pid(3)
        except RuntimeError:
            time.sleep(0.1)
    run.root(node, f"kill -STOP {process}; sleep 75; kill -CONT {process}")


def forget_a_name(run: Experiment) -> None:
    """That of rank 0's node, on the other one, when the job starts again."""
    usr1(run)
    run.wait_for("requeuing the job", run.happened)
    run.root("n2", "sed 's/.*n1$//' /etc/hosts >/tmp/hosts; mount --bind /tmp/hosts /etc/hosts")
    run.wait_for(r"\(restart", run.happened)
    time.sleep(45)
    run.root("n2", "umount -l /etc/hosts; cat /etc/hosts >/tmp/hosts")  # the container has that file, too


def take_the_port(run: Experiment) -> None:
    """That of the rendezvous, after the launch script has found it free, when the job starts again."""
    usr1(run)
    run.wait_for("requeuing the job", run.happened)
    again = r"launcher .*, rendezvous n1:(\d+)"
    run.wait_for(again, time.monotonic())
    port = [match[1] for _, line in run.lines if (match := re.search(again, line))][-1]
    listen = f"import socket, time; own = socket.create_server((str(), {port})); time.sleep(60)"
    run.root("n1", f"timeout 60 /opt/hpctrain/bin/python -c '{listen}'")


def hide_a_package(run: Experiment) -> None:
    """On one node, as where its file system is not there yet, when the job starts again."""
    usr1(run)
    run.wait_for("requeuing the job", run.happened)
    package = run.root("n2", "ls -d /opt/hpctrain/lib/python3*/site-packages/torch").strip()
    run.root("n2", f"mount -t tmpfs tmpfs {package}")
    try:
        run.wait_for("to start in", run.happened)
    finally:
        run.root("n2", f"umount -l {package}")


# The image has no mount.
MOUNT_FOR_A_MINUTE = """
import ctypes, os, sys, time
libc, place = ctypes.CDLL(None, use_errno=True), sys.argv[2].encode()
def mount(source, kind, flags):
    assert libc.mount(source, place, kind, flags, None) == 0, os.strerror(ctypes.get_errno())
bind, remount, read_only = 4096, 32, 1
if sys.argv[1] == "empty":
    mount(b"tmpfs", b"tmpfs", 0)
else:
    mount(place, None, bind)
    mount(None, None, bind | remount | read_only)
time.sleep(60)
assert libc.umount2(place, 2) == 0, ctypes.get_errno()
print("done")
"""


def mount(kind: str, run: Experiment, place: str) -> None:
    """Make a folder read-only or empty for a minute, in the container of rank 0."""
    node, pid = run.pid(0)
    inside = f"nsenter --target {pid} --mount -- /opt/hpctrain/bin/python -c '{MOUNT_FOR_A_MINUTE}'"
    if "done" not in run.root(node, f"{inside} {kind} {place}"):
        raise RuntimeError("could not be mounted")


def read_only(run: Experiment) -> None:
    mount("read-only", run, f"{run.parent}/{run.name}")


def lose_file_system(run: Experiment) -> None:
    """As an automount that is gone: the folder of all runs is empty."""
    mount("empty", run, run.parent)


def requeue_and_hold(run: Experiment) -> None:
    run.cluster.exec("login", "scontrol", "requeuehold", str(run.job), user="alice")
    time.sleep(10)
    run.cluster.exec("login", "scontrol", "release", str(run.job), user="alice")


def fill(run: Experiment) -> None:
    big = run.cluster.host_path(f"{SMALL}/big")
    with big.open("ab") as file:
        # To the last byte. Old checkpoints are removed meanwhile.
        size = 1 << 20
        while run.after("No space left", run.happened) is None or time.monotonic() - run.happened < 20:
            try:
                os.write(file.fileno(), bytes(size))
                size = 1 << 20
            except OSError:
                size = max(size // 2, 1)
                time.sleep(0.001 if size > 1 else 0.05)
    big.unlink()


def fill_inodes(run: Experiment) -> None:
    """To the last file."""
    folder, number = run.cluster.host_path(f"{SMALL}/many"), 0
    folder.mkdir()
    while run.after("No space left", run.happened) is None or time.monotonic() - run.happened < 20:
        try:
            (folder / str(number)).touch(exist_ok=False)
            number += 1
        except OSError:
            time.sleep(0.001)
    shutil.rmtree(folder)


def fill_shared_memory(run: Experiment) -> None:
    """The workers of loaders pass batches through it. It is memory, so it is made small, not filled."""
    used = "$(($(df --output=used /dev/shm | tail -n 1) + 4))k"
    run.root("n2", f"until mount -o remount,size={used} /dev/shm; do :; done 2>/dev/null")
    try:
        run.wait_for("requeuing the job", run.happened)
    finally:
        run.root("n2", "mount -o remount,size=50% /dev/shm")


# All nodes have the clock of this host. This library, preloaded into the processes of a job, sets it back
# when a file appears.
CLOCK = """
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME && !access(getenv("CLOCK_STEPPED"), F_OK)) now->tv_sec -= 3600;
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
"""


def step_the_clock(run: Experiment) -> None:
    run.cluster.host_path(f"{SMALL}/stepped").touch()
    time.sleep(60)
    run.cluster.host_path(f"{SMALL}/stepped").unlink()


def start_another_job(run: Experiment) -> None:
    """On the other nodes, in the same run folder."""
    again = replace(run.way, command=f"{run.way.command} --resume auto")
    other = Experiment(run.cluster, run.name, again, ["--nodelist=n3,n4"])
    number = other.submit()
    job = run.cluster.wait(number, timeout=200)
    output = run.cluster.host_path(f"{HOME}/slurm-{number}.out").read_text()
    if job.state != "FAILED" or f"job {run.job}" not in output.rpartition("hpctrain: error:")[2]:
        raise RuntimeError(f"the second job is {job.state}")


def harm(change: Callable[[Path], object]) -> Callable[[Experiment], None]:
    """Stop the job, and change its newest checkpoint before it starts again."""

    def act(run: Experiment) -> None:
        usr1(run)
        run.wait_for("requeuing the job", run.happened)
        change(max((run.folder / "checkpoints").glob("epoch-*.pt"), key=lambda path: path.stat().st_mtime))

    return act


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_pickle(path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple:
            return (exec, ("open('/tmp/evil', 'w')",))

    path.write_bytes(pickle.dumps(Evil()))


@dataclass(frozen=True)
class Fault:
    """What happens to a job, and what that job needs for it."""

    act: Callable[[Experiment], None]
    options: list[str] = field(default_factory=lambda: ["--nodelist=n1,n2"])
    env: dict[str, str] = field(default_factory=dict)
    parent: str = RUNS
    way: Way = DDP


WITH_SPARE = replace(DDP, command="launch/apptainer_ddp.sh --spare-nodes=1 train_ddp --epochs=8")
PODMAN_WITH_SPARE = Way(
    "train_ddp", "srun", "podman-hpc", "launch/podman_hpc_ddp.sh --spare-nodes=1 train_ddp --epochs=8", PODMAN
)
SHIFTER_WITH_SPARE = Way(
    "train_ddp",
    "srun",
    "shifter (stand-in)",
    "launch/shifter_ddp.sh --spare-nodes=1 train_ddp --epochs=8",
    SHIFTER,
)
LONG = Way("train_ddp", "srun", "apptainer", "launch/apptainer_ddp.sh train_ddp --epochs=60")
SPARE = ["--exclude=n3"]  # n1 and n2, and n4 as a spare
LIGHTNING = Way("train_lightning", "srun", "apptainer", "launch/apptainer_ddp.sh train_lightning --epochs=8")
HOROVOD = Way(
    "train_horovod",
    "mpirun",
    "apptainer",
    "launch/apptainer_horovod.sh --launcher=mpirun train_horovod --epochs=8",
    {"HOROVOD_FUSION_THRESHOLD": "0"},
)
FSDP = Way(
    "nlp.classify --strategy fsdp",
    "srun",
    "apptainer",
    "launch/apptainer_ddp.sh nlp.classify --strategy=fsdp --epochs=6",
)
OWN = Way(
    "own script",
    "srun",
    "apptainer",
    "launch/apptainer_ddp.sh examples/own-script/2_nothing_lost.py --data=photos --batch-size=16 --epochs=7",
)
FOR_ALL = {  # these happen in every one of WAYS
    "time limit (USR1 to the batch script, as Slurm sends it)": Fault(usr1),
    "preemption by a job of higher priority": Fault(preempt),
    "scontrol requeue": Fault(requeue),
    "SIGKILL of a rank": Fault(kill_a_rank),
    "SIGKILL of rank 0": Fault(kill_rank_0),
    "SIGSTOP of a rank (--watchdog 10)": Fault(stop_a_rank),
}
SPARE_IN_JOB = "node crashed, with a spare in the job (--spare-nodes=1)"
FAULTS = FOR_ALL | {
    "SIGKILL of rank 0 while it saves": Fault(kill_rank_0_while_it_saves),
    "SIGKILL of rank 0, 20 times while it saves": Fault(
        kill_rank_0_often, env={"HPCTRAIN_REQUEUES": "20"}, way=LONG
    ),
    "SIGKILL of the launcher": Fault(kill_the_launcher),
    "SIGSTOP of the launcher, time limit 4 min": Fault(stop_the_launcher, ["--nodelist=n1,n2", "--time=4"]),
    "slurmd of a node killed, started after 25 s": Fault(kill_slurmd),
    "slurmstepd of a node killed": Fault(kill_slurmstepd),
    "mpirun's daemon of a node killed": Fault(
        kill_prted, way=replace(DDP, launcher="mpirun", command=f"{MPIRUN} train_ddp --epochs=8")
    ),
    "server of the image killed on a node (squashfuse)": Fault(kill_image_server),
    "job suspended for 10 s": Fault(suspend),
    "scontrol requeuehold, released after 10 s": Fault(requeue_and_hold),
    "/tmp of a node full when the job starts again": Fault(fill_tmp),
    "half an image when the job starts again": Fault(replace_image),
    "network of a node down for 60 s": Fault(unplug, SPARE),
    "node crashed, with a spare": Fault(crash, SPARE),
    SPARE_IN_JOB: Fault(crash, ["--no-kill", "--nodes=3"], way=WITH_SPARE),
    "node crashed, no spare; booted after 30 s": Fault(crash_and_boot),
    "slurmctld restarted": Fault(restart_slurmctld),
    "slurmctld away for 4 min while a rank dies": Fault(lose_slurmctld),
    "a rank 75 s late when the job starts again": Fault(start_late),
    "the name of a node unknown for 45 s when the job starts again": Fault(forget_a_name),
    "the port of the rendezvous taken when the job starts again": Fault(take_the_port),
    "a package missing on a node when the job starts again": Fault(
        hide_a_package,
        way=replace(DDP, runtime="none", command="launch/modules_ddp.sh train_ddp --epochs=8", env=BARE),
    ),
    "disk full for 20 s": Fault(fill, parent=SMALL),
    "no inode left for 20 s": Fault(fill_inodes, parent=SMALL),
    "/dev/shm of a node full, with workers of a loader": Fault(fill_shared_memory, way=OWN),
    "run folder read-only for 60 s": Fault(read_only),
    "file system of the run folder gone for 60 s": Fault(lose_file_system),
    "newest checkpoint truncated": Fault(harm(lambda path: path.write_bytes(path.read_bytes()[:-1000]))),
    "a bit of the newest checkpoint flipped": Fault(harm(flip)),
    "newest checkpoint replaced by a pickle with code": Fault(harm(put_pickle)),
    "clock stepped back an hour, for 60 s": Fault(
        step_the_clock,
        env={"APPTAINERENV_LD_PRELOAD": f"{SMALL}/clock.so", "CLOCK_STEPPED": f"{SMALL}/stepped"},
    ),
    "a second job in the same run folder": Fault(start_another_job),
    "scancel by the user": Fault(cancel),
}
IN_OTHER_WAYS = [
    ("SIGKILL of rank 0 while it saves", WAYS[-1]),
    (SPARE_IN_JOB, PODMAN_WITH_SPARE),
    (SPARE_IN_JOB, SHIFTER_WITH_SPARE),
]
# What is most unlike in other trainers: how ranks meet and end, how they save, and what starts them again.
TELLING = [
    "SIGKILL of a rank",
    "slurmstepd of a node killed",
    "/tmp of a node full when the job starts again",
    "node crashed, no spare; booted after 30 s",
]
IN_OTHER_WAYS += [(name, way) for way in (LIGHTNING, HOROVOD, FSDP, OWN) for name in TELLING]
IN_OTHER_WAYS += [("mpirun's daemon of a node killed", way) for way in (HOROVOD, WAYS[4])]


# ---- the table ----

HEAD = [
    "fault",
    "trainer",
    "launcher",
    "runtime",
    "job",
    "noticed after",
    "trains again after",
    "of this, Slurm",
]
HEAD += ["steps repeated", "starts", "weights", "measured"]
MARKER = "<!-- written by make faults -->\n"


START_ON_ALL = ["login", "timeout", "30", "srun", "--nodes=4", "true"]


class Laboratory:
    """The cluster, and the weights of each way when nothing happens."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._results: dict[str, dict[str, Any]] = {}
        self._number = 0

    def reference(self, way: Way, timeout: float = 1200, nodes: str = "n1,n2") -> dict[str, Any]:
        """The result of a job to which nothing happens. It saves seldom, as saves take longer than steps."""
        way = replace(way, command=way.command.replace("--spare-nodes=1 ", ""))
        if way.command not in self._results:
            name = f"whole-{len(self._results)}"
            options = [f"--nodelist={nodes}", f"--time={timeout / 60:.0f}"]
            whole = Experiment(self.cluster, name, way, options, saves="")
            job = whole.run(None, timeout=timeout)
            if job.state != "COMPLETED":
                raise SystemExit("\n".join(line for _, line in whole.lines))
            self._results[way.command] = whole.result() or {}
        return self._results[way.command]

    def measure(self, name: str, fault: Fault, way: Way) -> list[str]:
        """Let a fault happen; the cells of its row."""
        self._number += 1
        expected = self.reference(way)  # first: after the fault, a node may be down
        run = Experiment(self.cluster, f"fault-{self._number}", way, fault.options, fault.env, fault.parent)
        job = run.run(fault.act)
        (BUILD.parent / "faults").mkdir(exist_ok=True)
        log = "".join(f"{at - run.happened:8.2f} {line}\n" for at, line in run.lines)
        (BUILD.parent / f"faults/{self._number}.log").write_text(f"{name}, {way}\n{log}")
        if run.problem or not run.happened:
            raise RuntimeError(run.problem or "the fault did not happen")
        shown = self.cluster.exec("login", "scontrol", "show", "job", str(job.id)).stdout
        noticed = run.after(
            r"error|ending early|requeuing|CANCELLED|DUE TO|[Tt]erminated|\(restart|trying again",
            run.happened,
        )
        restarted = run.after(r"\(restart", run.happened)
        resumed = run.after(r"resuming after", run.happened)
        running = None if resumed is None else run.after(r"epoch \d+ step \d+ ", run.happened + resumed)
        waited = None
        if restarted is not None:
            waited = restarted - max(
                (at - run.happened for at, _ in run.lines if at - run.happened < restarted), default=0
            )

        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f} s"

        return [
            name, way.trainer, way.launcher, way.runtime, job.state, seconds(noticed),
            seconds(None if running is None else resumed + running), seconds(waited), str(run.repeated()),
            str(int(re.search(r"Restarts=(\d+)", shown)[1]) + 1), run.compare(expected),
        ]  # fmt: skip

    def wait_until_whole(self) -> None:
        """Boot and reconnect what a fault left, and wait until all nodes are idle."""
        for node in (f"n{i}" for i in range(1, self.cluster.nodes + 1)):
            if self.cluster.command("exec", f"{node}:root", "true", check=False).returncode != 0:
                self.cluster.boot(node)  # it has no link before
            self.cluster.link(node, up=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            self.cluster.exec("login", "scontrol", "update", "nodename=ALL", "state=resume", check=False)
            states = self.cluster.exec(
                "login", "sinfo", "--noheader", "--Node", "--format=%T", check=False
            ).stdout.split()
            # A node that has booted may be idle before its slurmd starts steps.
            if (
                set(states) == {"idle"}
                and self.cluster.exec(*START_ON_ALL, user="alice", check=False).returncode == 0
            ):
                return
            time.sleep(1)
        raise TimeoutError(f"the nodes are {states}")

    def soak(self, minutes: float, seed: int) -> None:
        """One long job with a random fault each minute. Raises SystemExit if it ends with other weights."""
        chosen = random.Random(seed)
        timeout = minutes * 60 + 1800
        names = [
            *FOR_ALL,
            "SIGKILL of the launcher",
            "slurmstepd of a node killed",
            "server of the image killed on a node (squashfuse)",
            "job suspended for 10 s",
            "scontrol requeuehold, released after 10 s",
            "slurmctld restarted",
            "network of a node down for 60 s",
        ]
        # So many epochs do two cores beside such faults, and the reference at the same time on other nodes.
        # Without --lr-decay=1 the rate is soon almost 0, and lost steps would not change the weights.
        trainer = f"train_ddp --epochs={int(minutes * 6)} --lr-decay=1"
        way = Way("train_ddp", "srun", "apptainer", f"launch/apptainer_ddp.sh {trainer}")
        others = ThreadPoolExecutor(max_workers=1)
        whole = others.submit(self.reference, way, timeout, "n3,n4")
        run = Experiment(self.cluster, "soak", way, ["--nodelist=n1,n2"], {"HPCTRAIN_REQUEUES": "1000"})

        def act(run: Experiment) -> None:
            while (
                time.monotonic() - run.happened < minutes * 60
                and run.after("weights .* are in", run.happened) is None
            ):
                name = chosen.choice(names)
                began = time.monotonic()
                print(f"{began - run.happened:6.0f} s: {name}", flush=True)
                try:
                    FAULTS[name].act(run)
                except RuntimeError as error:  # between two attempts it has no ranks
                    print(f"         {error}", flush=True)
                time.sleep(max(0.0, 40 + 40 * chosen.random() - (time.monotonic() - began)))

        job = run.run(act, timeout=timeout)
        starts = len({line for _, line in run.lines if "(restart" in line}) + 1
        reference = whole.result()
        print(f"{job.state}, {starts} starts, weights: {run.compare(reference)}")
        if run.compare(reference) != "equal" or run.problem:
            raise SystemExit(run.problem or "not as promised")


def write_rows(rows: list[list[str]]) -> None:
    """Write rows into the page, in the place of those with the same fault, trainer, launcher and runtime."""
    before, _, table = PAGE.read_text().partition(MARKER)
    found = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()[2:]]
    table_rows = {tuple(row[:4]): row for row in [*found, *rows]}
    lines = [HEAD, ["---"] * len(HEAD), *table_rows.values()]
    PAGE.write_text(before + MARKER + "".join(f"| {' | '.join(row)} |\n" for row in lines))


def main() -> None:
    """Run the faults, print the rows, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        help="run the faults whose row matches this regular expression; its cells are joined by ' | '",
    )
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="one job, with a random fault each minute"
    )
    parser.add_argument("--seed", type=int, default=1, help="of --soak (default: %(default)s)")
    args = parser.parse_args()
    cells = [(name, fault, fault.way) for name, fault in FAULTS.items()]
    cells += [(name, fault, way) for way in WAYS[1:] for name, fault in FOR_ALL.items()]
    cells += [(name, FAULTS[name], way) for name, way in IN_OTHER_WAYS]
    cells = [
        cell
        for cell in cells
        if re.search(args.only, " | ".join([cell[0], cell[2].trainer, cell[2].launcher, cell[2].runtime]))
    ]
    sif = REPOSITORY / "hpctrain-cpu.sif"
    tar = REPOSITORY / "build/hpctrain-cpu.tar"
    describe = ["git", "-C", REPOSITORY, "describe", "--always", "--dirty"]
    revision = subprocess.run(describe, capture_output=True, text=True).stdout.strip() or "unknown"
    wrong = []
    with tempfile.TemporaryDirectory() as small:
        subprocess.run(
            [
                "mount",
                "-t",
                "tmpfs",
                "-o",
                f"size={SMALL_SIZE},nr_inodes={SMALL_FILES},mode=1777",
                "small",
                small,
            ],
            check=True,
        )
        subprocess.run(["tcc", "-shared", "-o", f"{small}/clock.so", "-"], input=CLOCK, text=True, check=True)
        binds = {sif: f"/project/{sif.name}", tar: f"/project/{tar.name}", small: SMALL, **bare_binds(sif)}
        binds[REPOSITORY / "tests/standins"] = "/opt/standins"
        try:
            with Cluster(nodes=4, binds=binds) as cluster:
                cluster.install("alice")
                cluster.exec("login", "mkdir", "/project/alice", user="alice")
                photos = cluster.host_path("/home/alice/hpctrain/photos")
                make_photos = REPOSITORY / "examples/own-script/make_photos.py"
                subprocess.run([sys.executable, make_photos, photos], check=True)
                laboratory = Laboratory(cluster)
                if args.soak:
                    laboratory.soak(args.soak, args.seed)
                    return
                if any(way.runtime == "podman-hpc" for _, _, way in cells):
                    load_for_podman_hpc(cluster, tar)
                for name, fault, way in cells:
                    try:
                        row = laboratory.measure(name, fault, way)
                    except (TimeoutError, RuntimeError, OSError) as error:
                        row = [name, way.trainer, way.launcher, way.runtime]
                        row += [str(error).splitlines()[0][:80], *"-----", "not as promised"]
                    write_rows([[*row, f"{time.strftime('%Y-%m-%d')} {revision}"]])
                    print(f"| {' | '.join(row)} |", flush=True)
                    if not row[-1].startswith("equal") and name != "scancel by the user":
                        wrong.append(row[0])
                    laboratory.wait_until_whole()
        finally:
            subprocess.run(["umount", "--lazy", small], check=True)
    if wrong:
        raise SystemExit(f"not as promised: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
