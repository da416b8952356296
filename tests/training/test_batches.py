"""The order of the data, and which rank gets which example."""

import pytest
import torch

from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.training.batches import data_loader, evaluation_batches, steps_per_epoch, training_batches


def world(rank, size):
    return World(rank, size, rank, size, 0, 1, "torchrun")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_step_takes_the_same_examples_whatever_the_number_of_ranks(size):
    alone = list(training_batches(100, 24, seed=3, epoch=2, world=world(0, 1)))
    ranks = [list(training_batches(100, 24, seed=3, epoch=2, world=world(r, size))) for r in range(size)]
    assert len(alone) == 4
    for step, batch in enumerate(alone):
        assert torch.equal(torch.cat([ranks[r][step] for r in range(size)]), batch)


@pytest.mark.parametrize(
    ("seed", "epoch", "order"),
    [
        (1, 1, [[7, 5, 6, 2], [1, 4, 0, 3]]),
        (1, 2, [[6, 1, 5, 3], [7, 0, 4, 2]]),
        (2, 1, [[4, 3, 0, 2], [6, 1, 5, 7]]),
        (2, 2, [[1, 2, 6, 7], [5, 3, 0, 4]]),
    ],
)
def test_the_order_of_a_seed_and_an_epoch_stays_what_it_is(seed, epoch, order):
    """Otherwise a run that an earlier version has started goes on with other examples."""
    batches = training_batches(8, 4, seed, epoch, world(0, 1))
    assert [batch.tolist() for batch in batches] == order


class Drawn:
    """Four examples, each with a random number."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch.rand(1).item()


@pytest.mark.parametrize(
    ("seed", "epoch", "drawn"),
    [
        (1, 1, {0: 0.2772, 1: 0.9665, 2: 0.8854, 3: 0.7207}),
        (1, 2, {0: 0.2653, 1: 0.3247, 2: 0.1310, 3: 0.0391}),
        (2, 1, {0: 0.0017, 1: 0.5801, 2: 0.4670, 3: 0.1031}),
        (2, 2, {0: 0.8087, 1: 0.4716, 2: 0.0871, 3: 0.8894}),
    ],
)
def test_the_random_numbers_of_an_example_stay_what_they_are(seed, epoch, drawn):
    loader = data_loader(Drawn(), 2, seed, epoch, world(0, 1))
    found = {
        index: value
        for batch in loader
        for index, value in zip(*map(torch.Tensor.tolist, batch), strict=True)
    }
    assert found == pytest.approx(drawn, abs=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_evaluation_has_every_example_once(size):
    seen = torch.cat([index for r in range(size) for index in evaluation_batches(100, 8, world(r, size))])
    assert seen.tolist() == list(range(100))


def test_batches_that_cannot_be_shared():
    with pytest.raises(UsageError, match=r"--batch-size 10 .* 4 ranks .* multiple of 4, such as 8"):
        steps_per_epoch(100, 10, world(0, 4))
    with pytest.raises(UsageError, match="--batch-size 128 is more than the 100"):
        steps_per_epoch(100, 128, world(0, 4))
