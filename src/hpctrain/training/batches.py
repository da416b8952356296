"""The order of the data: which examples each rank takes in each step.

The order is a pure function of (seed, epoch). A global batch is a slice of it, and each rank takes a slice of
the batch, so a step sees the same examples on any number of ranks, and resuming needs no state but the epoch
and the step.
"""

import operator
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hpctrain.distributed.world import World
from hpctrain.errors import UsageError


def check_batch_size(batch_size: int, world: World, accumulate: int = 1) -> None:
    """Raise UsageError if the ranks cannot share a global batch evenly, in `accumulate` parts each."""
    parts = world.size * accumulate
    if batch_size % parts:
        near = max(parts, batch_size // parts * parts)
        ranks = f"{world.size} ranks" + (f" with --accumulate {accumulate}" if accumulate > 1 else "")
        raise UsageError(
            f"--batch-size {batch_size} is the global batch, and {ranks} cannot share it evenly: "
            f"use a multiple of {parts}, such as {near}"
        )


def steps_per_epoch(examples: int, batch_size: int, world: World, accumulate: int = 1) -> int:
    """The number of global batches in an epoch. A remainder of less than a batch is dropped.

    Raises UsageError as check_batch_size() does, or if there are fewer examples than one batch.
    """
    check_batch_size(batch_size, world, accumulate)
    if batch_size > examples:
        raise UsageError(
            f"--batch-size {batch_size} is more than the {examples} training examples: use a smaller one"
        )
    return examples // batch_size


def training_batches(
    examples: int, batch_size: int, seed: int, epoch: int, world: World, skip: int = 0
) -> Iterator[Tensor]:
    """The examples of this rank for each step of an epoch: int64 indices [batch_size / world.size].

    `batch_size` is the global one. The first `skip` steps are left out: a resumed run has done them. Raises
    UsageError as steps_per_epoch() does.
    """
    for part in EpochPlan(examples, batch_size, seed, epoch, world).parts(skip):
        yield part.examples


def evaluation_batches(examples: int, batch_size: int, world: World) -> Iterator[Tensor]:
    """The examples of this rank for evaluation, in order: int64 indices, at most `batch_size` at a time.

    Every example belongs to exactly one rank: none is padded, repeated or dropped. A rank may have none.
    """
    first, last = (examples * rank // world.size for rank in (world.rank, world.rank + 1))
    for start in range(first, last, batch_size):
        yield torch.arange(start, min(start + batch_size, last))


class Part(NamedTuple):
    """What a rank computes at once: its examples of a step, or one of several parts of them."""

    number: int  # of the part in its epoch, from 0
    epoch: int  # the pass over the data, from 1, on which random numbers of the data depend
    examples: Tensor  # int64 [n], of this rank in this part
    step: Tensor  # int64 [batch size], the examples of all ranks and parts in this step


@runtime_checkable
class Loads(Protocol):
    """A data set that loads whole batches itself, for example on the GPU, and not one example at a time."""

    def __len__(self) -> int: ...

    def load_batches(self, parts: Iterable[Part], device: torch.device) -> Iterable[Any]:
        """The batch of each part in turn."""


class EpochPlan:
    """Which examples this rank computes in an epoch, `accumulate` parts in each step.

    The order is that of training_batches(). An epoch is one pass over the data, or has this many `steps`,
    where each epoch goes on with the data where the last one ended. Or it is an `order` of the caller's own:
    int64 [steps, ranks * accumulate, examples]. Raises UsageError as steps_per_epoch() does.
    """

    def __init__(
        self,
        examples: int,
        batch_size: int,
        seed: int,
        epoch: int,
        world: World,
        *,
        steps: int | None = None,
        accumulate: int = 1,
        order: Tensor | None = None,
    ) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed
        self._epoch, self._world, self._accumulate, self._order = epoch, world, accumulate, order
        if order is None:
            self._in_pass = steps_per_epoch(examples, batch_size, world, accumulate)
            self.steps = steps or self._in_pass
        else:
            self.steps = self._in_pass = len(order)

    def parts(self, skip: int = 0) -> Iterator[Part]:
        """The parts of this rank, without those of the first `skip` steps, which a resumed run has done."""
        own = slice(self._world.rank * self._accumulate, (self._world.rank + 1) * self._accumulate)
        order, current = self._order, self._epoch if self._order is not None else 0
        for step in range(skip, self.steps):
            if self._order is None:
                passes, place = divmod((self._epoch - 1) * self.steps + step, self._in_pass)
                if passes + 1 != current:
                    current = passes + 1
                    order = make_order(self._examples, self._seed, current)
                    order = order[: self._in_pass * self._batch_size]
                    order = order.view(self._in_pass, self._world.size * self._accumulate, -1)
            else:
                place = step
            assert order is not None
            for part, examples in enumerate(order[place, own]):
                yield Part(step * self._accumulate + part, current, examples, order[place].flatten())

    def examples_of(self, step: int) -> Tensor:
        """The examples of this rank in all parts of a step, counted from 0: int64 [n]."""
        return torch.cat([part.examples for part in islice(self.parts(step), self._accumulate)])


def make_order(examples: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in a pass over the data, counted from 1: int64 [examples]."""
    return torch.randperm(examples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def load_parts(dataset: Dataset, parts: Iterable[Part], seed: int, **options: Any) -> DataLoader:
    """A DataLoader of the examples of each part, whose random numbers are as data_loader() says."""
    keys = [[Key(part.epoch, index) for index in part.examples.tolist()] for part in parts]
    # Without a generator, the loader draws from the random numbers that the model uses for dropout.
    loader: DataLoader = DataLoader(dataset, batch_sampler=keys, generator=torch.Generator(), **options)
    seed_loader(loader, seed)
    return loader


def data_loader(
    dataset: Dataset,
    batch_size: int,
    seed: int,
    epoch: int,
    world: World,
    skip: int = 0,
    steps: int | None = None,
    **options: Any,
) -> DataLoader:
    """A DataLoader of the batches of training_batches(), for one epoch, without its first `skip` batches.

    An epoch is one pass over the data, or has this many `steps`, where each epoch goes on with the data where
    the last one ended. `options` are options of DataLoader, such as num_workers.

    Random numbers that the dataset draws for an example (with torch, random and numpy) depend on (seed,
    epoch, example) alone, and those of collate_fn on (seed, epoch, examples of the batch), as do those of a
    dataset that has __getitems__() and gives a batch at once. A resumed run sees the same augmented batches,
    with any number of workers. Raises UsageError as steps_per_epoch() does.
    """
    examples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__()
    plan = EpochPlan(examples, batch_size, seed, epoch, world, steps=steps)
    return load_parts(dataset, plan.parts(skip), seed, **options)


def seed_loader(loader: DataLoader, seed: int) -> None:
    """Let the random numbers of a loader depend on the seed, and the keys that its batches consist of."""
    if not isinstance(loader.dataset, SeededByKey):
        # DataLoader refuses another dataset because of its workers, which it does not have yet.
        object.__setattr__(loader, "dataset", SeededByKey(loader.dataset, seed))
        loader.collate_fn = SeededCollate(loader.collate_fn, seed)


def can_fork_beside_threads() -> bool:
    """Whether workers of a DataLoader may be forked, as they are by default.

    In Python before 3.10.15 and 3.11.10 a process that forks while a thread of torch or Horovod enters Python
    has a child that hangs (github.com/python/cpython/issues/112275). The images have no such fault:
    containers/install/fork_lock.c.
    """
    version = sys.version_info[:3]
    return version >= (3, 11, 10) or (3, 10, 15) <= version < (3, 11) or "hpctrain_fork_lock" in sys.modules


class ResumableBatches:
    """The first `number` batches of a user's batch sampler, as lists of keys: see SeededByKey.

    Where the dataset makes the batches (batch_size=None), `inner` is a sampler, and gives no lists.

    `epoch` returns the current epoch. The order depends on (seed, epoch) alone, even if the sampler draws
    random numbers without a seed. The first `skip` batches of the first epoch are left out.
    """

    def __init__(
        self,
        inner: Any,
        number: int,
        epoch: Callable[[], int],
        seed: int,
        skip: int,
        *,
        in_lists: bool = True,
    ) -> None:
        self.inner, self._number, self._epoch, self._seed, self._skip = inner, number, epoch, seed, skip
        self._in_lists = in_lists

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch()
        samplers: list[Any] = [self.inner, getattr(self.inner, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(hash((self._seed, epoch)))
        with _random_numbers_of(self._seed, epoch):
            batches = [*islice(self.inner, self._number)]
        skip, self._skip = self._skip, 0
        for batch in batches[skip:]:
            yield [Key(epoch, index) for index in batch] if self._in_lists else Key(epoch, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Key(NamedTuple):
    """An example in an epoch. Persistent workers have a copy of the dataset, and learn the epoch from it."""

    epoch: int
    index: Any


class Examples(NamedTuple):
    """A batch before it is collated."""

    keys: list[Key]
    values: Any


class SeededByKey(Dataset):
    """A user's dataset whose random numbers for an example depend on (seed, epoch, example) alone.

    For callbacks that know the loader it is the dataset itself: they index it without an epoch.
    """

    def __init__(self, inner: Dataset, seed: int) -> None:
        vars(self).update(inner=inner, _seed=seed)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, Key):
            return self.inner[key]
        with _random_numbers_of(self._seed, *key):
            return self.inner[key.index]

    def __getitems__(self, keys: list[Key]) -> Examples:
        """The keys, for SeededCollate, and their examples.

        In one call if the dataset can give several, as those of Hugging Face can.
        """
        at_once = getattr(self.inner, "__getitems__", None)
        if at_once is None:
            return Examples(keys, [self[key] for key in keys])
        indices = [key.index for key in keys]
        with _random_numbers_of(self._seed, keys[0].epoch, *indices):  # a batch is of one epoch
            return Examples(keys, at_once(indices))

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


class SeededCollate:
    """A user's collate_fn, for batches of a SeededByKey, on which alone its random numbers depend."""

    def __init__(self, inner: Callable[[Any], Any], seed: int) -> None:
        self.inner, self._seed = inner, seed

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, Examples):
            return self.inner(batch)
        # -1: other random numbers than those of the examples
        indices = (key.index for key in batch.keys)
        with _random_numbers_of(self._seed, batch.keys[0].epoch, *indices, -1):
            return self.inner(batch.values)

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)


def _inner_attribute(wrapper: Any, name: str) -> Any:
    # Neither has inner while it is unpickled, and how that is done is not for inner to say.
    if name == "inner" or name.startswith("__"):
        raise AttributeError(name)
    return getattr(wrapper.inner, name)


@contextmanager
def _random_numbers_of(*key: Any) -> Iterator[None]:
    """Random numbers on the CPU that depend on the key. Afterwards the earlier ones continue."""
    number = hash(tuple(map(_as_integer, key)))  # of integers, the same in every process
    before, before_torch = random.getstate(), torch.random.get_rng_state()
    numpy = sys.modules.get("numpy")
    before_numpy = numpy.random.get_state() if numpy else None
    random.seed(number)
    # torch.manual_seed() also seeds GPUs, which a worker must not touch
    torch.default_generator.manual_seed(number)
    if numpy:
        numpy.random.seed(number % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        torch.random.set_rng_state(before_torch)
        if numpy:
            numpy.random.set_state(before_numpy)


def _as_integer(index: Any) -> int:
    """A number for an index of a data set, which may also be a tensor or a name."""
    try:
        return operator.index(index)
    except TypeError:
        return zlib.crc32(repr(index).encode())


def seed_step(seed: int, epoch: int, step: int, world: World) -> None:
    """Seed by (seed, epoch, step, rank), before the step: a resumed run has the same dropout."""
    seed_everything(hash((seed, epoch, step, world.rank)))


def count_examples(loader: Any) -> int | None:
    """The examples of the data set of a loader; None for a stream."""
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None


def seed_everything(number: int) -> None:
    """Seed torch, random and, if it is imported, numpy."""
    seed_torch(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)


def seed_torch(number: int) -> None:
    """Seed torch, in each step: torch.manual_seed() takes 0.25 ms for devices that are not there."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
