"""A trainer imports no library that it does not use, and these work as before where they are used.

Tried with torch 2.13, whose compiler lazy_imports.py postpones.
"""

import subprocess
import sys

import pytest

START = """
import sys, torch
from hpctrain.distributed.lazy_imports import postpone_compiler
postpone_compiler()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert "torch._dynamo.eval_frame" not in sys.modules, "imported for an optimizer"
"""


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "not_used"),
    [
        ("train_ddp", ["torch._dynamo.eval_frame", "lightning", "transformers", "scipy.signal"]),
        # transformers needs the compiler
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
    """Each file is a request to the file system, from every rank.

    On 2026-11-29, 89 modules besides torch's, 62 of them hpctrain's, and 11 of numpy.random, which each step
    of a run seeds.
    """
    said = run(f"""
import os, sys
files = []
sys.addaudithook(lambda event, values: files.append(values[0]) if event == "open" else None)
import torch
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        'print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())',
        "import torch._dynamo.config; print(float(torch._dynamo.config.suppress_errors is False) * 2)",
        "from torch._dynamo import OptimizedModule; print(2.0 if isinstance(OptimizedModule, type) else 0)",
        "torch._dynamo.utils.counters.clear(); print(2.0)",
        # some libraries ask every module for its file
        "files = [m.__name__ for m in list(sys.modules.values()) if hasattr(m, '__file__')]\n"
        "print(2.0 * ('torch._dynamo' not in files))",
    ],
    ids=["compile", "part", "name", "name of a part", "file"],
)
def test_compiler_is_there_when_it_is_needed(use):
    assert float(run(START + use)) == 2
