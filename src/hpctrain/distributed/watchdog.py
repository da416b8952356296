"""Ends a job in which a rank is lost or no step finishes, and says what each rank was doing.

Otherwise the ranks wait for one that is stopped, or whose node or network is gone, until their collective
times out, after half an hour. From the first step on, a thread of each rank publishes heartbeats in the store
of the rendezvous: that the rank is alive, which step it has finished, and which line it executes. Entries
without the signature of the job are ignored. A second thread decides whether the job ends: it does no input
or output that could hang.

A rank is lost when its heartbeat does not change for `limit` seconds. If nothing on its node answers, the
node itself may be dead. Then the scheduler gets the time that it takes to notice (HPCTRAIN_NODE_TIMEOUT, from
the launch scripts): it requeues the job, which it would not do with a job that has ended.

A job is stuck when no rank finishes a step for the larger of `limit` and ten times the usual duration of a
step, and all of them are in an epoch of training: none evaluates, writes or waits for a file system.
"""

import faulthandler
import json
import os
import platform
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # a documented name

from hpctrain.distributed.rendezvous import connect_again, describe_call, gather, seal, verify
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, print_error

HEARTBEATS_PER_LIMIT, CHECKS_PER_LIMIT = 12, 30
MAX_RANKS_SHOWN = 8


class Heartbeat(NamedTuple):
    """What a rank publishes; a later one compares as greater."""

    clock: int  # time.monotonic_ns(), which only rises
    steps: int
    is_training: bool
    line: str


class Watchdog:
    """The watchdog of this rank (collective). `limit`: in seconds, 0: off. `log`: for all threads' stacks."""

    def __init__(self, world: World, limit: float, log: IO[str]) -> None:
        self._world, self._limit, self._log = world, limit, log
        self._on = world.size > 1 and limit > 0
        self._node_timeout = float(os.environ.get("HPCTRAIN_NODE_TIMEOUT") or 0)
        self._hosts = gather(world, platform.node()) if self._on else []
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._main_task = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._steps, self._in_epoch = 0, False
        self._last_step, self._usual_step = time.monotonic(), 0.0
        self._heartbeats: dict[int, Heartbeat] = {}
        self._changed: dict[int, tuple[Any, float]] = {}
        # Rank 0 watches all others, and each of them watches rank 0.
        self._watched = range(1, world.size) if world.rank == 0 else range(1)

    def step(self) -> None:
        """Count a finished step. The first one starts the threads."""
        if not self._on:
            return
        now = time.monotonic()
        if self._in_epoch:  # a duration without anything else in it
            duration = now - self._last_step
            self._usual_step += (duration - self._usual_step) * (0.1 if self._usual_step else 1)
        self._last_step, self._steps, self._in_epoch = now, self._steps + 1, True
        if self._steps == 1:
            for target in (self._exchange_heartbeats, self._check_ranks):
                threading.Thread(target=target, daemon=True).start()

    def pause(self) -> None:
        """Expect no step for a while: this rank evaluates or writes, until it has finished another step."""
        self._in_epoch = False

    def stop(self) -> None:
        """End the threads: the training is done."""
        self._ended.set()

    def _exchange_heartbeats(self) -> None:
        """Publish this rank's heartbeat, and read those of the ranks that it watches, until the end."""
        store = None
        while not self._ended.wait(self._limit / HEARTBEATS_PER_LIMIT):
            own = self._own_heartbeat()
            try:
                store = store or connect_again()
                store.set(_key(self._world.rank), seal(json.dumps(own), "heartbeat of", self._world.rank))
                self._read_heartbeats(store)
                ends = self._world.rank != 0 and store.check(["end"])
                ends = ends and verify(store.get("end"), "end") is not None
            except (dist.DistError, RuntimeError, ValueError, HpctrainError):
                store = None  # connect again; the other thread notices if that does not help
                continue
            if ends:
                self._dump()
                # rank 0 ends first, so that its message comes first
                time.sleep(3 * self._limit / HEARTBEATS_PER_LIMIT)
                os._exit(1)

    def _own_heartbeat(self) -> Heartbeat:
        return Heartbeat(time.monotonic_ns(), self._steps, self._is_training(), describe_line(self._main))

    def _read_heartbeats(self, store: Store) -> None:
        ranks = [rank for rank in self._watched if rank in self._heartbeats or store.check([_key(rank)])]
        if not ranks:
            return
        entries = store.multi_get([_key(rank) for rank in ranks])
        newer: dict[int, Heartbeat] = {}
        for rank, entry in zip(ranks, entries, strict=True):
            text = verify(entry, "heartbeat of", rank)
            if text is None:
                continue
            heartbeat = Heartbeat(*json.loads(text))
            # Other users can write an earlier heartbeat again, so that a lost rank seems to live.
            if heartbeat > self._heartbeats.get(rank, ()):
                newer[rank] = heartbeat
        self._heartbeats = self._heartbeats | newer  # in one step, for the other thread

    def _check_ranks(self) -> None:
        """End the process when a rank is lost or no step finishes."""
        period = self._limit / CHECKS_PER_LIMIT
        # The time while this process was stopped does not count: a scheduler may suspend the whole job.
        elapsed, last = 0.0, time.monotonic()
        while not self._ended.wait(period):
            now = time.monotonic()
            elapsed, last = elapsed + min(now - last, 2 * period), now
            heartbeats = self._heartbeats
            silence = {rank: self._unchanged_for(elapsed, rank, each) for rank, each in heartbeats.items()}
            if lost := self._find_lost(silence):
                self._end_for_lost(lost, silence[lost[0]], heartbeats)
            patience = max(self._limit, 10 * self._usual_step)
            if self._is_stuck(elapsed, patience, silence, heartbeats) and self._world.rank == 0:
                self._end(
                    f"no rank has finished a step for {patience:.0f} s; --watchdog sets another limit",
                    heartbeats,
                )

    def _find_lost(self, silence: dict[int, float]) -> list[int]:
        """The ranks that are lost; `silence` is for how many seconds each watched rank has been silent."""
        ranks = (self._world.rank, *silence)
        # Where a rank of the node answers, the node is not dead.
        alive = {self._hosts[rank] for rank in ranks if silence.get(rank, 0) <= self._limit}
        limit_of_node = max(self._limit, self._node_timeout)
        return [
            rank
            for rank, seconds in silence.items()
            if seconds > (self._limit if self._hosts[rank] in alive else limit_of_node)
        ]

    def _is_stuck(
        self, elapsed: float, patience: float, silence: dict[int, float], heartbeats: dict[int, Heartbeat]
    ) -> bool:
        """Whether all ranks answer and train, but none has finished a step for `patience` seconds."""
        all_training = (
            self._is_training()
            and len(heartbeats) == len(self._watched)
            and all(each.is_training for each in heartbeats.values())
        )
        steps = [self._steps, *(each.steps for each in heartbeats.values()), all_training]
        since_step = self._unchanged_for(elapsed, -1, steps)
        # A rank that is silent for three heartbeats is about to be lost.
        all_answer = max(silence.values(), default=0) <= 3 * self._limit / HEARTBEATS_PER_LIMIT
        return since_step > patience and all_training and all_answer and self._usual_step > 0

    def _is_training(self) -> bool:
        """Whether this rank is within an epoch, and not in a system call that waits for a file system.

        The kernel shows such a call as D, and Lustre's as I.
        """
        with suppress(OSError):
            return self._in_epoch and self._main_task.read_text().rpartition(")")[2].split()[0] not in "DI"
        return self._in_epoch

    def _unchanged_for(self, elapsed: float, key: int, value: Any) -> float:
        """For how long a value has been the same; the key is a rank, or -1 for the steps of all."""
        if key not in self._changed or self._changed[key][0] != value:
            self._changed[key] = value, elapsed
        return elapsed - self._changed[key][1]

    def _end_for_lost(self, lost: list[int], silence: float, heartbeats: dict[int, Heartbeat]) -> None:
        first = lost[0]
        others = f", nor have {len(lost) - 1} others" if len(lost) > 1 else ""
        self._end(
            f"rank {first} on {self._hosts[first]} has not answered for {silence:.0f} s{others}: "
            "look at its node and the network, and resume from the last checkpoint",
            heartbeats,
        )

    def _end(self, problem: str, heartbeats: dict[int, Heartbeat]) -> None:
        """Print the problem and what the ranks were doing; end this process. The launcher ends others."""
        lines = [f"hpctrain: error: {problem}"]
        all_known = heartbeats | {self._world.rank: self._own_heartbeat()}
        for rank, each in sorted(all_known.items())[:MAX_RANKS_SHOWN]:
            place = f"rank {rank} on {self._hosts[rank]}"
            lines.append(f"hpctrain: {place} had finished {each.steps} steps and was at {each.line}")
        # If rank 0 is lost, one rank of each node prints: first, as the log's file system may hang.
        if self._world.rank in (0, 1) or self._world.local_rank == 0:
            print_error("\n".join(lines))
        if self._world.rank == 0:
            threading.Thread(target=self._publish_end, daemon=True).start()
        self._dump()
        print(*lines, sep="\n", file=self._log, flush=True)
        # the others write their stacks, which their launcher's signal would prevent
        if self._world.rank == 0:
            time.sleep(min(10.0, 2 * self._limit / HEARTBEATS_PER_LIMIT))
        os._exit(1)

    def _publish_end(self) -> None:
        with suppress(dist.DistError, RuntimeError, ValueError):
            connect_again().set("end", seal("end", "end"))

    def _dump(self) -> None:
        """Write the stacks of all threads into the log of this rank, once."""
        if not self._ended.is_set():
            self._ended.set()
            faulthandler.dump_traceback(file=self._log, all_threads=True)


def _key(rank: int) -> str:
    """The key of a rank's heartbeat in the store."""
    return f"heartbeat of {rank}"


_OWN_FOLDER = str(Path(__file__).parents[1])


def describe_line(thread: int) -> str:
    """The file, line and function that a thread executes: the innermost outside of installed packages.

    In a call of hpctrain, that is the line of the script that has called it, and the function called.
    """
    frame = sys._current_frames().get(thread)
    # "<frozen importlib._bootstrap>" and the like are parts of Python
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    chosen = frame
    while (
        chosen
        and chosen.f_code.co_filename.startswith(libraries)
        and not chosen.f_code.co_filename.startswith(_OWN_FOLDER)
    ):
        chosen = chosen.f_back
    chosen = chosen or frame
    if not chosen:
        return "its end"
    call, place = describe_call(chosen)
    if call != "()":
        return f"{place} {call}"
    return f"{Path(chosen.f_code.co_filename).name}:{chosen.f_lineno} {chosen.f_code.co_name}()"
