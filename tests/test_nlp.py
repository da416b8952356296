"""The five fine-tunings, whole: training, scores, the folder that comes out, and the errors that such programs are known for.

Small models, trained here from scratch, on the bundled samples. What belongs to one task is in test_nlp_ner.py and
test_nlp_qa.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hpctrain.nlp import classify, data, features, finetune, generate, ner, pair, predict, qa
from hpctrain.nlp.task import IGNORED
from hpctrain.world import HpctrainError, UsageError, World

TASKS = {module.TASK.name: module for module in (classify, pair, ner, qa, generate)}
ALONE = World(0, 1, 0, 1, 0, 1, "single")
# one that does not depend on chance, so that ways to the same numbers can be compared
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 600}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Tokenised texts of these tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_CACHE", str(folder))
        patch.setenv("MPLCONFIGDIR", str(folder))  # or a run in this process sets it, for the tests after these too
        yield folder / "features"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({"model_type": "bert"} | SHAPE | NO_DROPOUT))
    return path


def train(task, out, *options):
    """Run a fine-tuning in this process; returns its folder."""
    hook = sys.excepthook
    try:
        TASKS[task].main(ALONE, [*map(str, options), "--out", str(out)])
    finally:
        sys.excepthook = hook  # of the log of the run
    return out


def result(folder):
    return json.loads((folder / "result.json").read_text())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scores(folder, of="test_"):
    return {name: value for name, value in result(folder).items() if name.startswith(of)}


def validations(folder):
    return [line for line in metrics(folder) if "validation_loss" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config):
    """A run of four epochs, by which others are measured."""
    return train("classify", tmp_path_factory.mktemp("trained") / "run", *FOUR, "--from-scratch", config)


FOUR = ("--epochs", 4, "--batch-size", 8, "--lr", 2e-3)


# --- training ---


def test_the_learning_rate_warms_up_and_goes_down_to_zero_step_by_step(trained):
    rates = [line["learning_rate"] for line in metrics(trained) if "learning_rate" in line]
    top = rates.index(max(rates))
    assert 1e-3 < rates[top] <= 2e-3 and top < len(rates) // 2
    assert rates[: top + 1] == sorted(set(rates[: top + 1])) and rates[top:] == sorted(set(rates[top:]), reverse=True)
    assert rates[-1] < 0.1 * rates[top]


def test_the_parts_of_a_batch_do_not_change_the_numbers(trained, config, tmp_path):
    """Neither of classes, nor where the loss is a mean over tokens and the parts have different numbers of them."""
    in_parts = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config, "--accumulate", 4)
    assert [line["step"] for line in metrics(in_parts)] == [line["step"] for line in metrics(trained)]
    for name, value in scores(trained).items():
        assert scores(in_parts)[name] == pytest.approx(value, abs=1e-4), name
    for task in ("ner", "qa"):
        options = ["--epochs", 1, "--batch-size", 8, "--lr", 1e-3, "--limit", 40, "--from-scratch", config]
        runs = [train(task, tmp_path / f"{task}{parts}", *options, "--accumulate", parts) for parts in (1, 4)]
        losses = [[line["train_loss"] for line in metrics(run) if "train_loss" in line] for run in runs]
        assert losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-5), task
        assert scores(runs[1])["test_loss"] == pytest.approx(scores(runs[0])["test_loss"], rel=1e-4), task


def test_the_batch_size_is_what_is_computed(trained):
    epoch = validations(trained)[0]["step"]
    examples = int((trained / "logs/rank-0000.log").read_text().split("train: ")[1].split(" examples")[0].replace(",", ""))
    assert epoch == examples // 8


def test_bf16_learns_as_fp32_does(trained, config, tmp_path):
    """Lightning itself refuses to clip gradients for a fused optimizer in bf16."""
    half = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config, "--precision", "bf16")
    assert load_file(half / "model/model.safetensors")["classifier.weight"].dtype == torch.float32
    assert result(half)["weights_sha256"] != result(trained)["weights_sha256"]
    assert scores(half)["test_loss"] == pytest.approx(scores(trained)["test_loss"], rel=0.05)


def test_dropout_is_at_work_from_the_first_step():
    """from_pretrained() gives a model in eval mode, and Lightning leaves it so."""
    args = finetune.parse(classify.TASK, ["--epochs", "1"])
    assert args.from_scratch == "tiny"
    folder = Path(os.environ["HPCTRAIN_CACHE"]) / "tiny"
    finetune.models.from_scratch(folder, "tiny", "bert", ["한 줄", "두 줄"], 1, 128)
    model = finetune.load_model(classify.TASK, folder, finetune.models.tokenizer_of(folder), ["0", "1"], args)
    assert model.training and model.config.hidden_dropout_prob > 0
    ids = torch.tensor([[2, 5, 6, 3]])
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("task", ["classify", "generate"])
def test_a_run_that_was_cut_off_goes_on_to_the_same_weights(task, tmp_path):
    """With dropout, and though another epoch was the best one before."""
    options = ["--epochs", 3, "--batch-size", 8, "--limit", 40, "--from-scratch", "tiny"]
    whole = train(task, tmp_path / "whole", *options)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for gone in ("checkpoints/epoch-0002.pt", "checkpoints/epoch-0003.pt", "result.json", "model/model.safetensors"):
        (cut / gone).unlink()
    train(task, cut, *options, "--resume", cut)
    states = [torch.load(run / "checkpoints/epoch-0003.pt", weights_only=True)["model"] for run in (whole, cut)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert result(cut)["weights_sha256"] == result(whole)["weights_sha256"] and scores(cut) == scores(whole)


def test_the_best_epoch_is_kept_by_the_validation_set(tmp_path):
    """With a learning rate that is far too high the last epoch is not it."""
    run = train("classify", tmp_path / "run", "--epochs", 3, "--batch-size", 8, "--lr", 5e-3)
    said = [line["validation_accuracy"] for line in validations(run)]
    best = said.index(max(said)) + 1
    state = torch.load(run / f"checkpoints/epoch-{best:04d}.pt", weights_only=True)["model"]
    kept = load_file(run / "model/model.safetensors")
    assert (run / "model/model.safetensors").stat().st_mode == (run / "model/config.json").stat().st_mode
    assert kept and all(torch.equal(kept[name], state[name]) for name in kept)


# --- scores ---


def test_all_scores_are_in_the_metrics_the_board_and_the_card(trained):
    names = {f"{part}_{name}" for part in ("validation", "test") for name in ("loss", "accuracy", "precision", "recall", "f1")}
    assert {name for line in metrics(trained) for name in line} >= names | {"train_loss", "learning_rate"}
    board = EventAccumulator(str(trained / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) >= names
    card = (trained / "model/README.md").read_text()
    assert f"| test_accuracy | {result(trained)['test_accuracy']:.4f} |" in card
    assert (trained / "curves.png").stat().st_size > 10_000


def test_the_test_set_is_scored_once_at_the_end_and_changes_nothing_before(trained, config, tmp_path):
    assert [("test_loss" in line) for line in metrics(trained)] == [False] * (len(metrics(trained)) - 1) + [True]
    folder = tmp_path / "data"
    shutil.copytree(data.SAMPLES / "classify", folder)
    lines = (folder / "ratings_test.txt").read_text().splitlines()
    (folder / "ratings_test.txt").write_text("\n".join(lines[:9]) + "\n")
    other = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config, "--data", folder)
    assert result(other)["weights_sha256"] == result(trained)["weights_sha256"]
    said = [[line["validation_loss"] for line in validations(run)] for run in (other, trained)]
    assert said[0] == said[1] and len(said[0]) == 4


def test_scores_are_of_the_whole_set_and_of_each_example_once():
    examples = [data.Document("", "", label) for label in "0001112"]
    answers = [{"label": label} for label in "0010110"]
    found = classify.TASK.metric(examples, answers)
    assert found["accuracy"] == pytest.approx(4 / 7)
    # by hand: class 0 has 2 of 4 right out of 3, class 1 2 of 3 out of 3, class 2, which training may never have had, none
    assert found["precision"] == pytest.approx((2 / 4 + 2 / 3 + 0) / 3) and found["recall"] == pytest.approx(
        (2 / 3 + 2 / 3 + 0) / 3
    )


@torch.no_grad()
def test_perplexity_counts_each_token_of_the_text_once_and_no_padding(tmp_path):
    folder = tmp_path / "gpt"
    passages = [*data.load("generate", None)["train"][:12], data.Passage("긍정: ", "좋다")]
    finetune.models.from_scratch(folder, "tiny", "gpt2", [p.text for p in passages], 1, 64)
    tokenizer = finetune.models.tokenizer_of(folder)
    model = generate.TASK.model.from_pretrained(folder).eval()

    def perplexity(max_length, batch_size):
        made = generate.TASK.tokenise(tokenizer, passages, [], max_length, 0)
        said = []
        for rows in torch.arange(len(made.lengths)).split(batch_size):
            batch = made.batch(rows, {**generate.TASK.padding, "input_ids": tokenizer.pad_token_id})
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            said += generate.TASK.predict(model(**inputs), batch)
        answers = generate.TASK.answers(passages, made, said, [])
        return generate.TASK.metric(passages, answers)["perplexity"], [answer["tokens"] for answer in answers]

    padded, tokens = perplexity(64, 13)
    alone, _ = perplexity(64, 1)
    assert padded == pytest.approx(alone, rel=1e-5)
    text = [len(tokenizer(p.text, add_special_tokens=False)["input_ids"]) + 1 for p in passages]
    assert tokens == text  # and the end; the prompt is given
    _, in_windows = perplexity(7, 4)
    assert in_windows == text


@pytest.mark.parametrize("task", TASKS)
def test_the_attention_mask_keeps_padding_out(task, tmp_path):
    """A text alone, and beside a longer one, gets the same answer."""
    examples = sorted(data.load(task, None)["train"][:20], key=lambda x: len("".join(TASKS[task].TASK.texts(x))))
    examples = [examples[0], examples[-1]]
    module = TASKS[task].TASK
    finetune.models.from_scratch(tmp_path / "model", "tiny", module.kind, [t for x in examples for t in module.texts(x)], 1, 512)
    tokenizer = finetune.models.tokenizer_of(tmp_path / "model")
    labels = module.labels(examples)
    args = finetune.parse(module, ["--epochs", "0"])
    model = finetune.load_model(module, tmp_path / "model", tokenizer, labels, args).eval()
    made = module.tokenise(tokenizer, examples, labels, module.max_length, module.stride)
    step = finetune.FineTune(module, model, labels, args, None, 1)
    padding = {**module.padding, "input_ids": tokenizer.pad_token_id}
    with torch.no_grad():
        alone, both = (step(made.batch(torch.tensor(rows), padding)) for rows in ([0], [0, len(made.lengths) - 1]))
    first = alone.start_logits if task == "qa" else alone.logits
    beside = both.start_logits if task == "qa" else both.logits
    width = () if task in ("classify", "pair") else (slice(None, first.shape[1]),)
    assert made.lengths[-1] > made.lengths[0]
    assert torch.allclose(beside[(slice(0, 1), *width)], first, atol=1e-5)


# --- tokenised once ---


def test_what_is_tokenised_is_kept_by_everything_that_it_depends_on():
    """Text, label, tokenizer, length, stride and task; a cache that forgets one of these trains on the wrong numbers."""
    rows = [("1", "글", "0"), ("2", "둘", "1")]
    parts = ["classify", '{"vocab": 1}', ["0", "1"], 128, 0, rows]
    changed = [
        ["pair", *parts[1:]],
        [parts[0], '{"vocab": 2}', *parts[2:]],
        [*parts[:2], ["1", "0"], *parts[3:]],
        [*parts[:3], 64, *parts[4:]],
        [*parts[:4], 16, parts[5]],
        [*parts[:5], [("1", "글", "1"), rows[1]]],
        [*parts[:5], rows[:1]],
        [*parts[:5], rows[::-1]],
        [*parts[:5], [("1", "글\0('2'", "0"), rows[1]]],
    ]
    keys = [features.fingerprint(*each) for each in [parts, *changed]]
    assert len(set(keys)) == len(keys) and keys[0] == features.fingerprint(*parts)


def test_a_second_run_finds_the_features_of_the_first_and_maps_them(trained, config, tmp_path, monkeypatch):
    monkeypatch.setattr(classify.Classify, "tokenise", lambda *_: pytest.fail("tokenised again"))
    again = train("classify", tmp_path / "run", *FOUR, "--from-scratch", config)
    assert result(again)["weights_sha256"] == result(trained)["weights_sha256"]
    found = features.cached("key", lambda: features.features({"input_ids": [[1, 2], [3]]}, {"units": [1, 1]}), ALONE)
    assert isinstance(found.tokens["input_ids"], numpy.memmap)
    assert found.batch(torch.tensor([1, 0]), {"input_ids": 9})["input_ids"].tolist() == [[3, 9], [1, 2]]


MAKE = """
import sys, time
from pathlib import Path
from hpctrain.nlp.features import cached, features
from hpctrain.world import detect, process_group, choose_device
world = detect()
def make():
    with Path(sys.argv[1]).open("a") as file:
        file.write(f"rank {world.rank}\\n")
    time.sleep(1)
    return features({"input_ids": [[1, 2, 3], [4]]}, {"units": [1, 1]})
with process_group(world, choose_device(world, "cpu")):
    found = cached("the key", make, world)
assert found.tokens["input_ids"].tolist() == [1, 2, 3, 4]
"""


@pytest.mark.slow
def test_one_rank_of_a_job_tokenises_and_two_jobs_may_do_it_at_once(tmp_path):
    (tmp_path / "make.py").write_text(MAKE)
    env = os.environ | {"HPCTRAIN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "make.py"]
    jobs = [subprocess.Popen([*command, name], cwd=tmp_path, env=env, stderr=subprocess.PIPE) for name in ("first", "second")]
    assert [(job.communicate()[1][-3000:], job.returncode)[1] for job in jobs] == [0, 0]
    for name in ("first", "second"):
        made = (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []
        assert made in (["rank 0"], [])
    assert (tmp_path / "first").exists() or (tmp_path / "second").exists()
    assert [path.name for path in (tmp_path / "cache/features").iterdir()] == ["the key"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(HpctrainError, match=r"file/features: the tokenised texts cannot be written .*set HPCTRAIN_CACHE"):
        features.cached("key", lambda: features.features({"input_ids": [[1]]}, {"units": [1]}), ALONE)


def test_a_broken_cache_is_named(cache):
    features.cached("broken", lambda: features.features({"input_ids": [[1]]}, {"units": [1]}), ALONE)
    (cache / "broken/starts.npy").write_bytes(b"")
    with pytest.raises(HpctrainError, match=r"broken: the tokenised texts cannot be read .*remove the folder"):
        features.cached("broken", lambda: None, ALONE)


# --- what comes out ---


def test_the_folder_is_a_model_of_transformers_with_the_names_of_the_labels(trained):
    model = AutoModelForSequenceClassification.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert model.config.id2label == {0: "0", 1: "1"} and model.config.label2id == {"0": 0, "1": 1}
    examples = data.load("classify", None)["test"]
    with torch.no_grad():
        said = [model(**tokenizer(example.text, return_tensors="pt")).logits.argmax().item() for example in examples]
    right = sum(model.config.id2label[i] == example.label for i, example in zip(said, examples, strict=True))
    assert right / len(examples) == pytest.approx(result(trained)["test_accuracy"])


def test_a_model_that_was_tuned_is_tested_and_tuned_again_with_its_own_labels(trained, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(data.SAMPLES / "classify", folder)
    lines = (folder / "ratings_train.txt").read_text().splitlines(keepends=True)
    only = [line for line in lines[1:] if line.rstrip("\n").endswith("\t1")]
    (folder / "ratings_train.txt").write_text("".join([lines[0], *only]))
    again = train("classify", tmp_path / "run", "--epochs", 0, "--model", trained / "model", "--data", folder)
    assert scores(again) == pytest.approx(scores(trained), abs=1e-6)
    with pytest.raises(HpctrainError, match="all training examples have the label '1'"):
        train("classify", tmp_path / "other", "--from-scratch", "tiny", "--data", folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model for each task, hardly trained."""
    folder = tmp_path_factory.mktemp("models")
    return {
        task: train(task, folder / task, "--epochs", 1, "--batch-size", 8, "--from-scratch", "tiny") / "model" for task in TASKS
    }


def ask(capfd, *arguments):
    """What `hpctrain predict` prints, in this process."""
    capfd.readouterr()
    predict.main(ALONE, [str(argument) for argument in arguments])
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


QUESTIONS = {
    "classify": ["또 보고 싶다", ""],
    "pair": ["비가 온다", "날씨가 맑다", "한 사람", "두 사람"],
    "ner": ["김민수는 서울에 산다", "둘"],
    "qa": ["누가 사나?", "김민수는 서울에 산다", "어디에?", "긴 글 " * 300],
    "generate": ["오늘은", "내일은"],
}
KEYS = {
    "classify": {"text", "label", "probability"},
    "pair": {"first", "second", "label", "probability"},
    "ner": {"text", "entities"},
    "qa": {"question", "context", "answer", "start", "score"},
    "generate": {"text", "generated"},
}


@pytest.mark.parametrize("task", TASKS)
def test_predict_answers_texts_and_files_alike(task, models, capfd, tmp_path):
    words = QUESTIONS[task]
    said = ask(capfd, models[task], *words)
    names = TASKS[task].TASK.inputs
    assert len(said) == 2 and all(set(each) == KEYS[task] for each in said)
    assert [text for each in said for text in (each[name] for name in names)] == words
    rows = [words[i : i + len(names)] for i in range(0, len(words), len(names))]
    (tmp_path / "texts.txt").write_text("".join("\t".join(row) + "\n" for row in rows))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    for name in ("texts.txt", "texts.jsonl"):
        assert ask(capfd, models[task].parent, "--file", tmp_path / name, "--out", tmp_path / "answers.jsonl") == []
        assert [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()] == said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "texts.jsonl", "texts.txt"]


def test_predict_says_what_the_test_set_was_scored_by(models, capfd, tmp_path):
    examples = data.load("classify", None)["test"]
    (tmp_path / "texts.txt").write_text("".join(example.text + "\n" for example in examples))
    said = ask(capfd, models["classify"], "--file", tmp_path / "texts.txt", "--batch-size", 5)
    assert classify.TASK.metric(examples, said)["accuracy"] == result(models["classify"].parent)["test_accuracy"]


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("pair", ["one text"], "1 texts, but pair takes first and second"),
        ("classify", [], "0 texts, but classify takes text"),
        ("classify", ["a", "--file", "b"], "texts and --file: give one of them"),
        ("classify", ["--file", "missing.txt"], "missing.txt: cannot be read"),
        ("classify", ["--file", "empty.txt"], "empty.txt: the file is empty"),
        ("pair", ["--file", "tabs.txt"], "tabs.txt, line 2: expected first and second, with a tab between them"),
        ("pair", ["--file", "broken.jsonl"], "broken.jsonl, line 1: expected an object with first and second"),
        ("classify", ["a", "--out", "missing/out"], "missing/out: cannot be written"),
    ],
)
def test_predict_says_what_is_wrong_with_what_it_is_asked(task, arguments, message, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("tabs.txt").write_text("a\tb\nc\n")
    Path("broken.jsonl").write_text('{"first": 1}\n')
    with pytest.raises(HpctrainError, match=re.escape(message)):
        predict.main(ALONE, [str(models[task]), *arguments])


def test_predict_refuses_a_folder_that_is_no_model_of_ours_and_one_that_is_broken(models, tmp_path):
    with pytest.raises(HpctrainError, match="not a model that hpctrain has fine-tuned"):
        predict.main(ALONE, [str(tmp_path), "text"])
    shutil.copytree(models["classify"], tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(HpctrainError, match="model: the model cannot be loaded"):
        predict.main(ALONE, [str(tmp_path / "model"), "text"])
    with pytest.raises(UsageError, match="predict is for one process, and 2 were started"):
        predict.main(World(0, 2, 0, 2, 0, 1, "torchrun"), [str(tmp_path), "text"])


# --- bad input ---


def broken(tmp_path, task="classify", **files):
    folder = tmp_path / "data"
    shutil.copytree(data.SAMPLES / task, folder)
    for name, text in files.items():
        path = folder / {"train": "ratings_train.txt", "test": "ratings_test.txt"}[name]
        path.write_text(path.read_text() + text)
    return folder


QUICK = ("--epochs", 1, "--batch-size", 8, "--from-scratch", "tiny", "--limit", 10_000)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train": "1\t한 줄\n"}, "1 example is left out"),
        ({"test": "1\t글\t7\n"}, "1 of .* examples with a label that training never had"),
        ({"train": "1\t" + "긴 글 " * 300 + "\t1\n"}, "1 of .* examples too long for --max-length 128"),
    ],
    ids=["broken line", "unseen label", "too long"],
)
def test_bad_lines_are_counted_and_said_or_refused_as_strict_asks(tmp_path, capsys, files, said):
    folder = broken(tmp_path, **files)
    name = {"train": "ratings_train.txt", "test": "ratings_test.txt"}[next(iter(files))]
    number = (folder / name).read_text().count("\n")
    train("classify", tmp_path / "run", *QUICK, "--data", folder, "--validation-split", 0.02)
    shown = capsys.readouterr().out
    assert re.search(said, shown) and f"{name}, line {number}" in shown, shown
    with pytest.raises(HpctrainError, match=rf"{name}, line {number}"):
        train("classify", tmp_path / "strict", *QUICK, "--data", folder, "--strict", "--validation-split", 0.02)


def test_a_loss_that_is_no_number_ends_the_run(config, tmp_path):
    with pytest.raises(HpctrainError, match=r"train_loss is nan at epoch \d, step \d+: .* take a smaller --lr .*run"):
        train("classify", tmp_path / "run", "--epochs", 3, "--batch-size", 8, "--lr", 1e30, "--from-scratch", config)
    assert not (tmp_path / "run/model").exists()


def test_the_test_part_of_a_single_file_does_not_move_with_the_seed():
    file = str(data.SAMPLES / "classify/ratings_train.txt")
    sets = [
        finetune.read(classify.TASK, finetune.parse(classify.TASK, ["--data", file, "--model", "x", "--seed", seed]), ALONE)
        for seed in ("1", "2")
    ]
    assert sets[0]["test"] == sets[1]["test"] and sets[0]["validation"] != sets[1]["validation"]
    assert not set(sets[0]["test"]) & {*sets[0]["train"], *sets[0]["validation"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "x"], "--data without a model: give --model NAME, such as beomi/kcbert-base, or --from-scratch"),
        (["--model", "a/b", "--from-scratch", "tiny"], "give one of them"),
        (["--epochs", "-1"], "epochs are 0 or more"),
        (["--warmup", "2"], "a share from 0 to 1"),
        (["--batch-size", "0"], "0 is not above zero"),
    ],
)
def test_flags_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        finetune.parse(classify.TASK, options)


def test_more_tokens_than_the_model_has_places_for_are_refused(trained, tmp_path):
    with pytest.raises(HpctrainError, match=r"--max-length 600, but .* has 512 positions: take --max-length 512"):
        train("classify", tmp_path / "run", "--model", trained / "model", "--max-length", 600)


def test_a_model_without_weights_of_its_own_is_refused(trained, tmp_path):
    """transformers makes new ones at random, and says so in a warning."""
    shutil.copytree(trained / "model", tmp_path / "model")
    state = load_file(tmp_path / "model/model.safetensors")
    save_file(
        {name: state[name] for name in state if "layer.1" not in name}, tmp_path / "model/model.safetensors", {"format": "pt"}
    )
    with pytest.raises(HpctrainError, match=r"model: 16 weights of a bert are not in it, such as bert\.encoder\.layer\.1"):
        train("classify", tmp_path / "run", "--model", tmp_path / "model")


def test_a_label_that_training_never_had_is_wrong_and_not_left_out():
    labels = ["0", "1"]
    examples = [data.Document("", "글", "7"), data.Document("", "글", "1")]
    finetune.models.from_scratch(Path(os.environ["HPCTRAIN_CACHE"]) / "seven", "tiny", "bert", ["글 글"], 1, 128)
    tokenizer = finetune.models.tokenizer_of(Path(os.environ["HPCTRAIN_CACHE"]) / "seven")
    made = classify.TASK.tokenise(tokenizer, examples, labels, 128, 0)
    assert made.values["labels"].tolist() == [IGNORED, 1] and made.values["units"].tolist() == [0, 1]
    assert classify.TASK.metric(examples, [{"label": "1"}, {"label": "1"}])["accuracy"] == 0.5
