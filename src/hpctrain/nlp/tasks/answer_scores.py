"""Exact match and F1 of answers, in [0, 1], as the evaluation scripts of KorQuAD and of SQuAD define them.

KorQuAD compares characters, because Korean particles are attached to words: evaluate-v1.0.py of
https://korquad.github.io/KorQuad%201.0/. SQuAD compares words: evaluate-v2.0.py of
https://rajpurkar.github.io/SQuAD-explorer/, which agrees with SQuAD's script for version 1.1 unless an answer
consists of articles and punctuation alone.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hpctrain.nlp.data.formats import are_most_letters

# Characters that KorQuAD's evaluation script replaces by a space; it deletes the rest of string.punctuation.
SPACES = str.maketrans(dict.fromkeys("'\"《》<>〈〉()‘’", " "))  # noqa: RUF001 - as in that script
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))


def normalize_korquad(text: str) -> str:
    """An answer as KorQuAD compares it: lower case, without ASCII punctuation.

    Quotes and brackets become spaces. Consecutive spaces become one. Unlike in SQuAD, articles are kept.
    """
    return " ".join(text.translate(SPACES).lower().translate(PUNCTUATION).split())


def normalize_squad(text: str) -> str:
    """An answer as SQuAD compares it: lower case, without ASCII punctuation and a, an, the; single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def compute_f1(predicted: Sequence[str], correct: Sequence[str]) -> float:
    """F1 of two multisets of characters or words. If one is empty, the other must be empty too."""
    if not predicted or not correct:
        return float(predicted == correct)
    same = (Counter(predicted) & Counter(correct)).total()
    return 2 * same / (len(predicted) + len(correct))


def score_korquad(predicted: str, correct: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of the characters of an answer without spaces: the best over the correct answers."""
    return _score(normalize_korquad, lambda text: list(text.replace(" ", "")), predicted, correct)


def score_squad(predicted: str, correct: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of the words of an answer: the best over the correct answers.

    Correct answers of articles and punctuation alone do not count, unless all are.
    """
    return _score(
        normalize_squad, str.split, predicted, [text for text in correct if normalize_squad(text)] or [""]
    )


def _score(
    normalize: Callable[[str], str], split: Callable[[str], list[str]], predicted: str, correct: Sequence[str]
) -> tuple[float, float]:
    answer, *rest = map(normalize, [predicted, *correct])
    exact = max(float(answer == right) for right in rest)
    return exact, max(compute_f1(split(answer), split(right)) for right in rest)


def is_latin(texts: Iterable[str]) -> bool:
    """Whether most letters of the texts are Latin, which Unicode has below U+0250."""
    return are_most_letters(texts, lambda letter: letter < "\u0250")
