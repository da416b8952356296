"""Read sentences and their entities: CoNLL, the tsv of KLUE-NER, lines of text␞text, and JSON Lines."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.bio import Entity, from_bio, split_units
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.task import Example

SEPARATOR = "␞"  # U+241E, between a text and the same text with its entities marked
TAG = r"(?:O|[BIESLUM]-\S+)"
# The tags of other schemes: the last unit of an entity (E, L), its only unit (S, U), a unit in between (M).
# IOBES has E and S, BILOU has L and U, BMES has M, E and S.
TO_BIO = {"E": "I", "L": "I", "S": "B", "U": "B", "M": "I"}
BLANKS = " \t"  # around the fields of CoNLL; other white space, such as U+00A0, is part of a token
# The names of the list of entities: ours, doccano's by version, Prodigy's; and of what an entity has.
ENTITY_LISTS = ("entities", "label", "labels", "spans")
ENTITY_NAMES = {
    "start_offset": "start", "end_offset": "end", "label": "type", "labels": "type", "entity_group": "type",
}  # fmt: skip
DOCUMENT_START = "-DOCSTART-"  # a line of CoNLL-2003 between documents


@dataclass(frozen=True, slots=True)
class Sentence(Example):
    """A text and its entities, in order and without overlap.

    `by_token`: the data set tags tokens separated by spaces, and is scored by them; otherwise characters.
    """

    id: str
    text: str
    entities: list[Entity]
    by_token: bool


def read_sentences(
    path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
) -> list[Sentence]:
    """Read the tsv of KLUE-NER, lines with ␞ and <span:TAG>, the lines of CoNLL, or JSON Lines.

    An error in a line makes its whole sentence an error.
    """
    if columns:
        return read_columns(path, columns, _make_from_json, skipped)
    if path.suffix.lower() in formats.OBJECTS:
        return formats.read_objects(path, _make_from_json, skipped)
    lines = formats.read_lines(path)
    filled = [line for line in lines if line.strip()]  # there is one: read_lines() refuses an empty file
    first = next((line for line in filled if not _is_comment(line)), filled[0])
    if SEPARATOR in first:
        numbered = ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line)
        return formats.read_examples(path, _parse_marked_line, numbered, skipped)
    # Only the format of one character per line has lines for spaces, but CoNLL may miss a token.
    has_characters = sum(len(line.partition("\t")[0]) == 1 for line in filled) * 2 > len(filled)
    by_character = filled[0].startswith("## ") or (
        has_characters and any(line.startswith(" \t") for line in lines)
    )
    if not by_character and not first.startswith(DOCUMENT_START) and not _ends_with_tag(first):
        raise HpctrainError(
            f"{path}: unknown format for named entities: each line should have a character, a tab and "
            f"its tag (KLUE-NER, with ## header lines), or a text, {SEPARATOR} and the text with "
            "<span:TAG>, or a token and its tag (CoNLL)"
        )

    def make(id_: str, numbered: list[tuple[int, str]]) -> Sentence:
        return _make_sentence(path, id_, numbered, by_character)

    sentences = formats.read_examples(path, make, _split_sentences(lines, by_character), skipped)
    if (
        not by_character
        and all(map(_is_numbering, sentences))
        and any(" " in sentence.text for sentence in sentences)
    ):
        raise HpctrainError(
            f"{path}: its first column numbers the tokens: "
            "keep the columns of the token and of its tag, e.g. cut -f 2,3"
        )
    return sentences


def _split_sentences(lines: list[str], by_character: bool) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The id of each sentence ("" if it has none) and its numbered lines. Blank lines separate sentences."""
    id_ = ""
    numbered: list[tuple[int, str]] = []
    for number, line in enumerate([*lines, ""], 1):
        if by_character and line.startswith("## "):
            id_ = line[3:].split("\t")[0]
        elif line.startswith(DOCUMENT_START) or (not by_character and not numbered and _is_comment(line)):
            pass
        elif line if by_character else line.strip():
            numbered.append((number, line))
        elif numbered:
            yield id_, numbered
            id_, numbered = "", []


def _make_sentence(path: Path, id_: str, numbered: list[tuple[int, str]], by_character: bool) -> Sentence:
    """The sentence of numbered lines, each with a character or a token and its tag."""
    units, tags = [], []
    for number, line in numbered:
        location = f"{path}, line {number}"
        if by_character:
            unit, tab, tag = line.rpartition("\t")
            if not tab or len(unit) != 1:
                raise formats.line_error(location, "expected one character, a tab and its tag")
        else:
            unit, *others = re.split(f"[{BLANKS}]+", line.strip(BLANKS))
            if not others:
                raise formats.line_error(
                    location, "expected a token and its tag, separated by a space or a tab"
                )
            tag = others[-1]
        if not re.fullmatch(TAG, tag):
            raise formats.line_error(
                location, f"the tag is {tag[:80]!r}, not O, B-TYPE or I-TYPE (or of IOBES, BILOU or BMES)"
            )
        units.append(unit)
        tags.append(tag)
    first_line = f"line {numbered[0][0]}"
    return _join_units(id_ or first_line, units, tags, not by_character, f"{path}, {first_line}")


def _join_units(id_: str, units: list[str], tags: list[str], by_token: bool, location: str) -> Sentence:
    """The sentence of these units and their tags in BIO, IOBES, BILOU or BMES."""
    text = (" " if by_token else "").join(units)
    tags = [TO_BIO.get(tag[0], tag[0]) + tag[1:] for tag in tags]
    return Sentence(id_, text, from_bio(split_units(text, by_token), tags), by_token, location=location)


def _is_numbering(sentence: Sentence) -> bool:
    """Whether the tokens of a sentence are 1, 2, 3, ..., as in the first column of GermEval and CoNLL-U."""
    return all(token == str(i) for i, token in enumerate(sentence.text.split(" "), 1))


def _ends_with_tag(line: str) -> bool:
    return (
        re.fullmatch(rf"[^{BLANKS}]+[{BLANKS}](.*[{BLANKS}])?{TAG}[{BLANKS}]*", line.lstrip(BLANKS))
        is not None
    )


def _is_comment(line: str) -> bool:
    """Whether a line of CoNLL begins with # and has no tag at its end. # may also be a token."""
    return line.startswith("#") and not _ends_with_tag(line)


def _make_from_json(location: str, item: dict[str, Any]) -> Sentence:
    """The sentence of an object with tokens and tags, or text and entities, as hpctrain predict writes."""
    expected = (
        f"an object with tokens and tags{formats.OTHER_NAMES}, or with text and entities (start, end, type)"
    )
    id_ = location.rpartition(", ")[2]
    listed = next((key for key in ENTITY_LISTS if isinstance(item.get(key), list)), "entities")
    if "tokens" in item and not ("text" in item and listed in item):
        tokens = formats.get_field(location, item, "tokens", list, expected)
        tags = formats.get_answer(location, item, "tags", list, expected)
        if tokens and all(tag in (None, -1) for tag in tags):
            raise formats.UnlabeledError(f"{location}: its tokens have no tags: add them, or leave it out")
        valid = len(tokens) == len(tags) > 0 and all(isinstance(token, str) for token in tokens)
        if not valid or not all(isinstance(tag, str) and re.fullmatch(TAG, tag) for tag in tags):
            raise formats.line_error(
                location, "expected a tag (O, B-TYPE, I-TYPE; or of IOBES, BILOU or BMES) for each token"
            )
        if any(not unit or " " in unit or formats.SURROGATE.search(unit) for unit in tokens + tags):
            raise formats.line_error(
                location, "a token is empty, or has a space or half of a character in it"
            )
        return _join_units(id_, tokens, tags, True, location)
    text = formats.get_field(location, item, "text", str, expected)
    entities = [
        _read_entity(location, each, expected)
        for each in formats.get_answer(location, item, listed, list, expected)
    ]
    edges = [edge for entity in sorted(entities) for edge in entity[:2]]
    if edges != sorted(edges) or not all(
        0 <= start < end <= len(text) and type_ for start, end, type_ in entities
    ):
        raise formats.line_error(location, "an entity is outside the text, overlaps another, or has no type")
    return Sentence(id_, text, sorted(entities), False, location=location)


def _read_entity(location: str, item: Any, expected: str) -> Entity:
    """An entity of a list: (start, end, type), or an object with these."""
    if isinstance(item, list):
        item = dict(zip(Entity._fields, item, strict=False))
    elif isinstance(item, dict) and "type" not in item:
        item = {ENTITY_NAMES.get(name, name): value for name, value in item.items()}
        if isinstance(item.get("type"), list) and len(item["type"]) == 1:  # Label Studio
            item["type"] = item["type"][0]
    return Entity(
        *(
            formats.get_field(location, item, key, type_, expected)
            for key, type_ in Entity.__annotations__.items()
        )
    )


def _parse_marked_line(location: str, line: str) -> Sentence:
    """The sentence of `text␞text with <span:TAG>`; in <<a:TAG>> only the inner brackets are marks."""
    text, separator, marked = line.partition(SEPARATOR)
    if not separator:
        raise formats.line_error(location, f"expected the text, {SEPARATOR}, and the text with <span:TAG>")
    entities, at, done = [], 0, 0
    for mark in re.finditer(r"<([^<]+?):([A-Za-z][\w-]*)>", marked):
        start = at + mark.start() - done
        # If the text has the same <...:...> here, it is not a mark. The text after it is compared with it.
        if text.startswith(mark[0], start):
            continue
        if text[at : start + len(mark[1])] != marked[done : mark.start()] + mark[1]:
            break
        at, done = start + len(mark[1]), mark.end()
        entities.append(Entity(start, at, mark[2]))
    if text[at:] != marked[done:]:
        raise formats.line_error(
            location, f"the text after {SEPARATOR}, without its marks, differs from the text before it"
        )
    return Sentence(location.rpartition(", ")[2], text, entities, by_token=False, location=location)
