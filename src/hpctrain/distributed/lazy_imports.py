"""Keeps torch from importing its compiler, which a trainer does not use, before the first step.

Every optimizer of torch, and DDP, imports torch._dynamo. They ask it only to leave one of their functions
alone, and whether DDP has to prepare for a compiled model. This replaces entries of sys.modules, as of torch
2.13.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"


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
