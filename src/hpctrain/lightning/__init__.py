"""PyTorch Lightning: RunFolder and WorldEnvironment for users' Trainers, and hpctrain's own Trainer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.lightning.run_folder import RunFolder, WorldEnvironment

__all__ = ["RunFolder", "WorldEnvironment"]


def __getattr__(name: str) -> Any:
    # Not at the top: trainer.py, imported after this, imports Lightning in another way (lazy_imports.py).
    if name not in __all__:
        raise AttributeError(f"module 'hpctrain.lightning' has no attribute {name!r}")
    from hpctrain.lightning import run_folder

    return getattr(run_folder, name)
