"""The order in which DistributedDataParallel sums gradients."""

from collections.abc import Callable

from torch import Tensor, nn


def settle_buckets(model: nn.Module, compute_loss: Callable[[], Tensor]) -> None:
    """Let DistributedDataParallel arrange its buckets before the first step of a run, or of a resumed run.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients became ready. The
    first step would be summed in another arrangement than all others. With more than two ranks the
    arrangement decides in which order values are added, so the last bits of a resumed run would differ.

    `compute_loss` returns the loss of any example. Its gradients are discarded. The model is in evaluation
    mode meanwhile, which keeps the statistics of batch normalization and the random numbers of dropout. A
    collective call.
    """
    model.eval()
    compute_loss().backward()
    model.zero_grad(set_to_none=True)
    model.train()
