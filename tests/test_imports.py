"""A trainer imports no library that it does not use: each file is a request, from every rank."""

import sys

import pytest

from tests.helpers import run_command


def run(program):
    done = run_command([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "not_used"),
    [
        ("train_ddp", ["lightning", "transformers", "scipy.signal"]),
        ("nlp.classify", ["lightning", "sklearn", "scipy.signal", "transformers.trainer", "peft"]),
    ],
)
def test_trainer_does_not_import_what_it_does_not_use(trainer, not_used, tmp_path):
    run(f"""
import os, sys
sys.argv = ["hpctrain", {trainer!r}, "--epochs", "1", "--batch-size", "64"]
sys.argv += ["--out", {str(tmp_path / "run")!r}]
os._exit = sys.exit
from hpctrain.__main__ import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
assert "torch" in sys.modules
assert [name for name in {not_used} if name in sys.modules] == []
""")


@pytest.mark.slow
def test_fetch_does_not_import_the_models():
    run("import sys, hpctrain.nlp.models.hub\nassert 'transformers.modeling_utils' not in sys.modules")


@pytest.mark.slow
def test_what_the_first_step_waits_for(tmp_path):
    """Beside torch, and what its optimizers import: its compiler, with sympy."""
    said = run(f"""
import os, sys
files = []
sys.addaudithook(lambda event, values: files.append(values[0]) if event == "open" else None)
import torch, torch._dynamo
of_torch, opened = set(sys.modules), len(files)
from hpctrain.run.record import Record
def first_step(run, loss, **values):
    more = sorted(set(sys.modules) - of_torch)
    assert len(more) <= 95 and len(files) - opened <= 150, (more, files[opened:])
    packages = {{name.partition(".")[0] for name in more}}
    assert packages.isdisjoint(("matplotlib", "PIL", "sklearn", "tensorboard"))
    print("counted", flush=True)
    os._exit(0)
Record.step = first_step
sys.argv = ["hpctrain", "train_ddp", "--out", {str(tmp_path / "run")!r}]
from hpctrain.__main__ import main
main()
""")
    assert said.endswith("counted\n")
