"""Which evaluation is the best one."""

from hpctrain.run.best import Best


def test_an_equal_score_is_no_better_one():
    """The first of several equal checkpoints is kept, and they count against the patience."""
    best = Best()
    best.patience = 2
    assert [best.add(epoch, 0, score) for epoch, score in ((1, 0.5), (2, 0.5), (3, 0.6))] == [
        True,
        False,
        True,
    ]
    assert (best.epoch, best.since) == (3, 0)
    assert not best.add(4, 0, 0.6) and not best.has_stalled
    assert not best.add(5, 0, 0.5) and best.has_stalled
