"""PyTorch Lightning: RunFolder for Trainers of users, and the Trainer of hpctrain's own commands."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.lightning.run_folder import RunFolder

__all__ = ["RunFolder"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has the name
    # Lazy, because the modules of this package import Lightning in different ways: see lazy_imports.py.
    if name != "RunFolder":
        raise AttributeError(f"module 'hpctrain.lightning' has no attribute {name!r}")
    from hpctrain.lightning.run_folder import RunFolder

    return RunFolder
