"""torch imports its compiler only where it is used, and works as before where it is."""

import subprocess
import sys

import pytest

START = """
import sys, torch
from hpctrain.lazy_compiler import postpone_compiler
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


def test_trainer_does_not_import_the_compiler(tmp_path):
    run(f"""
import os, sys
sys.argv = ["hpctrain", "train_ddp", "--epochs", "1", "--batch-size", "718", "--out", {str(tmp_path / "run")!r}]
os._exit = sys.exit
from hpctrain.__main__ import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
assert "torch" in sys.modules and "torch._dynamo.eval_frame" not in sys.modules
""")


@pytest.mark.parametrize(
    "use",
    [
        'print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())',
        "import torch._dynamo.config; print(float(torch._dynamo.config.suppress_errors is False) * 2)",
        "from torch._dynamo import OptimizedModule; print(2.0 if isinstance(OptimizedModule, type) else 0)",
        "torch._dynamo.utils.counters.clear(); print(2.0)",
        # some libraries ask every module for its file
        "print(2.0 * (not any(m.__name__ == 'torch._dynamo' for m in list(sys.modules.values()) if hasattr(m, '__file__'))))",
    ],
    ids=["compile", "part", "name", "name of a part", "file"],
)
def test_compiler_is_there_when_it_is_needed(use):
    assert float(run(START + use)) == 2
