"""Faults of tests/tools/faults.py that no other test has: the job ends, with the weights of a whole run."""

import pytest

from tests.tools.faults import DDP, FAULTS, Experiment

NAMES = [
    "slurmstepd of a node killed",
    "mpirun's daemon of a node killed",
    "server of the image killed on a node (squashfuse)",
    "scontrol requeuehold, released after 10 s",
    "file system of the run folder gone for 60 s",
    "job suspended for 10 s",
    "/tmp of a node full when the job starts again",
    "half an image when the job starts again",
    "slurmctld away for 4 min while a rank dies",
    "a rank 75 s late when the job starts again",
    "the name of a node unknown for 45 s when the job starts again",
    "the port of the rendezvous taken when the job starts again",
    "a package missing on a node when the job starts again",
]
ON = ["--nodelist=n1,n2"]


@pytest.fixture(scope="module")
def whole(cluster):
    """The result of a run to which nothing happens."""
    run = Experiment(cluster, "whole", DDP, ON)
    assert run.run(None).state == "COMPLETED", run.lines
    return run.result()


@pytest.mark.parametrize("name", NAMES)
def test_a_job_survives(cluster, whole, name):
    fault = FAULTS[name]
    run = Experiment(cluster, f"fault-{NAMES.index(name)}", fault.way, fault.options, fault.env)
    job = run.run(fault.act, timeout=480)
    log = "\n".join(line for _, line in run.lines)
    assert not run.problem and run.happened and job.state == "COMPLETED", (run.problem, log)
    assert run.compare(whole) == "equal", log


def test_what_a_killed_batch_script_leaves_is_removed_by_the_next_job(cluster):
    left = "ls -d /tmp/hpctrain-control.* /tmp/hpctrain-container-* || true"
    run = Experiment(cluster, "killed", DDP, ON)
    job = run.run(lambda run: run.root("n1", "pkill -KILL -f '[/]slurm_script'"))
    assert job.state == "FAILED" and run.root("n1", left), run.lines
    assert Experiment(cluster, "next", DDP, ON).run(None).state == "COMPLETED"
    assert not run.root("n1", left)
