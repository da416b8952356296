"""The options of a run: from the command line, or from a script without argparse."""

import json

import numpy
import pytest
import torch

import hpctrain
from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.world import ALONE
from hpctrain.errors import EndEarly, UsageError
from hpctrain.run.options import RunOptions, describe_differences
from hpctrain.run.record import Record

CPU = torch.device("cpu")


def parse(*words):
    parser = hpctrain.trainer_parser("mine", "")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args(words)


def train_an_epoch(run):
    model = torch.nn.Linear(2, 1)
    assert run.resume(CPU, 2, model) is None
    run.start_epoch(1, 1, 4)
    run.step(torch.tensor(1.0))
    run.end_epoch()
    run.save({"model": model.state_dict(), "optimizer": {}}, score=0.5)
    run._checkpointer.wait()
    return model


def test_the_defaults_are_those_of_the_command_line():
    options = RunOptions.from_args(vars(parse()))
    assert options == RunOptions(epochs=2, others=options.others)


def test_config_json_has_all_options_of_the_command_line_in_their_order():
    args = parse("--out", "runs/a", "--lr", "0.2")
    assert list(RunOptions.from_args(vars(args)).list_all().items()) == list(vars(args).items())


def test_options_that_change_the_weights():
    args = parse("--out", "a", "--resume", "auto", "--wandb", "--watchdog", "5")
    assert RunOptions.from_args(vars(args)).list_weighty() == {"seed": "1", "epochs": "2", "lr": "0.1"}


def test_differences_name_the_options_of_the_command_line():
    own, saved = {"lr": "0.1", "batch_size": "4", "new": "None"}, {"lr": "0.2", "batch_size": "8"}
    assert describe_differences(own, saved, ("lr",)) == "--batch-size 4 instead of 8"
    assert describe_differences(own, own, ()) == ""


def test_other_examples_are_a_difference():
    """Unless a checkpoint of an earlier version does not say which it had."""
    own = {"lr": "0.1", "data_sha256": "ab"}
    assert describe_differences(own, own | {"data_sha256": "cd"}, ()) == "other examples in --data"
    assert describe_differences(own, {"lr": "0.1"}, ()) == ""


def test_a_script_without_argparse(tmp_path):
    """A notebook, for example: the options are those of config.json, and a resume compares them."""
    options = RunOptions(out=str(tmp_path / "run"), resume="auto", epochs=2, others={"lr": 0.1})
    train_an_epoch(Record(ALONE, "mine", options, CPU))
    recorded = json.loads((tmp_path / "run/config.json").read_text())["options"]
    assert (recorded["lr"], recorded["epochs"], recorded["checkpoint_every"]) == (0.1, 2, "10min")
    again = Record(ALONE, "mine", RunOptions(out=tmp_path / "run", resume="auto", others={"lr": 1}), CPU)
    with pytest.raises(UsageError, match=r"other options: --lr 1 instead of 0.1: give those .* or --force"):
        again.resume(CPU, 2, torch.nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"checkpoint_every": "often"}, "checkpoint_every='often': give a number of steps"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: keep at least 1"),
        ({"on_nan": "skpi"}, 'on_nan=\'skpi\': choose "stop" or "skip"'),
    ],
)
def test_a_wrong_value_is_one_line(wrong, message):
    """argparse checks the command line; a script has no argparse."""
    with pytest.raises(UsageError, match=message):
        RunOptions(**wrong)


def test_prune_ends_the_run_after_the_checkpoint_of_an_epoch(tmp_path):
    asked = []
    run = Record(ALONE, "mine", RunOptions(out=tmp_path, prune=lambda world: not asked.append(world)), CPU)
    with pytest.raises(EndEarly):
        train_an_epoch(run)
    assert asked == [ALONE] and checkpoint.find_newest(tmp_path).name == "epoch-0001.pt"


def test_prune_is_an_option_that_no_file_has():
    options = RunOptions.from_args({**vars(parse()), "prune": all})
    assert options.prune is all and "prune" not in options.list_all()


def test_a_state_that_cannot_be_resumed_is_refused_after_the_first_step(tmp_path):
    """The first checkpoint of a run may come hours later."""
    run = Record(ALONE, "mine", RunOptions(out=tmp_path / "run", watchdog=0), CPU)
    model = torch.nn.Linear(2, 1)
    run.resume(CPU, 2, model, "optimizers")
    run.start_epoch(1, 9, 4)
    run.step(torch.tensor(1.0))
    assert run.must_save()
    with pytest.raises(hpctrain.HpctrainError, match="got no 'optimizers', without which"):
        run.save({"model": model.state_dict(), "optimizer": {}})
    run._state_is_checked = False
    assert run.must_save()
    run.save({"model": model.state_dict(), "optimizers": [{}, {}]})
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    run.step(torch.tensor(1.0))
    assert not run.must_save()


def test_values_of_a_step_are_means_over_the_ranks_and_the_steps(tmp_path, monkeypatch):
    run = Record(ALONE, "mine", RunOptions(out=tmp_path / "run", watchdog=0), CPU)
    run.resume(CPU, 1, torch.nn.Linear(2, 1))
    other = {"train_loss": (3.0, 3), "d_loss": (6.0, 3), "learning_rate": (0.1, 3), "g_loss": (2.0, 1)}
    monkeypatch.setattr("hpctrain.run.record.gather", lambda world, own: [own, [other, *own[1:]]])
    run.start_epoch(1, 15, 4)
    for step in range(3):
        more = {"g_loss": numpy.float32(4)} if step == 1 else {}
        run.step(torch.tensor(float(step)), d_loss=torch.tensor([step, 3.0]), learning_rate=0.1, **more)
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert (line["train_loss"], line["d_loss"], line["g_loss"]) == (2.0, 4.0, 3.0)
    assert line["learning_rate"] == 0.1  # and not 0.10000000000000002


def test_a_value_that_is_not_finite_in_one_step_is_named_at_the_next_line(tmp_path):
    run = Record(ALONE, "mine", RunOptions(out=tmp_path / "run", watchdog=0), CPU)
    run.resume(CPU, 1, torch.nn.Linear(2, 1))
    run.start_epoch(1, 15, 4)
    for d_loss in (1.0, float("nan")):
        run.step(torch.tensor(1.0), d_loss=d_loss)
    with pytest.raises(hpctrain.HpctrainError, match="d_loss is nan at epoch 1, step 3"):
        run.step(torch.tensor(1.0), d_loss=1.0)


def test_a_resumed_run_has_the_means_of_one_that_was_not_cut(tmp_path):
    def train(folder, *parts):
        for first, last in parts:
            run = Record(ALONE, "mine", RunOptions(out=folder, resume="auto", checkpoint_every=1), CPU)
            model = torch.nn.Linear(2, 1)
            run.resume(CPU, 1, model)
            run.start_epoch(1, 15, 4)
            for step in range(first, last):
                run.step(torch.tensor(0.1 * step), d_loss=0.3 * step)
                if run.must_save():
                    run.save({"model": model.state_dict(), "optimizer": {}})
            run._checkpointer.wait()
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["train_loss"], line["d_loss"]) for line in lines]

    whole = train(tmp_path / "whole", (0, 6))
    assert len(whole) == 2 and train(tmp_path / "cut", (0, 2), (2, 5), (5, 6)) == whole
