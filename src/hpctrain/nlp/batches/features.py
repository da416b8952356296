"""Tokenized texts: computed once, cached on disk, and memory-mapped by every rank.

The name of a cached file is a hash of everything that its content depends on. A text of 20 tokens takes 20
entries here, not --max-length: padding is added when a batch is built.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy import ndarray
from tokenizers import Encoding
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.distributed.rendezvous import all_or_none
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, print_error
from hpctrain.files import atomic
from hpctrain.files.digests import NAME, check_digests, items_sha256, write_digests
from hpctrain.files.trust import hold_folder, refuse_changeable
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.text import reason

VERSION = 3  # of the files in the cache; increase it when their content changes
# Tokens. On a GPU batches are padded to a multiple of it, so that there are few shapes: --cuda-graphs records
# each, and cuDNN plans its attention for each.
MULTIPLE = 8
CHUNK = 10_000  # texts passed to the tokenizer in one call, for its threads to share


class Features(NamedTuple):
    """n features: one for each example, or one for each window if examples have several windows.

    starts: int64 [n + 1], feature i has the tokens from starts[i] to starts[i + 1]
    tokens: by name, int32 [all tokens], one value for each token
    values: by name, int64 or float32 [n] or [n, k], for a whole feature; units are the labels of its loss
    example: int64 [n], the index of the example that a feature belongs to
    cut: int64, the indices of the examples that were truncated
    lost: int64, the indices of the examples whose answer no prediction can be
    """

    starts: ndarray
    tokens: dict[str, ndarray]
    values: dict[str, ndarray]
    example: ndarray
    cut: ndarray
    lost: ndarray

    @classmethod
    def from_lists(
        cls,
        tokens: Mapping[str, Sequence[Sequence[int]]],
        values: Mapping[str, Sequence[Any] | ndarray],
        *,
        example: Sequence[int] | None = None,
        cut: Sequence[int] = (),
        lost: Sequence[int] = (),
    ) -> "Features":
        """Make features from lists; columns have a list per feature, by default one an example."""
        first = next(iter(tokens.values()))
        flat = {
            name: numpy.fromiter(chain.from_iterable(lists), numpy.int32) for name, lists in tokens.items()
        }
        return cls(
            numpy.cumsum([0, *map(len, first)], dtype=numpy.int64),
            flat,
            {
                name: numpy.asarray(column, _number_type(numpy.asarray(column)))
                for name, column in values.items()
            },
            numpy.arange(len(first)) if example is None else numpy.asarray(example, numpy.int64),
            numpy.asarray(cut, numpy.int64),
            numpy.asarray(lost, numpy.int64),
        )

    @property
    def lengths(self) -> ndarray:
        """Tokens of each feature, [n]."""
        return numpy.diff(self.starts)

    @property
    def last_token(self) -> int:
        """The token with the largest number."""
        return int(self.tokens["input_ids"].max(initial=0))

    def count_share(self, token: int | None) -> float:
        """The part of all tokens that are this one."""
        ids = self.tokens["input_ids"]
        return float((ids == token).mean()) if token is not None and len(ids) else 0.0

    def batch(self, index: Tensor, padding: Mapping[str, int], round_up_to: int = 0) -> TextBatch:
        """The features of `index` [b], one per row, padded on the right to the longest.

        `padding` has a value for columns of tokens (default 0). The length is rounded up to a multiple of
        MULTIPLE, but not beyond `round_up_to`.
        """
        rows = index.numpy()
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        longest = lengths.max(initial=0)
        position = numpy.arange(max(longest, min(round_up_to, -(-longest // MULTIPLE) * MULTIPLE)))
        mask = position < lengths[:, None]
        place = numpy.where(mask, starts[:, None] + position, 0)
        tokens = {
            name: numpy.where(mask, flat[place], padding.get(name, 0)) for name, flat in self.tokens.items()
        }
        return self._make_batch(index, tokens, mask)

    def pack(self, index: Tensor, padding: Mapping[str, int]) -> TextBatch:
        """The features of `index` [b], several per row.

        No row is longer than the longest feature. The position_ids of a feature begin at 0, by which the
        models of transformers keep it apart from others in its row; those of the padding begin at 0 as well.
        `padding` is that of batch().
        """
        indices = index.numpy()
        lengths = self.starts[indices + 1] - self.starts[indices]
        rows = pack_rows(lengths.tolist())
        longest = int(lengths.max())
        tokens = {
            name: numpy.full((len(rows), longest), padding.get(name, 0), numpy.int64) for name in self.tokens
        }
        mask = numpy.zeros((len(rows), longest), bool)
        positions = numpy.zeros((len(rows), longest), numpy.int64)
        for row, members in enumerate(rows):
            end = 0
            for i in members:
                begin, end = end, end + int(lengths[i])
                first = self.starts[indices[i]]
                for name, flat in self.tokens.items():
                    tokens[name][row, begin:end] = flat[first : first + lengths[i]]
                positions[row, begin:end] = numpy.arange(end - begin)
            mask[row, :end] = True
            positions[row, end:] = numpy.arange(longest - end)
        return self._make_batch(index, tokens, mask, position_ids=torch.from_numpy(positions))

    def _make_batch(
        self, index: Tensor, tokens: dict[str, ndarray], mask: ndarray, position_ids: Tensor | None = None
    ) -> TextBatch:
        values = {name: _to_tensor(column[index.numpy()]) for name, column in self.values.items()}
        return TextBatch(
            index,
            {name: _to_tensor(array) for name, array in tokens.items()},
            units=values.pop("units"),
            values=values,
            attention_mask=_to_tensor(mask),
            position_ids=position_ids,
            real_tokens=int(mask.sum()),
        )


def pack_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Put these lengths into few rows that are as long as the longest; returns their numbers in each row.

    First-fit decreasing: the longest first, each into the first row with room; at most 22 % and 1 rows extra.
    """
    room: list[int] = []
    rows: list[list[int]] = []
    longest = max(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, free in enumerate(room) if lengths[i] <= free), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(longest)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def _number_type(array: ndarray) -> type:
    return numpy.float32 if array.dtype.kind == "f" else numpy.int64


def _to_tensor(array: ndarray) -> Tensor:
    return torch.from_numpy(array.astype(_number_type(array)))


def encode_texts(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[Any],
    max_length: int | None,
    *,
    cut: str = "longest_first",
    stride: int = 0,
    offsets: bool = False,
) -> Iterator[Encoding]:
    """Tokenize texts, or pairs of texts, in all threads of this process.

    With max_length, special tokens are added and everything beyond max_length tokens is moved to
    `overflowing` of the encoding, in windows that share `stride` tokens; `cut` selects which text of a pair
    is truncated ("only_second"). Without max_length, there are no special tokens and no truncation. `offsets`
    adds the position of each token in its text, which is slower.
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
            total=len(texts),
            desc="tokenize",
            unit="text",
            leave=False,
            disable=None if len(texts) > CHUNK else True,
        ) as bar:
            for start in range(0, len(texts), CHUNK):
                yield from encode_batch(
                    texts[start : start + CHUNK], add_special_tokens=max_length is not None
                )
                bar.update(len(texts[start : start + CHUNK]))
    finally:
        backend.no_truncation()  # otherwise save_pretrained() writes it into the tokenizer


def check_tokens(folder: Path | str | None, model: PreTrainedModel, last: int) -> None:
    """Raise HpctrainError if the model has no embedding for a token, the largest one of some texts."""
    count = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    if last >= count:
        raise HpctrainError(
            f"{folder}: its tokenizer has the token {last}, but its model only {count} tokens: "
            "they do not belong together, fetch or copy the folder again, or call "
            "resize_token_embeddings(len(tokenizer)) if you have added tokens"
        )


# --- the cache ---


def make_cache_key(*parts: Any) -> str:
    """SHA-256 of everything that the features depend on, such as the texts, the tokenizer and the length."""
    return items_sha256(f"features {VERSION}", *parts)


def get_cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """$HPCTRAIN_CACHE/features, which launch scripts put on scratch, or ~/.cache/hpctrain/features.

    In the folder for temporary files if there is no home, as for a user of a container without a name, or if
    nothing can be written there.
    """
    home = env.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - Path's raises an error without one
    cache = Path(env.get("HPCTRAIN_CACHE") or Path(env.get("XDG_CACHE_HOME") or f"{home}/.cache", "hpctrain"))
    # Path's raises an error for what is in a folder that this user cannot enter
    existing = next(place for place in (cache, *cache.parents) if os.path.exists(place))  # noqa: PTH110
    is_home = cache.is_absolute() and os.access(existing, os.W_OK | os.X_OK)
    if not (is_home or env.get("HPCTRAIN_CACHE")):
        cache = Path(tempfile.gettempdir(), f"hpctrain-{os.geteuid()}")
    return cache / "features"


def load_or_make(key: str, make: Callable[[], Features], world: World) -> Features:
    """The features of `key` from the cache, or made by one rank of the job and cached; a collective call.

    Damaged ones are made again.
    If the cache is on a local disk of each node, one rank of each further node makes them as well. They are
    complete or absent, so two jobs may do this at a time. On a node where the cache cannot be written, as on
    a full disk or in a folder of somebody else, each rank makes them in its own memory.
    """
    folder, made = get_cache_folder() / key, None
    for is_maker in (world.rank == 0, world.rank != 0 and world.local_rank == 0):
        with all_or_none(world):
            if is_maker and made is None and not _is_intact(folder):
                made = make()
                _write_features(folder, made)
    with all_or_none(world):
        if _is_there(folder):
            return _read_features(folder)
        return make() if made is None else made


def _is_there(folder: Path) -> bool:
    """Whether the cache has these features, and this user alone can change them."""
    with suppress(HpctrainError, OSError):
        _check_cache(folder)
        return folder.exists()
    return False


def _is_intact(folder: Path) -> bool:
    """Whether the cache has these features as they were written. Removes damaged ones."""
    if not _is_there(folder):
        return False
    try:
        check_digests(folder)
        if (folder / NAME).exists():
            return True
    except HpctrainError as error:
        _warn(f"the texts are tokenized again, as the cache is damaged: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _write_features(folder: Path, features: Features) -> None:
    columns = {
        "starts": features.starts,
        "example": features.example,
        "cut": features.cut,
        "lost": features.lost,
    }
    columns |= {f"tokens.{name}": flat for name, flat in features.tokens.items()}
    columns |= {f"values.{name}": column for name, column in features.values.items()}
    parent = folder.parent
    try:
        # $HPCTRAIN_CACHE, for its user alone unless it exists: the texts may be confidential.
        for private in (parent.parent, parent):
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_cache(folder)
        atomic.remove_leftovers(parent, age=86_400)  # other jobs write there
        with atomic.folder(folder, replace=False) as unfinished, hold_folder(unfinished) as held:
            for name, array in columns.items():
                numpy.save(held / f"{name}.npy", array)
            write_digests(held)
            for path in held.iterdir():
                path.chmod(0o600)
    except HpctrainError as error:
        _warn(str(error))
    except OSError as error:
        # otherwise another job has written the same meanwhile, and its ranks have mapped the files
        if not _is_there(folder):
            text = (
                f"{parent} on {socket.gethostname()}: the tokenized texts cannot be written "
                f"({reason(error)}), and each rank keeps them in memory: set HPCTRAIN_CACHE to a folder of "
                f"your own with free space, such as {parent.parent}/$USER"
            )
            _warn(text)


@cache
def _warn(text: str) -> None:
    """Print a warning once, not for each split."""
    print_error(f"hpctrain: warning: {text}")


def _check_cache(folder: Path) -> None:
    """Raise HpctrainError if somebody else can change the cache, or these features, if they are there."""
    parent = folder.parent
    is_temporary = parent.parent.parent == Path(tempfile.gettempdir())
    paths = [folder, *folder.iterdir()] if folder.exists() else []
    advice = (
        "each rank keeps the tokenized texts in memory; set HPCTRAIN_CACHE to a folder of your own, such as "
        f"{parent.parent}/$USER"
    )
    refuse_changeable(*[parent.parent] * is_temporary, parent, *paths, advice=advice)


def _read_features(folder: Path) -> Features:
    try:
        columns = {
            path.name.removesuffix(".npy"): numpy.load(
                path, mmap_mode="r" if path.name.startswith("tokens.") else None
            )
            for path in folder.glob("*.npy")
        }
        tokens, values = (
            {
                name.removeprefix(prefix): array
                for name, array in sorted(columns.items())
                if name.startswith(prefix)
            }
            for prefix in ("tokens.", "values.")
        )
        return Features(
            columns["starts"], tokens, values, columns["example"], columns["cut"], columns["lost"]
        )
    except (HpctrainError, OSError, EOFError, ValueError, KeyError) as error:
        raise HpctrainError(
            f"{folder}: the tokenized texts cannot be read ({error}): remove this folder and start again"
        ) from error
