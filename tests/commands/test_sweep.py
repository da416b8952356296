"""hpctrain sweep: suggestions, trials that are killed, the same search again, and a job array."""

import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from hpctrain.commands import sweep
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.run import reader
from tests.helpers import write_digits
from tests.tools import warm_start

FILE = """
command: train_single --data DATA --epochs 1 --batch-size 32
metric: test_accuracy
direction: maximize
trials: TRIALS
parameters:
  lr: {low: 1e-3, high: 0.1, log: true}
  seed: {low: 1, high: 3}
  on-nan: {values: [stop, skip]}
"""
PARAMETERS = {"lr": {"low": 1e-3, "high": 0.1, "log": True}, "seed": {"low": 1, "high": 3}}
PARAMETERS |= {"on-nan": {"values": ["stop", "skip"]}}
SWEEP = sweep.Sweep(["train_single"], "test_accuracy", "maximize", PARAMETERS, trials=40)


def write(folder, text=FILE, trials=4):
    path = folder / "search.yaml"
    data = folder / "data"
    path.write_text(text.replace("DATA", str(data)).replace("TRIALS", str(trials)))
    return path


def trial(number, value=None, lr=0.01, state="running", scores=()):
    parameters = {"lr": lr, "seed": 1, "on-nan": "stop"}
    state = state if value is None else "complete"
    return sweep.Trial(number, parameters, state, value, dict(enumerate(scores, start=1)))


def test_suggestions_are_in_range_and_the_same_again():
    first = [sweep.suggest(SWEEP, [], number) for number in range(12)]
    assert first == [sweep.suggest(SWEEP, [], number) for number in range(12)]
    assert len({parameters["lr"] for parameters in first}) == 12
    assert all(1e-3 <= parameters["lr"] <= 0.1 and parameters["seed"] in (1, 2, 3) for parameters in first)
    assert {parameters["on-nan"] for parameters in first} == {"stop", "skip"}


def test_the_picture_names_the_values_of_a_choice(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.extend(figure.axes))
    sweep._draw(SWEEP, [trial(0, 0.5), trial(1, 0.7)], tmp_path / "sweep.png")
    axis = next(axis for axis in drawn if axis.get_xlabel() == "on-nan")
    assert [label.get_text() for label in axis.get_xticklabels()] == ["stop", "skip"]
    assert axis.get_xlim()[0] < 0 and axis.get_xlim()[1] > 1  # also the value that no trial had


def test_the_picture_shows_pruned_trials(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.extend(figure.axes))
    trials = [trial(0, 0.5), trial(1, state="pruned", scores=(0.1, 0.2)), trial(2, 0.7)]
    sweep._draw(SWEEP, trials, tmp_path / "sweep.png")
    for axis in drawn[:3]:
        (pruned,) = [line for line in axis.get_lines() if line.get_label() == "pruned"]
        assert [*pruned.get_ydata()] == [0.2] and pruned.get_fillstyle() == "none"


def test_suggestions_follow_the_results_and_keep_away_from_what_runs():
    finished = [trial(number, -abs(number - 3), 1e-3 * 1.3**number) for number in range(16)]  # best at 2.2e-3
    rates = [sweep.suggest(SWEEP, finished, number)["lr"] for number in range(16, 24)]
    blind = [sweep.suggest(SWEEP, [], number)["lr"] for number in range(16, 24)]
    assert max(rates) < max(blind) and sorted(rates)[4] < 4e-3
    running = [*finished, *(trial(16 + number, None, 1.9e-3) for number in range(12))]
    assert [sweep.suggest(SWEEP, running, n) for n in range(30, 40)] != [
        sweep.suggest(SWEEP, finished, n) for n in range(30, 40)
    ]
    others = [trial(16, state="diverged"), trial(17, state="pruned", scores=[-9])]
    sweep.suggest(SWEEP, [*finished, *others], 18)


def test_the_median_pruner():
    """After five complete trials, and by the best score so far, in both directions."""
    complete = [trial(number, 0.9, scores=[0.1 * number, 0.5 + 0.1 * number, 0.9]) for number in range(5)]
    for scores, hopeless in [
        ([0.19], True),
        ([0.2], False),
        ([0.3, 0.69], True),
        ([0.71, 0.1], False),
        ([0.1, 0.2, 0.9], False),
    ]:
        assert sweep.should_prune(SWEEP, complete, trial(9, scores=scores)) == hopeless, scores
    assert not sweep.should_prune(SWEEP, complete[1:], trial(9, scores=[0.0]))
    losses = replace(SWEEP, direction="minimize")
    assert [sweep.should_prune(losses, complete, trial(9, scores=[loss])) for loss in (0.19, 0.21)] == [
        False,
        True,
    ]


def test_what_prints_the_trials_does_not_wait_for_torch():
    code = "import sys, hpctrain.commands.sweep; print({'torch', 'optuna', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_grid_has_each_combination_once():
    grid = sweep.Sweep(
        ["x"], "m", "minimize", {"a": {"values": [1, 2]}, "b": {"values": ["x", "y"]}}, sampler="grid"
    )
    found = [tuple(sweep.suggest(grid, [], number).values()) for number in range(5)]
    assert found == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (1, "x")]
    large = sweep.Sweep(
        ["x"], "m", "minimize", {f"p{i}": {"values": [*range(99)]} for i in range(99)}, sampler="grid"
    )
    assert [sweep.suggest(large, [], 100)[name] for name in ("p0", "p97", "p98")] == [0, 1, 1]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("metric: test_accuracy", "", "metric is missing"),
        ("metric", "metrics", "there is no key 'metrics': choose from command, metric, direction"),
        ("train_single", "check", "command 'check': choose from train_ddp, "),
        ("--epochs 1", "--out=x", "--out and --resume are the sweep's own"),
        ("  seed: {", "  resume: {", "--out and --resume are the sweep's own"),
        ("--epochs 1", "--lr=3", "parameter lr is in command as well"),
        ("maximize", "up", "direction 'up': choose from minimize, maximize"),
        ("TRIALS", "0", "trials 0: give a number from 1 to 10,000"),
        ("TRIALS", "1000000000", "trials 1000000000: give a number from 1 to 10,000"),
        ("metric: test_accuracy", r'metric: "\e[2J"', r"metric '\x1b[2J': give a name in result.json"),
        ("TRIALS", "4\nsampler: annealing", "sampler 'annealing': choose from tpe, random, grid"),
        ("TRIALS", "4\nsampler: grid", "parameter lr: sampler grid needs values"),
        ("TRIALS", "4\npruner: mean", "pruner 'mean': choose from none, median"),
        ("TRIALS", "4\nseed: a", "seed 'a': give an integer"),
        ("low: 1e-3", "low: 1", "parameter lr: give {low: 1e-5"),
        ("low: 1e-3", "low: 0", "parameter lr: give {low: 1e-5"),
        ("low: 1e-3", "low: many", "parameter lr: give {low: 1e-5"),
        ("[stop, skip]", "[]", "parameter on-nan: give {low: 1e-5"),
        ("[stop, skip]", "[[1]]", "parameter on-nan: give {low: 1e-5"),
        ("--epochs 1", "--name 'x", "give a command line as command"),
        ("low: 1e-3", "low: -.inf", "parameter lr: give {low: 1e-5"),
        ("log: true", "step: 0", "parameter lr: give {low: 1e-5"),
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
        sweep.read_file(write(tmp_path, FILE.replace(before, after)))
    assert message in str(caught.value)


def test_names_that_are_no_formulas_are_drawn(tmp_path, capsys):
    odd = r"$\frac{$"
    search = sweep.Sweep(["x"], odd, "minimize", {"a": {"values": [odd, "\x1b[2J"]}}, trials=1)
    trial = tmp_path / odd / "trial-000"
    trial.mkdir(parents=True)
    (trial / "parameters.json").write_text(json.dumps({"a": "\x1b[2J"}))
    (trial / "result.json").write_text(json.dumps({odd: 1.5}))
    sweep.show(search, tmp_path / odd)
    assert (tmp_path / odd / "sweep.png").stat().st_size > 10_000
    assert "\x1b" not in capsys.readouterr().out


def test_invalid_use_is_one_line(tmp_path, monkeypatch):
    path, out = write(tmp_path), ["--out", str(tmp_path / "out")]
    with pytest.raises(
        UsageError,
        match=r"none.yaml: cannot be read as YAML \(No such file or directory\): see docs/guides/sweeps.md",
    ):
        sweep.main(ALONE, [str(tmp_path / "none.yaml")])
    with pytest.raises(UsageError, match=r"there is no trial 4: .*has 4, so give --array=0-3"):
        sweep.main(ALONE, [str(path), "--trial", "4"])
    with pytest.raises(
        UsageError,
        match=r"submit a sweep as a job array, such as sbatch --array=0-3%4 \.\.\., or give --trial N",
    ):
        sweep.main(World(0, 2, 0, 2, 0, 1, "srun"), [str(path)])
    sweep._keep_sweep(sweep.read_file(path), tmp_path / "out")
    with pytest.raises(
        UsageError, match="out is of another sweep, which differs in seed: give another --out"
    ):
        sweep.main(ALONE, [str(write(tmp_path, f"{FILE}seed: 2\n")), *out, "--trial", "0"])
    folder = sweep.trial_folder(tmp_path / "out", 0)
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
    (folder / "result.json").write_text(json.dumps({"test_loss": 1.0, "epochs": 1}))
    with pytest.raises(
        HpctrainError, match=r"trial-000 has no test_accuracy: metric can be test_loss, epochs; correct it"
    ):
        sweep.main(ALONE, [str(path), *out, "--show"])


def test_trials_that_have_ended_count_for_a_corrected_metric(tmp_path, capsys):
    """A misspelt metric is seen when the first trials have trained."""
    path, folder = write(tmp_path), sweep.trial_folder(tmp_path / "out", 0)
    sweep._keep_sweep(replace(sweep.read_file(path), metric="test_acuracy"), tmp_path / "out")
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
    (folder / "result.json").write_text(json.dumps({"test_accuracy": 0.5}))
    with pytest.raises(UsageError, match="differs in metric"):
        sweep._keep_sweep(sweep.read_file(path), tmp_path / "out")
    (tmp_path / "out/sweep.json").unlink()  # as the error of the metric says
    sweep._keep_sweep(sweep.read_file(path), tmp_path / "out")
    sweep.main(ALONE, [str(path), "--out", str(tmp_path / "out"), "--show"])
    assert "best test_accuracy 0.5 of trial 0" in capsys.readouterr().out


def test_a_metric_of_the_validation_is_the_best_of_the_epochs(tmp_path):
    """Fine-tuning measures it after each epoch, and result.json has the scores of the test set."""
    folder = sweep.trial_folder(tmp_path, 0)
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
    values = {1: 0.5, 2: 0.75, 3: 0.625}
    lines = [
        {"epoch": epoch, "step": 4 * epoch, "validation_accuracy": value} for epoch, value in values.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"test_accuracy": 0.7}))
    trial = sweep.read_trial(replace(SWEEP, metric="validation_accuracy"), tmp_path, 0)
    assert (trial.value, trial.scores, trial.state) == (0.75, values, "complete")
    assert sweep.read_trial(SWEEP, tmp_path, 0).value == 0.7


def run_task(folder, number, kill_after):
    """A task of a job array, killed after so many seconds; whether it ended by itself."""
    arguments = ["sweep", "search.yaml", "--out", "out"]
    rank = warm_start.Rank(arguments, dict(os.environ) | {"SLURM_ARRAY_TASK_ID": str(number)})
    outputs = [folder / f"{number}.out", folder / f"{number}.err"]
    process = warm_start.context.Process(target=warm_start._become_hpctrain, args=(rank, folder, outputs))
    process.start()
    process.join(kill_after)
    process.kill()
    process.join()
    return process.exitcode == 0


@pytest.mark.slow
def test_24_trials_4_at_a_time_of_which_5_are_killed(tmp_path, monkeypatch):
    """And the one that began the sweep: no trial is lost or done twice.

    One after the other, a search is the same again.
    """
    write_digits(tmp_path / "data")
    write(tmp_path, trials=24)
    chosen = random.Random(1)
    victims = {0, *chosen.sample(range(1, 24), 5)}
    suggested = {}

    def run(number):
        if number in victims:
            assert not run_task(tmp_path, number, chosen.uniform(0.5, 1.5))
            path = sweep.trial_folder(tmp_path / "out", number) / "parameters.json"
            suggested[number] = path.read_text() if path.exists() else None
        assert run_task(tmp_path, number, 120), (tmp_path / f"{number}.err").read_text()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(24)))
    trials = sweep.read_trials(sweep.read_file(tmp_path / "search.yaml"), tmp_path / "out")
    assert [trial.number for trial in trials] == [*range(24)]
    assert all(0 <= trial.value <= 1 for trial in trials)
    assert len({trial.parameters["lr"] for trial in trials}) == 24
    assert any(suggested.values())
    for number, text in suggested.items():  # a trial that was killed went on with its own
        assert text in (None, (sweep.trial_folder(tmp_path / "out", number) / "parameters.json").read_text())
    said = "".join((tmp_path / f"{number}.out").read_text() for number in range(24))
    assert (
        "24 of 24 trials have a result; best test_accuracy" in said
        and (tmp_path / "out/sweep.png").stat().st_size > 10_000
    )
    before = (sweep.trial_folder(tmp_path / "out", 3) / "result.json").stat().st_mtime
    assert run_task(tmp_path, 3, 120) and "trial 3 has ended already" in (tmp_path / "3.out").read_text()
    assert (sweep.trial_folder(tmp_path / "out", 3) / "result.json").stat().st_mtime == before


def test_options_that_the_trainer_refuses_are_found_before_a_trial(tmp_path, monkeypatch):
    """Each value of each parameter, and the words of the command."""
    monkeypatch.chdir(tmp_path)
    for before, after, message in (
        (
            "lr: {",
            "lrr: {",
            r"search.yaml: hpctrain train_ddp: unrecognized arguments: --lrr=0.001: did you mean --lr\?",
        ),
        ("[stop, skip]", "[stop, skipp]", "argument --on-nan: invalid choice: 'skipp'"),
        ("--epochs 1", "--epochs 1 --modle x", r"unrecognized arguments: --modle x: did you mean --model\?"),
    ):
        path = write(tmp_path, FILE.replace(before, after))
        with pytest.raises(UsageError, match=message):
            sweep.main(ALONE, [str(path)])
        assert [entry.name for entry in tmp_path.iterdir()] == ["search.yaml"]


def test_true_and_false_give_an_option_without_a_value_or_leave_it_out(tmp_path, monkeypatch):
    parameters = {"deterministic": {"values": [True, False]}, "lr": {"values": [0.1]}}
    flags = replace(SWEEP, parameters=parameters, sampler="grid")
    sweep.check_options(tmp_path, flags)
    seen = []
    trainer = SimpleNamespace(main=lambda world, words: seen.append(words[: words.index("--out")]))
    monkeypatch.setattr(sweep, "load_command", lambda name: trainer)
    for number in range(2):
        sweep.train(flags, tmp_path, number, ALONE, sweep.suggest(flags, [], number))
    assert seen == [["--deterministic", "--lr=0.1"], ["--lr=0.1"]]
    with pytest.raises(UsageError, match="--lr: expected one argument"):
        sweep.check_options(tmp_path, replace(SWEEP, parameters={"lr": {"values": [True]}}))
    with pytest.raises(UsageError, match="--deterministic: it takes no value: leave out 'true'"):
        sweep.check_options(tmp_path, replace(SWEEP, parameters={"deterministic": {"values": ["true"]}}))


def test_a_sweep_ends_when_its_first_trials_have_the_same_error(tmp_path, monkeypatch, capfd):
    path, out = write(tmp_path, trials=9), ["--out", str(tmp_path / "out")]
    here = SimpleNamespace(
        run=lambda command, check: suppress_errors(sweep.main, command[command.index("sweep") + 1 :])
    )
    monkeypatch.setattr(sweep, "subprocess", here)
    with pytest.raises(
        HpctrainError, match=r"the first 3 trials end with the same error \(.*: no such folder.*\): correct "
    ):
        sweep.main(ALONE, [str(path), *out])
    assert re.findall(r"^trial (\d): ", capfd.readouterr().out, re.M) == ["0", "1", "2"]
    (sweep.trial_folder(tmp_path / "out", 5)).mkdir()
    (sweep.trial_folder(tmp_path / "out", 5) / sweep.DIVERGED).touch()  # one that worked
    with pytest.raises(HpctrainError, match="8 of 9 trials have not ended"):
        sweep.main(ALONE, [str(path), *out])


def suppress_errors(main, words):
    with suppress(HpctrainError):
        main(ALONE, words)


def run_here(monkeypatch):
    """Let trials that run one after the other do so in this process: one of its own would import torch."""
    here = SimpleNamespace(
        run=lambda command, check: sweep.main(ALONE, command[command.index("sweep") + 1 :])
    )
    monkeypatch.setattr(sweep, "subprocess", here)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["train_ddp", "train_lightning"])
def test_two_ranks_are_pruned_together(tmp_path, trainer, capfd):
    """After an epoch, with its checkpoint; the trial has ended then."""
    write_digits(tmp_path / "data")
    text = FILE.replace("train_single", trainer).replace("epochs 1", "epochs 3") + "pruner: median\n"
    path = write(tmp_path, text, 6)
    for number in range(5):  # better than any
        folder = sweep.trial_folder(tmp_path / "out", number)
        folder.mkdir(parents=True)
        (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
        (folder / "result.json").write_text(json.dumps({"test_accuracy": 1.0}))
        (folder / "metrics.jsonl").write_text(
            json.dumps({"epoch": 1, "step": 10, "test_accuracy": 1.0}) + "\n"
        )
    arguments = ["sweep", str(path), "--out", "out", "--trial", "5"]
    done = warm_start.run(warm_start.torchrun_ranks(2, arguments, dict(os.environ)), tmp_path)
    assert done.returncode == 0 and "trial 5 pruned after epoch 1, test_accuracy 0." in done.stdout, (
        done.stdout + done.stderr
    )
    assert "5 of 6 trials have a result, 1 pruned; best" in done.stdout
    folder = sweep.trial_folder(tmp_path / "out", 5)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch-0001.pt"]
    assert not (folder / "result.json").exists()
    assert {line["epoch"] for line in reader.read_metrics(folder)} == {1}
    again = warm_start.run(warm_start.torchrun_ranks(2, arguments, dict(os.environ)), tmp_path)
    assert again.returncode == 0 and "trial 5 has ended already" in again.stdout
    sweep.main(ALONE, [str(path), "--out", str(tmp_path / "out"), "--show"])
    assert "trial   5  pruned after epoch 1, test_accuracy 0." in capfd.readouterr().out
    (folder / "owner.json").unlink(missing_ok=True)
    assert reader.summarize(folder)["state"] == "pruned"


@pytest.mark.slow
def test_a_search_with_pruning_is_the_same_again(tmp_path, monkeypatch, capfd):
    write_digits(tmp_path / "data", train=64, test=16)
    text = (
        FILE.replace("epochs 1", "epochs 2")
        .replace("test_accuracy", "test_loss")
        .replace("maximize", "minimize")
    )
    path = write(tmp_path, f"{text}pruner: median\n", 7)
    monkeypatch.chdir(tmp_path)
    run_here(monkeypatch)
    for out in ("one", "two"):
        sweep.main(ALONE, [str(path), "--out", out])
    one, two = (sweep.read_trials(sweep.read_file(path), tmp_path / out) for out in ("one", "two"))
    assert one == two and {trial.state for trial in one} == {"complete", "pruned"}
    count = sum(trial.state == "pruned" for trial in one)
    assert f"{7 - count} of 7 trials have a result, {count} pruned; best test_loss" in capfd.readouterr().out


@pytest.mark.slow
def test_a_metric_that_is_not_measured_after_each_epoch(tmp_path):
    write_digits(tmp_path / "data")
    path = write(
        tmp_path, FILE.replace("test_accuracy", "f1").replace("epochs 1", "epochs 2") + "pruner: median\n", 2
    )
    with pytest.raises(
        HpctrainError, match=r"f1 is not measured after each epoch, .* can be test_loss, test_accuracy$"
    ):
        sweep.main(ALONE, [str(path), "--out", str(tmp_path / "out"), "--trial", "0"])


@pytest.mark.slow
def test_one_after_the_other_and_a_trial_that_diverges(tmp_path, monkeypatch, capfd):
    write_digits(tmp_path / "data")
    text = (
        FILE.replace("high: 0.1", "high: 100.0")
        .replace("low: 1e-3", "low: 0.05")
        .replace("  on-nan: {values: [stop, skip]}\n", "")
    )
    path = write(tmp_path, text, 3)
    monkeypatch.chdir(tmp_path)
    run_here(monkeypatch)
    for out in ("one", "two"):
        sweep.main(ALONE, [str(path), "--out", out])
    said = capfd.readouterr().out
    assert "3 of 3" not in said and "has no result: " in said and "diverged" in said
    kept = [[sweep.read_trials(sweep.read_file(path), tmp_path / out)] for out in ("one", "two")]
    assert kept[0] == kept[1]
    states = {trial.number: trial.state for trial in kept[0][0]}
    assert "diverged" in states.values()
    for number, state in states.items():
        folder = sweep.trial_folder(tmp_path / "one", number)
        (folder / "owner.json").unlink(missing_ok=True)  # a minute after the process of the trial has ended
        assert reader.summarize(folder)["state"] == ("finished" if state == "complete" else state)
    start = time.monotonic()
    sweep.main(ALONE, [str(path), "--out", "one"])  # what diverged is not tried again
    assert time.monotonic() - start < 5
    assert "picture: one/sweep.png" in capfd.readouterr().out


@pytest.mark.slow
def test_a_job_array_on_the_cluster(cluster):
    home = "/home/alice/hpctrain"
    write_digits(cluster.host_path(f"{home}/few"))
    text = FILE.replace("train_single", "train_ddp").replace("DATA", "few").replace("TRIALS", "3")
    cluster.host_path(f"{home}/search.yaml").write_text(text)
    submit = [
        "sbatch",
        "--wait",
        "--array=0-2%2",
        "--nodes=2",
        "--ntasks-per-node=1",
        "launch/apptainer_ddp.sh",
    ]
    cluster.exec(
        "login", *submit, "sweep", "search.yaml", user="alice", cwd=home, env={"OMP_NUM_THREADS": "1"}
    )
    shown = cluster.exec(
        "n1",
        "apptainer",
        "exec",
        "/project/hpctrain-cpu.sif",
        "hpctrain",
        "sweep",
        "search.yaml",
        "--show",
        user="alice",
        cwd=home,
    ).stdout
    assert "3 of 3 trials have a result; best test_accuracy" in shown, shown
    assert (cluster.host_path(f"{home}/runs/search/sweep.png")).exists()
    config = json.loads(cluster.host_path(f"{home}/runs/search/trial-002/config.json").read_text())
    assert config["job"].endswith("_2") and config["options"]["lr"] != 0
