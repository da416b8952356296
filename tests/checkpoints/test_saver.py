"""When checkpoints are saved, what is copied for them, and what becomes of errors in the background."""

import copy
import errno
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

from hpctrain.checkpoints import checkpoint, parts
from hpctrain.checkpoints import saver as saver_module
from hpctrain.checkpoints.interval import Interval
from hpctrain.checkpoints.saver import Checkpointer, copy_tensors, plan_copy
from hpctrain.distributed.world import ALONE, World
from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from tests.helpers import run_command

NEVER = Interval.parse("1000h")

NO_BEST = Path("none")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def make(folder, every=NEVER, keep=3):
    return Checkpointer(ALONE, folder, every, keep, lambda: None)


def copy_to_host(value, earlier=None):
    copied, pairs = plan_copy(value, earlier)
    copy_tensors(pairs)
    return copied


def state(value):
    return {"epoch": value, "step": 0, "model": {"weight": torch.full((3,), float(value))}}


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ---- when ----


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("500", 500, 0), ("30s", 0, 30), ("1.5min", 0, 90), ("10min", 0, 600), ("2h", 0, 7200)],
)
def test_intervals(text, steps, seconds):
    assert Interval.parse(text) == (steps, seconds)


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "5 s", "s", "1d", "1e3", "10 min", "nan"])
def test_what_is_no_interval(text):
    with pytest.raises(ValueError):
        Interval.parse(text)


def test_steps_that_are_due(folder):
    saver = make(folder, Interval.parse("4"))
    assert [step for step in range(1, 21) if saver.is_due(step, last=step == 12)] == [4, 8, 16, 20]


def test_a_time_that_is_due(folder, monkeypatch):
    """Rank 0 asks the clock again after about PERIOD, and a save starts the time anew."""
    now = 0.0
    monkeypatch.setattr(saver_module.time, "monotonic", lambda: now)
    saver = make(folder, Interval.parse("60s"))
    due = []
    for step in range(1, 2001):
        now += 0.1
        if saver.is_due(step, last=False):
            due.append(now)
            saver.save_in_background(checkpoint.path_of(folder, 1, step), state(1), NO_BEST)
    saver.wait()
    assert len(due) == 3
    assert all(
        60 <= later - earlier <= 60 + 2 * saver_module.PERIOD
        for earlier, later in zip([0, *due], due, strict=False)
    )


def test_the_end_that_the_launch_script_asks_for(folder, tmp_path, monkeypatch):
    control = tmp_path / "control"
    control.mkdir()
    monkeypatch.setenv("HPCTRAIN_CONTROL", str(control))
    saver = make(folder)
    assert not saver.is_due(1, last=False) and not saver.is_due(2, last=True) and not saver.decide_to_stop()
    (control / "stop").touch()
    assert saver.is_due(3, last=True) and saver.stop and saver.decide_to_stop()


# ---- copies ----


def test_a_copy_does_not_change_with_the_original():
    model = torch.nn.BatchNorm1d(3)
    original = {"model": model.state_dict(), "list": [torch.ones(2), (1, "a")], "number": 5}
    copied = copy_to_host(original)
    with torch.no_grad():
        model.weight.fill_(9)
    original["list"][0].fill_(9)
    original["list"].append(1)
    assert torch.equal(copied["model"]["weight"], torch.ones(3)) and torch.equal(
        copied["list"][0], torch.ones(2)
    )
    assert copied["list"][1] == (1, "a") and len(copied["list"]) == 2 and copied["number"] == 5
    # by which load_state_dict() knows old versions
    assert copied["model"]._metadata == original["model"]._metadata


def test_the_state_of_the_optimizer_is_that_of_the_save_although_it_is_copied_later(folder, monkeypatch):
    real = saver_module.copy_tensors

    def slow(pairs):
        if threading.current_thread().name == "checkpoint":
            time.sleep(1.5)
        real(pairs)

    monkeypatch.setattr(saver_module, "copy_tensors", slow)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.randn(8, 4)).square().mean().backward()  # changes the statistics of batch normalization
        optimizer.step()

    step()
    saver = make(folder)
    current = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    expected = copy.deepcopy(current)
    began = time.monotonic()
    saver.save_in_background(checkpoint.path_of(folder, 1), current, NO_BEST)
    blocked = time.monotonic() - began
    step()
    assert blocked < 1.5 <= time.monotonic() - began
    saver.wait()
    saved = checkpoint.load(checkpoint.path_of(folder, 1), torch.device("cpu"))
    assert all(torch.equal(saved["model"][name], value) for name, value in expected["model"].items())
    for number, entries in expected["optimizer"]["state"].items():
        assert all(
            torch.equal(saved["optimizer"]["state"][number][name], value) for name, value in entries.items()
        )
    assert saved["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


def test_a_copy_uses_the_memory_of_an_earlier_one_and_no_more():
    weight = torch.ones(4)
    first = copy_to_host({"a": weight, "b": torch.zeros(2)})
    second = copy_to_host({"a": weight + 1, "b": torch.zeros(3), "c": torch.ones(1)}, first)
    assert second["a"] is first["a"] and torch.equal(second["a"], torch.full((4,), 2.0))
    assert second["b"] is not first["b"] and second["b"].shape == (3,)


def test_tensors_that_share_their_memory_are_written_once(folder):
    weight = torch.randn(1000, 100)
    path = checkpoint.path_of(folder, 1)
    copied = copy_to_host({"model": {"in": weight, "out": weight}, "state_dict": {"net.in": weight}})
    checkpoint.save(path, copied)
    assert path.stat().st_size < 1.1 * weight.nbytes
    # Untied since: two values that were one must not end in the same memory.
    untied = copy_to_host({"model": {"in": weight, "out": weight + 1}}, copied)
    assert torch.equal(untied["model"]["in"], weight) and torch.equal(untied["model"]["out"], weight + 1)


# ---- in the background ----


@pytest.mark.slow
def test_a_slow_disk_makes_the_next_save_wait_and_drops_none(folder, monkeypatch):
    real, writing = checkpoint.save, threading.Event()

    def slow(*args):
        writing.set()
        time.sleep(1.5)
        real(*args)

    monkeypatch.setattr(checkpoint, "save", slow)
    saver = make(folder)
    begun = time.monotonic()
    saver.save_in_background(checkpoint.path_of(folder, 1), state(1), NO_BEST)
    assert writing.wait(60) and time.monotonic() - begun < 1.5 and names(folder) == []
    saver.save_in_background(checkpoint.path_of(folder, 2), state(2), NO_BEST)
    assert time.monotonic() - begun > 1.5 and "epoch-0001.pt" in names(folder)
    saver.wait()
    weights = [
        checkpoint.load(checkpoint.path_of(folder, n), torch.device("cpu"))["model"]["weight"][0]
        for n in (1, 2)
    ]
    assert weights == [1, 2]  # the second copy did not change the first, although it is in the same memory


def test_weights_that_are_not_finite_are_not_saved(folder):
    saver = make(folder)
    saver.save_in_background(checkpoint.path_of(folder, 1), state(1), NO_BEST)
    saver.save_in_background(checkpoint.path_of(folder, 2), state(float("nan")), NO_BEST)
    with pytest.raises(HpctrainError, match=r"epoch-0002\.pt.*--lr"):
        saver.wait()
    assert names(folder) == ["epoch-0001.pt"]


@pytest.mark.parametrize("raised_by", ["save", "wait"])
def test_a_write_that_fails_is_due_at_the_next_decision_and_raised_once(folder, monkeypatch, raised_by):
    saver = make(folder)

    def fail(*_):
        raise HpctrainError("the disk is full")

    with monkeypatch.context() as context:
        context.setattr(checkpoint, "save", fail)
        saver.save_in_background(checkpoint.path_of(folder, 1), state(1), NO_BEST)
        saver._writer.join()
    assert saver.is_due(1, last=False)
    with pytest.raises(HpctrainError, match="the disk is full"):
        if raised_by == "wait":
            saver.wait()
        else:
            saver.save_in_background(checkpoint.path_of(folder, 2), state(2), NO_BEST)
    saver.save_in_background(checkpoint.path_of(folder, 3), state(3), NO_BEST)
    saver.wait()
    assert names(folder) == ["epoch-0003.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("lasts", [3, 1000])
def test_a_file_system_that_cannot_be_written_for_a_while(folder, monkeypatch, capsys, lasts):
    monkeypatch.setattr(atomic, "RETRY_EVERY", 0.05)
    monkeypatch.setattr(atomic, "RETRY_FOR", 3.0)
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) <= lasts:
            raise OSError(30, "Read-only file system")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    saver = make(folder)
    saver.save_in_background(checkpoint.path_of(folder, 1), state(1), NO_BEST)
    if lasts == 3:
        saver.wait()
        assert names(folder) == ["epoch-0001.pt"]
    else:
        with pytest.raises(HpctrainError, match="Read-only file system"):
            saver.wait()
        assert names(folder) == [] and len(calls) > 3
    out = capsys.readouterr().out
    assert re.fullmatch("hpctrain: .*epoch-0001.pt.* 3 s\n", out)


def test_a_folder_that_cannot_be_looked_at_does_not_end_the_run(folder, monkeypatch):
    """A stale handle of NFS ended it with a traceback, before writing could try again."""

    def is_dir(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "is_dir", is_dir)
    make(folder).clear(checkpoint.path_of(folder, 1))


def test_an_error_of_any_kind_in_the_background_is_raised(folder):
    """torch 2.13 cannot tell whether values of float8 are finite. Training went on without checkpoints."""
    saver = make(folder)
    weights = torch.ones(3).to(torch.float8_e4m3fn)
    saver.save_in_background(
        folder / "checkpoints/epoch-0001.pt", state(1) | {"model": {"weight": weights}}, NO_BEST
    )
    with pytest.raises(HpctrainError, match=r"epoch-0001\.pt.*NotImplementedError"):
        saver.wait()


@pytest.mark.slow
def test_an_error_does_not_lose_the_checkpoint_that_is_being_written(folder):
    code = """
import sys, time, types
from pathlib import Path
from hpctrain import __main__, cli
from hpctrain.checkpoints import checkpoint
from hpctrain.checkpoints.saver import Checkpointer
from hpctrain.checkpoints.interval import Interval
from hpctrain.errors import HpctrainError
def fail(world, arguments):
    folder, real = Path(arguments[0]), checkpoint.save
    checkpoint.save = lambda *words: (time.sleep(0.5), real(*words))
    saver = Checkpointer(world, folder, Interval(0, 600), 3, lambda: None)
    saver.save_in_background(checkpoint.path_of(folder, 1), {"epoch": 1}, 0)
    raise HpctrainError("training diverged")
sys.modules["probe"] = types.SimpleNamespace(parser=None, main=fail)
cli.COMMANDS["probe"] = ("probe", "use", "fail")
__main__.main()
"""
    done = run_command([sys.executable, "-c", code, "probe", folder])
    assert (done.returncode, done.stderr) == (1, "hpctrain: error: training diverged\n")
    assert names(folder) == ["epoch-0001.pt"]


def test_a_job_that_lost_the_folder_while_it_wrote_leaves_nothing(folder):
    lost = False

    def check():
        if lost:
            raise HpctrainError("job 8 continues this run")

    saver = Checkpointer(ALONE, folder, NEVER, 3, check)
    saver.save_in_background(checkpoint.path_of(folder, 1), state(1), NO_BEST)
    saver.wait()
    with pytest.MonkeyPatch.context() as context:
        intact = checkpoint.is_intact

        def is_intact(path):
            nonlocal lost
            lost = True  # after save() has asked, and before the rename
            return intact(path)

        context.setattr(checkpoint, "is_intact", is_intact)
        saver.save_in_background(checkpoint.path_of(folder, 2), state(2), NO_BEST)
        with pytest.raises(HpctrainError, match="job 8 continues"):
            saver.wait()
    assert names(folder) == ["epoch-0001.pt"]


def test_the_newest_and_the_best_are_kept(folder):
    (folder / "checkpoints/notes.pt").touch()  # somebody else's
    saver = make(folder, keep=2)
    for epoch, step in ((1, 0), (2, 0), (3, 5), (3, 10), (3, 0), (4, 7)):
        saver.save_in_background(
            checkpoint.path_of(folder, epoch, step), state(epoch), checkpoint.path_of(folder, 1)
        )
    saver.wait()
    kept = ["epoch-0001.pt", "epoch-0003.pt", "epoch-0004-step-000007.pt"]
    assert names(folder) == ["best.pt", *kept, "notes.pt"]
    assert (folder / "checkpoints/best.pt").readlink() == Path("epoch-0001.pt")


def test_a_checkpoint_in_parts_leaves_the_last_complete_one_until_all_ranks_have_written(folder):
    """Of two ranks, this process is rank 0; rank 1 has written all parts but the last one."""
    saver = Checkpointer(World(0, 2, 0, 2, 0, 1, "torchrun"), folder, NEVER, 1, lambda: None)
    saver.in_parts = True
    for epoch in (1, 2, 3):
        saver.save_in_background(checkpoint.path_of(folder, epoch), state(epoch), NO_BEST)
        saver.wait()
        if epoch < 3:
            shutil.copy(
                *(folder / f"checkpoints/epoch-000{epoch}.pt/rank-000{rank}-of-0002.pt" for rank in (0, 1))
            )
    assert names(folder) == ["epoch-0002.pt", "epoch-0003.pt"]
    assert checkpoint.find_newest(folder).name == "epoch-0002.pt"
    shutil.copy(
        folder / "checkpoints/epoch-0003.pt/rank-0000-of-0002.pt",
        folder / "checkpoints/epoch-0003.pt/rank-0000-of-0004.pt",
    )
    assert checkpoint.find_newest(folder).name == "epoch-0002.pt"


def test_a_checkpoint_of_the_job_that_owns_the_folder_by_now_is_not_removed(folder):
    """Ranks that live on after a requeue come to the same step later."""

    def check():
        raise HpctrainError("job 2 continues this run")

    saver = Checkpointer(World(0, 2, 0, 2, 0, 1, "torchrun"), folder, NEVER, 1, check)
    saver.in_parts = True
    path = checkpoint.path_of(folder, 1)
    checkpoint.save(parts.path_of_rank(path, 0, 2), {})
    saver.clear(path)
    assert path.exists()
    with pytest.raises(HpctrainError, match="job 2 continues"):
        saver.save_in_background(path, state(1), NO_BEST)


def test_the_best_checkpoint_stays_until_all_ranks_have_written_a_better_one(folder):
    """A job that dies meanwhile is resumed from epoch 3, whose best one is that of epoch 1."""
    saver = Checkpointer(World(0, 2, 0, 2, 0, 1, "torchrun"), folder, NEVER, 1, lambda: None)
    saver.in_parts = True
    for epoch, best in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        saver.save_in_background(
            checkpoint.path_of(folder, epoch), state(epoch), checkpoint.path_of(folder, best)
        )
        saver.wait()
        if epoch == 4:
            assert names(folder) == ["epoch-0001.pt", "epoch-0003.pt", "epoch-0004.pt"]
    assert names(folder) == ["epoch-0004.pt", "epoch-0005.pt"]


def test_checkpoints_in_the_order_of_training(folder):
    order = [(2, 0), (9999, 0), (10000, 999_999), (10000, 1_000_000), (10000, 0), (10001, 1)]
    for epoch, step in order:
        checkpoint.path_of(folder, epoch, step).touch()
    assert checkpoint.list_newest_first(folder) == [
        checkpoint.path_of(folder, *place) for place in reversed(order)
    ]


def test_a_fused_optimizer_goes_on_from_a_copy_of_channels_last_weights():
    """It takes the values of weights and momentum in their order in memory, which differed after a resume."""

    def make():
        torch.manual_seed(1)
        model = torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(200.0).sin().reshape(2, 4, 5, 5)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # an earlier copy of another order
    contiguous = tree_map_only(torch.Tensor, torch.Tensor.contiguous, state)
    copied, pairs = plan_copy(state, contiguous)
    copy_tensors(pairs)
    resumed, optimizer_of_resumed = make()
    resumed.load_state_dict(copied["model"])
    optimizer_of_resumed.load_state_dict(copied["optimizer"])
    step(model, optimizer)
    step(resumed, optimizer_of_resumed)
    assert torch.equal(model.weight, resumed.weight)
