"""How long the steps of a run take, and how much memory it needs."""

import resource
import statistics
import time
from array import array

import torch


class StepTimes:
    """The times from step to step of this rank, since this start of the job.

    With a GPU, a step returns before the GPU has finished it. The times still are those of the GPU, as soon as it is the slower
    of the two.
    """

    def __init__(self) -> None:
        self._seconds = array("f")
        self._last = 0.0

    def start(self) -> None:
        """The next step begins now: what came before, such as an evaluation, is not part of it."""
        self._last = time.perf_counter()

    def step(self) -> None:
        """A step has ended, and the next one begins."""
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._last = now

    def figures(self, examples: int, tokens: float | None = None) -> dict[str, float]:
        """Median and 95th percentile in ms, and what was trained on per second; {} without steps.

        `examples` are those of a step; `tokens` those of an example that are not padding, if examples are texts.
        """
        if not self._seconds:
            return {}
        ordered = sorted(self._seconds)
        per_second = examples * len(ordered) / sum(ordered)
        return {
            "step_ms_p50": round(1e3 * statistics.median(ordered), 3),
            "step_ms_p95": round(1e3 * ordered[int(0.95 * (len(ordered) - 1) + 0.5)], 3),
            "examples_per_s": round(per_second, 3),
            **({} if tokens is None else {"tokens_per_s": round(per_second * tokens, 3)}),
        }


def peak_memory(device: torch.device) -> float:
    """The most memory that this process has used so far, in MB (10^6 bytes): that of its tensors on a GPU, or its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB
