"""Batches of texts of similar length, so that there is little padding and every rank computes as many tokens.

The order is a pure function of (seed, epoch), so resuming needs no state but the epoch and the step. A step
takes the same examples on any number of ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from hpctrain.distributed.world import World
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.training.batches import steps_per_epoch

# Batches sorted by length together. More leave less padding, but fewer ways to combine examples.
POOL = 100

Selection = tuple[Tensor, float]  # index and weight of a TextBatch


def training_batches_by_length(
    lengths: ArrayLike, batch_size: int, seed: int, epoch: int, parts: int
) -> Tensor:
    """The examples of each step of an epoch and of each part: int64 [steps, parts, batch_size / parts].

    `lengths` are the tokens of each example. A part is what a rank computes at once. All examples are
    shuffled. Each POOL batches are sorted by length and cut into global batches, whose examples are dealt to
    the parts from the longest to the shortest, in alternating direction. Then the batches are shuffled. The
    batch with the longest text comes first, so that running out of memory shows in the first step. No example
    comes twice. The remainder that does not fill a global batch is left out: other examples each epoch.
    """
    # a cache may hold unsigned integers, which cannot be negated
    tokens = numpy.asarray(lengths, numpy.int64)
    steps = len(tokens) // batch_size
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(tokens), generator=generator).numpy()[: steps * batch_size]
    # At least four pools, if possible: a single one would make the same batches in every epoch.
    pool = numpy.arange(len(order)) // (batch_size * max(1, min(POOL, steps // 4)))
    batches = order[numpy.lexsort((-tokens[order], pool))].reshape(steps, batch_size)

    batches = batches[torch.randperm(steps, generator=generator).numpy()]
    longest = tokens[batches[:, 0]].argmax()
    batches[[0, longest]] = batches[[longest, 0]]

    rounds = batches.reshape(steps, batch_size // parts, parts)
    # in every second round the last part gets the longest text
    rounds[:, 1::2] = rounds[:, 1::2, ::-1].copy()
    return torch.from_numpy(rounds.swapaxes(1, 2).copy())


def evaluation_batches_by_length(
    lengths: ArrayLike, batch_size: int, rank: int = 0, ranks: int = 1
) -> Iterator[Tensor]:
    """The examples that a rank evaluates, longest first.

    Every example is on exactly one rank: none is repeated or left out. A rank without examples has no batch.

    `batch_size` is that of this rank. The ranks take turns, so that their token counts hardly differ.
    """
    order = torch.from_numpy(numpy.argsort(-numpy.asarray(lengths, numpy.int64), kind="stable"))
    own = order[rank::ranks]
    return (own[start : start + batch_size] for start in range(0, len(own), batch_size))


class FeatureDataset(Dataset):
    """Features, a batch at a time; with `pack`, each batch is packed."""

    def __init__(self, features: Features, padding: dict[str, int], pack: bool, round_up_to: int) -> None:
        self._make_batch = features.pack if pack else partial(features.batch, round_up_to=round_up_to)
        self._padding = padding

    def __getitem__(self, item: Selection) -> TextBatch:
        index, weight = item
        return replace(self._make_batch(index, self._padding), weight=weight)


def make_loader(
    features: Features,
    padding: dict[str, int],
    sampler: Iterable[Selection],
    pack: bool = False,
    round_up_to: int = 0,
) -> DataLoader:
    """Load the batches that a sampler yields, into pinned memory if there is a GPU.

    With `pack` a row has several features. `round_up_to`: see Features.batch().
    """
    dataset = FeatureDataset(features, padding, pack, round_up_to)
    return DataLoader(dataset, sampler=sampler, batch_size=None, pin_memory=torch.cuda.is_available())


class LengthGroupedSampler(Sampler):
    """The training batches of this rank in the current epoch, each in `accumulate` parts."""

    def __init__(
        self, features: Features, world: World, batch_size: int, seed: int, accumulate: int = 1
    ) -> None:
        self._features, self._world = features, world
        self._batch_size, self._seed, self._accumulate = batch_size, seed, accumulate
        self._steps = steps_per_epoch(len(features.lengths), batch_size, world, accumulate)
        self._epoch, self._skip = 1, (0, 0)

    def skip(self, epoch: int, steps: int) -> None:
        """Leave out the first steps of this epoch, counted from 1, which a resumed run has done already."""
        self._skip = epoch, steps

    def examples_of(self, epoch: int, step: int) -> Tensor:
        """The examples of this rank in a step, counted from 0, of an epoch, counted from 1."""
        return self._parts_of_rank(self._batches(epoch)[step])

    def _batches(self, epoch: int) -> Tensor:
        parts = self._world.size * self._accumulate
        return training_batches_by_length(self._features.lengths, self._batch_size, self._seed, epoch, parts)

    def _parts_of_rank(self, batch: Tensor) -> Tensor:
        return batch[self._world.rank * self._accumulate : (self._world.rank + 1) * self._accumulate]

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch, also of a resumed run, and counts them from 0."""
        self._epoch = epoch + 1

    def __len__(self) -> int:
        return self._steps * self._accumulate

    def __iter__(self) -> Iterator[Selection]:
        parts = self._world.size * self._accumulate
        units = torch.from_numpy(self._features.values["units"].copy())
        skip = self._skip[1] if self._epoch == self._skip[0] else 0
        for batch in self._batches(self._epoch)[skip:]:
            # The model's mean over the labels of a part is averaged over ranks by DDP, and over parts by
            # Lightning. Weighted by its share of labels, it is the mean over those of the whole batch.
            total = int(units[batch].sum())
            for index in self._parts_of_rank(batch):
                yield index, int(units[index].sum()) * parts / total
