"""Keeps libraries from importing what a trainer does not use: most of the time before its first step.

Every optimizer of torch, and DDP, imports torch._dynamo, the compiler. They ask it only to leave one of their
functions alone, and whether DDP has to prepare for a compiled model. Lightning needs the name of one class of
the compiler, and it imports torchmetrics, which imports whatever else it could use if that is installed.

These functions replace entries of sys.modules, as of torch 2.13 and Lightning 2.6.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

COMPILER = "torch._dynamo"
# What torchmetrics imports if it is installed, for its pictures and for scores that hpctrain does not use.
EXTRAS = ("matplotlib", "scipy", "torchvision", "transformers")


class _Postponed(ModuleType):
    """A module that answers some questions by itself and is imported by the first other one."""

    def __getattr__(self, name: str) -> Any:
        # The import system asks for __path__ before it imports a part; others ask any module for __file__.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if isinstance(sys.modules[COMPILER], _Postponed):
            del sys.modules[COMPILER], torch._dynamo
        return getattr(importlib.import_module(self.__name__), name)


def _leave_alone(function: Callable | None = None, *_: object, **__: object) -> Callable:
    """What torch._dynamo.disable() does where nothing is compiled; without a function, a decorator."""
    return function or _leave_alone


def postpone_compiler() -> None:
    """Import torch._dynamo only when something needs it, such as torch.compile.

    Call it after init_process_group(), which would need it at once, and before the first optimizer.
    """
    if COMPILER in sys.modules:
        return
    compiler, utils = _Postponed(COMPILER), _Postponed(f"{COMPILER}.utils")
    vars(utils)["get_optimize_ddp_mode"] = lambda: "no_optimization"
    vars(compiler).update(disable=_leave_alone, graph_break=lambda *_, **__: None, utils=utils)
    sys.modules[COMPILER] = vars(torch)["_dynamo"] = compiler


@contextmanager
def import_of_lightning() -> Iterator[None]:
    """Import Lightning in the block without the compiler and without EXTRAS, in half of the time.

    In this process, a LightningModule that was given to torch.compile() is then unknown to a Trainer, and
    torchmetrics has no plot(), no BERTScore and no permutation-invariant training. The trainers of hpctrain
    use none of these; other scripts might.
    """
    from lightning_utilities.core import imports

    if "lightning" in sys.modules or not hasattr(imports, "_version"):
        yield
        return
    hidden: dict[str, Any] = dict.fromkeys(EXTRAS)  # None: the import fails
    if COMPILER not in sys.modules:
        hidden[COMPILER] = compiler = ModuleType(COMPILER)
        model_class = type("OptimizedModule", (torch.nn.Module,), {})
        vars(compiler).update(disable=_leave_alone, OptimizedModule=model_class)
    before = {name: sys.modules[name] for name in hidden if name in sys.modules}
    version = imports._version

    def version_unless_hidden(name: str) -> str:
        if name in hidden:
            raise PackageNotFoundError(name)
        return version(name)

    sys.modules.update(hidden)
    try:
        with patch.object(imports, "_version", version_unless_hidden):
            yield
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(before)
        if COMPILER not in sys.modules:
            vars(torch).pop("_dynamo", None)
