"""The order of the data: which examples each rank takes in each step.

The order is a pure function of (seed, epoch). A global batch is a slice of it, and each rank takes a slice of the batch, so
a step sees the same examples on any number of ranks, and resuming needs no state but the epoch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.world import World


def steps_per_epoch(examples: int, batch_size: int, world: World, accumulate: int = 1) -> int:
    """The number of global batches in an epoch. The remainder, less than a batch, is dropped: other examples each epoch.

    Raises UsageError where the ranks cannot share a batch evenly, in `accumulate` parts each, or there are fewer examples than
    one batch.
    """
    parts = world.size * accumulate
    if batch_size % parts:
        near = max(parts, batch_size // parts * parts)
        ranks = f"{world.size} ranks" + (f" with --accumulate {accumulate}" if accumulate > 1 else "")
        raise UsageError(
            f"--batch-size {batch_size} is the global batch, and {ranks} cannot share it evenly: "
            f"use a multiple of {parts}, such as {near}"
        )
    if batch_size > examples:
        raise UsageError(f"--batch-size {batch_size} is more than the {examples} training examples: use a smaller one")
    return examples // batch_size


def training_batches(examples: int, batch_size: int, seed: int, epoch: int, world: World) -> Iterator[Tensor]:
    """The examples of this rank for each step of an epoch: int64 indices [batch_size / world.size].

    `batch_size` is the global one. Raises UsageError as steps_per_epoch() does.
    """
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    share = batch_size // world.size
    for step in range(steps_per_epoch(examples, batch_size, world)):
        first = step * batch_size + world.rank * share
        yield order[first : first + share]


def evaluation_batches(examples: int, batch_size: int, world: World) -> Iterator[Tensor]:
    """The examples of this rank for evaluation, in order: int64 indices, at most `batch_size` at a time.

    Every example belongs to exactly one rank: none is padded, repeated or dropped. A rank may have none.
    """
    first, last = (examples * rank // world.size for rank in (world.rank, world.rank + 1))
    for start in range(first, last, batch_size):
        yield torch.arange(start, min(start + batch_size, last))
