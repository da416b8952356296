"""Ends a job in which a rank is lost or no step finishes, and says what each rank was doing.

Otherwise the ranks wait for one that is stopped, or whose node or network is gone, until their collective
times out, after half an hour. From the first step on, a thread of each rank tells rank 0 through the store of
the rendezvous that the rank is alive, which step it has finished, and which line it executes. What others
write there is not signed, and ignored. A second thread judges: it does no input or output that could hang.

A rank is lost when its news do not change for `limit` seconds. If nothing on its node answers, the node
itself may be dead. Then the scheduler gets the time that it takes to notice (HPCTRAIN_NODE_TIMEOUT, from the
launch scripts): it requeues the job, which it would not do with a job that has ended.

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
from typing import IO, Any

import torch.distributed as dist

from hpctrain.distributed.rendezvous import connect_again, gather, seal, verify
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, print_error

NEWS_PER_LIMIT, JUDGMENTS_PER_LIMIT = 12, 30
MOST_RANKS_SHOWN = 8

# What a rank tells: its clock, which only rises, its finished steps, whether it is within an epoch, its line.
News = tuple[int, int, bool, str]


class Watchdog:
    """The watchdog of this rank. `limit` is in seconds; 0 turns it off. `log` gets the stacks of all threads.

    To create one is a collective call.
    """

    def __init__(self, world: World, limit: float, log: IO[str]) -> None:
        self._world, self._limit, self._log = world, limit, log
        self._on = world.size > 1 and limit > 0
        self._node_timeout = float(os.environ.get("HPCTRAIN_NODE_TIMEOUT") or 0)
        self._hosts = gather(world, platform.node()) if self._on else []
        self._ended = threading.Event()
        self._main, self._main_task = (
            threading.get_ident(),
            Path(f"/proc/self/task/{threading.get_native_id()}/stat"),
        )
        self._steps, self._in_epoch = 0, False
        self._last_step, self._usual_step = time.monotonic(), 0.0
        self._news: dict[int, News] = {}
        self._changed: dict[int, tuple[Any, float]] = {}
        # Rank 0 watches all others, and each of them watches rank 0.
        self._watched = range(1, world.size) if world.rank == 0 else range(1)

    def step(self) -> None:
        """A step is finished. The first one starts the threads."""
        if not self._on:
            return
        now = time.monotonic()
        if self._in_epoch:  # a duration without anything else in it
            duration = now - self._last_step
            self._usual_step += (duration - self._usual_step) * (0.1 if self._usual_step else 1)
        self._last_step, self._steps, self._in_epoch = now, self._steps + 1, True
        if self._steps == 1:
            for target in (self._exchange, self._judge):
                threading.Thread(target=target, daemon=True).start()

    def pause(self) -> None:
        """Until the next finished step this rank does something that may take long, such as evaluating or writing."""
        self._in_epoch = False

    def stop(self) -> None:
        """End the threads; the job is done."""
        self._ended.set()

    def _exchange(self) -> None:
        """Tell this rank's news, and read those of the ranks that it watches, until the end."""
        store = None
        while not self._ended.wait(self._limit / NEWS_PER_LIMIT):
            news: News = (time.monotonic_ns(), self._steps, self._is_training(), describe_line(self._main))
            try:
                store = store or connect_again()
                store.set(f"news of {self._world.rank}", seal(json.dumps(news), "news of", self._world.rank))
                told = [
                    rank for rank in self._watched if rank in self._news or store.check([f"news of {rank}"])
                ]
                if told:
                    texts = store.multi_get([f"news of {rank}" for rank in told])
                    verified = {
                        rank: verify(text, "news of", rank) for rank, text in zip(told, texts, strict=True)
                    }
                    told_now = {
                        rank: tuple(json.loads(text)) for rank, text in verified.items() if text is not None
                    }
                    # Others can set earlier news again, so that a lost rank seems to live.
                    self._news |= {
                        rank: each for rank, each in told_now.items() if each > self._news.get(rank, ())
                    }
                over = (
                    self._world.rank != 0
                    and store.check(["verdict"])
                    and verify(store.get("verdict"), "verdict") is not None
                )
            except (dist.DistError, RuntimeError, ValueError, HpctrainError):
                store = None  # connect again; the judge notices if that does not help
                continue
            if over:
                self._dump()
                # rank 0 ends first, so that its message comes first
                time.sleep(3 * self._limit / NEWS_PER_LIMIT)
                os._exit(1)

    def _judge(self) -> None:
        """End the process when a rank is lost or no step finishes."""
        period = self._limit / JUDGMENTS_PER_LIMIT
        # Time during which this process was stopped itself does not count: a scheduler may suspend the whole
        # job.
        elapsed, last = 0.0, time.monotonic()
        while not self._ended.wait(period):
            now = time.monotonic()
            elapsed, last = elapsed + min(now - last, 2 * period), now
            news = dict(self._news)
            silent = {rank: self._unchanged_for(elapsed, rank, told) for rank, told in news.items()}
            # Where somebody on the node answers, the node is not dead.
            answers = {
                self._hosts[rank]
                for rank in (self._world.rank, *silent)
                if silent.get(rank, 0) <= self._limit
            }
            node_limit = max(self._limit, self._node_timeout)
            lost = [
                rank
                for rank in silent
                if silent[rank] > (self._limit if self._hosts[rank] in answers else node_limit)
            ]
            if lost:
                self._end_for_lost(lost, silent[lost[0]], news)
            all_in_epoch = (
                self._is_training()
                and len(news) == len(self._watched)
                and all(each[2] for each in news.values())
            )
            steps = [self._steps, *(each[1] for each in news.values()), all_in_epoch]
            patience = max(self._limit, 10 * self._usual_step)
            since_step = self._unchanged_for(elapsed, -1, steps)
            # A rank that is silent for three news is about to be lost.
            all_answer = max(silent.values(), default=0) <= 3 * self._limit / NEWS_PER_LIMIT
            if (
                since_step > patience
                and all_in_epoch
                and all_answer
                and self._usual_step > 0
                and self._world.rank == 0
            ):
                self._end(
                    f"no rank has finished a step for {patience:.0f} s; --watchdog sets another limit", news
                )

    def _is_training(self) -> bool:
        """Whether this rank is within an epoch, and not in a system call that a stalled file system does not
        finish.

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

    def _end_for_lost(self, lost: list[int], silence: float, news: dict[int, News]) -> None:
        first = lost[0]
        others = f", nor have {len(lost) - 1} others" if len(lost) > 1 else ""
        self._end(
            f"rank {first} on {self._hosts[first]} has not answered for {silence:.0f} s{others}: "
            "look at its node and the network, and resume from the last checkpoint",
            news,
        )

    def _end(self, problem: str, news: dict[int, News]) -> None:
        """Print the problem and what the ranks were doing, and end this process; the launcher ends the others."""
        lines = [f"hpctrain: error: {problem}"]
        own = (0, self._steps, True, describe_line(self._main))
        for rank, (_, steps, _, line) in sorted((news | {self._world.rank: own}).items())[:MOST_RANKS_SHOWN]:
            lines.append(
                f"hpctrain: rank {rank} on {self._hosts[rank]} had finished {steps} steps and was at {line}"
            )
        # Without rank 0 there is nobody to speak for all; one rank of each node does. First, because the log
        # may be on a file system that hangs.
        if self._world.rank == 0 or self._world.rank == 1 or self._world.local_rank == 0:
            print_error("\n".join(lines))
        if self._world.rank == 0:
            threading.Thread(target=self._tell_verdict, daemon=True).start()
        self._dump()
        print(*lines, sep="\n", file=self._log, flush=True)
        # the others write their stacks, which their launcher's signal would prevent
        if self._world.rank == 0:
            time.sleep(min(10.0, 2 * self._limit / NEWS_PER_LIMIT))
        os._exit(1)

    def _tell_verdict(self) -> None:
        with suppress(dist.DistError, RuntimeError, ValueError):
            connect_again().set("verdict", seal("end", "verdict"))

    def _dump(self) -> None:
        """Write the stacks of all threads into the log of this rank, once."""
        if not self._ended.is_set():
            self._ended.set()
            faulthandler.dump_traceback(file=self._log, all_threads=True)


_OWN_FOLDER = str(Path(__file__).parents[1])


def describe_line(thread: int) -> str:
    """The file, line and function that a thread executes: the innermost that is neither Python's own nor another package's."""
    frame = sys._current_frames().get(thread)
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
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
    return f"{Path(chosen.f_code.co_filename).name}:{chosen.f_lineno} {chosen.f_code.co_name}()"
