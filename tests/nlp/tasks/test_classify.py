"""Reading texts and their classes."""

import pytest

from hpctrain.nlp.tasks.classify import TASK, Document
from tests.nlp.data.test_formats import NSMC_HEADER, assert_error, find_data, write


def test_empty_documents_nan_quotes_and_unicode_separators_are_text(tmp_path):
    text = '1\t\t1\n2\tnan\t0\n3\t"열린 따옴표\t0\n4\ta\u2028b\x0bc\t1\r\n5\t 끝 \t1'
    path = write(tmp_path / "ratings_train.txt", "\ufeff" + NSMC_HEADER.replace("\n", "\r\n") + text)
    assert TASK.read(path) == [
        Document("1", "", "1", location=f"{path}, line 2"),
        Document("2", "nan", "0", location=f"{path}, line 3"),
        Document("3", '"열린 따옴표', "0", location=f"{path}, line 4"),
        Document("4", "a\u2028b\x0bc", "1", location=f"{path}, line 5"),
        Document("5", " 끝 ", "1", location=f"{path}, line 6"),
    ]


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (NSMC_HEADER + "1\t좋다\t1\n2\t탭이\t있다\t0\n", r"ratings\.txt, line 3: 4 fields", 1),
        (NSMC_HEADER + "1\t좋다\t1\n\n2\t좋다\t0\n", "line 3: 1 fields", 2),
        (NSMC_HEADER + "1\t좋다\t\n2\t좋다\t1\n", "line 2: the label is empty", 1),
        (NSMC_HEADER + "1\t좋다\t\n", "line 2: the label is empty", 0),
        ("id\tlabel\tdocument\n1\t1\t좋다\n", "line 1: .*id, document, label", 0),
        ("id\tdocument\n1\t좋다\n", "line 1: .*id, document, label", 0),
        (NSMC_HEADER, "the file has no examples", 0),
        ("", "the file is empty", 0),
    ],
)
def test_error_in_a_tsv_names_the_line(tmp_path, content, message, left):
    assert_error(TASK.read, write(tmp_path / "ratings.txt", content), message, left)


def test_label_may_be_true_or_false(tmp_path):
    """It is named as pandas writes it into a csv."""
    lines = '{"text": "a", "label": true}\n{"text": "b", "label": false}\n'
    assert [document.label for document in TASK.read(write(tmp_path / "a.jsonl", lines))] == ["True", "False"]


@pytest.mark.slow
def test_all_reviews_of_nsmc_are_read():
    train, test = (TASK.read(find_data(f"nsmc/ratings_{part}.txt"), []) for part in ("train", "test"))
    assert (len(train), len(test)) == (150_000, 50_000)
    assert (sum(not d.text for d in train), sum(not d.text for d in test)) == (5, 3)
    assert sum(d.label == "1" for d in train) == 74_827


@pytest.mark.parametrize(
    ("name", "label", "known"),
    [("ratings_test.txt", "1", True), ("reviews.tsv", "1", False), ("ratings_test.txt", "2", False)],
)
def test_0_and_1_have_a_meaning_in_nsmc_alone(name, label, known):
    example = Document("1", "text", label, location=f"nsmc/{name}, line 2")
    assert ("1" in TASK.explain_labels([example])) == known
