"""The options of a fine-tuning: their defaults, and which are refused."""

import pytest

from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from hpctrain.nlp.parser import make_parser, parse_options
from hpctrain.nlp.tasks import classify, generate, ner, pair, qa
from hpctrain.nlp.training import finetune


def test_only_tasks_with_one_label_have_weights():
    assert parse_options(pair.TASK, ["--class-weights", "balanced"]).class_weights == "balanced"
    assert parse_options(classify.TASK, []).class_weights is parse_options(ner.TASK, []).class_weights is None
    with pytest.raises(UsageError, match="unrecognized arguments: --class-weights"):
        parse_options(ner.TASK, ["--class-weights", "balanced"])
    with pytest.raises(UsageError, match="invalid choice: 'none'"):
        parse_options(classify.TASK, ["--class-weights", "none"])


def test_options_give_each_field_a_column():
    def columns(task, *texts):
        return parse_options(task, ["--data", "x", "--model", "y", "--columns", *texts]).columns

    assert columns(classify.TASK, "label=stars") == {"text": "text", "label": "stars"}
    assert columns(pair.TASK, "label=a=b", "second=two words") == {
        "first": "first",
        "second": "two words",
        "label": "a=b",
    }
    assert parse_options(classify.TASK, []).columns is None
    for texts in (["body=review"], ["text"], ["text="], ["text=a", "text=b"]):
        with pytest.raises(UsageError, match=r"--columns .*FIELD=COLUMN.* text, label"):
            columns(classify.TASK, *texts)
    with pytest.raises(UsageError, match="--columns needs --data"):
        parse_options(classify.TASK, ["--columns", "text=a"])
    assert all(
        "--columns" in make_parser(module.TASK).format_help()
        for module in (classify, pair, ner, qa, generate)
    )


def test_a_batch_that_the_ranks_cannot_share_is_refused_before_the_data_are_read():
    """Tokenizing may take hours."""
    world = World(0, 2, 0, 2, 0, 1, "torchrun")
    with pytest.raises(UsageError, match=r"--batch-size 33 .*2 ranks"):
        finetune.fine_tune(classify.TASK, world, ["--batch-size", "33"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "x"], "--data .*--model NAME.*--from-scratch"),
        (["--model", "a/b", "--from-scratch", "tiny"], "--model and --from-scratch"),
        (["--epochs", "-1"], "--epochs: -1"),
        (["--epochs", "x"], "--epochs: invalid int value: 'x'"),
        (["--warmup", "x"], "--warmup: invalid float value: 'x'"),
        (["--warmup", "2"], "--warmup: 2"),
        (["--batch-size", "0"], "--batch-size: 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        parse_options(classify.TASK, options)
