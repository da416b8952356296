"""The means of what a script passes to Run.step(): over the ranks, and the steps since the last line."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor


class Means:
    """The mean of each value of this rank over the steps that had it. Does not wait for a GPU."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor | float, int]] = {}

    def add(self, values: dict[str, Any]) -> None:
        """Count a step. A value is a number, or a tensor, of which the mean over its elements counts."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.detach()
                value = value if value.dtype == torch.float64 else value.float()
                value = value.mean() if value.dim() else value
            else:
                value = float(value)  # also of numpy
            mean, number = self._means.get(name, (0.0, 0))
            # not a sum: the mean of equal values is that value, without a rounding error
            self._means[name] = mean + (value - mean) / (number + 1), number + 1

    def clear(self) -> None:
        """Forget the steps: they are in a line of metrics, or their epoch has ended."""
        self._means = {}

    def load(self, means: dict[str, tuple[float, int]]) -> None:
        """Go on from what list_all() has returned."""
        self._means = {**means}

    def list_all(self) -> dict[str, tuple[float, int]]:
        """The mean of each value, and the number of steps that had it."""
        return {name: (float(mean), number) for name, (mean, number) in self._means.items()}


def mean_over_ranks(of_ranks: Sequence[dict[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """The mean over the ranks that have a value, and the number of its steps, from their list_all()."""
    found = {}
    for name in dict.fromkeys(name for means in of_ranks for name in means):
        means, numbers = zip(*[means[name] for means in of_ranks if name in means], strict=True)
        found[name] = fmean(means), max(numbers)
    return found
