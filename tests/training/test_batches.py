"""The order of the data, and which rank gets which example."""

import pytest
import torch

from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.training.batches import evaluation_batches, steps_per_epoch, training_batches


def world(rank, size):
    return World(rank, size, rank, size, 0, 1, "torchrun")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_step_takes_the_same_examples_whatever_the_number_of_ranks(size):
    alone = list(training_batches(100, 24, seed=3, epoch=2, world=world(0, 1)))
    ranks = [list(training_batches(100, 24, seed=3, epoch=2, world=world(r, size))) for r in range(size)]
    assert len(alone) == 4
    for step, batch in enumerate(alone):
        assert torch.equal(torch.cat([ranks[r][step] for r in range(size)]), batch)


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return torch.cat(list(training_batches(96, 24, seed, epoch, world(0, 1)))).tolist()

    assert order(1, 1) == order(1, 1)
    assert order(1, 1) != order(1, 2) and order(1, 1) != order(2, 1)
    assert sorted(order(1, 1)) == list(range(96))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_evaluation_has_every_example_once(size):
    seen = torch.cat([index for r in range(size) for index in evaluation_batches(100, 8, world(r, size))])
    assert seen.tolist() == list(range(100))


def test_batches_that_cannot_be_shared():
    with pytest.raises(UsageError, match=r"--batch-size 10 .* 4 ranks .* multiple of 4, such as 8"):
        steps_per_epoch(100, 10, world(0, 4))
    with pytest.raises(UsageError, match="--batch-size 128 is more than the 100"):
        steps_per_epoch(100, 128, world(0, 4))
