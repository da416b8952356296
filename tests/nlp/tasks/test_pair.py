"""Reading pairs of sentences and their classes."""

import json
from dataclasses import replace

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.nlp.tasks.pair import TASK, Pair
from tests.nlp.data.test_formats import KORNLI_HEADER, assert_error, find_data, write

KLUE_PAIR = '{"guid": "b", "premise": "가", "hypothesis": "나", "gold_label": "neutral"}'


def test_json_and_tsv_give_the_same_pairs(tmp_path):
    items = [
        {"guid": "a", "premise": '"곧 온다', "hypothesis": "온다.", "gold_label": "entailment", "source": "x"}
    ]
    from_json = TASK.read(write(tmp_path / "a.json", json.dumps(items)))
    from_tsv = TASK.read(write(tmp_path / "a.tsv", KORNLI_HEADER + '"곧 온다\t온다.\tentailment\n'))
    assert from_json == [Pair("a", '"곧 온다', "온다.", "entailment", location=f"{tmp_path}/a.json, a")]
    assert from_tsv == [replace(from_json[0], id="line 2", location=f"{tmp_path}/a.tsv, line 2")]


def test_pair_without_agreement_is_skipped_whatever_the_format(tmp_path):
    """The label - of SNLI is no class."""
    lines = "".join(
        json.dumps({"sentence1": "a", "sentence2": "b", "gold_label": label}) + "\n"
        for label in ("-", "neutral")
    )
    path = write(tmp_path / "snli_1.0_dev.jsonl", lines)
    for columns in (None, {"first": "sentence1", "second": "sentence2", "label": "gold_label"}):
        assert [example.label for example in TASK.read(path, [], columns)] == ["neutral"]


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (KORNLI_HEADER + "가\t나\tneutral\n가\t나\n", r"data\.tsv, line 3: 2 fields", 1),
        (KORNLI_HEADER + "가\t나\t\n가\t나\tneutral\n", "line 2: the gold_label is empty", 1),
        (KORNLI_HEADER + "가\t나\t-\n가\t나\tneutral\n", "line 2: the gold_label is -", 1),
        ('[\n{"guid": "a",\n}]', "line 3: not valid JSON", 0),
        (
            '[{"guid": "a", "premise": "가", "gold_label": "neutral"}, ' + KLUE_PAIR + "]",
            r", a has no 'hypothesis'",
            1,
        ),
        ('[{"premise": "가", "hypothesis": "나"}, ' + KLUE_PAIR + "]", r", \[0\] has no 'gold_label'", 1),
        ("[" + KLUE_PAIR.replace("neutral", "") + "," + KLUE_PAIR + "]", ", b: the gold_label is empty", 1),
        ('[{"guid": "a"}, {"guid": "b"}]', ", a has no 'premise'", 0),
        ('{"data": []}', "the file has no examples", 0),
        ("가\t나\n", "line 1: .*sentence1", 0),
        (KORNLI_HEADER, "the file has no examples", 0),
    ],
)
def test_error_in_pairs_names_guid_or_line(tmp_path, content, message, left):
    assert_error(TASK.read, write(tmp_path / "data.tsv", content), message, left)


def test_all_pairs_of_klue_are_read():
    pairs = TASK.read(find_data("klue/klue-nli-v1.1/klue-nli-v1.1_dev.json"))
    assert len(pairs) == 3000
    assert {
        label: sum(p.label == label for p in pairs) for label in {p.label for p in pairs}
    } == dict.fromkeys(("entailment", "neutral", "contradiction"), 1000)


def test_the_names_of_glue_are_read_and_others_get_the_option(tmp_path):
    item = {"sentence1": "가", "sentence2": "나", "label": 1}
    assert TASK.read(write(tmp_path / "glue.jsonl", json.dumps(item)))[0].label == "1"
    other = write(tmp_path / "qqp.jsonl", json.dumps({"question1": "가", "question2": "나", "label": 1}))
    with pytest.raises(HpctrainError, match="--columns first=COLUMN second=COLUMN label=COLUMN"):
        TASK.read(other)
