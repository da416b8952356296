"""Distributed PyTorch training from containers on supercomputers.

The names below are for other people's training scripts; docs/guides/own-script.md shows their use. Each is
imported when it is first used, so `import hpctrain` takes no time and does nothing.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("hpctrain")
except PackageNotFoundError:  # run from a source tree without an installation
    __version__ = "0+unknown"

_MODULES = {
    "all_or_none": "distributed.rendezvous",
    "broadcast": "distributed.rendezvous",
    "choose_device": "distributed.device",
    "data_loader": "training.batches",
    "detect": "distributed.world",
    "evaluation_batches": "training.batches",
    "gather": "distributed.rendezvous",
    "HpctrainError": "errors",
    "load_weights": "checkpoints.checkpoint",
    "main": "distributed.entry",
    "process_group": "distributed.rendezvous",
    "Run": "training.run",
    "RunOptions": "run.options",
    "seed_step": "training.batches",
    "settle_buckets": "training.strategies.ddp",
    "steps_per_epoch": "training.batches",
    "TarShards": "training.tar_shards",
    "trainer_parser": "parser",
    "training_batches": "training.batches",
    "UsageError": "errors",
    "World": "distributed.world",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    from hpctrain.distributed.entry import print_errors_in_one_line

    print_errors_in_one_line()
    value = globals()[name] = getattr(import_module(f"hpctrain.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """For completion in interactive Python."""
    return sorted([*globals(), *_MODULES])
