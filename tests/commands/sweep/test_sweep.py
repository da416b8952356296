"""hpctrain sweep: trials that are killed, the same search again, and a job array."""

import json
import os
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpctrain.commands.sweep import file, search, sweep, trials
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.run import reader
from tests.commands.sweep.helpers import FILE, SWEEP, write
from tests.helpers import run_command, write_digits
from tests.tools import warm_start


def test_what_prints_the_trials_does_not_wait_for_torch():
    code = "import sys, hpctrain.commands.sweep.sweep as _; print({'torch', 'optuna'} & {*sys.modules})"
    done = run_command([sys.executable, "-c", code], check=True)
    assert done.stdout == "set()\n"


def test_invalid_use_is_one_line(tmp_path, monkeypatch):
    path, out = write(tmp_path), ["--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match=r"none.yaml.*No such file or directory"):
        sweep.main(ALONE, [str(tmp_path / "none.yaml")])
    with pytest.raises(UsageError, match=r"trial 4.*--array=0-3"):
        sweep.main(ALONE, [str(path), "--trial", "4"])
    with pytest.raises(UsageError, match=r"--array=0-3.*--trial"):
        sweep.main(World(0, 2, 0, 2, 0, 1, "srun"), [str(path)])
    sweep._keep_sweep(file.read_file(path), tmp_path / "out")
    with pytest.raises(UsageError, match=r"out .*seed.*--out"):
        sweep.main(ALONE, [str(write(tmp_path, f"{FILE}seed: 2\n")), *out, "--trial", "0"])
    folder = trials.trial_folder(tmp_path / "out", 0)
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
    (folder / "result.json").write_text(json.dumps({"test_loss": 1.0, "epochs": 1}))
    with pytest.raises(HpctrainError, match=r"trial-000.*test_accuracy.*test_loss, epochs"):
        sweep.main(ALONE, [str(path), *out, "--show"])


def test_trials_that_have_ended_count_for_a_corrected_metric(tmp_path, capsys):
    """A misspelt metric is seen when the first trials have trained."""
    path, folder = write(tmp_path), trials.trial_folder(tmp_path / "out", 0)
    sweep._keep_sweep(replace(file.read_file(path), metric="test_acuracy"), tmp_path / "out")
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps({"lr": 0.01, "seed": 1, "on-nan": "stop"}))
    (folder / "result.json").write_text(json.dumps({"test_accuracy": 0.5}))
    with pytest.raises(UsageError, match="metric"):
        sweep._keep_sweep(file.read_file(path), tmp_path / "out")
    (tmp_path / "out/sweep.json").unlink()  # as the error of the metric says
    sweep._keep_sweep(file.read_file(path), tmp_path / "out")
    sweep.main(ALONE, [str(path), "--out", str(tmp_path / "out"), "--show"])
    assert "best test_accuracy 0.5 of trial 0" in capsys.readouterr().out


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
    while process.exitcode is None:  # another thread, which starts a process, collects this one's status
        time.sleep(0.01)
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
            path = trials.trial_folder(tmp_path / "out", number) / "parameters.json"
            suggested[number] = path.read_text() if path.exists() else None
        assert run_task(tmp_path, number, 120), (tmp_path / f"{number}.err").read_text()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(24)))
    found = trials.read_trials(file.read_file(tmp_path / "search.yaml"), tmp_path / "out")
    assert [trial.number for trial in found] == [*range(24)]
    assert all(0 <= trial.value <= 1 for trial in found)
    assert len({trial.parameters["lr"] for trial in found}) == 24
    assert any(suggested.values())
    for number, text in suggested.items():  # a trial that was killed went on with its own
        assert text in (None, (trials.trial_folder(tmp_path / "out", number) / "parameters.json").read_text())
    said = "".join((tmp_path / f"{number}.out").read_text() for number in range(24))
    assert (
        "24 of 24 trials have a result; best test_accuracy" in said
        and (tmp_path / "out/sweep.png").stat().st_size > 10_000
    )
    before = (trials.trial_folder(tmp_path / "out", 3) / "result.json").stat().st_mtime
    assert run_task(tmp_path, 3, 120) and "trial 3 has ended already" in (tmp_path / "3.out").read_text()
    assert (trials.trial_folder(tmp_path / "out", 3) / "result.json").stat().st_mtime == before


def test_options_that_the_trainer_refuses_are_found_before_a_trial(tmp_path, monkeypatch):
    """Each value of each parameter, and the words of the command."""
    monkeypatch.chdir(tmp_path)
    for before, after, message in (
        ("lr: {", "lrr: {", "search.yaml.*train_ddp.*--lrr=0.001.*--lr"),
        ("[stop, skip]", "[stop, skipp]", "--on-nan.*skipp"),
        ("--epochs 1", "--epochs 1 --modle x", "--modle.*--model"),
    ):
        path = write(tmp_path, FILE.replace(before, after))
        with pytest.raises(UsageError, match=message):
            sweep.main(ALONE, [str(path)])
        assert [entry.name for entry in tmp_path.iterdir()] == ["search.yaml"]


def test_true_and_false_give_an_option_without_a_value_or_leave_it_out(tmp_path, monkeypatch):
    parameters = {"deterministic": {"values": [True, False]}, "lr": {"values": [0.1]}}
    flags = replace(SWEEP, parameters=parameters, sampler="grid")
    file.check_options(tmp_path, flags)
    seen = []
    trainer = SimpleNamespace(main=lambda world, words, prune: seen.append(words[: words.index("--out")]))
    monkeypatch.setattr(sweep, "load_command", lambda name: trainer)
    for number in range(2):
        sweep.train(flags, tmp_path, number, ALONE, search.suggest(flags, [], number))
    assert seen == [["--deterministic", "--lr=0.1"], ["--lr=0.1"]]
    with pytest.raises(UsageError, match="--lr"):
        file.check_options(tmp_path, replace(SWEEP, parameters={"lr": {"values": [True]}}))
    with pytest.raises(UsageError, match=r"--deterministic.*true"):
        file.check_options(tmp_path, replace(SWEEP, parameters={"deterministic": {"values": ["true"]}}))


def test_a_sweep_ends_when_its_first_trials_have_the_same_error(tmp_path, monkeypatch, capfd):
    path, out = write(tmp_path, trials=9), ["--out", str(tmp_path / "out")]
    here = SimpleNamespace(
        run=lambda command, check: suppress_errors(sweep.main, command[command.index("sweep") + 1 :])
    )
    monkeypatch.setattr(sweep, "subprocess", here)
    with pytest.raises(HpctrainError, match=r"3 trials.*no such folder.*search.yaml"):
        sweep.main(ALONE, [str(path), *out])
    assert re.findall(r"^trial (\d): ", capfd.readouterr().out, re.M) == ["0", "1", "2"]
    (trials.trial_folder(tmp_path / "out", 5)).mkdir()
    (trials.trial_folder(tmp_path / "out", 5) / reader.DIVERGED).touch()  # one that worked
    with pytest.raises(HpctrainError, match="8 of 9 trials"):
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
        folder = trials.trial_folder(tmp_path / "out", number)
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
    folder = trials.trial_folder(tmp_path / "out", 5)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.pt", "epoch-0001.pt"}
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
    one, two = (trials.read_trials(file.read_file(path), tmp_path / out) for out in ("one", "two"))
    assert one == two and {trial.state for trial in one} == {"complete", "pruned"}
    count = sum(trial.state == "pruned" for trial in one)
    assert f"{7 - count} of 7 trials have a result, {count} pruned; best test_loss" in capfd.readouterr().out


@pytest.mark.slow
def test_a_metric_that_is_not_measured_after_each_epoch(tmp_path):
    write_digits(tmp_path / "data")
    path = write(
        tmp_path, FILE.replace("test_accuracy", "f1").replace("epochs 1", "epochs 2") + "pruner: median\n", 2
    )
    with pytest.raises(HpctrainError, match=r"f1 .*test_loss, test_accuracy"):
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
    kept = [[trials.read_trials(file.read_file(path), tmp_path / out)] for out in ("one", "two")]
    assert kept[0] == kept[1]
    states = {trial.number: trial.state for trial in kept[0][0]}
    assert "diverged" in states.values()
    for number, state in states.items():
        folder = trials.trial_folder(tmp_path / "one", number)
        (folder / "owner.json").unlink(missing_ok=True)  # a minute after the process of the trial has ended
        assert reader.summarize(folder)["state"] == ("finished" if state == "complete" else state)
    start = time.monotonic()
    sweep.main(ALONE, [str(path), "--out", "one"])  # what diverged is not tried again
    assert time.monotonic() - start < 5
    assert "picture: one/sweep.png" in capfd.readouterr().out


def test_a_job_array_on_the_cluster(cluster):
    home = "/home/alice/hpctrain"
    write_digits(cluster.host_path(f"{home}/few"))
    text = FILE.replace("train_single", "train_ddp").replace("DATA", "few").replace("TRIALS", "3")
    cluster.host_path(f"{home}/search.yaml").write_text(text)
    submit = ["sbatch", "--wait", "--array=0-2%2", "--nodes=2"]
    submit += ["--ntasks-per-node=1", "launch/apptainer_ddp.sh"]
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
