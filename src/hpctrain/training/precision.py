"""--precision and --tf32: the numbers that a model computes with. Its weights are fp32 in all of them.

fp16 is for GPUs without bf16, such as the V100. Its range is small: gradients become zero below 6e-8, and
infinite above 65,504. So a GradScaler multiplies the loss, and divides the gradients before the optimizer
uses them. It skips a step whose gradients are not finite, and halves its scale.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.text import first_line, say

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(wanted: str, device: torch.device) -> str:
    """`wanted`, or for "auto" the fastest precision of the device that needs no other learning rate."""
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "fp32"
    return "bf16" if _has_bf16() else "fp16"


def _has_bf16() -> bool:
    """Whether the GPU computes in bf16 and TF32; a GPU has both or neither."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def set_precision(wanted: str, tf32: str | None, world: World, device: torch.device) -> str:
    """Set TF32, and return choose_precision(): before the first operation. On a GPU rank 0 prints both."""
    if tf32:
        torch.set_float32_matmul_precision("high" if tf32 == "on" else "highest")
        torch.backends.cudnn.allow_tf32 = tf32 == "on"
    precision = choose_precision(wanted, device)
    if world.rank == 0 and device.type == "cuda":
        more = f" ({torch.cuda.get_device_name(device)} has neither bf16 nor TF32)"
        if _has_bf16():
            more = f", TF32 {tf32 or 'for convolutions only'}"
        say(f"precision {precision}{more}")
    return precision


def make_autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context of a forward pass. It does nothing in fp32."""
    return torch.autocast(device.type, HALVES.get(precision), enabled=precision in HALVES)


class Scaler(torch.amp.GradScaler):
    """The scaler of a precision. It does nothing but in fp16.

    `sharded`: each rank has a part of the gradients, so the ranks agree on skipping a step. Torch's scaler
    lets the ranks agree that share the first gradient, which --tensor-parallel does not split over all ranks.
    """

    def __init__(self, precision: str, device: torch.device, *, sharded: bool = False) -> None:
        super().__init__(device.type, enabled=precision == "fp16")
        self._sharded = sharded

    def _unscale_grads_(self, *arguments: Any, **options: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*arguments, **options)
        for value in found.values() if self._sharded else ():
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return found


def load_scaler(scaler: Scaler, saved: Any, path: Path) -> None:
    """Load the state of a scaler from a checkpoint, which only a run in fp16 has.

    The scaler keeps its own options. Raises HpctrainError, naming the file, if the state is of another kind.
    """
    if not saved or not scaler.is_enabled():
        return
    try:
        scale, tracker = float(saved["scale"]), int(saved["_growth_tracker"])
        if not 0 < scale < math.inf or tracker < 0:
            raise ValueError(f"scale {scale}, tracker {tracker}")
    except Exception as error:  # it may hold anything
        raise HpctrainError(
            f"{path}: not the state of a gradient scaler ({first_line(error)[:200]}): "
            "resume from another run folder"
        ) from error
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": tracker})
