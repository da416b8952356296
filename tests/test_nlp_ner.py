"""Names in sentences: from text to features to tags and back, for every kind of tokenizer; scores as seqeval counts them."""

import random
from functools import cache

import numpy
import pytest
import torch
from conftest import DATA
from seqeval.metrics import classification_report
from seqeval.scheme import IOB2
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, PreTrainedTokenizerFast

from hpctrain.nlp import data
from hpctrain.nlp.data import Entity, Sentence
from hpctrain.nlp.ner import NONE, TASK
from hpctrain.nlp.task import IGNORED
from hpctrain.world import UsageError

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
KINDS = ["wordpiece", "wordpiece of jamo", "unigram", "byte level", "byte level, prefix"]
BERT = ["input_ids", "token_type_ids", "attention_mask"]


@cache
def real(split):
    """The 5,000 sentences of KLUE-NER's "dev", or as many of "train"."""
    path = DATA / "klue/klue-ner-v1.1" / ("klue-ner-v1.1_dev.tsv" if split == "dev" else "klue-ner-mini_train.tsv")
    if not path.exists():
        pytest.skip(f"no {path.name} in {DATA}: HPCTRAIN_TEST_DATA names a folder that has it")
    return data.read_ner(path)


def wrapped(backend, special=SPECIAL, inputs=BERT):
    """A tokenizer of transformers; [CLS] and [SEP] around a text, where it has them."""
    if "cls_token" in special:
        tokens = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **special)


def wordpiece(vocabulary=(), texts=(), size=30_000, **normalizer):
    """BERT's tokenizer, of a vocabulary or trained on texts."""
    pieces = {piece: i for i, piece in enumerate([*SPECIAL.values(), *vocabulary])}
    backend = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(**{"strip_accents": False, "lowercase": False, **normalizer})
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if texts:
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL.values()), show_progress=False)
        backend.train_from_iterator(texts, trainer)
    return wrapped(backend)


def byte_level(texts, size=8_000, **options):
    """GPT-2's kind: pieces of bytes, with no special token around a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["<pad>"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return wrapped(backend, {"pad_token": "<pad>"}, ["input_ids", "attention_mask"])


def unigram(texts, size=8_000):
    """XLM-R's kind: SentencePiece's most probable pieces."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = list(SPECIAL.values())
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="[UNK]", show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return wrapped(backend, inputs=["input_ids", "attention_mask"])


@cache
def trained(kind):
    texts = [sentence.text for sentence in real("train")[: None if kind == "wordpiece" else 1000]]
    if kind == "wordpiece":
        return wordpiece(texts=texts)
    if kind == "wordpiece of jamo":  # lowercase strips accents, too, and so takes 한 for three characters
        return wordpiece(texts=texts, lowercase=True, strip_accents=True)
    return unigram(texts) if kind == "unigram" else byte_level(texts, add_prefix_space=kind == "byte level, prefix")


def sentence(text, *entities, by_token=False):
    return Sentence("1", text, [Entity(*entity) for entity in entities], by_token, "here")


def features(tokenizer, *examples, labels=None, max_length=256):
    return TASK.tokenise(tokenizer, examples, labels or TASK.labels(examples), max_length, 0)


def column(made, name, feature=0):
    return made.tokens[name][made.starts[feature] : made.starts[feature + 1]].tolist()


def shown(tokenizer, made, labels, feature=0):
    """A feature as a reader would write it: "서:B-LC ##울:I-LC ##에:O ##서:O"; nothing after a colon that the loss leaves out."""
    pieces = tokenizer.convert_ids_to_tokens(column(made, "input_ids", feature))
    tags = ["" if label == IGNORED else labels[label] for label in column(made, "labels", feature)]
    return " ".join(f"{piece}:{tag}" for piece, tag in zip(pieces, tags, strict=True))


def gold(made):
    """The labels of the features, as though a model had predicted them."""
    rows = [(numpy.array(column(made, "labels", i)), numpy.array(column(made, "unit", i))) for i in range(len(made.example))]
    return [labels[units != NONE] for labels, units in rows]


def found(answer):
    return {(entity["start"], entity["end"], entity["type"]) for entity in answer["entities"]}


def there_and_back(tokenizer, examples, max_length):
    labels = TASK.labels(examples)
    made = TASK.tokenise(tokenizer, examples, labels, max_length, 0)
    assert made.lengths.max() <= max_length
    assert made.values["units"].min() >= 1
    assert len(made.cut) == 0
    return made, TASK.answers(examples, made, gold(made), labels)


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


def run(model, inputs):
    return model(**{name: tensor for name, tensor in inputs.items() if name not in {*TASK.extra, "units"}})


# --- there and back ---


def without_space_at_its_ends(entity, text):
    name = text[entity.start : entity.end]
    return entity.start + len(name) - len(name.lstrip()), entity.end - len(name) + len(name.rstrip()), entity.type


@pytest.mark.parametrize(
    ("kind", "max_length"),
    [
        ("wordpiece", 32),
        *(pytest.param("wordpiece", length, marks=pytest.mark.slow) for length in (256, 8)),
        *(pytest.param(kind, 32, marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_every_name_of_klue_comes_back_and_no_other(kind, max_length):
    examples = real("train") + real("dev")
    made, answers = there_and_back(trained(kind), examples, max_length)
    assert (len(made.example) > len(examples)) == (max_length < 100)

    names = [{without_space_at_its_ends(e, example.text) for e in example.entities} for example in examples]
    assert sum(map(len, names)) == 26_454
    assert [found(answer) for answer in answers] == names
    # A space has no piece, so that the three names that begin or end with one come back without it.
    missed = sum(len(set(map(tuple, e.entities)) - found(answer)) for e, answer in zip(examples, answers, strict=True))
    assert missed == sum(e.text[n.start].isspace() or e.text[n.end - 1].isspace() for e in examples for n in e.entities) <= 3


@pytest.mark.parametrize("folder", ["ner", "ner_conll", "ner_lines"])
@pytest.mark.parametrize("max_length", [256, 6])
def test_every_name_of_the_samples_comes_back(folder, max_length):
    examples = [example for split in data.load("ner", data.SAMPLES / folder).values() for example in split]
    tokenizer = wordpiece(texts=[example.text for example in examples], size=400)
    _, answers = there_and_back(tokenizer, examples, max_length)
    assert [found(answer) for answer in answers] == [set(map(tuple, example.entities)) for example in examples]
    assert all(e["text"] == x.text[e["start"] : e["end"]] for x, a in zip(examples, answers, strict=True) for e in a["entities"])


@pytest.mark.parametrize("kind", KINDS)
def test_characters_of_all_kinds_come_back(kind):
    characters = "가힣각A z0漢é€㈜…ﬁ🙂🇰🇷👩‍👩‍👧뷁ㅋㅎᄒ_▁Ġ##[]<>-\u200b\u00a0\u3000\ufe0f"
    choose = random.Random(1)
    examples = []
    for _ in range(300):
        text = "".join(choose.choices(characters, k=choose.randint(1, 40)))
        if choose.random() < 0.2:
            text += "[MASK]<pad>뷁"
        # names of characters that every tokenizer has a piece for, touching or not
        good = [i for i, character in enumerate(text) if character in "가각A0漢€"]
        examples.append(sentence(text, *((i, i + 1, choose.choice(["PS", "LC"])) for i in good)))
    _, answers = there_and_back(trained(kind), examples, 16)
    assert [found(answer) for answer in answers] == [set(map(tuple, example.entities)) for example in examples]


# --- what is labelled ---


def test_a_piece_is_cut_where_a_name_ends_inside_of_it():
    tokenizer = wordpiece(["서울에서", "서", "##울", "##에", "##서", "살", "##다"])
    example = sentence("서울에서 살다", (0, 2, "LC"))
    labels = TASK.labels([example])
    made = features(tokenizer, example)
    assert shown(tokenizer, made, labels) == "[CLS]: 서:B-LC ##울:I-LC ##에:O ##서:O 살:O ##다:O [SEP]:"
    assert column(made, "unit") == [NONE, 0, 1, 2, 3, 5, 6, NONE]
    assert made.values["units"].tolist() == [6]


def test_a_character_takes_the_next_best_piece_that_the_vocabulary_has():
    tokenizer = wordpiece(["서울", "##에서", "서", "울", "##에", "("])
    example = sentence("서울에서(뷁쉙", (0, 2, "LC"))
    # 울 only without ##; 서 as it begins a word, too; and of an unknown word each character is unknown
    assert shown(tokenizer, features(tokenizer, example), TASK.labels([example])) == (
        "[CLS]: 서:B-LC 울:I-LC ##에:O 서:O (:O [UNK]:O [UNK]:O [SEP]:"
    )


def test_a_space_before_a_character_carries_no_tag():
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
    tokenizer = wrapped(backend, {name: SPECIAL[name] for name in ("pad_token", "unk_token", "cls_token", "sep_token")})
    example = sentence("서울 울", (0, 2, "LC"))
    # 서울 is cut, and 울 is as the tokenizer has it
    assert shown(tokenizer, features(tokenizer, example), TASK.labels([example])) == "[CLS]: ▁: 서:B-LC 울:I-LC ▁: 울:O [SEP]:"


def test_of_pieces_that_divide_a_character_none_comes_twice():
    jamo = ["\u1100", "##\u1161\u11a8\u1100", "##\u1161\u11ab", "##\u1100\u1161\u11ab"]  # of 각간: ㄱ, ㅏㄱㄱ, ㅏㄴ; and 간
    tokenizer = wordpiece(jamo, lowercase=True, strip_accents=True)
    example = sentence("각간", (1, 2, "PS"))
    assert len(tokenizer.tokenize("각간")) == 3
    assert shown(tokenizer, features(tokenizer, example), TASK.labels([example])) == f"[CLS]: {jamo[0]}:O {jamo[3]}:B-PS [SEP]:"


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_word_begins_stays_visible(kind):
    tokenizer = trained(kind)
    made = features(tokenizer, sentence("한국에서 살았다 한국"))
    pieces = tokenizer.convert_ids_to_tokens(column(made, "input_ids"))
    firsts = {unit: pieces[i] for i, unit in enumerate(column(made, "unit")) if unit != NONE}
    assert sorted(firsts) == [0, 1, 2, 3, 5, 6, 7, 9, 10]
    if kind.startswith("wordpiece"):
        assert [unit for unit, piece in firsts.items() if not piece.startswith("##")] == [0, 5, 9]
    else:
        # GPT-2's own way has no space at the beginning of a text
        assert [unit for unit, piece in firsts.items() if piece[0] in "Ġ▁"] == [0, 5, 9][kind == "byte level" :]
    assert firsts[1] == firsts[10]


def test_of_two_names_that_touch_the_second_begins_anew():
    tokenizer = wordpiece(["서울", "서", "##울", "##부", "##산", "##에"])
    example = sentence("서울부산에", (0, 2, "LC"), (2, 4, "LC"))
    labels = TASK.labels([example])
    made, answers = there_and_back(tokenizer, [example], 256)
    assert shown(tokenizer, made, labels) == "[CLS]: 서:B-LC ##울:I-LC ##부:B-LC ##산:I-LC ##에:O [SEP]:"
    assert found(answers[0]) == {(0, 2, "LC"), (2, 4, "LC")}


def test_of_a_token_only_the_first_piece_is_labelled():
    tokenizer = wordpiece(["hugging", "##face", "new", "##ly", "york", "in", "."])
    example = sentence("huggingface in newly york .", (0, 11, "ORG"), (15, 25, "LOC"), by_token=True)
    made = features(tokenizer, example)
    assert shown(tokenizer, made, TASK.labels([example])) == (
        "[CLS]: hugging:B-ORG ##face: in:O new:B-LOC ##ly: york:I-LOC .:O [SEP]:"
    )
    assert made.values["units"].tolist() == [5]


def test_labels_are_o_first_and_both_tags_of_each_type():
    assert TASK.labels([sentence("가", (0, 1, "PS")), sentence("나라", (0, 2, "LC"))]) == ["O", "B-LC", "B-PS", "I-LC", "I-PS"]
    assert TASK.labels([sentence("가")]) == ["O"]


def test_a_tag_unseen_in_training_is_left_out_of_the_loss_and_missed_in_the_score():
    tokenizer = wordpiece(["서", "##울", "##의", "봄"])
    example = sentence("서울의 봄", (0, 2, "LC"), (4, 5, "DT"))
    labels = ["O", "B-LC", "I-LC"]
    made = features(tokenizer, example, labels=labels)
    assert shown(tokenizer, made, labels) == "[CLS]: 서:B-LC ##울:I-LC ##의:O 봄: [SEP]:"
    assert made.values["units"].tolist() == [3]
    answers = TASK.answers([example], made, [numpy.array([1, 2, 0, 0])], labels)
    scores = TASK.metric([example], answers)
    assert (scores["precision"], scores["recall"], scores["f1/DT"], scores["f1/LC"]) == (1, 0.5, 0, 1)
    # where no tag counts at all, the mean of the loss is over one label none the less
    only = features(tokenizer, sentence("봄", (0, 1, "DT")), labels=labels)
    assert shown(tokenizer, only, labels) == "[CLS]:O 봄: [SEP]:"
    assert only.values["units"].tolist() == [1]


@pytest.mark.parametrize("text", ["", " ", "\u200b", "\ufffd \u200b"])
@pytest.mark.parametrize("kind", ["wordpiece", "byte level"])
def test_a_text_of_nothing_has_a_feature_and_no_names(kind, text):
    made, answers = there_and_back(trained(kind), [sentence(text)], 256)
    assert len(made.example) == 1
    assert made.lengths[0] >= 1
    assert answers == [{"entities": []}]


def test_a_unit_without_a_piece_belongs_to_the_name_that_goes_on_after_it():
    tokenizer = wordpiece("가나다라")
    example = sentence("가 \u200b나 다 라", (0, 4, "PS"), (5, 6, "PS"), (7, 8, "LC"))
    labels = TASK.labels([example])
    made, answers = there_and_back(tokenizer, [example], 256)
    assert found(answers[0]) == {(0, 4, "PS"), (5, 6, "PS"), (7, 8, "LC")}
    # I- of another type, or after O, is no name: as in the score
    tags = [labels.index(tag) for tag in ("B-PS", "I-LC", "O", "I-PS")]
    assert found(TASK.answers([example], made, [numpy.array(tags)], labels)[0]) == {(0, 1, "PS")}


# --- windows ---


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "byte level"])
def test_windows_follow_each_other_and_carry_every_unit_once(kind):
    examples = real("dev")[:500]
    tokenizer = trained(kind)
    whole, windows = (features(tokenizer, *examples, max_length=length) for length in (512, 24))
    assert len(whole.example) == len(examples)
    assert windows.lengths.max() <= 24
    assert windows.example.tolist() == sorted(windows.example.tolist())
    special = set(tokenizer.all_special_ids)
    for name in ("input_ids", "unit", "labels"):
        one, many = (made.tokens[name][~numpy.isin(made.tokens["input_ids"], [*special])] for made in (whole, windows))
        assert numpy.array_equal(one, many)


def test_windows_are_cut_at_a_space_where_one_is_near_and_never_inside_of_a_unit():
    text = "가나다라 마바사 아 자차카타파하거너더러"
    made = features(wordpiece(), sentence(text), max_length=10)
    # of 8 places each; after 아 is no place to cut, so early in the window
    windows = [[text[unit] for unit in column(made, "unit", i)[1:-1]] for i in range(len(made.example))]
    assert list(map("".join, windows)) == ["가나다라마바사아", "자차카타파하거너", "더러"]
    made = features(wordpiece(), sentence(text), max_length=9)
    windows = [[text[unit] for unit in column(made, "unit", i)[1:-1]] for i in range(len(made.example))]
    assert list(map("".join, windows)) == ["가나다라마바사", "아자차카타파하", "거너더러"]

    made = features(wordpiece(["a", "##a", "b", "##b"]), sentence("aaa bbb aaaaaaaaa b", by_token=True), max_length=6)
    # the third token is longer than a window: its tag is in the first one
    assert [column(made, "unit", i)[1:-1] for i in range(len(made.example))] == [
        [0, NONE, NONE],
        [1, NONE, NONE],
        [2, NONE, NONE, NONE],
        [NONE] * 4,
        [NONE, 3],
    ]
    assert made.values["units"].tolist() == [1, 1, 1, 1, 1]


def test_a_window_that_special_tokens_fill_is_refused():
    tokenizer = wordpiece("가")
    with pytest.raises(UsageError, match=r"--max-length 2: .*special tokens"):
        features(tokenizer, sentence("가"), max_length=2)
    assert features(tokenizer, sentence("가"), max_length=3).lengths.tolist() == [3]


# --- what the model gets ---


def test_padding_and_truncation_of_the_tokenizers_own_are_left_out():
    tokenizer = wordpiece(["가", "##나"])
    tokenizer.backend_tokenizer.enable_padding(length=20)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert column(features(tokenizer, sentence("가나")), "unit") == [NONE, 0, 1, NONE]


def test_columns_are_what_the_model_takes():
    assert set(features(wordpiece("가"), sentence("가")).tokens) == {"input_ids", "token_type_ids", "labels", "unit"}
    tokenizer = wrapped(wordpiece("가").backend_tokenizer, inputs=["input_ids", "attention_mask"])
    assert set(features(tokenizer, sentence("가")).tokens) == {"input_ids", "labels", "unit"}


def test_padding_changes_neither_the_loss_nor_what_is_predicted():
    examples = sorted(real("dev")[:40], key=lambda example: len(example.text))
    short, long = examples[0], examples[-1]
    labels, tokenizer = TASK.labels(examples), trained("wordpiece")
    model = tiny_model(tokenizer, labels)
    made = features(tokenizer, short, long, labels=labels)
    alone, other, both = batch(made, tokenizer, [0]), batch(made, tokenizer, [1]), batch(made, tokenizer, [0, 1])
    assert both["attention_mask"][0].sum() == alone["attention_mask"].sum() < both["attention_mask"][1].sum()
    padded = both["attention_mask"] == 0
    assert (both["labels"][padded] == IGNORED).all()
    assert (both["unit"][padded] == NONE).all()
    with torch.no_grad():
        one, two, together = (run(model, inputs) for inputs in (alone, other, both))
        unmasked = run(model, {**both, "attention_mask": torch.ones_like(both["attention_mask"])})
    counts = made.values["units"]
    mean = (one.loss.item() * counts[0] + two.loss.item() * counts[1]) / counts.sum()
    assert together.loss.item() == pytest.approx(mean, rel=1e-5)
    length = alone["input_ids"].shape[1]
    torch.testing.assert_close(together.logits[0, :length], one.logits[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(unmasked.logits[0, :length], one.logits[0], rtol=1e-4, atol=1e-5)
    predictions = TASK.predict(together, both)
    assert [len(prediction) for prediction in predictions] == counts.tolist()
    assert numpy.array_equal(predictions[0], TASK.predict(one, alone)[0])


@pytest.mark.usefixtures("one_thread")
def test_a_small_model_learns_the_sample():
    examples = data.load("ner", None)["train"][:24]
    labels = TASK.labels(examples)
    tokenizer = wordpiece(texts=[example.text for example in examples], size=800)
    model = tiny_model(tokenizer, labels)
    made = features(tokenizer, *examples, max_length=16)
    assert len(made.example) > len(examples)
    inputs = batch(made, tokenizer, list(range(len(made.example))))

    def score(output):
        return TASK.metric(examples, TASK.answers(examples, made, TASK.predict(output, inputs), labels))["f1"]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = score(run(model, inputs))
    for _ in range(50):
        run(model, inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before < 0.2
    assert score(run(model, inputs)) > 0.95


def test_what_a_user_gives_is_a_sentence():
    _, answers = there_and_back(wordpiece("가나"), [TASK.example(["가 나"])], 256)
    assert answers == [{"entities": []}]
    for by_token in (False, True):  # as the data were that the model has learnt from
        settings = TASK.settings([sentence("a b", by_token=by_token)])
        assert TASK.example(["a b"], **settings).by_token == by_token
    assert TASK.texts(TASK.example(["가 나"])) == ("가 나",)


# --- scores ---


def assert_as_seqeval_counts(examples, answers, said):
    """`said` are the tags of each unit."""
    spans = [data.spans(example.text, example.by_token) for example in examples]
    there = [data.to_bio(places, example.entities) for places, example in zip(spans, examples, strict=True)]
    report = classification_report(there, said, mode="strict", scheme=IOB2, output_dict=True, zero_division=0)
    scores = TASK.metric(examples, answers)
    ours = [scores[name] for name in ("precision", "recall", "f1")]
    assert ours == pytest.approx([report["micro avg"][name] for name in ("precision", "recall", "f1-score")], abs=1e-12)
    types = {entity.type for example in examples for entity in example.entities}
    assert {name for name in scores if "/" in name} == {f"f1/{type_}" for type_ in types}
    for type_ in types:
        assert scores[f"f1/{type_}"] == pytest.approx(report[type_]["f1-score"], abs=1e-12)
    return scores


@pytest.mark.parametrize("seed", range(20))
def test_scores_of_random_tags_are_those_of_seqeval(seed):
    choose = random.Random(seed)
    tokenizer = wordpiece(["a", "##a"])
    labels = ["O", "B-LC", "B-PS", "B-QT", "I-LC", "I-PS", "I-QT"]
    examples, said = [], []
    for _ in range(60):
        count = choose.randint(1, 12)
        text = " ".join(choose.choices(["a", "aa"], k=count))
        # gold of two types, so that what is said may be of a type that is not there
        tags = choose.choices(["O", "B-LC", "I-LC", "B-PS", "I-PS"], k=count)
        entities = data.from_bio(data.spans(text, True), tags, strict=True)
        examples.append(Sentence("", text, entities, True, ""))
        gold_tags = data.to_bio(data.spans(text, True), entities)
        said.append([tag if choose.random() < 0.6 else choose.choice(labels) for tag in gold_tags])
    made = features(tokenizer, *examples, labels=labels, max_length=8)
    numbers = [[labels.index(tag) for tag in tags] for tags in said]
    carried = [[unit for unit in column(made, "unit", i) if unit != NONE] for i in range(len(made.example))]
    predictions = [numpy.array([numbers[i][unit] for unit in units]) for i, units in zip(made.example, carried, strict=True)]
    scores = assert_as_seqeval_counts(examples, TASK.answers(examples, made, predictions, labels), said)
    assert 0 < scores["f1"] < 1


def test_scores_of_real_sentences_are_those_of_seqeval():
    examples = real("dev")[:2000]
    labels, choose = TASK.labels(examples), numpy.random.default_rng(1)
    made = features(trained("wordpiece"), *examples)
    wrong = [choose.integers(len(labels), size=len(row)) for row in gold(made)]
    predictions = [numpy.where(choose.random(len(row)) < 0.9, row, w) for row, w in zip(gold(made), wrong, strict=True)]
    answers = TASK.answers(examples, made, predictions, labels)
    said = []
    for example, answer in zip(examples, answers, strict=True):
        entities = [Entity(e["start"], e["end"], e["type"]) for e in answer["entities"]]
        said.append(data.to_bio(data.spans(example.text, False), entities))
    scores = assert_as_seqeval_counts(examples, answers, said)
    assert 0.2 < scores["f1"] < 0.95


def test_scores_where_nothing_is_said_or_there_is_nothing():
    nothing = {"entities": []}
    assert TASK.metric([sentence("가")], [nothing]) == {"f1": 0, "precision": 0, "recall": 0}
    assert TASK.metric([sentence("가", (0, 1, "PS"))], [nothing]) == {"f1": 0, "precision": 0, "recall": 0, "f1/PS": 0}
