"""Invalid sweep files."""

import pytest

from hpctrain.commands.sweep import file
from hpctrain.errors import UsageError
from tests.commands.sweep.helpers import FILE, write


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("metric: test_accuracy", "", "metric is missing"),
        ("metric", "metrics", "there is no key 'metrics'"),
        ("train_single", "check", "command 'check'"),
        ("--epochs 1", "--out=x", "--out and --resume are the sweep's own"),
        ("  seed: {", "  resume: {", "--out and --resume are the sweep's own"),
        ("--epochs 1", "--lr=3", "parameter lr is in command as well"),
        ("maximize", "up", "direction 'up'"),
        ("TRIALS", "0", "trials 0"),
        ("TRIALS", "1000000000", "trials 1000000000"),
        ("metric: test_accuracy", r'metric: "\e[2J"', r"metric '\x1b[2J'"),
        ("TRIALS", "4\nsampler: annealing", "sampler 'annealing'"),
        ("TRIALS", "4\nsampler: grid", "parameter lr"),
        ("TRIALS", "4\npruner: mean", "pruner 'mean'"),
        ("TRIALS", "4\nseed: a", "seed 'a'"),
        ("low: 1e-3", "low: 1", "parameter lr"),
        ("low: 1e-3", "low: 0", "parameter lr"),
        ("low: 1e-3", "low: many", "parameter lr"),
        ("[stop, skip]", "[]", "parameter on-nan"),
        ("[stop, skip]", "[[1]]", "parameter on-nan"),
        ("--epochs 1", "--name 'x", "give a command line as command"),
        ("low: 1e-3", "low: -.inf", "parameter lr"),
        ("log: true", "step: 0", "parameter lr"),
        ("log: true", "log: no", "parameter lr"),  # a text in YAML 1.2
        ("command: train_single", "command: 3 #", "give a command line as command"),
        ("command: train_single", "command: ' ' #", "give a command line as command"),
        ("parameters:\n", "parameters: 5\nseed: 1 #", "cannot be read as YAML"),
        (
            FILE,
            "{command: a, metric: b, direction: c, parameters: 5}",
            "give a command line as command, and the range",
        ),
        (FILE, "- a", "not a list of keys and values"),
        (FILE, "a: [", "cannot be read as YAML"),
        (
            FILE,
            "a: &a [1]\nseed: [*a, *a]",
            "cannot be read as YAML (it has an alias: write its value instead)",
        ),
        (FILE, "", "not a list of keys and values"),
    ],
)
def test_invalid_files_are_one_line(tmp_path, before, after, message):
    with pytest.raises(UsageError) as caught:
        file.read_file(write(tmp_path, FILE.replace(before, after)))
    assert message in str(caught.value)


@pytest.mark.parametrize("words", ["on, off", "yes, no", "ON, Off", "y, n", "'on', 'off'"])
def test_words_that_yaml_1_1_takes_for_true_and_false_are_values(tmp_path, words):
    """--tf32 on and off became --tf32 without a value, and a trial without it."""
    text = FILE.replace("on-nan: {values: [stop, skip]}", f"on: {{values: [{words}]}}")
    parameters = file.read_file(write(tmp_path, text)).parameters
    assert parameters["on"]["values"] == words.replace("'", "").split(", ")
    text = FILE.replace("[stop, skip]", "[true, false]")
    assert file.read_file(write(tmp_path, text)).parameters["on-nan"]["values"] == [True, False]
