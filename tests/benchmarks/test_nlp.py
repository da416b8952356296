import sys
from importlib.util import find_spec

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command


def run(*options):
    """The rows of the benchmark's table, each a dictionary of text, by way; and both outputs."""
    command = [*options, REPOSITORY / "benchmarks/nlp.py", "--size=tiny", "--examples=64", "--turns=1"]
    done = run_command([sys.executable, *command])
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[1:]}, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
)
def test_benchmark_trains_all_ways_and_hpctrain_pads_least(launcher):
    rows, output, progress = run(*launcher)
    assert progress.count("run folder ") == 2  # the warm-up and the turn
    ways = ["(a) tutorial", "(b1) Trainer", "(b2) Trainer at its best", "(c) hpctrain"]
    if find_spec("accelerate") is None:
        assert "pip install accelerate" in output
        ways = [ways[0], ways[3]]
    assert list(rows) == ways
    share = {way: float(row["share of real tokens"]) for way, row in rows.items()}
    assert share["(a) tutorial"] < 0.15  # of 128 tokens
    assert share["(c) hpctrain"] > 2 * share["(a) tutorial"]
    for row in rows.values():
        assert float(row["examples/s"].replace(",", "")) > 0
    # initial weights and reviews are the same, and two steps change little
    losses = [float(row["evaluation loss"].split()[0]) for row in rows.values()]
    assert max(losses) - min(losses) < 0.05
