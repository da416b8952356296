"""How long the steps of a run take, and how much memory it needs."""

import resource
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from hpctrain.distributed.rendezvous import gather
from hpctrain.distributed.world import World
from hpctrain.run.profile import Profile

T = TypeVar("T")


class StepTimes:
    """The times from step to step of this rank, since this start of the job.

    A step returns before a GPU has finished; times are still the GPU's, if it is slower than the CPU.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self._profile = profile
        self._seconds = array("f")
        # Of texts: the tokens of this rank in all steps, without and with padding, and in the present step.
        self.tokens = [0, 0]
        self._tokens = [0, 0]
        self._last = self._waiting = self._waited = 0.0
        self._knows_data = False

    def start(self) -> None:
        """Begin the next step now, after an evaluation or a checkpoint, which are not part of it."""
        self._last, self._waiting = time.perf_counter(), 0.0

    def wait(self, seconds: float) -> None:
        """Count time of the present step in which it waited for its data."""
        self._waiting += seconds
        self._knows_data = True

    def count_tokens(self, real: int, padded: int) -> None:
        """Count tokens of the present step on this rank, without and with padding."""
        self._tokens = [self._tokens[0] + real, self._tokens[1] + padded]

    def time_data(self, batches: Iterable[T]) -> Iterator[T]:
        """These batches, one by one. wait() gets the time to wait for each."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.wait(time.perf_counter() - began)
            yield batch

    def step(self, left: int = 0) -> str:
        """End a step, of which `left` more are in this epoch, and begin the next one.

        Steps in the profile do not count. Returns the path of the profile's page when it is written, else "".
        Raises HpctrainError if it cannot be written.
        """
        now, waited, page = time.perf_counter(), self._waiting, ""
        if not (self._profile and self._profile.is_running):
            self._seconds.append(now - self._last)
            self._waited += waited
            self.tokens = [total + own for total, own in zip(self.tokens, self._tokens, strict=True)]
        self._tokens = [0, 0]
        if self._profile:
            page = self._profile.step(waited, left)
            now = time.perf_counter()
        self._last, self._waiting = now, 0.0
        return page

    @property
    def data_share(self) -> float | None:
        """The share of the steps' time spent waiting for data; None if wait() was never called."""
        return self._waited / sum(self._seconds) if self._knows_data and self._seconds else None

    def figures(self, examples: int, tokens: int = 0, padded: int = 0) -> dict[str, float]:
        """Median and 95th percentile of a step in ms, and examples and tokens per second; {} without steps.

        `examples`: of a step. `tokens`, `padded`: texts of all steps and ranks, without and with padding.
        """
        if not self._seconds:
            return {}
        ordered = sorted(self._seconds)
        seconds = sum(ordered)
        found = {
            "step_ms_p50": round(1e3 * statistics.median(ordered), 3),
            "step_ms_p95": round(1e3 * ordered[int(0.95 * (len(ordered) - 1) + 0.5)], 3),
            "examples_per_s": round(examples * len(ordered) / seconds, 3),
        }
        if padded:
            found["tokens_per_s"] = round(tokens / seconds, 3)
            found["padding_share"] = round(1 - tokens / padded, 4)
        return found


def gather_speed(world: World, device: torch.device, times: StepTimes) -> tuple[list[int], dict[str, float]]:
    """The tokens of all ranks, without and with padding, and data_share and peak_memory_mb, each of the rank
    where it is highest. A collective call.
    """
    own = [times.tokens, peak_memory(device), times.data_share]
    tokens, memory, shares = zip(*gather(world, own), strict=True)
    most = {} if None in shares else {"data_share": round(max(shares), 4)}
    most["peak_memory_mb"] = round(max(memory), 1)
    return [sum(counts) for counts in zip(*tokens, strict=True)], most


def peak_memory(device: torch.device) -> float:
    """The peak memory in MB (10^6 bytes): of this process's tensors on a GPU, or of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB


def gpu_percent(device: torch.device) -> float | None:
    """The use of the GPU in the last second or less, in percent; None on a CPU or without NVML."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except Exception:
        # No nvidia-ml-py, an old driver, a part of a GPU (MIG), another make: each raises another exception.
        return None
