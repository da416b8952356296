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
from torch import Tensor, nn

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.text import first_line, say

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_precision(wanted: str, tf32: str | None, world: World, device: torch.device) -> str:
    """Set TF32, and return the precision: `wanted`, or for "auto" that of the device.

    Call it before the first operation. On a GPU rank 0 prints both.
    """
    if tf32:
        torch.set_float32_matmul_precision("high" if tf32 == "on" else "highest")
        torch.backends.cudnn.allow_tf32 = tf32 == "on"
    if device.type != "cuda":
        return "fp32" if wanted == "auto" else wanted
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    precision = ("bf16" if has_bf16 else "fp16") if wanted == "auto" else wanted
    if world.rank == 0:
        if has_bf16:  # a GPU has both or neither
            more = f", TF32 {tf32 or 'for convolutions only'}"
        else:
            more = f" ({torch.cuda.get_device_name(device)} has neither bf16 nor TF32)"
        say(f"precision {precision}{more}")
    return precision


def make_autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context of a forward pass. It does nothing in fp32."""
    return torch.autocast(device.type, HALVES.get(precision), enabled=precision in HALVES)


def set_precision_in_threads(model: nn.Module, precision: str, device: torch.device) -> None:
    """Let the threads of DataParallel compute in this precision; torch starts them with fp16 on GPUs."""
    if dtype := HALVES.get(precision):
        model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(device.type, dtype))


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


def load_scaler(scaler: Scaler, state: dict[str, Any], path: Path) -> None:
    """Load the entry "scaler" of a checkpoint, which only a run in fp16 has.

    The scaler keeps its own options. Raises HpctrainError, naming the file, if the entry is of another kind.
    """
    saved = state.get("scaler")
    if not saved or not scaler.is_enabled():
        return
    try:
        scale, tracker = float(saved["scale"]), int(saved["_growth_tracker"])
        if not 0 < scale < math.inf or tracker < 0:
            raise ValueError(f"scale {scale}, tracker {tracker}")
    except Exception as error:  # the entry may hold anything
        raise HpctrainError(
            f"{path}: not the state of a gradient scaler ({first_line(error)[:200]}): "
            "resume from another run folder"
        ) from error
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": tracker})
