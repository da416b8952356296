"""--profile: what some steps of a run spend their time on, as a trace of torch.profiler and a page of text.

Perfetto (ui.perfetto.dev) and chrome://tracing show the trace.
"""

import gzip
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hpctrain.distributed.world import World
from hpctrain.errors import explain_os_error
from hpctrain.files import atomic

SKIPPED = 10  # steps before the profile: in the first ones, torch chooses its kernels
STEPS = 5  # in the profile
NO_PROFILE = f"no profile: no epoch had {STEPS} steps after the first {SKIPPED}"
ROWS = 20  # operators on the page
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events of a trace


class Profile:
    """Profiles STEPS steps of this rank after SKIPPED others; `is_running`: whether it does now."""

    def __init__(self, folder: Path, trainer: str, world: World, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._title = f"{trainer} on rank {world.rank} of {world.size}, {device.type}"
        self._done, self._waited = 0, 0.0
        self._profiler: torch.profiler.profile | None = None
        self.is_running = False

    def step(self, waited: float, left: int) -> str:
        """Count a step, of which `waited` seconds were spent on its batch; its epoch has `left` more steps.

        Returns the path of the page when it is written, else "". Raises HpctrainError if it cannot be.
        """
        self._done += 1
        if self.is_running:
            self._waited += waited
            if self._done == self._first + STEPS - 1:
                return self._finish()
        elif self._profiler is None and self._done >= SKIPPED and left >= STEPS:
            self._start()
        return ""

    def _start(self) -> None:
        self._first = self._done + 1
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of Kineto on stderr
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._device)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._began, self.is_running = time.perf_counter(), True

    def _finish(self) -> str:
        assert self._profiler
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        self._profiler.stop()
        self.is_running = False
        with (
            explain_os_error(f"{self._folder}: cannot be written", "free some space there"),
            atomic.folder(self._folder) as unfinished,
        ):
            trace = unfinished / "trace.json.gz"
            self._profiler.export_chrome_trace(str(trace))
            with gzip.open(trace, "rt", encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
            steps = f"steps {self._first} to {self._done} since its start"
            head = f"{self._title}: {steps}, {1e3 * seconds / STEPS:.2f} ms each"
            page = self._summarize(self._profiler.key_averages(), events, seconds)
            Path(unfinished, "summary.txt").write_text(f"{head}\n\n{page}", encoding="utf-8")
        return f"{self._folder}/summary.txt"

    def _summarize(self, averages: Iterable[Any], events: list[dict[str, Any]], seconds: float) -> str:
        """The page below its title, for a profile of so many seconds with these averages of operators."""
        on_gpu = self._device.type == "cuda"
        communication, other = find_work(events, on_gpu)
        times = {"waiting for data": self._waited}
        if communication:
            times["communication"] = total(communication)
            times["of it exposed"] = total([*communication, *other]) - total(other)
        if on_gpu:
            times["GPU without work"] = seconds - total([*communication, *other])
        kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        operators = sorted(averages, key=lambda row: getattr(row, kind), reverse=True)[:ROWS]

        def line(name: str, spent: float, calls: float | None = None) -> str:
            count = "" if calls is None else f"{calls:9.1f}"
            return (
                f"{name[:60]:60} {1e3 * spent / STEPS:10.3f} {100 * spent / seconds:8.1f} %{count}".rstrip()
            )

        return "\n".join(
            [
                f"{'time':60} {'ms a step':>10} {'share':>10}",
                *(line(name, spent) for name, spent in times.items()),
                "",
                f"{'operator, without those that it calls':60} {'ms a step':>10} {'share':>10} {'calls':>8}",
                *(
                    line(row.key, getattr(row, kind) / 1e6, row.count / STEPS)
                    for row in operators
                    if getattr(row, kind)
                ),
                "",
                "The profiler makes the steps slower. "
                "Exposed is communication beside which nothing is computed.",
                "",
            ]
        )


def find_work(
    events: list[dict[str, Any]], on_gpu: bool
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When collectives ran, and when anything else was computed: intervals in seconds, which may overlap.

    Kernels on a GPU, on a CPU operators and the work of Gloo's threads; a trace lacks Horovod's.
    """
    communication: list[tuple[float, float]] = []
    other: list[tuple[float, float]] = []
    for event in events:
        if event.get("ph") != "X":  # has no duration
            continue
        name, category = event["name"], event.get("cat")
        interval = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if on_gpu:
            if category in ON_GPU:
                (communication if "nccl" in name.lower() else other).append(interval)
        elif name.startswith("gloo:"):
            communication.append(interval)
        elif category == "cpu_op" and not name.startswith("c10d::"):
            other.append(interval)
    return communication, other


def total(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            length += stop - max(start, end)
            end = stop
    return length
