"""Answer questions with a span of a text, as in KorQuAD 1.0 and SQuAD:

    hpctrain nlp.qa                                                    sample data, tiny model from scratch
    hpctrain nlp.qa --data korquad_v1 --model klue/bert-base

On two nodes, in the container, with Slurm:

    sbatch launch/apptainer_ddp.sh nlp.qa --data korquad_v1 --model klue/bert-base
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy
import torch
from numpy import ndarray
from tokenizers import Encoding
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForQuestionAnswering, PreTrainedTokenizerFast

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.batches.features import Features, encode_texts
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.data.squad import UNANSWERABLE, Question, read_questions
from hpctrain.nlp.task import Task
from hpctrain.nlp.tasks.answer_scores import is_latin, score_korquad, score_squad

TOP_SPANS = 20  # spans of each window that compete for the answer
# Longest answer in tokens. The longest in KorQuAD's dev set has 43 characters, so at most 43 subword tokens.
MAX_ANSWER = 64
NO_ANSWER = -2  # in the column `start`: the token, [CLS], that a model points at if there is no answer


class SpanLogits(Protocol):
    """The output of a model, whose tensors transformers declares as optional."""

    start_logits: Tensor
    end_logits: Tensor


class Qa(Task[Question]):
    """Find the span of a text (context) that answers a question; long contexts have several windows."""

    name = "qa"
    title = "Question answering"
    formats = "JSON of SQuAD 1.1, SQuAD 2.0 or KorQuAD 1.0; jsonl with question, context, answers"
    fields = ("question", "context", "answers")
    model = AutoModelForQuestionAnswering
    pipeline_tag = "question-answering"
    inputs = ("question", "context")
    examples = tuple(
        (question, "바다 등대는 1998년 봄에 세워졌다. 등대는 부산 바닷가에 서 있다. 벽은 검은 빛깔이다.")
        for question in ("바다 등대는 어디에 서 있는가?", "바다 등대는 언제 세워졌는가?")
    )
    max_length = 384
    stride = 128
    padding: ClassVar[Mapping[str, int]] = {"start": -1, "end": -1}
    # Given the positions, the model would compute a loss that includes padding in its softmax.
    extra = ("start", "end", "start_positions", "end_positions")
    cut_text = "with a question "
    lost_text = (
        f"with an answer longer than {MAX_ANSWER} tokens or than a window, so no prediction can be right"
    )
    groups = "articles"
    selection_metric = "f1_char"  # choose_metric() may take another

    def read(
        self, path: Path, skipped: list[HpctrainError] | None = None, columns: dict[str, str] | None = None
    ) -> list[Question]:
        """Read the JSON of SQuAD, which KorQuAD 1.0 shares; errors name the question (squad.py)."""
        return read_questions(path, skipped, columns)

    def make_example(self, texts: Sequence[str], optional: bool = False, **_: bool) -> Question:
        """A question with the answer unknown; `optional` as in the training data."""
        return Question("", "", texts[1], texts[0], [], optional)

    def collect_settings(self, examples: Sequence[Question]) -> dict[str, bool]:
        """Whether the data set has questions without an answer."""
        return {"optional": True} if any(example.optional for example in examples) else {}

    def get_texts(self, example: Question) -> tuple[str, ...]:
        return (example.question, example.context)

    def has_answer(self, example: Question) -> bool:
        """Whether it has an answer in its context."""
        return example.answers != UNANSWERABLE

    def group(self, example: Question) -> str:
        """The article: its paragraphs and questions stay in one part."""
        return example.title

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[Question],
        labels: list[str],
        max_length: int,
        stride: int,
    ) -> Features:
        """One feature for each window: the question and as much of the context as fits.

        Windows share `stride` tokens. `start` and `end` of a token are the characters context[start:end], or
        negative for a token outside the context. The target is the first answer: the fewest tokens that cover
        it. A window that does not contain all of them points at [CLS], and so does each window of a question
        without an answer.

        `cut` has the examples whose question is truncated, `lost` those with an answer longer than any window
        or than MAX_ANSWER. Raises UsageError if windows of max_length cannot share `stride` tokens.
        """
        # The question gets at most half of the tokens that windows do not share. The other half is new text
        # in each window, which limits the number of windows.
        most = (max_length - stride) // 2
        special = tokenizer.num_special_tokens_to_add(pair=True)
        if most <= special:
            raise UsageError(
                f"--stride {stride} with --max-length {max_length} leaves no room for a question and new "
                f"text: give --stride at most {max(0, max_length // 3)}, or a larger --max-length"
            )
        questions, cut = _truncate_questions(tokenizer, examples, most)
        lost = []
        columns: dict[str, list[array[int]]] = {"input_ids": [], "start": [], "end": []}
        if "token_type_ids" in tokenizer.model_input_names:
            columns["token_type_ids"] = []
        values: dict[str, list[int]] = {"start_positions": [], "end_positions": [], "units": []}
        example_of = []
        pairs = [(question, example.context) for question, example in zip(questions, examples, strict=True)]
        encodings = encode_texts(tokenizer, pairs, max_length, cut="only_second", stride=stride, offsets=True)
        for number, (example, whole) in enumerate(zip(examples, encodings, strict=True)):
            windows = [_make_window(each) for each in (whole, *whole.overflowing)]
            positions = _locate_answer(example, windows)
            if _has_span(example) and not any(
                place and place[1] - place[0] < MAX_ANSWER for place in positions
            ):
                lost.append(number)
            for window, position in zip(windows, positions, strict=True):
                encoding, before, starts, ends = window
                after = len(encoding.ids) - before - len(starts)
                # Lists of numbers would take four times the memory of arrays.
                columns["input_ids"].append(array("i", encoding.ids))
                start = array("i", [-1] * before + [*starts] + [-1] * after)
                cls = _find_cls(tokenizer, encoding)
                if example.optional:
                    start[cls] = NO_ANSWER
                columns["start"].append(start)
                columns["end"].append(array("i", [-1] * before + [*ends] + [-1] * after))
                if "token_type_ids" in columns:
                    columns["token_type_ids"].append(array("i", encoding.type_ids))
                first, last = position or (cls, cls)
                values["start_positions"].append(first)
                values["end_positions"].append(last)
                values["units"].append(len(example.answers) > 0)
                example_of.append(number)
        return Features.from_lists(columns, values, example=example_of, cut=cut, lost=lost)

    def compute_loss(self, output: SpanLogits, batch: TextBatch) -> Tensor:
        """The mean of the cross-entropies of start and end, each with a softmax without the padding."""
        padding = batch.attention_mask == 0
        start, end = (
            cross_entropy(logits.float().masked_fill(padding, -torch.inf), batch.values[name])
            for logits, name in (
                (output.start_logits, "start_positions"),
                (output.end_logits, "end_positions"),
            )
        )
        return (start + end) / 2

    def predict(self, output: SpanLogits, batch: TextBatch) -> Tensor:
        """The best TOP_SPANS spans of each window, of at most MAX_ANSWER tokens, [b, TOP_SPANS + 1, 3].

        The best comes first. A span is its score (the sum of its two logits), and the characters of the
        context where it starts and ends. A last row is the score of no answer, at NO_ANSWER, if allowed.
        """
        outside = batch.tokens["start"] < 0  # [b, tokens]
        starts = output.start_logits.float().masked_fill(outside, -torch.inf)
        ends = output.end_logits.float().masked_fill(outside, -torch.inf)
        # [b, tokens, MAX_ANSWER]: each token and those after it, so no span ends before its start
        scores = starts[:, :, None] + pad(ends, (0, MAX_ANSWER - 1), value=-torch.inf).unfold(
            1, MAX_ANSWER, 1
        )
        scores, best = scores.flatten(1).topk(TOP_SPANS)
        first = best // MAX_ANSWER
        last = (first + best % MAX_ANSWER).clamp(max=outside.shape[1] - 1)  # beyond it the score is -inf
        # float32 represents positions up to 16 million exactly
        spans = torch.stack(
            [
                scores,
                batch.tokens["start"].gather(1, first).float(),
                batch.tokens["end"].gather(1, last).float(),
            ],
            2,
        )
        none = output.start_logits.float() + output.end_logits.float()
        none = none.masked_fill(batch.tokens["start"] != NO_ANSWER, -torch.inf).amax(1)
        return torch.cat([spans, torch.stack([none, *[torch.full_like(none, NO_ANSWER)] * 2], 1)[:, None]], 1)

    def trim(self, prediction: ndarray) -> ndarray:
        """The spans that the window has."""
        return prediction[numpy.isfinite(prediction[:, 0])]

    def make_answers(
        self, examples: Sequence[Question], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The best span over all windows of a question, its start in the context, and its probability.

        The probability ("score") is relative to the spans that predict() kept. The answer is empty if the
        context has no text, or if the score of no answer is higher than that of the best span. The score of
        no answer is the lowest of all windows (Devlin et al. 2019, 4.3, with a threshold of 0).
        """
        windows_of: list[list[Any]] = [[] for _ in examples]
        for number, spans in zip(features.example, predictions, strict=True):
            windows_of[number].append(spans)
        answers = []
        for example, windows in zip(examples, windows_of, strict=True):
            spans = numpy.concatenate(windows)
            is_none = spans[:, 1] == NO_ANSWER
            none = spans[is_none][spans[is_none, 0].argsort()][:1]
            spans = numpy.concatenate([spans[~is_none], none])
            if not len(spans):
                answers.append({"answer": "", "start": 0, "score": 0.0})
                continue
            best = spans[:, 0].argmax()
            # A span that is in two windows is one answer.
            same = (spans[:, 1:] == spans[best, 1:]).all(1)
            weights = numpy.exp(spans[:, 0].astype(numpy.float64) - spans[best, 0])
            start, end = max(0, int(spans[best, 1])), max(0, int(spans[best, 2]))
            start, text = _strip_span(start, example.context[start:end])
            answers.append(
                {
                    "answer": text,
                    "start": start,
                    "score": round(float(weights[same].sum() / weights.sum()), 6),
                }
            )
        return answers

    def choose_metric(self, examples: Sequence[Question]) -> str:
        """SQuAD's F1 of words if most letters of the correct answers are Latin, else that of characters."""
        answers = (answer.text for example in examples for answer in example.answers)
        return "f1_word" if is_latin(answers) else "f1_char"

    def score(self, examples: Sequence[Question], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The means of KorQuAD's F1 of characters, of SQuAD's F1 of words, and of the exact match.

        The exact match is KorQuAD's or SQuAD's, as choose_metric() says. If there are questions without an
        answer, each mean is also given for the questions with and without an answer, as by SQuAD 2.0.
        """
        korquad, squad = (
            [score(answer["answer"], [right.text for right in example.answers])
             for example, answer in zip(examples, answers, strict=True)]
            for score in (score_korquad, score_squad)
        )  # fmt: skip
        fitting = squad if self.choose_metric(examples) == "f1_word" else korquad
        columns = {
            "exact_match": [exact for exact, _ in fitting],
            "f1_char": [f1 for _, f1 in korquad],
            "f1_word": [f1 for _, f1 in squad],
        }
        scores = {name: float(numpy.mean(column)) for name, column in columns.items()}
        has_answer = numpy.array([_has_span(example) for example in examples])
        if not has_answer.all():
            for part, rows in (("HasAns", has_answer), ("NoAns", ~has_answer)):
                if rows.any():
                    scores |= {
                        f"{name}/{part}": float(numpy.array(column)[rows].mean())
                        for name, column in columns.items()
                    }
        return scores


class _Window(NamedTuple):
    """The tokens of a window: how many precede the context, and where those of the context start and end."""

    encoding: Encoding
    before: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def _make_window(encoding: Encoding) -> _Window:
    # of each token: 0 for the question, 1 for the context, None for special tokens
    sequences = encoding.sequence_ids
    if 1 not in sequences:  # a context without text
        return _Window(encoding, len(sequences), (), ())
    before = sequences.index(1)
    return _Window(
        encoding, before, *zip(*encoding.offsets[before : before + sequences.count(1)], strict=True)
    )


def _has_span(example: Question) -> bool:
    """Whether the answer is known and is not empty."""
    return example.answers not in ([], UNANSWERABLE)


def _locate_answer(example: Question, windows: list[_Window]) -> list[tuple[int, int] | None]:
    """First and last token of the first answer in each window; None unless it contains the whole answer."""
    if not _has_span(example):
        return [None] * len(windows)
    start, text = _strip_span(example.answers[0].start, example.answers[0].text)
    # From the first token that ends after the start to the last before the end; first > last if none.
    spans = [
        (bisect_right(window.ends, start), bisect_left(window.starts, start + len(text)) - 1)
        for window in windows
    ]
    # What the tokens of all windows together cover. It may differ from the answer: a subword token can be
    # larger, such as a name with its particle, and a tokenizer deletes some characters.
    covered = [
        (w.starts[first], w.ends[last])
        for w, (first, last) in zip(windows, spans, strict=True)
        if first <= last
    ]
    if not covered:
        return [None] * len(windows)
    whole = (min(start for start, _ in covered), max(end for _, end in covered))
    return [
        (w.before + first, w.before + last)
        if first <= last and (w.starts[first], w.ends[last]) == whole
        else None
        for w, (first, last) in zip(windows, spans, strict=True)
    ]


def _truncate_questions(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Question], most: int
) -> tuple[list[str], list[int]]:
    """The questions in at most `most` tokens, and the indices of the examples whose question is truncated.

    The tokenizer aborts if a question leaves no room for the context.
    """
    questions, cut = [], []
    length = most + tokenizer.num_special_tokens_to_add(pair=False)
    texts = [example.question for example in examples]
    for number, (text, encoding) in enumerate(
        zip(texts, encode_texts(tokenizer, texts, length, offsets=True), strict=True)
    ):
        if encoding.overflowing:
            cut.append(number)
            text = text[: max(end for _, end in encoding.offsets)]
        questions.append(text)
    return questions, cut


def _find_cls(tokenizer: PreTrainedTokenizerFast, encoding: Encoding) -> int:
    """The target of a window without an answer: [CLS], or the first token if the tokenizer has no [CLS]."""
    return encoding.ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in encoding.ids else 0


def _strip_span(start: int, text: str) -> tuple[int, str]:
    """A span's start and text without white space, which some tokens include before a word."""
    return start + len(text) - len(text.lstrip()), text.strip()


TASK = Qa()
