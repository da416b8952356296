"""Whether a model can be trained in the memory that there is, asked before it is loaded."""

import argparse
import json
import math
from pathlib import Path

import torch

from hpctrain.device import free_memory
from hpctrain.errors import HpctrainError
from hpctrain.nlp.lora import uses_lora
from hpctrain.world import World

# Bytes of a weight in fp32: of a frozen one itself; of a trained one also its gradient and the two moments of AdamW.
FROZEN, TRAINED = 4, 16


def count_weights(folder: Path) -> int:
    """The number of weights in the model files of a folder, by their headers; of pickled ones by their size, as if in fp32."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count or sum(path.stat().st_size // FROZEN for path in folder.glob("pytorch_model*.bin"))


def check_memory(folder: Path, args: argparse.Namespace, world: World, device: torch.device) -> None:
    """Raise HpctrainError, with the arithmetic and what to do, if weights, gradients and optimizer cannot fit.

    Activations are not counted: what passes may still be too large.
    """
    count, limit = count_weights(folder), free_memory(world, device)
    each = TRAINED if args.epochs and not uses_lora(args) else FROZEN
    ranks = world.size if args.strategy == "fsdp" else 1
    needed = count * each // ranks
    if needed <= limit:
        return
    advice = f"--strategy fsdp on {-(-count * each // max(limit, 1))} ranks or more"
    if each == TRAINED:
        advice += ", or --lora-rank 16, which freezes them"
    raise HpctrainError(
        f"{folder}: {count:,} weights of {each} bytes{f' on {ranks} ranks' if ranks > 1 else ''} are {needed / 1e9:.2f} GB, and "
        f"rank {world.rank} can have {limit / 1e9:.2f} GB: take {advice} (docs/large-models.md)"
    )
