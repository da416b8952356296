"""A checkpoint is complete and verified, or not there."""

import io
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from hpctrain.checkpoints import checkpoint, parts
from hpctrain.checkpoints.position import Position
from hpctrain.errors import HpctrainError
from hpctrain.files import atomic
from tests.helpers import POSITION


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def save(run, epoch):
    path = checkpoint.path_of(run, epoch)
    checkpoint.save(path, {"epoch": epoch, "step": 0, "weights": torch.arange(1000.0) * epoch})
    return path


def test_what_is_saved_is_loaded(run):
    path = save(run, 1)
    assert path == checkpoint.find_newest(run)
    state = checkpoint.load(path, torch.device("cpu"))
    assert state["epoch"] == 1 and torch.equal(state["weights"], torch.arange(1000.0))
    assert torch.load(path)["epoch"] == 1  # a plain file of torch.save()


def test_a_file_that_is_read_back_otherwise_is_no_checkpoint(run, monkeypatch):
    earlier = save(run, 1)
    monkeypatch.setattr(checkpoint, "is_intact", lambda path: False)
    with pytest.raises(HpctrainError, match=r"epoch-0002\.pt.*read back"):
        save(run, 2)
    assert [*(run / "checkpoints").iterdir()] == [earlier]


def test_an_optimizer_keeps_the_kernels_of_this_device():
    """A run may have moved to another: the saved choice is that of the other one."""
    weights = torch.nn.Parameter(torch.ones(2))
    saved = torch.optim.AdamW([weights], lr=0.5, fused=False).state_dict()
    optimizer = torch.optim.AdamW([weights], lr=0.1, fused=True)
    checkpoint.load_optimizer(optimizer, saved, "x")
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["fused"]) == (0.5, True)


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "pipe"])
def test_a_corrupt_checkpoint_is_skipped(run, harm, capsys):
    good, bad = save(run, 1), save(run, 2)
    content = bytearray(bad.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1  # inside the tensor, where torch.load() does not notice it
    bad.unlink()
    if harm == "pipe":  # of somebody else
        os.mkfifo(bad)
        signal.alarm(60)
    else:
        bad.write_bytes({"flip": content, "truncate": content[:-100], "empty": b""}[harm])
    assert checkpoint.find_newest(run) == good
    assert "epoch-0002.pt" in capsys.readouterr().out
    good.unlink()
    with pytest.raises(HpctrainError, match=r"epoch-0002\.pt"):
        checkpoint.find_newest(run)
    signal.alarm(0)


def test_a_checkpoint_of_somebody_else_is_one_line(run):
    """It loads, as it has tensors and plain values alone, but not those of a run."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    path = checkpoint.path_of(run, 1)
    good = POSITION | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(path, good)
    assert checkpoint.find_fitting(path, model, "optimizer") == path
    checkpoint.load_optimizer(optimizer, good["optimizer"], path)
    wrong = [("epoch", x) for x in ("x", -1, 2**40, float("nan"), [1], True, None)] + [
        ("step", "x"),
        ("seconds", "x"),
    ]
    wrong += [
        ("options", []),
        ("best", "x"),
        ("best", [1, 2, 3]),
        ("best", [1, ["x"]]),
        ("means", ["x"]),
        ("means", 1.0),
        ("means", []),
        ("means", [{"train_loss": ["x", 1]}]),
        ("means", [{"train_loss": [1.0, 0]}]),
    ]
    sparse = {name: value.to_sparse() for name, value in model.state_dict().items()}
    wrong += [("model", dict.fromkeys(model.state_dict(), "x")), ("model", sparse)]
    meta = {name: value.to("meta") for name, value in model.state_dict().items()}
    wrong += [("model", meta), ("options", {1: "x"}), *((name, None) for name in Position._fields)]
    for name, value in wrong:
        checkpoint.save(path, good | {name: value})
        with pytest.raises(HpctrainError, match=r"epoch-0001\.pt") as error:
            checkpoint.find_fitting(path, model, "optimizer")
        assert str(error.value).isprintable()
    group = optimizer.state_dict()["param_groups"][0]
    odd = [
        {"state": {}, "param_groups": []},
        {"state": {0: {"momentum_buffer": torch.ones(3, 3)}}, "param_groups": [group]},
    ]
    odd.append({"state": {0: {"momentum_buffer": torch.ones(1, 1).expand(1, 2)}}, "param_groups": [group]})
    odd += [
        {"state": {0: {"momentum_buffer": value}}, "param_groups": [group]}
        for value in ("x", torch.tensor(1.0))
    ]
    odd.append({"state": {0: {"momentum_buffer": torch.ones(1).expand(10**15)}}, "param_groups": [group]})
    for state in ("x", *odd, {"state": {0: "x"}, "param_groups": [group]}):
        with pytest.raises(HpctrainError, match=r"epoch-0001\.pt"):
            checkpoint.load_optimizer(optimizer, state, path)
    with pytest.raises(HpctrainError, match="momentum"):
        checkpoint.load_optimizer(optimizer, {"state": {}, "param_groups": [group | {"momentum": "x"}]}, path)


def test_a_compiled_model_is_unwrapped_although_it_has_a_part_named_module():
    """The wrapper of torch.compile passes on the attributes of the model."""

    class OptimizedModule(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self._orig_mod = model

        def __getattr__(self, name):
            if name == "_orig_mod":
                return super().__getattr__(name)
            return getattr(self._orig_mod, name)

    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 1)})
    assert checkpoint.unwrap(OptimizedModule(model)) is model


def test_no_checkpoint(run):
    for folder in (run, run / "nowhere"):
        with pytest.raises(HpctrainError, match=f"^{folder}: "):
            checkpoint.find_newest(folder)


def test_a_write_that_fails_leaves_the_earlier_checkpoint_and_nothing_else(run, monkeypatch):
    good = save(run, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HpctrainError, match=r"epoch-0002\.pt.*No space left"):
        save(run, 2)
    assert [path.name for path in (run / "checkpoints").iterdir()] == [good.name]


def test_a_full_disk_is_named_although_torch_does_not(run, monkeypatch):
    class Full(io.BytesIO):
        def write(self, content):
            if len(content) > 1000:  # what is small still fits
                raise OSError(122, "Disk quota exceeded")
            return super().write(content)

    monkeypatch.setattr(atomic, "file", lambda *_: nullcontext(Full()))
    with pytest.raises(HpctrainError, match=r"epoch-0001\.pt.*Disk quota exceeded"):
        save(run, 1)


@pytest.mark.parametrize("name", ["save", "load"])
def test_an_error_without_a_message_is_named_by_its_type(run, monkeypatch, name):
    path = save(run, 1)

    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(torch, name, fail)
    with pytest.raises(HpctrainError, match=r"epoch-0001.pt: .*\(RuntimeError\)"):
        if name == "save":
            checkpoint.save(path, {})
        else:
            checkpoint.load(path, torch.device("cpu"))


def test_code_is_never_loaded(run):
    path = run / "checkpoints" / "epoch-0009.pt"
    torch.save({"evil": os.system}, path)
    with pytest.raises(HpctrainError, match=r"epoch-0009\.pt"):
        checkpoint.load(path, torch.device("cpu"))


def save_model(run, epoch, **state):
    path = checkpoint.path_of(run, epoch)
    checkpoint.save(
        path,
        POSITION | {"epoch": epoch, "model": torch.nn.Linear(2, 1).state_dict(), "optimizer": {}} | state,
    )
    return path


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"evil": os.system}, "Weights only load failed"),
        ({"model": torch.nn.Linear(3, 1).state_dict()}, r"weight .*\(1, 3\).*\(1, 2\)"),
        ({"model": torch.nn.Linear(2, 1, bias=False).state_dict()}, r"bias .*\(1,\)"),
        ({"model": torch.nn.Linear(2, 1)}, "Weights only load failed"),
        ({"model": 1}, ""),
        ({"model": torch.nn.Linear(2, 1).state_dict() | {"\x1b[2J": torch.ones(1)}}, r"\\x1b\[2J .*\(1,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_skipped_for_an_older_one(run, state, reason, capsys):
    good, bad = save_model(run, 1), save_model(run, 2, **state)
    (run / "checkpoints/epoch-0003.pt").write_bytes(b"truncated")  # find_newest() has said so already
    assert checkpoint.find_fitting(bad, torch.nn.Linear(2, 1), "optimizer") == good
    said = capsys.readouterr().out
    assert re.fullmatch(f"hpctrain: .*epoch-0002.pt.*{run}/checkpoints.*{reason}.*epoch-0001.pt\n", said)
    good.unlink()
    with pytest.raises(HpctrainError, match=r"epoch-0002\.pt"):
        checkpoint.find_fitting(bad, torch.nn.Linear(2, 1), "optimizer")


def test_files_of_ranks_that_do_not_belong_together_are_skipped(run, capsys):
    """They come from another run or from another step, or their names promise more ranks than there are."""
    good, bad = save_model(run, 1), checkpoint.path_of(run, 2)
    model = torch.nn.Linear(2, 1)
    for change in ({}, {"epoch": 3}, {"means": [{"train_loss": [0.5, 1]}]}, {"options": {"lr": "2"}}):
        for rank, more in enumerate(({}, change)):
            content = POSITION | {"model": model.state_dict(), "optimizer": {}} | more
            checkpoint.save(parts.path_of_rank(bad, rank, 2), content)
        assert checkpoint.find_fitting(bad, model, "optimizer") == (good if change else bad)
        said = capsys.readouterr().out
        assert not change or f"({next(iter(change))})" in said
    for path in bad.iterdir():
        path.rename(bad / f"rank-0000-of-{10**12}.pt")
    assert checkpoint.find_newest(run) == good


def test_a_checkpoint_of_another_trainer_is_skipped(run, capsys):
    good, other = save_model(run, 1, state_dict={}), save_model(run, 2)
    assert checkpoint.find_fitting(other, torch.nn.Linear(2, 1), "state_dict") == good
    assert "epoch-0002.pt" in capsys.readouterr().out


def test_leftovers_of_killed_writers_are_removed(run):
    """Only names that atomic.py makes. A writer is killed by SIGKILL, which runs no finally."""
    code = """
import os, signal, sys
from pathlib import Path
from hpctrain.files import atomic
with atomic.file(Path(sys.argv[1]), "wb") as file:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = run / "checkpoints"
    subprocess.run([sys.executable, "-c", code, folder / "epoch-0002.pt"])
    (leftover,) = folder.iterdir()
    kept = {
        ".x.tmp",
        ".epoch-0002.pt.0123456789ab.tmp.gz",
        "epoch-0002.pt.0123456789ab.tmp",
        ".a.0123456789AB.tmp",
    }
    for name in kept:
        (folder / name).touch()
    (folder / ".link.0123456789ab.tmp").symlink_to(run)
    for name in (".model.0123456789ab.tmp", ".model.0123456789ab.old", ".other.0123456789ab.old"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(name)
    (folder / "model").mkdir()
    atomic.remove_leftovers(folder)
    assert not leftover.exists()
    assert {path.name for path in folder.iterdir()} == kept | {".link.0123456789ab.tmp", "model", "other"}
    assert (folder / "other/config.json").read_text() == ".other.0123456789ab.old"  # it was to be replaced
