"""Which kernels compute a model: --compile and --deterministic."""

import argparse
import os
import warnings

import torch
from torch import nn

from hpctrain.errors import HpctrainError
from hpctrain.text import first_line


def make_deterministic(args: argparse.Namespace, device: torch.device, *, on_gpu: bool = False) -> None:
    """With --deterministic, let each operation give the same bits in every run, or raise RuntimeError if it
    cannot.

    `on_gpu`: without the option, ask for it on a GPU too, where an operation that cannot only warns. A CPU
    gives the same bits anyway, so there the call, which imports the compiler for two seconds, is left out.
    Call it before the first operation.
    """
    if args.deterministic or (on_gpu and device.type == "cuda"):
        # without it cuBLAS does not promise the same bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not args.deterministic)
        # a twentieth of a step, for programs that read such memory
        torch.utils.deterministic.fill_uninitialized_memory = False


def check_compiler(args: argparse.Namespace, rank: int = 0) -> None:
    """With --compile, compile a line.

    Raises HpctrainError if torch cannot, or would load code that another user can write.

    Rank 0 says that the first step will take long.
    """
    if not args.compile:
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = cache_dir()
    if os.lstat(folder).st_uid != os.getuid():  # its name in /tmp is known to all users of the node
        raise HpctrainError(
            f"--compile: {folder} belongs to another user: set TORCHINDUCTOR_CACHE_DIR to a folder of yours"
        )
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8))
    except Exception as error:  # of many kinds, by what is missing
        raise HpctrainError(
            f"--compile: torch cannot compile here ({first_line(error)}): it needs g++ and the headers of Python, which the CUDA "
            "images have and the CPU image has not; add them, or leave --compile out"
        ) from error
    if rank == 0:
        print("--compile: kernels are made at the first step, which may take minutes", flush=True)


def compile_training(model: nn.Module, *, dynamic: bool | None = None, by_block: bool = False) -> None:
    """Let torch.compile make the kernels of training steps, at the first one; in evaluation mode the model
    computes as before.

    So evaluations, settle_buckets() and generate(), whose inputs have other shapes, do not compile kernels of
    their own. The names of the weights stay, and copies are not compiled. `dynamic`: the same kernels for
    inputs of all shapes.

    `by_block`: compile each layer of a transformer by itself. They are alike, so it takes as long as for one
    of them, whereas the whole BERT-large took more than two minutes. For FSDP it has to be so: within a
    compiled model, its hooks would cut the graph.
    """
    # DDP compares the strides of dimensions of size 1, too, which kernels for 1x1 convolutions choose freely.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    blocks = []
    if by_block:
        from hpctrain.training.sharding import find_blocks  # imports much of torch

        blocks = find_blocks(model)
    for block in blocks or [model]:
        _compile(block, dynamic)


def _compile(module: nn.Module, dynamic: bool | None) -> None:
    plain, compiled = module._call_impl, torch.compile(module._call_impl, dynamic=dynamic)
    module._compiled_call_impl = lambda *inputs, **named: (compiled if module.training else plain)(
        *inputs, **named
    )
