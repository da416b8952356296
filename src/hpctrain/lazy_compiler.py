"""Keeps torch from importing its compiler in a program that compiles nothing.

Every optimizer of torch, and DDP, imports torch._dynamo, which takes half of the time from the start of a rank to its first
step. They ask it only to leave one of their functions alone, and whether DDP has to prepare for a compiled model.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"


class _Postponed(ModuleType):
    """A module that answers some questions by itself and is imported by the first other one."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        # The import system asks for __path__ before it imports a part of the package. Others ask every module for its __file__.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if isinstance(sys.modules[COMPILER], _Postponed):
            del sys.modules[COMPILER], torch._dynamo
        return getattr(importlib.import_module(self.__name__), name)


def postpone_compiler() -> None:
    """Import torch._dynamo only when something needs it, such as torch.compile.

    Call it after torch.distributed.init_process_group(), which would need it at once, and before the first optimizer.
    """
    if COMPILER in sys.modules:
        return
    compiler, utils = _Postponed(COMPILER), _Postponed(f"{COMPILER}.utils")
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda *_, **__: None
    compiler.utils = utils
    utils.get_optimize_ddp_mode = lambda: "no_optimization"
    sys.modules[COMPILER] = torch._dynamo = compiler
