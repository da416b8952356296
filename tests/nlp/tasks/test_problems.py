"""--problem: several classes of a text (multi-label), and a number as the label (regression)."""

import json
import os
import shutil
from dataclasses import replace

import numpy
import pandas
import pytest
from scipy.stats import pearsonr
from transformers import AutoConfig, pipeline

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp import serve
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.tasks import classify, pair
from tests.nlp.helpers import metrics, result, run_predict, scores, train
from tests.tools import warm_start

MANY, NUMBER = classify.TASK.for_problem("multi-label"), pair.TASK.for_problem("regression")
COLORS = {"하늘": "파랑", "바다": "파랑,물", "눈": "하양,물", "숲": "초록", "돌": ""}


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """Words of nature, and the classes of each."""
    folder = tmp_path_factory.mktemp("colors")
    for name, times in (("train", 24), ("dev", 4), ("test", 4)):
        rows = [
            {"text": f"{word} {i}", "label": label} for i in range(times) for word, label in COLORS.items()
        ]
        pandas.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def similar(tmp_path_factory):
    """Pairs in the format of KorSTS: 5.0 for the same word twice, else a number from the first word."""
    folder = tmp_path_factory.mktemp("similar")
    words = [*COLORS]
    for name, times in (("train", 20), ("dev", 4), ("test", 4)):
        rows = ["genre\tfilename\tyear\tid\tscore\tsentence1\tsentence2"]
        for i in range(times):
            for n, word in enumerate(words):
                other = words[(n + 1 + i) % len(words)]
                rows.append(
                    f'main\tx\t2012\t{i}\t{5.0 if other == word else n / 2:.3f}\t{word} "{i}\t{other}'
                )
        (folder / f"sts-{name}.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def many(colors, config, tmp_path_factory):
    options = ("--columns", "text=text", "--problem=multi-label", "--epochs=12", "--batch-size=8")
    options += ("--lr=5e-3",)
    out = tmp_path_factory.mktemp("many") / "run"
    return train("classify", out, *options, "--data", colors, "--from-scratch", config)


REGRESSION = ("--problem", "regression", "--batch-size", 10, "--lr", 5e-3)


@pytest.fixture(scope="module")
def number(similar, config, tmp_path_factory):
    out = tmp_path_factory.mktemp("number") / "run"
    return train("pair", out, *REGRESSION, "--epochs", 8, "--data", similar, "--from-scratch", config)


@pytest.mark.slow
def test_a_resume_with_another_problem_is_refused_by_its_name(number, tmp_path):
    """Its model has another last layer, whose size says nothing to the user who gave the wrong option."""
    run = shutil.copytree(number, tmp_path / "run")
    rows = [{"sentence1": "빨강", "sentence2": "파랑", "gold_label": i % 2} for i in range(40)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [*REGRESSION[2:], "--epochs", 8, "--data", path, "--from-scratch", "tiny", "--resume", "auto"]
    with pytest.raises(
        HpctrainError, match=r"of another model: .*, because of .*--problem None instead of regression"
    ):
        train("pair", run, *words)


# --- scores ---


def test_an_answer_has_the_classes_that_are_as_probable_as_not():
    (answer,) = MANY.make_answers([None], None, [numpy.array([0.5, 0.4999, 0.9])], ["a", "b", "c"])
    assert answer == {"labels": ["c", "a"], "probabilities": [0.9, 0.5]}


def test_scores_without_a_class_are_zero():
    nothing = MANY.score([replace(MANY.make_example(["a"]), label=())] * 2, [{"labels": []}] * 2)
    assert nothing == {"f1_micro": 0, "f1_macro": 0, "exact_match": 1}


# --- training, and the use of the model ---


@pytest.mark.slow
def test_several_classes_are_learned_and_a_pipeline_gives_the_answers(many, colors, capfd):
    assert scores(many)["test_f1_micro"] == scores(many)["test_exact_match"] == 1
    assert "4 labels: 물, 초록, 파랑, 하양" in (many / "logs/rank-0000.log").read_text()
    answers = run_predict(capfd, many, *(f"{word} 3" for word in COLORS))
    assert [sorted(answer["labels"]) for answer in answers] == [
        sorted(filter(None, label.split(","))) for label in COLORS.values()
    ]
    assert AutoConfig.from_pretrained(many / "model").problem_type == "multi_label_classification"
    found = pipeline("text-classification", str(many / "model"), top_k=None)([f"{word} 3" for word in COLORS])
    for answer, row in zip(answers, found, strict=True):
        kept = {each["label"]: each["score"] for each in row if each["score"] >= 0.5}
        assert kept == pytest.approx(
            dict(zip(answer["labels"], answer["probabilities"], strict=True)), abs=1e-5
        )
    card = (many / "model/README.md").read_text()
    assert "| test_f1_macro | 1.0000 |" in card
    assert serve.show_answer(("a",), {"labels": ["물", "<b>"], "probabilities": [0.9, 0.6]}, {}).startswith(
        "물<small>90.0%</small>\n&lt;b"
    )
    assert "no class" in serve.show_answer(("a",), {"labels": [], "probabilities": []}, {})


def test_numbers_are_learned_and_a_pipeline_gives_them(number, similar, capfd):
    assert scores(number)["test_pearson"] > 0.8 and scores(number)["test_spearman"] > 0.7
    rows = load_splits(NUMBER, similar)["test"]
    texts = [text for row in rows for text in (row.first, row.second)]
    answers = [answer["score"] for answer in run_predict(capfd, number, *texts)]
    gold = [row.label for row in rows]
    assert pearsonr(gold, answers).statistic == pytest.approx(scores(number)["test_pearson"], abs=1e-4)
    error = numpy.mean((numpy.array(gold) - answers) ** 2)
    assert scores(number)["test_loss"] == pytest.approx(error, rel=1e-4)
    config = AutoConfig.from_pretrained(number / "model")
    assert (config.problem_type, config.num_labels, config.id2label) == ("regression", 1, {0: "score"})
    found = pipeline("text-classification", str(number / "model"))(
        [{"text": row.first, "text_pair": row.second} for row in rows]
    )
    assert [each["score"] for each in found] == pytest.approx(answers, abs=1e-4)
    assert serve.show_answer(("a", "b"), {"score": 3.25}, {}) == "3.25"


@pytest.mark.slow
def test_models_are_trained_further_and_tested_again(many, number, colors, similar, tmp_path):
    options = ("--columns", "text=text", "--problem", "multi-label", "--data", colors)
    again = train("classify", tmp_path / "many", "--epochs", 0, *options, "--model", many / "model")
    assert scores(again) == pytest.approx(scores(many))
    again = train(
        "pair", tmp_path / "number", "--epochs=0", *REGRESSION, "--data", similar, "--model", number / "model"
    )
    assert scores(again) == pytest.approx(scores(number), rel=1e-5)
    of_pair = (*REGRESSION, "--data", similar, "--model", number / "model")
    for task, more in (("classify", (*options, "--model", many / "model")), ("pair", of_pair)):
        bf16 = train(
            task, tmp_path / f"bf16-{task}", *more, "--epochs", 1, "--lr", 1e-4, "--precision", "bf16"
        )
        assert result(bf16)["test_loss"] < 1
    # as one class of a text, with a new last layer
    other = train(
        "pair",
        tmp_path / "other",
        "--epochs",
        1,
        "--limit",
        40,
        "--batch-size",
        8,
        "--data",
        pair.TASK.samples,
        "--model",
        number / "model",
    )
    assert AutoConfig.from_pretrained(other / "model").num_labels == 3


@pytest.mark.slow
@pytest.mark.main_road
def test_two_ranks_and_parts_give_the_same_losses(similar, colors, config, tmp_path):
    of_classes = ("--problem", "multi-label", "--columns", "label=label", "--batch-size", 8)
    for task, parts, options in (
        ("pair", 5, (*REGRESSION, "--data", similar)),
        ("classify", 2, (*of_classes, "--data", colors)),
    ):
        options += ("--epochs", 1, "--from-scratch", config)
        alone = train(task, tmp_path / f"{task}-one", *options)
        words = [f"nlp.{task}", *map(str, options), "--accumulate", str(parts), "--out", f"{task}-two"]
        done = warm_start.run(warm_start.torchrun_ranks(2, words, dict(os.environ)), tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        losses = [
            [line["train_loss"] for line in metrics(run) if "train_loss" in line]
            for run in (alone, tmp_path / f"{task}-two")
        ]
        assert len(losses[0]) == 5 and losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert result(alone)["test_loss"] == pytest.approx(
            result(tmp_path / f"{task}-two")["test_loss"], rel=1e-4
        )


# --- reading ---


def test_published_forms_of_numbers_and_classes(tmp_path, similar):
    row = load_splits(NUMBER, similar)["train"][1]
    assert (row.first, row.second, row.label) == ('바다 "0', "눈", 0.5)
    sts = {"guid": "klue-sts-v1_train_00000", "source": "airbnb", "sentence1": "가", "sentence2": "나"}
    sts["labels"] = {"label": 3.7, "real-label": 3.714285714285714, "binary-label": 1}
    path = tmp_path / "klue-sts-v1.1_train.json"
    path.write_text(json.dumps([sts]))
    pair_of_sts = NUMBER.read(path)[0]
    assert (pair_of_sts.first, pair_of_sts.second, pair_of_sts.label) == ("가", "나", 3.7)
    assert pair.TASK.read(path)[0].label == "1"
    lines = tmp_path / "a.jsonl"
    labels = (["b", "a", "b"], [], "x, 3", "[x], y")
    lines.write_text("".join(json.dumps({"text": "가", "label": label}) + "\n" for label in labels))
    assert [example.label for example in MANY.read(lines)] == [("a", "b"), (), ("3", "x"), ("[x]", "y")]
    pandas.DataFrame({"text": ["가", "나"], "label": [[1, 0], []]}).to_parquet(tmp_path / "a.parquet")
    found = MANY.read(tmp_path / "a.parquet", None, {"text": "text", "label": "label"})
    assert [example.label for example in found] == [("0", "1"), ()]
    pandas.DataFrame({"text": ["가", "나"], "label": [1.5, 2]}).to_parquet(tmp_path / "b.parquet")
    found = classify.TASK.for_problem("regression").read(
        tmp_path / "b.parquet", None, {"text": "text", "label": "label"}
    )
    assert [example.label for example in found] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        (classify.TASK, '{"text": "a", "label": 1.5}', "line 1: .* 1.5, .*--problem regression"),
        (classify.TASK, '{"text": "a", "label": ["b"]}', "line 1: .*--problem multi-label"),
        (MANY, '{"text": "a", "label": [1.5]}', "line 1: .* 1.5,"),
        *(
            (MANY, f'{{"text": "a", "label": {flags}}}', "line 1: .*0 or 1")
            for flags in ("[0, 1, 0]", "[0.0, 1.0]", "[true, false, false]")
        ),
        *(
            (MANY, f'{{"text": "a", "label": "{text}"}}', "line 1: .*text of a list")
            for text in ("['b', 'c']", "[]", " [0. 1.]")
        ),
        (MANY, '{"text": "a", "label": {"a": 1}}', "line 1 has no 'label'"),
        (MANY, '{"text": "a", "label": [""]}', "line 1: the label is empty"),
        (
            NUMBER,
            '{"premise": "a", "hypothesis": "b", "gold_label": "n/a"}',
            "line 1: the gold_label is .*'n/a'",
        ),
        (
            NUMBER,
            '{"premise": "a", "hypothesis": "b", "gold_label": true}',
            "line 1: the gold_label is .*True",
        ),
        (NUMBER, '{"premise": "a", "hypothesis": "b", "gold_label": NaN}', "line 1: the gold_label is .*nan"),
        (NUMBER, f'{{"premise": "a", "hypothesis": "b", "gold_label": {10**400}}}', "line 1: the gold_label"),
        (NUMBER, '{"premise": "a", "hypothesis": "b"}', "line 1: the gold_label is .*None"),
    ],
)
def test_labels_of_another_kind_are_one_line(task, line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(HpctrainError, match=message):
        task.read(path)


def test_options_that_do_not_fit(similar, tmp_path):
    with pytest.raises(HpctrainError, match="--problem regression"):
        load_splits(pair.TASK, similar)
    with pytest.raises(UsageError, match=r"--class-weights .*--problem regression"):
        parse_options(pair.TASK, ["--problem", "regression", "--class-weights", "balanced"])
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": []}\n' * 20)
    with pytest.raises(HpctrainError, match=r"no training example .*--data"):
        train(
            "classify",
            tmp_path / "run",
            "--data",
            tmp_path / "a.jsonl",
            "--from-scratch",
            "tiny",
            "--problem",
            "multi-label",
        )
