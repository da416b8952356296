"""BIO tags: B-TYPE at the first unit of an entity, I-TYPE at the others, O outside.

A unit is what a data set tags: a character (KLUE-NER), or a token separated by spaces (CoNLL).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Entity(NamedTuple):
    """A named entity, text[start:end], and its type, such as "PS" for a person."""

    start: int
    end: int
    type: str


def split_units(text: str, by_token: bool) -> list[tuple[int, int]]:
    """Start and end of each unit of a text: tokens separated by spaces, or characters."""
    if by_token:
        return [match.span() for match in re.finditer(r"[^ ]+", text)]
    return [(i, i + 1) for i in range(len(text))]


def to_bio(units: Sequence[tuple[int, int]], entities: Sequence[Entity]) -> list[str]:
    """The tag of each unit. A unit belongs to the entity that covers its first character.

    An entity that directly follows another still begins with B-.
    """
    tags = ["O"] * len(units)
    for entity in entities:
        inside = [i for i, (start, _) in enumerate(units) if entity.start <= start < entity.end]
        for i in inside:
            tags[i] = f"I-{entity.type}"
        if inside:
            tags[inside[0]] = f"B-{entity.type}"
    return tags


def from_bio(units: Sequence[tuple[int, int]], tags: Sequence[str], strict: bool = False) -> list[Entity]:
    """The entities that the tags of the units describe; the inverse of to_bio().

    An I-TYPE that follows nothing of its type begins an entity, as in CoNLL-2003 itself (IOB1). With `strict`
    it is none, as in the metric (IOB2: mode="strict", scheme=IOB2 of seqeval).
    """
    entities: list[Entity] = []
    inside = ""  # the type of the entity that the previous unit is part of
    for (start, end), tag in zip(units, tags, strict=True):
        type_ = tag[2:]
        if tag.startswith("I-") and type_ == inside:
            entities[-1] = entities[-1]._replace(end=end)
        elif tag.startswith("B-") or (tag.startswith("I-") and not strict):
            entities.append(Entity(start, end, type_))
        else:
            type_ = ""
        inside = type_
    return entities
