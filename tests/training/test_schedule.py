"""The schedules of the learning rate are those of transformers."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from hpctrain.training import schedule


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schedule.linear, get_linear_schedule_with_warmup),
        (schedule.cosine, get_cosine_schedule_with_warmup),
    ],
)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.1), (7, 0), (10, 0.1), (23, 0.3), (40, 1)])
def test_the_learning_rate_is_that_of_transformers(ours, theirs, steps, warmup):
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=2e-3)
    expected = theirs(optimizer, round(warmup * steps), steps)
    for step in range(steps):
        found = 2e-3 * ours(step, steps, warmup)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18), step
        optimizer.step()
        expected.step()
