"""What docs/guides/laptop.md promises of .venv, in which the tests run."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from tests.helpers import REPOSITORY, run_command

pytestmark = pytest.mark.main_road

BIN = Path(sys.prefix) / "bin"
# Open MPI does not start as root without these.
ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


def run(*command, **env):
    env = os.environ | ENV | {"PATH": f"{BIN}:/usr/bin:/bin"} | env
    done = run_command(command, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_mpirun_of_the_environment_starts_ranks_with_one_world():
    check = [sys.executable, "-m", "hpctrain", "check"]
    said = run("mpirun", "--oversubscribe", "-np", "2", *check, MASTER_ADDR="127.0.0.1", MASTER_PORT="29547")
    assert re.search(r"check passed: 2 ranks on 1 host \(openmpi\).* over MPI, too \(Open MPI v5", said)


@pytest.mark.slow
def test_a_plain_lightning_script():
    script = REPOSITORY / "tests/scripts/plain_lightning.py"
    env = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": sys.prefix, "HPCTRAIN_TASKS": "2"}
    said = run(REPOSITORY / "launch/local.sh", script, **env)
    losses = dict(re.findall(r"rank (\d) of 2 loss ([\d.]+)", said))
    assert losses.keys() == {"0", "1"} and losses["0"] == losses["1"], said


def test_torchvision_without_its_compiled_operators():
    model = torchvision.models.resnet18(num_classes=10).eval()
    picture = torchvision.transforms.Resize(32)(torch.rand(3, 40, 40))
    assert model(picture[None]).shape == (1, 10)
