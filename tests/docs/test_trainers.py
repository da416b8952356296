"""docs/guides/trainers.md: a script that has moved from Horovod to DDP."""

import re

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_ranks

AROUND = """
import os
os.environ["HPCTRAIN_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # as in a job: torch ends after its threads
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

data = range(8)
model = torch.nn.Linear(1, 1)
torch.cuda.set_device = lambda device: print("device", device)  # on a machine without a GPU
value = torch.tensor(float(os.environ["RANK"]))
{lines}
model(torch.ones(1)).sum().backward()
print(sorted(sampler), value.item())
"""


@pytest.mark.slow
def test_the_lines_of_ddp_train(tmp_path):
    page = (REPOSITORY / "docs/guides/trainers.md").read_text()
    lines = re.findall(r"^\+(.*)$", page.partition("```diff\n")[2].partition("```")[0], re.M)
    script = tmp_path / "mine.py"
    script.write_text(AROUND.format(lines="\n".join(lines)))
    said = run_ranks(2, script, cwd=tmp_path)
    assert said == "device 0\n[1, 2, 4, 7] 0.5\ndevice 1\n[0, 3, 5, 6] 0.5\n"
