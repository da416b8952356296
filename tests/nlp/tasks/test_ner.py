"""Named entities: from text to features to entities again, scores compared with seqeval."""

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
from hpctrain.nlp.data.bio import Entity, from_bio, split_units, to_bio
from hpctrain.nlp.data.conll import Sentence
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.models.card import make_card
from hpctrain.nlp.models.model_folder import save_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.task import IGNORED, SAMPLES
from hpctrain.nlp.tasks.alignment import NO_UNIT
from hpctrain.nlp.tasks.ner import TASK
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


def byte_level(texts, **options):
    """A tokenizer like GPT-2's: byte-level BPE, without special tokens around a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, initial_alphabet=alphabet, special_tokens=["<pad>"], show_progress=False
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
    texts = [sentence.text for sentence in load_klue("train")[:1000]]
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
    return Sentence("1", text, [Entity(*entity) for entity in entities], by_token, location="here")


def features(tokenizer, *examples, labels=None, max_length=256):
    return TASK.tokenize(tokenizer, examples, labels or TASK.collect_labels(examples), max_length, 0)


def column(made, name, feature=0):
    return made.tokens[name][made.starts[feature] : made.starts[feature + 1]].tolist()


def format_feature(tokenizer, made, labels):
    """The first feature as "서:B-LC ##울:I-LC ##에:O ##서:O"; a label that the loss ignores is empty."""
    pieces = tokenizer.convert_ids_to_tokens(column(made, "input_ids"))
    tags = ["" if label == IGNORED else labels[label] for label in column(made, "labels")]
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


def get_tags(output, batch):
    """The predictions for a batch, as they are scored."""
    return [tags for _, tags in TASK.fetch_predictions([(batch.index, TASK.predict(output, batch))])]


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
        *(pytest.param("wordpiece", length, marks=pytest.mark.slow) for length in (256, 8)),
        *(pytest.param(kind, 32, marks=pytest.mark.slow) for kind in KINDS),
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
    examples = [example for split in load_splits(TASK, SAMPLES / folder).values() for example in split]
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


# --- inputs of the model ---


def test_window_filled_by_special_tokens_is_refused():
    tokenizer = wordpiece("가")
    with pytest.raises(
        UsageError, match="--max-length 2 has no room for text beside the tokenizer's special tokens"
    ):
        features(tokenizer, sentence("가"), max_length=2)
    assert features(tokenizer, sentence("가"), max_length=3).lengths.tolist() == [3]


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
    predictions = get_tags(together, both)
    assert [len(prediction) for prediction in predictions] == counts.tolist()
    assert numpy.array_equal(predictions[0], get_tags(one, alone)[0])


@pytest.mark.slow
def test_small_model_learns_the_sample_data_and_the_code_of_its_card_gives_its_score(tmp_path):
    examples = load_splits(TASK, None)["train"][:24]
    labels = TASK.collect_labels(examples)
    tokenizer = wordpiece(texts=[example.text for example in examples], size=800)
    model = tiny_model(tokenizer, labels)
    made = features(tokenizer, *examples, max_length=16)
    assert len(made.example) > len(examples)
    inputs = batch(made, tokenizer, list(range(len(made.example))))

    def score(output):
        return TASK.score(examples, TASK.make_answers(examples, made, get_tags(output, inputs), labels))["f1"]

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
    examples = load_splits(TASK, None)["test"]  # with characters that are not in the vocabulary
    made = features(tokenizer, *examples, labels=labels)
    inputs = batch(made, tokenizer, list(range(len(made.example))))
    expected = score(run(model, inputs))
    answers = [{"entities": names["find_entities"](example.text)} for example in examples]
    assert 0 < expected == TASK.score(examples, answers)["f1"]
    assert load_tokenizer(folder).tokenize(examples[0].text) == tokenizer.tokenize(examples[0].text)


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


@pytest.mark.parametrize("seed", range(3))
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
        examples.append(Sentence("", text, entities, True))
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


@pytest.mark.slow
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
