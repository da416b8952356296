"""The order in which DistributedDataParallel sums gradients."""

from collections.abc import Callable

from torch import Tensor, nn


def settle_buckets(model: nn.Module, compute_loss: Callable[[], Tensor]) -> None:
    """Let DistributedDataParallel arrange its buckets before the first step of a run or of a resumed run.

    A collective call.

    After its first backward pass it arranges the gradients in buckets anew, in the order in which they became
    ready. The first step would be summed in another arrangement than all others. With more than two ranks the
    arrangement decides in which order the values are added, so a run that was resumed would differ in the
    last bits from one that was not.

    `compute_loss` returns the loss of any example. Its gradients are discarded, and the model is in
    evaluation mode meanwhile, so neither the statistics of batch normalization nor the random numbers of
    dropout change.
    """
    model.eval()
    compute_loss().backward()
    model.zero_grad(set_to_none=True)
    model.train()
