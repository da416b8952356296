"""Align subword tokens with the units that a data set tags (see bio.py)."""

import json
from collections.abc import Iterator, Sequence
from functools import cache

from tokenizers import Encoding, Tokenizer

NO_UNIT = -1  # of a token that carries no tag
SPACES = "Ġ▁"  # the space at the beginning of a subword token in byte-level BPE and in SentencePiece


class UnitAligner:
    """Splits the subword tokens of a text so that none covers more than one unit."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        # WordPiece marks tokens that continue a word; the others mark, with a space, those that begin one.
        self._prefix = getattr(backend.model, "continuing_subword_prefix", None) or ""
        self._spaces = {backend.token_to_id(space) for space in SPACES}
        self._tokenize_unit_cached = cache(self._tokenize_unit)  # a language has few characters
        # The special tokens before and after a text, such as [CLS] and [SEP].
        backend.no_padding()
        backend.no_truncation()
        letter = backend.encode("a")
        special = letter.special_tokens_mask
        self.before = letter.ids[: special.index(0)]
        self.after = letter.ids[len(special) - special[::-1].index(0) :]

    def align(
        self, encoding: Encoding, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """The subword tokens of a text, and for each the unit whose tag it carries, or NO_UNIT.

        A token that covers several units is replaced by tokens for each of them. `spans` are the units,
        text[start:end]. A unit of white space gets no token, because most tokenizers have none for it.
        """
        unit_of = [NO_UNIT] * len(text)
        for unit, (start, end) in enumerate(spans):
            if not text[start:end].isspace():
                unit_of[start:end] = [unit] * (end - start)
        ids: list[int] = []
        units: list[int] = []
        last = NO_UNIT  # the last unit that has a token
        # The last unit whose tokens were made here: its further tokens are left out.
        replaced = NO_UNIT
        for id_, token, (start, end) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
            covered = sorted({unit for unit in unit_of[start:end] if unit != NO_UNIT})
            if covered and covered[-1] == replaced:
                continue
            if len(covered) > 1:
                mark = self._get_mark(token)
                for unit in covered:
                    if unit > last and (
                        tokens := self._tokenize_unit_cached(mark, text[slice(*spans[unit])])
                    ):
                        ids += tokens
                        space = len(tokens) > 1 and tokens[0] in self._spaces
                        units += [NO_UNIT] * space + [unit] + [NO_UNIT] * (len(tokens) - space - 1)
                        last = replaced = unit
                        mark = self._prefix
            else:
                ids.append(id_)
                units.append(covered[0] if covered and covered[0] > last else NO_UNIT)
                last = max(last, units[-1])
        return ids, units

    def _get_mark(self, token: str) -> str:
        """The characters at the beginning of a token that mark whether it begins a word."""
        if self._prefix:
            return self._prefix if token.startswith(self._prefix) else ""
        return token[: len(token) - len(token.lstrip(SPACES))]

    def _tokenize_unit(self, mark: str, unit: str) -> list[int]:
        """The tokens of a single unit, the first with `mark`; empty if the normalizer deletes the unit."""
        backend = self._backend
        normal = backend.normalizer.normalize_str(unit) if backend.normalizer else unit
        ids = []
        for word, _ in (
            backend.pre_tokenizer.pre_tokenize_str(normal) if backend.pre_tokenizer else [(normal, None)]
        ):
            if not self._prefix:
                word = mark + word.lstrip(SPACES)
            known = backend.token_to_id(mark + word if self._prefix else word)
            ids += [known] if known is not None else [token.id for token in backend.model.tokenize(word)]
            mark = ""
        return ids


def make_character_tokenizer(backend: Tokenizer) -> str:
    """A tokenizer.json that gives the tokens of UnitAligner.align() for units of one character.

    "" unless `backend` is WordPiece. BPE without merges, with the vocabulary of WordPiece, takes each
    character by itself, and prefixes those that continue a word. A character that the vocabulary has only
    without the prefix gets a second name for the same id. `tokenizers` keeps one name for each id when it
    writes the file, so the caller has to write this text itself.
    """
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "WordPiece":
        return ""
    prefix, vocabulary = model["continuing_subword_prefix"], model["vocab"]
    second_names = {prefix + token: id_ for token, id_ in vocabulary.items() if len(token) == 1}
    content["model"] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": model["unk_token"],
        "continuing_subword_prefix": prefix,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": second_names | vocabulary,
        "merges": [],
    }
    return json.dumps(content, ensure_ascii=False)


def split_windows(units: list[int], after_space: list[bool], size: int) -> Iterator[slice]:
    """Divide the tokens of a sentence into windows of at most `size`.

    A window ends before a unit, and at a space if there is one in its second half. `units` is the unit of
    each token, `after_space` whether the unit follows a space.
    """
    start = 0
    while len(units) - start > size:
        end = start + size
        begins = [i for i in range(start + 1, end + 1) if units[i] != NO_UNIT]
        words = [i for i in begins if after_space[i] and i > start + size // 2]
        end = (words or begins or [end])[-1]
        yield slice(start, end)
        start = end
    yield slice(start, len(units))
