"""A training that is killed anywhere in its loop goes on as if it had not been: see tools/loop_kills.py."""

import random

import pytest

from tests.tools.loop_kills import CASES, prove


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["train_ddp, fp16", "train_fsdp on 2, 4 and 1 ranks", "nlp.classify, fp16", "nlp.qa, FSDP2, fp16"],
)
def test_a_rank_that_is_killed(name, tmp_path):
    places, problem = prove(CASES[name], tmp_path / "case", kills=2, chance=random.Random(name))
    assert not problem and places, places
