"""Answer questions with a span of a text, as in KorQuAD 1.0 and SQuAD 1.1:

    hpctrain nlp.qa                                                    sample data, tiny model from scratch
    hpctrain nlp.qa --data korquad_v1 --model klue/bert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.qa --data korquad_v1 --model klue/bert-base
"""

import string
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from tokenizers import Encoding
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForQuestionAnswering, PreTrainedTokenizerFast
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from hpctrain.cli import Parser
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp import data, finetune, options
from hpctrain.nlp.features import Features, encode_texts
from hpctrain.nlp.task import Task
from hpctrain.world import World

TOP_SPANS = 20  # spans of each window that compete for the answer
# Longest answer in tokens. The longest of KorQuAD's dev set has 43 characters, which are at most 43 subword tokens.
MAX_ANSWER = 64
# What KorQuAD's evaluation script replaces by a space. It deletes the rest of string.punctuation.
SPACES = str.maketrans(dict.fromkeys("'\"《》<>〈〉()‘’", " "))  # noqa: RUF001 - as in that script
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
EXPECTED = "SQuAD 1.1 JSON (KorQuAD 1.0): data, paragraphs, context, qas, id, question, answers, text, answer_start"


class Answer(NamedTuple):
    """A span of a context, context[start : start + len(text)]."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a paragraph (context) of an article (title), and the answers that count as correct, at least one."""

    id: str
    title: str
    context: str
    question: str
    answers: list[Answer]
    location: str = ""


class Qa(Task):
    """Find the span of a text (context) that answers a question. A long context has several windows, one feature each."""

    name = "qa"
    title = "Question answering"
    formats = "JSON of SQuAD 1.1 or KorQuAD 1.0"
    model = AutoModelForQuestionAnswering
    pipeline_tag = "question-answering"
    inputs = ("question", "context")
    max_length = 384
    stride = 128
    padding: ClassVar[dict[str, int]] = {"start": -1, "end": -1}
    # Given the positions, the model would compute a loss that includes padding in its softmax.
    extra = ("start", "end", "start_positions", "end_positions")
    groups = "articles"
    selection_metric = "f1"

    def read(self, path: Path, skipped: list[HpctrainError] | None = None) -> list[Question]:
        """Read the JSON of SQuAD 1.1, which KorQuAD 1.0 shares; errors name the question.

        Each answer must be at its answer_start, except that its white space may differ (in KorQuAD's dev set all 5,774 match
        exactly).
        """
        seen = set()

        def make(where: str, title: str, context: str, item: object) -> Question:
            id_ = _get(where, item, "id", str)
            location = f"{path}, question {id_}"
            text = _get(location, item, "question", str)
            answers = [
                Answer(
                    _get(f"{location}: an answer", each, "text", str), _get(f"{location}: an answer", each, "answer_start", int)
                )
                for each in _get(location, item, "answers", list)
            ]
            if not answers:
                raise HpctrainError(f"{location} has no answer, and SQuAD 2.0 is not supported: remove it from the file")
            for answer, start in answers:
                found = context[max(start, 0) : start + len(answer)]
                if not answer.strip() or start < 0 or found.split() != answer.split():
                    raise HpctrainError(
                        f"{location}: the answer {answer!r} is not at its answer_start {start}, "
                        f"where the context has {found!r}: fix the file"
                    )
            if id_ in seen:
                raise HpctrainError(f"{location}: an earlier question has the same id: give each question its own")
            seen.add(id_)
            return Question(id_, title, context, text, answers, location)

        return data.read_examples(path, make, _iterate_questions(path), skipped)

    def make_example(self, texts: Sequence[str]) -> Question:
        """A question with the answer unknown."""
        return Question("", "", texts[1], texts[0], [], "")

    def get_texts(self, example: Question) -> tuple[str, ...]:
        """The question and the context."""
        return (example.question, example.context)

    def group(self, example: Question) -> str:
        """The article: its paragraphs and questions stay in one part."""
        return example.title

    def tokenize(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Question], labels: list[str], max_length: int, stride: int
    ) -> Features:
        """One feature for each window: the question and as much of the context as fits; windows share `stride` tokens.

        `start` and `end` of a token are the characters context[start:end], or -1 for a token outside the context. The target is
        the first answer: the fewest tokens that cover it. A window that does not contain all of them points at [CLS].

        `cut` has the examples whose question is truncated, and those whose answer is longer than any window or than MAX_ANSWER.
        Raises UsageError if windows of max_length cannot share `stride` tokens.
        """
        # The question gets at most half of the tokens that windows do not share. The other half is new text in each window,
        # which limits the number of windows.
        most = (max_length - stride) // 2
        special = tokenizer.num_special_tokens_to_add(pair=True)
        if most <= special:
            raise UsageError(
                f"--stride {stride} with --max-length {max_length} leaves no room for a question and new text: "
                f"give --stride at most {max(0, max_length // 3)}, or a larger --max-length"
            )
        questions, cut = _truncate_questions(tokenizer, examples, most)
        columns = {"input_ids": [], "start": [], "end": []}
        if "token_type_ids" in tokenizer.model_input_names:
            columns["token_type_ids"] = []
        values = {"start_positions": [], "end_positions": [], "units": []}
        example_of = []
        pairs = [(question, example.context) for question, example in zip(questions, examples, strict=True)]
        encodings = encode_texts(tokenizer, pairs, max_length, cut="only_second", stride=stride, offsets=True)
        for number, (example, whole) in enumerate(zip(examples, encodings, strict=True)):
            windows = [_make_window(each) for each in (whole, *whole.overflowing)]
            positions = _locate_answer(example, windows)
            if example.answers and not any(place and place[1] - place[0] < MAX_ANSWER for place in positions):
                cut.add(number)
            for window, position in zip(windows, positions, strict=True):
                encoding, before, starts, ends = window
                after = len(encoding.ids) - before - len(starts)
                # arrays, because lists of numbers take four times the memory
                columns["input_ids"].append(array("i", encoding.ids))
                columns["start"].append(array("i", [-1] * before + [*starts] + [-1] * after))
                columns["end"].append(array("i", [-1] * before + [*ends] + [-1] * after))
                if "token_type_ids" in columns:
                    columns["token_type_ids"].append(array("i", encoding.type_ids))
                first, last = position or [_find_cls(tokenizer, encoding)] * 2
                values["start_positions"].append(first)
                values["end_positions"].append(last)
                values["units"].append(len(example.answers) > 0)
                example_of.append(number)
        return Features.from_lists(columns, values, example=example_of, cut=sorted(cut))

    def compute_loss(self, output: QuestionAnsweringModelOutput, batch: dict[str, Any]) -> Tensor:
        """The mean of the cross-entropies of start and end, with a softmax over the tokens of the window but not its padding."""
        padding = batch["attention_mask"] == 0
        start, end = (
            cross_entropy(logits.float().masked_fill(padding, -torch.inf), batch[name])
            for logits, name in ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
        )
        return (start + end) / 2

    def predict(self, output: QuestionAnsweringModelOutput, batch: dict[str, Any]) -> list[Any]:
        """The best spans of each window: at most TOP_SPANS of at most MAX_ANSWER tokens, [spans, 3], best first.

        A span is its score (the sum of its two logits), and the characters of the context where it starts and ends.
        """
        outside = batch["start"] < 0  # [b, tokens]
        starts = output.start_logits.float().masked_fill(outside, -torch.inf)
        ends = output.end_logits.float().masked_fill(outside, -torch.inf)
        # [b, tokens, MAX_ANSWER]: from each token to itself and to those after it, so that no span ends before it starts
        scores = starts[:, :, None] + pad(ends, (0, MAX_ANSWER - 1), value=-torch.inf).unfold(1, MAX_ANSWER, 1)
        scores, best = scores.flatten(1).topk(TOP_SPANS)
        first = best // MAX_ANSWER
        last = (first + best % MAX_ANSWER).clamp(max=outside.shape[1] - 1)  # beyond it the score is -inf
        # float32 represents positions up to 16 million exactly
        spans = torch.stack([scores, batch["start"].gather(1, first).float(), batch["end"].gather(1, last).float()], 2)
        return [window[numpy.isfinite(window[:, 0])] for window in spans.cpu().numpy()]

    def make_answers(
        self, examples: Sequence[Question], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The best span over all windows of a question, its start in the context, and its probability (score).

        The probability is relative to the spans that predict() kept. If the context has no text, the answer has none either.
        """
        windows_of: list[list[Any]] = [[] for _ in examples]
        for number, spans in zip(features.example, predictions, strict=True):
            windows_of[number].append(spans)
        answers = []
        for example, windows in zip(examples, windows_of, strict=True):
            spans = numpy.concatenate(windows)
            if not len(spans):
                answers.append({"answer": "", "start": 0, "score": 0.0})
                continue
            best = spans[:, 0].argmax()
            # A span that is in two windows is one answer.
            same = (spans[:, 1:] == spans[best, 1:]).all(1)
            weights = numpy.exp(spans[:, 0].astype(numpy.float64) - spans[best, 0])
            start, text = _strip_span(int(spans[best, 1]), example.context[int(spans[best, 1]) : int(spans[best, 2])])
            answers.append({"answer": text, "start": start, "score": round(float(weights[same].sum() / weights.sum()), 6)})
        return answers

    def score(self, examples: Sequence[Question], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Exact match and F1 as in KorQuAD's evaluate-v1.0.py, but in [0, 1]: the mean over all questions.

        If a question has several correct answers, the one with the highest score counts.
        See https://korquad.github.io/KorQuad%201.0/
        """
        pairs = [
            [(normalize_answer(answer["answer"]), normalize_answer(correct.text)) for correct in example.answers]
            for example, answer in zip(examples, answers, strict=True)
        ]
        exact = [max(predicted == correct for predicted, correct in each) for each in pairs]
        f1 = [max(compute_character_f1(predicted, correct) for predicted, correct in each) for each in pairs]
        return {"exact_match": float(numpy.mean(exact)), "f1": float(numpy.mean(f1))}


def normalize_answer(text: str) -> str:
    """An answer as KorQuAD compares it: quotes and brackets become spaces, other ASCII punctuation is deleted, in lower case.

    Consecutive spaces become one. Unlike in SQuAD, articles are kept.
    """
    return " ".join(text.translate(SPACES).lower().translate(PUNCTUATION).split())


def compute_character_f1(predicted: str, correct: str) -> float:
    """F1 of the characters of two normalized answers as multisets: order does not count, nor do spaces."""
    predicted, correct = predicted.replace(" ", ""), correct.replace(" ", "")
    same = (Counter(predicted) & Counter(correct)).total()
    return 2 * same / (len(predicted) + len(correct)) if same else 0.0


def _iterate_questions(path: Path) -> Iterator[tuple[str, str, str, object]]:
    """The position of each question in the file, the title and the context it belongs to, and its JSON value."""
    for a, article in enumerate(_get(f"{path}", data.read_json(path, dict, EXPECTED), "data", list)):
        title = _get(f"{path}, data[{a}]", article, "title", str)
        for p, paragraph in enumerate(_get(f"{path}, data[{a}]", article, "paragraphs", list)):
            where = f"{path}, data[{a}].paragraphs[{p}]"
            context = _get(where, paragraph, "context", str)
            for q, item in enumerate(_get(where, paragraph, "qas", list)):
                yield f"{where}.qas[{q}]", title, context, item


def _get(location: str, item: object, key: str, type_: type) -> Any:  # noqa: ANN401 - any JSON value
    return data.get_field(location, item, key, type_, EXPECTED)


class _Window(NamedTuple):
    """The tokens of a window, how many of them precede the context, and where those of the context start and end in it."""

    encoding: Encoding
    before: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def _make_window(encoding: Encoding) -> _Window:
    sequences = encoding.sequence_ids  # of each token: 0 for the question, 1 for the context, None for special tokens
    if 1 not in sequences:  # a context without text
        return _Window(encoding, len(sequences), (), ())
    before = sequences.index(1)
    return _Window(encoding, before, *zip(*encoding.offsets[before : before + sequences.count(1)], strict=True))


def _locate_answer(example: Question, windows: list[_Window]) -> list[tuple[int, int] | None]:
    """The first and the last token of the first answer in each window; None if the window does not contain all of it."""
    if not example.answers:
        return [None] * len(windows)
    start, text = _strip_span(example.answers[0].start, example.answers[0].text)
    # From the first token that ends after the start to the last that starts before the end; first > last if there is none.
    spans = [(bisect_right(window.ends, start), bisect_left(window.starts, start + len(text)) - 1) for window in windows]
    # What the tokens of all windows together cover. It may differ from the answer: a subword token can be larger, such as a
    # name with its particle, and a tokenizer deletes some characters.
    covered = [(w.starts[first], w.ends[last]) for w, (first, last) in zip(windows, spans, strict=True) if first <= last]
    if not covered:
        return [None] * len(windows)
    whole = (min(start for start, _ in covered), max(end for _, end in covered))
    return [
        (w.before + first, w.before + last) if first <= last and (w.starts[first], w.ends[last]) == whole else None
        for w, (first, last) in zip(windows, spans, strict=True)
    ]


def _truncate_questions(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Question], most: int
) -> tuple[list[str], set[int]]:
    """The questions in at most `most` tokens, and the indices of the examples whose question is truncated.

    The tokenizer aborts if a question leaves no room for the context.
    """
    questions, cut = [], set()
    length = most + tokenizer.num_special_tokens_to_add(pair=False)
    texts = [example.question for example in examples]
    for number, (text, encoding) in enumerate(zip(texts, encode_texts(tokenizer, texts, length, offsets=True), strict=True)):
        if encoding.overflowing:
            cut.add(number)
            text = text[: max(end for _, end in encoding.offsets)]
        questions.append(text)
    return questions, cut


def _find_cls(tokenizer: PreTrainedTokenizerFast, encoding: Encoding) -> int:
    """The target of a window without an answer: [CLS], or the first token if the tokenizer has no [CLS]."""
    return encoding.ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in encoding.ids else 0


def _strip_span(start: int, text: str) -> tuple[int, str]:
    """The start and the text of a span without the white space around it; some tokens include the space before a word."""
    return start + len(text) - len(text.lstrip()), text.strip()


TASK = Qa()


def parser() -> Parser:
    """The options of `hpctrain nlp.qa`."""
    return options.make_parser(TASK)


def main(world: World, arguments: list[str]) -> None:
    """Run `hpctrain nlp.qa`."""
    finetune.fine_tune(TASK, world, arguments)
