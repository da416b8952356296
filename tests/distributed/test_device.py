"""The device of a rank, where this machine has no GPU."""

import pytest
import torch

from hpctrain.distributed.device import choose_device
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError


def test_a_gpu_that_is_not_there():
    assert choose_device(ALONE, "cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(HpctrainError, match=r"--device cuda.*rank 0"):
            choose_device(ALONE, "cuda")


def test_gpus_that_slurm_granted_and_this_rank_cannot_use():
    """It would train on the CPU without a message.

    A laptop with a GPU that this torch does not use is no allocation.
    """
    if not torch.cuda.is_available():
        granted = {"SLURM_GPUS_ON_NODE": "4"}
        with pytest.raises(HpctrainError, match=r"rank 0.*SLURM_GPUS_ON_NODE=4"):
            choose_device(ALONE, "auto", granted)
        assert choose_device(ALONE, "cpu", granted).type == choose_device(ALONE, "auto", {}).type == "cpu"
