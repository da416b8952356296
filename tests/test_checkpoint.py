"""A checkpoint is whole or not there."""

import os

import pytest
import torch

from hpctrain import checkpoint
from hpctrain.world import HpctrainError


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def save(run, epoch):
    path = checkpoint.path_of(run, epoch)
    checkpoint.save(path, {"epoch": epoch, "weights": torch.arange(1000.0) * epoch})
    return path


def test_what_is_saved_is_loaded(run):
    path = save(run, 1)
    assert path == checkpoint.newest(run)
    state = checkpoint.load(path, torch.device("cpu"))
    assert state["epoch"] == 1 and torch.equal(state["weights"], torch.arange(1000.0))
    assert torch.load(path)["epoch"] == 1  # a plain torch file, for everybody


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty"])
def test_a_broken_checkpoint_is_passed_over(run, harm, capsys):
    good, bad = save(run, 1), save(run, 2)
    content = bytearray(bad.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1  # inside the tensor, where torch.load() itself notices nothing
    bad.write_bytes({"flip": content, "truncate": content[:-100], "empty": b""}[harm])
    assert checkpoint.newest(run) == good
    assert "epoch-0002.pt" in capsys.readouterr().out
    good.unlink()
    with pytest.raises(HpctrainError, match="every checkpoint in it is broken"):
        checkpoint.newest(run)


def test_no_checkpoint(run):
    with pytest.raises(HpctrainError, match="no checkpoint to resume from"):
        checkpoint.newest(run)
    with pytest.raises(HpctrainError, match="no checkpoint to resume from"):
        checkpoint.newest(run / "nowhere")


def test_a_write_that_fails_leaves_the_earlier_checkpoint_and_nothing_else(run, monkeypatch):
    good = save(run, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HpctrainError, match=r"epoch-0002.pt: the checkpoint could not be written .*No space left"):
        save(run, 2)
    assert [path.name for path in (run / "checkpoints").iterdir()] == [good.name]


def test_code_is_never_loaded(run):
    path = run / "checkpoints" / "epoch-0009.pt"
    torch.save({"evil": os.system}, path)
    with pytest.raises(HpctrainError, match=r"epoch-0009.pt: not a checkpoint"):
        checkpoint.load(path, torch.device("cpu"))
