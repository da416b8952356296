"""Reading published data sets, valid and invalid; splitting them; batches of similar length and their distribution to ranks."""

import argparse
import gzip
import json
import os
import re
import signal
from itertools import pairwise, product
from pathlib import Path

import numpy
import pytest
from seqeval.metrics import f1_score
from seqeval.scheme import IOB2, Entities

from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.data import formats
from hpctrain.nlp.models.hub import resolve_data, resolve_model
from hpctrain.nlp.task import SAMPLES
from hpctrain.nlp.tasks import classify, generate, ner, pair, qa
from hpctrain.nlp.tasks.bio import Entity, from_bio, split_units, to_bio
from hpctrain.nlp.tasks.classify import Document
from hpctrain.nlp.tasks.generate import Passage
from hpctrain.nlp.tasks.ner import Sentence
from hpctrain.nlp.tasks.pair import Pair
from hpctrain.nlp.tasks.squad import Answer, Question
from hpctrain.nlp.use import predict
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


def item(**answer):
    return {"id": "q1", "question": "무엇?", "answers": [{"text": "가나다", "answer_start": 0, **answer}]}


def squad(context="가나다 라마", **answer):
    return {
        "version": "1",
        "data": [{"title": "글", "paragraphs": [{"context": context, "qas": [item(**answer)]}]}],
    }


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


def pass_through_bio(sentence):
    units = split_units(sentence.text, sentence.by_token)
    return from_bio(units, to_bio(units, sentence.entities))


def strip_id_and_location(example):
    """An example without its id and its location in a file."""
    return example._replace(location="", **({"id": ""} if "id" in example._fields else {}))


# --- the samples ---


@pytest.mark.parametrize(
    ("task", "train", "test"),
    [("classify", 240, 60), ("pair", 240, 60), ("ner", 200, 50), ("qa", 210, 38), ("generate", 150, 30)],
)
def test_every_task_has_sample_data(task, train, test):
    splits = formats.load_splits(TASKS[task], None)
    assert {name: len(examples) for name, examples in splits.items()} == {"train": train, "test": test}
    contents = {
        name: {str(strip_id_and_location(example)) for example in examples}
        for name, examples in splits.items()
    }
    assert not contents["train"] & contents["test"]


def test_sample_data_include_difficult_cases():
    reviews = {document.text for document in formats.load_splits(classify.TASK, None)["train"]}
    assert {"", "nan"} < reviews and any('"' in review for review in reviews)
    names = [sentence.entities for sentence in formats.load_splits(ner.TASK, None)["test"]]
    assert any(one.end == next_.start for entities in names for one, next_ in pairwise(entities))
    questions = formats.load_splits(qa.TASK, None)
    assert any(answer.start == 0 for question in questions["test"] for answer in question.answers)
    # The longest text does not fit into a window of 384 tokens, even if the tokenizer has a token for each of
    # its words.
    assert max(len(re.findall(r"\w+|[^\w\s]", question.context)) for question in questions["test"]) > 384


@pytest.mark.parametrize(
    ("task", "folder", "train", "test"),
    [("pair", "pair_kornli", 9, 3), ("ner", "ner_lines", 6, 2), ("ner", "ner_conll", 6, 2)],
)
def test_other_formats_have_sample_data(task, folder, train, test):
    splits = formats.load_splits(TASKS[task], SAMPLES / folder)
    assert {name: len(examples) for name, examples in splits.items()} == {"train": train, "test": test}


@pytest.mark.parametrize("task", ["classify", "pair", "ner", "qa"])
def test_sample_training_data_have_all_labels(task):
    def labels(examples):
        if task == "ner":
            return {entity.type for sentence in examples for entity in sentence.entities}
        return {getattr(example, "label", "") for example in examples}

    splits = formats.load_splits(TASKS[task], None)
    assert labels(splits["test"]) <= labels(splits["train"])


def test_sample_data_are_part_of_the_package():
    pyproject = (SAMPLES.parents[3] / "pyproject.toml").read_text()
    assert '"hpctrain.nlp" = ["samples/**"]' in pyproject


# --- classification and pairs ---


def test_empty_documents_nan_quotes_and_unicode_separators_are_text(tmp_path):
    text = '1\t\t1\n2\tnan\t0\n3\t"열린 따옴표\t0\n4\ta\u2028b\x0bc\t1\r\n5\t 끝 \t1'
    path = write(tmp_path / "ratings_train.txt", "\ufeff" + NSMC_HEADER.replace("\n", "\r\n") + text)
    assert classify.TASK.read(path) == [
        Document("1", "", "1", f"{path}, line 2"),
        Document("2", "nan", "0", f"{path}, line 3"),
        Document("3", '"열린 따옴표', "0", f"{path}, line 4"),
        Document("4", "a\u2028b\x0bc", "1", f"{path}, line 5"),
        Document("5", " 끝 ", "1", f"{path}, line 6"),
    ]


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (
            NSMC_HEADER + "1\t좋다\t1\n2\t탭이\t있다\t0\n",
            r"ratings\.txt, line 3: 4 fields, but the header has 3",
            1,
        ),
        (NSMC_HEADER + "1\t좋다\t1\n\n2\t좋다\t0\n", "line 3: 1 fields", 2),
        (NSMC_HEADER + "1\t좋다\t\n2\t좋다\t1\n", "line 2: the label is empty", 1),
        (NSMC_HEADER + "1\t좋다\t\n", "line 2: the label is empty", 0),
        ("id\tlabel\tdocument\n1\t1\t좋다\n", "line 1: expected the column names id, document, label", 0),
        ("id\tdocument\n1\t좋다\n", "line 1: expected the column names id, document, label", 0),
        (NSMC_HEADER, "the file has no examples", 0),
        ("", "the file is empty", 0),
        (NSMC_HEADER.encode() + "1\t좋다\t1\n".encode("cp949"), "line 2: not UTF-8", 0),
        (
            (NSMC_HEADER + "1\t좋다\t1\n").encode("utf-16"),
            "UTF-16, not UTF-8: convert the file, e.g. iconv -f utf-16",
            0,
        ),
        (
            (NSMC_HEADER + "1\t좋다\t1\n").encode("utf-16-le"),
            "UTF-16, not UTF-8: convert .* -f utf-16le -t utf-8",
            0,
        ),
        (
            gzip.compress(NSMC_HEADER.encode(), mtime=0),
            r"ratings\.txt: compressed with gzip, not text: unpack the file first",
            0,
        ),
    ],
)
def test_error_in_a_tsv_names_the_line(tmp_path, content, message, left):
    assert_error(classify.TASK.read, write(tmp_path / "ratings.txt", content), message, left)


def test_white_space_around_a_label_makes_no_further_class(tmp_path):
    reviews = classify.TASK.read(write(tmp_path / "a.txt", NSMC_HEADER + "1\t좋다\t1 \n2\t 좋다 \t1\n"))
    assert [(review.text, review.label) for review in reviews] == [("좋다", "1"), (" 좋다 ", "1")]
    pairs = [json.loads(KLUE_PAIR.replace("neutral", "neutral "))]
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
    assert found._replace(location="") == expected and found.location.startswith(f"{path}, ")
    (of_capitals,) = TASKS[task].read(path.rename(tmp_path / "TRAIN.JSONL"))
    assert of_capitals._replace(location="") == expected


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("classify", '{"text": "글"', r"train\.jsonl, line 1: not valid JSON"),
        ("classify", '["글", "0"]', "line 1: not a JSON object"),
        ("classify", '{"text": "글"}', "line 1 has no 'label' of type str"),
        ("classify", '{"text": "글", "label": " "}', "line 1: the label is empty"),
        ("pair", '{"premise": "글", "gold_label": "a"}', "line 1 has no 'hypothesis' of type str"),
        ("ner", '{"tokens": ["a"], "tags": ["B"]}', "line 1: expected a tag"),
        ("ner", '{"tokens": ["a b"], "tags": ["O"]}', "line 1: a token is empty, or has a space"),
        (
            "ner",
            '{"text": "가", "entities": [{"start": 0, "end": 2, "type": "LC"}]}',
            "line 1: an entity is outside the text",
        ),
        ("ner", "{}", "line 1 has no 'text' of type str"),
        ("qa", '{"question": "?", "answers": []}', "line 1 has no 'context' of type str"),
        ("generate", '{"document": "글"}', "line 1 has no 'text' of type str"),
    ],
)
def test_error_in_json_lines_names_the_line(task, line, message, tmp_path):
    assert_error(TASKS[task].read, write(tmp_path / "train.jsonl", line + "\n"), message, left=0)


def test_label_may_be_true_or_false(tmp_path):
    """It is named as pandas writes it into a csv."""
    lines = '{"text": "a", "label": true}\n{"text": "b", "label": false}\n'
    assert [document.label for document in classify.TASK.read(write(tmp_path / "a.jsonl", lines))] == [
        "True",
        "False",
    ]


def test_json_and_tsv_give_the_same_pairs(tmp_path):
    items = [
        {"guid": "a", "premise": '"곧 온다', "hypothesis": "온다.", "gold_label": "entailment", "source": "x"}
    ]
    from_json = pair.TASK.read(write(tmp_path / "a.json", json.dumps(items)))
    from_tsv = pair.TASK.read(write(tmp_path / "a.tsv", KORNLI_HEADER + '"곧 온다\t온다.\tentailment\n'))
    assert from_json == [Pair("a", '"곧 온다', "온다.", "entailment", f"{tmp_path}/a.json, a")]
    assert from_tsv == [from_json[0]._replace(id="line 2", location=f"{tmp_path}/a.tsv, line 2")]


KLUE_PAIR = '{"guid": "b", "premise": "가", "hypothesis": "나", "gold_label": "neutral"}'


def test_pair_without_agreement_is_skipped_whatever_the_format(tmp_path):
    """The label - of SNLI is no class."""
    lines = "".join(
        json.dumps({"sentence1": "a", "sentence2": "b", "gold_label": label}) + "\n"
        for label in ("-", "neutral")
    )
    path = write(tmp_path / "snli_1.0_dev.jsonl", lines)
    for columns in (None, {"first": "sentence1", "second": "sentence2", "label": "gold_label"}):
        assert [example.label for example in pair.TASK.read(path, [], columns)] == ["neutral"]


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (
            KORNLI_HEADER + "가\t나\tneutral\n가\t나\n",
            r"data\.tsv, line 3: 2 fields, but the header has 3",
            1,
        ),
        (KORNLI_HEADER + "가\t나\t\n가\t나\tneutral\n", "line 2: the gold_label is empty", 1),
        (
            KORNLI_HEADER + "가\t나\t-\n가\t나\tneutral\n",
            "line 2: the gold_label is -: its annotators did not agree",
            1,
        ),
        ('[\n{"guid": "a",\n}]', "line 3: not valid JSON", 0),
        (
            '[{"guid": "a", "premise": "가", "gold_label": "neutral"}, ' + KLUE_PAIR + "]",
            r", a has no 'hypothesis' of type str",
            1,
        ),
        (
            '[{"premise": "가", "hypothesis": "나"}, ' + KLUE_PAIR + "]",
            r", \[0\] has no 'guid' of type str",
            1,
        ),
        ("[" + KLUE_PAIR.replace("neutral", "") + "," + KLUE_PAIR + "]", ", b: the gold_label is empty", 1),
        ('[{"guid": "a"}, {"guid": "b"}]', ", a has no 'premise' of type str", 0),
        ('{"data": []}', "not KLUE-NLI's list", 0),
        ("가\t나\n", "line 1: expected the column names sentence1", 0),
        (KORNLI_HEADER, "the file has no examples", 0),
    ],
)
def test_error_in_pairs_names_guid_or_line(tmp_path, content, message, left):
    assert_error(pair.TASK.read, write(tmp_path / "data.tsv", content), message, left)


# --- named entities ---


def test_all_entity_formats_give_the_same_type(tmp_path):
    klue = (
        "## 컬럼명 : CHAR\tNE_TAG\n## s1-x\t<김:PS><서울:LC> #\n김\tB-PS\n서\tB-LC\n울\tI-LC\n \tO\n#\tO\n\n"
    )
    entities = [Entity(0, 1, "PS"), Entity(1, 3, "LC")]
    assert ner.TASK.read(write(tmp_path / "klue", klue)) == [
        Sentence("s1-x", "김서울 #", entities, False, f"{tmp_path}/klue, line 3")
    ]
    lines = "김서울 #␞<김:PS><서울:LC> #\n"
    assert ner.TASK.read(write(tmp_path / "lines", lines)) == [
        Sentence("line 1", "김서울 #", entities, False, f"{tmp_path}/lines, line 1")
    ]
    conll = "-DOCSTART- -X- O O\n\nNew NNP I-NP I-LOC\nYork NNP I-NP I-LOC\nAnna NNP I-NP B-LOC\nx\tO\n\n\n나 B-PER\n"
    assert ner.TASK.read(write(tmp_path / "conll", conll)) == [
        Sentence(
            "line 3",
            "New York Anna x",
            [Entity(0, 8, "LOC"), Entity(9, 13, "LOC")],
            True,
            f"{tmp_path}/conll, line 3",
        ),
        Sentence("line 9", "나", [Entity(0, 1, "PER")], True, f"{tmp_path}/conll, line 9"),
    ]


def test_conll_may_have_iobes_tags_comments_and_other_spaces_in_tokens(tmp_path):
    lines = "# id = 1\n#\nNew\tB-LC\nYork E-LC \nAnna S-PS\nBo  S-PS\n# O\n\n#end\n# O\n10\u00a0km I-QT\n"
    sentences = ner.TASK.read(write(tmp_path / "a.conll", lines))
    assert [(s.text, [tuple(entity) for entity in s.entities]) for s in sentences] == [
        ("New York Anna Bo #", [(0, 8, "LC"), (9, 13, "PS"), (14, 16, "PS")]),
        ("# 10\u00a0km", [(2, 7, "QT")]),
    ]
    assert ner.TASK.collect_labels(sentences) == ["O", "B-LC", "B-PS", "B-QT", "I-LC", "I-PS", "I-QT"]


@pytest.mark.parametrize("last, single, inside", ["LUI", "ESM"])
def test_conll_may_have_bilou_or_bmes_tags(tmp_path, last, single, inside):
    lines = f"New B-LC\nYork {last}-LC\nAnna {single}-PS\nBo B-PS\nB {inside}-PS\nLi {last}-PS\n"
    (sentence,) = ner.TASK.read(write(tmp_path / "a.conll", lines))
    assert [tuple(entity) for entity in sentence.entities] == [(0, 8, "LC"), (9, 13, "PS"), (14, 21, "PS")]


def test_conll_with_an_empty_token_is_not_tagged_by_character(tmp_path):
    """As two files of the Broad Twitter Corpus.

    Of 2,000 sentences 4 were left, with the spaces of a text as its tokens.
    """
    skipped = []
    sentences = ner.TASK.read(write(tmp_path / "h.conll", "New\tB-LC\nYork\tI-LC\n\nx\tO\n \tO\n\n"), skipped)
    assert [(s.text, s.by_token) for s in sentences] == [("New York", True)]
    assert "line 5: expected a token and its tag" in str(skipped[0])


def test_numbered_tokens_of_germeval_are_not_taken_for_the_tokens(tmp_path):
    lines = "#\thttp://a\n1\tSchartau\tB-PER\tO\n2\tsagte\tO\tO\n\n#\thttp://b\n1\tBerlin\tB-LOC\tO\n"
    assert_error(
        ner.TASK.read,
        write(tmp_path / "g.tsv", lines),
        "its first column numbers the tokens: .* cut -f 2,3",
        left=0,
    )
    assert len(ner.TASK.read(write(tmp_path / "a.conll", "1 O\n\n1 O\n"))) == 2


@pytest.mark.parametrize(
    ("text", "marked", "entities"),
    [
        ("<파도>를 봤다", "<<파도:AF>>를 봤다", [(1, 3, "AF")]),
        ("a < b: c > d 김", "a < b: c > d <김:PS>", [(13, 14, "PS")]),
        ("<이것:은> 글 <김:A>", "<이것:은> 글 <김:A>", []),
        ("12:30에", "<12:30:TI>에", [(0, 5, "TI")]),
        ("<x:A> 김 <y:B>", "<x:A> <김:PS> <y:B>", [(6, 7, "PS")]),
    ],
)
def test_brackets_in_the_text_are_not_marks(tmp_path, text, marked, entities):
    sentence = ner.TASK.read(write(tmp_path / "lines.txt", f"{text}␞{marked}"))[0]
    assert sentence.text == text and [tuple(entity) for entity in sentence.entities] == entities


@pytest.mark.parametrize("task", ["ner", "ner_lines", "ner_conll"])
def test_sample_entities_survive_a_round_trip_through_bio(task):
    sentences = [s for part in formats.load_splits(ner.TASK, SAMPLES / task).values() for s in part]
    touching = sum(
        a.end == b.start or s.text[a.end : b.start] == " " for s in sentences for a, b in pairwise(s.entities)
    )
    assert touching >= 1
    for sentence in sentences:
        assert pass_through_bio(sentence) == sentence.entities


def test_adjacent_entity_begins_with_b():
    spans = split_units("서울부산", by_token=False)
    entities = [Entity(0, 2, "LC"), Entity(2, 4, "LC")]
    assert to_bio(spans, entities) == ["B-LC", "I-LC", "B-LC", "I-LC"]
    assert from_bio(spans, ["B-LC", "I-LC", "B-LC", "I-LC"]) == entities


def test_strict_entities_match_seqeval():
    def entities(tags):
        return {
            (e.type, e.start, e.end)
            for e in from_bio([(i, i + 1) for i in range(len(tags))], tags, strict=True)
        }

    some = ["O", "B-PS", "I-PS", "B-LC", "I-LC"]
    sequences = [list(tags) for length in range(6) for tags in product(some, repeat=length)]
    random = numpy.random.default_rng(0)
    sequences += [
        random.choice([*some, "B-A-B", "I-A-B"], random.integers(6, 40)).tolist() for _ in range(2000)
    ]
    theirs = Entities(sequences, IOB2).entities
    assert sum(map(len, theirs)) > 10_000
    for tags, found in zip(sequences, theirs, strict=True):
        assert entities(tags) == {(e.tag, e.start, e.end) for e in found}, tags

    # F1 computed from them matches too, here of random tags against others.
    wanted = sequences[-2000:]
    predicted = [random.permutation(tags).tolist() for tags in wanted]
    right, of_wanted, of_predicted = 0, 0, 0
    for a, b in ((entities(a), entities(b)) for a, b in zip(wanted, predicted, strict=True)):
        right, of_wanted, of_predicted = right + len(a & b), of_wanted + len(a), of_predicted + len(b)
    assert right > 100 and 2 * right / (of_wanted + of_predicted) == pytest.approx(
        f1_score(wanted, predicted, mode="strict", scheme=IOB2)
    )


def test_stray_inside_tag_is_an_entity_unless_strict():
    spans = split_units("가나다라", by_token=False)
    assert from_bio(spans, ["B-A", "I-B", "I-B", "I-A"]) == [
        Entity(0, 1, "A"),
        Entity(1, 3, "B"),
        Entity(3, 4, "A"),
    ]
    assert from_bio(spans, ["B-A", "I-B", "I-B", "I-A"], strict=True) == [Entity(0, 1, "A")]


KLUE_SENTENCE = "가\tO\n\n"


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (
            f"## 컬럼명\n{KLUE_SENTENCE}가\tB-PS\n나 O\n\n{KLUE_SENTENCE}",
            r"ner\.tsv, line 5: expected one character",
            2,
        ),
        (f"## 컬럼명\n가\tB-PS\n나다\tO\n\n{KLUE_SENTENCE}", "line 3: expected one character", 1),
        (
            f"## 컬럼명\n가\tB-PS\n나\tX-PS\n\n{KLUE_SENTENCE}",
            "line 3: the tag is 'X-PS', not O, B-TYPE or I-TYPE",
            1,
        ),
        ("## 컬럼명\n가\tB-PS\n나\tX-PS\n", "line 3: the tag is 'X-PS'", 0),
        ("Anna B-PER\n# a comment\n\nAnna B-PER\n", "line 2: the tag is 'comment'", 1),
        ("Anna B-PER\nKim\n\nAnna B-PER\n", "line 2: expected a token and its tag", 1),
        ("Anna B-PER\n\nAnna PER\nKim X\n", "line 3: the tag is 'PER'", 1),
        ("김 씨␞<김:PS> 씨\n김 씨 <김:PS> 씨\n", "line 2: expected the text, ␞", 1),
        (
            "김 씨␞<김:PS> 군\n김 씨␞<김:PS> 씨\n",
            "line 1: the text after ␞, without its marks, differs from the text before it",
            1,
        ),
        (
            "김 씨␞<박:PS> 씨\n",
            "line 1: the text after ␞, without its marks, differs from the text before it",
            0,
        ),
        ("그냥 글입니다.\n", "unknown format for named entities", 0),
        ("글\n", "unknown format for named entities", 0),
        ("## 컬럼명\n", "the file has no examples", 0),
        ("\n\n", "the file is empty", 0),
    ],
)
def test_error_in_entities_names_the_line(tmp_path, content, message, left):
    assert_error(ner.TASK.read, write(tmp_path / "ner.tsv", content), message, left)


# --- questions ---


def test_answer_may_start_at_the_first_character(tmp_path):
    question = qa.TASK.read(write(tmp_path / "a.json", json.dumps(squad())))[0]
    assert question == Question(
        "q1", "글", "가나다 라마", "무엇?", [Answer("가나다", 0)], False, f"{tmp_path}/a.json, question q1"
    )


def test_title_may_be_missing_and_id_may_be_a_number(tmp_path):
    """As in COVID-QA. The questions of an article stay in one part when the data are split."""
    content = squad()
    del content["data"][0]["title"]
    content["data"] *= 2
    content = json.loads(json.dumps(content))
    for number, article in enumerate(content["data"]):
        article["paragraphs"][0]["qas"][0]["id"] = number
    questions = qa.TASK.read(write(tmp_path / "a.json", json.dumps(content)))
    assert [(question.id, question.title) for question in questions] == [("0", "data[0]"), ("1", "data[1]")]
    for article in content["data"]:
        article["title"] = ""  # otherwise all articles would be one, which cannot be split
    questions = qa.TASK.read(write(tmp_path / "a.json", json.dumps(content)))
    assert [question.title for question in questions] == ["data[0]", "data[1]"]


def test_question_of_squad_2_may_have_no_answer(tmp_path):
    content = squad()
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions += [
        item() | {"id": "q2", "answers": []},
        item() | {"id": "q3", "answers": [], "is_impossible": True},
    ]
    found = qa.TASK.read(write(tmp_path / "a.json", json.dumps(content)))
    assert [question.answers for question in found] == [
        [Answer("가나다", 0)],
        [Answer("", 0)],
        [Answer("", 0)],
    ]
    assert all(question.optional for question in found) and qa.TASK.collect_settings(found) == {
        "optional": True
    }
    assert qa.TASK.collect_settings(qa.TASK.read(write(tmp_path / "b.json", json.dumps(squad())))) == {}


def test_answer_may_differ_from_the_context_in_white_space(tmp_path):
    path = write(tmp_path / "a.json", json.dumps(squad("가나다\u00a0라마", text="가나다 라")))
    assert qa.TASK.read(path)[0].answers == [Answer("가나다 라", 0)]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            item(answer_start=1),
            "question q1: the answer '가나다' is not at its answer_start 1, where the context has '나다 '",
        ),
        (item(answer_start=-6), "is not at its answer_start -6"),
        (item(text=""), "is not at its answer_start"),
        (item(answer_start="0"), "question q1: an answer has no 'answer_start' of type int"),
        (item() | {"answers": None}, "question q1 has no 'answers' of type list"),
        (item() | {"question": None}, "question q1 has no 'question' of type str"),
        ({"question": "무엇?"}, r"qa\.json, data\[0\].paragraphs\[0\].qas\[0\] has no 'id' of type str"),
        ("무엇?", r"qas\[0\] has no 'id' of type str"),
    ],
)
def test_error_in_a_question_names_it(tmp_path, item, message):
    content = squad()
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions[0]["id"] = "q2"
    questions.insert(0, item)
    assert_error(qa.TASK.read, write(tmp_path / "qa.json", json.dumps(content)), message, left=1)
    del questions[1]
    assert_error(qa.TASK.read, write(tmp_path / "qa.json", json.dumps(content)), message, left=0)


def test_second_valid_question_with_the_same_id_is_an_error(tmp_path):
    content = {"version": "1", "data": squad(answer_start=1)["data"] + squad()["data"] * 2}
    path = write(tmp_path / "qa.json", json.dumps(content))
    skipped = []
    assert [question.id for question in qa.TASK.read(path, skipped)] == ["q1"]
    assert "is not at its answer_start" in str(
        skipped[0]
    ) and "question q1: an earlier question has the same id" in str(skipped[1])
    del content["data"][0]
    assert_error(
        qa.TASK.read,
        write(path, json.dumps(content)),
        "question q1: an earlier question has the same id",
        left=1,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"version": "1", "data": [*squad()["data"], {"title": "글", "context": "가"}]},
            r"data\[1\] has no 'paragraphs' of type list",
        ),
        ({"version": "1"}, r"qa\.json has no 'data' of type list"),
        ({"version": "1", "data": []}, "the file has no examples"),
        ([1], "not SQuAD JSON"),
    ],
)
def test_json_that_is_not_squad_is_an_error(tmp_path, content, message):
    assert_error(qa.TASK.read, write(tmp_path / "qa.json", json.dumps(content)), message, left=0)


# --- generation ---


def test_reviews_get_a_prompt_and_plain_text_does_not(tmp_path):
    reviews = generate.TASK.read(write(tmp_path / "a.txt", NSMC_HEADER + "1\t좋다\t1\n2\t나쁘다\t0\n"))
    assert reviews == [
        Passage("긍정: ", "좋다", f"{tmp_path}/a.txt, line 2"),
        Passage("부정: ", "나쁘다", f"{tmp_path}/a.txt, line 3"),
    ]
    assert generate.TASK.read(write(tmp_path / "b.txt", "하나.\n\n둘\t셋.\n")) == [
        Passage("", "하나.", f"{tmp_path}/b.txt, line 1"),
        Passage("", "둘\t셋.", f"{tmp_path}/b.txt, line 3"),
    ]


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (
            NSMC_HEADER + "1\t좋다\t5\n2\t좋다\t1\n",
            "line 2: the label is '5', but only 0 and 1 have a prompt",
            1,
        ),
        (NSMC_HEADER + "1\t좋다\t1\n2\t좋다\n", "line 3: 2 fields", 1),
        (NSMC_HEADER + "1\t좋다\t\n", "line 2: the label is ''", 0),
        (NSMC_HEADER, "the file has no examples", 0),
        (" \n\n", "the file is empty", 0),
    ],
)
def test_error_in_texts_to_generate_names_the_line(tmp_path, content, message, left):
    assert_error(generate.TASK.read, write(tmp_path / "a.txt", content), message, left)


# --- folders and splits ---


def test_split_files_are_found_by_their_published_names(tmp_path):
    def found(*names):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in (*names, "README.md", "train.zip"):
            (folder / name).touch()
        return {
            split: [path.name for path in paths] for split, paths in formats.find_split_files(folder).items()
        }

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
    message = r"a_test\.csv and a_test\.tsv are the same data in two formats: move one to another folder"
    with pytest.raises(HpctrainError, match=message):
        formats.find_split_files(tmp_path, tables=True)
    assert formats.find_split_files(tmp_path)["train"] == [tmp_path / "a_train.tsv"]


def test_files_that_are_not_used_are_named(tmp_path):
    for name in ("ratings_train.txt", "ratings_test.txt", "ratings.txt", "README.md"):
        (tmp_path / name).touch()
    assert formats.describe_unused(tmp_path) == (
        f"{tmp_path}: not used: README.md, ratings.txt "
        "(a data file has one of the words train, validation, valid, val, dev, testa, test, testb in its name)"
    )
    (tmp_path / "ratings.txt").unlink()
    (tmp_path / "README.md").unlink()
    assert [formats.describe_unused(path) for path in (tmp_path, tmp_path / "ratings_test.txt", None)] == [
        "",
        "",
        "",
    ]


def test_many_names_are_shortened():
    assert formats.list_names(["b", "a"]) == "b, a"
    assert (
        formats.list_names([str(i) for i in range(30)])
        == ", ".join(str(i) for i in range(20)) + " and 10 more"
    )


def test_language_is_known_by_its_script():
    assert formats.find_language(["한글 text", "더 많은 글자와 글"]) == "ko"
    assert formats.find_language(["some text 한글"]) is formats.find_language(["123"]) is None


def test_missing_split_is_an_error_that_lists_the_files(tmp_path):
    (tmp_path / "klue-nli-v1.1_dev.json").touch()
    with pytest.raises(HpctrainError, match=r"no train file, .*\(found klue-nli-v1.1_dev.json\)"):
        formats.load_splits(pair.TASK, tmp_path)
    (tmp_path / "klue-nli-v1.1_dev.json").rename(tmp_path / "klue-nli-v1.1_train.json")
    with pytest.raises(HpctrainError, match="no test file"):
        formats.load_splits(pair.TASK, tmp_path)
    with pytest.raises(HpctrainError, match="cannot be read"):
        formats.load_splits(pair.TASK, tmp_path / "missing")


def test_skipped_examples_of_all_files_are_counted_and_described(tmp_path):
    write(tmp_path / "ratings_train.txt", NSMC_HEADER + "1\t좋다\t1\n2\t나쁘다\n3\t좋다\t\n")
    write(tmp_path / "ratings_test.txt", NSMC_HEADER + "1\t좋다\t1\n2\n")
    skipped = []
    splits = formats.load_splits(classify.TASK, tmp_path, skipped)
    assert {name: [d.id for d in documents] for name, documents in splits.items()} == {
        "train": ["1"],
        "test": ["1"],
    }
    assert formats.describe_skipped(skipped) == (
        f"skipped 3 examples (an error with --strict); the first: {tmp_path}/ratings_test.txt, line 3: "
        "1 fields, but the header has 3 (id, document, label): fix the line, or download the file again"
    )
    with pytest.raises(HpctrainError, match=re.escape(str(skipped[0]))):
        formats.load_splits(classify.TASK, tmp_path)

    skipped = []
    assert len(formats.load_splits(classify.TASK, tmp_path / "ratings_test.txt", skipped)["train"]) == 1
    assert formats.describe_skipped(skipped).startswith("skipped 1 example (")
    skipped = []
    formats.load_splits(classify.TASK, None, skipped)
    assert formats.describe_skipped(skipped) == ""


def test_split_depends_on_the_seed_alone_and_loses_nothing():
    examples = [Document(str(i), "", "0") for i in range(100)]
    train, validation = formats.split_examples(classify.TASK, examples, 0.1, seed=1)
    assert len(validation) == 10 and sorted(train + validation, key=lambda d: int(d.id)) == examples
    assert (train, validation) == formats.split_examples(classify.TASK, examples, 0.1, seed=1)
    assert validation != formats.split_examples(classify.TASK, examples, 0.1, seed=2)[1]


def test_questions_are_split_by_article():
    questions = [
        Question(f"{a}-{i}", f"글 {a}", f"문단 {a}", "?", [Answer("문", 0)])
        for i in range(3)
        for a in range(10)
    ]
    train, validation = formats.split_examples(qa.TASK, questions, 0.25, seed=0)
    assert not {q.title for q in train} & {q.title for q in validation}
    assert len(train) == 21 and len(validation) == 9


@pytest.mark.parametrize(
    ("share", "titles", "message"),
    [
        (0.0, "ab", "is not between 0 and 1"),
        (1.0, "ab", "is not between 0 and 1"),
        (0.5, "aa", "--data has 2 examples of 1 articles, too few to split: add more"),
        (0.5, "a", "--data has 1 example, too few to split: add more"),
        (0.1, "ab", "--validation-split 0.1 of 2 examples leaves a part empty: give another fraction"),
    ],
)
def test_split_with_an_empty_part_is_refused(share, titles, message):
    questions = [Question(str(i), title, "", "?", []) for i, title in enumerate(titles)]
    with pytest.raises(UsageError, match=message):
        formats.split_examples(qa.TASK, questions, share, seed=0)


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


def test_too_little_or_other_than_text_is_one_clear_line(tmp_path):
    """What is no file, what would be looked up on the hub by mistake, and what is not UTF-8, with a mark and without."""
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "pipe: a pipe or a device: write the data into a file"),
        (Path("reviews/train.tsv"), r"reviews/train.tsv: cannot be read \(No such file or directory\)"),
        (Path("klue/nli.json"), "klue/nli.json: cannot be read"),
    ):
        with pytest.raises(HpctrainError, match=message):
            resolve_data(path, ALONE)
    (tmp_path / "file").touch()
    for name in (str(tmp_path / "file"), "models/config.json", "kcbert/model.safetensors"):
        with pytest.raises(HpctrainError, match=f"{name}: neither a folder nor a model name"):
            resolve_model(name, ALONE)
    for encoding in ("utf-16", "utf-16-le"):
        (tmp_path / "texts.txt").write_bytes("good\n".encode(encoding))
        with pytest.raises(HpctrainError, match=r"texts\.txt: UTF-16, not UTF-8: convert the file"):
            list(predict.read_rows(argparse.Namespace(file=tmp_path / "texts.txt"), classify.TASK))


# --- the real data ---


def test_all_reviews_of_nsmc_are_read():
    train, test = (
        classify.TASK.read(find_data(f"nsmc/ratings_{part}.txt"), []) for part in ("train", "test")
    )
    assert (len(train), len(test)) == (150_000, 50_000)
    assert (sum(not d.text for d in train), sum(not d.text for d in test)) == (5, 3)
    assert sum(d.label == "1" for d in train) == 74_827


@pytest.mark.parametrize(
    ("name", "count", "in_brackets"),
    [("klue-ner-v1.1_dev.tsv", 14_257, 3), ("klue-ner-mini_train.tsv", 12_197, 1)],
    ids=["dev", "train"],
)
def test_klue_entities_survive_a_round_trip_through_bio(name, count, in_brackets, tmp_path):
    path = find_data(f"klue/klue-ner-v1.1/{name}")
    sentences = ner.TASK.read(path)
    assert len(sentences) == 5000 and sum(len(s.entities) for s in sentences) == count
    assert all(pass_through_bio(sentence) == sentence.entities for sentence in sentences)
    # The header of each sentence repeats it with its entities marked, so a second reader must find the same.
    headers = re.findall(r"^## (klue-ner-v1_\S+)\t(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [s.id for s in sentences] == [id_ for id_, _ in headers]
    lines = [
        f"{s.text.rstrip()}␞{marked.rstrip()}" for s, (_, marked) in zip(sentences, headers, strict=True)
    ]
    again = ner.TASK.read(write(tmp_path / "lines.txt", "\n".join(lines)))
    other = [
        (s.entities, t.entities) for s, t in zip(sentences, again, strict=True) if s.entities != t.entities
    ]
    # If an entity is in brackets that belong to the text (<<레이:PS>>), KLUE's tags begin at the bracket.
    assert len(other) == in_brackets
    for mine, theirs in other:
        assert {entity.end for entity in mine} == {entity.end for entity in theirs} and len(
            set(mine) - set(theirs)
        ) == 1


def test_all_pairs_of_klue_are_read():
    pairs = pair.TASK.read(find_data("klue/klue-nli-v1.1/klue-nli-v1.1_dev.json"))
    assert len(pairs) == 3000
    assert {
        label: sum(p.label == label for p in pairs) for label in {p.label for p in pairs}
    } == dict.fromkeys(("entailment", "neutral", "contradiction"), 1000)


def test_all_questions_of_korquad_are_read_and_split_by_paragraph():
    questions = qa.TASK.read(find_data("korquad_v1/KorQuAD_v1.0_dev.json"))
    assert len(questions) == 5774 and len({q.title for q in questions}) == 140
    assert all(q.context[a.start : a.start + len(a.text)] == a.text for q in questions for a in q.answers)
    assert sum(a.start == 0 for q in questions for a in q.answers) == 241
    train, validation = formats.split_examples(qa.TASK, questions, 0.5, seed=0)
    assert len(train) + len(validation) == 5774 and not {q.context for q in train} & {
        q.context for q in validation
    }


# --- batches ---
