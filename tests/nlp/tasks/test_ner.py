"""Named entities: from text to features to entities again, for every kind of tokenizer; scores compared with seqeval."""

import random
import re
from dataclasses import replace
from functools import cache

import numpy
import pytest
import torch
from seqeval.metrics import classification_report
from seqeval.scheme import IOB2
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, PreTrainedTokenizerFast

from hpctrain.errors import UsageError
from hpctrain.nlp.data import formats
from hpctrain.nlp.models.model_folder import load_tokenizer, make_card, save_model
from hpctrain.nlp.task import IGNORED, SAMPLES
from hpctrain.nlp.tasks.alignment import NO_UNIT
from hpctrain.nlp.tasks.bio import Entity, from_bio, split_units, to_bio
from hpctrain.nlp.tasks.ner import TASK, Sentence
from tests.helpers import DATA

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
KINDS = ["wordpiece", "wordpiece of jamo", "unigram", "byte level", "byte level, prefix"]
BERT = ["input_ids", "token_type_ids", "attention_mask"]


@cache
def load_klue(split):
    """The 5,000 sentences of KLUE-NER's "dev" split, or 5,000 of "train"."""
    path = (
        DATA
        / "klue/klue-ner-v1.1"
        / ("klue-ner-v1.1_dev.tsv" if split == "dev" else "klue-ner-mini_train.tsv")
    )
    if not path.exists():
        pytest.skip(f"no {path.name} in {DATA}: HPCTRAIN_TEST_DATA names a folder that has it")
    return TASK.read(path)


def wrapped(backend, special=SPECIAL, inputs=BERT):
    """A tokenizer of transformers, with [CLS] and [SEP] around a text if it has them."""
    if "cls_token" in special:
        tokens = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **special)


def wordpiece(vocabulary=(), texts=(), size=30_000, **normalizer):
    """A tokenizer like BERT's, with a vocabulary or trained on texts."""
    pieces = {piece: i for i, piece in enumerate([*SPECIAL.values(), *vocabulary])}
    backend = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        **{"strip_accents": False, "lowercase": False, **normalizer}
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if texts:
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=list(SPECIAL.values()), show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    return wrapped(backend)


def byte_level(texts, size=8_000, **options):
    """A tokenizer like GPT-2's: byte-level BPE, without special tokens around a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<pad>"], show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return wrapped(backend, {"pad_token": "<pad>"}, ["input_ids", "attention_mask"])


def unigram(texts, size=8_000):
    """A tokenizer like XLM-R's: the unigram model of SentencePiece."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = list(SPECIAL.values())
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special, unk_token="[UNK]", show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return wrapped(backend, inputs=["input_ids", "attention_mask"])


@cache
def trained(kind):
    texts = [sentence.text for sentence in load_klue("train")[: None if kind == "wordpiece" else 1000]]
    if kind == "wordpiece":
        return wordpiece(texts=texts)
    # lowercasing also strips accents, which decomposes 한 into three characters
    if kind == "wordpiece of jamo":
        return wordpiece(texts=texts, lowercase=True, strip_accents=True)
    return (
        unigram(texts)
        if kind == "unigram"
        else byte_level(texts, add_prefix_space=kind == "byte level, prefix")
    )


def sentence(text, *entities, by_token=False):
    return Sentence("1", text, [Entity(*entity) for entity in entities], by_token, "here")


def features(tokenizer, *examples, labels=None, max_length=256):
    return TASK.tokenize(tokenizer, examples, labels or TASK.collect_labels(examples), max_length, 0)


def column(made, name, feature=0):
    return made.tokens[name][made.starts[feature] : made.starts[feature + 1]].tolist()


def format_feature(tokenizer, made, labels, feature=0):
    """A feature in readable form: "서:B-LC ##울:I-LC ##에:O ##서:O"; no label after a colon that the loss ignores."""
    pieces = tokenizer.convert_ids_to_tokens(column(made, "input_ids", feature))
    tags = ["" if label == IGNORED else labels[label] for label in column(made, "labels", feature)]
    return " ".join(f"{piece}:{tag}" for piece, tag in zip(pieces, tags, strict=True))


def gold(made):
    """The labels of the features, as if a model had predicted them."""
    rows = [
        (numpy.array(column(made, "labels", i)), numpy.array(column(made, "unit", i)))
        for i in range(len(made.example))
    ]
    return [labels[units != NO_UNIT] for labels, units in rows]


def to_set(answer):
    return {(entity["start"], entity["end"], entity["type"]) for entity in answer["entities"]}


def pass_through_features(tokenizer, examples, max_length):
    labels = TASK.collect_labels(examples)
    made = TASK.tokenize(tokenizer, examples, labels, max_length, 0)
    assert made.lengths.max() <= max_length
    assert made.values["units"].min() >= 1
    assert len(made.cut) == 0
    return made, TASK.make_answers(examples, made, gold(made), labels)


def tiny_model(tokenizer, labels):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=len(labels),
    )
    return TASK.model.from_config(config).eval()


def batch(made, tokenizer, index):
    return made.batch(torch.tensor(index), {"input_ids": tokenizer.pad_token_id, **TASK.padding})


def run(model, batch):
    return model(**batch.model_inputs(without=TASK.extra))


# --- from text to features to entities ---


def strip_entity(entity, text):
    name = text[entity.start : entity.end]
    return (
        entity.start + len(name) - len(name.lstrip()),
        entity.end - len(name) + len(name.rstrip()),
        entity.type,
    )


@pytest.mark.parametrize(
    ("kind", "max_length"),
    [
        ("wordpiece", 32),
        *(pytest.param("wordpiece", length, marks=pytest.mark.slow) for length in (256, 8)),
        *(pytest.param(kind, 32, marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_klue_entities_come_back_from_features(kind, max_length):
    examples = load_klue("train") + load_klue("dev")
    made, answers = pass_through_features(trained(kind), examples, max_length)
    assert (len(made.example) > len(examples)) == (max_length < 100)

    names = [{strip_entity(e, example.text) for e in example.entities} for example in examples]
    assert sum(map(len, names)) == 26_454
    assert [to_set(answer) for answer in answers] == names
    # A space has no token, so the three entities that begin or end with one come back without it.
    missed = sum(
        len(set(map(tuple, e.entities)) - to_set(answer)) for e, answer in zip(examples, answers, strict=True)
    )
    assert (
        missed
        == sum(e.text[n.start].isspace() or e.text[n.end - 1].isspace() for e in examples for n in e.entities)
        <= 3
    )


@pytest.mark.parametrize("folder", ["ner", "ner_conll", "ner_lines"])
@pytest.mark.parametrize("max_length", [256, 6])
def test_sample_entities_come_back_from_features(folder, max_length):
    examples = [
        example for split in formats.load_splits(TASK, SAMPLES / folder).values() for example in split
    ]
    tokenizer = wordpiece(texts=[example.text for example in examples], size=400)
    _, answers = pass_through_features(tokenizer, examples, max_length)
    assert [to_set(answer) for answer in answers] == [
        set(map(tuple, example.entities)) for example in examples
    ]
    assert all(
        e["text"] == x.text[e["start"] : e["end"]]
        for x, a in zip(examples, answers, strict=True)
        for e in a["entities"]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_entities_of_unusual_characters_come_back_from_features(kind):
    characters = "가힣각A z0漢é€㈜…ﬁ🙂🇰🇷👩‍👩‍👧뷁ㅋㅎᄒ_▁Ġ##[]<>-\u200b\u00a0\u3000\ufe0f"
    choose = random.Random(1)
    examples = []
    for _ in range(300):
        text = "".join(choose.choices(characters, k=choose.randint(1, 40)))
        if choose.random() < 0.2:
            text += "[MASK]<pad>뷁"
        # entities of characters that every tokenizer has a token for, adjacent or not
        good = [i for i, character in enumerate(text) if character in "가각A0漢€"]
        examples.append(sentence(text, *((i, i + 1, choose.choice(["PS", "LC"])) for i in good)))
    _, answers = pass_through_features(trained(kind), examples, 16)
    assert [to_set(answer) for answer in answers] == [
        set(map(tuple, example.entities)) for example in examples
    ]


# --- labels ---


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


def test_second_of_two_adjacent_entities_has_its_own_b():
    tokenizer = wordpiece(["서울", "서", "##울", "##부", "##산", "##에"])
    example = sentence("서울부산에", (0, 2, "LC"), (2, 4, "LC"))
    labels = TASK.collect_labels([example])
    made, answers = pass_through_features(tokenizer, [example], 256)
    assert (
        format_feature(tokenizer, made, labels)
        == "[CLS]: 서:B-LC ##울:I-LC ##부:B-LC ##산:I-LC ##에:O [SEP]:"
    )
    assert to_set(answers[0]) == {(0, 2, "LC"), (2, 4, "LC")}


def test_only_the_first_subword_token_of_a_unit_is_labeled():
    tokenizer = wordpiece(["hugging", "##face", "new", "##ly", "york", "in", "."])
    example = sentence("huggingface in newly york .", (0, 11, "ORG"), (15, 25, "LOC"), by_token=True)
    made = features(tokenizer, example)
    assert format_feature(tokenizer, made, TASK.collect_labels([example])) == (
        "[CLS]: hugging:B-ORG ##face: in:O new:B-LOC ##ly: york:I-LOC .:O [SEP]:"
    )
    assert made.values["units"].tolist() == [5]


def test_labels_are_o_and_both_tags_of_each_type():
    assert TASK.collect_labels([sentence("가", (0, 1, "PS")), sentence("나라", (0, 2, "LC"))]) == [
        "O",
        "B-LC",
        "B-PS",
        "I-LC",
        "I-PS",
    ]
    assert TASK.collect_labels([sentence("가")]) == ["O"]


def test_tag_not_in_training_data_is_ignored_by_the_loss_and_missed_in_the_score():
    tokenizer = wordpiece(["서", "##울", "##의", "봄"])
    example = sentence("서울의 봄", (0, 2, "LC"), (4, 5, "DT"))
    labels = ["O", "B-LC", "I-LC"]
    made = features(tokenizer, example, labels=labels)
    assert format_feature(tokenizer, made, labels) == "[CLS]: 서:B-LC ##울:I-LC ##의:O 봄: [SEP]:"
    assert made.values["units"].tolist() == [3]
    answers = TASK.make_answers([example], made, [numpy.array([1, 2, 0, 0])], labels)
    scores = TASK.score([example], answers)
    assert (scores["precision"], scores["recall"], scores["f1/DT"], scores["f1/LC"]) == (1, 0.5, 0, 1)
    # if all labels are ignored, the first token gets one, so that the mean of the loss is defined
    only = features(tokenizer, sentence("봄", (0, 1, "DT")), labels=labels)
    assert format_feature(tokenizer, only, labels) == "[CLS]:O 봄: [SEP]:"
    assert only.values["units"].tolist() == [1]


@pytest.mark.parametrize("text", ["", " ", "\u200b", "\ufffd \u200b"])
@pytest.mark.parametrize("kind", ["wordpiece", "byte level"])
def test_blank_text_has_one_feature_and_no_entities(kind, text):
    made, answers = pass_through_features(trained(kind), [sentence(text)], 256)
    assert len(made.example) == 1
    assert made.lengths[0] >= 1
    assert answers == [{"entities": []}]


def test_unit_without_a_token_belongs_to_the_entity_around_it():
    tokenizer = wordpiece("가나다라")
    example = sentence("가 \u200b나 다 라", (0, 4, "PS"), (5, 6, "PS"), (7, 8, "LC"))
    labels = TASK.collect_labels([example])
    made, answers = pass_through_features(tokenizer, [example], 256)
    assert to_set(answers[0]) == {(0, 4, "PS"), (5, 6, "PS"), (7, 8, "LC")}
    # I- of another type, or after O, is no entity, as in the score
    tags = [labels.index(tag) for tag in ("B-PS", "I-LC", "O", "I-PS")]
    assert to_set(TASK.make_answers([example], made, [numpy.array(tags)], labels)[0]) == {(0, 1, "PS")}


# --- windows ---


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "byte level"])
def test_windows_are_consecutive_and_carry_every_unit_once(kind):
    examples = load_klue("dev")[:500]
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


def test_window_filled_by_special_tokens_is_refused():
    tokenizer = wordpiece("가")
    with pytest.raises(
        UsageError, match="--max-length 2 has no room for text beside the tokenizer's special tokens"
    ):
        features(tokenizer, sentence("가"), max_length=2)
    assert features(tokenizer, sentence("가"), max_length=3).lengths.tolist() == [3]


# --- inputs of the model ---


def test_padding_and_truncation_of_the_tokenizer_are_turned_off():
    tokenizer = wordpiece(["가", "##나"])
    tokenizer.backend_tokenizer.enable_padding(length=20)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert column(features(tokenizer, sentence("가나")), "unit") == [NO_UNIT, 0, 1, NO_UNIT]


def test_columns_match_the_inputs_of_the_model():
    assert set(features(wordpiece("가"), sentence("가")).tokens) == {
        "input_ids",
        "token_type_ids",
        "labels",
        "unit",
    }
    tokenizer = wrapped(wordpiece("가").backend_tokenizer, inputs=["input_ids", "attention_mask"])
    assert set(features(tokenizer, sentence("가")).tokens) == {"input_ids", "labels", "unit"}


def test_padding_changes_neither_loss_nor_predictions():
    examples = sorted(load_klue("dev")[:40], key=lambda example: len(example.text))
    short, long = examples[0], examples[-1]
    labels, tokenizer = TASK.collect_labels(examples), trained("wordpiece")
    model = tiny_model(tokenizer, labels)
    made = features(tokenizer, short, long, labels=labels)
    alone, other, both = (
        batch(made, tokenizer, [0]),
        batch(made, tokenizer, [1]),
        batch(made, tokenizer, [0, 1]),
    )
    assert both.attention_mask[0].sum() == alone.attention_mask.sum() < both.attention_mask[1].sum()
    padded = both.attention_mask == 0
    assert (both.tokens["labels"][padded] == IGNORED).all()
    assert (both.tokens["unit"][padded] == NO_UNIT).all()
    with torch.no_grad():
        one, two, together = (run(model, inputs) for inputs in (alone, other, both))
        unmasked = run(model, replace(both, attention_mask=torch.ones_like(both.attention_mask)))
    counts = made.values["units"]
    mean = (one.loss.item() * counts[0] + two.loss.item() * counts[1]) / counts.sum()
    assert together.loss.item() == pytest.approx(mean, rel=1e-5)
    length = alone.attention_mask.shape[1]
    torch.testing.assert_close(together.logits[0, :length], one.logits[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(unmasked.logits[0, :length], one.logits[0], rtol=1e-4, atol=1e-5)
    predictions = TASK.predict(together, both)
    assert [len(prediction) for prediction in predictions] == counts.tolist()
    assert numpy.array_equal(predictions[0], TASK.predict(one, alone)[0])


def test_small_model_learns_the_sample_data_and_the_code_of_its_card_gives_its_score(tmp_path):
    examples = formats.load_splits(TASK, None)["train"][:24]
    labels = TASK.collect_labels(examples)
    tokenizer = wordpiece(texts=[example.text for example in examples], size=800)
    model = tiny_model(tokenizer, labels)
    made = features(tokenizer, *examples, max_length=16)
    assert len(made.example) > len(examples)
    inputs = batch(made, tokenizer, list(range(len(made.example))))

    def score(output):
        return TASK.score(examples, TASK.make_answers(examples, made, TASK.predict(output, inputs), labels))[
            "f1"
        ]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = score(run(model, inputs))
    for _ in range(50):
        run(model, inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before < 0.2
    assert score(run(model, inputs)) > 0.95

    folder = tmp_path / "model"
    model.config.label2id = {label: i for i, label in enumerate(labels)}
    model.config.id2label = dict(enumerate(labels))
    content = TASK.make_pipeline_tokenizer(tokenizer, {"by_token": False})
    card = make_card("x", TASK, "x", "x", None, {}, {}, {}, pipeline_tokenizer=bool(content))
    tokenizer.model_max_length = 256
    save_model(folder, model, tokenizer, card, content)
    (code,) = re.findall(r"```python\n(from transformers import pipeline.*?)```", card, re.DOTALL)
    names = {}
    exec(code.replace("FOLDER", str(folder)), names)
    examples = formats.load_splits(TASK, None)["test"]  # with characters that are not in the vocabulary
    made = features(tokenizer, *examples, labels=labels)
    inputs = batch(made, tokenizer, list(range(len(made.example))))
    expected = score(run(model, inputs))
    answers = [{"entities": names["find_entities"](example.text)} for example in examples]
    assert 0 < expected == TASK.score(examples, answers)["f1"]
    assert load_tokenizer(folder).tokenize(examples[0].text) == tokenizer.tokenize(examples[0].text)


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


def test_example_from_user_input():
    _, answers = pass_through_features(wordpiece("가나"), [TASK.make_example(["가 나"])], 256)
    assert answers == [{"entities": []}]
    for by_token in (False, True):  # as in the training data
        settings = TASK.collect_settings([sentence("a b", by_token=by_token)])
        assert TASK.make_example(["a b"], **settings).by_token == by_token
    assert TASK.get_texts(TASK.make_example(["가 나"])) == ("가 나",)


# --- scores ---


def assert_scores_match_seqeval(examples, answers, predicted):
    """`predicted` are the tags of each unit."""
    spans = [split_units(example.text, example.by_token) for example in examples]
    there = [to_bio(places, example.entities) for places, example in zip(spans, examples, strict=True)]
    report = classification_report(
        there, predicted, mode="strict", scheme=IOB2, output_dict=True, zero_division=0
    )
    scores = TASK.score(examples, answers)
    scored = [scores[name] for name in ("precision", "recall", "f1")]
    assert scored == pytest.approx(
        [report["micro avg"][name] for name in ("precision", "recall", "f1-score")], abs=1e-12
    )
    types = {entity.type for example in examples for entity in example.entities}
    assert {name for name in scores if "/" in name} == {f"f1/{type_}" for type_ in types}
    for type_ in types:
        assert scores[f"f1/{type_}"] == pytest.approx(report[type_]["f1-score"], abs=1e-12)
    return scores


@pytest.mark.parametrize("seed", range(20))
def test_scores_of_random_tags_match_seqeval(seed):
    choose = random.Random(seed)
    tokenizer = wordpiece(["a", "##a"])
    labels = ["O", "B-LC", "B-PS", "B-QT", "I-LC", "I-PS", "I-QT"]
    examples, predicted = [], []
    for _ in range(60):
        count = choose.randint(1, 12)
        text = " ".join(choose.choices(["a", "aa"], k=count))
        # correct entities have two types, so that a predicted one may have a third
        tags = choose.choices(["O", "B-LC", "I-LC", "B-PS", "I-PS"], k=count)
        entities = from_bio(split_units(text, True), tags, strict=True)
        examples.append(Sentence("", text, entities, True, ""))
        gold_tags = to_bio(split_units(text, True), entities)
        predicted.append([tag if choose.random() < 0.6 else choose.choice(labels) for tag in gold_tags])
    made = features(tokenizer, *examples, labels=labels, max_length=8)
    numbers = [[labels.index(tag) for tag in tags] for tags in predicted]
    carried = [
        [unit for unit in column(made, "unit", i) if unit != NO_UNIT] for i in range(len(made.example))
    ]
    predictions = [
        numpy.array([numbers[i][unit] for unit in units])
        for i, units in zip(made.example, carried, strict=True)
    ]
    scores = assert_scores_match_seqeval(
        examples, TASK.make_answers(examples, made, predictions, labels), predicted
    )
    assert 0 < scores["f1"] < 1


def test_scores_of_real_sentences_match_seqeval():
    examples = load_klue("dev")[:2000]
    labels, choose = TASK.collect_labels(examples), numpy.random.default_rng(1)
    made = features(trained("wordpiece"), *examples)
    wrong = [choose.integers(len(labels), size=len(row)) for row in gold(made)]
    predictions = [
        numpy.where(choose.random(len(row)) < 0.9, row, w) for row, w in zip(gold(made), wrong, strict=True)
    ]
    answers = TASK.make_answers(examples, made, predictions, labels)
    predicted = []
    for example, answer in zip(examples, answers, strict=True):
        entities = [Entity(e["start"], e["end"], e["type"]) for e in answer["entities"]]
        predicted.append(to_bio(split_units(example.text, False), entities))
    scores = assert_scores_match_seqeval(examples, answers, predicted)
    assert 0.2 < scores["f1"] < 0.95


def test_scores_without_entities_are_zero():
    nothing = {"entities": []}
    assert TASK.score([sentence("가")], [nothing]) == {"f1": 0, "precision": 0, "recall": 0}
    assert TASK.score([sentence("가", (0, 1, "PS"))], [nothing]) == {
        "f1": 0,
        "precision": 0,
        "recall": 0,
        "f1/PS": 0,
    }
