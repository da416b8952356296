"""Ranks that train alone do not go unnoticed: Lightning is refused, other scripts are warned."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import run_command
from tests.vision.test_train import in_image

# ---- a Trainer of Lightning ----

TRAINER = """
import os, sys, torch, {package} as lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, _):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
quiet = dict.fromkeys(quiet, False)
if sys.argv[1:]:
    del os.environ["HPCTRAIN_WORLD_SIZE"]
loader = torch.utils.data.DataLoader(torch.ones(4, 2))
lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet).fit(Module(), loader)
print("trained")
"""
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0",
    "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "HPCTRAIN_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
}  # fmt: skip


def run(folder, script, *words, **env):
    """Run a script as rank 0 of a job."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, folder / "script.py", *words]
    return run_command(command, cwd=folder, timeout=600, env=os.environ | env)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_trainer_that_would_train_alone_on_each_rank_is_refused(tmp_path, package):
    """As by default on CPUs, where each rank had its own weights at the end and exit status 0."""
    script = TRAINER.format(package=package)
    refused = run(tmp_path, script, **TORCHRUN)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.search("^hpctrain: error: .*Trainer.* 2 ranks.*devices=2,", refused.stderr, re.M), (
        refused.stderr
    )
    assert "Traceback" not in refused.stderr
    if package == "lightning":
        separate = run(tmp_path, script, "separate", **TORCHRUN)
        assert (separate.returncode, separate.stdout) == (0, "trained\n"), separate.stderr
        assert "hpctrain: warning" not in separate.stderr, separate.stderr


FABRIC = """
import torch
from {package} import Fabric
fabric = Fabric(accelerator="cpu")
module = torch.nn.Linear(2, 1)
module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
print("set up", fabric.world_size, flush=True)
fabric.backward(module(torch.ones(4, 2)).mean())
optimizer.step()
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "lightning_fabric"])
def test_a_fabric_that_would_train_alone_on_each_rank_is_refused(tmp_path, package):
    """As a script for `fabric run` does without it, unless it has the variables that the error names."""
    script = FABRIC.format(package=package)
    refused = run(tmp_path, script, **TORCHRUN)
    assert (refused.returncode, refused.stdout) == (2, "set up 1\n"), refused.stderr
    assert re.search("^hpctrain: error: .*Fabric.* 2 ranks.*devices=2,", refused.stderr, re.M), refused.stderr
    assert refused.stderr.count("hpctrain: ") == 1 and "Traceback" not in refused.stderr
    if package == "lightning":
        (tmp_path / "joined.py").write_text(script)
        advice = dict(re.findall(r"(LT_\w+)=(\w+)", refused.stderr))
        launch = "from torch.distributed.run import main; main(['--nproc-per-node=2', 'joined.py'])"
        job = {"HPCTRAIN_WORLD_SIZE": "2", "HPCTRAIN_TASKS_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
        joined = run(tmp_path, launch, **job, **advice)
        assert joined.returncode == 0, joined.stderr
        assert sorted(joined.stdout.split()) == sorted(2 * ["set", "up", "2", "trained"]), joined.stdout
        assert "hpctrain: " not in joined.stderr, joined.stderr


# ---- other scripts ----

STEP = "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1).step()\n"
# A group of torch for tests, which waits for no other rank
GROUP = (
    "from torch.testing._internal.distributed.fake_pg import FakeStore; "
    "torch.distributed.init_process_group('fake', store=FakeStore(), rank=0, world_size={})\n"
)
# Each process of the script makes a group, as by torch.multiprocessing.spawn().
PROCESSES = (
    "import torch, torch.multiprocessing as m\n"
    f"def work(_):\n    {GROUP.format(2)}    {STEP}"
    "if __name__ == '__main__': m.spawn(work)\n"
)
SCRIPTS = {
    "trains alone": f"import torch\n{STEP}{STEP}",
    "compiles, and trains alone": f"import torch\ntorch.compile(lambda x: x, backend='eager')(1)\n{STEP}",
    "has processes that join on each node alone": PROCESSES,
    "does not train": "import torch",
    "joins": f"import torch\n{GROUP.format(2)}{STEP}torch.distributed.destroy_process_group()",
    "joins, and trains in a subgroup": f"import torch\n{GROUP.format(2)}"
    f"torch.distributed.new_group([0])\n{STEP}",
    "joins by a DeviceMesh": f"import torch\n{GROUP.format(2)}"
    f"torch.distributed.init_device_mesh('cpu', (2,))\n{STEP}",
    "joins by rpc": "import torch, torch.distributed.rpc as r\n"
    f"r.init_rpc('a', rank=0, world_size=1)\n{STEP}r.shutdown()",
    "has processes that join": f"import os; os.environ['MASTER_ADDR'] = '127.0.0.2'\n{PROCESSES}",
}
# A world of one rank, so that none is waited for, in a job of two.
ONE_OF_TWO = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    "HPCTRAIN_WORLD_SIZE": "2", "HPCTRAIN_TASKS_PER_NODE": "2",
}  # fmt: skip
WARNING = "hpctrain: warning: "


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_rank_0_warns_at_its_first_step_if_it_has_not_joined(tmp_path, script):
    nodes = {"HPCTRAIN_TASKS_PER_NODE": "1"} if "processes" in script else {}
    done = run(tmp_path, SCRIPTS[script], **ONE_OF_TWO | nodes)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WARNING) == script.endswith("alone"), done.stderr


@pytest.mark.slow
def test_a_world_of_some_ranks_is_warned(tmp_path):
    """As where a script takes its rank from LOCAL_RANK: each node has a training of its own."""
    ranks = {"HPCTRAIN_WORLD_SIZE": "4", "MASTER_ADDR": "n1"}
    done = run(tmp_path, SCRIPTS["joins"], **ONE_OF_TWO | ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("hpctrain: ") == 1 and re.search(f"{WARNING}.* 2 .* 4 ranks", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"RANK": "1"}, {"HPCTRAIN_WORLD_SIZE": "1"}, {"HPCTRAIN_WORLD_SIZE": ""}])
def test_other_ranks_and_jobs_of_one_rank_do_not_warn(tmp_path, env):
    done = run(tmp_path, SCRIPTS["trains alone"], **ONE_OF_TWO | env)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_hook_compiles_to_nothing(tmp_path):
    """torch 2.13 compiles the hooks of an optimizer with its step."""
    script = f"import torch\noptimizer = {STEP.replace('.step()', '')}"
    script += "torch.compile(optimizer.step, backend='eager')()\n"
    script += "print(torch._dynamo.utils.counters['graph_break'])"
    with_hook, without = (run(tmp_path, script, **ONE_OF_TWO | {"RANK": rank}) for rank in "01")
    assert with_hook.returncode == 0 and WARNING not in with_hook.stderr, with_hook.stderr
    assert with_hook.stdout == without.stdout


LATER = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "warns"),
    [
        ("from mpi4py import MPI; {}", 2, False),
        ("from mpi4py import MPI; {}", 1, True),
        ("from mpi4py import MPI; MPI.Finalize(); {}", 2, True),
        (f"{LATER}; {{}}; MPI.Init(); MPI.Finalize()", 2, True),
    ],
    ids=["joined", "alone", "finalized", "not initialized"],
)
def test_ranks_of_mpi_that_have_joined_are_not_warned(tmp_path, script, ranks, warns):
    (tmp_path / "script.py").write_text(
        "import os; os.environ['RANK'] = os.environ['OMPI_COMM_WORLD_RANK']\n"  # as launch scripts do
        f"import torch; {script.format(STEP.strip())}"
    )
    launcher = [Path(sys.executable).parent / "mpirun", "--allow-run-as-root", "--oversubscribe", "-np"]
    env = os.environ | {"HPCTRAIN_WORLD_SIZE": "2"}
    done = run_command(
        [*launcher, str(ranks), sys.executable, "script.py"],
        cwd=tmp_path, env=env
    )  # fmt: skip
    assert done.returncode == 0 and (WARNING in done.stderr) == warns, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "kind"), [({}, "MULTI_CPU"), ({"ACCELERATE_USE_CPU": "false"}, "NO")], ids=["cpu", "other"]
)
def test_a_trainer_of_transformers_joins_on_cpus_or_is_warned(tmp_path, env, kind):
    """A torch for CPUs tells accelerate that there is no GPU.

    Otherwise accelerate 1.15 makes a process group, and each rank trains alone. _is_alone_in_accelerate()
    reads a private name of its state.
    """
    script = (
        "import torch\nfrom transformers import TrainingArguments\n"
        f"print(TrainingArguments('out').distributed_state.distributed_type)\n{STEP}"
    )
    done = run(tmp_path, script, **ONE_OF_TWO | env)
    assert (done.returncode, done.stdout) == (0, f"DistributedType.{kind}\n"), done.stderr
    for name in ("TrainingArguments(use_cpu=True)", "Accelerator(cpu=True)"):
        assert (name in done.stderr) == (kind == "NO"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "size"), [([], 1), (["mpirun", "-np", "2"], 2)], ids=["srun", "mpirun"])
def test_horovod_that_does_not_know_the_other_ranks_is_warned(tmp_path, launcher, size):
    """As where srun has started it without MPI."""
    controller = {"HOROVOD_CONTROLLER": "mpi"} if launcher else {}
    env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "HPCTRAIN_WORLD_SIZE": 2}
    command = in_image(*launcher, "python", **env, **controller)
    code = f"import torch, horovod.torch as hvd; hvd.init(); print(hvd.size()); {STEP}"
    done = run_command([*command, "-c", code], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{size}\n" * size), done.stdout + done.stderr
    assert (WARNING in done.stderr) == (size == 1), done.stderr
