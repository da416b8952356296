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

    With a GPU, a step returns before the GPU has finished it. The times still are those of the GPU, as soon
    as it is the slower of the two.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self._profile = profile
        self._seconds = array("f")
        self.tokens = [0, 0]  # of this rank in all steps, without and with padding, if it trains on texts
        self._tokens = [0, 0]  # in the present one
        self._last = self._waiting = self._waited = 0.0
        self._knows_data = False

    def start(self) -> None:
        """The next step begins now: what came before, such as an evaluation or a checkpoint, is not part of it."""
        self._last, self._waiting = time.perf_counter(), 0.0

    def wait(self, seconds: float) -> None:
        """This much of the present step went by before its data were there."""
        self._waiting += seconds
        self._knows_data = True

    def count_tokens(self, real: int, padded: int) -> None:
        """The present step has so many tokens on this rank, without and with padding."""
        self._tokens = [self._tokens[0] + real, self._tokens[1] + padded]

    def time_data(self, batches: Iterable[T]) -> Iterator[T]:
        """These batches, one by one; how long each was waited for."""
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
        """A step has ended, and the next one begins, `left` of which are in this epoch.

        Steps in the profile do not count.

        Returns a line about the profile when it is written, else "". Raises HpctrainError if it cannot be.
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
        """The share of the steps' time in which they waited for their data; None if wait() was never called."""
        return self._waited / sum(self._seconds) if self._knows_data and self._seconds else None

    def figures(self, examples: int, tokens: int = 0, padded: int = 0) -> dict[str, float]:
        """Median and 95th percentile in ms, and what was trained on per second; {} without steps.

        `examples` are those of a step. If they are texts, `tokens` are those of all steps and ranks without
        padding, and `padded` those with it.
        """
        if not self._seconds:
            return {}
        ordered = sorted(self._seconds)
        seconds = sum(ordered)
        of_texts = (
            {"tokens_per_s": round(tokens / seconds, 3), "padding_share": round(1 - tokens / padded, 4)}
            if padded
            else {}
        )
        return {
            "step_ms_p50": round(1e3 * statistics.median(ordered), 3),
            "step_ms_p95": round(1e3 * ordered[int(0.95 * (len(ordered) - 1) + 0.5)], 3),
            "examples_per_s": round(examples * len(ordered) / seconds, 3),
            **of_texts,
        }


def gather_tokens(world: World, times: StepTimes) -> list[int]:
    """The tokens of all ranks, without and with padding. A collective call."""
    return [sum(counts) for counts in zip(*gather(world, times.tokens), strict=True)]


def gather_most(world: World, device: torch.device, times: StepTimes) -> dict[str, float]:
    """The time in data and the peak memory, each of the rank where it is highest. A collective call."""
    memory, shares = zip(*gather(world, [peak_memory(device), times.data_share]), strict=True)
    data = {} if None in shares else {"data_share": round(max(shares), 4)}
    return data | {"peak_memory_mb": round(max(memory), 1)}


def peak_memory(device: torch.device) -> float:
    """The most memory that this process has used so far, in MB (10^6 bytes): that of its tensors on a GPU, or its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB


def gpu_percent(device: torch.device) -> float | None:
    """The share of the last second or less in which the GPU computed, in percent; None on a CPU, or where NVML does not say."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except (
        Exception
    ):  # no nvidia-ml-py, an old driver, a part of a GPU (MIG), another make: each has an error of its own
        return None
