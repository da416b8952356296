"""The scores of answers, as the scripts of KorQuAD and SQuAD compute them."""

import pytest

from hpctrain.nlp.data.squad import Answer, Question
from hpctrain.nlp.tasks.answer_scores import score_korquad, score_squad
from hpctrain.nlp.tasks.qa import TASK


@pytest.mark.parametrize(
    ("answer", "rights", "exact", "f1"),
    [
        ("서울", ["서울"], 1, 1),
        (
            "서울에서",
            ["서울"],
            0,
            2 * 2 / (4 + 2),
        ),  # 2 of 4 predicted characters are correct, and 2 of 2 expected
        ("부산", ["서울"], 0, 0),
        ("", ["서울"], 0, 0),
        ("가가나", ["가나나"], 0, 2 * 2 / (3 + 3)),  # a multiset intersection
        ("울서", ["서울"], 0, 1),  # order does not count
        ("《서울》 <역> 〈앞〉 \u2018길\u2019", ["서울 역 앞 길"], 1, 1),
        ("음악(공연)", ["음악 공연"], 1, 1),  # brackets are spaces
        ("음악 공연", ["음악공연"], 0, 1),  # F1 ignores spaces
        ("1,000명.", ["1000명"], 1, 1),  # other punctuation is deleted
        ("A-B", ["ab"], 1, 1),
        ("The Beatles", ["beatles"], 0, 2 * 7 / (10 + 7)),  # articles are kept
        ("한·미", ["한미"], 0, 2 * 2 / (3 + 2)),  # not ASCII punctuation
        ("“서울”", ["서울"], 0, 2 * 2 / (4 + 2)),  # nor are these
        ("  서울   역 ", ["서울 역"], 1, 1),
        ("서울에서", ["부산", "서울에서", "서울"], 1, 1),  # the correct answer with the highest score
        ("서울에", ["부산", "서울에서", "서"], 0, 2 * 3 / (3 + 4)),
    ],
)
def test_scores_match_korquad(answer, rights, exact, f1):
    assert score_korquad(answer, rights) == (exact, pytest.approx(f1))
    examples = [Question("q", "글", "", "", [Answer(right, 0) for right in rights])]
    assert TASK.score(examples, [{"answer": answer}])["f1_char"] == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "rights", "exact", "f1"),
    [
        ("The Beatles!", ["beatles"], 1, 1),  # articles and punctuation are deleted
        ("in the old town", ["Old  Town"], 0, 2 * 2 / (3 + 2)),
        ("towns", ["town"], 0, 0),  # words, not characters
        ("a the an", ["the"], 1, 1),
        ("", ["the", "old"], 0, 0),  # an answer of articles alone does not count beside others
        ("old old town", ["old town town"], 0, 2 * 2 / (3 + 3)),
        ("1,000", ["1000"], 1, 1),
        ("another", ["other"], 0, 0),  # an article is a word
        ("old town", ["new town", "old town hall", "old"], 0, 2 * 2 / (2 + 3)),  # the best of several
        ("", [""], 1, 1),
        ("the", [""], 1, 1),
        ("town", [""], 0, 0),
    ],
)
def test_scores_match_squad(answer, rights, exact, f1):
    assert score_squad(answer, rights) == (exact, pytest.approx(f1))
