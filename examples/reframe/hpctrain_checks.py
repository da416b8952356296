"""hpctrain as tests of ReFrame: for centers that test their system after each maintenance.

docs/reference/fabric.md shows the use.

Each test submits a launch script, as a user does, from this copy of hpctrain (or HPCTRAIN_ROOT). `reference`
has the figures of the test cluster of hpctrain; put those of your system beside them, and give the number of
nodes and tasks with -S.
"""

import os
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.backends import getlauncher
from reframe.core.builtins import performance_function, run_after, run_before, sanity_function, variable

ROOT = os.environ.get("HPCTRAIN_ROOT") or str(Path(__file__).resolve().parents[2])


class LaunchScript(rfm.RunOnlyRegressionTest):
    """A command of hpctrain by a launch script, which starts the ranks itself."""

    valid_systems, valid_prog_environs = ["*"], ["*"]
    script = variable(str, value="apptainer_ddp.sh")
    nodes = variable(int, value=2)
    tasks_per_node = variable(int, value=2)
    gpus_per_node = variable(int, value=0)
    time_limit = "15m"

    @run_after("init")
    def set_size(self) -> None:
        """The job, and the environment of the launch script."""
        self.num_tasks, self.num_tasks_per_node = self.nodes * self.tasks_per_node, self.tasks_per_node
        self.env_vars = {"HPCTRAIN_ROOT": ROOT}
        self.executable = f"{ROOT}/launch/{self.script}"
        if self.gpus_per_node:
            self.extra_resources = {"gpu": {"num_gpus_per_node": self.gpus_per_node}}

    @run_before("run")
    def start_once(self) -> None:
        """Not by srun: the launch script calls it."""
        self.job.launcher = getlauncher("local")()


@rfm.simple_test
class Check(LaunchScript):
    """Every rank's node, software and folders, and a sum over all ranks."""

    executable_opts = ["check"]

    @sanity_function
    def passed(self) -> object:
        """All ranks took part."""
        return sn.assert_found(rf"check passed: {self.num_tasks} ranks", self.stdout)


@rfm.simple_test
class AllReduce(LaunchScript):
    """The bus bandwidth of an all-reduce, as nccl-tests defines it."""

    largest = variable(str, value="64M")
    reference = {"hpctrain-cluster": {"busbw": (0.35, -0.8, None, "GB/s")}}

    @run_before("run")
    def set_options(self) -> None:
        """The largest size alone."""
        self.executable_opts = ["bench", "--min-size", self.largest, "--max-size", self.largest]

    @sanity_function
    def complete(self) -> object:
        """All operations were measured, and what arrived was right: otherwise bench ends with an error."""
        return sn.assert_found(r"the table as JSON and a picture are in", self.stdout)

    @performance_function("GB/s")
    def busbw(self) -> object:
        """The last column of the table."""
        return sn.extractsingle(r"^(?:\d+: )?all-reduce +\d+ .* (\S+)$", self.stdout, 1, float, item=-1)


@rfm.simple_test
class Training(LaunchScript):
    """A short training on the digits that hpctrain brings along."""

    executable_opts = ["train_ddp", "--epochs", "3"]
    reference = {"hpctrain-cluster": {"examples_per_s": (160, -0.8, None, "1/s")}}

    @sanity_function
    def learns(self) -> object:
        """The accuracy after three epochs is far from guessing."""
        accuracy = sn.extractsingle(r"test_accuracy ([\d.]+)  in", self.stdout, 1, float)
        return sn.assert_ge(accuracy, 0.8)

    @performance_function("1/s")
    def examples_per_s(self) -> object:
        """Of all ranks, by the median of a step."""
        return sn.extractsingle(r"step_ms_p50 .* examples_per_s ([\d.]+)", self.stdout, 1, float)
