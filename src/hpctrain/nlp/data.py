"""Texts with their labels, read as published: a reader a task, and an example type a task.

| task     | formats                                                        | published as                            |
|----------|----------------------------------------------------------------|-----------------------------------------|
| classify | tsv: id, document, label                                       | NSMC                                    |
| pair     | json list: premise, hypothesis, gold_label                     | KLUE-NLI                                |
|          | tsv: sentence1, sentence2, gold_label                          | KorNLI                                  |
| ner      | tsv by character, ## header lines                              | KLUE-NER                                |
|          | lines: the text, ␞ (U+241E), the text with <span:TAG>          | KMOU, ratsnlp                           |
|          | a token and its tag a line, sentences between blank lines      | CoNLL                                   |
| qa       | json: articles, paragraphs, questions with answers             | SQuAD 1.1, KorQuAD 1.0                  |
| generate | text, a paragraph a line; or NSMC, with a prompt for its label | any text; NSMC                          |

Nothing is dropped unsaid: what a reader does not understand is an error that names the file and the line (--strict); given a list
`skipped`, it leaves such an example out, puts the error there and reads on. What is wrong with a whole file is always an error.

Every example that is read has a place, such as "ratings_train.txt, line 17" or "KorQuAD_v1.0_dev.json, question 6548850-0-0", by
which an error that is found later names it too.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from hpctrain.world import HpctrainError, UsageError

SAMPLES = Path(__file__).parent / "samples"
SEPARATOR = "␞"  # U+241E, between a text and the same text with its entities marked
# How file names call the splits, and what files of data end in.
SPLITS = {"train": "train", "dev": "validation", "val": "validation", "validation": "validation", "test": "test"}
SUFFIXES = {".txt", ".tsv", ".json", ".conll", ".bio", ".train", ".dev", ".test"}
TAG = r"(?:O|[BI]-\S+)"
NSMC = ("id", "document", "label")  # its columns
DOCUMENT = "-DOCSTART-"  # a line of CoNLL-2003 between documents
PROMPTS = {"1": "긍정: ", "0": "부정: "}  # what a generated review of NSMC begins with


class Document(NamedTuple):
    """A text and its class, both as they stand in the file; the text may be empty."""

    id: str
    text: str
    label: str
    place: str = ""


class Pair(NamedTuple):
    """Two sentences and how they are related, such as "entailment"."""

    id: str
    first: str
    second: str
    label: str
    place: str = ""


class Entity(NamedTuple):
    """A name in a text, text[start:end], and its type, such as "PS" for a person."""

    start: int
    end: int
    type: str


class Sentence(NamedTuple):
    """A text and the names in it, in order, none over another.

    `by_token` says at what level the data are labelled, and so at what level they are to be scored: tokens, which are what
    stands between the spaces of the text, or else characters.
    """

    id: str
    text: str
    entities: list[Entity]
    by_token: bool
    place: str = ""


class Answer(NamedTuple):
    """A stretch of a context, context[start : start + len(text)]."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a paragraph (context) of an article (title), and the answers that count as right, at least one."""

    id: str
    title: str
    context: str
    question: str
    answers: list[Answer]
    place: str = ""


class Passage(NamedTuple):
    """A text to go on with after its prompt, which is empty for plain text."""

    prompt: str
    text: str
    place: str = ""


Example = TypeVar("Example", Document, Pair, Sentence, Question, Passage)


# --- where the files are ---


def load(task: str, data: Path | None, skipped: list[HpctrainError] | None = None) -> dict[str, list[Any]]:
    """The examples of each split: of the files that find() finds in a folder, or the samples of the task without `data`.

    A single file is all for "train", to be divided by split(). Raises HpctrainError; what is wrong with a single example goes
    into `skipped` instead, where there is such a list.
    """
    read = READERS[task]
    if data and data.is_file():
        return {"train": read(data, skipped)}
    splits = find(data or SAMPLES / task)
    return {name: [example for path in paths for example in read(path, skipped)] for name, paths in splits.items()}


def said(skipped: Sequence[HpctrainError]) -> str:
    """How many examples are left out and why the first is, in a sentence; "" where there is none."""
    if not skipped:
        return ""
    count = f"{len(skipped):,} examples are" if len(skipped) > 1 else "1 example is"
    return f"{count} left out, which --strict makes an error; the first: {skipped[0]}"


def find(folder: Path) -> dict[str, list[Path]]:
    """The files of each split of a data set, by the names under which they are published.

    A file belongs to a split whose name is a word of its own: ratings_train.txt, klue-ner-v1.1_dev.tsv, xnli.test.ko.tsv.
    Several files of a split, as KorNLI's two of training, are read one after the other. The splits are "train",
    "validation" and "test"; where a data set has dev files but publishes no test set (KLUE, KorQuAD), dev is its test set.

    Raises HpctrainError where training or test files are missing, and says what else is there.
    """
    splits: dict[str, list[Path]] = {}
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    except OSError as error:
        raise HpctrainError(f"{folder}: cannot be read ({error.strerror}): --data takes a folder or a file") from error
    for path in files:
        name = next((SPLITS[word] for word in re.split(r"[^a-z]+", path.name.lower()) if word in SPLITS), None)
        if name:
            splits.setdefault(name, []).append(path)
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    for name, such_as in (("train", "ratings_train.txt or klue-nli-v1.1_train.json"), ("test", "ratings_test.txt or *_dev.json")):
        if name not in splits:
            there = ", ".join(path.name for path in files) or "no data file"
            raise HpctrainError(
                f"{folder}: no {name} file, such as {such_as} (there is {there}): put it there, or give --data one file to divide"
            )
    return splits


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and validation examples out of those of training, `share` of them for validation (--validation-split).

    Which ones depends on the seed alone; both parts keep the order of the file. Questions are split by article, whole, so that
    no paragraph is in both, and validation gets at least its share. Raises UsageError where a part would be empty.
    """
    if not 0 < share < 1:
        raise UsageError(f"--validation-split {share} is not a share between 0 and 1: 0.1 is usual")
    groups: dict[object, list[int]] = {}
    for i, example in enumerate(examples):
        groups.setdefault(example.title if isinstance(example, Question) else i, []).append(i)
    members = list(groups.values())
    wanted = round(share * len(examples))
    validation: set[int] = set()
    for group in torch.randperm(len(members), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(validation) >= wanted:
            break
        validation.update(members[group])
    if not 0 < len(validation) < len(examples):
        what = f"{len(examples)} examples" + (f" of {len(members)} articles" if len(members) < len(examples) else "")
        raise UsageError(f"--validation-split {share} of {what} leaves a part with none: take another share, or more data")
    return (
        [example for i, example in enumerate(examples) if i not in validation],
        [example for i, example in enumerate(examples) if i in validation],
    )


# --- classification and pairs ---


def read_classify(path: Path, skipped: list[HpctrainError] | None = None) -> list[Document]:
    """NSMC's tsv: id, document, label. Raises HpctrainError, naming the line."""

    def document(place: str, line: str) -> Document:
        id_, text, label = _fields(place, line, NSMC)
        if not label:
            raise _wrong(place, "the label is empty")
        return Document(id_, text, label, place)

    return _examples(path, document, _table(path, NSMC), skipped)


def read_pair(path: Path, skipped: list[HpctrainError] | None = None) -> list[Pair]:
    """KLUE-NLI's json list or KorNLI's tsv. Raises HpctrainError, naming the guid or the line."""
    what = "KLUE-NLI's list of objects with guid, premise, hypothesis and gold_label"
    columns = ("sentence1", "sentence2", "gold_label")

    def of_klue(number: int, item: object) -> Pair:
        id_ = _get(f"{path}, [{number}]", item, "guid", str, what)
        place = f"{path}, {id_}"
        first, second, label = (_get(place, item, key, str, what) for key in ("premise", "hypothesis", "gold_label"))
        if not label:
            raise HpctrainError(f"{place}: the gold_label is empty: label it, or take it out of the file")
        return Pair(id_, first, second, label, place)

    def of_kornli(place: str, line: str) -> Pair:
        first, second, label = _fields(place, line, columns)
        if not label:
            raise _wrong(place, "the gold_label is empty")
        return Pair(place.rpartition(", ")[2], first, second, label, place)

    if _content(path).lstrip().startswith(("[", "{")):
        return _examples(path, of_klue, enumerate(_json(path, list, what)), skipped)
    return _examples(path, of_kornli, _table(path, columns), skipped)


# --- named entities ---


def read_ner(path: Path, skipped: list[HpctrainError] | None = None) -> list[Sentence]:
    """KLUE-NER's tsv by character, lines with ␞ and <span:TAG>, or CoNLL's token and tag a line.

    Raises HpctrainError, naming the line, and where the format is none of these. A line that is wrong spoils its sentence.
    """
    lines = _lines(path)
    first = next(line for line in lines if line.strip())  # an empty file has been refused
    if SEPARATOR in first:
        numbered = ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line)
        return _examples(path, _marked, numbered, skipped)
    # Only where every character has a line of its own has a space one.
    by_character = first.startswith("## ") or any(line.startswith(" \t") for line in lines)
    if not by_character and not first.startswith(DOCUMENT) and not re.fullmatch(rf"\S+\s(.*\s)?{TAG}", first):
        raise HpctrainError(
            f"{path}: not a format of named entities: a character, a tab and its tag a line (KLUE-NER, ## header lines), "
            f"a text, {SEPARATOR} and the text with <span:TAG> a line, or a token and its tag a line (CoNLL)"
        )

    def sentence(id_: str, numbered: list[tuple[int, str]]) -> Sentence:
        units, tags = [], []
        for number, line in numbered:
            place = f"{path}, line {number}"
            if by_character:
                unit, tab, tag = line.rpartition("\t")
                if not tab or len(unit) != 1:
                    raise _wrong(place, "expected one character, a tab and its tag")
            else:
                unit, *others = line.split()
                if not others:
                    raise _wrong(place, "expected a token and its tag with a space or a tab between them")
                tag = others[-1]
            if not re.fullmatch(TAG, tag):
                raise _wrong(place, f"the tag is {tag!r}, not O, B-TYPE or I-TYPE")
            units.append(unit)
            tags.append(tag)
        text = ("" if by_character else " ").join(units)
        by_token = not by_character
        begins = f"line {numbered[0][0]}"
        return Sentence(id_ or begins, text, from_bio(spans(text, by_token), tags), by_token, f"{path}, {begins}")

    return _examples(path, sentence, _sentences(lines, by_character), skipped)


def _sentences(lines: list[str], by_character: bool) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The id of each sentence ("" without), and its lines with their numbers; between sentences are blank lines."""
    id_, numbered = "", []
    for number, line in enumerate([*lines, ""], 1):
        if by_character and line.startswith("## "):
            id_ = line[3:].split("\t")[0]
        elif line.startswith(DOCUMENT):
            pass
        elif line if by_character else line.strip():
            numbered.append((number, line))
        elif numbered:
            yield id_, numbered
            id_, numbered = "", []


def _marked(place: str, line: str) -> Sentence:
    """The sentence of a line `text␞text with <span:TAG>`; brackets that the text itself has are not marks.

    Of <<a:TAG>> the inner brackets are the mark.
    """
    text, separator, marked = line.partition(SEPARATOR)
    if not separator:
        raise _wrong(place, f"expected the text, {SEPARATOR}, and the text with <span:TAG>")
    entities, at, done = [], 0, 0
    for mark in re.finditer(r"<([^<]+?):([A-Za-z][\w-]*)>", marked):
        start = at + mark.start() - done
        # Where the text reads <...:...> too, it is no mark and is compared with what follows it.
        if text.startswith(mark[0], start):
            continue
        if text[at : start + len(mark[1])] != marked[done : mark.start()] + mark[1]:
            break
        at, done = start + len(mark[1]), mark.end()
        entities.append(Entity(start, at, mark[2]))
    if text[at:] != marked[done:]:
        raise _wrong(place, f"without its marks, what follows {SEPARATOR} is not the text before it")
    return Sentence(place.rpartition(", ")[2], text, entities, by_token=False, place=place)


def spans(text: str, by_token: bool) -> list[tuple[int, int]]:
    """Start and end of what carries a tag: each token (by spaces) or each character."""
    if by_token:
        return [match.span() for match in re.finditer(r"[^ ]+", text)]
    return [(i, i + 1) for i in range(len(text))]


def to_bio(spans: Sequence[tuple[int, int]], entities: Sequence[Entity]) -> list[str]:
    """A tag for each span: B-TYPE where an entity begins, also directly after another, I-TYPE inside of it, else O.

    A span belongs to the entity that covers its first character.
    """
    tags = ["O"] * len(spans)
    for entity in entities:
        inside = [i for i, (start, _) in enumerate(spans) if entity.start <= start < entity.end]
        for i in inside:
            tags[i] = f"I-{entity.type}"
        if inside:
            tags[inside[0]] = f"B-{entity.type}"
    return tags


def from_bio(spans: Sequence[tuple[int, int]], tags: Sequence[str], strict: bool = False) -> list[Entity]:
    """The entities that the tags of the spans say; the reverse of to_bio.

    I-TYPE with nothing of its type before it begins an entity, as CoNLL-2003 itself is written (IOB1); `strict` counts it as
    none, as a metric does (IOB2: seqeval's mode="strict", scheme=IOB2).
    """
    entities: list[Entity] = []
    inside = ""  # the type of the entity that the span before is part of
    for (start, end), tag in zip(spans, tags, strict=True):
        type_ = tag[2:]
        if tag.startswith("I-") and type_ == inside:
            entities[-1] = entities[-1]._replace(end=end)
        elif tag.startswith("B-") or (tag.startswith("I-") and not strict):
            entities.append(Entity(start, end, type_))
        else:
            type_ = ""
        inside = type_
    return entities


# --- questions ---


def read_qa(path: Path, skipped: list[HpctrainError] | None = None) -> list[Question]:
    """SQuAD 1.1's json, as KorQuAD 1.0 has it. Raises HpctrainError, naming the question.

    An answer has to stand at its answer_start, but for the kind of its spaces (all 5,774 of KorQuAD's dev set do exactly).
    """
    what = "SQuAD 1.1 json (KorQuAD 1.0): data, paragraphs, context, qas, id, question, answers, text, answer_start"
    seen = set()

    def items() -> Iterator[tuple[str, str, str, object]]:
        """Where each question stands in the file, its title and context, and itself."""
        for a, article in enumerate(_get(f"{path}", _json(path, dict, what), "data", list, what)):
            title = _get(f"{path}, data[{a}]", article, "title", str, what)
            for p, paragraph in enumerate(_get(f"{path}, data[{a}]", article, "paragraphs", list, what)):
                place = f"{path}, data[{a}].paragraphs[{p}]"
                context = _get(place, paragraph, "context", str, what)
                for q, item in enumerate(_get(place, paragraph, "qas", list, what)):
                    yield f"{place}.qas[{q}]", title, context, item

    def question(where: str, title: str, context: str, item: object) -> Question:
        id_ = _get(where, item, "id", str, what)
        place = f"{path}, question {id_}"
        asked = _get(place, item, "question", str, what)
        answers = [
            Answer(
                _get(f"{place}: an answer", each, "text", str, what), _get(f"{place}: an answer", each, "answer_start", int, what)
            )
            for each in _get(place, item, "answers", list, what)
        ]
        if not answers:
            raise HpctrainError(f"{place} has no answer (SQuAD 2.0 is not read): take it out of the file")
        for text, start in answers:
            there = context[max(start, 0) : start + len(text)]
            if not text.strip() or start < 0 or there.split() != text.split():
                raise HpctrainError(
                    f"{place}: the answer {text!r} is not at its answer_start {start}, "
                    f"where the context has {there!r}: mend the file"
                )
        if id_ in seen:
            raise HpctrainError(f"{place}: another has the same id: answers are scored by id, give each its own")
        seen.add(id_)
        return Question(id_, title, context, asked, answers, place)

    return _examples(path, question, items(), skipped)


# --- generation ---


def read_generate(path: Path, skipped: list[HpctrainError] | None = None) -> list[Passage]:
    """Text, a paragraph a line (blank lines between them or not), or NSMC's tsv with a prompt for each label.

    Raises HpctrainError, naming the line.
    """
    lines = _lines(path)
    if lines[0].split("\t") != list(NSMC):
        return [Passage("", line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]

    def review(place: str, line: str) -> Passage:
        _, text, label = _fields(place, line, NSMC)
        if label not in PROMPTS:
            raise _wrong(place, f"the label is {label!r}, and only {' and '.join(sorted(PROMPTS))} have a prompt")
        return Passage(PROMPTS[label], text, place)

    return _examples(path, review, _table(path, NSMC), skipped)


READERS: dict[str, Callable[[Path, list[HpctrainError] | None], list[Any]]] = {
    "classify": read_classify,
    "pair": read_pair,
    "ner": read_ner,
    "qa": read_qa,
    "generate": read_generate,
}


# --- files ---


def _examples(
    path: Path, example: Callable[..., Example], items: Iterable[tuple[Any, ...]], skipped: list[HpctrainError] | None
) -> list[Example]:
    """What `example` makes of each item of a file; an item for which it raises HpctrainError is left out, and the error kept.

    Without a list to keep it in, the error is raised. So is what `items` itself raises, and a file of which nothing is left.
    """
    examples, errors = [], []
    for item in items:
        try:
            examples.append(example(*item))
        except HpctrainError as error:
            if skipped is None:
                raise
            errors.append(error.with_traceback(None))  # which would hold on to all that has been read
    if errors and not examples:
        raise HpctrainError(f"{path}: of {len(errors):,} examples none can be read; the first: {errors[0]}")
    if not examples:
        raise HpctrainError(f"{path}: there is no example in it: fetch the file again")
    if errors:
        skipped += errors
    return examples


def _wrong(place: str, what: str) -> HpctrainError:
    return HpctrainError(f"{place}: {what}: mend the line, or fetch the file again")


def _content(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises HpctrainError where there is none, or not in UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HpctrainError(f"{path}: cannot be read ({error.strerror}): --data takes a folder or a file") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise HpctrainError(f"{path}, line {number}: not UTF-8: convert it, as by iconv -f cp949 -t utf-8") from error
    if not text.strip():
        raise HpctrainError(f"{path}: the file is empty: fetch it again")
    return text


def _lines(path: Path) -> list[str]:
    """The lines of a file, without blank ones at its end."""
    # Not splitlines(): it also cuts at U+2028 and others that stand inside of texts.
    text = _content(path).replace("\r\n", "\n").rstrip("\n")
    return text.split("\n")


def _table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The place of each line below the header of a tsv, and the line."""
    header, *lines = _lines(path)
    if header.split("\t") != list(columns):
        what = f"the first line should name the columns {', '.join(columns)}, with tabs, and is {header[:80]!r}"
        raise _wrong(f"{path}, line 1", what)
    for number, line in enumerate(lines, 2):
        yield f"{path}, line {number}", line


def _fields(place: str, line: str, columns: tuple[str, ...]) -> list[str]:
    """The fields of a line of a tsv. There is no quoting: a quote is text."""
    fields = line.split("\t")
    if len(fields) != len(columns):
        raise _wrong(place, f"{len(fields)} fields where the header has {len(columns)} ({', '.join(columns)})")
    return fields


def _json(path: Path, shape: type, what: str) -> Any:  # noqa: ANN401 - what json holds
    try:
        value = json.loads(_content(path))
    except json.JSONDecodeError as error:
        raise HpctrainError(f"{path}, line {error.lineno}: not json ({error.msg}): fetch the file again") from error
    if not isinstance(value, shape) or not value:
        raise HpctrainError(f"{path}: not {what}")
    return value


def _get(place: str, item: object, key: str, type_: type, what: str) -> Any:  # noqa: ANN401 - what json holds
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, type_):
        raise HpctrainError(f"{place} has no {key!r} of type {type_.__name__}: expected {what}")
    return value
