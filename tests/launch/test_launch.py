"""The launch scripts as shipped: an ordinary user submits them with sbatch to a real Slurm cluster."""

import functools
import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from slurm_cluster import Cluster, bare_binds
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from hpctrain.vision.data import load_mnist
from tests.helpers import BARE_PYTHON, DATA, write_digits, write_images
from tests.tools import warm_start

pytestmark = pytest.mark.slow

SCRIPT = "launch/apptainer_ddp.sh"
HOME = "/home/alice/hpctrain"
FEW = "--data=digits"  # for jobs that are not about the accuracy
# For jobs whose nodes a test names: Slurm gives a job other nodes while an earlier one has not ended
# completely.
HERE = "--nodelist=n1,n2"
# The starts of ranks take most of the suite's time, so jobs that are about something else have few, and no
# container.
ONE_EACH = (HERE, "--ntasks-per-node=1")  # a rank on each node
BARE = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/opt/hpctrain"}


def job(cluster, *args, options=(HERE,), env=None, cwd=HOME, script=SCRIPT):
    """Submit a job and wait for it; returns its end state and all of its output."""
    return wait(cluster, cluster.submit(*options, script, *args, cwd=cwd, env=env), cwd)


def folder(cluster, path):
    return cluster.host_path(f"{HOME}/{path}")


def result(run):
    return json.loads((run / "result.json").read_text())


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)


def wait_until_idle(cluster, number=None, nodes=("n1", "n2")):
    """Wait until no step, launcher, trainer or container of a job is left on any node, for as long as an
    unmount may take.

    Without a number, of any job: processes are then found by their names, and not by their environment. The
    mounts of an image by podman-hpc do not count: its wrapper of fuse-overlayfs misses the end of a container
    now and then, on a busy machine.
    """
    if number is None:
        ours = (
            "[h]pctrain|[s]run |[p]ython|[m]pirun|[p]rted|[h]orovodrun|[s]quashfuse|[c]onmon|[f]use-overlayfs"
        )
        show = f"ps -eo args | grep -E '{ours}'"
    else:
        show = (
            f"grep -slzxE '(SLURM_JOB_ID|HPCTRAIN_JOB)={number}' /proc/[0-9]*/environ | "
            "while read -r path; do tr '\\0' ' ' <${path%environ}cmdline; echo; done 2>/dev/null | grep ."
        )
    for node in nodes:
        for _ in range(300):
            left = cluster.exec(node, "sh", "-c", f"{show} | grep -v /storage/overlay/ || true").stdout
            if not left:
                break
            time.sleep(0.2)
        assert left == "", f"left on {node}: {left}"


# jobs of one test function, beside those of the other test process: the cores import torch most of the time
IN_FLIGHT = 2


@pytest.fixture(scope="module")
def submitted():
    """The jobs that `ahead` has submitted, by the test that each is for."""
    return {}


@pytest.fixture
def ahead(request, submitted):
    """A function that submits this test's job, and those of the next tests with other parameters."""

    def job_of_this_test(submit):
        mine = [item for item in request.session.items if getattr(item, "function", None) is request.function]
        first = mine.index(request.node)
        for item in mine[first : first + IN_FLIGHT]:
            if item.nodeid not in submitted:
                submitted[item.nodeid] = submit(**item.callspec.params)
        return submitted[request.node.nodeid]

    return job_of_this_test


def chosen(request, test):
    """Whether this session runs a test."""
    return any(getattr(item, "function", None) is test for item in request.session.items)


@pytest.fixture(scope="module")
def in_background(sif):
    """Starts a function that mostly waits in the background, once; returns its future.

    It uses a cluster of its own.
    """
    with ThreadPoolExecutor() as pool:
        yield functools.cache(lambda function: pool.submit(function, sif))


@pytest.fixture(scope="module", autouse=True)
def start_slow_jobs(request):
    """Start them before the first test, so that they have ended when their tests run."""
    for test, function in (
        (test_a_job_whose_node_dies_resumes_from_its_last_checkpoint, node_dies),
        (test_gpus_that_slurm_granted_and_the_container_does_not_show, gpus),
    ):
        if chosen(request, test):
            request.getfixturevalue("in_background")(function)
    if chosen(request, test_a_rank_that_hangs_at_start_fails_the_job_and_is_named):
        request.getfixturevalue("hanging")


def wait(cluster, number, cwd=HOME):
    """Wait for a submitted job; returns its end state and all of its output."""
    ended = cluster.wait(number)
    return ended, cluster.host_path(f"{cwd}/slurm-{number}.out").read_text(errors="replace")


def seconds(cluster, number):
    """The run time of a job, in seconds."""
    shown = cluster.exec("login", "scontrol", "show", "job", str(number)).stdout
    hours, minutes, rest = re.search(r"RunTime=(\d+):(\d+):(\d+)", shown).groups()
    return int(hours) * 3600 + int(minutes) * 60 + int(rest)


def test_real_mnist(cluster, mnist):
    """With half of the training images, which are enough for this accuracy, and all 10,000 test images."""
    write_images(folder(cluster, "mnist"), load_mnist(mnist), 30_000, 10_000)
    options = [
        "--epochs",
        "2",
        "--batch-size",
        "64",
        "--lr",
        "0.04",
        "--lr-decay",
        "0.1",
        "--out",
        "runs/mnist",
    ]
    ended, output = job(cluster, "train_ddp", "--data=mnist", *options)
    assert ended.state == "COMPLETED", output
    assert result(folder(cluster, "runs/mnist"))["test_accuracy"] >= 0.985


def test_a_file_of_the_submit_folder_does_not_hide_a_module_of_python(cluster):
    hides = folder(cluster, "token.py")
    hides.write_text("raise SystemExit('hidden')\n")
    try:
        ended, output = job(cluster, "check", options=["--nodes=1"])
    finally:
        hides.unlink()
    assert ended.state == "COMPLETED" and "check passed: 2 ranks" in output, output


def test_the_arguments_of_a_script_arrive_as_they_are(cluster):
    arguments = ["--anything", "a b", "$HOME", "`id`", "*", "", "quote'and\"quote", "back\\slash", "-x"]
    mine = folder(cluster, "mine.py")
    mine.write_text(
        "import json, os, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], json.dumps(sys.argv[1:]))\n"
    )
    ended, output = job(cluster, "./mine.py", *arguments)
    assert ended.state == "COMPLETED", output
    said = [line.split(": ", 1)[1] for line in output.splitlines() if re.match(r"\d: \d", line)]
    assert sorted(said) == [f"{rank} 4 {json.dumps(arguments)}" for rank in range(4)]


def test_a_script_whose_ranks_train_alone_gets_one_warning(cluster):
    step = "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1).step()"
    folder(cluster, "mine.py").write_text(f"import torch\n{step}\nprint(torch.ones(2).sum())\n")
    ended, output = job(cluster, "./mine.py", options=["--nodes=1"])
    assert ended.state == "COMPLETED" and output.count("tensor(2.)\n") == 2, output
    assert output.count("hpctrain: warning: each of the 2 ranks trains alone") == 1, output


@pytest.mark.parametrize("runtime", ["apptainer", "none"])
def test_no_rank_runs_kernels_of_a_folder_that_others_can_make(cluster, runtime):
    """By default torch.compile runs what is in /tmp/torchinductor_USER."""
    cluster.exec("n1", "rm", "-rf", "/tmp/torchinductor_alice")
    folder(cluster, "kernels.py").write_text(
        "import os, torch._dynamo.package\n"  # what makes the folder
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print('kernels in', cache_dir(), os.listdir('/tmp'), flush=True)\n"
    )
    env = BARE | {"HPCTRAIN_RUNTIME": runtime}
    ended, output = job(cluster, "kernels.py", options=("--nodes=1", "--nodelist=n1"), env=env)
    user = cluster.exec("n1", "id", "-u", "alice").stdout.strip()
    assert ended.state == "COMPLETED" and output.count(f"kernels in /tmp/hpctrain-{user}/inductor ") == 2, (
        output
    )
    assert "torchinductor_alice" not in output
    assert cluster.exec("n1", "stat", "-c", "%U %a", f"/tmp/hpctrain-{user}").stdout == "alice 700\n"


def test_horovod_is_started_and_shut_down_again_and_again(cluster):
    """Over Gloo.

    Before the patch of its rendezvous, init() connected to addresses of the one before, after some cycles.
    """
    cycles = "import horovod.torch as hvd\n"
    cycles += "for _ in range(40):\n    hvd.init()\n    assert hvd.size() == 4\n    hvd.shutdown()\n"
    folder(cluster, "mine.py").write_text(cycles)
    ended, output = job(cluster, "--launcher=horovodrun", "./mine.py", script="launch/apptainer_horovod.sh")
    assert ended.state == "COMPLETED", output


def test_check_from_another_folder(cluster):
    cluster.exec("login", "mkdir", "-p", "elsewhere", user="alice")
    elsewhere = {"cwd": "/home/alice/elsewhere", "env": {"HPCTRAIN_ROOT": HOME}}
    ended, output = job(cluster, "check", options=ONE_EACH, script=f"{HOME}/{SCRIPT}", **elsewhere)
    assert ended.state == "COMPLETED" and "check passed: 2 ranks on 2 hosts (slurm)" in output, output


def test_inside_salloc(cluster):
    done = cluster.exec(
        "login",
        "salloc",
        "--nodes=2",
        "--ntasks-per-node=1",
        SCRIPT,
        "check",
        user="alice",
        cwd=HOME,
        timeout=600,
    )
    assert "check passed: 2 ranks on 2 hosts (slurm)" in done.stdout


def test_container_and_bare_metal_give_the_same_weights(cluster):
    """Without: the Python environment of the image, run by the nodes' libc."""
    numbers = []
    for name, python in (("container", "apptainer exec hpctrain-cpu.sif python"), ("bare", BARE_PYTHON)):
        script = (
            "#!/bin/bash\n"
            "export MASTER_ADDR=$(hostname) MASTER_PORT=$((25000 + SLURM_JOB_ID)) OMP_NUM_THREADS=1\n"
            f"srun --nodes=2 --ntasks-per-node=2 {python} -m hpctrain train_ddp {FEW} --epochs 2"
            f" --out runs/{name}\n"
        )
        numbers.append(cluster.submit("--nodes=2", "--ntasks-per-node=2", cwd=HOME, script=script))
    for number in numbers:
        ended, output = wait(cluster, number)
        assert ended.state == "COMPLETED", output
    container, bare = (result(folder(cluster, f"runs/{name}")) for name in ("container", "bare"))
    assert container["weights_sha256"] == bare["weights_sha256"]
    assert container["test_loss"] == bare["test_loss"]


BAD_INPUT = {
    "unknown trainer": (["no_such_trainer"], {}, "there is no command 'no_such_trainer': choose from"),
    "unknown option": (
        ["--epochs", "3"],
        {},
        "unknown option --epochs: a trainer's options come after its name",
    ),
    "an option of another script": (
        ["--mpi=pmix", "check"],
        {},
        "this script has no option --mpi; --help lists",
    ),
    "nothing to broadcast": (["--broadcast", "check"], BARE, "leave it out"),
    "unknown runtime": (["check"], {"HPCTRAIN_RUNTIME": "docker"}, "HPCTRAIN_RUNTIME is 'docker': choose"),
    "unknown module": (["check"], {"HPCTRAIN_MODULES": "apptainer/99"}, "module"),
    "no such environment": (
        ["check"],
        {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_PYTHON_ENV": "/usr"},
        "HPCTRAIN_PYTHON_ENV=/usr is not a venv (give that of somebody else by its path), "
        "and there is no conda",
    ),
    "no torch without a container": (
        ["check"],
        {"HPCTRAIN_RUNTIME": "none"},
        "n1 has no torch: set HPCTRAIN_MODULES",
    ),
    "missing script": (["./nothing.py"], {}, "./nothing.py: no such script"),
    "missing image": (
        ["check"],
        {"HPCTRAIN_IMAGE": "/project/nothing.sif"},
        "/project/nothing.sif: no such image: set ",
    ),
    "missing data": (["train_ddp", "--data", "/project/nothing"], {}, "/project/nothing: no such folder"),
    "broken data": (
        ["train_ddp", "--data", "/project/broken"],
        {},
        "train-images-idx3-ubyte: not an idx file",
    ),
    "a batch that cannot be shared": (
        ["train_ddp", "--batch-size", "31"],
        {},
        "2 ranks cannot share it evenly",
    ),
    "nothing to resume": (["train_ddp", "--resume", "/project"], {}, "no checkpoint to resume from"),
    "a folder that cannot be written": (
        ["train_ddp", "--out", "/usr/run"],
        {},
        "/usr/run: cannot be written",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_ends_the_job_with_one_line(cluster, ahead, name):
    broken = cluster.state / "project/broken"
    broken.mkdir(exist_ok=True)
    (broken / "train-images-idx3-ubyte").write_text("<html>not found</html>")

    def submit(name):
        args, env, _ = BAD_INPUT[name]
        return cluster.submit(*ONE_EACH, SCRIPT, *args, cwd=HOME, env=env)

    number = ahead(submit)
    ended, output = wait(cluster, number)
    assert ended.state == "FAILED" and ended.exit_code != 0, output
    said = [line for line in output.splitlines() if "hpctrain: error:" in line]
    assert len(said) == 1 and BAD_INPUT[name][2] in said[0], output
    assert "Traceback" not in output
    wait_until_idle(cluster, number)


def test_an_earlier_run_is_not_overwritten(cluster):
    kept = folder(cluster, "runs/kept")
    ended, output = job(
        cluster, "train_ddp", FEW, "--epochs", "1", "--out", "runs/kept", options=ONE_EACH, env=BARE
    )
    assert ended.state == "COMPLETED", output
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    ended, output = job(
        cluster, "train_ddp", FEW, "--epochs", "1", "--out", "runs/kept", options=ONE_EACH, env=BARE
    )
    assert ended.state == "FAILED" and "runs/kept holds a run already" in output
    assert before == {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}


def test_one_process_inside_a_batch_script_of_four_tasks(cluster):
    number = cluster.submit(
        "--nodes=2", "--ntasks-per-node=2", cwd=HOME,
        script="#!/bin/bash\napptainer exec hpctrain-cpu.sif hpctrain train_ddp\n",
    )  # fmt: skip
    ended = cluster.wait(number)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert ended.state == "FAILED" and "has 4 tasks, but this process " in output and "srun" in output


@pytest.mark.parametrize("nodes", [("n1", "n2"), ("n2",)], ids=" ".join)
def test_no_apptainer_on_a_node(cluster, nodes):
    programs = ("/usr/bin/apptainer", "/usr/bin/singularity")
    for node in nodes:
        for program in programs:
            cluster.exec(node, "sh", "-c", f"[ ! -e {program} ] || mv {program} {program}.off")
    try:
        ended, output = job(cluster, "check")
    finally:
        for node in nodes:
            for program in programs:
                cluster.exec(node, "sh", "-c", f"[ ! -e {program}.off ] || mv {program}.off {program}")
    message = (
        "neither apptainer nor singularity is on the PATH of n1"
        if "n1" in nodes
        else "rank 2 on n2: there is no apptainer on the PATH"
    )
    assert ended.state == "FAILED" and message in output, output


def test_a_killed_rank_ends_the_whole_job(cluster):
    number = cluster.submit(
        HERE, SCRIPT, "train_ddp", FEW, "--epochs", "1000", cwd=HOME, env={"HPCTRAIN_REQUEUES": "0"}
    )
    killed = False

    def kill(line):
        nonlocal killed
        if "epoch 2 step" in line and not killed:
            killed = True
            cluster.exec("n2", "sh", "-c", "kill -KILL $(pgrep -f '[h]pctrain train_ddp' | tail -n 1)")

    ended = cluster.wait(number, on_line=kill)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert killed and ended.state == "FAILED" and ended.exit_code != 0 and "Traceback" not in output, output
    # The epochs before it are not lost.
    assert (folder(cluster, f"runs/train_ddp/{number}") / "checkpoints/epoch-0001.pt").exists()
    wait_until_idle(cluster)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_rank_that_is_stopped_ends_the_job_and_is_named(cluster, ahead, launcher):
    """Nobody closes its connections, so that the others would wait for it."""

    def submit(launcher):
        options = [
            "train_ddp",
            FEW,
            "--epochs",
            "5000",
            "--watchdog",
            "10",
            "--out",
            f"runs/stopped-{launcher}",
        ]
        return cluster.submit(HERE, *LAUNCHERS[launcher], *options, cwd=HOME, env={"HPCTRAIN_REQUEUES": "0"})

    number = ahead(submit)
    stopped = False

    def stop(line):
        nonlocal stopped
        if "epoch 2 step" in line and not stopped:
            stopped = True
            script = f"kill -STOP $(pgrep -f '[h]pctrain train_ddp.*stopped-{launcher}' | tail -n 1)"
            cluster.exec("n2", "sh", "-c", script)

    ended = cluster.wait(number, on_line=stop)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert stopped and ended.state == "FAILED", output
    assert re.search(
        r"hpctrain: error: rank [23] on n2 has not answered for 10 s: look at its node", output
    ), output
    wait_until_idle(cluster, number)


def node_dies(sif):
    """Jobs train on two of four nodes, and one crashes in epoch 3.

    Two have a spare node.

    Where Slurm starts the job again, it runs without a container, and on other nodes: one that comes back may
    still get Slurm's order to kill the tasks of the first attempt, which have the same numbers.
    """
    results = []
    with_spare = (["--no-kill", "--nodes=3"], [SCRIPT, "--spare-nodes=1"])
    cases = ((([], [SCRIPT]), "n2", 1), (with_spare, "n2", 0), (with_spare, "n1", 1))
    with Cluster(nodes=4, binds={sif: f"/project/{sif.name}", **bare_binds(sif)}) as cluster:
        cluster.install("alice")
        for (options, script), node, restarts in cases:
            command = [*script, "train_ddp", "--epochs", "7", "--watchdog", "10"]
            number = cluster.submit(*options, *command, cwd=HOME, env=BARE if restarts else None)
            crashed = False

            def act(line, node=node):
                nonlocal crashed
                if "epoch 3 step" in line and not crashed:
                    crashed = True
                    cluster.crash(node)

            ended = cluster.wait(number, on_line=act)
            output = folder(cluster, f"slurm-{number}.out").read_text()
            assert crashed and ended.state == "COMPLETED", output
            assert re.search(
                rf"resuming after epoch \d+ (and \d+ steps )?of runs/train_ddp/{number}/checkpoints", output
            ), output
            assert (
                f"Restarts={restarts}" in cluster.exec("login", "scontrol", "show", "job", str(number)).stdout
            )
            goes_on = "failed: n2. Going on within the job on n1 n3" in output
            assert (output.count("restart 1"), goes_on) == (1, restarts == 0), output
            run = folder(cluster, f"runs/train_ddp/{number}")
            assert result(run)["epochs"] == 7 and result(run)["test_accuracy"] > 0.95
            steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
            results.append((result(run)["weights_sha256"], steps))
            cluster.boot(node)
            cluster.exec("login", "scontrol", "update", f"nodename={node}", "state=resume", check=False)
            # Its slurmd may not listen yet, and a job that cannot be launched is requeued: one restart more
            # than expected.
            starts = ["login", "srun", "--nodes=1", f"--nodelist={node}", "true"]
            wait_until(
                lambda starts=starts: (
                    cluster.exec(*starts, user="alice", cwd=HOME, check=False).returncode == 0
                )
            )
        two_nodes_die(cluster)
        a_node_is_not_reached(cluster)
    weights, steps = zip(*results, strict=True)
    assert len(set(weights)) == 1 and steps == steps[:1] * 3


def two_nodes_die(cluster):
    """That of the batch script, and the spare one at the same time. The third one requeues the job."""
    text = "import os, time\nprint('waits', flush=True)\n"
    text += "os.environ.get('SLURM_RESTART_COUNT') or time.sleep(1000)\n"
    folder(cluster, "waits.py").write_text(text)
    number = cluster.submit("--no-kill", "--nodes=3", SCRIPT, "--spare-nodes=1", "waits.py", cwd=HOME)
    show = ["login", "scontrol", "show", "job", str(number)]
    crashed = False

    def act(line):
        nonlocal crashed
        if "waits" in line and not crashed:
            crashed = True
            wait_until(
                lambda: cluster.exec("n2", "pgrep", "-f", "[s]control requeue", check=False).returncode == 0
            )
            for node in ("n3", "n1"):
                cluster.crash(node)
            wait_until(lambda: "Restarts=1" in cluster.exec(*show).stdout)
            for node in ("n1", "n3"):
                cluster.boot(node)

    ended = cluster.wait(number, on_line=act)
    assert crashed and ended.state == "COMPLETED" and "Restarts=1" in cluster.exec(*show).stdout


def a_node_is_not_reached(cluster):
    """Slurm does not know it yet, and starts a job there, which has saved nothing."""
    folder(cluster, "starts.py").write_text("print('started', flush=True)\n")
    cluster.link("n2", up=False)
    number = cluster.submit(HERE, SCRIPT, "starts.py", cwd=HOME, env=BARE)
    ended = cluster.wait(
        number, on_line=lambda line: cluster.link("n2", up=True) if "requeuing the job" in line else None
    )
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert ended.state == "COMPLETED" and output.rpartition("(restart 1)")[2].count("started") == 4, output


def test_a_job_whose_node_dies_resumes_from_its_last_checkpoint(in_background):
    in_background(node_dies).result()


# ---- other launchers and runtimes; what trains where is tests/launch/test_matrix.py ----

LAUNCHERS = {
    "srun": ["launch/apptainer_ddp.sh"],
    "torchrun": ["launch/apptainer_torchrun.sh"],
    "mpirun": ["launch/apptainer_mpi.sh", "--mpi=mpirun"],
    "srun + PMI": ["launch/apptainer_mpi.sh"],
    "horovodrun": ["launch/apptainer_horovod.sh", "--launcher=horovodrun"],
}


# With the imports and calls of the tutorials that people come from. A Horovod script needs MPI or horovodrun
# for its rendezvous; other scripts run under srun with PMI as under srun. tests/vision/test_train.py runs
# scripts outside of the image.
TUTORIALS = {
    "examples/lightning/mnist.py": ["srun", "torchrun", "mpirun"],
    "examples/lightning/bert_nsmc.py": ["srun", "torchrun", "mpirun"],
    "tests/scripts/tutorials/horovod_mnist.py": ["mpirun", "srun + PMI", "horovodrun"],
    "tests/scripts/tutorials/resnet50_ddp.py": ["srun", "torchrun", "mpirun", "horovodrun"],
}


@pytest.fixture(scope="module")
def tutorials(cluster):
    """The folder with what the scripts of tutorials download: MNIST, NSMC, and a model."""
    work = folder(cluster, "tutorials")
    work.mkdir()
    (work / "MNIST").mkdir()
    write_digits(work / "MNIST/raw", 128, 16)
    nsmc = DATA / "nsmc/ratings_train.txt"
    rows = [
        "id\tdocument\tlabel",
        *(f"{n}\t{'재미있는 영화' if n % 2 else '지루한 영화'} {n}\t{n % 2}" for n in range(32)),
    ]
    if nsmc.exists():
        rows = nsmc.read_text(encoding="utf-8").splitlines()[:33]
    (work / "ratings_train.txt").write_text("\n".join(rows))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "영화", "재미있는", "지루한"]
    tokenizer = BertTokenizer(vocab={word: n for n, word in enumerate(words)}, do_lower_case=False)
    tokenizer.save_pretrained(work / "model")
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    BertForSequenceClassification(config).save_pretrained(work / "model")
    subprocess.run(["chown", "-R", "1000:1000", work], check=True)
    return f"{HOME}/tutorials"


@pytest.mark.parametrize(
    ("script", "launcher"), [(script, x) for script, names in TUTORIALS.items() for x in names]
)
def test_the_script_of_a_tutorial(cluster, tutorials, ahead, script, launcher):
    def submit(script, launcher):
        launch, *options = LAUNCHERS[launcher]
        command = [f"{HOME}/{launch}", *options, f"{HOME}/{script}"]
        model = ["model"] if "bert" in script else []
        # Once in the image, which has what they import; Horovod's always, as the image has its MPI.
        env = {"HPCTRAIN_ROOT": HOME} | ({} if launcher == "srun" or "horovod" in script else BARE)
        ranks = [f"--ntasks-per-node={2 if launcher == 'srun' else 1}", "--nodes=2"]
        return cluster.submit(*ranks, *command, *model, cwd=tutorials, env=env)

    ended, output = wait(cluster, ahead(submit), tutorials)
    assert ended.state == "COMPLETED", output
    size = 4 if launcher == "srun" else 2
    losses = dict(re.findall(rf"rank (\d) of {size} loss (\d+\.\d{{6}})", output))
    assert sorted(losses) == [*map(str, range(size))] and len(set(losses.values())) == 1, output


def test_eight_ranks_on_four_nodes(cluster):
    ended, output = job(cluster, "train_ddp", FEW, "--epochs", "1", options=["--nodes=4"], env=BARE)
    assert ended.state == "COMPLETED" and ended.nodes == ("n1", "n2", "n3", "n4"), output
    logs = sorted((folder(cluster, f"runs/train_ddp/{ended.id}") / "logs").iterdir())
    assert [log.read_text().split(" on ")[1].split(",")[0] for log in logs] == [
        "n1",
        "n1",
        "n2",
        "n2",
        "n3",
        "n3",
        "n4",
        "n4",
    ]


@pytest.mark.parametrize(
    "script", ["apptainer_ddp.sh", "apptainer_torchrun.sh", "apptainer_mpi.sh", "apptainer_horovod.sh"]
)
def test_one_rank(cluster, ahead, script):
    def submit(script):
        return cluster.submit("--nodes=1", "--ntasks-per-node=1", f"launch/{script}", "check", cwd=HOME)

    ended, output = wait(cluster, ahead(submit))
    assert ended.state == "COMPLETED" and "check passed: 1 rank" in output, output


def test_two_jobs_at_once_on_the_same_nodes(cluster):
    options = ["train_ddp", "--epochs", "3"]
    numbers = [cluster.submit(*ONE_EACH, *LAUNCHERS[x], *options, cwd=HOME) for x in ("torchrun", "srun")]
    ports = set()
    for number in numbers:
        ended = cluster.wait(number)
        output = folder(cluster, f"slurm-{number}.out").read_text()
        assert ended.state == "COMPLETED" and ended.nodes == ("n1", "n2"), output
        ports |= set(re.findall(r"rendezvous n1:(\d+)", output))
    assert len(ports) == 2
    spans = [
        json.loads((folder(cluster, f"runs/train_ddp/{number}") / "config.json").read_text())["started"]
        for number in numbers
    ]
    ends = [
        (folder(cluster, f"runs/train_ddp/{number}") / "result.json").stat().st_mtime for number in numbers
    ]
    # they overlapped
    assert max(time.mktime(time.strptime(span[:19], "%Y-%m-%dT%H:%M:%S")) for span in spans) < min(ends)


def test_a_job_array(cluster):
    options = ["--array=1-2", "--nodes=1", "--nodelist=n1"]
    number = cluster.submit(*options, SCRIPT, "train_ddp", FEW, "--epochs", "1", cwd=HOME, env=BARE)
    while cluster.exec("login", "squeue", "--noheader", "--array", "--jobs", str(number), check=False).stdout:
        time.sleep(0.5)
    for task in (1, 2):
        run = folder(cluster, f"runs/train_ddp/{number}_{task}")
        assert (run / "result.json").exists(), folder(cluster, f"slurm-{number}_{task}.out").read_text()


def test_the_image_broadcast_to_every_node(cluster):
    scripts = ("apptainer_ddp.sh", "apptainer_mpi.sh")
    numbers = [
        cluster.submit(HERE, f"launch/{script}", "--broadcast", "check", cwd=HOME) for script in scripts
    ]
    for number in numbers:
        ended, output = wait(cluster, number)
        assert ended.state == "COMPLETED" and re.search(
            rf"/tmp/hpctrain-{ended.id}-[0-9a-f]{{16}}\.sif -- python", output
        ), output
        assert "; the image is mounted by squashfuse_ll" in output, output
    for node in ("n1", "n2"):
        assert cluster.exec(node, "ls", "/tmp").stdout.count(".sif") == 0


def test_what_a_dry_run_prints_can_be_run(cluster):
    ended, output = job(cluster, "--dry-run", "./no args.py", script=SCRIPT)
    assert ended.state == "FAILED" and "no such script" in output
    printed = cluster.exec(
        "login", SCRIPT, "--dry-run", "train_ddp", "--out", "a b", user="alice", cwd=HOME
    ).stdout
    assert "srun --nodes=2 --ntasks=4 --ntasks-per-node=2" in printed
    assert "train_ddp --out a\\ b" in printed and "MASTER_ADDR=node1" in printed
    pasted = f"{SCRIPT} --dry-run check | grep -v ^hpctrain: > pasted && bash pasted"
    done = cluster.exec(
        "login",
        "salloc",
        "-N2",
        "--ntasks-per-node=1",
        "bash",
        "-c",
        pasted,
        user="alice",
        cwd=HOME,
        timeout=600,
    )
    assert "check passed: 2 ranks on 2 hosts (slurm)" in done.stdout


def test_tasks_that_slurm_would_pack_unevenly(cluster):
    done = cluster.exec("login", "salloc", "-N2", "-n4", SCRIPT, "check", user="alice", cwd=HOME, check=False)
    assert (
        done.returncode == 2
        and "3,1 tasks on the nodes, not the same number on each: give --ntasks-per-node" in done.stderr
    )


def test_torchrun_restarts_all_ranks(cluster):
    folder(cluster, "dies.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "again = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if dist.get_rank() == 3 and again == 0: os.kill(os.getpid(), 9)\n"
        "x = torch.ones(1); dist.all_reduce(x)\n"
        "print(f'sum {x.item()} after {again}\\n', end='', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    number = cluster.submit("launch/apptainer_torchrun.sh", "--max-restarts=2", "dies.py", cwd=HOME)
    ended, output = wait(cluster, number)
    # each agent counts its own
    assert ended.state == "COMPLETED" and output.count("sum 4.0 after") == 4, output
    wait_until_idle(cluster, number)


def test_torchrun_restarts_a_bundled_trainer(cluster, tmp_path):
    """It goes on after its last checkpoint, and ends with the weights of a run that nothing happened to."""
    script = "launch/apptainer_torchrun.sh"
    command = ["train_ddp", FEW, "--epochs", "8", "--out"]
    number = cluster.submit(HERE, script, "--max-restarts=1", *command, "runs/restarted", cwd=HOME)
    killed = False

    def kill(line):
        nonlocal killed
        if "epoch 2 step" in line and not killed:
            killed = True
            cluster.exec(
                "n2", "sh", "-c", "kill -KILL $(pgrep -f '[h]pctrain train_ddp.*runs/restarted' | tail -n 1)"
            )

    ended = cluster.wait(number, on_line=kill)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert killed and ended.state == "COMPLETED", output
    assert re.search(r"resuming after epoch \d of runs/restarted/checkpoints/epoch-000\d.pt", output), output
    ranks = warm_start.torchrun_ranks(4, [*command, str(tmp_path / "whole")], dict(os.environ))
    whole = warm_start.run(ranks, folder(cluster, "."))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert (
        result(tmp_path / "whole")["weights_sha256"]
        == result(folder(cluster, "runs/restarted"))["weights_sha256"]
    )
    wait_until_idle(cluster, number)


def test_a_second_job_on_a_run_folder_is_refused(cluster):
    """The first one goes on as if there had been none."""
    first = cluster.submit(
        *ONE_EACH, SCRIPT, "train_ddp", FEW, "--epochs", "2000", "--out", "runs/shared", cwd=HOME
    )
    second = ended = None

    def submit_another(line):
        nonlocal second
        if "epoch 2 step" in line and second is None:
            options = ["train_ddp", FEW, "--epochs", "2000", "--resume", "runs/shared"]
            second = cluster.submit(
                "--nodelist=n3,n4", "--ntasks-per-node=1", SCRIPT, *options, cwd=HOME, env=BARE
            )
            nonlocal ended
            ended = cluster.wait(second)
            cluster.exec("login", "scancel", str(first))

    cluster.wait(first, on_line=submit_another)
    output = folder(cluster, f"slurm-{second}.out").read_text()
    assert ended.state == "FAILED", output
    assert re.search(
        rf"error: (on rank 0: )?runs/shared: job {first} on n1 \(process \d+\) writes in", output
    ), output
    epochs = [
        json.loads(line)["epoch"]
        for line in (folder(cluster, "runs/shared") / "metrics.jsonl").read_text().splitlines()
    ]
    assert epochs == sorted(epochs)
    wait_until_idle(cluster, second, nodes=("n3", "n4"))


def test_a_pmi_that_the_mpi_library_does_not_support(cluster):
    """Open MPI gives four worlds of one rank, which end with exit status 0."""
    # and where no launch script looks first
    script = "#!/bin/bash\nexport MASTER_ADDR=$(hostname) MASTER_PORT=25000\n" + (
        "srun --mpi=pmi2 --nodes=2 --ntasks-per-node=2 /opt/hpctrain/bin/python -m hpctrain check\n"
    )
    inside, outside, unknown, direct = (
        cluster.submit("launch/apptainer_mpi.sh", "--mpi=pmi2", "check", cwd=HOME),
        cluster.submit("launch/apptainer_mpi.sh", "--mpi=pmi2", "check", cwd=HOME, env=BARE),
        cluster.submit("launch/apptainer_mpi.sh", "--mpi=pmi1", "check", cwd=HOME),
        cluster.submit("--nodes=2", "--ntasks-per-node=2", cwd=HOME, script=script),
    )
    for job in (inside, outside):
        ended, output = wait(cluster, job)
        assert ended.state == "FAILED" and "each of 4 ranks is rank 0 of 1: Open MPI v5" in output, output
        assert "try another --mpi=" in output
    ended, output = wait(cluster, unknown)
    assert ended.state == "FAILED" and "srun does not offer --mpi=pmi1 here" in output, output
    ended, output = wait(cluster, direct)
    assert ended.state == "FAILED" and "PMI mismatch: srun --mpi=pmi2 started 4 ranks" in output, output


def gpus(sif):
    """The nodes' GPUs are device files without a driver: for the options of the script and for check."""
    with Cluster(nodes=1, gpus=2, binds={sif: f"/project/{sif.name}"}) as cluster:
        cluster.install("alice")
        options = ["--nodes=1", "--gpus-per-node=2"]
        ended, output = job(cluster, "check", options=options)
        assert "2 GPUs per node" in output and "apptainer exec --nv --bind" in output
        assert ended.state == "FAILED", output
        assert (
            "/dev/nvidia0 is visible, but libcuda.so.1 is not found: start the container with --nv" in output
        )
        assert "is a CPU build, on a node with a GPU" in output
        ended, output = job(cluster, "check", "--device", "cpu", options=options)
        assert ended.state == "COMPLETED" and "check passed: 2 ranks on 1 host" in output, output

        # All of the node's GPUs for torchrun, which is one task. It had the first one alone.
        cluster.host_path(f"{HOME}/gpus.py").write_text(
            "import os\nprint('sees', os.environ['CUDA_VISIBLE_DEVICES'])\n"
        )
        options = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-task=1"]
        number = cluster.submit(*options, "launch/apptainer_torchrun.sh", "gpus.py", cwd=HOME)
        ended, output = wait(cluster, number)
        assert output.count("sees 0,1\n") == 2, output

        # Slurm tells a command of salloc on the login node of no GPU.
        dry = ["launch/apptainer_ddp.sh", "--dry-run", "check"]
        for options in (["--gres=gpu:2"], ["--gpus=2"], ["--gpus-per-task=1"]):
            salloc = ["salloc", "--nodes=1", "--ntasks-per-node=2", *options, *dry]
            output = cluster.exec("login", *salloc, user="alice", cwd=HOME).stdout
            assert "2 GPUs per node" in output and "apptainer exec --nv" in output, output


def test_gpus_that_slurm_granted_and_the_container_does_not_show(in_background):
    in_background(gpus).result()


def test_without_a_container_by_a_module(cluster):
    # as a login shell would bring it
    env = {"BASH_ENV": "/usr/share/modules/init/bash", "HPCTRAIN_MODULES": "pytorch"}
    right, wrong = (
        cluster.submit(*ONE_EACH, "launch/modules_ddp.sh", "check", cwd=HOME, env=env | more)
        for more in ({}, {"HPCTRAIN_MODULES": "no-such"})
    )
    ended, output = wait(cluster, right)
    assert (
        ended.state == "COMPLETED"
        and "runtime none" in output
        and "check passed: 2 ranks on 2 hosts" in output
    ), output
    ended, output = wait(cluster, wrong)
    assert ended.state == "FAILED" and "module load no-such" in output, output


def test_without_a_container_by_conda(cluster):
    """With a stand-in, because conda is not available here."""
    env = {"PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin", "HPCTRAIN_PYTHON_ENV": "pytorch"}
    right, wrong = (
        cluster.submit(*ONE_EACH, "launch/modules_ddp.sh", "check", cwd=HOME, env=env | more)
        for more in ({}, {"HPCTRAIN_PYTHON_ENV": "nothing"})
    )
    ended, output = wait(cluster, right)
    assert (
        ended.state == "COMPLETED" and "image /opt/hpctrain/bin/python" in output and "check passed" in output
    ), output
    ended, output = wait(cluster, wrong)
    assert ended.state == "FAILED" and "conda activate nothing failed" in output, output


def test_pbs(cluster):
    """By qsub over Slurm (slurm-wlm-torque), with the variables of PBS, and with mpirun over ssh."""

    def submit(line, select):
        words = ["qsub", "-l", select, "-l", "walltime=00:10:00"]
        done = cluster.exec(
            "login", *words, user="alice", cwd=HOME, input=f"{HOME}/launch/pbs_ddp.sh {line}\n"
        )
        ended = cluster.wait(int(done.stdout))
        return ended, folder(cluster, f"STDIN.o{ended.id}").read_text() + folder(
            cluster, f"STDIN.e{ended.id}"
        ).read_text()

    bare = " ".join(f"{name}={value}" for name, value in BARE.items())
    for runtime, each in (("", 2), (bare, 1)):
        folder(cluster, "pbs.sh").write_text(f"#!/bin/bash\n{runtime} exec {HOME}/launch/pbs_ddp.sh check\n")
        select = f"select=2:ncpus={each}:mpiprocs={each}"
        done = cluster.exec("login", "qsub", "-N", "by_pbs", "-l", select, "pbs.sh", user="alice", cwd=HOME)
        ended = cluster.wait(int(done.stdout))
        output = folder(cluster, f"by_pbs.o{ended.id}").read_text()
        assert (
            ended.state == "COMPLETED" and f"check passed: {2 * each} ranks on 2 hosts (openmpi)" in output
        ), output
    ended, output = submit(f"train_ddp {FEW} --epochs 1 --out 'runs/by pbs'", "select=2:ncpus=1:mpiprocs=1")
    assert ended.state == "COMPLETED" and (folder(cluster, "runs/by pbs") / "result.json").exists(), output
    ended, output = submit("--mpi=pmix check", "select=1:ncpus=1:mpiprocs=1")
    assert ended.state == "FAILED" and "this script has no option --mpi" in output, output


def test_horovodrun_enters_shifter_on_the_other_node(cluster):
    """It passes the PATH of the image on over ssh, where shifter was not found."""
    env = {
        "PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin",
        "SHIFTER_SIF": "/project/hpctrain-cpu.sif",
        "HPCTRAIN_RUNTIME": "shifter",
    }
    number = cluster.submit(*ONE_EACH, *LAUNCHERS["horovodrun"], "check", cwd=HOME, env=env)
    ended, output = wait(cluster, number)
    assert ended.state == "COMPLETED" and "check passed: 2 ranks on 2 hosts (horovodrun)" in output, output


def test_shifter(cluster):
    """With a stand-in, as shifter is not available here: its command line, and the rendezvous."""
    env = {
        "PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin",
        "SHIFTER_RECORD": f"{HOME}/shifter.record",
        "SHIFTER_SIF": "/project/hpctrain-cpu.sif",
        "HPCTRAIN_SHIFTER_MODULES": "gpu,nccl-plugin",
    }
    trains, no_image, no_gateway, no_shifter = (
        cluster.submit(
            *ONE_EACH, "launch/shifter_ddp.sh", "train_ddp", FEW, "--epochs", "1", cwd=HOME, env=env
        ),
        cluster.submit(
            HERE, "launch/shifter_ddp.sh", "check", cwd=HOME, env=env | {"HPCTRAIN_IMAGE": "nothing:1"}
        ),
        cluster.submit(
            HERE, "launch/shifter_ddp.sh", "check", cwd=HOME, env=env | {"SHIFTER_GATEWAY": "down"}
        ),
        cluster.submit(HERE, "launch/shifter_ddp.sh", "check", cwd=HOME),
    )
    ended, output = wait(cluster, trains)
    assert ended.state == "COMPLETED" and "runtime shifter" in output, output
    record = folder(cluster, "shifter.record").read_text().splitlines()
    assert len(record) == 2
    assert set(record) == {
        "shifter '--image=id:0123456789abcdef' '--module=gpu,nccl-plugin' '--env=TMPDIR=/tmp' "
        "'--env=MALLOC_MMAP_THRESHOLD_=33554432' "
        "'--env=MALLOC_TRIM_THRESHOLD_=536870912' 'python' '-m' 'hpctrain' "
        f"'train_ddp' '{FEW}' '--epochs' '1'"
    }
    ended, output = wait(cluster, no_image)
    assert ended.state == "FAILED" and "nothing:1: shifter has no such image" in output, output
    ended, output = wait(cluster, no_gateway)
    assert (
        ended.state == "FAILED"
        and "failed to contact the image gateway: the gateway of the images does not" in output
    ), output
    ended, output = wait(cluster, no_shifter)
    assert ended.state == "FAILED" and "there is no shifter on the PATH of n1" in output, output


def test_check_and_then_the_run_in_one_job(cluster):
    arguments = ["apptainer_torchrun.sh", "--max-restarts=1", "train_ddp", FEW, "--epochs", "1"]
    ended, output = job(cluster, *arguments, options=ONE_EACH, script="launch/check.sh")
    assert ended.state == "COMPLETED", output
    assert output.index("check passed: 2 ranks on 2 hosts (torchrun)") < output.index(
        "run folder runs/train_ddp"
    )
    ended, output = job(cluster, "nothing.sh", script="launch/check.sh")
    assert ended.state == "FAILED" and "no such script" in output


def test_local_in_the_container(cluster):
    # empty disables a site's value, but NCCL takes it for the name of a network
    env = {"HPCTRAIN_TASKS": "2", "NCCL_NET": ""}
    done = cluster.exec("n1", "launch/local.sh", "check", user="alice", cwd=HOME, env=env)
    assert "check passed: 2 ranks on 1 host" in done.stdout and "runtime apptainer" in done.stdout
    assert "NCCL between nodes: Socket" in done.stdout


# ---- when a rank fails: the whole job is FAILED within 120 s, its log names the rank and the reason, and no
# process is left ----

RAISES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000000):
    x = torch.ones(1)
    dist.all_reduce(x)
    if step == 2 and dist.get_rank() == 3:
        raise ValueError("boom")
"""
# Without torch, whose import takes most of the time of such a job. The others do not notice, and the launcher
# ends them.
KILLED = """
import os, time
time.sleep(1)
if os.environ["RANK"] == "3":
    os.kill(os.getpid(), 9)
time.sleep(1000)
"""
FAULTS = {"kill": KILLED, "raise": RAISES}
WHO = {  # how each launcher names a rank that was killed
    "srun": r"n2: task 3: Killed",
    "torchrun": r"rank 3 was the first to fail on n2: process \d+ was killed by signal 9",
    "mpirun": r"rank 3 with PID \d+ on node n2 exited on\s+signal 9",
    "srun + PMI": r"n2: task 3: Killed",
    "horovodrun": r"rank 3 on n2 was ended by signal 9",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_dies_fails_the_job_and_is_named(cluster, ahead, launcher, fault):
    def submit(launcher, fault):
        folder(cluster, f"{fault}.py").write_text(FAULTS[fault])
        # the default, and given
        restarts = ["--max-restarts=0"] if (launcher, fault) == ("torchrun", "kill") else []
        return cluster.submit(HERE, *LAUNCHERS[launcher], *restarts, f"{fault}.py", cwd=HOME)

    number = ahead(submit)
    ended, output = wait(cluster, number)
    assert ended.state == "FAILED" and ended.exit_code != 0, output
    if fault == "raise":
        assert re.search(r"(rank3\]|^3|\[3\]<stderr>): .*ValueError: boom", output, re.M), output
    else:
        assert re.search(WHO[launcher], output), output
    wait_until_idle(cluster, number)


RAISES_IN_MPI = """
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 3:
    raise ValueError("boom")
world.allreduce(1)
"""


@pytest.mark.parametrize("launcher", ["mpirun", "srun + PMI"])
def test_a_rank_of_mpi_that_raises_ends_the_job(cluster, launcher):
    """It waited in MPI_Finalize for the others, and they for it, until the time limit."""
    folder(cluster, "raise_mpi.py").write_text(RAISES_IN_MPI)
    ended, output = wait(cluster, cluster.submit(HERE, *LAUNCHERS[launcher], "raise_mpi.py", cwd=HOME))
    assert ended.state == "FAILED" and re.search(r"^(3|\[3\]<stderr>)?:? ?ValueError: boom", output, re.M), (
        output
    )
    if launcher == "srun + PMI":
        how = "Exited with exit code 1. Its last line: ValueError: boom"
        assert f"task 3 on n2 failed first: {how}" in output, output
    wait_until_idle(cluster)


def test_no_container_of_podman_hpc_is_left_when_a_rank_dies(cluster, podman_image):
    folder(cluster, "kill.py").write_text(KILLED)
    ended, output = job(cluster, "kill.py", script="launch/podman_hpc_ddp.sh", env=podman_image)
    assert ended.state == "FAILED" and re.search("n2: task 3", output), output
    wait_until_idle(cluster)


def test_nothing_of_podman_hpc_trains_on_after_scancel(cluster, podman_image):
    """Slurm ends podman-hpc, but not the containers; and it lets an ended job start nothing that could."""
    folder(cluster, "goes_on.py").write_text(
        "import time\nprint('goes on', flush=True)\nwhile True: time.sleep(0.1)\n"
    )
    number = cluster.submit(HERE, "launch/podman_hpc_ddp.sh", "goes_on.py", cwd=HOME, env=podman_image)
    going_on = 0

    def cancel(line):
        nonlocal going_on
        if "goes on" in line:
            going_on += 1
            if going_on == 4:
                cluster.exec("login", "scancel", str(number))

    ended = cluster.wait(number, on_line=cancel)
    assert going_on == 4 and ended.state == "CANCELLED"
    wait_until_idle(cluster)


def test_a_port_that_is_in_use(cluster):
    """By something of another user, on the port that would be the job's own."""
    number = cluster.submit(
        *ONE_EACH, "--hold", SCRIPT, "train_ddp", FEW, "--epochs", "1", cwd=HOME, env=BARE
    )
    port = 20000 + number * 8 % 12000
    listen = f"import socket, time\nwith socket.create_server(('', {port})): time.sleep(600)"
    listener = cluster.start("n1", BARE_PYTHON, "-c", listen, user="bob")
    try:
        cluster.exec(
            "n1",
            "sh",
            "-c",
            f"until grep -q ':{port:04X} .* 0A' /proc/net/tcp*; do sleep 0.1; done",
            timeout=300,
        )
        cluster.exec("login", "scontrol", "release", str(number))
        ended, output = wait(cluster, number)
    finally:
        listener.terminate()
        listener.wait()
    assert ended.state == "COMPLETED", output
    assert f"port {port} of n1 is in use, so the rendezvous is at the next free one, {port + 1}" in output


def test_no_secret_is_on_a_command_line(cluster):
    """horovodrun writes its environment on the command lines of ssh; each rank still gets it."""
    folder(cluster, "show_token.py").write_text(
        "import os, time\n"
        "print('got', os.environ['HF_TOKEN'] == 'hf_' + 'secret', flush=True)\ntime.sleep(10)\n"
    )
    number = cluster.submit(
        HERE, *LAUNCHERS["horovodrun"], "show_token.py", cwd=HOME, env={"HF_TOKEN": "hf_secret"}
    )
    shown = ""

    def look(line):
        nonlocal shown
        if "got" in line and not shown:
            shown = "".join(
                cluster.exec(node, "ps", "-eo", "args", user="bob").stdout for node in ("n1", "n2")
            )

    ended = cluster.wait(number, on_line=look)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert ended.state == "COMPLETED" and output.count("got True") == 4, output
    assert "ssh" in shown and "HPCTRAIN_COMMAND=" in shown, shown
    assert "hf_secret" not in shown and "HPCTRAIN_JOB_SECRET=" not in shown
    assert not list(folder(cluster, "").glob(".hpctrain-*"))


# The ranks of each job. Those of srun share a container of their node.
HANGING = {"srun": 4, "torchrun": 2, "mpirun": 2, "srun + PMI": 2, "horovodrun": 2}


@pytest.fixture(scope="module")
def hanging(cluster):
    """The numbers of jobs, one for each launcher, whose last rank hangs before it does anything.

    They run on other nodes than those of most tests, because rank 0 waits for a minute.
    """
    hang = folder(cluster, "hang")
    hang.mkdir(exist_ok=True)
    # Python imports it first
    (hang / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "last = str(int(os.environ.get('WORLD_SIZE', 0)) - 1)\n"
        "if os.environ.get('RANK') == last and 'train_ddp' in sys.orig_argv: time.sleep(1000)\n"
    )
    env = {"APPTAINERENV_PYTHONPATH": f"{HOME}/hang"}
    numbers = {}
    for launcher in LAUNCHERS:
        # Two at a time: more ranks that start at once take longer to start than the time limit of the test
        # allows.
        after = [f"--dependency=afterany:{list(numbers.values())[-2]}"] if len(numbers) >= 2 else []
        options = ["--nodelist=n3,n4", f"--ntasks-per-node={HANGING[launcher] // 2}", *after]
        numbers[launcher] = cluster.submit(*options, *LAUNCHERS[launcher], "train_ddp", cwd=HOME, env=env)
    return numbers


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_hangs_at_start_fails_the_job_and_is_named(cluster, hanging, launcher):
    number = hanging[launcher]
    ended, output = wait(cluster, number)
    assert ended.state == "FAILED" and seconds(cluster, number) < 400, output
    size = HANGING[launcher]
    assert re.search(
        rf"hpctrain: error: rank {size - 1} of {size} did not join at n3:\d+ within 60 s", output
    ), output
    wait_until_idle(cluster, number, nodes=("n3", "n4"))


def test_nothing_is_left_of_any_job(cluster):
    """The last test on the cluster. It finds processes by their command lines, not by their variables."""
    wait_until_idle(cluster)
