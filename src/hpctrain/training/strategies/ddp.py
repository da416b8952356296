"""DistributedDataParallel: each rank has the whole model, and gradients are averaged in the backward pass."""

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.distributed.world import World
from hpctrain.training.strategies.strategy import Strategy

# Faster, for a model whose training reads no buffer (batch normalization does not) and a loop that takes no
# gradient out of the model.
LEAN = {"broadcast_buffers": False, "gradient_as_bucket_view": True}


class Ddp(Strategy):
    """A model without trainable weights, or on one rank, stays as it is."""

    def wrap(
        self, model: nn.Module, *, example: Callable[[nn.Module], Tensor] | None = None, **options: Any
    ) -> nn.Module:
        """The model in DistributedDataParallel, whose options these are.

        `example` computes the loss of any example with the model: see settle_buckets().
        """
        model = super().wrap(model)
        if self.world.size == 1 or not any(each.requires_grad for each in model.parameters()):
            return model
        # The name that torch 2.13 has for this option is not in the older torch of other images.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        parallel = DistributedDataParallel(model, **options)
        settle_buckets(parallel, None if example is None else lambda: example(parallel))
        if parallel.broadcast_buffers:
            # Ranks may evaluate different numbers of batches, where a collective call would hang.
            parallel.register_forward_pre_hook(_broadcast_in_training_only)
        return parallel


STRATEGY = Ddp


def _broadcast_in_training_only(parallel: nn.Module, _: object) -> None:
    parallel.broadcast_buffers = parallel.training  # type: ignore[assignment]  # an option of DDP


def broadcast_buffers(model: nn.Module, world: World) -> None:
    """Copy rank 0's batch-norm statistics, which are saved, to all ranks for evaluation (collective)."""
    if world.size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def settle_buckets(model: nn.Module, compute_loss: Callable[[], Tensor] | None = None) -> None:
    """Let DistributedDataParallel arrange its buckets before the first step of a run, or of a resumed run.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients became ready. The
    first step would be summed in another arrangement than all others. With more than two ranks the
    arrangement decides in which order values are added, so the last bits of a resumed run would differ.

    `compute_loss` returns the loss of any example. The model is in evaluation mode meanwhile, which keeps the
    statistics of batch normalization and the random numbers of dropout. Without it, the model computes
    nothing, and the gradients become ready in the order of the parameters: as settled, but the communication
    may overlap less with the computation. The gradients are discarded. A collective call.
    """
    if compute_loss:
        model.eval()
        compute_loss().backward()
        model.train()
    else:
        _add_up_zeros(model)
    model.zero_grad(set_to_none=True)


def _add_up_zeros(model: nn.Module) -> None:
    """A backward pass through each parameter of a DistributedDataParallel, without its module's forward()."""
    module = model.get_submodule("module")
    own = module.__dict__.get("forward")  # of torch.compile, for example
    trained = [each for each in module.parameters() if each.requires_grad]
    module.forward = lambda: sum((each * 0).sum() for each in trained)
    try:
        model().backward()
    finally:
        del module.forward
        if own:
            module.forward = own
