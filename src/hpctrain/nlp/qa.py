"""Answer questions with a stretch of a text, as in KorQuAD 1.0 and SQuAD 1.1:

    hpctrain nlp.qa                                                    a model of its own on a small sample
    hpctrain nlp.qa --data korquad_v1 --model klue/bert-base

Two nodes, from the container, by Slurm:

    sbatch launch/apptainer_ddp.sh nlp.qa --data korquad_v1 --model klue/bert-base
"""

import string
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from tokenizers import Encoding
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForQuestionAnswering, PreTrainedTokenizerFast
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from hpctrain.nlp import finetune
from hpctrain.nlp.data import Question
from hpctrain.nlp.features import Features, encode, features
from hpctrain.nlp.task import Task
from hpctrain.world import UsageError, World

KEPT = 20  # spans of each window that compete for the answer
LONGEST = 64  # tokens of an answer at most: the longest of KorQuAD's dev set has 43 characters, which are at most 43 word pieces
# What KorQuAD's script replaces by a space; the rest of string.punctuation it deletes.
SPACES = str.maketrans(dict.fromkeys("'\"《》<>〈〉()‘’", " "))  # noqa: RUF001 - meant
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))


class Qa(Task):
    """A question about a text (context) has an answer in it. A long context has several windows, each of them a feature."""

    name = "qa"
    title = "Question answering"
    model = AutoModelForQuestionAnswering
    pipeline_tag = "question-answering"
    inputs = ("question", "context")
    max_length = 384
    stride = 128
    padding: ClassVar[dict[str, int]] = {"start": -1, "end": -1}
    extra = ("start", "end", "start_positions", "end_positions")  # with positions the model would take a loss over padding
    score = "f1"

    def texts(self, example: Question) -> tuple[str, ...]:
        """The question and the context."""
        return (example.question, example.context)

    def example(self, texts: Sequence[str]) -> Question:
        """A question whose answer is not known."""
        return Question("", "", texts[1], texts[0], [], "")

    def tokenise(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Question], labels: list[str], max_length: int, stride: int
    ) -> Features:
        """A feature a window, which is the question and max_length tokens at most with it; windows share `stride` tokens.

        `start` and `end` of a token are the characters context[start:end], and -1 where it is none of the context. The model
        learns the first answer: the smallest run of tokens that covers it. A window without all of them points at [CLS].

        `cut` has the examples whose question is too long and loses its end, and those whose answer is longer than any window or
        than LONGEST.
        Raises UsageError where windows of max_length could not share `stride` tokens.
        """
        # The question gets half of what is not shared. The other half is new in each window, which therefore are few.
        most = (max_length - stride) // 2
        special = tokenizer.num_special_tokens_to_add(pair=True)
        if most <= special:
            raise UsageError(
                f"--stride {stride} of --max-length {max_length} leaves no room for a question and {stride} tokens that windows "
                f"share: take a stride of at most {max(0, max_length // 3)}, or longer windows"
            )
        questions, cut = _questions(tokenizer, examples, most)
        columns = {"input_ids": [], "start": [], "end": []}
        if "token_type_ids" in tokenizer.model_input_names:
            columns["token_type_ids"] = []
        values = {"start_positions": [], "end_positions": [], "units": []}
        of = []  # the example of each feature
        pairs = [(question, example.context) for question, example in zip(questions, examples, strict=True)]
        encodings = encode(tokenizer, pairs, max_length, cut="only_second", stride=stride, offsets=True)
        for number, (example, whole) in enumerate(zip(examples, encodings, strict=True)):
            windows = [_window(each) for each in (whole, *whole.overflowing)]
            positions = _positions(example, windows)
            if example.answers and not any(place and place[1] - place[0] < LONGEST for place in positions):
                cut.add(number)
            for window, position in zip(windows, positions, strict=True):
                encoding, before, starts, ends = window
                after = len(encoding.ids) - before - len(starts)
                # arrays: of a long text, lists of numbers take four times their memory
                columns["input_ids"].append(array("i", encoding.ids))
                columns["start"].append(array("i", [-1] * before + [*starts] + [-1] * after))
                columns["end"].append(array("i", [-1] * before + [*ends] + [-1] * after))
                if "token_type_ids" in columns:
                    columns["token_type_ids"].append(array("i", encoding.type_ids))
                first, last = position or [_cls(tokenizer, encoding)] * 2
                values["start_positions"].append(first)
                values["end_positions"].append(last)
                values["units"].append(len(example.answers) > 0)
                of.append(number)
        return features(columns, values, example=of, cut=sorted(cut))

    def loss(self, output: QuestionAnsweringModelOutput, batch: dict[str, Any]) -> Tensor:
        """The mean of the losses of start and end, each a choice among the tokens of the window and not among its padding."""
        padding = batch["attention_mask"] == 0
        start, end = (
            cross_entropy(logits.float().masked_fill(padding, -torch.inf), batch[name])
            for logits, name in ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
        )
        return (start + end) / 2

    def predict(self, output: QuestionAnsweringModelOutput, batch: dict[str, Any]) -> list[Any]:
        """The best spans of each window, at most KEPT of LONGEST tokens at most: [spans, 3], best first.

        A span is its score (the sum of its two logits) and the characters of the context where it starts and ends.
        """
        outside = batch["start"] < 0  # [b, tokens]
        starts = output.start_logits.float().masked_fill(outside, -torch.inf)
        ends = output.end_logits.float().masked_fill(outside, -torch.inf)
        # [b, tokens, LONGEST]: from each token to itself and to those after it, so that no span ends before it starts
        scores = starts[:, :, None] + pad(ends, (0, LONGEST - 1), value=-torch.inf).unfold(1, LONGEST, 1)
        scores, best = scores.flatten(1).topk(KEPT)
        first = best // LONGEST
        last = (first + best % LONGEST).clamp(max=outside.shape[1] - 1)  # beyond it the score is -inf
        # float32 holds places of up to 16 million characters
        spans = torch.stack([scores, batch["start"].gather(1, first).float(), batch["end"].gather(1, last).float()], 2)
        return [window[numpy.isfinite(window[:, 0])] for window in spans.cpu().numpy()]

    def answers(
        self, examples: Sequence[Question], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The best span over all windows of a question, where it starts in the context, and how probable it is (score).

        The probability is among the spans that the windows kept. Where the context has no text at all, so has the answer.
        """
        found: list[list[Any]] = [[] for _ in examples]
        for number, spans in zip(features.example, predictions, strict=True):
            found[number].append(spans)
        answers = []
        for example, windows in zip(examples, found, strict=True):
            spans = numpy.concatenate(windows)
            if not len(spans):
                answers.append({"answer": "", "start": 0, "score": 0.0})
                continue
            best = spans[:, 0].argmax()
            # A span that two windows share is one answer.
            same = (spans[:, 1:] == spans[best, 1:]).all(1)
            weights = numpy.exp(spans[:, 0].astype(numpy.float64) - spans[best, 0])
            start, text = _trimmed(int(spans[best, 1]), example.context[int(spans[best, 1]) : int(spans[best, 2])])
            answers.append({"answer": text, "start": start, "score": round(float(weights[same].sum() / weights.sum()), 6)})
        return answers

    def metric(self, examples: Sequence[Question], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Exact match and F1 as KorQuAD's evaluate-v1.0.py counts them, but in [0, 1]: the mean over all questions.

        Of several right answers the one counts that gives the most. See https://korquad.github.io/KorQuad%201.0/
        """
        pairs = [
            [(normalised(answer["answer"]), normalised(right.text)) for right in example.answers]
            for example, answer in zip(examples, answers, strict=True)
        ]
        exact = [max(said == right for said, right in each) for each in pairs]
        f1 = [max(character_f1(said, right) for said, right in each) for each in pairs]
        return {"exact_match": float(numpy.mean(exact)), "f1": float(numpy.mean(f1))}


def normalised(text: str) -> str:
    """An answer as KorQuAD compares it: quotes and brackets are spaces, other punctuation of ASCII is nothing, in lower case.

    Spaces become one. Unlike in SQuAD, articles stay.
    """
    return " ".join(text.translate(SPACES).lower().translate(PUNCTUATION).split())


def character_f1(said: str, right: str) -> float:
    """F1 of the characters of two normalised answers, in any order, each as often as it is there; spaces do not count."""
    said, right = said.replace(" ", ""), right.replace(" ", "")
    same = (Counter(said) & Counter(right)).total()
    return 2 * same / (len(said) + len(right)) if same else 0.0


class _Window(NamedTuple):
    """The tokens of a window, how many of them come before the context, and where those of the context start and end in it."""

    encoding: Encoding
    before: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def _window(encoding: Encoding) -> _Window:
    which = encoding.sequence_ids  # of each token: 0 the question, 1 the context, None neither
    if 1 not in which:  # a context without text
        return _Window(encoding, len(which), (), ())
    before = which.index(1)
    return _Window(encoding, before, *zip(*encoding.offsets[before : before + which.count(1)], strict=True))


def _positions(example: Question, windows: list[_Window]) -> list[tuple[int, int] | None]:
    """The first and the last token of the first answer in each window, None where the window has not all of it."""
    if not example.answers:
        return [None] * len(windows)
    start, text = _trimmed(example.answers[0].start, example.answers[0].text)
    # From the first token that ends behind the start to the last that starts before the end, if there is any between.
    spans = [(bisect_right(window.ends, start), bisect_left(window.starts, start + len(text)) - 1) for window in windows]
    # What tokens of all windows cover. Their ends need not be those of the answer: a word piece can be larger, such as a name
    # with its particle, and a tokenizer deletes some characters.
    covered = [(w.starts[first], w.ends[last]) for w, (first, last) in zip(windows, spans, strict=True) if first <= last]
    if not covered:
        return [None] * len(windows)
    whole = (min(start for start, _ in covered), max(end for _, end in covered))
    return [
        (w.before + first, w.before + last) if first <= last and (w.starts[first], w.ends[last]) == whole else None
        for w, (first, last) in zip(windows, spans, strict=True)
    ]


def _questions(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Question], most: int) -> tuple[list[str], set[int]]:
    """The questions, cut to `most` tokens, and the examples of which it is cut. Without room the tokenizer would abort."""
    questions, cut = [], set()
    length = most + tokenizer.num_special_tokens_to_add(pair=False)
    texts = [example.question for example in examples]
    for number, (text, encoding) in enumerate(zip(texts, encode(tokenizer, texts, length, offsets=True), strict=True)):
        if encoding.overflowing:
            cut.add(number)
            text = text[: max(end for _, end in encoding.offsets)]
        questions.append(text)
    return questions, cut


def _cls(tokenizer: PreTrainedTokenizerFast, encoding: Encoding) -> int:
    """Where a window points that has no answer: at [CLS], or at the first token where the model has none."""
    return encoding.ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in encoding.ids else 0


def _trimmed(start: int, text: str) -> tuple[int, str]:
    """A stretch of a text without the spaces around it, and where it starts then; to some tokens belongs the space before."""
    return start + len(text) - len(text.lstrip()), text.strip()


TASK = Qa()


def main(world: World, arguments: list[str]) -> None:
    """Fine-tune as the flags say."""
    finetune.run(TASK, world, arguments)
