"""Horovod: the optimizer averages the gradients. hpctrain.distributed.horovod has joined the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpctrain.training.strategies.strategy import Strategy


class Horovod(Strategy):
    """Each rank has the whole model; the script makes a DistributedOptimizer of Horovod."""

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model with the weights of rank 0."""
        import horovod.torch as hvd

        model = super().wrap(model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model

    @contextmanager
    def average(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Wait for the all-reduces, which began in the backward pass."""
        distributed: Any = optimizer
        distributed.synchronize()
        with distributed.skip_synchronize():
            yield


STRATEGY = Horovod
