"""Reading SQuAD 1.1, SQuAD 2.0 and KorQuAD 1.0."""

import json

import pytest

from hpctrain.nlp.data.splits import split_examples
from hpctrain.nlp.data.squad import Answer, Question
from hpctrain.nlp.tasks.qa import TASK
from tests.nlp.data.test_formats import assert_error, find_data, write


def item(**answer):
    return {"id": "q1", "question": "무엇?", "answers": [{"text": "가나다", "answer_start": 0, **answer}]}


def squad(context="가나다 라마", **answer):
    return {
        "version": "1",
        "data": [{"title": "글", "paragraphs": [{"context": context, "qas": [item(**answer)]}]}],
    }


def test_answer_may_start_at_the_first_character(tmp_path):
    question = TASK.read(write(tmp_path / "a.json", json.dumps(squad())))[0]
    assert question == Question(
        "q1",
        "글",
        "가나다 라마",
        "무엇?",
        [Answer("가나다", 0)],
        False,
        location=f"{tmp_path}/a.json, question q1",
    )


def test_title_may_be_missing_and_id_may_be_a_number(tmp_path):
    """As in COVID-QA. The questions of an article stay in one part when the data are split."""
    content = squad()
    del content["data"][0]["title"]
    content["data"] *= 2
    content = json.loads(json.dumps(content))
    for number, article in enumerate(content["data"]):
        article["paragraphs"][0]["qas"][0]["id"] = number
    questions = TASK.read(write(tmp_path / "a.json", json.dumps(content)))
    assert [(question.id, question.title) for question in questions] == [("0", "data[0]"), ("1", "data[1]")]
    for article in content["data"]:
        article["title"] = ""  # otherwise all articles would be one, which cannot be split
    questions = TASK.read(write(tmp_path / "a.json", json.dumps(content)))
    assert [question.title for question in questions] == ["data[0]", "data[1]"]


def test_question_of_squad_2_may_have_no_answer(tmp_path):
    content = squad()
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions += [
        item() | {"id": "q2", "answers": []},
        item() | {"id": "q3", "answers": [], "is_impossible": True},
    ]
    found = TASK.read(write(tmp_path / "a.json", json.dumps(content)))
    assert [question.answers for question in found] == [
        [Answer("가나다", 0)],
        [Answer("", 0)],
        [Answer("", 0)],
    ]
    assert all(question.optional for question in found) and TASK.collect_settings(found) == {"optional": True}
    assert TASK.collect_settings(TASK.read(write(tmp_path / "b.json", json.dumps(squad())))) == {}


def test_answer_may_differ_from_the_context_in_white_space(tmp_path):
    path = write(tmp_path / "a.json", json.dumps(squad("가나다\u00a0라마", text="가나다 라")))
    assert TASK.read(path)[0].answers == [Answer("가나다 라", 0)]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (item(answer_start=1), "question q1: .*'가나다' .*answer_start 1, .*'나다 '"),
        (item(answer_start=-6), "answer_start -6"),
        (item(text=""), "answer_start"),
        (item(answer_start="0"), "question q1: an answer has no 'answer_start'"),
        (item() | {"answers": None}, "question q1 has no 'answers'"),
        (item() | {"question": None}, "question q1 has no 'question'"),
        ({"question": "무엇?"}, r"qa\.json, data\[0\].paragraphs\[0\].qas\[0\] has no 'id'"),
        ("무엇?", r"qas\[0\] has no 'id'"),
    ],
)
def test_error_in_a_question_names_it(tmp_path, item, message):
    content = squad()
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions[0]["id"] = "q2"
    questions.insert(0, item)
    assert_error(TASK.read, write(tmp_path / "qa.json", json.dumps(content)), message, left=1)
    del questions[1]
    assert_error(TASK.read, write(tmp_path / "qa.json", json.dumps(content)), message, left=0)


def test_second_valid_question_with_the_same_id_is_an_error(tmp_path):
    content = {"version": "1", "data": squad(answer_start=1)["data"] + squad()["data"] * 2}
    path = write(tmp_path / "qa.json", json.dumps(content))
    skipped = []
    assert [question.id for question in TASK.read(path, skipped)] == ["q1"]
    assert "answer_start" in str(skipped[0]) and "question q1: " in str(skipped[1])
    del content["data"][0]
    assert_error(TASK.read, write(path, json.dumps(content)), "question q1: .*same id", left=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"version": "1", "data": [*squad()["data"], {"title": "글", "context": "가"}]},
            r"data\[1\] has no 'paragraphs'",
        ),
        ({"version": "1"}, r"qa\.json, line 1 has no 'context'.*: expected SQuAD JSON"),
        ({"version": "1", "data": []}, "the file has no examples"),
        ([1], r"\[0\]: not a JSON object"),
    ],
)
def test_json_that_is_not_squad_is_an_error(tmp_path, content, message):
    assert_error(TASK.read, write(tmp_path / "qa.json", json.dumps(content)), message, left=0)


def test_all_questions_of_korquad_are_read_and_split_by_paragraph():
    questions = TASK.read(find_data("korquad_v1/KorQuAD_v1.0_dev.json"))
    assert len(questions) == 5774 and len({q.title for q in questions}) == 140
    assert all(q.context[a.start : a.start + len(a.text)] == a.text for q in questions for a in q.answers)
    assert sum(a.start == 0 for q in questions for a in q.answers) == 241
    train, validation = split_examples(TASK, questions, 0.5, seed=0)
    assert len(train) + len(validation) == 5774 and not {q.context for q in train} & {
        q.context for q in validation
    }
