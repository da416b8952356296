"""Read questions and their answers: the JSON of SQuAD 1.1, SQuAD 2.0 and KorQuAD 1.0, and JSON Lines."""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import HpctrainError
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.task import Example

EXPECTED = (
    "SQuAD JSON (KorQuAD 1.0): data, paragraphs, context, qas, id, question, answers, text, answer_start"
)


class Answer(NamedTuple):
    """A span of a context, context[start : start + len(text)]."""

    text: str
    start: int


UNANSWERABLE = [Answer("", 0)]  # the answers of a question that the context does not answer (SQuAD 2.0)


@dataclass(frozen=True, slots=True)
class Question(Example):
    """A question about a paragraph (context) of an article (title), and the answers that count as correct.

    There is at least one answer in the data, UNANSWERABLE included, and none in what a user asks. `optional`:
    the data have questions without an answer, so the model may answer "".
    """

    id: str
    title: str
    context: str
    question: str
    answers: list[Answer]
    optional: bool = False


def read_questions(
    path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
) -> list[Question]:
    """Read the questions of a file; errors name the question.

    A question with is_impossible, or without answers, is UNANSWERABLE. Each answer must be at its
    answer_start, except that its white space may differ (in KorQuAD's dev set all 5,774 match exactly).
    """
    seen: dict[str, str] = {}

    def make(where: str, title: str, context: str, item: object) -> Question:
        if isinstance(item, dict) and type(item.get("id")) is int:  # as in COVID-QA
            item = item | {"id": str(item["id"])}
        id_ = _get(where, item, "id", str)
        assert isinstance(item, dict)  # it has an id
        location = f"{path}, question {formats.excerpt(id_)}"
        text = _get(location, item, "question", str)
        answers = _read_answers(location, context, item)
        if seen.setdefault(id_, where) != where:
            raise HpctrainError(
                f"{location}: an earlier question has the same id: give each question its own"
            )
        return Question(id_, title, context, text, answers, location=location)

    def make_from_json(location: str, item: dict[str, Any]) -> Question:
        item = {"id": location.rpartition(", ")[2], **item}
        context = _get(location, item, "context", str)
        # Without titles, the questions of one text are a group.
        title = _get(location, item, "title", str) if item.get("title") else context
        return make(location, title, context, item)

    if columns:
        questions = read_columns(path, columns, make_from_json, skipped)
    elif path.suffix.lower() in formats.OBJECTS - formats.JSON_LINES and _has_paragraphs(path):
        questions = formats.read_examples(path, make, _iterate_questions(path), skipped)
    else:
        questions = formats.read_objects(path, make_from_json, skipped)
    if any(question.answers == UNANSWERABLE for question in questions):
        return [replace(question, optional=True) for question in questions]
    return questions


def _has_paragraphs(path: Path) -> bool:
    """Whether a file is one object with articles, as those of SQuAD."""
    return not formats.has_list(path) and '"paragraphs"' in formats.read_text(path)


def _read_answers(location: str, context: str, item: dict[str, Any]) -> list[Answer]:
    if item.get("is_impossible") is True:
        return UNANSWERABLE
    listed = item.get("answers")
    if isinstance(listed, str):
        raise HpctrainError(
            f"{location}: its answers are a text: a csv or tsv cannot have lists, so write .jsonl or .parquet"
        )
    if isinstance(listed, dict):  # two lists, as the library datasets writes them
        columns = [_get(location, listed, key, list) for key in ("text", "answer_start")]
        listed = [{"text": text, "answer_start": start} for text, start in zip(*columns, strict=False)]
    where = f"{location}: an answer"
    answers = [
        Answer(_get(where, each, "text", str), _get(where, each, "answer_start", int))
        for each in formats.get_answer(location, {"answers": listed}, "answers", list, EXPECTED)
    ]
    for answer, start in answers:
        found = context[max(start, 0) : start + len(answer)]
        if not answer.strip() or start < 0 or found.split() != answer.split():
            raise HpctrainError(
                f"{location}: the answer {answer[:80]!r} is not at its answer_start {start}, "
                f"where the context has {found[:80]!r}{_explain_offset(context, answer, start)}: fix the file"
            )
    return answers or UNANSWERABLE


def _explain_offset(context: str, answer: str, start: int) -> str:
    """In what other unit `start` counts, or in what form of Unicode the answer is; "" if unknown."""
    for encoding, size, unit in (("utf-16-le", 2, "units of UTF-16"), ("utf-8", 1, "bytes")):
        before = context.encode(encoding)[: max(start, 0) * size].decode(encoding, "ignore")
        if answer.strip() and context.startswith(answer, len(before)):
            return f" (it counts {unit}, not characters)"
    composed, other = unicodedata.normalize("NFC", answer), unicodedata.normalize("NFD", answer)
    if answer not in context and (composed in context or other in context):
        return " (in another form of Unicode than the answer, NFC or NFD)"
    return ""


def _iterate_questions(path: Path) -> Iterator[tuple[str, str, str, object]]:
    """For each question its position in the file, its title, its context, and its JSON value."""
    for a, article in enumerate(_get(f"{path}", formats.read_json(path, dict, EXPECTED), "data", list)):
        # COVID-QA has no titles, others have empty ones. An article that is not an object fails below.
        untitled = isinstance(article, dict) and not article.get("title")
        title = f"data[{a}]" if untitled else _get(f"{path}, data[{a}]", article, "title", str)
        for p, paragraph in enumerate(_get(f"{path}, data[{a}]", article, "paragraphs", list)):
            where = f"{path}, data[{a}].paragraphs[{p}]"
            context = _get(where, paragraph, "context", str)
            for q, item in enumerate(_get(where, paragraph, "qas", list)):
                yield f"{where}.qas[{q}]", title, context, item


def _get(location: str, item: object, key: str, type_: type) -> Any:
    return formats.get_field(location, item, key, type_, EXPECTED)
