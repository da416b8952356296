"""Every launcher, runtime and trainer: the shipped scripts by sbatch, on 2 nodes with 2 ranks each, and the
same weights in all.

The table of docs/reference/testing.md is what passed here:
`pytest tests/launch/test_matrix.py --write-table` writes it.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from slurm_cluster import REPOSITORY, Cluster

from tests.launch.helpers import HOME, LAUNCHERS, NO_CONTAINER, folder, result, wait

TRAINERS = ["train_ddp", "train_lightning", "train_horovod"]
# the scripts of srun that name their runtime
OF_RUNTIME = {"podman-hpc": ["launch/podman_hpc_ddp.sh"], "bare": ["launch/modules_ddp.sh"]}
RUNTIMES = {"apptainer": {}, "podman-hpc": {"HPCTRAIN_RUNTIME": "podman-hpc"}, "bare": NO_CONTAINER}
RUNTIMES["pyxis"] = {}
# those that prepare the image, and give the variables that select it
FIXTURES = {"podman-hpc": "podman_image", "pyxis": "pyxis"}
# Without srun nothing enters the image.
OF_PYXIS = ("srun", "torchrun", "srun + PMI")
CELLS = [
    (launcher, runtime, trainer)
    for launcher in LAUNCHERS
    for runtime in RUNTIMES
    for trainer in TRAINERS
    if runtime != "pyxis" or launcher in OF_PYXIS
]
# Cells of make test: each launcher with apptainer, and each runtime with srun.
MAIN_ROAD = {
    ("srun", "apptainer", "train_ddp"): pytest.mark.main_road("| `apptainer_ddp.sh` |"),
    ("torchrun", "apptainer", "train_lightning"): pytest.mark.main_road("| `apptainer_torchrun.sh` |"),
    ("mpirun", "apptainer", "train_horovod"): pytest.mark.main_road(
        "| `apptainer_mpi.sh` |", "`train_horovod` ran with every launcher"
    ),
    ("srun + PMI", "apptainer", "train_ddp"): pytest.mark.main_road("| `apptainer_mpi.sh` |"),
    ("horovodrun", "apptainer", "train_horovod"): pytest.mark.main_road(
        "| `apptainer_horovod.sh` |", "`train_horovod` ran with every launcher"
    ),
    ("srun", "podman-hpc", "train_lightning"): pytest.mark.main_road("| `podman_hpc_ddp.sh` |"),
    ("srun", "bare", "train_horovod"): pytest.mark.main_road("`train_horovod` ran with every launcher"),
}
# of cells of make test
OTHER_LAUNCHER = {"train_ddp": "srun + PMI", "train_lightning": "torchrun", "train_horovod": "mpirun"}
# jobs at a time, beside those of the other test process: the cores import torch most of the time
IN_FLIGHT = 2
BEGIN = "<!-- what tests/launch/test_matrix.py saw pass -->\n"


def list_runtimes(good: list[str], launcher: str) -> str:
    """The text of a cell of a table: the runtimes in which something holds."""
    known = [runtime for runtime in RUNTIMES if runtime != "pyxis" or launcher in OF_PYXIS]
    return f"all {'four' if len(known) == 4 else 'three'}" if good == known else ", ".join(good) or "none"


def script_of(launcher: str, runtime: str) -> list[str]:
    """The launch script of a cell, and its options."""
    return OF_RUNTIME.get(runtime, LAUNCHERS[launcher]) if launcher == "srun" else LAUNCHERS[launcher]


class Cells:
    """Runs each cell once. `ahead` submits the next cells while a test waits for another one."""

    def __init__(self, cluster: Cluster, request: pytest.FixtureRequest) -> None:
        self._cluster = cluster
        self._request = request
        self._jobs: dict[tuple, tuple[int, str]] = {}
        self._runs: dict[tuple, Path | str] = {}

    def ahead(self, cells: Iterable[tuple]) -> None:
        for cell in cells:
            if cell not in self._jobs:
                self._jobs[cell] = self._submit(*cell)

    def __call__(self, *cell: str | bool | int) -> Path:
        """The run folder of a cell."""
        self.ahead([cell])
        if cell not in self._runs:
            job, name = self._jobs[cell]
            ended, output = wait(self._cluster, job)
            self._runs[cell] = folder(self._cluster, name) if ended.state == "COMPLETED" else output
        run = self._runs[cell]
        assert isinstance(run, Path), run
        return run

    def _submit(
        self, launcher: str, runtime: str, trainer: str, fusion: bool = False, batch_size: int = 64
    ) -> tuple[int, str]:
        script = script_of(launcher, runtime)
        env = RUNTIMES[runtime]
        if runtime in FIXTURES:  # which take a minute
            env = env | self._request.getfixturevalue(FIXTURES[runtime])
        env = env | ({} if fusion else {"HOROVOD_FUSION_THRESHOLD": "0"})
        name = "runs/matrix/" + re.sub(r"\W+", "-", f"{launcher}-{runtime}-{trainer}-{fusion}-{batch_size}")
        # five steps
        options = ["--data", "digits", "--epochs", "1", "--batch-size", str(batch_size), "--out", name]
        return self._cluster.submit(*script, trainer, *options, cwd=HOME, env=env), name


@pytest.fixture(scope="module")
def cell(cluster, request):
    """A function that runs one cell, once, and gives its run folder."""
    return Cells(cluster, request)


@pytest.mark.parametrize(
    ("launcher", "runtime", "trainer"),
    [pytest.param(*cell, marks=MAIN_ROAD.get(cell, ())) for cell in CELLS],
)
def test_the_same_weights_bit_for_bit(request, cell, launcher, runtime, trainer):
    chosen = [item for item in request.session.items if getattr(item, "function", None) is request.function]
    here = chosen.index(request.node)
    cells = [
        tuple(item.callspec.params[name] for name in ("launcher", "runtime", "trainer"))
        for item in chosen[here:]
    ]
    cell.ahead(cells[:IN_FLIGHT])
    run = cell(launcher, runtime, trainer)
    world = json.loads((run / "config.json").read_text())["world"]
    assert (world["size"], world["nodes"], world["local_size"]) == (4, 2, 2)
    hosts = [log.read_text().split(" on ")[1].split(",")[0] for log in sorted((run / "logs").iterdir())]
    # others than n1 and n2 while an earlier job ends
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3], hosts
    # that of srun has no other to be compared with than one of another launcher
    other = OTHER_LAUNCHER[trainer] if (launcher, runtime) == ("srun", "apptainer") else "srun"
    reference = result(cell(other, "apptainer", trainer))
    assert result(run)["weights_sha256"] == reference["weights_sha256"]
    assert result(run)["test_loss"] == reference["test_loss"]


def test_the_same_loss_by_every_trainer(cell):
    """Also by train_fsdp, whose ranks communicate as those of train_ddp do: one cell of it is enough."""
    cells = [("srun", "apptainer", trainer) for trainer in [*TRAINERS, "train_fsdp"]]
    cell.ahead(cells)
    results = [result(cell(*each)) for each in cells]
    for other in results[1:]:
        assert other["test_loss"] == pytest.approx(results[0]["test_loss"], abs=1e-5)


def test_horovod_with_tensor_fusion(cell):
    """Fused tensors are summed in another order: equal to rounding, which grows with each step."""
    cells = [("srun", "apptainer", "train_horovod", fusion, 104) for fusion in (False, True)]
    cell.ahead(cells)
    weights = [torch.load(cell(*each) / "checkpoints/epoch-0001.pt")["model"] for each in cells]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() <= 1e-6, name


def test_the_table_of_the_readme_is_what_passed(cell, check_table):
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
            same = [r for r in RUNTIMES if mark.get((launcher, r, trainer)) == (reference[trainer] or "none")]
            cells.append(list_runtimes(same, launcher))
        lines.append(f"| `{trainer}` | {' | '.join(cells)} |")
    check_table(REPOSITORY / "docs/reference/testing.md", BEGIN, lines)
