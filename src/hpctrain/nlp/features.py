"""What a model is fed: texts as numbers, made once, kept on disk by content, mapped into the memory of every rank.

A text of 20 tokens takes 20 places here and not max_length of them: padding comes with the batch.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy import ndarray
from tokenizers import Encoding
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from hpctrain.world import HpctrainError, World, all_or_none

VERSION = 1  # of what is kept on disk; another one is another key
CHUNK = 10_000  # texts that the tokenizer gets at once, to share between its threads


class Features(NamedTuple):
    """n features: one an example, or several where an example has several windows.

    tokens: by name, one value a token, [all tokens], feature i from starts[i] to starts[i + 1]
    values: by name, one value a feature, [n]; "units" is how many labels its loss is the mean of
    example: [n], the example that a feature is of
    cut: the examples that are longer than the window, and of which the model does not see the rest
    """

    starts: ndarray
    tokens: dict[str, ndarray]
    values: dict[str, ndarray]
    example: ndarray
    cut: ndarray

    @property
    def lengths(self) -> ndarray:
        """Tokens of each feature, [n]."""
        return numpy.diff(self.starts)

    def batch(self, index: Tensor, padding: Mapping[str, int]) -> dict[str, Tensor]:
        """The features of `index` [b], padded on the right to the longest: tokens and attention_mask [b, longest], values [b].

        `padding` is what a column of tokens is padded with, 0 where it says nothing. All are int64.
        """
        rows = index.numpy()
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        place = numpy.arange(lengths.max(initial=0))
        real = place < lengths[:, None]
        where = numpy.where(real, starts[:, None] + place, 0)
        found = {name: numpy.where(real, flat[where], padding.get(name, 0)) for name, flat in self.tokens.items()}
        found |= {"attention_mask": real} | {name: column[rows] for name, column in self.values.items()}
        return {name: torch.from_numpy(array.astype(numpy.int64)) for name, array in found.items()}


def features(
    tokens: Mapping[str, Sequence[Sequence[int]]],
    values: Mapping[str, Sequence[int]],
    *,
    example: Sequence[int] | None = None,
    cut: Sequence[int] = (),
) -> Features:
    """Features out of lists: of each column of tokens a list a feature. Without `example`, each example has one."""
    first = next(iter(tokens.values()))
    flat = {name: numpy.fromiter(chain.from_iterable(lists), numpy.int32) for name, lists in tokens.items()}
    return Features(
        numpy.cumsum([0, *map(len, first)], dtype=numpy.int64),
        flat,
        {name: numpy.asarray(column, numpy.int64) for name, column in values.items()},
        numpy.arange(len(first)) if example is None else numpy.asarray(example, numpy.int64),
        numpy.asarray(cut, numpy.int64),
    )


def encode(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[Any],
    max_length: int | None,
    *,
    cut: str = "longest_first",
    stride: int = 0,
    offsets: bool = False,
) -> Iterator[Encoding]:
    """Tokenise texts, or pairs of them, in all threads of this process, to at most max_length tokens with the special ones.

    Without max_length there is no end, and no special tokens. What does not fit is in the `overflowing` of an encoding, in
    windows that share `stride` tokens; `cut` says which text of a pair is cut ("only_second"). `offsets` asks for the place of
    each token in its text, which takes longer.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    if max_length:
        backend.enable_truncation(max_length, stride=stride, strategy=cut)
    else:
        backend.no_truncation()
    encode_batch = backend.encode_batch if offsets else backend.encode_batch_fast
    try:
        with tqdm(
            total=len(texts), desc="tokenise", unit="text", leave=False, disable=None if len(texts) > CHUNK else True
        ) as bar:
            for start in range(0, len(texts), CHUNK):
                yield from encode_batch(texts[start : start + CHUNK], add_special_tokens=max_length is not None)
                bar.update(len(texts[start : start + CHUNK]))
    finally:
        backend.no_truncation()  # or it would be saved with the model


def fingerprint(*parts: Any) -> str:  # noqa: ANN401 - whatever has a repr() that is its content
    """SHA-256 of everything that the features depend on: another text, tokenizer or length is another key."""
    digest = hashlib.sha256(f"features {VERSION}".encode())
    for part in parts:
        # A text at a time, because one repr() of 150,000 of them would take their memory again.
        for item in part if isinstance(part, list) else [part]:
            digest.update(repr(item).encode(errors="surrogatepass") + b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where features are kept: $HPCTRAIN_CACHE, which the launch scripts set to a folder in scratch, or ~/.cache/hpctrain."""
    home = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "/tmp")) / ".cache")
    return Path(env.get("HPCTRAIN_CACHE") or f"{home}/hpctrain") / "features"


def cached(key: str, make: Callable[[], Features], world: World) -> Features:
    """The features of `key`, from the cache, or made by one rank of the job; a collective call.

    Where the cache is on a disk of the node, one rank of each other node makes them as well. They appear whole or not at all,
    so two jobs may do this at the same time. Raises HpctrainError, naming the folder, where they cannot be written.
    """
    folder = cache_folder() / key
    for maker in (world.rank == 0, world.local_rank == 0):
        with all_or_none(world):
            if maker and not folder.exists():
                _write(folder, make())
    with all_or_none(world):
        return _read(folder)


def _write(folder: Path, made: Features) -> None:
    columns = {"starts": made.starts, "example": made.example, "cut": made.cut}
    columns |= {f"tokens.{name}": flat for name, flat in made.tokens.items()}
    columns |= {f"values.{name}": column for name, column in made.values.items()}
    unfinished = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name[:8]}.", dir=folder.parent))
        for name, array in columns.items():
            with (unfinished / f"{name}.npy").open("wb") as file:
                numpy.save(file, array)
                os.fsync(file.fileno())
        unfinished.rename(folder)
    except OSError as error:
        if not folder.exists():  # else another job was faster, and has written the same
            raise HpctrainError(
                f"{folder.parent}: the tokenised texts cannot be written ({error.strerror or error}): free some space there, or "
                "set HPCTRAIN_CACHE to a folder on scratch"
            ) from error
    finally:
        if unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)


def _read(folder: Path) -> Features:
    try:
        columns = {path.name.removesuffix(".npy"): numpy.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
        tokens, values = (
            {name.removeprefix(prefix): array for name, array in sorted(columns.items()) if name.startswith(prefix)}
            for prefix in ("tokens.", "values.")
        )
        return Features(columns["starts"], tokens, values, columns["example"], columns["cut"])
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise HpctrainError(
            f"{folder}: the tokenised texts cannot be read ({error}): remove the folder, and start again"
        ) from error
