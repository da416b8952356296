"""The notebooks run in the image, from their first cell to their last, and give what is stored in them."""

import json
import re
import shutil

import pytest
from slurm_cluster import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def outputs(path):
    """For each cell with code, the kinds of its outputs: "stream", or the types of what it shows."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [
        sorted({kind for output in cell["outputs"] for kind in output.get("data", [output["output_type"]])})
        for cell in cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_small_outputs(path):
    assert path.stat().st_size < 100_000
    kinds = {kind for cell in outputs(path) for kind in cell}
    assert kinds and "error" not in kinds
    cells = json.loads(path.read_text())["cells"]
    assert all(cell["metadata"] == {} for cell in cells)
    assert cells[0]["source"][0].startswith("# ")
    assert not re.search(r"\b1 (ranks|nodes|epochs|steps|examples)\b", path.read_text())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_the_image(cluster, few_examples, path):
    folder = f"/home/alice/notebook-{path.stem}"
    cluster.exec("login", "mkdir", folder, user="alice")
    shutil.copy(path, cluster.host_path(folder))
    command = ["jupyter", "execute", "--startup_timeout=300", f"--output={path.stem}.out.ipynb", path.name]
    run = ["apptainer", "exec", "/project/hpctrain-cpu.sif", *command]
    env = {"OMP_NUM_THREADS": "1"}  # see conftest.py
    if path.stem != "lightning":  # which takes the digits of its test set by their numbers
        env |= few_examples
    cluster.exec("n1", *run, user="alice", cwd=folder, env=env)
    assert outputs(cluster.host_path(f"{folder}/{path.stem}.out.ipynb")) == outputs(path)
