"""hpctrain bench layernorm: LayerNorm as one kernel and as several, by shape and type.

    hpctrain bench layernorm
    sbatch --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 launch/apptainer_ddp.sh bench layernorm

"fused" is torch's kernel, as nn.LayerNorm calls it. "composed" computes the same with a kernel for each mean,
difference, square, root and product. These read and write all values again, so that they show what a fused
kernel saves where memory decides.
"""

import json
import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from hpctrain.commands import rounds
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.world import World, job_id
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.files import atomic
from hpctrain.run.charts import COLORS, folder_for_matplotlib, make_charts, save_picture
from hpctrain.run.config import versions
from hpctrain.text import counted, say, table

# Rows and features: a tutorial's (HPC_helper), a batch of 32 texts of 512 tokens in BERT base and large, and
# 8,192 tokens in a model of 7 billion weights.
SHAPES = [(262144, 128), (16384, 768), (16384, 1024), (8192, 4096)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
EPS = 1e-5


def fused(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(values, weight.shape, weight, bias, EPS)


def composed(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last dimension by single operations, in the type of the values."""
    centered = values - values.mean(-1, keepdim=True)
    variance = (centered * centered).mean(-1, keepdim=True)
    return centered * torch.rsqrt(variance + EPS) * weight + bias


KINDS: dict[str, Callable[..., Tensor]] = {"fused": fused, "composed": composed}


def measure(shape: tuple[int, int], dtype: str, device: torch.device) -> dict[str, Any]:
    """The seconds of each kind, forward and backward. Raises HpctrainError if they give other values."""
    generator = torch.Generator().manual_seed(1)

    def draw_values(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, DTYPES[dtype])

    values, given = draw_values(*shape).requires_grad_(), draw_values(*shape)
    weight, bias = (draw_values(shape[1]).requires_grad_() for _ in range(2))
    row: dict[str, Any] = {"rows": shape[0], "features": shape[1], "dtype": dtype}
    with torch.no_grad():
        outputs = {name: kind(values, weight, bias).float() for name, kind in KINDS.items()}
    off = (outputs["fused"] - outputs["composed"]).abs().max().item()
    off /= outputs["composed"].abs().max().item()
    if not off <= TOLERANCE[dtype]:
        raise HpctrainError(
            f"LayerNorm of {shape[0]}x{shape[1]} in {dtype} differs by {off:.1e} between the two kinds on "
            f"{os.uname().nodename}: do not train on this node"
        )
    for name, kind in KINDS.items():

        def forward_and_backward(kind: Callable[..., Tensor] = kind) -> None:
            torch.autograd.grad(kind(values, weight, bias), (values, weight, bias), given)

        row[f"{name}_seconds"] = rounds.time_alone(device, forward_and_backward)
    return row


def draw(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Draw a chart of each type: the milliseconds of both kinds, by shape."""
    dtypes = [*dict.fromkeys(row["dtype"] for row in rows)]
    figure, axes = make_charts(len(dtypes), title)
    for axis, dtype in zip(axes, dtypes, strict=True):
        own = [row for row in rows if row["dtype"] == dtype]
        for place, (name, color) in enumerate(zip(KINDS, COLORS, strict=False)):
            heights = [row[f"{name}_seconds"] * 1e3 for row in own]
            axis.bar([i + 0.4 * place for i in range(len(own))], heights, 0.4, color=color, label=name)
        axis.set_xticks([i + 0.2 for i in range(len(own))], [f"{r['rows']}x{r['features']}" for r in own])
        axis.set(title=dtype, ylabel="ms, forward and backward")
        axis.legend()
    save_picture(figure, path)


def shape_of(text: str) -> tuple[int, int]:
    """An argparse type: ROWSxFEATURES, such as 16384x768."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,6})", text)
    if not match:
        raise ArgumentTypeError(f"{text!r} is not ROWSxFEATURES, such as 16384x768")
    return int(match[1]), int(match[2])


def run(world: World, args: Namespace) -> None:
    """Print a row for each type and shape, and write bench.json and bench.png. Raises HpctrainError."""
    if world.size > 1:
        raise UsageError(
            f"hpctrain bench layernorm: one process measures it, and {world.launcher_command} started "
            f"{world.size}: start one, without a launcher or with --ranks-per-node=1 on one node"
        )
    device = choose_device(world, args.device)
    folder = args.out or Path("runs/bench") / job_id()
    rounds.prepare(folder, foreseen=not args.out)
    rows = [measure(shape, dtype, device) for dtype in args.dtypes for shape in args.shapes]
    on = counted(torch.get_num_threads(), "CPU thread")
    if device.type == "cuda":
        on = torch.cuda.get_device_name(device)
    title = f"LayerNorm on {on}"
    cells = [
        [
            row["dtype"],
            f"{row['rows']}x{row['features']}",
            *(f"{row[f'{name}_seconds'] * 1e3:.3f}" for name in KINDS),
            f"{row['composed_seconds'] / row['fused_seconds']:.2f}",
        ]
        for row in rows
    ]
    heads = ["DTYPE", "SHAPE", *(f"{name.upper()} (MS)" for name in KINDS), "RATIO"]
    print(f"{title}; forward and backward, median of {rounds.ROUNDS} rounds")
    print(table([heads, *cells], str.rjust))
    record = {"device": on, "host": os.uname().nodename, "software": versions(), "results": rows}
    atomic.write_text(folder / "bench.json", json.dumps(record, indent=1) + "\n")
    with folder_for_matplotlib():
        draw(folder / "bench.png", title, rows)
    say(f"the table as JSON and a picture are in {folder}")
