"""How many floating-point operations a model needs to train on an example, and how many a GPU can do.

Matrix products, attention and convolutions of the forward and the backward pass count, each multiplication
and each addition as one operation (as in PaLM, Chowdhery et al. 2022, arxiv.org/abs/2204.02311, appendix B).
Padding and the recomputation of gradient checkpointing do not count.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy
from torch import Tensor, nn

# Peak of dense products in bf16 and fp16 in TFLOP/s, from NVIDIA's data sheets, by a part of the device's
# name; the first match counts. A figure that a sheet gives only with sparsity is halved.
PEAKS = (
    ("B200", 2250.0), ("GH200", 989.4), ("H200", 989.4),
    ("H100 PCIe", 756.0), ("H100 NVL", 835.5), ("H100", 989.4),
    ("A100", 312.0), ("A40", 149.7), ("A30", 165.0), ("A10", 125.0),
    ("L40S", 362.05), ("L40", 181.05), ("L4", 121.0),
    ("V100S", 130.0), ("V100-PCIE", 112.0), ("V100", 125.0), ("T4", 65.0),
)  # fmt: skip


def count_flops(model: nn.Module, run: Callable[[nn.Module], Any]) -> int | None:
    """The operations of a forward and a backward pass; None if the model cannot compute without values.

    `run` calls a model on PyTorch's meta device, which has shapes and no values, with inputs there, and
    returns its output: a tensor, or a mapping with tensors.
    """
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [*model.parameters(), *model.buffers()]
    shapes = {
        id(x): nn.Parameter(x.to("meta"), x.requires_grad) if isinstance(x, nn.Parameter) else x.to("meta")
        for x in tensors
    }
    try:
        with FlopCounterMode(display=False) as counter:
            # otherwise gradient checkpointing computes twice
            output = run(copy.deepcopy(model, shapes).eval())
            outputs = output.values() if isinstance(output, Mapping) else [output]
            total = sum(x.sum() for x in outputs if isinstance(x, Tensor) and x.requires_grad)
            assert isinstance(total, Tensor)
            total.backward()
    except Exception:  # of any type: a model may branch on the values that it computes
        return None
    return counter.get_total_flops()


def count_text_flops(
    model: nn.Module, lengths: numpy.ndarray, run: Callable[[Any, int], Any]
) -> float | None:
    """The mean of count_flops() over texts of these lengths in tokens; `run` calls the model with one text.

    Layers are linear in the length, attention quadratic: n tokens cost a + b n + c n^2 operations.
    """

    def count(length: int) -> int | None:
        return count_flops(model, lambda empty: run(empty, length))

    points = [8, 16, 24]
    counts = [operations for operations in map(count, points) if operations is not None]
    if len(counts) < len(points):
        return None
    c, b, a = numpy.polyfit(points, counts, 2)
    lengths = lengths.astype(float)
    return float(a + b * lengths.mean() + c * (lengths**2).mean())


def utilization(flops_per_s: float, device_name: str, precision: str) -> dict[str, float]:
    """The TFLOP/s of a GPU, and in bf16 and fp16 the share of its peak in PEAKS (model FLOPs utilization)."""
    figures = {"tflops_per_gpu": round(flops_per_s / 1e12, 3)}
    peak = next((peak for name, peak in PEAKS if name in device_name), None)
    if peak and precision in ("bf16", "fp16"):
        figures["mfu"] = round(flops_per_s / 1e12 / peak, 4)
    return figures
