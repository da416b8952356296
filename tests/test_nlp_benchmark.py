import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from slurm_cluster import REPOSITORY


def run(*options):
    """The rows of the table that the benchmark prints, by way: the cells as text."""
    command = [*options, REPOSITORY / "benchmarks/nlp.py", "--size", "tiny", "--examples", "64", "--turns", "1"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[1:]}, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_the_benchmark_trains_all_ways_and_ours_pads_least(launcher):
    rows, output = run(*launcher)
    ways = ["(a) tutorials", "(b1) Trainer", "(b2) Trainer, group_by_length", "(c) ours"]
    if find_spec("accelerate") is None:
        assert "pip install accelerate" in output
        ways = [ways[0], ways[3]]
    assert list(rows) == ways
    share = {way: float(row["share of real tokens"]) for way, row in rows.items()}
    assert share["(a) tutorials"] < 0.15  # of 128 places
    assert share["(c) ours"] > 2 * share["(a) tutorials"]
    # the first weights and the reviews are the same, and two steps change little
    losses = [float(row["evaluation loss (range)"].split()[0]) for row in rows.values()]
    assert max(losses) - min(losses) < 0.05
