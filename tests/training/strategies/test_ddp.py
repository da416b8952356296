"""DistributedDataParallel for the loop: what its first backward pass leaves behind."""

import torch
from torch import nn

from hpctrain.training.strategies.ddp import settle_buckets


def test_settling_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    settle_buckets(model, lambda: model(torch.ones(3, 2)).sum())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.rand(1), expected) and model.training
    assert all(parameter.grad is None for parameter in model.parameters())
