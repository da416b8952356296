"""Horovod gets its ranks from any launcher; tests/vision/test_train.py and tests/launch/ train with it."""

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.distributed.horovod import ipv4
from hpctrain.errors import HpctrainError


def test_the_image_has_the_release_whose_parts_are_used():
    """init_horovod() calls what horovodrun of 0.28.1 calls, which is no public interface."""
    inputs = [path.read_text() for path in (REPOSITORY / "containers/locks").glob("*.in")]
    assert any("\nhorovod==0.28.1 " in text for text in inputs)
    assert all("\nhorovod==0.28.1 " in text for text in inputs if "\nhorovod" in text)


def test_an_address_without_ipv4_is_one_line():
    assert ipv4("127.0.0.1") == "127.0.0.1"
    with pytest.raises(HpctrainError, match=r"^no-such-host\.invalid[^\[]*$"):
        ipv4("no-such-host.invalid")
