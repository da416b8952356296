"""The position of a run in its checkpoints, whose entries earlier and later versions read."""

import pytest
import torch

from hpctrain.checkpoints.position import Evaluations, Position
from tests.helpers import POSITION


def test_the_entries_of_a_checkpoint():
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
        0,
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


@pytest.mark.parametrize("name", Position._fields)
def test_an_entry_that_is_missing_is_named(name):
    with pytest.raises(ValueError, match=name):
        Position.from_entries({key: value for key, value in POSITION.items() if key != name})
