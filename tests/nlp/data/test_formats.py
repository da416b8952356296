"""What the readers of all tasks share: the samples, JSON Lines, files that cannot be read."""

import argparse
import json
import os
import re
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.nlp import predict
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.bio import Entity
from hpctrain.nlp.data.conll import Sentence
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.data.squad import Answer, Question
from hpctrain.nlp.models.hub import resolve_data, resolve_model
from hpctrain.nlp.task import SAMPLES
from hpctrain.nlp.tasks import classify, generate, ner, pair, qa
from hpctrain.nlp.tasks.classify import Document
from hpctrain.nlp.tasks.generate import Passage
from hpctrain.nlp.tasks.pair import Pair
from tests.helpers import DATA

TASKS = {module.TASK.name: module.TASK for module in (classify, pair, ner, qa, generate)}
NSMC_HEADER = "id\tdocument\tlabel\n"
KORNLI_HEADER = "sentence1\tsentence2\tgold_label\n"


def find_data(name):
    """A file of the real data."""
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}: HPCTRAIN_TEST_DATA names a folder that has it")
    return DATA / name


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def assert_error(read, path, message, left):
    """Reading raises an error that names `path`; with a list `skipped`, `left` examples are read and the list
    has the error.

    With left=0 no example is valid, or the file as a whole is wrong, and the error is raised in either case.
    """
    with pytest.raises(HpctrainError, match=message) as error:
        read(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    skipped = []
    if left == 0:
        with pytest.raises(HpctrainError, match=message):
            read(path, skipped)
        assert skipped == []
    else:
        assert len(read(path, skipped)) == left
        assert [str(one) for one in skipped] == [str(error.value)]


def strip_id_and_location(example):
    """An example without its id and its location in a file."""
    return replace(example, location="", **({"id": ""} if hasattr(example, "id") else {}))


# --- the samples ---


@pytest.mark.parametrize(
    ("task", "folder", "train", "test"),
    [
        ("classify", "", 240, 60), ("pair", "", 240, 60), ("ner", "", 200, 50), ("qa", "", 210, 38),
        ("generate", "", 150, 30), ("pair", "pair_kornli", 9, 3), ("ner", "ner_lines", 6, 2),
        ("ner", "ner_conll", 6, 2),
    ],
)  # fmt: skip
def test_every_task_and_format_has_sample_data(task, folder, train, test):
    splits = load_splits(TASKS[task], SAMPLES / folder if folder else None)
    assert {name: len(examples) for name, examples in splits.items()} == {"train": train, "test": test}
    contents = [{str(strip_id_and_location(example)) for example in examples} for examples in splits.values()]
    assert folder or not contents[0] & contents[1]


def test_sample_data_include_difficult_cases():
    reviews = {document.text for document in load_splits(classify.TASK, None)["train"]}
    assert {"", "nan"} < reviews and any('"' in review for review in reviews)
    names = [sentence.entities for sentence in load_splits(ner.TASK, None)["test"]]
    assert any(one.end == next_.start for entities in names for one, next_ in pairwise(entities))
    questions = load_splits(qa.TASK, None)
    assert any(answer.start == 0 for question in questions["test"] for answer in question.answers)
    # The longest text does not fit into a window of 384 tokens, even if the tokenizer has a token for each of
    # its words.
    assert max(len(re.findall(r"\w+|[^\w\s]", question.context)) for question in questions["test"]) > 384


@pytest.mark.parametrize("task", ["classify", "pair", "ner", "qa"])
def test_sample_training_data_have_all_labels(task):
    def labels(examples):
        if task == "ner":
            return {entity.type for sentence in examples for entity in sentence.entities}
        return {getattr(example, "label", "") for example in examples}

    splits = load_splits(TASKS[task], None)
    assert labels(splits["test"]) <= labels(splits["train"])


def test_sample_data_are_part_of_the_package():
    pyproject = (SAMPLES.parents[3] / "pyproject.toml").read_text()
    assert '"hpctrain.nlp" = ["samples/**"]' in pyproject


# --- texts, labels, and JSON Lines ---


def test_many_names_are_shortened():
    assert formats.list_names(["b", "a"]) == "b, a"
    assert (
        formats.list_names([str(i) for i in range(30)])
        == ", ".join(str(i) for i in range(20)) + " and 10 more"
    )


def test_language_is_known_by_its_script():
    assert formats.find_language(["한글 text", "더 많은 글자와 글"]) == "ko"
    assert formats.find_language(["some text 한글"]) is formats.find_language(["123"]) is None


def test_white_space_around_a_label_makes_no_further_class(tmp_path):
    reviews = classify.TASK.read(write(tmp_path / "a.txt", NSMC_HEADER + "1\t좋다\t1 \n2\t 좋다 \t1\n"))
    assert [(review.text, review.label) for review in reviews] == [("좋다", "1"), (" 좋다 ", "1")]
    pairs = [{"guid": "b", "premise": "가", "hypothesis": "나", "gold_label": "neutral "}]
    assert pair.TASK.read(write(tmp_path / "a.json", json.dumps(pairs)))[0].label == "neutral"
    assert (
        pair.TASK.read(write(tmp_path / "a.tsv", KORNLI_HEADER + "가\t나\t neutral\n"))[0].label == "neutral"
    )
    assert generate.TASK.read(write(tmp_path / "b.txt", NSMC_HEADER + "1\t좋다\t1 \n"))[0].prompt == "긍정: "


QUESTION = {"question": "무엇?", "context": "가나다 라마"}


@pytest.mark.parametrize(
    ("task", "item", "expected"),
    [
        ("classify", {"text": " 글", "label": "좋다 "}, Document("line 2", " 글", "좋다")),
        ("classify", {"id": 7, "document": "글", "label": 0}, Document("line 2", "글", "0")),
        (
            "pair",
            {"premise": "가", "hypothesis": "나", "gold_label": "neutral"},
            Pair("line 2", "가", "나", "neutral"),
        ),
        ("pair", {"sentence1": "가", "sentence2": "나", "gold_label": 1}, Pair("line 2", "가", "나", "1")),
        (
            "ner",
            {"tokens": ["New", "York", "Anna"], "tags": ["B-LC", "E-LC", "S-PS"]},
            Sentence("line 2", "New York Anna", [Entity(0, 8, "LC"), Entity(9, 13, "PS")], True),
        ),
        (
            "ner",
            {"text": "김서울", "entities": [{"start": 1, "end": 3, "type": "LC", "text": "서울"}]},
            Sentence("line 2", "김서울", [Entity(1, 3, "LC")], False),
        ),
        (
            "qa",
            QUESTION | {"id": "q", "title": "글", "answers": [{"text": "가나다", "answer_start": 0}]},
            Question("q", "글", "가나다 라마", "무엇?", [Answer("가나다", 0)]),
        ),
        (
            "qa",
            QUESTION | {"title": None, "answers": {"text": ["라마"], "answer_start": [4]}},
            Question("line 2", "가나다 라마", "가나다 라마", "무엇?", [Answer("라마", 4)]),
        ),
        (
            "qa",
            QUESTION | {"answers": []},
            Question("line 2", "가나다 라마", "가나다 라마", "무엇?", [Answer("", 0)], True),
        ),
        ("generate", {"text": "글"}, Passage("", "글")),
    ],
)
def test_json_lines_are_read(task, item, expected, tmp_path):
    path = write(tmp_path / "train.jsonl", f"\n{json.dumps(item)}\n\n")
    (found,) = TASKS[task].read(path)
    assert replace(found, location="") == expected and found.location.startswith(f"{path}, ")
    (of_capitals,) = TASKS[task].read(path.rename(tmp_path / "TRAIN.JSONL"))
    assert replace(of_capitals, location="") == expected


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("classify", '{"text": "글"', r"train\.jsonl, line 1: not valid JSON"),
        ("classify", '"글"', "line 1: not a JSON object"),
        ("classify", '{"text": "글"}', "line 1 has no 'label'"),
        ("classify", '{"text": "글", "label": " "}', "line 1: the label is empty"),
        ("pair", '{"premise": "글", "gold_label": "a"}', "line 1 has no 'hypothesis'"),
        ("ner", '{"tokens": ["a"], "tags": ["B"]}', "line 1: expected a tag"),
        ("ner", '{"tokens": ["a b"], "tags": ["O"]}', "line 1: a token"),
        ("ner", '{"text": "가", "entities": [{"start": 0, "end": 2, "type": "LC"}]}', "line 1: an entity"),
        ("ner", "{}", "line 1 has no 'text'"),
        ("qa", '{"question": "?", "answers": []}', "line 1 has no 'context'"),
        ("generate", '{"document": "글"}', "line 1 has no 'text'"),
    ],
)
def test_error_in_json_lines_names_the_line(task, line, message, tmp_path):
    assert_error(TASKS[task].read, write(tmp_path / "train.jsonl", line + "\n"), message, left=0)


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".parquet", ".arrow"])
def test_devices_and_pipes_of_a_data_set_are_not_read(tmp_path, suffix):
    """An archive can have links to devices that never end."""
    signal.alarm(60)
    (tmp_path / f"train{suffix}").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / f"test{suffix}")
    for name in ("train", "test"):
        with pytest.raises(HpctrainError, match=rf"{name}{suffix}: .*not a plain file"):
            classify.TASK.read(
                tmp_path / f"{name}{suffix}", None, suffix != ".txt" and {"text": "text", "label": "label"}
            )
    signal.alarm(0)


def test_a_file_that_is_larger_than_the_memory_is_one_line(tmp_path):
    (tmp_path / "train.jsonl").touch()
    os.truncate(tmp_path / "train.jsonl", 2**43)  # a hole, which takes no place on the disk
    with pytest.raises(HpctrainError, match=r"train\.jsonl: larger than the memory"):
        classify.TASK.read(tmp_path / "train.jsonl", None, None)


def test_a_path_or_a_text_that_cannot_be_read_is_one_clear_line(tmp_path):
    """A pipe, a path that looks like a name on the hub, and UTF-16, with and without a byte order mark."""
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "pipe: a pipe or a device"),
        (Path("reviews/train.tsv"), r"reviews/train.tsv: cannot be read \(No such file or directory\)"),
        (Path("klue/nli.json"), "klue/nli.json: cannot be read"),
    ):
        with pytest.raises(HpctrainError, match=message):
            resolve_data(path, ALONE)
    (tmp_path / "file").touch()
    for name in ("models/config.json", "kcbert/model.safetensors"):
        with pytest.raises(HpctrainError, match=f"{name}: neither a folder nor a model name"):
            resolve_model(name, ALONE)
    for encoding in ("utf-16", "utf-16-le"):
        (tmp_path / "texts.txt").write_bytes("good\n".encode(encoding))
        with pytest.raises(HpctrainError, match=r"texts\.txt: UTF-16, not UTF-8: convert the file"):
            list(predict.read_rows(argparse.Namespace(file=tmp_path / "texts.txt"), classify.TASK))
