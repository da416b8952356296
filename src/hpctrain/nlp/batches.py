"""Batches of texts of similar length: little padding, and as many tokens on each rank.

The order is a pure function of (seed, epoch), and a step takes the same examples whatever the number of ranks.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy
import torch
from torch import Tensor

from hpctrain.world import World

# So many batches are sorted together: more of them leave less padding, and less chance in who meets whom in a batch.
POOL = 100


def by_length(lengths: Sequence[int], batch_size: int, seed: int, epoch: int, parts: int) -> Tensor:
    """The examples of each step of an epoch, and who takes which: indices [steps, parts, batch_size / parts], int64.

    `lengths` are the tokens of each example; a part is what a rank computes at once. All examples are shuffled; each POOL batches
    of them are sorted by length and cut into global batches, of which each part is dealt examples from the longest to the
    shortest, to and fro; then the batches are shuffled. The batch with the longest text comes first, so that memory fails at once
    or never. Every example comes at most once; the rest, less than a global batch, is left out (another rest each epoch).
    """
    steps = len(lengths) // batch_size
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).numpy()[: steps * batch_size]
    # At least four pools, where there are as many batches: one alone would make the same batches every epoch.
    pool = numpy.arange(len(order)) // (batch_size * max(1, min(POOL, steps // 4)))
    tokens = numpy.asarray(lengths, numpy.int64)  # a cache may hold them unsigned, which have no minus
    batches = order[numpy.lexsort((-tokens[order], pool))].reshape(steps, batch_size)

    batches = batches[torch.randperm(steps, generator=generator).numpy()]
    longest = tokens[batches[:, 0]].argmax()
    batches[[0, longest]] = batches[[longest, 0]]

    rounds = batches.reshape(steps, batch_size // parts, parts)
    rounds[:, 1::2] = rounds[:, 1::2, ::-1].copy()  # to and fro: in every second round the last part takes first
    return torch.from_numpy(rounds.swapaxes(1, 2).copy())


def for_evaluation(lengths: Sequence[int], batch_size: int, world: World) -> Iterator[Tensor]:
    """The examples of this rank for evaluation, longest first: every example on exactly one rank, none padded, none left out.

    `batch_size` is that of this rank. The ranks take turns, so that their tokens differ by little.
    """
    order = torch.from_numpy(numpy.argsort(-numpy.asarray(lengths, numpy.int64), kind="stable"))
    return iter(order[world.rank :: world.size].split(batch_size))


def share_of_real_tokens(lengths: Sequence[int], batches: Iterable[Tensor]) -> float:
    """Of all tokens that these batches hold, each padded to its longest example, the share that is not padding."""
    lengths = torch.as_tensor(lengths)
    real = padded = 0
    for batch in batches:
        real += int(lengths[batch].sum())
        padded += len(batch) * int(lengths[batch].max())
    return real / padded
