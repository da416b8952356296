"""DataParallel: one process computes on all GPUs of its node."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from hpctrain.training.precision import HALVES
from hpctrain.training.strategies.strategy import Strategy


class Dp(Strategy):
    """Copies the model to each GPU in each step."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model in DataParallel, whose options these are. Its threads compute in the run's precision."""
        parallel = DataParallel(super().wrap(model), **options)
        if dtype := HALVES.get(self.precision):
            # torch starts the threads with fp16 on GPUs
            model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(self.device.type, dtype))
        return parallel


STRATEGY = Dp
