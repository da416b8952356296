"""Find named entities, such as persons and places in KLUE-NER:

    hpctrain nlp.ner                                                   sample data, tiny model from scratch
    hpctrain nlp.ner --data klue-ner-v1.1 --model klue/bert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.ner --data klue-ner-v1.1 --model klue/bert-base

An entity may end inside a subword token: 서울에서, "in Seoul", is one token if the vocabulary has it, but the
entity is 서울. So tags are not assigned to the tokenizer's tokens but to the units that the data set tags
(characters, or tokens separated by spaces): the first subword token of each unit carries its tag, and a token
that covers several units is split (alignment.py).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy import ndarray
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.batches.features import Features, encode_texts
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.task import IGNORED, Example, Logits, Task
from hpctrain.nlp.tasks.alignment import NO_UNIT, UnitAligner, make_character_tokenizer, split_windows
from hpctrain.nlp.tasks.bio import Entity, from_bio, split_units, to_bio

SEPARATOR = "␞"  # U+241E, between a text and the same text with its entities marked
TAG = r"(?:O|[BIESLUM]-\S+)"
# The tags of other schemes: the last unit of an entity (E, L), its only unit (S, U), a unit in between (M).
# IOBES has E and S, BILOU has L and U, BMES has M, E and S.
TO_BIO = {"E": "I", "L": "I", "S": "B", "U": "B", "M": "I"}
BLANKS = " \t"  # around the fields of CoNLL; other white space, such as U+00A0, is part of a token
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


class Ner(Task[Sentence]):
    """Find the named entities in a sentence, and the type of each."""

    name = "ner"
    title = "Named entity recognition"
    formats = (
        "KLUE-NER: tsv by character; lines of text␞text with <span:TAG>; "
        "CoNLL: a token and its tag per line (BIO, IOBES, BILOU or BMES); "
        "jsonl with tokens, tags or with text, entities"
    )
    fields = ("tokens", "tags")
    examples = (("김민수는 서울에 산다.",), ("이순신은 한산도에서 싸웠다.",))
    model = AutoModelForTokenClassification
    pipeline_tag = "token-classification"
    max_length = 256  # the longest sentence of KLUE-NER has 145 characters
    padding: ClassVar[Mapping[str, int]] = {"labels": IGNORED, "unit": NO_UNIT}
    extra = ("unit",)
    card_text = (
        '`hpctrain predict` gives the scores above. `pipeline("token-classification")` of transformers finds '
        "far fewer entities: it does not split the tokens in which an entity ends, as training and "
        "`hpctrain predict` do."
    )
    pipeline_text = """`hpctrain predict` gives the scores above. So does the code below, for texts that fit
into one window: the second tokenizer of this folder cuts a text into characters. With the first one a
pipeline finds far fewer entities, because it does not split the tokens in which an entity ends.
`aggregation_strategy="simple"` gives entities at once, but also those without a B- tag, which the scores do
not count.

```python
from transformers import pipeline

folder = "FOLDER"
tokenizer = f"{folder}/pipeline_tokenizer"
tag = pipeline("token-classification", model=folder, tokenizer=tokenizer, aggregation_strategy="none")


def find_entities(text):
    entities = []
    for token in tag(text):
        prefix, type_ = token["entity"].split("-", 1)
        start, end, index = token["start"], token["end"], token["index"]
        if prefix == "B":
            entities.append({"start": start, "end": end, "type": type_, "last": index})
        elif entities and (entities[-1]["type"], entities[-1]["last"] + 1) == (type_, index):
            entities[-1].update(end=end, last=index)
    return entities
```"""
    selection_metric = "f1"

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
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

    def make_example(self, texts: Sequence[str], by_token: bool = False, **_: bool) -> Sentence:
        """A sentence with the entities unknown; `by_token` as in the training data."""
        return Sentence("", texts[0], [], by_token)

    def get_texts(self, example: Sentence) -> tuple[str, ...]:
        return (example.text,)

    def collect_labels(self, examples: Sequence[Sentence]) -> list[str]:
        """O, and B- and I- of each entity type, also if only one of them occurs."""
        types = {entity.type for example in examples for entity in example.entities}
        return ["O", *sorted(f"{prefix}-{type_}" for prefix in "BI" for type_ in types)]

    def list_classes(self, labels: list[str]) -> list[str]:
        """The entity types."""
        return [label.removeprefix("B-") for label in labels if label.startswith("B-")]

    def collect_settings(self, examples: Sequence[Sentence]) -> dict[str, bool]:
        """Whether the data set tags tokens or characters."""
        return {"by_token": examples[0].by_token}

    def make_pipeline_tokenizer(self, tokenizer: PreTrainedTokenizerFast, settings: dict[str, bool]) -> str:
        """A tokenizer by character, for data tagged by character and WordPiece; "" otherwise.

        The models that the documents name for Korean entities (KLUE-BERT, KLUE-RoBERTa, KcBERT) are of this
        kind. In a pipeline of transformers they would miss each entity that ends inside a token, about one in
        five of KLUE-NER.
        """
        return "" if settings["by_token"] else make_character_tokenizer(tokenizer.backend_tokenizer)

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[Sentence],
        labels: list[str],
        max_length: int,
        stride: int,
    ) -> Features:
        """One feature for each sentence, or consecutive windows if it is longer than max_length.

        Nothing is truncated. The column `unit` is the unit whose tag a token carries, or NO_UNIT, whose label
        is IGNORED. If all labels of a window are ignored, its first token gets O, because the mean over no
        labels is NaN. Raises UsageError if the special tokens fill the window.
        """
        aligner = UnitAligner(tokenizer.backend_tokenizer)
        before, after = aligner.before, aligner.after
        size = max_length - len(before) - len(after)
        if size < 1:
            raise UsageError(
                f"--max-length {max_length} has no room for text beside the tokenizer's special tokens: "
                f"give a larger one, such as {self.max_length}"
            )
        number = {label: i for i, label in enumerate(labels)}
        rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "unit": []}
        example_of = []
        encodings = encode_texts(tokenizer, [example.text for example in examples], None, offsets=True)
        for i, (example, encoding) in enumerate(zip(examples, encodings, strict=True)):
            spans = split_units(example.text, example.by_token)
            ids, units = aligner.align(encoding, example.text, spans)
            # Tag only units with a token, so that B- is not lost on a space at the start of an entity.
            tagged = [unit for unit in units if unit != NO_UNIT]
            tags = iter(to_bio([spans[unit] for unit in tagged], example.entities))
            targets = [IGNORED if unit == NO_UNIT else number.get(next(tags), IGNORED) for unit in units]
            after_space = [
                unit != NO_UNIT and example.text[spans[unit][0] - 1 : spans[unit][0]] == " " for unit in units
            ]
            if not ids and not before + after:
                # a model needs at least one token
                ids, units, targets = [tokenizer.pad_token_id or 0], [NO_UNIT], [IGNORED]
            for window in split_windows(units, after_space, size):
                target = [IGNORED] * len(before) + targets[window] + [IGNORED] * len(after)
                if all(label == IGNORED for label in target):
                    target[0] = number["O"]
                rows["input_ids"].append(before + ids[window] + after)
                rows["labels"].append(target)
                rows["unit"].append([NO_UNIT] * len(before) + units[window] + [NO_UNIT] * len(after))
                example_of.append(i)
        if "token_type_ids" in tokenizer.model_input_names:
            rows["token_type_ids"] = [[0] * len(row) for row in rows["input_ids"]]
        counts = [sum(label != IGNORED for label in target) for target in rows["labels"]]
        return Features.from_lists(rows, {"units": counts}, example=example_of)

    def predict(self, output: Logits, batch: TextBatch) -> Tensor:
        """The index of the most probable tag for each token, NO_UNIT without a unit, int16 [b, length]."""
        tags = output.logits.argmax(-1).to(torch.int16)
        return tags.masked_fill(batch.tokens["unit"] == NO_UNIT, NO_UNIT)

    def trim(self, prediction: ndarray) -> ndarray:
        """The tags of the units in a window, in their order."""
        return prediction[prediction != NO_UNIT]

    def make_answers(
        self, examples: Sequence[Sentence], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The entities of each sentence: start and end in its text, type, and text[start:end]."""
        spans = [split_units(example.text, example.by_token) for example in examples]
        tags = [[""] * len(places) for places in spans]
        for i, (example, prediction) in enumerate(zip(features.example, predictions, strict=True)):
            units = features.tokens["unit"][features.starts[i] : features.starts[i + 1]]
            for unit, tag in zip(units[units != NO_UNIT], prediction, strict=True):
                tags[example][unit] = labels[tag]
        answers = []
        for sentence, places, predicted in zip(examples, spans, tags, strict=True):
            # A unit without a token, such as a space, belongs to the entity that continues after it.
            for unit in reversed(range(len(predicted))):
                following = predicted[unit + 1] if unit + 1 < len(predicted) else "O"
                predicted[unit] = predicted[unit] or (following if following.startswith("I-") else "O")
            entities = from_bio(places, predicted, strict=True)
            shown = [{**each._asdict(), "text": sentence.text[each.start : each.end]} for each in entities]
            answers.append({"entities": shown})
        return answers

    def score(self, examples: Sequence[Sentence], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Precision, recall and F1 of entities, and F1 of each type.

        An entity is correct if start, end and type match. The scores are equal to seqeval's micro average
        (mode="strict", scheme=IOB2) over the units of the data set. Entities of a type that was not in the
        training data count as missed.
        """
        correct: Counter[str] = Counter()
        gold: Counter[str] = Counter()
        predicted: Counter[str] = Counter()
        for example, answer in zip(examples, answers, strict=True):
            expected = set(example.entities)
            found = {Entity(each["start"], each["end"], each["type"]) for each in answer["entities"]}
            for count, entities in ((correct, expected & found), (gold, expected), (predicted, found)):
                count.update(entity.type for entity in entities)
        return {
            "f1": _divide(2 * correct.total(), gold.total() + predicted.total()),
            "precision": _divide(correct.total(), predicted.total()),
            "recall": _divide(correct.total(), gold.total()),
            **{
                f"f1/{type_}": _divide(2 * correct[type_], gold[type_] + predicted[type_])
                for type_ in sorted(gold)
            },
        }


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
    if "tokens" in item:
        tokens, tags = (formats.get_field(location, item, key, list, expected) for key in ("tokens", "tags"))
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
        Entity(
            *(
                formats.get_field(location, each, key, type_, expected)
                for key, type_ in Entity.__annotations__.items()
            )
        )
        for each in formats.get_field(location, item, "entities", list, expected)
    ]
    edges = [edge for entity in sorted(entities) for edge in entity[:2]]
    if edges != sorted(edges) or not all(
        0 <= start < end <= len(text) and type_ for start, end, type_ in entities
    ):
        raise formats.line_error(location, "an entity is outside the text, overlaps another, or has no type")
    return Sentence(id_, text, sorted(entities), False, location=location)


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


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


TASK = Ner()
