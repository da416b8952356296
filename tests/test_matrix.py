"""Every launcher, runtime and trainer: the shipped scripts by sbatch, on 2 nodes with 2 ranks each, and the same weights in all.

The table of the README is what passed here: `pytest tests/test_matrix.py --write-table` writes it.
"""

import functools
import json
import re

import pytest
import torch
from slurm_cluster import REPOSITORY

pytestmark = pytest.mark.slow

HOME = "/home/alice/hpctrain"
TRAINERS = ["train_ddp", "train_lightning", "train_horovod"]
LAUNCHERS = {
    "srun": {
        "apptainer": ["launch/apptainer_ddp.sh"],
        "podman-hpc": ["launch/podman_hpc_ddp.sh"],
        "bare": ["launch/modules_ddp.sh"],
    },
    "torchrun": ["launch/apptainer_torchrun.sh"],
    "mpirun": ["launch/apptainer_mpi.sh", "--mpi=mpirun"],
    "srun + PMI": ["launch/apptainer_mpi.sh", "--mpi=pmix"],
    "horovodrun": ["launch/apptainer_horovod.sh", "--launcher=horovodrun"],
}
RUNTIMES = {
    "apptainer": {},
    "podman-hpc": {"HPCTRAIN_RUNTIME": "podman-hpc"},
    "bare": {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_ENV": "/opt/hpctrain"},
}
# What makes no sense, and why.
EXCLUDED: dict[tuple[str, str], str] = {}
CELLS = [(*pair, t) for pair in [(x, r) for x in LAUNCHERS for r in RUNTIMES] if pair not in EXCLUDED for t in TRAINERS]
BEGIN, END = "<!-- what tests/test_matrix.py saw pass -->\n", "<!-- end -->\n"


@pytest.fixture(scope="module")
def cell(cluster, podman_image):
    """A function that runs one cell, once, and gives its run folder."""

    @functools.cache
    def run(launcher, runtime, trainer, fusion=False, batch_size=240):
        script = LAUNCHERS[launcher]
        script = script[runtime] if isinstance(script, dict) else script
        env = RUNTIMES[runtime] | podman_image | ({} if fusion else {"HOROVOD_FUSION_THRESHOLD": "0"})
        name = re.sub(r"\W+", "-", f"runs/matrix/{launcher}-{runtime}-{trainer}-{fusion}-{batch_size}").replace(
            "runs-matrix-", "runs/matrix/"
        )
        options = ["--epochs", "1", "--batch-size", str(batch_size), "--out", name]  # five steps
        job = cluster.submit(*script, trainer, *options, cwd=HOME, env=env)
        ended = cluster.wait(job, timeout=240)
        output = cluster.host_path(f"{HOME}/slurm-{job}.out").read_text(errors="replace")
        assert ended.state == "COMPLETED", output
        return cluster.host_path(f"{HOME}/{name}")

    return run


def result(run):
    return json.loads((run / "result.json").read_text())


@pytest.mark.parametrize(("launcher", "runtime", "trainer"), CELLS)
def test_the_same_weights_bit_for_bit(cell, launcher, runtime, trainer):
    run = cell(launcher, runtime, trainer)
    world = json.loads((run / "config.json").read_text())["world"]
    assert (world["size"], world["nodes"], world["local_size"]) == (4, 2, 2)
    hosts = [log.read_text().split(" on ")[1].split(",")[0] for log in sorted((run / "logs").iterdir())]
    assert hosts == ["n1", "n1", "n2", "n2"]
    reference = result(cell("srun", "apptainer", trainer))
    assert result(run)["weights_sha256"] == reference["weights_sha256"]
    assert result(run)["test_loss"] == reference["test_loss"]


def test_the_same_loss_by_every_trainer(cell):
    results = [result(cell("srun", "apptainer", trainer)) for trainer in TRAINERS]
    for other in results[1:]:
        assert other["test_loss"] == pytest.approx(results[0]["test_loss"], abs=1e-5)


def test_horovod_with_tensor_fusion(cell):
    """Fused tensors are summed in other pieces, so in another order: the same to rounding, which grows with each step."""
    weights = [
        torch.load(cell("srun", "apptainer", "train_horovod", fusion, batch_size=476) / "checkpoints/epoch-0001.pt")["model"]
        for fusion in (False, True)
    ]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() <= 1e-6, name


def test_the_table_of_the_readme_is_what_passed(cell, request):
    mark = {}
    for launcher, runtime, trainer in CELLS:
        try:
            passed = result(cell(launcher, runtime, trainer))["weights_sha256"]
        except (AssertionError, TimeoutError):
            passed = None
        mark[launcher, runtime, trainer] = passed
    reference = {trainer: mark["srun", "apptainer", trainer] for trainer in TRAINERS}
    lines = [f"| | {' | '.join(LAUNCHERS)} |", "|---" * (len(LAUNCHERS) + 1) + "|"]
    for trainer in TRAINERS:
        cells = []
        for launcher in LAUNCHERS:
            same = [r for r in RUNTIMES if mark.get((launcher, r, trainer)) and mark[launcher, r, trainer] == reference[trainer]]
            cells.append("all three" if len(same) == len(RUNTIMES) else ", ".join(same))
        lines.append(f"| `{trainer}` | {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    readme = REPOSITORY / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    shown, after = rest.split(END)
    if request.config.getoption("--write-table"):
        readme.write_text(before + BEGIN + table + END + after)
    else:
        assert shown == table, "pytest tests/test_matrix.py --write-table writes what passed"
