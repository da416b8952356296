"""Refuses a Lightning Trainer that would train alone on every rank of a job, which the defaults of Trainer do on CPUs.

Lightning calls the functions at the end whenever a Trainer is made: see its entry points in pyproject.toml.
"""

import os
import sys
from typing import Any

from hpctrain.entry import print_errors_in_one_line
from hpctrain.errors import UsageError
from hpctrain.world import detect


def _make_callbacks(package: str) -> list[Any]:
    """A callback of this package, in a job of more than one rank that a launch script has started."""
    if int(os.environ.get("HPCTRAIN_WORLD_SIZE") or 1) == 1:
        return []

    class OneWorld(sys.modules[package].Callback):
        """Compares the number of processes of a Trainer, before it trains, with that of the job."""

        def setup(self, trainer: Any, module: Any, stage: str) -> None:  # noqa: ANN401 - of one of two packages
            """Raise UsageError if the Trainer has one process and the job has more."""
            world = detect()
            if stage == "fit" and trainer.world_size == 1 < world.size:
                print_errors_in_one_line()
                raise UsageError(
                    f"this Trainer trains alone on each of the {world.size} ranks: make it with devices={world.local_size}, "
                    f'num_nodes={world.nodes}, strategy="ddp"; for separate trainings, unset HPCTRAIN_WORLD_SIZE before that'
                )

    return [OneWorld()]


def callbacks_of_lightning() -> list[Any]:
    """For `import lightning`."""
    return _make_callbacks("lightning.pytorch")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """For `import pytorch_lightning`."""
    return _make_callbacks("pytorch_lightning")
