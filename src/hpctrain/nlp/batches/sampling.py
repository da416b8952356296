"""Batches of texts of similar length, so that there is little padding and every rank computes as many tokens.

The order is a pure function of (seed, epoch), so resuming needs no state but the epoch and the step. A step
takes the same examples on any number of ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.training.batches import Part

# Batches sorted by length together. More leave less padding, but fewer ways to combine examples.
POOL = 100


class Selection(NamedTuple):
    """The examples of a batch, and its weight and number: see TextBatch."""

    examples: Tensor
    weight: float = 1.0
    number: int = 0


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
    """Features, a batch at a time; with `pack`, each batch is packed. `round_up_to`: see Features.batch()."""

    def __init__(
        self, features: Features, padding: dict[str, int], pack: bool = False, round_up_to: int = 0
    ) -> None:
        self._make_batch = features.pack if pack else partial(features.batch, round_up_to=round_up_to)
        self._padding = padding

    def __getitem__(self, item: Selection) -> TextBatch:
        return replace(self._make_batch(item.examples, self._padding), weight=item.weight, number=item.number)


class TrainingTexts(FeatureDataset):
    """The training set, which loads the parts of run.batches() itself.

    The model's mean over the labels of a part is averaged over the ranks by DDP, and over the parts by
    run.backward(). Weighted by the part's share of labels, it is the mean over those of the whole batch.
    """

    def __init__(
        self, features: Features, padding: dict[str, int], pack: bool = False, round_up_to: int = 0
    ) -> None:
        super().__init__(features, padding, pack, round_up_to)
        self.lengths = features.lengths
        self._units = torch.from_numpy(features.values["units"].copy())

    def __len__(self) -> int:
        return len(self._units)

    def load_batches(self, parts: Iterable[Part], device: torch.device) -> Iterable[TextBatch]:
        """The batches of these parts, in pinned memory if the device is a GPU."""
        return _load(self, map(self._select, parts))

    def _select(self, part: Part) -> Selection:
        number_of_parts = len(part.step) // len(part.examples)
        own, whole = (int(self._units[index].sum()) for index in (part.examples, part.step))
        return Selection(part.examples, own * number_of_parts / whole, part.number)


def make_loader(
    features: Features, padding: dict[str, int], batches: Iterable[Selection], round_up_to: int = 0
) -> DataLoader:
    """Load these batches, into pinned memory if there is a GPU."""
    return _load(FeatureDataset(features, padding, round_up_to=round_up_to), batches)


def _load(dataset: FeatureDataset, batches: Iterable[Selection]) -> DataLoader:
    return DataLoader(dataset, sampler=batches, batch_size=None, pin_memory=torch.cuda.is_available())
