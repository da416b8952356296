"""Which kernels compute a model: --compile and --deterministic."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain.errors import HpctrainError
from hpctrain.files.trust import refuse_changeable
from hpctrain.text import first_line


def make_deterministic(deterministic: bool, device: torch.device, *, on_gpu: bool = False) -> None:
    """Let each operation give the same bits in every run. Call this before the first operation.

    With `deterministic` an operation that cannot raises RuntimeError. Without it, and with `on_gpu`, such an
    operation on a GPU warns, and CPUs are left alone: they give the same bits anyway, and the setting imports
    torch's compiler, which takes two seconds.
    """
    if deterministic or (on_gpu and device.type == "cuda"):
        # cuBLAS needs this variable for the same bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not deterministic)
        # Filling takes a twentieth of a step, and helps only programs that read uninitialized memory.
        deterministic_module: Any = torch.utils.deterministic  # makes its property at run time
        deterministic_module.fill_uninitialized_memory = False


def check_compiler(rank: int = 0) -> None:
    """Compile a line, for --compile. Rank 0 prints that the first step will take long.

    Raises HpctrainError if torch cannot compile, or would load code that another user can write.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    umask = os.umask(0o077)
    try:
        folder = Path(cache_dir())  # made here; its name in /tmp is known to all users of the node
    finally:
        os.umask(umask)
    refuse_changeable(folder, advice="for --compile, set TORCHINDUCTOR_CACHE_DIR to a folder of yours")
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8))
    except Exception as error:  # the class depends on what is missing
        cause = (
            "it needs g++ and the headers of Python, which the CUDA images have and the CPU image has not; "
            "add them, or leave --compile out"
        )
        if " " in torch.__file__:
            cause = f"g++ gets {torch.__path__[0]} as two words; move this Python to a path without a space"
        raise HpctrainError(f"--compile: torch cannot compile here ({first_line(error)}): {cause}") from error
    if rank == 0:
        print("--compile: kernels are made at the first step, which may take minutes", flush=True)


def compile_training(model: nn.Module, *, dynamic: bool | None = None, by_block: bool = False) -> None:
    """Let torch.compile make the kernels of training steps, at the first step.

    In evaluation mode the model computes as before. Otherwise evaluations, settle_buckets() and generate(),
    whose inputs have other shapes, would compile kernels of their own. The names of the weights stay, and
    copies are not compiled. `dynamic`: the same kernels for inputs of all shapes.

    `by_block`: compile each layer of a transformer by itself. The layers are alike, so all take as long as
    one, whereas the whole BERT-large took more than two minutes. FSDP needs it: its hooks would cut the graph
    of a compiled model.
    """
    # DDP warns of the strides of dimensions of size 1, which kernels for 1x1 convolutions choose freely.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    blocks = []
    if by_block:
        from hpctrain.training.strategies.fsdp import find_blocks  # imports much of torch

        blocks = find_blocks(model)
    for block in blocks or [model]:
        _compile(block, dynamic)


def _compile(module: nn.Module, dynamic: bool | None) -> None:
    plain, compiled = module._call_impl, torch.compile(module._call_impl, dynamic=dynamic)

    def call(*inputs: Any, **named: Any) -> Any:
        return (compiled if module.training else plain)(*inputs, **named)

    module._compiled_call_impl = call
