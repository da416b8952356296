"""The position of a run in its checkpoints, whose entries earlier and later versions read."""

import pytest
import torch

from hpctrain.checkpoints.position import Evaluations, Position
from tests.helpers import POSITION


def test_the_entries_are_those_of_every_version():
    position = Position(
        2,
        3,
        10,
        Evaluations(1, (0.5, -0.1), 4, 3, 2, (2, 0)),
        [{"train_loss": (0.5, 1)}],
        0,
        7,
        1.5,
        {"lr": "1"},
    )
    assert position.to_entries() == {
        "epoch": 2,
        "step": 3,
        "steps": 10,
        "global_step": 23,
        "best": [1, [0.5, -0.1], 4, 3, 2, [2, 0]],
        "means": [{"train_loss": [0.5, 1]}],
        "skipped": 0,
        "lines": 7,
        "seconds": 1.5,
        "options": {"lr": "1"},
        "overflows": 0,
    }


def test_a_position_is_read_as_it_was_written(tmp_path):
    torch.save(POSITION | {"model": {}}, tmp_path / "file.pt")
    read = Position.from_entries(torch.load(tmp_path / "file.pt", weights_only=True))
    assert read.to_entries() == POSITION


def test_a_checkpoint_of_a_version_that_evaluated_once_in_each_epoch():
    read = Position.from_entries(POSITION | {"epoch": 3, "best": [2, [0.5]]})
    assert read.best == Evaluations(epoch=2, score=(0.5,), step=0, total=3, number=2, latest=(3, 0))


def test_a_checkpoint_of_a_version_that_kept_the_loss_alone():
    earlier = {name: value for name, value in POSITION.items() if name != "means"} | {"losses": [3.0, 6.0]}
    of_ranks = [{"train_loss": (1.0, 3)}, {"train_loss": (2.0, 3)}]
    assert Position.from_entries(earlier | {"unlogged": 3}).means == of_ranks
    assert Position.from_entries(earlier | {"unlogged": 0}).means == [{}, {}]


def test_a_checkpoint_of_a_version_without_fp16():
    assert Position.from_entries({**POSITION, "overflows": 3}).overflows == 3
    earlier = {name: value for name, value in POSITION.items() if name != "overflows"}
    assert Position.from_entries(earlier).overflows == 0


@pytest.mark.parametrize("name", [name for name in Position._fields if name != "overflows"])
def test_an_entry_that_is_missing_is_named(name):
    with pytest.raises(ValueError, match=name):
        Position.from_entries({key: value for key, value in POSITION.items() if key != name})
