"""Faults of a rank's GPU that its driver has counted: memory errors, memory to replace, Xids.

NVML (nvidia-ml-py, in the images for CUDA) reads them. Without it, and for what a GPU does not count, no
fault is reported. A GPU with a fault may still train, slowly or with wrong sums, until it fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.text import counted

EVENT_WAIT = 10  # ms


@dataclass(frozen=True)
class Counters:
    """What the driver has counted on a GPU. Memory errors are those since it was loaded."""

    uncorrected: int = 0
    pages_pending: int = 0  # of GPUs up to V100
    rows_pending: int = 0
    rows_failed: int = 0


def counter_problems(gpu: str, counters: Counters) -> Iterator[str]:
    """Why this GPU should not be trained on."""
    advice = "do not train on it: exclude its node (sbatch --exclude) and tell your site"
    if counters.rows_failed:
        yield f"{gpu} could not replace faulty memory (row remapping failed): {advice}"
    if counters.pages_pending or counters.rows_pending:
        what = "pages to retire" if counters.pages_pending else "rows to remap"
        yield f"{gpu} has faulty memory that is in use until its next reset ({what} pending): {advice}"


def counter_warning(gpu: str, counters: Counters) -> str:
    """Errors that the driver may have dealt with since, by using other memory; "" if there are none."""
    if not counters.uncorrected:
        return ""
    errors = counted(counters.uncorrected, "uncorrected memory error")
    return f"{gpu} has had {errors} (ECC): if a rank fails there, exclude its node (sbatch --exclude)"


def read_counters(nvml: Any, gpu: Any) -> Counters:
    """Ask NVML; a counter that the GPU does not have is 0."""

    def ask(function: str, *arguments: Any) -> Any:
        with suppress(nvml.NVMLError):
            return getattr(nvml, function)(gpu, *arguments)
        return 0

    rows = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)  # corrected, uncorrected, pending, failed
    return Counters(
        ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        ask("nvmlDeviceGetRetiredPagesPendingStatus"),
        *rows[2:4],
    )


def gpu_faults(device: torch.device) -> tuple[list[str], str]:
    """The problems that the driver has counted on the rank's GPU, and a warning.

    Both are empty on a CPU, and if NVML cannot be asked.
    """
    if not (opened := open_gpu(device)):
        return [], ""
    nvml, gpu, name = opened
    counters = read_counters(nvml, gpu)
    return [*counter_problems(name, counters)], counter_warning(name, counters)


@contextmanager
def watch_xids(device: torch.device) -> Iterator[Callable[[], list[str]]]:
    """Yields a function that returns the critical errors of the driver (Xids) since this block began."""
    if not (opened := open_gpu(device)):
        yield list
        return
    nvml, gpu, name = opened
    events = nvml.nvmlEventSetCreate()
    with suppress(nvml.NVMLError):
        nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
    yield lambda: list(xid_problems(nvml, name, events))
    nvml.nvmlEventSetFree(events)


def open_gpu(device: torch.device) -> tuple[Any, Any, str] | None:
    """NVML, its handle of the rank's GPU, and the name of the GPU for a message."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        properties = torch.cuda.get_device_properties(device)
        uuid = f"GPU-{str(properties.uuid).removeprefix('GPU-')}"
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), f"the {properties.name} {uuid}"
    except Exception:
        # A CPU, no nvidia-ml-py, an old driver, a part of a GPU (MIG): each raises another exception.
        return None


def xid_problems(nvml: Any, gpu: str, events: Any) -> Iterator[str]:
    """A problem for each event that waits in a set of Xid events."""
    with suppress(nvml.NVMLError):  # a time-out: there is no other
        while True:
            number = nvml.nvmlEventSetWait_v2(events, EVENT_WAIT).eventData
            yield (
                f"{gpu} had Xid {number} during the check: do not train on it: exclude its node "
                "(sbatch --exclude) and tell your site (docs.nvidia.com/deploy/xid-errors lists the numbers)"
            )
