"""Jobs that go on by themselves after a time limit, a preemption or a fault, on a real Slurm cluster.

All jobs run at once. Most run without a container, as four processes of a script that follows the contract of
launch/lib/control.sh.
"""

import json
import os
import re
import time
from functools import partial

import pytest

from tests.lightning.test_run_folder import EXAMPLES, result, run_script
from tests.tools import warm_start

pytestmark = pytest.mark.slow

HOME = "/home/alice/hpctrain"
BARE = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/opt/hpctrain"}

# What rank 0 writes at the start, what it does at `stop`, and how the first attempts end.
PROGRAM = """
import os, sys, time
from pathlib import Path
case, rank, restart = sys.argv[1], int(os.environ["RANK"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
control, told = Path(os.environ["HPCTRAIN_CONTROL"]), Path(f"told-{os.environ['HPCTRAIN_JOB']}")
if case == "error" and restart:
    print(f"ValueError: of rank {rank}", flush=True) if rank == 2 else time.sleep(100)
    sys.exit(1)
if restart and case != "again":
    print("went on", flush=True)
    sys.exit()
if rank == 0 and case in ("killed", "again", "error", "usage", "ignores", "canceled"):
    (control / "saved").write_text("--resume runs/x\\n")
print("polls", flush=True)
began = time.monotonic()
if case == "late":
    time.sleep(65 if rank == 0 else 0)
    sys.exit()
if case in ("killed", "again", "error", "unsaved"):
    time.sleep(1)
    os.kill(os.getpid(), 9) if rank == 3 else time.sleep(100)
if case == "usage":
    # As the trainers do: srun kills the remaining ranks when the first one fails.
    time.sleep(2 if rank == 0 else 0)
    sys.exit(2 if rank == 0 else 0)
while not told.exists():
    if rank == 0 and (control / "stop").exists() and case not in ("ignores", "canceled"):
        if case != "status":
            (control / "saved").write_text("--resume runs/x\\n")
            (control / "stopped").touch()
        print(f"asked after {time.monotonic() - began:.0f} s", flush=True)
        told.touch()
    time.sleep(0.2)
import decimal, sqlite3  # the image is still there
sys.exit(75 if case == "status" else 0)
"""


IN_IMAGE: dict[str, str] = {}
SCRIPT = "launch/apptainer_ddp.sh"
HERE = ["--nodelist=n1,n2"]
JOBS = {  # name: options of sbatch, environment, program
    "example": ([*HERE, "--ntasks-per-node=1"], BARE, "examples/requeue/train.py"),
    "limit": ([*HERE, "--time=1", "--signal=B:USR1@20"], BARE, "program.py"),
    "short": ([*HERE, "--time=1"], BARE, "program.py"),  # with the scripts' own --signal, which is longer
    "ignores": ([*HERE, "--time=1", "--signal=B:USR1@20"], BARE, "program.py"),
    "preempted": (["--nodelist=n3,n4"], IN_IMAGE, "program.py"),
    "unsaved": (HERE, BARE, "program.py"),
    "usage": (HERE, BARE, "program.py"),
    "killed": (HERE, BARE, "program.py"),
    "error": (HERE, BARE, "program.py"),
    "again": (HERE, BARE | {"HPCTRAIN_REQUEUES": "1"}, "program.py"),
    "status": (HERE, BARE, "program.py"),
    "array": (["--nodelist=n1", "--nodes=1", "--array=0-1"], BARE, "program.py"),
    "canceled": (HERE, BARE, "program.py"),
    "late": (HERE, BARE, "program.py"),
}


def folder(cluster, path):
    return cluster.host_path(f"{HOME}/{path}")


def shown(cluster, number, field):
    return re.search(
        rf"\b{field}=(\S+)", cluster.exec("login", "scontrol", "show", "job", str(number)).stdout
    )[1]


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


def processes(cluster, node, number):
    """The command lines of the processes of a job on a node, by their numbers."""
    script = (
        f"grep -slzx SLURM_JOB_ID={number} /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r ps -o pid=,args= -p"
    )
    lines = cluster.exec(node, "sh", "-c", script, check=False).stdout.splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


@pytest.fixture(scope="module")
def numbers(cluster):
    """The numbers of all jobs. Those that a signal stops have got it."""
    folder(cluster, "program.py").write_text(PROGRAM)

    def started(name, task=""):
        output = folder(cluster, f"slurm-{numbers[name]}{task}.out")
        said = "step 100" if name == "example" else "polls"
        ranks = 2 if task or name == "example" else 4
        wait_for(lambda: output.exists() and output.read_text().count(said) >= ranks)
        return f"{numbers[name]}{task}"

    numbers = {
        name: cluster.submit(
            *options, SCRIPT, program, "1000" if name == "example" else name, cwd=HOME, env=env
        )
        for name, (options, env, program) in JOBS.items()
    }

    def signal(name, task=""):
        cluster.exec("login", "scancel", "--signal=USR1", "--batch", started(name, task), user="alice")

    signal("example")  # first, while it has work left
    started("preempted")
    cluster.submit("--partition=urgent", "--nodelist=n3,n4", "--exclusive", script="#!/bin/sh\nsleep 1\n")
    signal("status")
    signal("array", "_1")
    cluster.exec("login", "scancel", started("canceled"), user="alice")
    return numbers


@pytest.fixture
def ended(cluster, numbers):
    """A function that waits for a job; returns its end state, the number of its restarts, and its output."""

    def wait(name):
        job = cluster.wait(numbers[name])
        return (
            job.state,
            int(shown(cluster, job.id, "Restarts")),
            folder(cluster, f"slurm-{job.id}.out").read_text(),
        )

    return wait


def said(output):
    """What the launch script said about the end of an attempt.

    Which rank gives srun its status (137 or 143) is a race.
    """
    lines = [line for line in output.splitlines() if re.search(r"^hpctrain: (the|not|exit|Slurm) ", line)]
    return [re.sub("exit status 1(37|43)", "exit status N", line) for line in lines]


def test_a_job_that_ends_before_it_has_saved_is_not_requeued(ended):
    state, restarts, output = ended("unsaved")
    assert (state, restarts) == ("FAILED", 0), output
    assert said(output) == [
        "hpctrain: not requeued: exit status N before this attempt has saved a checkpoint"
    ]


def test_an_error_that_a_restart_does_not_correct(ended):
    state, restarts, output = ended("usage")
    assert (state, restarts) == ("FAILED", 0), output
    shape = "--nodes=2 --ntasks-per-node=2"
    resume = f"continue with sbatch {shape} {HOME}/{SCRIPT} program.py usage --resume runs/x"
    assert said(output) == [
        f"hpctrain: not requeued, because a restart does not correct this error: {resume}"
    ]


def test_a_rank_that_ends_long_after_the_others(ended):
    """As rank 0 of a script that evaluates or saves alone at the end."""
    state, restarts, output = ended("late")
    assert (state, restarts) == ("COMPLETED", 0), output


def test_a_killed_rank_after_a_checkpoint(ended):
    state, restarts, output = ended("killed")
    assert (state, restarts) == ("COMPLETED", 1), output
    assert said(output) == [
        "hpctrain: exit status N after a checkpoint or the request to stop, "
        "restart 1 of at most 10 (HPCTRAIN_REQUEUES): requeuing the job"
    ]


def test_an_error_after_a_restart(ended):
    """srun ends with the status of the ranks that it kills then, which was taken for one of a lost node."""
    state, restarts, output = ended("error")
    assert (state, restarts) == ("FAILED", 1), output
    first = "task 2 on n2 failed first: Exited with exit code 1. Its last line: ValueError: of rank 2"
    why = "not requeued: exit status 1 before this attempt has saved a checkpoint"
    assert f"hpctrain: {first}\nhpctrain: {why}\n" in output, output


def test_a_job_that_fails_again_and_again(ended):
    state, restarts, output = ended("again")
    assert (state, restarts) == ("FAILED", 1), output
    assert "not requeued: exit status N after 1 restart, HPCTRAIN_REQUEUES allows no more" in said(output)[-1]


def test_exit_status_75_after_the_request_to_stop(ended):
    """srun kills the other ranks when the first one exits, so its own status may be another."""
    state, restarts, output = ended("status")
    assert (state, restarts) == ("COMPLETED", 1), output
    assert re.search("saved a checkpoint and stopped|the request to stop", said(output)[0]), output
    assert output.count("went on") == 4, output


def test_one_task_of_an_array(cluster, numbers):
    """The one whose number is that of the array."""
    number = numbers["array"]
    wait_for(lambda: shown(cluster, f"{number}_1", "JobState") == "COMPLETED")
    output = folder(cluster, f"slurm-{number}_1.out").read_text()
    assert f"job {number}," in output and output.count("went on") == 2, output
    assert [shown(cluster, f"{number}_{task}", "Restarts") for task in (0, 1)] == ["0", "1"]
    assert shown(cluster, f"{number}_0", "JobState") == "RUNNING"
    cluster.exec("login", "scancel", f"{number}_0", user="alice")


def test_a_job_that_its_user_cancels(cluster, numbers, ended):
    state, restarts, output = ended("canceled")
    assert (state, restarts) == ("CANCELLED", 0), output
    for node in ("n1", "n2"):
        wait_for(lambda node=node: not processes(cluster, node, numbers["canceled"]))


def test_the_example_of_the_documents(ended):
    state, restarts, output = ended("example")
    assert (state, restarts) == ("COMPLETED", 1), output
    assert len(re.findall("rank . continues at step", output)) == 2


def test_a_preempted_job_has_time_to_save(ended):
    state, restarts, output = ended("preempted")
    assert state == "COMPLETED" and restarts >= 1, output
    assert "hpctrain: the ranks have saved a checkpoint and stopped: requeuing the job" in output
    assert "Bus error" not in output


def test_a_time_limit(ended):
    state, restarts, output = ended("limit")
    assert (state, restarts) == ("COMPLETED", 1), output
    assert said(output) == ["hpctrain: the ranks have saved a checkpoint and stopped: requeuing the job"]


def test_a_time_limit_that_is_shorter_than_the_signal(ended):
    """Slurm sends the signal at once. The job would do nothing but start and stop."""
    state, restarts, output = ended("short")
    assert (state, restarts) == ("COMPLETED", 1), output
    assert int(re.search(r"asked after (\d+) s", output)[1]) > 10, output


def test_ranks_that_do_not_stop_are_killed_before_the_limit(ended):
    state, restarts, output = ended("ignores")
    assert (state, restarts) == ("COMPLETED", 1), output
    assert "the ranks have not stopped, and the time is nearly over: killing them" in output
    assert "after the request to stop: requeuing the job" in output


def test_a_trainer_ends_with_the_weights_of_a_run_that_nothing_happened_to(cluster, tmp_path):
    """In the image, with 4 ranks: asked to stop within an epoch, and later a rank is killed."""
    command = ["train_ddp", "--data=digits", "--epochs=20", "--checkpoint-every=1s", "--out"]
    number = cluster.submit(*HERE, SCRIPT, *command, "runs/disturbed", cwd=HOME)
    events = []

    def disturb(line):
        restart = re.search(r"job \d+ \(restart (\d)\)", line)
        if restart:
            events.append(f"restart {restart[1]}")
        if "epoch 3 step" in line and not events:
            events.append("stop")
            cluster.exec("login", "scancel", "--signal=USR1", "--batch", str(number), user="alice")
        if re.search(r"epoch \d+ step \d+ +test_loss", line) and events[-1:] == ["restart 1"]:
            # a checkpoint of this attempt is being written by now, but need not be complete
            saved = "n1", "sh", "-c", "ls /tmp/hpctrain-control.*/saved"
            wait_for(lambda: cluster.exec(*saved, check=False).returncode == 0)
            events.append("kill")
            cluster.exec(
                "n2", "sh", "-c", "kill -KILL $(pgrep -f '[h]pctrain train_ddp.*runs/disturbed' | tail -n 1)"
            )

    job = cluster.wait(number, on_line=disturb)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert job.state == "COMPLETED" and events == ["stop", "restart 1", "kill", "restart 2"], (events, output)
    assert (
        output.count("resuming after epoch") == 2
        and "ending early, as the job has to: saved after epoch" in output
    )
    runs = [tmp_path / "undisturbed", folder(cluster, "runs/disturbed")]
    whole = warm_start.run(
        warm_start.torchrun_ranks(4, [*command, str(runs[0])], dict(os.environ)), folder(cluster, ".")
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    weights = [json.loads((run / "result.json").read_text())["weights_sha256"] for run in runs]
    assert weights[0] == weights[1]
    steps = [
        [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in runs
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_trainer_of_a_user_ends_with_the_weights_of_a_run_that_nothing_happened_to(cluster, tmp_path, name):
    """An example with more and slower data: asked to stop within an epoch, and requeued."""
    text = EXAMPLES[name].read_text()
    changes = [
        ("512", "2048"),
        ("epochs=3", "epochs=2"),
        ("\nimport torch\n", "\nimport time\n\nimport torch\n"),
    ]
    changes.append(
        (getitem := re.search(r"    def __getitem__.*\n", text)[0], f"{getitem}        time.sleep(0.004)\n")
    )
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = folder(cluster, f"long_{name}.py")
    script.write_text(text)
    number = cluster.submit(
        *HERE, "--ntasks-per-node=1", SCRIPT, script.name, cwd=HOME, env=BARE | {"OMP_NUM_THREADS": "1"}
    )
    run = folder(cluster, f"runs/{name}-{number}")
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text())
    cluster.exec("login", "scancel", "--signal=USR1", "--batch", str(number), user="alice")
    job = cluster.wait(number)
    output = folder(cluster, f"slurm-{number}.out").read_text(errors="replace")  # a bar of tqdm may be cut
    assert (job.state, int(shown(cluster, number, "Restarts"))) == ("COMPLETED", 1), output
    assert said(output) == ["hpctrain: the ranks have saved a checkpoint and stopped: requeuing the job"]
    step = re.search(
        r"resuming from runs/\S+/checkpoint-(\d+)|resuming after epoch \d+ and (\d+) steps", output
    )
    assert step and int(step[1] or step[2]) % 64, output
    ranks = warm_start.torchrun_ranks(2, [], os.environ | {"HPCTRAIN_JOB": "7"}, partial(run_script, script))
    whole = warm_start.run(ranks, tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert json.loads((run / "result.json").read_text())["weights_sha256"] == result(name, tmp_path)


def test_a_trainer_that_diverges_is_not_requeued(cluster):
    """Although it has saved a checkpoint."""
    options = ["train_ddp", "--data=digits", "--lr=0.5", "--lr-decay=1", "--epochs=40", "--out=runs/diverged"]
    number = cluster.submit(*HERE, "--ntasks-per-node=1", SCRIPT, *options, cwd=HOME, env=BARE)
    job = cluster.wait(number)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert (job.state, int(shown(cluster, number, "Restarts"))) == ("FAILED", 0), output
    assert re.search(r"train_loss is nan|are not finite", output), output
    resume = "continue with sbatch --nodes=2 --ntasks-per-node=1 "
    resume += f"{HOME}/{SCRIPT} {' '.join(options)} --resume runs/diverged"
    assert said(output) == [
        f"hpctrain: not requeued, because a restart does not correct this error: {resume}"
    ]


def test_pbs_says_which_command_goes_on(cluster):
    """PBS Pro does not requeue the jobs of its users. At the end of the walltime it sends TERM."""
    folder(cluster, "program.py").write_text(PROGRAM)
    line = (
        f"HPCTRAIN_RUNTIME=none HPCTRAIN_PYTHON_ENV=/opt/hpctrain {HOME}/launch/pbs_ddp.sh program.py asked\n"
    )
    select = "select=2:ncpus=2:mpiprocs=2"
    number = int(
        cluster.exec("login", "qsub", "-l", select, user="alice", cwd=HOME, input=f"exec env {line}").stdout
    )
    output = folder(cluster, f"STDIN.o{number}")
    wait_for(lambda: output.exists() and output.read_text().count("polls") == 4)
    cluster.exec("login", "scancel", "--signal=TERM", "--batch", str(number), user="alice")
    job = cluster.wait(number)
    assert (job.state, job.exit_code) == ("FAILED", 75)
    resume = f"continue with echo '{HOME}/launch/pbs_ddp.sh program.py asked --resume runs/x' | qsub"
    assert said(output.read_text()) == [f"hpctrain: the ranks have saved a checkpoint and stopped: {resume}"]
