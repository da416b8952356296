"""Reading sentences and their entities: CoNLL, the formats of KLUE-NER, and which lines are errors."""

import pytest

from hpctrain.nlp.data.bio import Entity
from hpctrain.nlp.data.conll import Sentence
from hpctrain.nlp.tasks.ner import TASK
from tests.nlp.data.test_formats import assert_error, write


def test_all_entity_formats_give_the_same_type(tmp_path):
    klue = (
        "## 컬럼명 : CHAR\tNE_TAG\n## s1-x\t<김:PS><서울:LC> #\n김\tB-PS\n서\tB-LC\n울\tI-LC\n \tO\n#\tO\n\n"
    )
    entities = [Entity(0, 1, "PS"), Entity(1, 3, "LC")]
    assert TASK.read(write(tmp_path / "klue", klue)) == [
        Sentence("s1-x", "김서울 #", entities, False, location=f"{tmp_path}/klue, line 3")
    ]
    lines = "김서울 #␞<김:PS><서울:LC> #\n"
    assert TASK.read(write(tmp_path / "lines", lines)) == [
        Sentence("line 1", "김서울 #", entities, False, location=f"{tmp_path}/lines, line 1")
    ]
    conll = "-DOCSTART- -X- O O\n\nNew NNP I-NP I-LOC\nYork NNP I-NP I-LOC\n"
    conll += "Anna NNP I-NP B-LOC\nx\tO\n\n\n나 B-PER\n"
    assert TASK.read(write(tmp_path / "conll", conll)) == [
        Sentence(
            "line 3",
            "New York Anna x",
            [Entity(0, 8, "LOC"), Entity(9, 13, "LOC")],
            True,
            location=f"{tmp_path}/conll, line 3",
        ),
        Sentence("line 9", "나", [Entity(0, 1, "PER")], True, location=f"{tmp_path}/conll, line 9"),
    ]


def test_conll_may_have_iobes_tags_comments_and_other_spaces_in_tokens(tmp_path):
    lines = "# id = 1\n#\nNew\tB-LC\nYork E-LC \nAnna S-PS\nBo  S-PS\n# O\n\n#end\n# O\n10\u00a0km I-QT\n"
    sentences = TASK.read(write(tmp_path / "a.conll", lines))
    assert [(s.text, [tuple(entity) for entity in s.entities]) for s in sentences] == [
        ("New York Anna Bo #", [(0, 8, "LC"), (9, 13, "PS"), (14, 16, "PS")]),
        ("# 10\u00a0km", [(2, 7, "QT")]),
    ]
    assert TASK.collect_labels(sentences) == ["O", "B-LC", "B-PS", "B-QT", "I-LC", "I-PS", "I-QT"]


@pytest.mark.parametrize("last, single, inside", ["LUI", "ESM"])
def test_conll_may_have_bilou_or_bmes_tags(tmp_path, last, single, inside):
    lines = f"New B-LC\nYork {last}-LC\nAnna {single}-PS\nBo B-PS\nB {inside}-PS\nLi {last}-PS\n"
    (sentence,) = TASK.read(write(tmp_path / "a.conll", lines))
    assert [tuple(entity) for entity in sentence.entities] == [(0, 8, "LC"), (9, 13, "PS"), (14, 21, "PS")]


def test_conll_with_an_empty_token_is_not_tagged_by_character(tmp_path):
    """As two files of the Broad Twitter Corpus.

    Of 2,000 sentences 4 were left, with the spaces of a text as its tokens.
    """
    skipped = []
    sentences = TASK.read(write(tmp_path / "h.conll", "New\tB-LC\nYork\tI-LC\n\nx\tO\n \tO\n\n"), skipped)
    assert [(s.text, s.by_token) for s in sentences] == [("New York", True)]
    assert "line 5: expected a token and its tag" in str(skipped[0])


def test_numbered_tokens_of_germeval_are_not_taken_for_the_tokens(tmp_path):
    lines = "#\thttp://a\n1\tSchartau\tB-PER\tO\n2\tsagte\tO\tO\n\n#\thttp://b\n1\tBerlin\tB-LOC\tO\n"
    assert_error(TASK.read, write(tmp_path / "g.tsv", lines), "cut -f 2,3", left=0)
    assert len(TASK.read(write(tmp_path / "a.conll", "1 O\n\n1 O\n"))) == 2


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
    sentence = TASK.read(write(tmp_path / "lines.txt", f"{text}␞{marked}"))[0]
    assert sentence.text == text and [tuple(entity) for entity in sentence.entities] == entities


KLUE_SENTENCE = "가\tO\n\n"


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        (f"## 컬럼명\n{KLUE_SENTENCE}가\tB-PS\n나 O\n\n{KLUE_SENTENCE}", r"ner\.tsv, line 5: ", 2),
        (f"## 컬럼명\n가\tB-PS\n나다\tO\n\n{KLUE_SENTENCE}", "line 3: ", 1),
        (f"## 컬럼명\n가\tB-PS\n나\tX-PS\n\n{KLUE_SENTENCE}", "line 3: .*'X-PS'", 1),
        ("## 컬럼명\n가\tB-PS\n나\tX-PS\n", "line 3: the tag is 'X-PS'", 0),
        ("Anna B-PER\n# a comment\n\nAnna B-PER\n", "line 2: the tag is 'comment'", 1),
        ("Anna B-PER\nKim\n\nAnna B-PER\n", "line 2: ", 1),
        ("Anna B-PER\n\nAnna PER\nKim X\n", "line 3: the tag is 'PER'", 1),
        ("김 씨␞<김:PS> 씨\n김 씨 <김:PS> 씨\n", "line 2: .*␞", 1),
        ("김 씨␞<김:PS> 군\n김 씨␞<김:PS> 씨\n", "line 1: .*␞", 1),
        ("김 씨␞<박:PS> 씨\n", "line 1: .*␞", 0),
        ("그냥 글입니다.\n", "unknown format for named entities", 0),
        ("글\n", "unknown format for named entities", 0),
        ("## 컬럼명\n", "the file has no examples", 0),
        ("\n\n", "the file is empty", 0),
    ],
)
def test_error_in_entities_names_the_line(tmp_path, content, message, left):
    assert_error(TASK.read, write(tmp_path / "ner.tsv", content), message, left)
