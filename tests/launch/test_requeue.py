"""Jobs that go on by themselves after a time limit, a preemption or a fault, on a real Slurm cluster.

All jobs run at once. Most run without a container, as four processes of a script that follows the contract of
launch/lib/control.sh.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
from slurm_cluster import ENDED, Cluster, bare_binds

from tests.launch.helpers import (
    HERE,
    HOME,
    NO_CONTAINER,
    ONE_EACH,
    SCRIPT,
    assert_ended,
    folder,
    job,
    result,
    signal_rank,
    wait,
    wait_and_act,
    wait_until,
    wait_until_saved,
    zone_with_clocks_back_in,
)
from tests.lightning.test_run_folder import EXAMPLES, run_script
from tests.lightning.test_run_folder import result as result_of_example
from tests.tools import warm_start


@pytest.fixture(scope="module", autouse=True)
def start_slow_jobs(start_in_background):
    """Before the first test, so that they have ended when their tests run."""
    start_in_background(test_a_job_whose_node_dies_resumes_from_its_last_checkpoint, one_node_dies)
    with_spare = test_a_job_with_a_spare_node_goes_on_or_is_requeued_when_one_dies
    start_in_background(with_spare, nodes_die_of_jobs_with_a_spare_one)


# What rank 0 writes at the start, what it does at `stop`, and how the first attempts end.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
case, rank, restart = sys.argv[1], int(os.environ["RANK"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
control, told = Path(os.environ["HPCTRAIN_CONTROL"]), Path(f"told-{os.environ['HPCTRAIN_JOB']}")
if case == "error" and restart:
    print(f"ValueError: of rank {rank}", flush=True) if rank == 2 else time.sleep(100)
    sys.exit(1)
if restart:
    print("went on", flush=True)
    sys.exit()
if rank == 0 and case in ("killed", "error", "ignores", "canceled"):
    (control / "saved").write_text("--resume runs/x\\n")
if name := {"handler": "SIGUSR1", "step": "SIGUSR1", "terminates": "SIGTERM"}.get(case):
    got = []
    signal.signal(getattr(signal, name), lambda number, frame: got.append(number))
    print("polls", flush=True)
    while not got:
        time.sleep(0.2)
    print("got", name, flush=True)
    time.sleep(3)
    sys.exit(75)
print("polls", flush=True)
began = time.monotonic()
if case == "late":
    time.sleep(65 if rank == 0 else 0)
    sys.exit()
if case in ("killed", "error"):
    time.sleep(1)
    os.kill(os.getpid(), 9) if rank == 3 else time.sleep(100)
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


SAVED = "the ranks have saved a checkpoint and stopped: requeuing"
LIMIT = ["--time=1", "--signal=B:USR1@20"]
# options of sbatch, how the job ends, the number of its restarts, and what its log has
MAIN_ROAD = pytest.mark.main_road("At its time limit, after a preemption and")
JOBS = {
    "example": (
        ["--ntasks-per-node=1"],
        "COMPLETED",
        1,
        r"rank . continues at step(.|\n)*rank . continues at",
    ),
    "limit": (LIMIT, "COMPLETED", 1, SAVED),
    # With the scripts' own --signal, which is longer than the limit: Slurm sends it at once. The job would do
    # nothing but start and stop.
    "short": (["--time=1"], "COMPLETED", 1, r"asked after \d\d s"),
    # In the hour in which clocks go back: the ranks were asked to stop an hour later.
    "clocks": (LIMIT, "COMPLETED", 1, SAVED),
    # Ranks that do not stop are killed before the limit.
    "ignores": (LIMIT, "COMPLETED", 1, r"killing them(.|\n)*after the request to stop: requeuing"),
    # It has time to save, and its image stays.
    "preempted": (["--nodelist=n3,n4"], "COMPLETED", 1, SAVED),
    "killed": ([], "COMPLETED", 1, r"exit status (137|143) .* restart 1 of at most 10 \(HPCTRAIN_REQUEUES\)"),
    # srun ends with the status of the ranks that it kills then, which was taken for one of a lost node.
    "error": ([], "FAILED", 1, r"task 2 on n2 .* exit code 1.* ValueError: of rank 2\n.*not requeued: .* 1 "),
    # srun kills the other ranks when the first one exits with 75, so its own status may be another.
    "status": ([], "COMPLETED", 1, r"(stopped|request to stop).*requeuing(.|\n)*(went on(.|\n)*){4}"),
    # A script with a handler of its own gets its signal, also that of sbatch --signal=USR1@300, without a B.
    "handler": ([], "COMPLETED", 1, r"(got SIGUSR1(.|\n)*){4}requeuing(.|\n)*(went on(.|\n)*){4}"),
    "terminates": ([], "COMPLETED", 1, r"(got SIGTERM(.|\n)*){4}requeuing(.|\n)*(went on(.|\n)*){4}"),
    "step": ([], "COMPLETED", 1, r"(got SIGUSR1(.|\n)*){4}requeuing(.|\n)*(went on(.|\n)*){4}"),
    "array": (["--nodelist=n1", "--nodes=1", "--array=0-1"], None, None, r"(went on(.|\n)*){2}"),
    "canceled": ([], "CANCELLED", 0, ""),
    # A rank ends long after the others, as rank 0 of a script that evaluates or saves alone at the end.
    "late": ([], "COMPLETED", 0, ""),
}


def shown(cluster, number, field):
    job = cluster.exec("login", "scontrol", "show", "job", str(number)).stdout
    return re.search(rf"\b{field}=(\S+)", job)[1]


def restarts_of(cluster, number):
    return int(shown(cluster, number, "Restarts"))


def processes(cluster, node, number):
    """The command lines of the processes of a job on a node, by their numbers."""
    mine = f"grep -slzx SLURM_JOB_ID={number} /proc/[0-9]*/environ | cut -d/ -f3"
    script = f"{mine} | xargs -r ps -o pid=,args= -p"
    lines = cluster.exec(node, "sh", "-c", script, check=False).stdout.splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def send_usr1(cluster, number):
    cluster.exec("login", "scancel", "--signal=USR1", "--batch", str(number), user="alice")


@pytest.fixture(scope="module")
def numbers(cluster, request):
    """The numbers of the jobs of all tests of this session. Those that a signal stops have got it."""
    folder(cluster, "program.py").write_text(PROGRAM)
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = [name for name in JOBS if name in [item.callspec.params.get("name") for item in mine]]
    numbers = {}
    for name in chosen:
        program = ["examples/requeue/train.py", "1000"] if name == "example" else ["program.py", name]
        env = {} if name == "preempted" else NO_CONTAINER
        env |= {"TZ": zone_with_clocks_back_in(3000)} if name == "clocks" else {}
        numbers[name] = cluster.submit(HERE, *JOBS[name][0], SCRIPT, *program, cwd=HOME, env=env)

    def started(name, task=""):
        output = folder(cluster, f"slurm-{numbers[name]}{task}.out")
        said = "step 100" if name == "example" else "polls"
        ranks = 2 if task or name == "example" else 4
        wait_until(lambda: output.exists() and output.read_text().count(said) >= ranks)
        return f"{numbers[name]}{task}"

    urgent = ["--partition=urgent", "--nodelist=n3,n4", "--exclusive"]
    acts = {
        "example": lambda: send_usr1(cluster, started("example")),  # first, while it has work left
        "preempted": lambda: started("preempted") and cluster.submit(*urgent, script="#!/bin/sh\nsleep 1\n"),
        "status": lambda: send_usr1(cluster, started("status")),
        "handler": lambda: send_usr1(cluster, started("handler")),
        "terminates": lambda: send_usr1(cluster, started("terminates")),
        "step": lambda: cluster.exec("login", "scancel", "--signal=USR1", started("step"), user="alice"),
        "array": lambda: send_usr1(cluster, started("array", "_1")),
        "canceled": lambda: cluster.exec("login", "scancel", started("canceled"), user="alice"),
    }
    for name, act in acts.items():
        if name in numbers:
            act()
    return numbers


def said(output):
    """What the launch script said about the end of an attempt."""
    return [line for line in output.splitlines() if re.search(r"^hpctrain: (the|not|exit|Slurm) ", line)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=MAIN_ROAD if name in ("limit", "preempted") else ())
        for name in JOBS
        if name != "array"
    ],
)
def test_how_a_job_ends(cluster, numbers, name):
    _, state, restarts, text = JOBS[name]
    ended, output = wait(cluster, numbers[name])
    assert ended.state == state and re.search(text, output), output
    count = restarts_of(cluster, ended.id)
    assert count == restarts or (name == "preempted" and count > restarts), output
    # one line says it
    assert len(said(output)) == 1 or name not in ("limit", "killed"), output
    assert "Bus error" not in output
    if name == "canceled":
        for node in ("n1", "n2"):
            wait_until(lambda node=node: not processes(cluster, node, numbers[name]))


@pytest.mark.parametrize("name", ["array"])
def test_one_task_of_an_array(cluster, numbers, name):
    """The one whose number is that of the array."""
    number = numbers[name]
    wait_until(lambda: shown(cluster, f"{number}_1", "JobState") == "COMPLETED")
    output = folder(cluster, f"slurm-{number}_1.out").read_text()
    assert f"job {number}," in output and re.search(JOBS[name][3], output), output
    assert [shown(cluster, f"{number}_{task}", "Restarts") for task in (0, 1)] == ["0", "1"]
    assert shown(cluster, f"{number}_0", "JobState") == "RUNNING"
    cluster.exec("login", "scancel", f"{number}_0", user="alice")


def weights_and_steps(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return result(run)["weights_sha256"], [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param(
            "apptainer",
            marks=pytest.mark.main_road("when a rank or a node dies, Slurm requeues the job and it resumes"),
        ),
        "pyxis",
    ],
)
def test_a_trainer_ends_with_the_weights_of_a_run_that_nothing_happened_to(
    cluster, tmp_path, runtime, request
):
    """In the image, with 4 ranks: asked to stop within an epoch, and later a rank is killed."""
    env = request.getfixturevalue("pyxis") if runtime == "pyxis" else {}
    command = ["train_ddp", "--data=digits", "--epochs=20", "--checkpoint-every=1s", "--out"]
    run = f"runs/disturbed-{runtime}"
    number = cluster.submit(HERE, SCRIPT, *command, run, cwd=HOME, env=env)
    events = []

    def disturb(line):
        restart = re.search(r"job \d+ \(restart (\d)\)", line)
        if restart:
            events.append(f"restart {restart[1]}")
        if "epoch 3 step" in line and not events:
            events.append("stop")
            send_usr1(cluster, number)
        if re.search(r"epoch \d+ step \d+ +test_loss", line) and events[-1:] == ["restart 1"]:
            wait_until_saved(cluster)
            events.append("kill")
            signal_rank(cluster, "KILL", f"train_ddp.*{run}")

    ended, output = wait(cluster, number, on_line=disturb)
    events_of_run = ["stop", "restart 1", "kill", "restart 2"]
    assert ended.state == "COMPLETED" and events == events_of_run, (events, output)
    assert output.count("resuming after epoch") == 2 and "saved after epoch" in output
    ranks = warm_start.torchrun_ranks(4, [*command, str(tmp_path / "undisturbed")], dict(os.environ))
    whole = warm_start.run(ranks, folder(cluster, "."))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert weights_and_steps(folder(cluster, run)) == weights_and_steps(tmp_path / "undisturbed")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_trainer_of_a_user_ends_with_the_weights_of_a_run_that_nothing_happened_to(
    cluster, tmp_path, example
):
    """An example with more and slower data: asked to stop within an epoch, and requeued."""
    text = EXAMPLES[example].read_text()
    getitem = re.search(r"    def __getitem__.*\n", text)[0]
    changes = {"512": "2048", "epochs=3": "epochs=2", "\nimport torch\n": "\nimport time\n\nimport torch\n"}
    for before, after in (changes | {getitem: f"{getitem}        time.sleep(0.004)\n"}).items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = folder(cluster, f"long_{example}.py")
    script.write_text(text)
    env = NO_CONTAINER | {"OMP_NUM_THREADS": "1"}
    number = cluster.submit(*ONE_EACH, SCRIPT, script.name, cwd=HOME, env=env)
    run = folder(cluster, f"runs/{example}-{number}")
    wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text())
    send_usr1(cluster, number)
    ended, output = wait(cluster, number)
    assert (ended.state, restarts_of(cluster, number)) == ("COMPLETED", 1), output
    assert len(said(output)) == 1 and SAVED in said(output)[0]
    resuming = r"resuming from runs/\S+/checkpoint-(\d+)|resuming after epoch \d+ and (\d+) steps"
    step = re.search(resuming, output)
    assert step and int(step[1] or step[2]) % 64, output
    ranks = warm_start.torchrun_ranks(2, [], os.environ | {"HPCTRAIN_JOB": "7"}, partial(run_script, script))
    whole = warm_start.run(ranks, tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert result(run)["weights_sha256"] == result_of_example(example, tmp_path)


def test_a_trainer_that_diverges_is_not_requeued(cluster):
    """Although it has saved a checkpoint."""
    command = "train_ddp --data=digits --lr=0.5 --lr-decay=1 --epochs=40 --out=runs/diverged"
    ended, output = job(cluster, *command.split(), options=ONE_EACH, env=NO_CONTAINER)
    assert (ended.state, restarts_of(cluster, ended.id)) == ("FAILED", 0), output
    assert re.search(r"train_loss is nan|are not finite", output), output
    resume = f"sbatch --nodes=2 --ntasks-per-node=1 {HOME}/{SCRIPT} {command} --resume runs/diverged"
    (line,) = said(output)
    assert line.startswith("hpctrain: not requeued") and line.endswith(resume)


def test_pbs_says_which_command_goes_on(cluster):
    """PBS sends SIGTERM to the ranks of the first node as well, which then save nothing more."""
    folder(cluster, "program.py").write_text(PROGRAM)
    env = " ".join(f"{name}={value}" for name, value in NO_CONTAINER.items())
    line = f"exec env {env} {HOME}/launch/pbs_ddp.sh program.py canceled\n"
    options = ["-j", "oe", "-k", "oed", "-l", "select=2:ncpus=2:mpiprocs=2", "-l", "place=scatter"]
    number = cluster.qsub(*options, cwd=HOME, script=line)
    output = folder(cluster, f"STDIN.o{number}")
    wait_until(lambda: output.exists() and output.read_text().count("polls") == 4)
    cluster.exec("login", "qdel", f"{number}.login", user="alice")
    ended = cluster.wait(number)
    assert (ended.state, ended.exit_code) == ("FAILED", 271 & 255)
    resume = f"echo '{HOME}/launch/pbs_ddp.sh program.py canceled --resume runs/x' | qsub"
    (line,) = said(output.read_text())
    assert "unless qstat shows that it goes on, continue with " in line and resume in line, line


# ---- a batch script of the user's own ----

SLOW = """
import os, sys, time
import torch
import hpctrain

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        time.sleep(float(os.environ.get("SLEEP", 0.02)))
        return torch.full((4,), index / 512)

with hpctrain.Run("slow", out=sys.argv[1], resume="auto") as run:
    model = run.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(int(sys.argv[2])):
        for rows in run.batches(Slow(), 16):
            loss = model(rows).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
"""
OWN_JOB = """#!/bin/bash
#SBATCH --time=2 --requeue
#SBATCH --open-mode=append
mkdir -p /tmp/staged-$SLURM_JOB_ID
{}
"""
# options of sbatch, the lines of the script, the tasks of an array, the run folders of a job, its epochs
OWN_JOBS = {
    "plain": (ONE_EACH, f"{SCRIPT} slow.py runs/plain 12", [""], ["runs/plain"], 12),
    "wrapped": (ONE_EACH, f"{SCRIPT} slow.py runs/wrapped 12", [""], ["runs/wrapped"], 12),
    "exec": (ONE_EACH, f"exec {SCRIPT} slow.py runs/exec 12", [""], ["runs/exec"], 12),
    "array": (
        ["--array=0-1", "--nodes=1", "--ntasks-per-node=2"],
        f"{SCRIPT} slow.py runs/array-$SLURM_ARRAY_TASK_ID 12",
        ["_0", "_1"],
        ["runs/array-0", "runs/array-1"],
        12,
    ),
    # A job that is being requeued does not go on with the next one.
    "loop": (
        ONE_EACH,
        f"for i in 1 2 3; do {SCRIPT} slow.py runs/loop-$i 5; done",
        [""],
        ["runs/loop-1", "runs/loop-2", "runs/loop-3"],
        5,
    ),
}


@pytest.fixture(scope="module")
def own_jobs(cluster):
    """The numbers of jobs of two minutes, which call a launch script and train longer."""
    folder(cluster, "slow.py").write_text(SLOW)
    numbers = {}
    for name, (options, lines, *_) in OWN_JOBS.items():
        words = (
            ["--time=2", "--requeue", "--open-mode=append", f"--wrap={lines}"] if name == "wrapped" else []
        )
        script = {} if words else {"script": OWN_JOB.format(lines)}
        numbers[name] = cluster.submit(*options, *words, cwd=HOME, env=NO_CONTAINER, **script)
    return numbers


@pytest.fixture(scope="module")
def weights_of_slow(tmp_path_factory):
    """The weights of two ranks after so many epochs, by a run that nothing happened to."""
    top = tmp_path_factory.mktemp("slow")
    (top / "slow.py").write_text(SLOW)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for epochs in (5, 12):
        command = [*torchrun, "slow.py", f"runs/{epochs}", str(epochs)]
        subprocess.run(command, cwd=top, env=os.environ | {"SLEEP": "0", "OMP_NUM_THREADS": "1"}, check=True)
    return {epochs: weights_and_steps(top / f"runs/{epochs}") for epochs in (5, 12)}


@pytest.mark.parametrize("name", OWN_JOBS)
def test_a_batch_script_of_ones_own_is_requeued_at_its_time_limit(cluster, own_jobs, weights_of_slow, name):
    """It reached its time limit without a checkpoint, because Slurm's signal is for a batch script alone."""
    _, _, tasks, runs, epochs = OWN_JOBS[name]
    for task in tasks:
        number = f"{own_jobs[name]}{task}"
        wait_until(lambda number=number: shown(cluster, number, "JobState") in ENDED, 600)
        output = folder(cluster, f"slurm-{number}.out").read_text()
        assert shown(cluster, number, "JobState") == "COMPLETED", output
        assert restarts_of(cluster, number) > 0 and SAVED in output, output
    for run in runs:
        assert weights_and_steps(folder(cluster, run)) == weights_of_slow[epochs], run


# ---- a node dies ----


@contextmanager
def own_cluster(sif):
    with Cluster(nodes=4, binds={sif: f"/project/{sif.name}", **bare_binds(sif)}) as cluster:
        cluster.install("alice")
        yield cluster


def crash_while_training(cluster, node, options=(), script=(SCRIPT,), restarts=1):
    """A job trains on two of four nodes, and one crashes in epoch 3; returns its weights and its steps.

    Where Slurm starts the job again, it runs without a container, and on other nodes: one that comes back may
    still get Slurm's order to kill the tasks of the first attempt, which have the same numbers.
    """
    command = [*script, "train_ddp", "--epochs", "7", "--watchdog", "10"]
    number = cluster.submit(*options, *command, cwd=HOME, env=NO_CONTAINER if restarts else None)
    output = assert_ended(
        wait_and_act(cluster, number, "epoch 3 step", partial(cluster.crash, node)), "COMPLETED"
    )
    run = folder(cluster, f"runs/train_ddp/{number}")
    resumed = rf"resuming after epoch \d+ .*of runs/train_ddp/{number}/checkpoints"
    assert re.search(resumed, output) and output.count("restart 1") == 1, output
    assert restarts_of(cluster, number) == restarts
    assert ("Going on within the job on n1 n3" in output) == (restarts == 0), output
    assert result(run)["epochs"] == 7 and result(run)["test_accuracy"] > 0.95
    return weights_and_steps(run)


def one_node_dies(sif):
    with own_cluster(sif) as cluster:
        return crash_while_training(cluster, "n2")


def nodes_die_of_jobs_with_a_spare_one(sif):
    weights = []
    with own_cluster(sif) as cluster:
        for node, restarts in (("n2", 0), ("n1", 1)):
            spare = {"options": ["--no-kill", "--nodes=3"], "script": [SCRIPT, "--spare-nodes=1"]}
            weights.append(crash_while_training(cluster, node, **spare, restarts=restarts))
            cluster.boot(node)
            cluster.exec("login", "scontrol", "update", f"nodename={node}", "state=resume", check=False)
            # Its slurmd may not listen yet, and a job that cannot be launched is requeued: one restart more
            # than expected.
            starts = ["login", "srun", "--nodes=1", f"--nodelist={node}", "true"]
            start = partial(cluster.exec, *starts, user="alice", cwd=HOME, check=False)
            wait_until(lambda start=start: start().returncode == 0)
        two_nodes_die(cluster)
        a_node_is_not_reached(cluster)
    return weights


def two_nodes_die(cluster):
    """That of the batch script, and the spare one at the same time. The third one requeues the job."""
    text = "import os, time\nprint('waits', flush=True)\n"
    text += "os.environ.get('SLURM_RESTART_COUNT') or time.sleep(1000)\n"
    folder(cluster, "waits.py").write_text(text)
    number = cluster.submit("--no-kill", "--nodes=3", SCRIPT, "--spare-nodes=1", "waits.py", cwd=HOME)

    def crash():
        watches = ["n2", "pgrep", "-f", "[s]control requeue"]
        wait_until(lambda: cluster.exec(*watches, check=False).returncode == 0)
        for node in ("n3", "n1"):
            cluster.crash(node)
        wait_until(lambda: restarts_of(cluster, number) == 1)
        for node in ("n1", "n3"):
            cluster.boot(node)

    assert_ended(wait_and_act(cluster, number, "waits", crash), "COMPLETED")
    assert restarts_of(cluster, number) == 1


def a_node_is_not_reached(cluster):
    """Slurm does not know it yet, and starts a job there, which has saved nothing."""
    folder(cluster, "starts.py").write_text("print('started', flush=True)\n")
    cluster.link("n2", up=False)
    number = cluster.submit(HERE, SCRIPT, "starts.py", cwd=HOME, env=NO_CONTAINER)
    connect = partial(cluster.link, "n2", up=True)
    output = assert_ended(wait_and_act(cluster, number, "requeuing the job", connect), "COMPLETED")
    assert output.rpartition("(restart 1)")[2].count("started") == 4, output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights and the steps of a run that nothing happened to."""
    top = tmp_path_factory.mktemp("undisturbed")
    command = ["train_ddp", "--epochs", "7", "--out", "whole"]
    whole = warm_start.run(warm_start.torchrun_ranks(4, command, dict(os.environ)), top)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    return weights_and_steps(top / "whole")


@pytest.mark.main_road("when a rank or a node dies, Slurm requeues the job and it resumes")
def test_a_job_whose_node_dies_resumes_from_its_last_checkpoint(in_background, undisturbed):
    assert in_background(one_node_dies).result() == undisturbed


def test_a_job_with_a_spare_node_goes_on_or_is_requeued_when_one_dies(in_background, undisturbed):
    assert in_background(nodes_die_of_jobs_with_a_spare_one).result() == [undisturbed] * 2
