"""The means of what a script passes to Run.step()."""

import torch

from hpctrain.run.means import Means, mean_over_ranks


def test_the_mean_of_the_steps_that_had_a_value():
    means = Means()
    means.add({"loss": torch.tensor([1.0, 2.0]), "rate": 0.5})
    means.add({"loss": torch.tensor(3.5), "rate": 0.5})
    means.add({"loss": 4})
    assert means.list_all() == {"loss": (3.0, 3), "rate": (0.5, 2)}
    resumed = Means()
    resumed.load(means.list_all())
    resumed.add({"loss": 7})
    assert resumed.list_all() == {"loss": (4.0, 4), "rate": (0.5, 2)}


def test_the_mean_of_the_ranks_that_have_a_value():
    of_ranks = [{"loss": (1.0, 2)}, {"loss": (4.0, 3), "other": (5.0, 1)}]
    assert mean_over_ranks(of_ranks) == {"loss": (2.5, 3), "other": (5.0, 1)}
