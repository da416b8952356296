"""The scores of the tasks, over random answers: those of scikit-learn, scipy, seqeval and SQuAD's script."""

import string
import warnings
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import classification_report
from seqeval.scheme import IOB2
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support

from hpctrain.nlp.data.bio import from_bio, split_units
from hpctrain.nlp.data.conll import Sentence
from hpctrain.nlp.data.squad import Answer, Question
from hpctrain.nlp.tasks import classify, ner, pair, qa
from tests.helpers import examples

CLASS = st.sampled_from("abcd")
SOME = st.sets(CLASS).map(lambda labels: tuple(sorted(labels)))
TAG = st.sampled_from(["O", "B-LC", "I-LC", "B-PS", "I-PS"])
NUMBER = st.floats(-9, 9).map(lambda number: round(number, 2))
WORD = st.sampled_from(["the", "A", "an", "old", "Old", "old,", "town", "town's", "(hall)", "-", "1,000"])
TEXT = st.lists(WORD, max_size=5).map(" ".join)


def pairs(of):
    """A right and a given answer of each of some examples, as two columns."""
    return st.lists(st.tuples(of, of), min_size=1, max_size=12).map(lambda rows: [*zip(*rows, strict=True)])


def label(task, labels):
    """Examples of a task that have these labels."""
    return [replace(task.make_example(["a", "b"][: len(task.inputs)]), label=each) for each in labels]


@given(pairs(CLASS))
@examples(50)
def test_classes_as_in_scikit_learn(columns):
    """The macro averages are over the classes of the examples, and over no class that is only answered."""
    gold, given_ = columns
    found = classify.TASK.score(label(classify.TASK, gold), [{"label": each} for each in given_])
    macro = precision_recall_fscore_support(
        gold, given_, labels=sorted({*gold}), average="macro", zero_division=0
    )
    expected = dict(zip(("precision", "recall", "f1"), macro[:3], strict=True))
    assert found == pytest.approx({"accuracy": accuracy_score(gold, given_), **expected}, abs=1e-12)


@given(pairs(SOME))
@examples(50)
def test_several_classes_as_in_scikit_learn(columns):
    task = classify.TASK.for_problem("multi-label")
    found = task.score(label(task, columns[0]), [{"labels": [*each]} for each in columns[1]])
    known = sorted(set().union(*columns[0]))
    rows = [numpy.array([[name in labels for name in "abcd"] for labels in column]) for column in columns]
    assert found["f1_micro"] == pytest.approx(f1_score(*rows, average="micro", zero_division=0), abs=1e-12)
    macro = f1_score(*rows, labels=["abcd".index(name) for name in known], average="macro", zero_division=0)
    assert found["f1_macro"] == pytest.approx(macro if known else 0, abs=1e-12)
    assert found["exact_match"] == pytest.approx(accuracy_score(*rows), abs=1e-12)


@given(pairs(NUMBER))
@examples(50)
def test_correlations_as_in_scipy(columns):
    task = pair.TASK.for_problem("regression")
    found = task.score(label(task, columns[0]), [{"score": each} for each in columns[1]])
    if any(len({*column}) == 1 for column in columns):
        assert found == {"pearson": 0, "spearman": 0}
    else:
        expected = {"pearson": pearsonr(*columns).statistic, "spearman": spearmanr(*columns).statistic}
        assert found == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.lists(TAG, min_size=n, max_size=n)] * 2)),
                min_size=1, max_size=6))  # fmt: skip
@examples(40)
def test_entities_as_in_seqeval(sentences):
    examples_, answers = [], []
    for gold, given_ in sentences:
        text = " ".join("a" for _ in gold)
        units = split_units(text, True)
        examples_.append(Sentence("", text, from_bio(units, gold, strict=True), True))
        answers.append({"entities": [each._asdict() for each in from_bio(units, given_, strict=True)]})
    found = ner.TASK.score(examples_, answers)
    with warnings.catch_warnings(action="ignore"):
        report = classification_report(
            *map(list, zip(*sentences, strict=True)),
            mode="strict", scheme=IOB2, output_dict=True, zero_division=0,
        )  # fmt: skip
    of_types = {name: row["f1-score"] for name, row in report.items() if row["support"] and len(name) == 2}
    micro = report["micro avg"]
    expected = {name: micro[name] for name in ("precision", "recall")} | {"f1": micro["f1-score"]}
    expected |= {f"f1/{name}": value for name, value in of_types.items()}
    assert found == pytest.approx(expected, abs=1e-12)


def split_as_squad(text):
    """The words that count, as SQuAD's script explains them."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def score_as_squad(text, right):
    """Exact match and F1, from precision and recall: each word finds one of its kind."""
    answer, left = split_as_squad(text), split_as_squad(right)
    expected, same = len(left), 0
    if not (answer and left):
        return 2 * [float(answer == left)]
    for word in answer:
        if word in left:
            left.remove(word)
            same += 1
    precision, recall = same / len(answer), same / expected
    f1 = 2 * precision * recall / (precision + recall) if same else 0
    return [float(answer == split_as_squad(right)), f1]


@given(st.lists(st.tuples(TEXT, st.lists(TEXT.filter(split_as_squad), max_size=3)), min_size=1, max_size=4))
@examples(50)
def test_answers_as_by_the_script_of_squad(rows):
    """Of 2.0: a question may have no answer, and of several right ones the best counts."""
    questions = [Question("", "the old town", "", "", [Answer(each, 0) for each in rights or [""]], True)
                 for _, rights in rows]  # fmt: skip
    found = qa.TASK.score(questions, [{"answer": text} for text, _ in rows])
    best = [
        [max(column) for column in zip(*(score_as_squad(text, each) for each in rights or [""]), strict=True)]
        for text, rights in rows
    ]
    exact, f1 = (sum(column) / len(rows) for column in zip(*best, strict=True))
    assert found["f1_word"] == pytest.approx(f1, abs=1e-12)
    if any(rights for _, rights in rows):
        assert found["exact_match"] == pytest.approx(exact, abs=1e-12)
