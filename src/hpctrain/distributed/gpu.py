"""Checks of the GPU of a rank: allocated by the scheduler, visible in the container, usable by this torch."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hpctrain.distributed.world import World
from hpctrain.text import counted, first_line


def gpu_problems(world: World, wanted: str, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Why this rank has no GPU of its own, although the job has GPUs or --device is "cuda"."""
    if wanted == "cpu":
        return
    if torch.cuda.is_available():
        # With --gpus-per-task=1 a rank sees one GPU; SLURM_GPUS_ON_NODE counts all of the job on the node.
        gpus = int(env.get("SLURM_GPUS_ON_NODE") or torch.cuda.device_count())
        if world.local_size > gpus:
            found = f"{counted(world.local_size, 'rank')} on a node with {counted(gpus, 'GPU')}"
            yield f"{found} for this job: start one rank per GPU (--ntasks-per-node)"
        return
    allocated, devices = allocated_gpus(env), gpu_devices()
    # The launch scripts name the option of their runtime.
    option = env.get("HPCTRAIN_GPU_OPTION") or (
        "--gpu (podman-hpc), --nv (apptainer), --module=gpu (shifter) or --gpus all (docker)"
    )
    # Without cgroups, a job of Slurm sees the GPUs of other jobs, too.
    if not allocated and ("SLURM_JOB_ID" in env or not devices):
        if wanted == "cuda":
            yield (
                "--device cuda, but there is no GPU for this job: "
                "request one from the scheduler (--gpus-per-node)"
            )
        return
    if not devices:
        yield (
            f"the job has a GPU ({allocated[0]}), but there is no /dev/nvidia* here that this user may open: "
            f"start the container with {option}"
        )
    elif not has_driver():
        yield f"{devices[0]} is visible, but libcuda.so.1 is not found: start the container with {option}"
    if torch.version.cuda is None:
        yield (
            f"torch {torch.__version__} is a CPU build, on a node with a GPU: "
            "use the CUDA image, or --device cpu"
        )
    elif devices and has_driver():
        try:
            torch.cuda.init()
        except RuntimeError as error:  # names the problem of the driver, such as its age
            yield (
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use {devices[0]} "
                f"({first_line(error)}): use an image for the CUDA of this driver "
                "(cu128 for 525 or newer, cu130 for 580 or newer), or --device cpu"
            )


def allocated_gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    """The variables with which a scheduler or a user grants GPUs to this process, as NAME=VALUE."""
    names = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
    return [f"{name}={env[name]}" for name in names if env.get(name, "") not in ("", "-1", "NoDevFiles")]


def gpu_devices() -> list[str]:
    """The GPU devices that this process may open. Slurm's cgroup makes open() fail for other jobs' GPUs."""
    devices = []
    for path in sorted(Path("/dev").glob("nvidia[0-9]*")):
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError:
            continue
        devices.append(str(path))
    return devices


def has_driver() -> bool:
    """Whether the driver's library loads. It comes from the host, not from the image."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
