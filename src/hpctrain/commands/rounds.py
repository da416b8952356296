"""What the kinds of hpctrain bench share: rounds of calls, and the folder of their results."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files.trust import make_private_folder

ROUNDS, ROUND_SECONDS, MAX_CALLS = 3, 0.2, 200


def prepare(folder: Path, *, foreseen: bool) -> None:
    """Create the folder of the results. Raises HpctrainError if it has results or is another user's."""
    with explain_os_error(f"{folder}: cannot be created", "name a folder you can write to by --out"):
        make_private_folder(folder, foreseen=foreseen)
        if (folder / "bench.json").exists():
            raise HpctrainError(f"{folder} holds a result already: give another --out")


def time_alone(device: torch.device, call: Callable[[], object]) -> float:
    """The seconds of a call on this rank: the median of ROUNDS, after one that is not counted."""
    mean_seconds(device, call, 1)
    calls = calls_of_round(mean_seconds(device, call, 1))
    return statistics.median(mean_seconds(device, call, calls) for _ in range(ROUNDS))


def mean_seconds(device: torch.device, call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)  # on a GPU, a call returns before it is done
    return (time.perf_counter() - start) / calls


def calls_of_round(seconds: float) -> int:
    """How many calls of so many seconds fill a round."""
    return min(max(int(ROUND_SECONDS / seconds), 1), MAX_CALLS)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
