"""The order and the length of batches."""

from itertools import permutations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nlp.batches import sampling
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.tasks import classify
from hpctrain.training.batches import Part
from tests.nlp.data.test_formats import find_data


@pytest.fixture(scope="module")
def lengths():
    """The lengths of NSMC's training reviews in characters: a long tail, and some empty ones."""
    return numpy.array([len(d.text) for d in classify.TASK.read(find_data("nsmc/ratings_train.txt"))])


@pytest.fixture(scope="module")
def few_lengths():
    return numpy.random.default_rng(0).integers(1, 100, 1003)


def test_step_takes_the_same_examples_on_any_number_of_ranks(few_lengths):
    one = sampling.training_batches_by_length(few_lengths, 24, seed=1, epoch=2, parts=1)
    for parts in (2, 3, 8):
        dealt = sampling.training_batches_by_length(few_lengths, 24, seed=1, epoch=2, parts=parts)
        assert dealt.shape == (41, parts, 24 // parts)
        assert torch.equal(dealt.flatten(1).sort(1).values, one.flatten(1).sort(1).values)


def test_order_depends_on_seed_and_epoch_and_has_each_example_once(few_lengths):
    def order(seed, epoch):
        return sampling.training_batches_by_length(few_lengths, 24, seed, epoch, 1)[:, 0]

    first = order(1, 0)
    assert torch.equal(first, order(1, 0))
    assert len(first.unique()) == first.numel() == 1003 // 24 * 24
    compositions = [
        {tuple(sorted(batch)) for batch in order(*at).tolist()} for at in ((1, 0), (1, 1), (2, 0))
    ]
    assert not compositions[0] & compositions[1] and not compositions[0] & compositions[2]
    left_out = [set(range(1003)) - set(order(1, epoch).flatten().tolist()) for epoch in range(2)]
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize(
    ("seed", "epoch", "order"),
    [
        (1, 1, [[[2, 1], [11, 5]], [[4, 9], [0, 10]], [[6, 3], [8, 7]]]),
        (1, 2, [[[2, 5], [0, 10]], [[8, 3], [11, 7]], [[6, 1], [4, 9]]]),
        (2, 1, [[[2, 9], [0, 7]], [[4, 5], [8, 11]], [[6, 1], [3, 10]]]),
    ],
)
def test_the_order_of_a_seed_and_an_epoch_stays_what_it_is(seed, epoch, order):
    """Otherwise a run that an earlier version has started goes on with other examples."""
    lengths = [5, 1, 9, 3, 7, 2, 8, 4, 6, 1, 3, 5]
    assert sampling.training_batches_by_length(lengths, 4, seed, epoch, parts=2).tolist() == order


def test_the_mean_over_parts_is_that_of_all_labels():
    """Each part's mean counts by its labels: here two parts of three and one label."""
    features = Features.from_lists({"input_ids": [[5], [6], [7], [8]]}, {"units": [1, 2, 1, 0]})
    texts, step = sampling.TrainingTexts(features, {}), torch.arange(4)
    parts = [Part(number, 1, examples, step) for number, examples in enumerate(step.split(2))]
    weights = [batch.weight for batch in texts.load_batches(parts, torch.device("cpu"))]
    assert weights == [3 * 2 / 4, 1 * 2 / 4]  # run.backward() divides by the two parts


def test_batches_change_between_epochs(few_lengths):
    def meetings(epoch):
        return {
            pair
            for b in sampling.training_batches_by_length(few_lengths, 24, 1, epoch, 1)[:, 0].tolist()
            for pair in permutations(b, 2)
        }

    first, second = meetings(0), meetings(1)
    assert len(first & second) / len(first) < 0.3  # 0.16 measured; 0.71 if all examples are sorted together


def test_batch_with_the_longest_text_comes_first(few_lengths):
    # 1003 = 59 * 17, so no example is left out
    order = sampling.training_batches_by_length(few_lengths, 17, seed=0, epoch=0, parts=1)
    assert few_lengths[order[0].numpy()].max() == few_lengths.max()


def test_batch_of_all_examples_is_one_step():
    assert sampling.training_batches_by_length([3, 1, 2, 5], 4, 0, 0, 2).shape == (1, 2, 2)


def real_token_share(lengths, batches):
    """The fraction of tokens that are not padding, if each batch is padded to its longest example."""
    parts = [torch.as_tensor(lengths)[batch] for batch in batches]
    return sum(int(part.sum()) for part in parts) / sum(len(part) * int(part.max()) for part in parts)


@pytest.mark.slow
def test_training_batches_have_little_padding_and_balanced_ranks(lengths):
    dealt = sampling.training_batches_by_length(lengths, 32, seed=1, epoch=0, parts=4)
    assert real_token_share(lengths, dealt.flatten(0, 1)) >= 0.97  # 0.98 measured; 0.93 is required
    real_tokens = lengths[dealt.numpy()].sum(2)
    padded = lengths[dealt.numpy()].max(2)
    # over an epoch in which all wait for the most loaded rank
    for tokens, most in ((real_tokens, 1.002), (padded, 1.005)):
        assert tokens.max(1).sum() / tokens.mean(1).sum() <= most
    assert numpy.quantile(real_tokens.max(1) / real_tokens.mean(1), 0.99) <= 1.03
    # Without sorting, about half of the tokens are padding.
    shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))[: 4000 * 8].view(
        -1, 8
    )
    assert real_token_share(lengths, shuffled) < 0.6


def test_evaluation_batches_have_each_example_once_and_balanced_ranks(few_lengths):
    parts = [list(sampling.evaluation_batches_by_length(few_lengths, 16, rank, 3)) for rank in range(3)]
    assert sorted(torch.cat([batch for part in parts for batch in part]).tolist()) == list(range(1003))
    assert all(len(batch) == 16 for part in parts for batch in part[:-1])
    tokens = [few_lengths[torch.cat(part).numpy()].sum() for part in parts]
    assert max(tokens) / min(tokens) < 1.01
    assert real_token_share(few_lengths, [b for part in parts for b in part]) > 0.95


@given(examples=st.integers(0, 9), ranks=st.integers(1, 5), batch_size=st.integers(1, 4))
def test_evaluation_batches_are_never_empty(examples, ranks, batch_size):
    """A rank without examples had one batch of no examples, in which no model could reshape its input."""
    parts = [
        list(sampling.evaluation_batches_by_length([1] * examples, batch_size, rank, ranks))
        for rank in range(ranks)
    ]
    assert all(1 <= len(batch) <= batch_size for part in parts for batch in part)
    assert sum(len(batch) for part in parts for batch in part) == examples
