"""The launch scripts as shipped: an ordinary user submits them with sbatch to a real Slurm cluster."""

import json
import os
import re
import subprocess
import time
from dataclasses import replace
from functools import partial

import pytest
from slurm_cluster import Cluster
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from hpctrain.vision.data import load_digits, load_mnist
from tests.helpers import BARE_PYTHON, DATA, write_images
from tests.launch.helpers import (
    FEW,
    HERE,
    HOME,
    LAUNCHERS,
    NO_CONTAINER,
    ONE_EACH,
    SCRIPT,
    STANDIN_PATH,
    assert_ended,
    folder,
    job,
    result,
    signal_rank,
    wait,
    wait_and_act,
    wait_until_idle,
)
from tests.tools import warm_start


@pytest.fixture(scope="module", autouse=True)
def start_slow_jobs(start_in_background):
    start_in_background(test_gpus_that_slurm_granted_and_the_container_does_not_show, gpus)


# ---- a job ----


def test_real_mnist(cluster, mnist):
    """With half of the training images, which are enough for this accuracy, and all 10,000 test images."""
    write_images(folder(cluster, "mnist"), load_mnist(mnist), 30_000, 10_000)
    options = "--data=mnist --epochs=2 --batch-size=64 --lr=0.04 --lr-decay=0.1 --out=runs/mnist"
    assert_ended(job(cluster, "train_ddp", *options.split()), "COMPLETED")
    assert result(folder(cluster, "runs/mnist"))["test_accuracy"] >= 0.985


def test_a_file_of_the_submit_folder_does_not_hide_a_module_of_python(cluster):
    hides = folder(cluster, "token.py")
    hides.write_text("raise SystemExit('hidden')\n")
    try:
        done = job(cluster, "check", options=["--nodes=1"])
    finally:
        hides.unlink()
    assert_ended(done, "COMPLETED", "check passed: 2 ranks")


@pytest.mark.main_road("passes its arguments on unchanged")
def test_the_arguments_of_a_script_arrive_as_they_are(cluster):
    arguments = ["--anything", "a b", "$HOME", "`id`", "*", "", "quote'and\"quote", "back\\slash", "-x"]
    show = "print(os.environ['RANK'], os.environ['WORLD_SIZE'], json.dumps(sys.argv[1:]))\n"
    folder(cluster, "mine.py").write_text(f"import json, os, sys\n{show}")
    output = assert_ended(job(cluster, "./mine.py", *arguments), "COMPLETED")
    said = [line.split(": ", 1)[1] for line in output.splitlines() if re.match(r"\d: \d", line)]
    assert sorted(said) == [f"{rank} 4 {json.dumps(arguments)}" for rank in range(4)]


@pytest.mark.main_road("`check.sh` checks every rank", "| `check.sh` |")
def test_check_and_then_the_run_in_one_job(cluster):
    arguments = ["apptainer_torchrun.sh", "--max-restarts=1", "train_ddp", FEW, "--epochs", "1"]
    output = assert_ended(job(cluster, *arguments, options=ONE_EACH, script="launch/check.sh"), "COMPLETED")
    check = "check passed: 2 ranks on 2 hosts (torchrun)"
    assert output.index(check) < output.index("run folder runs/train_ddp")


def salloc(cluster, *words, options=("--nodes=2", "--ntasks-per-node=1")):
    return cluster.exec("login", "salloc", *options, *words, user="alice", cwd=HOME, timeout=600)


def test_inside_salloc(cluster):
    assert "check passed: 2 ranks on 2 hosts (slurm)" in salloc(cluster, SCRIPT, "check").stdout


def test_other_numbers_of_ranks_within_one_job(cluster):
    """On two nodes with two ranks each: one on each node, then two on the second node alone."""
    folder(cluster, "meets.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print(f'rank {dist.get_rank()} of {dist.get_world_size()} on {os.uname().nodename}', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    parts = {"--ranks-per-node=1": ["n1", "n2"], "--hosts=n2": ["n2", "n2"]}
    commands = {
        f"{name} {part}": [script, *own, part, "meets.py"]
        for name, (script, *own) in LAUNCHERS.items()
        for part in parts
    }
    all_ranks = [*LAUNCHERS["horovodrun"], "--hosts=localhost,n2", "meets.py"]
    commands["horovodrun --hosts=localhost,n2"] = all_ranks
    lines = [f"echo 'part {name}'; {' '.join(words)} || exit" for name, words in commands.items()]
    number = cluster.submit(HERE, "--ntasks-per-node=2", "--nodes=2", "--wrap", "\n".join(lines), cwd=HOME)
    output = assert_ended(wait(cluster, number), "COMPLETED")
    for name, said in zip(commands, output.split("part ")[1:], strict=True):
        hosts = parts.get(name.split()[-1], ["n1", "n1", "n2", "n2"])
        places = [f"rank {rank} of {len(hosts)} on {host}" for rank, host in enumerate(hosts)]
        assert sorted(re.findall(r"rank \d of \d on n\d", said)) == places, (name, said)


@pytest.mark.main_road("`--dry-run` prints the commands")
def test_what_a_dry_run_prints_can_be_run(cluster):
    command = [SCRIPT, "--dry-run", "train_ddp", "--out", "a b"]
    printed = cluster.exec("login", *command, user="alice", cwd=HOME).stdout
    assert "srun --nodes=2 --ntasks=4 --ntasks-per-node=2" in printed
    assert "train_ddp --out a\\ b" in printed and "MASTER_ADDR=node1" in printed
    pasted = f"{SCRIPT} --dry-run check | grep -v ^hpctrain: > pasted && bash pasted"
    done = salloc(cluster, "bash", "-c", pasted)
    assert "check passed: 2 ranks on 2 hosts (slurm)" in done.stdout


def test_eight_ranks_on_four_nodes(cluster):
    done = job(cluster, "train_ddp", FEW, "--epochs", "1", options=["--nodes=4"], env=NO_CONTAINER)
    assert_ended(done, "COMPLETED")
    nodes = ("n1", "n2", "n3", "n4")
    logs = sorted((folder(cluster, f"runs/train_ddp/{done[0].id}") / "logs").iterdir())
    hosts = [log.read_text().split(" on ")[1].split(",")[0] for log in logs]
    assert done[0].nodes == nodes and hosts == [node for node in nodes for _ in range(2)]


@pytest.mark.parametrize("name", ["ddp", "torchrun", "mpi", "horovod"])
def test_one_rank(cluster, ahead, name):
    """By each script with its own defaults."""

    def submit(name):
        command = ["--nodes=1", "--ntasks-per-node=1", f"launch/apptainer_{name}.sh", "check"]
        return cluster.submit(*command, cwd=HOME)

    assert_ended(wait(cluster, ahead(submit)), "COMPLETED", "check passed: 1 rank")


def test_two_jobs_at_once_on_the_same_nodes(cluster):
    submit = [
        [*ONE_EACH, *LAUNCHERS[launcher], "train_ddp", "--epochs", "3"] for launcher in ("torchrun", "srun")
    ]
    ports, began, ended = set(), [], []
    for number in [cluster.submit(*words, cwd=HOME) for words in submit]:
        output = assert_ended(wait(cluster, number), "COMPLETED")
        ports |= set(re.findall(r"rendezvous n1:(\d+)", output))
        run = folder(cluster, f"runs/train_ddp/{number}")
        started = json.loads((run / "config.json").read_text())["started"]
        began.append(time.mktime(time.strptime(started[:19], "%Y-%m-%dT%H:%M:%S")))
        ended.append((run / "result.json").stat().st_mtime)
    assert len(ports) == 2 and max(began) < min(ended)  # they overlapped


def test_a_second_job_on_a_run_folder_is_refused(cluster):
    """The first one goes on as if there had been none."""
    command = [SCRIPT, "train_ddp", FEW, "--epochs", "2000"]
    first = cluster.submit(*ONE_EACH, *command, "--out", "runs/shared", cwd=HOME)
    others = ["--nodelist=n3,n4", "--ntasks-per-node=1"]

    def submit_another():
        second = cluster.submit(*others, *command, "--resume", "runs/shared", cwd=HOME, env=NO_CONTAINER)
        output = assert_ended(wait(cluster, second), "FAILED")
        assert re.search(rf"error: (on rank 0: )?runs/shared: job {first} on n1 \(process \d+\)", output), (
            output
        )
        wait_until_idle(cluster, second, nodes=("n3", "n4"))
        cluster.exec("login", "scancel", str(first))

    wait_and_act(cluster, first, "epoch 2 step", submit_another)
    lines = (folder(cluster, "runs/shared") / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line)["epoch"] for line in lines]
    assert epochs == sorted(epochs)


# ---- launchers; what trains where is tests/launch/test_matrix.py ----

# With the imports and calls of the tutorials that people come from. A Horovod script needs MPI or horovodrun
# for its rendezvous; other scripts run under srun with PMI as under srun. tests/vision/test_train.py runs
# scripts outside of the image.
TUTORIALS = {
    "examples/lightning/mnist.py": ["srun", "torchrun", "mpirun"],
    "examples/lightning/bert_nsmc.py": ["srun", "torchrun", "mpirun"],
    "tests/scripts/tutorials/horovod_mnist.py": ["mpirun", "srun + PMI", "horovodrun"],
    "tests/scripts/tutorials/resnet50_ddp.py": ["srun", "torchrun", "mpirun", "horovodrun"],
}
LIGHTNING = pytest.mark.main_road("a Lightning `Trainer` only")


@pytest.fixture(scope="module")
def tutorials(cluster):
    """The folder with what the scripts of tutorials download: MNIST, NSMC, and a model."""
    write_tutorials(folder(cluster, "tutorials"))
    return f"{HOME}/tutorials"


def write_tutorials(work, times=1):
    """Write that, with each example so many times."""
    (work / "MNIST").mkdir(parents=True)
    digits, _ = load_digits()
    pixels, labels = digits.pixels[:128].repeat(times, 1, 1), digits.labels[:128].repeat(times)
    many = replace(digits, pixels=pixels, labels=labels)
    write_images(work / "MNIST/raw", (many, digits), 128 * times, 16)
    reviews = [f"{n}\t{'재미있는 영화' if n % 2 else '지루한 영화'} {n}\t{n % 2}" for n in range(32)]
    rows = ["id\tdocument\tlabel", *reviews]
    if (nsmc := DATA / "nsmc/ratings_train.txt").exists():
        rows = nsmc.read_text(encoding="utf-8").splitlines()[:33]
    (work / "ratings_train.txt").write_text("\n".join(rows[:1] + rows[1:] * times))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "영화", "재미있는", "지루한"]
    tokenizer = BertTokenizer(vocab={word: n for n, word in enumerate(words)}, do_lower_case=False)
    tokenizer.save_pretrained(work / "model")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(words), **shape)).save_pretrained(work / "model")
    subprocess.run(["chown", "-R", "1000:1000", work], check=True)


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        pytest.param(script, name, marks=LIGHTNING if "lightning" in script and name == "srun" else ())
        for script, names in TUTORIALS.items()
        for name in names
    ],
)
def test_the_script_of_a_tutorial(cluster, tutorials, ahead, script, launcher):
    def submit(script, launcher):
        launch, *options = LAUNCHERS[launcher]
        command = [f"{HOME}/{launch}", *options, f"{HOME}/{script}"]
        model = ["model"] if "bert" in script else []
        # Once in the image, which has what they import; Horovod's always, as the image has its MPI.
        in_image = launcher == "srun" or "horovod" in script
        env = {"HPCTRAIN_ROOT": HOME} | ({} if in_image else NO_CONTAINER)
        ranks = [f"--ntasks-per-node={2 if launcher == 'srun' else 1}", "--nodes=2"]
        return cluster.submit(*ranks, *command, *model, cwd=tutorials, env=env)

    output = assert_ended(wait(cluster, ahead(submit), tutorials), "COMPLETED")
    size = 4 if launcher == "srun" else 2
    losses = dict(re.findall(rf"rank (\d) of {size} loss (\d+\.\d{{6}})", output))
    assert sorted(losses) == [*map(str, range(size))] and len(set(losses.values())) == 1, output


GOES_ON = {
    "examples/lightning/mnist.py": ["srun", "torchrun", "mpirun"],
    "examples/lightning/bert_nsmc.py": ["srun"],
}


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The numbers of jobs that train on more of what the tutorials download, on n3 and n4."""
    write_tutorials(folder(cluster, "more"), 200)
    return {script: submit_trainer(cluster, script, "srun", "n3,n4") for script in GOES_ON}


def submit_trainer(cluster, script, launcher, nodes):
    launch, *options = LAUNCHERS[launcher]
    words = [f"{HOME}/{launch}", *options, f"{HOME}/{script}", *(["model"] if "bert" in script else [])]
    env = {"HPCTRAIN_ROOT": HOME} | NO_CONTAINER
    return cluster.submit(f"--nodelist={nodes}", "--ntasks-per-node=2", *words, cwd=f"{HOME}/more", env=env)


@pytest.mark.parametrize(("script", "launcher"), [(name, each) for name in GOES_ON for each in GOES_ON[name]])
def test_an_unmodified_trainer_goes_on(cluster, undisturbed, script, launcher):
    """Asked to stop twice, as at the time limit, and killed once: the weights are those of a whole run."""
    number, starts, acts = submit_trainer(cluster, script, launcher, "n1,n2"), [], []

    def act(line):
        starts.extend(re.findall("^.*run folder runs/trainer/.*", line))
        if len(acts) < 3 and len(starts) > len(acts) and re.search(r"epoch 1 step \d+  train_loss", line):
            acts.append(line)
            if len(acts) < 3:
                cluster.exec("login", "scancel", "--signal=USR1", "--batch", str(number))
            else:
                pattern = f"[p]ython.*{script.rpartition('/')[2]}"
                cluster.exec("n2", "sh", "-c", f"kill -KILL $(pgrep -f '{pattern}' | tail -n 1)")

    output = assert_ended(wait(cluster, number, f"{HOME}/more", act), "COMPLETED")
    assert len(starts) == 4 and output.count("ending early, as the job has to: saved after") == 2, output
    whole = undisturbed[script]
    assert_ended(wait(cluster, whole, f"{HOME}/more"), "COMPLETED")
    runs = [result(folder(cluster, f"more/runs/trainer/{each}")) for each in (number, whole)]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"], output


def test_torchrun_restarts_a_bundled_trainer(cluster, tmp_path):
    """It goes on after its last checkpoint, and ends with the weights of a run that nothing happened to."""
    command = ["train_ddp", FEW, "--epochs", "8", "--out"]
    torchrun = ["launch/apptainer_torchrun.sh", "--max-restarts=1"]
    number = cluster.submit(HERE, *torchrun, *command, "runs/restarted", cwd=HOME)
    kill = partial(signal_rank, cluster, "KILL", "train_ddp.*runs/restarted")
    output = assert_ended(wait_and_act(cluster, number, "epoch 2 step", kill), "COMPLETED")
    assert re.search(r"resuming .* runs/restarted/checkpoints/epoch-000\d.pt", output), output
    ranks = warm_start.torchrun_ranks(4, [*command, str(tmp_path / "whole")], dict(os.environ))
    whole = warm_start.run(ranks, folder(cluster, "."))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    weights = [
        result(run)["weights_sha256"] for run in (tmp_path / "whole", folder(cluster, "runs/restarted"))
    ]
    assert weights[0] == weights[1]
    wait_until_idle(cluster, number)


def test_a_pmi_that_the_mpi_library_does_not_support(cluster):
    """Open MPI gives four worlds of one rank, which end with exit status 0."""
    # and where no launch script looks first
    script = "#!/bin/bash\nexport MASTER_ADDR=$(hostname) MASTER_PORT=25000\n" + (
        "srun --mpi=pmi2 --nodes=2 --ntasks-per-node=2 /opt/hpctrain/bin/python -m hpctrain check\n"
    )
    pmi = ["launch/apptainer_mpi.sh", "--mpi=pmi2", "check"]
    inside, outside = (cluster.submit(*pmi, cwd=HOME, env=env) for env in (None, NO_CONTAINER))
    unknown = cluster.submit("launch/apptainer_mpi.sh", "--mpi=pmi1", "check", cwd=HOME)
    direct = cluster.submit("--nodes=2", "--ntasks-per-node=2", cwd=HOME, script=script)
    for number in (inside, outside):
        assert_ended(wait(cluster, number), "FAILED", "4 ranks is rank 0 of 1: Open MPI v5", "--mpi=")
    assert_ended(wait(cluster, unknown), "FAILED", "srun does not offer --mpi=pmi1")
    assert_ended(wait(cluster, direct), "FAILED", "srun --mpi=pmi2 started 4 ranks")


@pytest.mark.main_road("| `local.sh` |")
def test_local_in_the_container(cluster):
    # empty disables a site's value, but NCCL takes it for the name of a network
    env = {"HPCTRAIN_TASKS": "2", "NCCL_NET": ""}
    done = cluster.exec("n1", "launch/local.sh", "check", user="alice", cwd=HOME, env=env)
    assert "check passed: 2 ranks on 1 host" in done.stdout and "runtime apptainer" in done.stdout
    assert "NCCL between nodes: TCP over" in done.stdout


# ---- runtimes ----


def test_a_batch_script_of_ones_own(cluster):
    """Without a launch script: in the image, and in the Python environment of the image."""
    address = "export MASTER_ADDR=$(hostname) MASTER_PORT=$((25000 + SLURM_JOB_ID)) OMP_NUM_THREADS=1"
    for python in ("apptainer exec hpctrain-cpu.sif python", BARE_PYTHON):
        script = f"#!/bin/bash\n{address}\nsrun --ntasks-per-node=1 {python} -m hpctrain check\n"
        number = cluster.submit("--nodes=2", "--ntasks-per-node=1", cwd=HOME, script=script)
        assert_ended(wait(cluster, number), "COMPLETED", "check passed: 2 ranks on 2 hosts (slurm)")


@pytest.mark.parametrize("nodes", [("n1", "n2"), ("n2",)], ids=" ".join)
def test_no_apptainer_on_a_node(cluster, nodes):
    def rename(source, target):
        for node in nodes:
            for path in ("/usr/bin/apptainer", "/usr/bin/singularity"):
                move = f"[ ! -e {path}{source} ] || mv {path}{source} {path}{target}"
                cluster.exec(node, "sh", "-c", move)

    rename("", ".off")
    try:
        done = job(cluster, "check")
    finally:
        rename(".off", "")
    where = "neither apptainer nor singularity is on the PATH of n1"
    assert_ended(done, "FAILED", where if "n1" in nodes else "rank 2 on n2: there is no apptainer")


def test_the_image_broadcast_to_every_node(cluster):
    scripts = ("apptainer_ddp.sh", "apptainer_mpi.sh")
    command = ["--broadcast", "check"]
    numbers = [cluster.submit(HERE, f"launch/{script}", *command, cwd=HOME) for script in scripts]
    for number in numbers:
        output = assert_ended(wait(cluster, number), "COMPLETED", "mounted by squashfuse_ll")
        assert re.search(rf"/tmp/hpctrain-{number}-[0-9a-f]{{16}}\.sif -- python", output), output
    for node in ("n1", "n2"):
        assert cluster.exec(node, "ls", "/tmp").stdout.count(".sif") == 0


def gpus(sif):
    """The nodes' GPUs are device files without a driver: for the options of the script and for check."""
    with Cluster(nodes=1, gpus=2, binds={sif: f"/project/{sif.name}"}) as cluster:
        cluster.install("alice")
        options = ["--nodes=1", "--gpus-per-node=2"]
        shown = ["2 GPUs per node", "apptainer exec --nv --bind"]
        names = ["/dev/nvidia0", "libcuda.so.1", "--nv", "a CPU build"]
        assert_ended(job(cluster, "check", options=options), "FAILED", *shown, *names)
        done = job(cluster, "check", "--device", "cpu", options=options)
        assert_ended(done, "COMPLETED", "check passed: 2 ranks on 1 host")

        # All of the node's GPUs for torchrun, which is one task. It had the first one alone.
        text = "import os\nprint('sees', os.environ['CUDA_VISIBLE_DEVICES'])\n"
        cluster.host_path(f"{HOME}/gpus.py").write_text(text)
        options = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-task=1"]
        _, output = job(cluster, "gpus.py", options=options, script="launch/apptainer_torchrun.sh")
        assert output.count("sees 0,1\n") == 2, output

        # Slurm tells a command of salloc on the login node of no GPU.
        for option in ("--gres=gpu:2", "--gpus=2", "--gpus-per-task=1"):
            shape = ["--nodes=1", "--ntasks-per-node=2", option]
            output = salloc(cluster, SCRIPT, "--dry-run", "check", options=shape).stdout
            assert "2 GPUs per node" in output and "apptainer exec --nv" in output, output


def test_gpus_that_slurm_granted_and_the_container_does_not_show(in_background):
    in_background(gpus).result()


@pytest.mark.parametrize(
    ("name", "right", "wrong", "texts"),
    [
        # as a login shell would bring it
        pytest.param(
            "HPCTRAIN_MODULES",
            "pytorch",
            "no-such",
            ["runtime none", "module load no-such"],
            marks=pytest.mark.main_road("| `modules_ddp.sh` |", "export HPCTRAIN_MODULES=pytorch"),
        ),
        # with a stand-in, because conda is not available here
        (
            "HPCTRAIN_PYTHON_ENV",
            "pytorch",
            "nothing",
            ["image /opt/hpctrain/bin/python", "conda activate nothing"],
        ),
    ],
    ids=["module", "conda"],
)
def test_without_a_container(cluster, name, right, wrong, texts):
    env = (
        {"BASH_ENV": "/usr/share/modules/init/bash"} if name == "HPCTRAIN_MODULES" else {"PATH": STANDIN_PATH}
    )
    script = [*ONE_EACH, "launch/modules_ddp.sh", "check"]
    good, bad = (cluster.submit(*script, cwd=HOME, env=env | {name: value}) for value in (right, wrong))
    assert_ended(wait(cluster, good), "COMPLETED", "check passed: 2 ranks on 2 hosts", texts[0])
    assert_ended(wait(cluster, bad), "FAILED", texts[1])


@pytest.mark.main_road("| `shifter_ddp.sh` |")
def test_shifter(cluster):
    """With a stand-in, as shifter is not available here: its command line, and the rendezvous."""
    env = {"PATH": STANDIN_PATH, "SHIFTER_RECORD": f"{HOME}/shifter.record"}
    env |= {"SHIFTER_SIF": "/project/hpctrain-cpu.sif", "HPCTRAIN_SHIFTER_MODULES": "gpu,nccl-plugin"}
    script, command = "launch/shifter_ddp.sh", ["train_ddp", FEW, "--epochs", "1"]
    trains, missing = (
        cluster.submit(*ONE_EACH, script, *command, cwd=HOME, env=env),
        cluster.submit(HERE, script, "check", cwd=HOME),
    )
    assert_ended(wait(cluster, trains), "COMPLETED", "runtime shifter")
    options = ["--image=id:0123456789abcdef", "--module=gpu,nccl-plugin", "--env=TMPDIR=/tmp"]
    options += [
        f"--env=MALLOC_{name}_THRESHOLD_={n}" for name, n in (("MMAP", 33554432), ("TRIM", 536870912))
    ]
    words = " ".join(f"'{word}'" for word in [*options, "python", "-m", "hpctrain", *command])
    assert folder(cluster, "shifter.record").read_text().splitlines() == [f"shifter {words}"] * 2
    assert_ended(wait(cluster, missing), "FAILED", "no shifter on the PATH of n1")


def test_horovodrun_enters_shifter_on_the_other_node(cluster):
    """It passes the PATH of the image on over ssh, where shifter was not found."""
    env = {"PATH": STANDIN_PATH, "SHIFTER_SIF": "/project/hpctrain-cpu.sif", "HPCTRAIN_RUNTIME": "shifter"}
    number = cluster.submit(*ONE_EACH, *LAUNCHERS["horovodrun"], "check", cwd=HOME, env=env)
    assert_ended(wait(cluster, number), "COMPLETED", "check passed: 2 ranks on 2 hosts (horovodrun)")


def test_pyxis(cluster, pyxis):
    """With a stand-in, as Pyxis is not available here. It would end a step for a folder that a node lacks."""
    cluster.exec("n1", "install", "-d", "/opt/of-n1")
    env = pyxis | {"HPCTRAIN_BIND": "/opt/of-n1"}
    done = job(cluster, "check", options=ONE_EACH, script="launch/apptainer_mpi.sh", env=env)
    output = assert_ended(done, "COMPLETED")
    assert "check passed: 2 ranks on 2 hosts" in output and "no /opt/of-n1, because n2 has none" in output
    for node in ("n1", "n2"):
        left = "ls -A /tmp/enroot-data-1000; ls -d /tmp/hpctrain-control.*"
        assert cluster.exec(node, "sh", "-c", left, user="alice", check=False).stdout == "", output


def test_a_job_in_another_runtime_while_pyxis_would_put_each_step_in_an_image(cluster, pyxis):
    env = pyxis | {"PYXIS_CONTAINER_IMAGE": pyxis["HPCTRAIN_IMAGE"]} | NO_CONTAINER
    done = job(cluster, "check", options=ONE_EACH, env=env)
    assert_ended(done, "COMPLETED", "check passed: 2 ranks", "the ranks: PYXIS_CONTAINER_IMAGE")


@pytest.mark.main_road
def test_nothing_is_left_of_any_job(cluster):
    """The last test on the cluster. It finds processes by their command lines, not by their variables."""
    wait_until_idle(cluster)
