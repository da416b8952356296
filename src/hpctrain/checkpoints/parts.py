"""Checkpoints in parts: a folder under the name of a checkpoint, with one file per rank.

    checkpoints/epoch-0001.pt/rank-0000-of-0002.pt
    checkpoints/epoch-0001.pt/rank-0001-of-0002.pt

Each rank writes and verifies its file as checkpoint.py does a whole checkpoint. Meanwhile the ranks exchange
no data and do not wait for each other. The checkpoint counts when all files are there and intact. A file has
the state of its rank. A tensor of which the rank holds a part is a dictionary: the part, its offset in the
tensor, and the shape of the tensor.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoints.position import SAME_ON_ALL_RANKS

PART = {"part", "offset", "shape"}


def path_of_rank(folder: Path, rank: int, size: int) -> Path:
    """The file of a rank, in the folder of a checkpoint of `size` ranks."""
    return folder / f"rank-{rank:04d}-of-{size:04d}.pt"


def find_files(folder: Path) -> list[Path]:
    """The files of all ranks, in their order. Raises OSError if one is missing."""
    sizes = {
        int(match[1])
        for path in folder.iterdir()
        if (match := re.fullmatch(r"rank-\d+-of-(\d+)\.pt", path.name))
    }
    files: list[Path] = []
    # a name may claim any number of ranks: the first missing file ends the loop
    for rank in range(max(sizes, default=0)):
        files.append(path_of_rank(folder, rank, max(sizes)))
        if not files[-1].is_file():
            raise FileNotFoundError(f"incomplete: it lacks {files[-1].name}")
    if len(sizes) != 1 or not files:
        raise FileNotFoundError("incomplete: it lacks the file of a rank")
    return files


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own for each element. A file may hold sparse or expanded tensors."""
    dense = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return dense and tensor.untyped_storage().nbytes() >= tensor.nbytes


class Pieces:
    """A tensor in pieces; region() reads a part of it. Raises ValueError if pieces are missing."""

    def __init__(self, parts: Sequence[dict[str, Any]]) -> None:
        self.shape = torch.Size(parts[0]["shape"])
        # Ranks may have the same piece, and a rank none.
        self._pieces = {tuple(part["offset"]): part["part"] for part in parts if part["part"].numel()}
        self._dtype = parts[0]["part"].dtype
        if sum(piece.numel() for piece in self._pieces.values()) != self.shape.numel():
            raise ValueError(f"pieces of a tensor of shape {tuple(self.shape)} are missing")
        for offset, piece in self._pieces.items():
            inside = all(
                0 <= a <= whole - n for a, n, whole in zip(offset, piece.shape, self.shape, strict=True)
            )
            if not inside or not has_memory(piece):
                raise ValueError(f"a piece of a tensor of shape {tuple(self.shape)} is not in it")

    def region(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """A copy of the part of this size that begins at `offset`."""
        target = torch.empty(tuple(size), dtype=self._dtype)
        for start, piece in self._pieces.items():
            first = [max(a, b) for a, b in zip(offset, start, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(offset, size, start, piece.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                to, of = (
                    tuple(
                        slice(a - origin, b - origin)
                        for a, b, origin in zip(first, last, origins, strict=True)
                    )
                    for origins in (offset, start)
                )
                target[to] = piece[of]
        return target

    def whole(self) -> Tensor:
        """A copy of the whole tensor."""
        return self.region([0] * len(self.shape), self.shape)


def read(folder: Path) -> dict[str, Any]:
    """The state in the files of all ranks, with Pieces, which are read later, for the tensors in parts.

    Other values are rank 0's. Raises OSError, torch.load()'s errors, ValueError if files do not fit together.
    """
    states = [
        torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in find_files(folder)
    ]
    for name in SAME_ON_ALL_RANKS:
        if any(str(state.get(name)) != str(states[0].get(name)) for state in states):
            raise ValueError(f"its files are of different checkpoints ({name})")
    return _merge(states)


def _merge(states: list[Any]) -> Any:
    first = states[0]
    if isinstance(first, dict):
        if first.keys() == PART:
            return Pieces(states)
        return {name: _merge([state[name] for state in states]) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_merge(list(values)) for values in zip(*states, strict=True))
    return first


def make_whole(value: "Pieces | Tensor") -> Tensor:
    """The whole tensor, with memory of its own instead of mapped files."""
    return value.whole() if isinstance(value, Pieces) else value.clone()
