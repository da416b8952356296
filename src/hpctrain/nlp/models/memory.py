"""Check, before a model is loaded, that it can be trained in the memory of the ranks."""

import json
import math
import re
from pathlib import Path

import torch
import transformers

from hpctrain.distributed.device import free_memory
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.nlp.models.model_folder import list_parts
from hpctrain.nlp.options import FineTuneOptions

# Bytes of a weight in fp32: a frozen one; a trained one, with gradient and AdamW's two moments.
FROZEN, TRAINED = 4, 16


def read_sizes(folder: Path) -> dict[str, int]:
    """The number of values of each weight in the model files of a folder, by their headers.

    Pickled files have no header: they count as one weight in fp32.
    """
    sizes = {}
    # others, such as consolidated.safetensors, are not loaded
    for path in (folder / part for part in list_parts(folder)):
        if path.suffix != ".safetensors":
            sizes[path.name] = path.stat().st_size // FROZEN
            continue
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes |= {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return sizes


def count_split(folder: Path, sizes: dict[str, int]) -> int:
    """How many values --tensor-parallel splits; each rank of a group has all of the others."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    layers = getattr(config, "base_model_tp_plan", None) or {}
    patterns = [
        re.compile(name.replace(".", r"\.").replace("*", r"\d+") + r"\.(weight|bias)$") for name in layers
    ]
    return sum(size for name, size in sizes.items() if any(pattern.search(name) for pattern in patterns))


def check_memory(folder: Path, args: FineTuneOptions, world: World, device: torch.device) -> None:
    """Raise HpctrainError, with the arithmetic, if weights, gradients and optimizer do not fit.

    Activations are not counted: a model that passes may still be too large.
    """
    sizes = read_sizes(folder)
    place = torch.device("cpu") if args.cpu_offload else device
    count, limit = sum(sizes.values()), free_memory(world, place)
    each = TRAINED if args.epochs and not args.uses_lora else FROZEN
    ranks = world.size if args.strategy == "fsdp" else 1
    share, spread = count / ranks, f" on {ranks} ranks" if ranks > 1 else ""
    if args.tensor_parallel > 1:
        split, groups = count_split(folder, sizes), ranks // args.tensor_parallel
        share = split / ranks + (count - split) / groups
        spread += f", of which {count - split:,} only on {groups} groups,"
    needed = int(share * each)
    if needed > limit:
        advice = f"--strategy fsdp on {-(-int(share * each * ranks) // max(limit, 1))} ranks or more"
        if each == TRAINED and args.tensor_parallel == 1:
            advice += ", or --lora-rank 16, which freezes them"
        if place.type == "cuda" and world.size > 1 and args.tensor_parallel == 1:
            advice += ", or --cpu-offload"
        raise HpctrainError(
            f"{folder}: {count:,} weights of {each} bytes{spread} are {needed / 1e9:.2f} GB, and rank "
            f"{world.rank} can have {limit / 1e9:.2f} GB: take {advice} (docs/guides/large-models.md)"
        )
    host = free_memory(world, torch.device("cpu")) * world.local_size
    loaders = world.local_size if args.lora_from else 1
    if ranks > 1 and (args.lora_from or world.rank == 0) and count * FROZEN * loaders > host:
        who, advice = "Rank 0 loads", "a first node with more memory"
        if args.lora_from:
            who, advice = (
                f"For --lora-from each of the {loaders} ranks on a node loads",
                "fewer ranks on a node",
            )
        raise HpctrainError(
            f"{folder}: {count:,} weights of {FROZEN} bytes are {count * FROZEN / 1e9:.2f} GB. {who} them "
            f"all before it gives each rank its part, and its node has {host / 1e9:.2f} GB: "
            f"take {advice} (docs/guides/large-models.md)"
        )
