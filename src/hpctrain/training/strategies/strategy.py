"""The interface of a strategy: how the ranks of a run share a model.

A new strategy is one file NAME.py beside this one, with a subclass STRATEGY, for
`run.prepare(model, strategy="NAME")`.
"""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain.distributed.world import World
from hpctrain.errors import UsageError


class Strategy:
    """One rank that trains alone, and what the others change of that.

    `in_parts`: each rank has, and saves, a part of the model. `data_world`: the place of this rank among the
    ranks that compute different examples.
    """

    in_parts = False

    def __init__(self, world: World, device: torch.device, precision: str) -> None:
        self.world, self.device, self.precision = world, device, precision
        self.data_world = world

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model that the loop calls, on the device of this rank. A collective call."""
        return model.to(self.device)

    def average(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """The block of an optimizer step: in it, the gradients are means over the ranks."""
        return nullcontext()

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """What this rank saves of a state: all of it, or its part of each tensor."""
        return state

    def load(self, target: nn.Module | torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state, whole or in parts, into a model or an optimizer."""
        target.load_state_dict(state)

    def gather(self, model: nn.Module) -> nn.Module:
        """The model with all of its weights on rank 0, as it was before wrap(). A collective call."""
        return model


def make_strategy(name: str, world: World, device: torch.device, precision: str) -> Strategy:
    """The strategy of this name. Raises UsageError, with the names that there are."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py") if path.stem != "strategy")
    if name not in known:
        raise UsageError(f"there is no strategy {name!r}: choose from {', '.join(known)}")
    module = import_module(f"{__package__}.{name}")
    strategy: Strategy = module.STRATEGY(world, device, precision)
    return strategy
