"""Subword tokens that are split at the edges of units, windows, and the tokenizer by character."""

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hpctrain.nlp.data.conll import Sentence
from hpctrain.nlp.models.card import make_card
from hpctrain.nlp.tasks.alignment import NO_UNIT
from hpctrain.nlp.tasks.ner import TASK
from tests.nlp.tasks.test_ner import (
    KINDS,
    SPECIAL,
    byte_level,
    column,
    features,
    format_feature,
    load_klue,
    sentence,
    trained,
    wordpiece,
    wrapped,
)


def test_token_is_split_where_an_entity_ends_inside_it():
    tokenizer = wordpiece(["서울에서", "서", "##울", "##에", "##서", "살", "##다"])
    example = sentence("서울에서 살다", (0, 2, "LC"))
    labels = TASK.collect_labels([example])
    made = features(tokenizer, example)
    assert (
        format_feature(tokenizer, made, labels) == "[CLS]: 서:B-LC ##울:I-LC ##에:O ##서:O 살:O ##다:O [SEP]:"
    )
    assert column(made, "unit") == [NO_UNIT, 0, 1, 2, 3, 5, 6, NO_UNIT]
    assert made.values["units"].tolist() == [6]


def test_character_takes_the_best_token_in_the_vocabulary():
    tokenizer = wordpiece(["서울", "##에서", "서", "울", "##에", "("])
    example = sentence("서울에서(뷁쉙", (0, 2, "LC"))
    # 울 exists only without ##, 서 only as the start of a word, and each character of an unknown word is
    # unknown
    assert format_feature(tokenizer, features(tokenizer, example), TASK.collect_labels([example])) == (
        "[CLS]: 서:B-LC 울:I-LC ##에:O 서:O (:O [UNK]:O [UNK]:O [SEP]:"
    )


def test_token_for_a_space_carries_no_tag():
    pieces = [
        ("[UNK]", 0.0),
        ("[CLS]", 0.0),
        ("[SEP]", 0.0),
        ("[PAD]", 0.0),
        ("▁", -3.0),
        ("▁서울", -1.0),
        ("서", -3.0),
        ("울", -3.0),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = wrapped(
        backend, {name: SPECIAL[name] for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    )
    example = sentence("서울 울", (0, 2, "LC"))
    # 서울 is split, and 울 is as the tokenizer makes it
    assert (
        format_feature(tokenizer, features(tokenizer, example), TASK.collect_labels([example]))
        == "[CLS]: ▁: 서:B-LC 울:I-LC ▁: 울:O [SEP]:"
    )


def test_tokens_that_divide_a_character_do_not_repeat():
    # of 각간: ㄱ, ㅏㄱㄱ, ㅏㄴ; and 간
    jamo = ["\u1100", "##\u1161\u11a8\u1100", "##\u1161\u11ab", "##\u1100\u1161\u11ab"]
    tokenizer = wordpiece(jamo, lowercase=True, strip_accents=True)
    example = sentence("각간", (1, 2, "PS"))
    assert len(tokenizer.tokenize("각간")) == 3
    assert (
        format_feature(tokenizer, features(tokenizer, example), TASK.collect_labels([example]))
        == f"[CLS]: {jamo[0]}:O {jamo[3]}:B-PS [SEP]:"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_split_tokens_keep_the_mark_of_a_word_start(kind):
    tokenizer = trained(kind)
    made = features(tokenizer, sentence("한국에서 살았다 한국"))
    pieces = tokenizer.convert_ids_to_tokens(column(made, "input_ids"))
    firsts = {unit: pieces[i] for i, unit in enumerate(column(made, "unit")) if unit != NO_UNIT}
    assert sorted(firsts) == [0, 1, 2, 3, 5, 6, 7, 9, 10]
    if kind.startswith("wordpiece"):
        assert [unit for unit, piece in firsts.items() if not piece.startswith("##")] == [0, 5, 9]
    else:
        # without add_prefix_space, a text has no space at its beginning
        assert [unit for unit, piece in firsts.items() if piece[0] in "Ġ▁"] == [0, 5, 9][
            kind == "byte level" :
        ]
    assert firsts[1] == firsts[10]


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "byte level"])
def test_windows_are_consecutive_and_carry_every_unit_once(kind):
    examples = load_klue("dev")[:100]
    tokenizer = trained(kind)
    whole, windows = (features(tokenizer, *examples, max_length=length) for length in (512, 24))
    assert len(whole.example) == len(examples)
    assert windows.lengths.max() <= 24
    assert windows.example.tolist() == sorted(windows.example.tolist())
    special = set(tokenizer.all_special_ids)
    for name in ("input_ids", "unit", "labels"):
        one, many = (
            made.tokens[name][~numpy.isin(made.tokens["input_ids"], [*special])] for made in (whole, windows)
        )
        assert numpy.array_equal(one, many)


def test_windows_end_at_a_space_if_one_is_near_and_never_inside_a_unit():
    text = "가나다라 마바사 아 자차카타파하거너더러"
    made = features(wordpiece(), sentence(text), max_length=10)
    # 8 tokens each; the space after 아 is too early in the window
    windows = [[text[unit] for unit in column(made, "unit", i)[1:-1]] for i in range(len(made.example))]
    assert list(map("".join, windows)) == ["가나다라마바사아", "자차카타파하거너", "더러"]
    made = features(wordpiece(), sentence(text), max_length=9)
    windows = [[text[unit] for unit in column(made, "unit", i)[1:-1]] for i in range(len(made.example))]
    assert list(map("".join, windows)) == ["가나다라마바사", "아자차카타파하", "거너더러"]

    made = features(
        wordpiece(["a", "##a", "b", "##b"]), sentence("aaa bbb aaaaaaaaa b", by_token=True), max_length=6
    )
    # the third unit is longer than a window: its tag is in its first window
    assert [column(made, "unit", i)[1:-1] for i in range(len(made.example))] == [
        [0, NO_UNIT, NO_UNIT],
        [1, NO_UNIT, NO_UNIT],
        [2, NO_UNIT, NO_UNIT, NO_UNIT],
        [NO_UNIT] * 4,
        [NO_UNIT, 3],
    ]
    assert made.values["units"].tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "text", ["서울에서 살던 ABC社 x1", "뷁서울 2026년", "  서울\u3000에서!", "서울에서😀살던"]
)
def test_pipeline_tokenizer_gives_the_tokens_of_training(text):
    tokenizer = wordpiece(
        [
            "서울",
            "##에서",
            "서",
            "##울",
            "울",
            "에",
            "##에",
            "살",
            "##던",
            "A",
            "##B",
            "C",
            "x",
            "1",
            "2",
            "##0",
            "년",
        ]
    )
    backend = Tokenizer.from_str(TASK.make_pipeline_tokenizer(tokenizer, {"by_token": False}))
    made = features(tokenizer, Sentence("", text, [], by_token=False))
    assert backend.encode(text).ids == column(made, "input_ids")


def test_no_pipeline_tokenizer_for_other_tokenizers_and_for_data_by_token():
    assert not TASK.make_pipeline_tokenizer(byte_level(["서울에서 살던"]), {"by_token": False})
    assert not TASK.make_pipeline_tokenizer(wordpiece(["서"]), {"by_token": True})
    assert "find_entities" not in make_card("x", TASK, "x", "x", None, {}, {}, {})
