"""The launch scripts as shipped, submitted by an ordinary user with sbatch to a real Slurm cluster of two nodes."""

import json
import re
import subprocess
import time

import pytest
from conftest import BARE_PYTHON
from slurm_cluster import REPOSITORY, Cluster

pytestmark = pytest.mark.slow

SCRIPT = "launch/apptainer_ddp.sh"
HOME = "/home/alice/hpctrain"


def job(cluster, *args, options=(), env=None, cwd=HOME, script=SCRIPT, timeout=300):
    """Submit, wait, and give how the job ended with all of its output."""
    number = cluster.submit(*options, script, *args, cwd=cwd, env=env)
    ended = cluster.wait(number, timeout=timeout)
    return ended, cluster.host_path(f"{cwd}/slurm-{number}.out").read_text(errors="replace")


def folder(cluster, path):
    return cluster.host_path(f"{HOME}/{path}")


def result(run):
    return json.loads((run / "result.json").read_text())


def wait_until_idle(cluster):
    """No step, no trainer and no container is left on any node, after the moment that an unmount takes."""
    for node in ("n1", "n2"):
        for _ in range(50):
            left = cluster.exec(node, "sh", "-c", "ps -eo args | grep -E '[h]pctrain|[s]run|[s]quashfuse' || true").stdout
            if not left:
                break
            time.sleep(0.2)
        assert left == "", f"left on {node}: {left}"


def test_the_script_with_no_argument_trains_on_digits(cluster):
    ended, output = job(cluster)
    assert (ended.state, ended.exit_code, ended.nodes) == ("COMPLETED", 0, ("n1", "n2")), output
    run = folder(cluster, f"runs/train_ddp/{ended.id}")
    assert result(run)["test_accuracy"] >= 0.97
    hosts = [log.read_text().split(" on ")[1].split(",")[0] for log in sorted((run / "logs").iterdir())]
    assert hosts == ["n1", "n1", "n2", "n2"]
    config = json.loads((run / "config.json").read_text())
    assert config["world"] | {"rank": 0} == {
        "rank": 0, "size": 4, "local_rank": 0, "local_size": 2, "node_rank": 0, "nodes": 2, "launcher": "slurm",
    }  # fmt: skip
    assert re.fullmatch("sha256:[0-9a-f]{64}", config["image_digest"])
    assert re.fullmatch("[0-9a-f]{40}", config["revision"])
    assert (run / "curves.png").stat().st_size > 10_000
    wait_until_idle(cluster)


def test_real_mnist(cluster, mnist):
    options = ["--epochs", "2", "--batch-size", "128", "--lr", "0.05", "--data", "/project/mnist", "--out", "runs/mnist"]
    ended, output = job(cluster, "train_ddp", *options, timeout=600)
    assert ended.state == "COMPLETED", output
    assert result(folder(cluster, "runs/mnist"))["test_accuracy"] >= 0.985


def test_the_arguments_of_a_script_arrive_as_they_are(cluster):
    arguments = ["--anything", "a b", "$HOME", "`id`", "*", "", "quote'and\"quote", "back\\slash", "-x"]
    mine = folder(cluster, "mine.py")
    mine.write_text("import json, os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], json.dumps(sys.argv[1:]))\n")
    ended, output = job(cluster, "./mine.py", *arguments)
    assert ended.state == "COMPLETED", output
    said = [line.split(": ", 1)[1] for line in output.splitlines() if re.match(r"\d: \d", line)]
    assert sorted(said) == [f"{rank} 4 {json.dumps(arguments)}" for rank in range(4)]


def test_a_plain_pytorch_script_with_no_import_of_ours(cluster):
    folder(cluster, "plain.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([dist.get_rank() + 1.0]); dist.all_reduce(x); print('sum', x.item())\n"
        "dist.destroy_process_group()\n"
    )
    ended, output = job(cluster, "plain.py")
    assert ended.state == "COMPLETED" and output.count("sum 10.0") == 4, output


def test_check_from_another_folder(cluster):
    cluster.exec("login", "mkdir", "-p", "elsewhere", user="alice")
    ended, output = job(cluster, "check", script=f"{HOME}/{SCRIPT}", cwd="/home/alice/elsewhere", env={"HPCTRAIN_ROOT": HOME})
    assert ended.state == "COMPLETED" and "check passed: 4 ranks on 2 hosts (slurm)" in output, output


def test_inside_salloc(cluster):
    done = cluster.exec(
        "login", "salloc", "--nodes=2", "--ntasks-per-node=1", SCRIPT, "check", user="alice", cwd=HOME, timeout=120
    )
    assert "check passed: 2 ranks on 2 hosts (slurm)" in done.stdout


def test_container_and_bare_metal_give_the_same_weights(cluster):
    """The same job with the container and without: this Python 3.11 with the same locked wheels, run by the nodes' libc."""
    if cluster.exec("n1", *BARE_PYTHON.split(), "--version", check=False).returncode:
        pytest.skip("no /usr/bin/python3.11 and .venv for the nodes to borrow: make venv on Debian 12")
    for name, python in (("container", "apptainer exec hpctrain-cpu.sif python"), ("bare", BARE_PYTHON)):
        script = (
            "#!/bin/bash\nexport MASTER_ADDR=$(hostname) MASTER_PORT=25000 OMP_NUM_THREADS=1\n"
            f"srun --nodes=2 --ntasks-per-node=2 {python} -m hpctrain train_ddp --epochs 2 --out runs/{name}\n"
        )
        number = cluster.submit("--nodes=2", "--ntasks-per-node=2", cwd=HOME, script=script)
        ended = cluster.wait(number, timeout=300)
        assert ended.state == "COMPLETED", folder(cluster, f"slurm-{number}.out").read_text()
    container, bare = (result(folder(cluster, f"runs/{name}")) for name in ("container", "bare"))
    assert container["weights_sha256"] == bare["weights_sha256"]
    assert container["test_loss"] == bare["test_loss"]


BAD_INPUT = {
    "unknown trainer": (["no_such_trainer"], {}, "there is no command 'no_such_trainer': choose from"),
    "unknown option": (["--epochs", "3"], {}, "unknown option --epochs: first the name of a trainer"),
    "missing script": (["./nothing.py"], {}, "./nothing.py: no such script"),
    "missing image": (["check"], {"HPCTRAIN_IMAGE": "/project/nothing.sif"}, "/project/nothing.sif: no such image: run make sif"),
    "missing data": (["train_ddp", "--data", "/project/nothing"], {}, "/project/nothing: no such folder"),
    "broken data": (["train_ddp", "--data", "/project/broken"], {}, "train-images-idx3-ubyte: not an idx file"),
    "a batch that cannot be shared": (["train_ddp", "--batch-size", "30"], {}, "4 ranks cannot share it evenly"),
    "nothing to resume": (["train_ddp", "--resume", "/project"], {}, "no checkpoint to resume from"),
    "a folder that cannot be written": (["train_ddp", "--out", "/usr/run"], {}, "/usr/run: cannot be written"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_ends_the_job_with_one_line(cluster, name):
    args, env, message = BAD_INPUT[name]
    broken = cluster.state / "project/broken"
    broken.mkdir(exist_ok=True)
    (broken / "train-images-idx3-ubyte").write_text("<html>not found</html>")
    ended, output = job(cluster, *args, env=env)
    assert ended.state == "FAILED" and ended.exit_code != 0, output
    said = [line for line in output.splitlines() if "hpctrain: error:" in line]
    assert len(said) == 1 and message in said[0], output
    assert "Traceback" not in output
    wait_until_idle(cluster)


def test_an_earlier_run_is_not_overwritten(cluster):
    kept = folder(cluster, "runs/kept")
    ended, output = job(cluster, "train_ddp", "--epochs", "1", "--out", "runs/kept")
    assert ended.state == "COMPLETED", output
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    ended, output = job(cluster, "train_ddp", "--epochs", "1", "--out", "runs/kept")
    assert ended.state == "FAILED" and "runs/kept holds a run already" in output
    assert before == {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}


def test_one_process_inside_a_batch_script_of_four_tasks(cluster):
    number = cluster.submit(
        "--nodes=2", "--ntasks-per-node=2", cwd=HOME,
        script="#!/bin/bash\napptainer exec hpctrain-cpu.sif hpctrain train_ddp\n",
    )  # fmt: skip
    ended = cluster.wait(number)
    output = folder(cluster, f"slurm-{number}.out").read_text()
    assert ended.state == "FAILED" and "has 4 tasks, but this process runs alone" in output and "srun" in output


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
    message = "neither apptainer nor singularity is on the PATH of n1" if "n1" in nodes else "no apptainer on the PATH of n2"
    assert ended.state == "FAILED" and message in output, output
    wait_until_idle(cluster)


def test_a_killed_rank_ends_the_whole_job(cluster):
    number = cluster.submit(SCRIPT, "train_ddp", "--epochs", "1000", cwd=HOME)
    killed = False

    def kill(line):
        nonlocal killed
        if "epoch 2 step" in line and not killed:
            killed = True
            cluster.exec("n2", "sh", "-c", "kill -KILL $(pgrep -f '[h]pctrain train_ddp' | tail -n 1)")

    ended = cluster.wait(number, timeout=120, on_line=kill)
    assert killed and ended.state == "FAILED" and ended.exit_code != 0
    # The epochs before it are not lost.
    assert (folder(cluster, f"runs/train_ddp/{number}") / "checkpoints/epoch-0001.pt").exists()
    wait_until_idle(cluster)


def test_a_job_whose_node_dies_goes_on_from_its_last_checkpoint(sif):
    with Cluster(nodes=3, binds={sif: f"/project/{sif.name}"}) as cluster:
        cluster.install("alice")
        number = cluster.submit(SCRIPT, "train_ddp", "--epochs", "12", cwd=HOME)
        crashed = False

        def crash(line):
            nonlocal crashed
            if "epoch 3 step" in line and not crashed:
                crashed = True
                cluster.crash("n2")

        ended = cluster.wait(number, timeout=240, on_line=crash)
        output = folder(cluster, f"slurm-{number}.out").read_text()
        assert crashed and ended.state == "COMPLETED", output
        assert ended.nodes == ("n1", "n3")
        assert re.search(r"resuming after epoch \d+ of runs/train_ddp/1/checkpoints", output), output
        assert output.count("restart 1") == 1
        run = folder(cluster, f"runs/train_ddp/{number}")
        assert len(list((run / "checkpoints").iterdir())) == 12 and result(run)["test_accuracy"] > 0.95


@pytest.mark.parametrize("script", sorted((REPOSITORY / "launch").glob("*_*.sh")), ids=lambda path: path.name)
def test_help_and_nonsense(script, tmp_path):
    done = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "usage: sbatch" in done.stdout and done.stderr == ""
    done = subprocess.run([script, "--nonsense"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
