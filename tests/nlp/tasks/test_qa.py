"""Question answering: windows that lose no answer, the best span over all windows, and KorQuAD's scores."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast

from hpctrain.distributed.world import ALONE
from hpctrain.errors import UsageError
from hpctrain.nlp.data.splits import load_splits, split_examples
from hpctrain.nlp.data.squad import UNANSWERABLE, Answer, Question
from hpctrain.nlp.tasks.qa import MAX_ANSWER, NO_ANSWER, TASK, TOP_SPANS
from hpctrain.nlp.training.steps import Steps
from tests.helpers import DATA

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
KORQUAD = DATA / "korquad_v1" / "KorQuAD_v1.0_dev.json"


def make_tokenizer(
    texts, vocabulary=8000, names=("input_ids", "token_type_ids", "attention_mask"), **normalizer
):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        **{"strip_accents": False, "lowercase": False, **normalizer}
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # Two rounds, so that the same texts give the same tokens: see scratch.py.
    tokenizer.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=0, special_tokens=SPECIAL, show_progress=False)
    )
    known = SPECIAL + sorted(token for token in tokenizer.get_vocab() if token.startswith("##"))
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=known, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    special = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special
    )
    names_of = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=list(names), **names_of)


def question(context, answer, text="무엇?"):
    return Question(
        "q", "글", context, text, [Answer(answer, context.index(answer))], location="file, question q"
    )


def make_numbered(words):
    """A context of different words, and a tokenizer with one token for each word."""
    context = " ".join(f"w{i}" for i in range(words))
    return context, make_tokenizer([context, "무엇?"] * 2)


def get_targets(features):
    """For each feature, the characters that its target points at, None for [CLS]."""
    targets = []
    for begin, first, last in zip(
        features.starts[:-1],
        features.values["start_positions"],
        features.values["end_positions"],
        strict=True,
    ):
        start, end = features.tokens["start"][begin + first], features.tokens["end"][begin + last]
        assert (first == last == 0) == (start < 0)
        targets.append(None if start < 0 else (int(start), int(end)))
    return targets


def get_target_texts(features, examples):
    of = [examples[number].context for number in features.example]
    return [
        None if span is None else context[slice(*span)]
        for span, context in zip(get_targets(features), of, strict=True)
    ]


def get_spans(output, batch):
    """The predictions for a batch, as they are scored."""
    return [spans for _, spans in TASK.fetch_predictions([(batch.index, TASK.predict(output, batch))])]


def answer_for_logits(features, starts, ends, examples):
    """The answers for given logits of each token of all features."""
    predictions = []
    for number in range(len(features.example)):
        batch = features.batch(torch.tensor([number]), TASK.padding)
        part = slice(features.starts[number], features.starts[number + 1])
        output = SimpleNamespace(
            start_logits=torch.tensor(starts[part])[None], end_logits=torch.tensor(ends[part])[None]
        )
        predictions += get_spans(output, batch)
    return TASK.make_answers(examples, features, predictions, [])


# --- windows ---


def test_answer_may_start_at_the_first_character():
    context, tokenizer = make_numbered(5)
    examples = [question(context, "w0 w1")]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    assert get_target_texts(features, examples) == ["w0 w1"]
    logits = numpy.where(features.tokens["start"] == 0, 5.0, 0.0)
    assert answer_for_logits(features, logits, logits, examples)[0] | {"score": 0} == {
        "answer": "w0",
        "start": 0,
        "score": 0,
    }


def test_windows_without_the_answer_point_at_cls():
    context, tokenizer = make_numbered(60)
    examples = [question(context, "w40 w41")]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    texts = get_target_texts(features, examples)
    assert len(texts) > 2 and texts[0] is None and "w40 w41" in texts
    assert set(texts) == {None, "w40 w41"}
    assert len(features.cut) == len(features.lost) == 0


def test_windows_cover_the_context_and_share_the_stride():
    context, tokenizer = make_numbered(100)
    features = TASK.tokenize(tokenizer, [question(context, "w3")], [], 32, 8)
    windows = []
    for begin, end in pairwise(features.starts):
        assert end - begin <= 32
        start, stop, ids = (features.tokens[name][begin:end] for name in ("start", "end", "input_ids"))
        assert tokenizer.decode(ids[start < 0]) == "[CLS] 무엇 ? [SEP] [SEP]"
        assert (features.tokens["token_type_ids"][begin:end] == [0] * 4 + [1] * (end - begin - 4)).all()
        windows.append([context[a:b] for a, b in zip(start, stop, strict=True) if a >= 0])
    assert [
        word for window in windows for word in window[8 * (window is not windows[0]) :]
    ] == context.split()
    assert all(before[-8:] == after[:8] for before, after in pairwise(windows))


def test_answer_that_ends_inside_a_token_gets_the_fewest_tokens_that_cover_it():
    tokenizer = make_tokenizer(["그는 서울에서 태어났다", "무엇?"] * 2)
    assert len(tokenizer.tokenize("서울에서")) == 1
    examples = [question("그는 서울에서 태어났다", "서울"), question("그는 서울에서 태어났다", "울에서 태")]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    assert get_target_texts(features, examples) == ["서울에서", "서울에서 태어났다"]


def test_answer_longer_than_any_window_is_counted():
    context, tokenizer = make_numbered(80)
    examples = [
        question(context, "w3"),
        question(context, context[: context.index("w50")]),
        question(context, "w70"),
    ]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    assert features.lost.tolist() == [1] and not len(features.cut)
    texts = get_target_texts(features, examples)
    assert {text for text, number in zip(texts, features.example, strict=True) if number == 1} == {None}
    assert {text for text, number in zip(texts, features.example, strict=True) if number == 2} == {
        None,
        "w70",
    }


def test_answer_longer_than_any_prediction_is_counted():
    context, tokenizer = make_numbered(MAX_ANSWER + 10)
    whole = [" ".join(context.split()[:words]) for words in (MAX_ANSWER, MAX_ANSWER + 1)]
    examples = [question(context, answer) for answer in whole]
    features = TASK.tokenize(tokenizer, examples, [], 200, 8)
    assert get_target_texts(features, examples) == whole
    assert features.lost.tolist() == [1] and not len(features.cut)


@pytest.mark.parametrize(("max_length", "stride"), [(32, 8), (64, 32), (384, 128), (20, 12)])
def test_long_question_is_truncated_and_counted(max_length, stride):
    context, tokenizer = make_numbered(600)
    examples = [question(context, "w500", text=text) for text in ("무엇? " * 400, "무엇?", "?" * 400)]
    features = TASK.tokenize(tokenizer, examples, [], max_length, stride)
    assert features.cut.tolist() == [0, 2]
    texts = get_target_texts(features, examples)
    assert all(
        "w500" in [text for text, of in zip(texts, features.example, strict=True) if of == number]
        for number in range(3)
    )
    first = features.tokens["input_ids"][: features.starts[1]]
    assert (first == tokenizer.convert_tokens_to_ids("무엇")).sum() > 1


@pytest.mark.parametrize(("max_length", "stride"), [(128, 128), (64, 128), (32, 30), (4, 0)])
def test_stride_too_large_for_the_window_is_refused(max_length, stride):
    context, tokenizer = make_numbered(60)
    with pytest.raises(UsageError, match=f"--stride {stride} with --max-length {max_length}"):
        TASK.tokenize(tokenizer, [question(context, "w3")], [], max_length, stride)


@pytest.mark.parametrize("normalizer", [{}, {"strip_accents": True, "lowercase": True}])
def test_positions_are_characters_of_the_original_context(normalizer):
    context = "\u200bCafé Ünïon\x00은 서울의 \U0001f370 가게로,\u3000\uff11년 年에 "
    context += "(옛 \uff21\uff22) 열었다. e\u0301lan 각"
    tokenizer = make_tokenizer([context, "무엇?"] * 2, **normalizer)
    answers = [
        "Café",
        "Ünïon",
        "서울의",
        "\U0001f370",
        "年에",
        "\uff21\uff22",
        "각",
        "옛 \uff21\uff22",
        "e\u0301lan",
    ]
    examples = [question(context, answer) for answer in answers]
    examples.append(question(context, " \U0001f370 가게로,\u3000"))  # with spaces around it
    features = TASK.tokenize(tokenizer, examples, [], 400, 8)
    for text, right in zip(
        get_target_texts(features, examples), [*answers, "\U0001f370 가게로,"], strict=True
    ):
        assert right in text
        assert len(text) <= len(right) + 5  # a token is at most as long as a word
    assert len(features.cut) == len(features.lost) == 0


def test_tokens_that_include_a_space_do_not_change_the_answer():
    context = "그는 서울 역 (옛 역) 앞에 산다"
    tokenizer = make_tokenizer([context])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.backend_tokenizer.model = models.WordLevel(
        {token: i for i, token in enumerate(SPECIAL)}, "[UNK]"
    )
    assert tokenizer(context, return_offsets_mapping=True)["offset_mapping"][1:3] == [
        (0, 2),
        (2, 5),
    ]  # " 서울"
    examples = [question(context, answer) for answer in ("서울", " 서울 ", "서울 역 ")]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    assert get_target_texts(features, examples) == [" 서울", " 서울", " 서울 역"]
    logits = numpy.where(features.tokens["start"] == 2, 5.0, 0.0)
    assert [(a["answer"], a["start"]) for a in answer_for_logits(features, logits, logits, examples)] == [
        ("서울", 3)
    ] * 3


def test_answer_ends_with_its_last_token():
    context = "역(驛)은 서울이다."
    tokenizer = make_tokenizer([context, "무엇?"] * 2)
    examples = [question(context, "驛")]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    logits = numpy.where(features.tokens["start"] == 2, 5.0, 0.0)
    assert answer_for_logits(features, logits, logits, examples)[0]["answer"] == "驛"


def test_model_without_token_types_gets_none():
    context, _ = make_numbered(5)
    tokenizer = make_tokenizer([context, "무엇?"], names=("input_ids", "attention_mask"))
    features = TASK.tokenize(tokenizer, [question(context, "w3")], [], 32, 8)
    assert set(features.tokens) == {"input_ids", "start", "end"}


def test_question_without_a_known_answer_has_windows_but_no_loss():
    context, tokenizer = make_numbered(60)
    example = TASK.make_example(["무엇?", context])
    assert (example.question, example.context) == TASK.get_texts(example) == ("무엇?", context)
    features = TASK.tokenize(tokenizer, [example], [], 32, 8)
    assert len(features.example) > 1 and not features.values["units"].any()
    assert len(features.cut) == len(features.lost) == 0


# --- the best span ---


def search_spans(starts, ends, starts_of, ends_of):
    """The best spans of a window, found one at a time."""
    spans = []
    for i in range(len(starts)):
        for j in range(i, min(i + MAX_ANSWER, len(starts))):
            if starts_of[i] >= 0 and starts_of[j] >= 0:
                spans.append((starts[i] + ends[j], starts_of[i], ends_of[j]))
    return sorted(spans, key=lambda span: -span[0])[:TOP_SPANS]


def test_best_spans_match_an_exhaustive_search():
    context, tokenizer = make_numbered(200)
    examples = [
        question(context, "w3"),
        question("w1 w2 w3", "w2"),
        question(context, "w199", text="무엇? " * 20),
    ]
    features = TASK.tokenize(tokenizer, examples, [], 120, 30)
    batch = features.batch(torch.arange(len(features.example)), TASK.padding)
    generator = torch.Generator().manual_seed(1)
    starts, ends = torch.randn(2, *batch.tokens["start"].shape, generator=generator)
    # the highest scores would be an end before its start, the question, and the padding
    ends[:, 10], starts[:, -1], starts[:, 1], ends[:, 2] = 50, 50, 90, 90
    predictions = get_spans(SimpleNamespace(start_logits=starts, end_logits=ends), batch)
    assert len(predictions) == len(batch.tokens["start"]) > 4
    for row, spans in enumerate(predictions):
        expected = search_spans(
            *(column[row].tolist() for column in (starts, ends, batch.tokens["start"], batch.tokens["end"]))
        )
        assert numpy.allclose(spans, expected)
        assert (spans[:, 2] > spans[:, 1]).all()
    assert {len(spans) for spans in predictions} == {TOP_SPANS, 6}  # three words have only six spans


def test_logits_in_bf16_are_added_in_fp32():
    context, tokenizer = make_numbered(30)
    features = TASK.tokenize(tokenizer, [question(context, "w3")], [], 64, 8)
    batch = features.batch(torch.arange(1), TASK.padding)
    logits = torch.zeros(batch.tokens["start"].shape, dtype=torch.bfloat16)
    logits[0, 6], logits[0, 7] = 256, 1
    (spans,) = get_spans(SimpleNamespace(start_logits=logits, end_logits=logits), batch)
    assert spans[:2, 0].tolist() == [512, 257]


def test_answer_is_the_best_over_all_windows():
    context, tokenizer = make_numbered(60)
    examples = [question("w1 w2", "w1"), question(context, "w40")]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    starts, ends = numpy.zeros(len(features.tokens["start"])), numpy.zeros(len(features.tokens["start"]))
    here = context.index("w2"), context.index("w40")
    second = numpy.repeat(features.example, features.lengths) == 1
    for place, score in zip(here, (3.0, 9.0), strict=True):
        starts[second & (features.tokens["start"] == place)] = score
        ends[second & (features.tokens["start"] == place)] = score
    answers = answer_for_logits(features, starts, ends, examples)
    assert answers[1]["answer"] == "w40" and answers[1]["start"] == here[1]
    assert answers[1]["score"] > 0.99
    # two words have three equally good spans: the first, with a third of the probability
    assert answers[0]["score"] == pytest.approx(1 / 3, abs=1e-6)


def test_span_shared_by_two_windows_is_one_answer():
    context, tokenizer = make_numbered(60)
    examples = [question(context, "w15")]
    features = TASK.tokenize(tokenizer, examples, [], 32, 16)
    logits = numpy.where(features.tokens["start"] == context.index("w15"), 20.0, 0.0)
    assert (logits > 0).sum() == 2
    (answer,) = answer_for_logits(features, logits, logits, examples)
    assert answer["answer"] == "w15" and answer["score"] > 0.99


@pytest.mark.parametrize("context", ["", " \n", "\x00"])
def test_blank_context_has_an_empty_answer(context):
    _, tokenizer = make_numbered(5)
    examples = [TASK.make_example(["무엇?", context])]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    logits = numpy.zeros(len(features.tokens["start"]))
    assert answer_for_logits(features, logits, logits, examples) == [{"answer": "", "start": 0, "score": 0.0}]


def test_loss_does_not_depend_on_padding():
    context, tokenizer = make_numbered(60)
    examples = [question("w1 w2", "w1"), question(context, "w40")]
    features = TASK.tokenize(tokenizer, examples, [], 100, 8)
    batch = features.batch(torch.arange(2), TASK.padding)
    starts, ends = torch.randn(2, *batch.tokens["start"].shape, generator=torch.Generator().manual_seed(1))
    starts[0, -1] = ends[0, -1] = 50  # at padding
    together = TASK.compute_loss(SimpleNamespace(start_logits=starts, end_logits=ends), batch)
    alone = []
    for number, length in enumerate(features.lengths):
        output = SimpleNamespace(
            start_logits=starts[number, None, :length], end_logits=ends[number, None, :length]
        )
        alone.append(TASK.compute_loss(output, features.batch(torch.tensor([number]), TASK.padding)))
    assert together == pytest.approx(sum(alone) / 2)
    # w1 is the fifth token of the first window
    first = [torch.log_softmax(logits[0, : features.lengths[0]], -1)[4] for logits in (starts, ends)]
    assert alone[0] == pytest.approx(-sum(first) / 2)


# --- scores ---


def test_metric_that_selects_the_epoch_fits_the_language():
    korean, english = (
        Question("q", "", "", "", [Answer(text, 0)]) for text in ("서울은 대한민국의 수도(Seoul)", "Beatles")
    )
    assert (
        TASK.choose_metric([korean, korean, english]) == "f1_char"
        and TASK.choose_metric([english]) == "f1_word"
    )
    assert TASK.choose_metric([Question("q", "", "", "", [Answer("1998", 0)])]) == "f1_char"
    answers = [{"answer": "The Beatles"}]
    assert TASK.score([english], answers) == {
        "exact_match": 1,
        "f1_char": pytest.approx(2 * 7 / 17),
        "f1_word": 1,
    }
    args, run = SimpleNamespace(tensor_parallel=1), SimpleNamespace(world=ALONE, device=torch.device("cpu"))
    steps = Steps(TASK, torch.nn.Linear(1, 1), [], args, run)
    for example, best in ((korean, "f1_char"), (english, "f1_word")):
        steps._sets["validation"] = [example], None, None
        assert steps.metric == best


# --- questions without an answer (SQuAD 2.0) ---


def test_question_without_an_answer_points_at_cls_and_counts_in_the_loss():
    context, tokenizer = make_numbered(60)
    examples = [
        replace(question(context, "w40"), optional=True),
        Question("q", "", context, "무엇?", UNANSWERABLE, True),
    ]
    features = TASK.tokenize(tokenizer, examples, [], 32, 8)
    texts = get_target_texts(features, examples)
    assert [text for text, number in zip(texts, features.example, strict=True) if number == 1] == [None] * (
        len(texts) // 2
    )
    assert features.values["units"].all() and not len(features.lost)
    assert all(features.tokens["start"][start] == NO_ANSWER for start in features.starts[:-1])


@pytest.mark.parametrize(("cls", "answer"), [((9.0, 9.0), ""), ((9.0, 2.0), "w40"), ((3.0, 3.0), "w40")])
def test_no_answer_is_given_if_it_scores_higher_in_every_window(cls, answer):
    """The lowest score of [CLS] over all windows counts; the span has 2 * 3."""
    context, tokenizer = make_numbered(40 + 8)
    example = question(context, "w40")
    for optional in (True, False):
        features = TASK.tokenize(tokenizer, [replace(example, optional=optional)], [], 38, 8)
        assert len(features.example) == 2
        logits = numpy.where(features.tokens["start"] == context.index("w40"), 3.0, 0.0)
        logits[features.starts[:2]] = cls
        (found,) = answer_for_logits(features, logits, logits, [example])
        assert found["answer"] == (answer if optional else "w40")
        assert context.startswith(found["answer"], found["start"])


def test_scores_of_questions_with_and_without_an_answer():
    examples = [
        Question("1", "", "", "", [Answer("old town", 0)], True),
        Question("2", "", "", "", UNANSWERABLE, True),
    ]
    scores = TASK.score(examples, [{"answer": "old"}, {"answer": ""}])
    assert scores["exact_match"] == 0.5 and scores["f1_word"] == pytest.approx((2 / 3 + 1) / 2)
    assert (scores["exact_match/HasAns"], scores["exact_match/NoAns"]) == (0, 1)
    assert (scores["f1_word/HasAns"], scores["f1_word/NoAns"]) == (pytest.approx(2 / 3), 1)
    assert TASK.score(examples, [{"answer": "old town"}, {"answer": "old"}])["f1_word"] == 0.5


def test_scores_are_means_over_the_questions():
    examples = [Question(str(i), "글", "", "", [Answer("서울", 0)]) for i in range(4)]
    scores = TASK.score(examples, [{"answer": text} for text in ("서울", "서울", "서울에서", "부산")])
    assert scores == {"exact_match": 0.5, "f1_char": pytest.approx((1 + 1 + 2 / 3) / 4), "f1_word": 0.5}
    assert TASK.selection_metric in scores


# --- real data ---


@pytest.fixture(scope="module")
def korquad():
    if not KORQUAD.exists():
        pytest.skip(f"no {KORQUAD.name} in {KORQUAD.parent}: HPCTRAIN_TEST_DATA names a folder that has it")
    return split_examples(TASK, TASK.read(KORQUAD), 0.2, seed=1)


@pytest.mark.slow
def test_every_korquad_answer_is_in_a_window(korquad, capsys):
    train, validation = korquad
    tokenizer = make_tokenizer({text for example in train for text in TASK.get_texts(example)})
    for name, examples in (("train", train), ("validation", validation)):
        features = TASK.tokenize(tokenizer, examples, [], TASK.max_length, TASK.stride)
        assert sorted(set(features.example.tolist())) == list(range(len(examples)))
        spans = [set() for _ in examples]
        for number, span in zip(features.example, get_targets(features), strict=True):
            spans[number] |= {span} - {None}
        exactly = covered = longer = 0
        for number, (example, found) in enumerate(zip(examples, spans, strict=True)):
            (right,) = example.answers
            if not found:
                longer += 1
                assert number in features.lost
                continue
            ((start, end),) = found  # the same in every window that contains it
            text = example.context[start:end]
            exactly += text == right.text
            if text != right.text:
                covered += 1
                # The fewest tokens: those of the context, tokenized alone, that have a character of the
                # answer.
                tokens = tokenizer(example.context, add_special_tokens=False, return_offsets_mapping=True)[
                    "offset_mapping"
                ]
                over = [(a, b) for a, b in tokens if a < right.start + len(right.text) and b > right.start]
                assert (start, end) == (over[0][0], over[-1][1])
                assert right.text.strip() in text
        assert exactly + covered + longer == len(examples)
        with capsys.disabled():
            print(
                f"\nKorQuAD {name}: {len(examples):,} questions, {len(features.example):,} windows; answers: "
                f"{exactly:,} come back exactly, {covered:,} with the rest of a token, "
                f"{longer:,} are longer than a window"
            )
        assert longer == 0
    assert len(train) + len(validation) == 5774


@pytest.mark.slow
def test_every_korquad_answer_is_in_a_shorter_window(korquad):
    _, validation = korquad
    tokenizer = make_tokenizer({text for example in validation for text in TASK.get_texts(example)})
    for max_length, stride in ((64, 16), (150, 50)):
        features = TASK.tokenize(tokenizer, validation, [], max_length, stride)
        pointing = features.example[features.values["start_positions"] > 0]
        lost = sorted(set(range(len(validation))) - set(pointing.tolist()))
        assert set(lost) <= set(features.lost.tolist())
        # Only an answer longer than what two windows share may be in neither.
        assert all(
            len(tokenizer.tokenize(validation[number].answers[0].text)) > stride - 2 for number in lost
        )


@pytest.mark.slow
def test_small_bert_memorizes_the_sample_data():
    examples = load_splits(TASK, None)["train"][:15]
    tokenizer = make_tokenizer(
        [text for example in examples for text in TASK.get_texts(example)], vocabulary=500
    )
    features = TASK.tokenize(tokenizer, examples, [], 64, 16)
    assert len(features.example) > len(examples)
    torch.manual_seed(1)
    model = BertForQuestionAnswering(
        BertConfig(
            vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    # Without a decay, the loss has peaks, and the last step can be at one.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=150)
    batch = features.batch(
        torch.arange(len(features.example)), {**TASK.padding, "input_ids": tokenizer.pad_token_id}
    )
    inputs = batch.model_inputs(without=TASK.extra)
    for _ in range(150):
        TASK.compute_loss(model(**inputs), batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        output = model(**inputs)
    answers = TASK.make_answers(examples, features, get_spans(output, batch), [])
    # The fewest tokens that cover the answer: the model cannot come closer.
    closest = {
        number: text
        for number, text in zip(features.example, get_target_texts(features, examples), strict=True)
        if text
    }
    assert sum(answer["answer"] == closest[number] for number, answer in enumerate(answers)) >= 0.9 * len(
        examples
    ), answers
    assert TASK.score(examples, answers)["f1_char"] > 0.85
    assert all(
        example.context.startswith(a["answer"], a["start"])
        for example, a in zip(examples, answers, strict=True)
    )
