"""Which kernels compute a model: compiled ones, and those that give the same bits in every run."""

import copy
import os
import sys
import warnings

import pytest
import torch

from hpctrain.errors import HpctrainError
from hpctrain.training import kernels
from hpctrain.vision.model import MnistNet
from tests.helpers import run_command


def test_only_training_is_compiled_and_a_copy_is_not(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, dynamic: lambda *inputs: (calls.append(dynamic), function(*inputs))[1],
    )
    model = MnistNet()
    names = list(model.state_dict())
    kernels.compile_training(model, dynamic=True)
    images = torch.zeros(1, 1, 28, 28)
    copy.deepcopy(model).train()(images)
    model.eval()(images)
    assert calls == [] and list(model.state_dict()) == names
    model.train()(images)
    assert calls == [True]


@pytest.mark.slow
def test_compiled_layers_of_1x1_convolutions_do_not_warn_under_ddp():
    """torch warns of strides in dimensions of size 1, once on each rank, in four lines."""
    with warnings.catch_warnings(record=True) as shown:
        kernels.compile_training(MnistNet())
        for message in ("Grad strides do not match bucket view strides. This may", "Grads of another kind"):
            warnings.warn(message, stacklevel=1)
    assert [text for each in shown if (text := str(each.message)).startswith("Grad")] == [
        "Grads of another kind"
    ]


def test_compiled_kernels_of_another_user_are_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    os.chown(tmp_path, 1, 1)
    with pytest.raises(
        HpctrainError, match=f"{tmp_path}: another user has made it .* set TORCHINDUCTOR_CACHE_DIR"
    ):
        kernels.check_compiler()


@pytest.mark.slow
def test_deterministic_refuses_an_operation_that_is_not():
    refused = """
import os, torch
from hpctrain.distributed import entry, world
from hpctrain.training import kernels
kernels.make_deterministic(False, torch.device("cuda"), on_gpu=True)
assert torch.is_deterministic_algorithms_warn_only_enabled()
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
kernels.make_deterministic(True, torch.device("cpu"))
entry.main(lambda _: torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2)), world.ALONE)
"""
    done = run_command([sys.executable, "-c", refused])
    problem = "put_ does not have a deterministic implementation"
    line = f"hpctrain: error: --deterministic: {problem}: leave the option out\n"
    assert (done.returncode, done.stderr) == (1, line)
