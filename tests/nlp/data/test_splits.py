"""The files of each split of a data set, and the division of a single file."""

import re

import pytest

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.splits import describe_files, find_split_files, load_splits, split_examples
from hpctrain.nlp.data.squad import Answer, Question
from hpctrain.nlp.tasks import classify, pair, qa
from hpctrain.nlp.tasks.classify import Document
from tests.nlp.data.test_formats import NSMC_HEADER, write


def test_split_files_are_found_by_their_published_names(tmp_path):
    def found(*names):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in (*names, "README.md", "train.zip"):
            (folder / name).touch()
        return {split: [path.name for path in paths] for split, paths in find_split_files(folder).items()}

    assert found("ratings.txt", "ratings_train.txt", "ratings_test.txt") == {
        "train": ["ratings_train.txt"],
        "test": ["ratings_test.txt"],
    }
    assert found("klue-ner-v1.1_train.tsv", "klue-ner-v1.1_dev.tsv") == {
        "train": ["klue-ner-v1.1_train.tsv"],
        "test": ["klue-ner-v1.1_dev.tsv"],
    }
    assert found("multinli.train.ko.tsv", "snli_1.0_train.ko.tsv", "xnli.dev.ko.tsv", "xnli.test.ko.tsv") == {
        "train": ["multinli.train.ko.tsv", "snli_1.0_train.ko.tsv"],
        "validation": ["xnli.dev.ko.tsv"],
        "test": ["xnli.test.ko.tsv"],
    }
    for word in ("dev", "val", "valid", "validation"):
        names = [f"{word}.txt", "a_test.txt", "a_train.txt"]
        assert found(*names) == {"validation": names[:1], "test": names[1:2], "train": names[2:]}
    assert found("eng.testa", "eng.testb", "eng.train") == {
        "train": ["eng.train"],
        "validation": ["eng.testa"],
        "test": ["eng.testb"],
    }
    assert found("eng.valid", "eng.train", "eng.test") == {
        "train": ["eng.train"],
        "validation": ["eng.valid"],
        "test": ["eng.test"],
    }
    assert found("train.txt", "valid.txt") == {"train": ["train.txt"], "test": ["valid.txt"]}  # KMOU
    assert found("TRAIN.TXT", "Valid.Json") == {"train": ["TRAIN.TXT"], "test": ["Valid.Json"]}


def test_data_set_in_two_formats_is_not_read_twice(tmp_path):
    """As SNLI, with .jsonl and .txt, and Multilingual Sentiments, with .csv and .tsv."""
    for name in ("a_train.csv", "a_train.tsv", "a_test.csv", "a_test.tsv"):
        (tmp_path / name).touch()
    message = r"a_test\.csv and a_test\.tsv"
    with pytest.raises(HpctrainError, match=message):
        find_split_files(tmp_path, tables=True)
    assert find_split_files(tmp_path)["train"] == [tmp_path / "a_train.tsv"]


def test_files_that_are_not_used_are_named(tmp_path):
    for name in ("ratings_train.txt", "ratings_test.txt", "ratings.txt", "README.md"):
        (tmp_path / name).touch()
    assert list(describe_files(tmp_path)) == [
        f"{tmp_path}: not used: README.md, ratings.txt (a data file has one of the words "
        "train, training, validation, valid, val, dev, testa, test, testb in its name)"
    ]
    (tmp_path / "ratings.txt").unlink()
    (tmp_path / "README.md").unlink()
    for path in (tmp_path, tmp_path / "ratings_test.txt", None):
        assert not list(describe_files(path))


def test_a_second_download_of_a_file_is_named(tmp_path):
    for name in ("ratings_train.txt", "ratings_train (1).txt", "ratings_test.txt"):
        (tmp_path / name).touch()
    names = "ratings_train (1).txt, ratings_train.txt"
    assert list(describe_files(tmp_path)) == [f"{tmp_path}: 2 files for train: {names}"]


def test_missing_split_is_an_error_that_lists_the_files(tmp_path):
    (tmp_path / "klue-nli-v1.1_dev.json").touch()
    with pytest.raises(HpctrainError, match=r"no train file, .*\(found klue-nli-v1.1_dev.json\)"):
        load_splits(pair.TASK, tmp_path)
    (tmp_path / "klue-nli-v1.1_dev.json").rename(tmp_path / "klue-nli-v1.1_train.json")
    (tmp_path / "klue-nli-v1.1_eval.json").touch()
    with pytest.raises(HpctrainError, match=r"no test file, .*_eval\.json"):
        load_splits(pair.TASK, tmp_path)
    with pytest.raises(HpctrainError, match="cannot be read"):
        load_splits(pair.TASK, tmp_path / "missing")


def test_skipped_examples_of_all_files_are_counted_and_described(tmp_path):
    write(tmp_path / "ratings_train.txt", NSMC_HEADER + "1\t좋다\t1\n2\t나쁘다\n3\t좋다\t\n")
    write(tmp_path / "ratings_test.txt", NSMC_HEADER + "1\t좋다\t1\n2\n")
    skipped = []
    splits = load_splits(classify.TASK, tmp_path, skipped)
    assert {name: [d.id for d in documents] for name, documents in splits.items()} == {
        "train": ["1"],
        "test": ["1"],
    }
    assert formats.describe_skipped(skipped) == (
        f"skipped 3 examples (an error with --strict); the first: {tmp_path}/ratings_train.txt, line 3: "
        "2 fields, but the header has 3 (id, document, label): fix the line, or download the file again"
    )
    with pytest.raises(HpctrainError, match=re.escape(str(skipped[0]))):
        load_splits(classify.TASK, tmp_path)

    skipped = []
    assert len(load_splits(classify.TASK, tmp_path / "ratings_test.txt", skipped)["train"]) == 1
    assert formats.describe_skipped(skipped).startswith("skipped 1 example (")
    skipped = []
    load_splits(classify.TASK, None, skipped)
    assert formats.describe_skipped(skipped) == ""


def test_split_depends_on_the_seed_alone_and_loses_nothing():
    examples = [Document(str(i), "", "0") for i in range(100)]
    train, validation = split_examples(classify.TASK, examples, 0.1, seed=1)
    assert len(validation) == 10 and sorted(train + validation, key=lambda d: int(d.id)) == examples
    assert (train, validation) == split_examples(classify.TASK, examples, 0.1, seed=1)
    assert validation != split_examples(classify.TASK, examples, 0.1, seed=2)[1]


def test_questions_are_split_by_article():
    questions = [
        Question(f"{a}-{i}", f"글 {a}", f"문단 {a}", "?", [Answer("문", 0)])
        for i in range(3)
        for a in range(10)
    ]
    train, validation = split_examples(qa.TASK, questions, 0.25, seed=0)
    assert not {q.title for q in train} & {q.title for q in validation}
    assert len(train) == 21 and len(validation) == 9


@pytest.mark.parametrize(
    ("share", "titles", "message"),
    [
        (0.0, "ab", "is not between 0 and 1"),
        (1.0, "ab", "is not between 0 and 1"),
        (0.5, "aa", "--data has 2 examples of 1 articles"),
        (0.5, "a", "--data has 1 example,"),
        (0.1, "ab", "--validation-split 0.1 of 2 examples"),
    ],
)
def test_split_with_an_empty_part_is_refused(share, titles, message):
    questions = [Question(str(i), title, "", "?", []) for i, title in enumerate(titles)]
    with pytest.raises(UsageError, match=message):
        split_examples(qa.TASK, questions, share, seed=0)
