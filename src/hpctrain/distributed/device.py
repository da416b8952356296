"""The device that a rank computes on."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hpctrain.distributed.gpu import gpu_problems
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError


def choose_device(world: World, wanted: str = "auto", env: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this rank: "cpu", "cuda", or "auto" for a GPU if there is one.

    A rank uses the GPU of its local rank, modulo the number of visible GPUs: with --gpus-per-task=1 each rank
    sees its own GPU only. Raises HpctrainError for "cuda" without a GPU, and for "auto" where Slurm has
    granted GPUs that this rank cannot use: it would train on the CPU, a hundred times slower, and say
    nothing.
    """
    if torch.cuda.is_available() and wanted != "cpu":
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise HpctrainError(
            f"--device cuda, but rank {world.rank} on {os.uname().nodename} sees no GPU: "
            "ask the scheduler for one (--gpus-per-node), start the container with --nv, or use --device cpu"
        )
    granted = env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_JOB_GPUS")
    if wanted == "auto" and granted and (problems := list(gpu_problems(world, wanted, env))):
        raise HpctrainError(f"rank {world.rank} on {os.uname().nodename}: {'; '.join(problems)}")
    return torch.device("cpu")


def free_memory(world: World, device: torch.device) -> int:
    """Bytes that this rank may take: those free on its GPU, or its share of those available on the node."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 // world.local_size
