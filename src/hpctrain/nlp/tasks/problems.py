"""Labels for --problem: several classes of a text (multi-label), or a number (regression).

LabelTask.for_problem() combines a class of this module with a task, whose methods for one class it replaces.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy
from numpy import ndarray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from hpctrain.errors import HpctrainError
from hpctrain.nlp.batches.features import Features
from hpctrain.nlp.batches.text_batch import TextBatch
from hpctrain.nlp.data import formats
from hpctrain.nlp.task import Logits


class MultiLabel:
    """Any number of classes for a text. The loss is the mean binary cross entropy over all classes."""

    problem, problem_type = "multi-label", "multi_label_classification"
    one_label = False
    selection_metric = "f1_micro"

    def get_label(self, location: str, item: object, key: str, expected: str) -> tuple[str, ...]:
        """The classes of `item[key]`: a list, or a text with commas between them. It may be empty."""
        value = item.get(key) if isinstance(item, dict) else None
        if value is None:
            raise formats.UnlabeledError(f"{location} has no {key!r}: expected {expected}")
        # Two other ways to write classes are refused: [0, 1, 1] would be read as the classes 0 and 1, and the
        # text "['a', 'b']" as the classes ['a' and 'b'].
        if isinstance(value, list) and all(
            type(each) in (int, float, bool) and each in (0, 1) for each in value
        ):
            if len(value) > len(set(value)) or any(type(each) is float for each in value):
                raise HpctrainError(
                    f"{location}: the {key} has a 0 or 1 for each class: give a list of its classes"
                )
        elif isinstance(value, str) and re.fullmatch(r"\[\s*(['\"\d].*)?\]", value.strip(), re.DOTALL):
            raise HpctrainError(
                f"{location}: the {key} is the text of a list: "
                "write the classes with commas between them (a,b)"
            )
        if not isinstance(value, list):
            value = (
                [part for part in str(value).split(",") if part.strip()]
                if type(value) in (str, int)
                else None
            )
        if value is None:
            raise HpctrainError(
                f"{location} has no {key!r} of type list, or text with commas: expected {expected}"
            )
        return tuple(sorted({formats.get_label(location, {key: each}, key, expected) for each in value}))

    def collect_labels(self, examples: Sequence[Any]) -> list[str]:
        """The classes in alphabetical order."""
        return sorted({label for example in examples for label in example.label})

    def make_targets(self, examples: Sequence[Any], labels: list[str]) -> dict[str, ndarray]:
        """Labels [n, classes], 1 for the classes of an example."""
        targets = numpy.array(
            [[label in example.label for label in labels] for example in examples], numpy.float32
        )
        return {"labels": targets, "units": numpy.ones(len(examples), numpy.int64)}

    def compute_loss(self, output: Logits, batch: TextBatch) -> Tensor:
        """The mean binary cross entropy, computed in fp32 with --precision bf16 as well."""
        return binary_cross_entropy_with_logits(output.logits.float(), batch.values["labels"])

    def predict(self, output: Logits, batch: TextBatch) -> Tensor:
        """The probability of each class, [b, classes]."""
        return output.logits.float().sigmoid()

    def make_answers(
        self, examples: Sequence[Any], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        """The classes with a probability of at least one half, and these probabilities, in falling order."""
        answers = []
        for p in predictions:
            chosen = [i for i in numpy.argsort(-p, kind="stable").tolist() if p[i] >= 0.5]
            answers.append(
                {
                    "labels": [labels[i] for i in chosen],
                    "probabilities": [round(float(p[i]), 6) for i in chosen],
                }
            )
        return answers

    def score(self, examples: Sequence[Any], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """F1 over all pairs of a text and a class (micro), and the mean F1 of the classes (macro).

        For the classes that examples have. `exact_match`: the fraction of answers with all classes right.
        """
        gold, predicted = (
            [{*example.label} for example in examples],
            [{*answer["labels"]} for answer in answers],
        )
        found = {}
        for label in sorted(set().union(*gold, *predicted)):
            pairs = [(label in right, label in answer) for right, answer in zip(gold, predicted, strict=True)]
            found[label] = [pairs.count(kind) for kind in ((True, True), (False, True), (True, False))]
        micro = compute_f1(*(sum(counts) for counts in zip(*found.values(), strict=True))) if found else 0.0
        of_gold = [compute_f1(*found[label]) for label in sorted(set().union(*gold))]
        same = sum(right == answer for right, answer in zip(gold, predicted, strict=True))
        return {
            "f1_micro": micro,
            "f1_macro": math.fsum(of_gold) / max(1, len(of_gold)),
            "exact_match": same / len(examples),
        }


class Regression:
    """A number for a text, such as the similarity of two sentences. The loss is the mean squared error."""

    problem, problem_type = "regression", "regression"
    one_label = False
    selection_metric = "pearson"

    def get_label(self, location: str, item: object, key: str, expected: str) -> float:
        """The finite number of `item[key]`, which may be a text."""
        value = item.get(key) if isinstance(item, dict) else None
        number = math.nan
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                number = float(value)
        if not math.isfinite(number):
            shown = formats.excerpt(repr(value))
            kind = formats.UnlabeledError if value in (None, "") else HpctrainError
            raise kind(f"{location}: the {key} is {shown}, not a number: fix it, or remove the example")
        return number

    def collect_labels(self, examples: Sequence[Any]) -> list[str]:
        """The name of the only output of the model."""
        return ["score"]

    def list_classes(self, labels: list[str]) -> list[str]:
        """None: an answer is a number."""
        return []

    def make_targets(self, examples: Sequence[Any], labels: list[str]) -> dict[str, ndarray]:
        """Labels [n], NaN where the number is unknown."""
        targets = numpy.array(
            [example.label if isinstance(example.label, float) else math.nan for example in examples]
        )
        return {"labels": targets, "units": numpy.isfinite(targets)}

    def compute_loss(self, output: Logits, batch: TextBatch) -> Tensor:
        """The mean squared error, computed in fp32 with --precision bf16 as well."""
        return mse_loss(output.logits.float()[:, 0], batch.values["labels"])

    def predict(self, output: Logits, batch: TextBatch) -> Tensor:
        """The number, [b]."""
        return output.logits.float()[:, 0]

    def make_answers(
        self, examples: Sequence[Any], features: Features, predictions: Sequence[Any], labels: list[str]
    ) -> list[dict[str, Any]]:
        return [{"score": round(float(p), 6)} for p in predictions]

    def score(self, examples: Sequence[Any], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The correlations of the answers with the right numbers, of values (Pearson) and ranks (Spearman).

        0 if all answers or all right numbers are the same: then there is no correlation.
        """
        columns = [
            numpy.array([example.label for example in examples]),
            numpy.array([answer["score"] for answer in answers]),
        ]
        return {"pearson": correlate(*columns), "spearman": correlate(*map(rank, columns))}


def compute_f1(right: int, wrong: int, missed: int) -> float:
    """F1 of a class from its right answers, its wrong answers, and how often it was not answered."""
    return 2 * right / (2 * right + wrong + missed) if right else 0.0


def rank(column: ndarray) -> ndarray:
    """The ranks of numbers, [n], from 1; equal numbers get the mean of their ranks."""
    _, place, counts = numpy.unique(column, return_inverse=True, return_counts=True)
    return (numpy.cumsum(counts) - (counts - 1) / 2)[place]


def correlate(first: ndarray, second: ndarray) -> float:
    """Pearson's correlation of two columns of numbers, [n]; 0 if one of them is constant."""
    if numpy.ptp(first) == 0 or numpy.ptp(second) == 0:
        return 0.0
    return float(numpy.corrcoef(first.astype(float), second.astype(float))[0, 1])
