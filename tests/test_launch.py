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


def wait_until_idle(cluster, podman_hpc=False):
    """No step, no launcher, no trainer and no container is left on any node, after the moment that an unmount takes.

    Only a job of podman-hpc can have left a mount of its image, perhaps an earlier one: its unmount gives up after five seconds.
    """
    ours = "[h]pctrain|[s]run |[p]ython|[m]pirun|[p]rted|[h]orovodrun|[s]quashfuse|[c]onmon|[f]use-overlayfs"
    others = "^$" if podman_hpc else "/overlay/l/.*[.]squash"
    show = f"ps -eo args | grep -E '{ours}' | grep -v '{others}' || true"
    for node in ("n1", "n2"):
        for _ in range(50):
            left = cluster.exec(node, "sh", "-c", show).stdout
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
    options = ["--epochs", "2", "--batch-size", "128", "--lr", "0.05", "--data", "/project/data/mnist", "--out", "runs/mnist"]
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
    """The same job with the container and without: the Python environment of the image, run by the nodes' libc."""
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
    "unknown option": (["--epochs", "3"], {}, "unknown option --epochs: a trainer's options come after its name"),
    "an option of another script": (["--mpi=pmix", "check"], {}, "this script has no option --mpi; --help lists"),
    "nothing to broadcast": (
        ["--broadcast", "check"],
        {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_ENV": "/opt/hpctrain"},
        "leave it out",
    ),
    "unknown runtime": (["check"], {"HPCTRAIN_RUNTIME": "docker"}, "HPCTRAIN_RUNTIME is 'docker': choose"),
    "unknown module": (["check"], {"HPCTRAIN_MODULES": "apptainer/99"}, "module"),
    "no such environment": (
        ["check"],
        {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_ENV": "/usr"},
        "HPCTRAIN_ENV=/usr is no venv, and there is no conda",
    ),
    "no torch without a container": (["check"], {"HPCTRAIN_RUNTIME": "none"}, "n1 has no torch: set HPCTRAIN_MODULES"),
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
    message = (
        "neither apptainer nor singularity is on the PATH of n1"
        if "n1" in nodes
        else "rank 2 on n2: there is no apptainer on the PATH"
    )
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


# ---- other launchers and runtimes; what trains where is tests/test_matrix.py ----

LAUNCHERS = {
    "srun": ["launch/apptainer_ddp.sh"],
    "torchrun": ["launch/apptainer_torchrun.sh"],
    "mpirun": ["launch/apptainer_mpi.sh", "--mpi=mpirun"],
    "srun + PMI": ["launch/apptainer_mpi.sh"],
    "horovodrun": ["launch/apptainer_horovod.sh", "--launcher=horovodrun"],
}


# A Horovod script needs MPI or horovodrun to meet; to others srun with PMI is srun.
USERS_SCRIPTS = {
    "plain_ddp.py": ["srun", "torchrun", "mpirun", "horovodrun"],
    "plain_lightning.py": ["srun", "torchrun", "mpirun"],
    "plain_horovod.py": ["mpirun", "srun + PMI", "horovodrun"],
}


@pytest.mark.parametrize(("script", "launcher"), [(script, x) for script, names in USERS_SCRIPTS.items() for x in names])
def test_a_users_own_script_with_no_import_of_ours(cluster, script, launcher):
    command, *options = LAUNCHERS[launcher]
    ended, output = job(cluster, *options, f"tests/scripts/{script}", script=command)
    assert ended.state == "COMPLETED", output
    losses = dict(re.findall(r"rank (\d) of 4 loss (\d+\.\d{6})", output))
    assert sorted(losses) == ["0", "1", "2", "3"] and len(set(losses.values())) == 1, output


def test_eight_ranks_on_four_nodes(cluster):
    ended, output = job(cluster, "train_ddp", "--epochs", "1", options=["--nodes=4"])
    assert ended.state == "COMPLETED" and ended.nodes == ("n1", "n2", "n3", "n4"), output
    logs = sorted((folder(cluster, f"runs/train_ddp/{ended.id}") / "logs").iterdir())
    assert [log.read_text().split(" on ")[1].split(",")[0] for log in logs] == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]


@pytest.mark.parametrize("script", ["apptainer_ddp.sh", "apptainer_torchrun.sh", "apptainer_mpi.sh", "apptainer_horovod.sh"])
def test_one_rank(cluster, script):
    ended, output = job(cluster, "check", options=["--nodes=1", "--ntasks-per-node=1"], script=f"launch/{script}")
    assert ended.state == "COMPLETED" and "check passed: 1 rank" in output, output


def test_two_jobs_at_once_on_the_same_nodes(cluster):
    numbers = [cluster.submit(LAUNCHERS[x][0], "train_ddp", "--epochs", "3", cwd=HOME) for x in ("srun", "torchrun")]
    ports = set()
    for number in numbers:
        ended = cluster.wait(number)
        output = folder(cluster, f"slurm-{number}.out").read_text()
        assert ended.state == "COMPLETED" and ended.nodes == ("n1", "n2"), output
        ports |= set(re.findall(r"rendezvous n1:(\d+)", output))
    assert len(ports) == 2
    spans = [
        json.loads((folder(cluster, f"runs/train_ddp/{number}") / "config.json").read_text())["started"] for number in numbers
    ]
    ends = [(folder(cluster, f"runs/train_ddp/{number}") / "result.json").stat().st_mtime for number in numbers]
    assert max(time.mktime(time.strptime(span[:19], "%Y-%m-%dT%H:%M:%S")) for span in spans) < min(ends)  # they overlapped


def test_a_job_array(cluster):
    number = cluster.submit("--array=1-2", SCRIPT, "train_ddp", "--epochs", "1", cwd=HOME)
    while cluster.exec("login", "squeue", "--noheader", "--array", "--jobs", str(number), check=False).stdout:
        time.sleep(0.5)
    for task in (1, 2):
        run = folder(cluster, f"runs/train_ddp/{number}_{task}")
        assert (run / "result.json").exists(), folder(cluster, f"slurm-{number}_{task}.out").read_text()


@pytest.mark.parametrize("script", ["apptainer_ddp.sh", "apptainer_mpi.sh"])
def test_the_image_broadcast_to_every_node(cluster, script):
    ended, output = job(cluster, "--broadcast", "check", script=f"launch/{script}")
    assert ended.state == "COMPLETED" and f"/tmp/hpctrain-{ended.id}.sif -- python" in output, output
    for node in ("n1", "n2"):
        assert cluster.exec(node, "ls", "/tmp").stdout.count(".sif") == 0


def test_what_a_dry_run_prints_can_be_run(cluster):
    ended, output = job(cluster, "--dry-run", "./no args.py", script=SCRIPT)
    assert ended.state == "FAILED" and "no such script" in output
    planned = cluster.exec("login", SCRIPT, "--dry-run", "train_ddp", "--out", "a b", user="alice", cwd=HOME).stdout
    assert (
        "srun --nodes=2 --ntasks-per-node=2" in planned and "train_ddp --out a\\ b" in planned and "MASTER_ADDR=node1" in planned
    )
    pasted = f"{SCRIPT} --dry-run check | grep -v ^hpctrain: > pasted && bash pasted"
    done = cluster.exec(
        "login", "salloc", "-N2", "--ntasks-per-node=2", "bash", "-c", pasted, user="alice", cwd=HOME, timeout=120
    )
    assert "check passed: 4 ranks on 2 hosts (slurm)" in done.stdout


def test_tasks_that_slurm_would_pack_unevenly(cluster):
    done = cluster.exec("login", "salloc", "-N2", "-n4", SCRIPT, "check", user="alice", cwd=HOME, check=False)
    assert done.returncode == 2 and "3,1 tasks on the nodes, not the same number on each: give --ntasks-per-node" in done.stderr


@pytest.mark.parametrize("restarts", [0, 2])
def test_torchrun_starts_all_ranks_anew(cluster, restarts):
    folder(cluster, "dies.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "again = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if dist.get_rank() == 3 and again == 0: os.kill(os.getpid(), 9)\n"
        "x = torch.ones(1); dist.all_reduce(x); print(f'sum {x.item()} after {again}\\n', end='', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    ended, output = job(cluster, f"--max-restarts={restarts}", "dies.py", script="launch/apptainer_torchrun.sh")
    if restarts:
        assert ended.state == "COMPLETED" and output.count("sum 4.0 after") == 4, output  # each agent counts its own
    else:
        assert ended.state == "FAILED" and "rank      : 3" in output and "SIGKILL" in output, output
    wait_until_idle(cluster)


def test_a_pmi_that_the_mpi_library_does_not_speak(cluster):
    """Open MPI 4 of the image aborts under pmi2; Open MPI 5 of the nodes gives four worlds of one, which end with exit 0."""
    ended, output = job(cluster, "--mpi=pmi2", "check", script="launch/apptainer_mpi.sh")
    assert ended.state == "FAILED" and "MPI does not start (Open MPI v4" in output and "try another --mpi=" in output, output
    env = {"HPCTRAIN_RUNTIME": "none", "HPCTRAIN_ENV": "/opt/hpctrain"}
    ended, output = job(cluster, "--mpi=pmi2", "check", script="launch/apptainer_mpi.sh", env=env)
    assert ended.state == "FAILED" and "4 ranks all say rank 0 of 1: Open MPI v5" in output, output
    ended, output = job(cluster, "--mpi=pmi1", "check", script="launch/apptainer_mpi.sh")
    assert ended.state == "FAILED" and "srun here does not speak --mpi=pmi1" in output, output
    # and where no launch script looks first
    script = "#!/bin/bash\nexport MASTER_ADDR=$(hostname) MASTER_PORT=25000\n" + (
        "srun --mpi=pmi2 --nodes=2 --ntasks-per-node=2 /opt/hpctrain/bin/python -m hpctrain check\n"
    )
    number = cluster.submit("--nodes=2", "--ntasks-per-node=2", cwd=HOME, script=script)
    assert cluster.wait(number).state == "FAILED"
    assert "PMI mismatch: srun --mpi=pmi2 started 4 ranks" in folder(cluster, f"slurm-{number}.out").read_text()


def test_gpus_that_slurm_gave_and_the_container_does_not_show(sif):
    """The nodes' GPUs are device files with no driver behind them; what is tested is what the script does and check says."""
    with Cluster(nodes=1, gpus=2, binds={sif: f"/project/{sif.name}"}) as cluster:
        cluster.install("alice")
        options = ["--nodes=1", "--gpus-per-node=2"]
        ended, output = job(cluster, "check", options=options)
        assert "2 GPUs a node" in output and "apptainer exec --nv --bind" in output
        assert ended.state == "FAILED", output
        assert "/dev/nvidia0 is here, but libcuda.so.1 is not: start the container with --nv" in output
        assert "is a CPU build, on a node with a GPU" in output
        ended, output = job(cluster, "check", "--device", "cpu", options=options)
        assert ended.state == "COMPLETED" and "check passed: 2 ranks on 1 host" in output, output


def test_without_a_container_by_a_module(cluster):
    env = {"BASH_ENV": "/usr/share/modules/init/bash", "HPCTRAIN_MODULES": "pytorch"}  # as a login shell would bring it
    ended, output = job(cluster, "check", script="launch/modules_ddp.sh", env=env)
    assert ended.state == "COMPLETED" and "runtime none" in output and "check passed: 4 ranks on 2 hosts" in output, output
    ended, output = job(cluster, "check", script="launch/modules_ddp.sh", env=env | {"HPCTRAIN_MODULES": "no-such"})
    assert ended.state == "FAILED" and "module load no-such" in output, output


def test_without_a_container_by_conda(cluster):
    """With a stand-in, because the real one cannot be had."""
    env = {"PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin", "HPCTRAIN_ENV": "pytorch"}
    ended, output = job(cluster, "check", script="launch/modules_ddp.sh", env=env)
    assert ended.state == "COMPLETED" and "image /opt/hpctrain/bin/python" in output and "check passed" in output, output
    ended, output = job(cluster, "check", script="launch/modules_ddp.sh", env=env | {"HPCTRAIN_ENV": "nothing"})
    assert ended.state == "FAILED" and "conda activate nothing failed" in output, output


def test_pbs(cluster):
    """By qsub over Slurm (slurm-wlm-torque): the variables and hosts of PBS, none of Slurm's variables, and mpirun by ssh."""

    def submit(line, select):
        words = ["qsub", "-l", select, "-l", "walltime=00:10:00"]
        done = cluster.exec("login", *words, user="alice", cwd=HOME, input=f"{HOME}/launch/pbs_ddp.sh {line}\n")
        ended = cluster.wait(int(done.stdout))
        return ended, folder(cluster, f"STDIN.o{ended.id}").read_text() + folder(cluster, f"STDIN.e{ended.id}").read_text()

    for runtime in ("", "HPCTRAIN_RUNTIME=none HPCTRAIN_ENV=/opt/hpctrain"):
        folder(cluster, "pbs.sh").write_text(f"#!/bin/bash\n{runtime} exec {HOME}/launch/pbs_ddp.sh check\n")
        done = cluster.exec(
            "login", "qsub", "-N", "by_pbs", "-l", "select=2:ncpus=2:mpiprocs=2", "pbs.sh", user="alice", cwd=HOME
        )
        ended = cluster.wait(int(done.stdout))
        output = folder(cluster, f"by_pbs.o{ended.id}").read_text()
        assert ended.state == "COMPLETED" and "check passed: 4 ranks on 2 hosts (openmpi)" in output, output
    ended, output = submit("train_ddp --epochs 1 --out 'runs/by pbs'", "select=2:ncpus=2:mpiprocs=2")
    assert ended.state == "COMPLETED" and (folder(cluster, "runs/by pbs") / "result.json").exists(), output
    ended, output = submit("--mpi=pmix check", "select=1:ncpus=1:mpiprocs=1")
    assert ended.state == "FAILED" and "this script has no option --mpi" in output, output


def test_shifter(cluster):
    """With a stand-in, because the real one cannot be had: what reaches it, and that the ranks meet."""
    env = {
        "PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin",
        "SHIFTER_RECORD": f"{HOME}/shifter.record",
        "SHIFTER_SIF": "/project/hpctrain-cpu.sif",
        "HPCTRAIN_SHIFTER_MODULES": "gpu,nccl-plugin",
    }
    ended, output = job(cluster, "train_ddp", "--epochs", "1", script="launch/shifter_ddp.sh", env=env)
    assert ended.state == "COMPLETED" and "runtime shifter" in output, output
    record = folder(cluster, "shifter.record").read_text().splitlines()
    assert len(record) == 4
    assert set(record) == {
        "shifter '--image=hpctrain:cpu' '--module=gpu,nccl-plugin' 'python' '-m' 'hpctrain' 'train_ddp' '--epochs' '1'"
    }
    ended, output = job(cluster, "check", script="launch/shifter_ddp.sh", env=env | {"HPCTRAIN_IMAGE": "nothing:1"})
    assert ended.state == "FAILED" and "nothing:1: shifter has no such image" in output, output
    ended, output = job(cluster, "check", script="launch/shifter_ddp.sh")
    assert ended.state == "FAILED" and "there is no shifter on the PATH of n1" in output, output


def test_check_and_then_the_run_in_one_job(cluster):
    arguments = ["apptainer_torchrun.sh", "--max-restarts=1", "train_ddp", "--epochs", "1"]
    ended, output = job(cluster, *arguments, script="launch/check.sh")
    assert ended.state == "COMPLETED", output
    assert output.index("check passed: 4 ranks on 2 hosts (torchrun)") < output.index("run folder runs/train_ddp")
    ended, output = job(cluster, "nothing.sh", script="launch/check.sh")
    assert ended.state == "FAILED" and "no such script" in output


def test_local_in_the_container(cluster):
    env = {"HPCTRAIN_TASKS": "2", "NCCL_NET": ""}  # which for a site's file is a choice, and for NCCL the name of no network
    done = cluster.exec("n1", "launch/local.sh", "check", user="alice", cwd=HOME, env=env)
    assert "check passed: 2 ranks on 1 host" in done.stdout and "runtime apptainer" in done.stdout
    assert "NCCL between nodes: Socket" in done.stdout


# ---- when a rank fails: the whole job is FAILED within 90 s, says which rank and why, and nothing is left ----

RAISES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000000):
    x = torch.ones(1)
    dist.all_reduce(x)
    if step == 2 and dist.get_rank() == 3:
        if os.environ.get("FAULT") == "kill":
            os.kill(os.getpid(), 9)
        raise ValueError("boom")
"""
WHO = {  # how each launcher names a rank that was killed
    "srun": r"n2: task 3: Killed",
    "torchrun": r"rank +: 3 (.*\n)+.*Signal 9 \(SIGKILL\)",
    "mpirun": r"rank 3 with PID \d+ on node n2 exited on\s+signal 9",
    "srun + PMI": r"n2: task 3: Killed",
    "horovodrun": r"rank 3 on n2 was ended by signal 9",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_rank_that_dies_fails_the_job_and_is_named(cluster, launcher, fault):
    folder(cluster, "raises.py").write_text(RAISES)
    command, *options = LAUNCHERS[launcher]
    since = time.monotonic()
    ended, output = job(cluster, *options, "raises.py", script=command, env={"FAULT": fault})
    assert ended.state == "FAILED" and ended.exit_code != 0 and time.monotonic() - since < 90, output
    if fault == "raise":
        assert re.search(r"(rank3\]|^3|\[3\]<stderr>): .*ValueError: boom", output, re.M), output
    else:
        assert re.search(WHO[launcher], output), output
    wait_until_idle(cluster)


def test_no_container_of_podman_hpc_is_left_when_a_rank_dies(cluster, podman_image):
    folder(cluster, "raises.py").write_text(RAISES)
    ended, output = job(cluster, "raises.py", script="launch/podman_hpc_ddp.sh", env={"FAULT": "kill"} | podman_image)
    assert ended.state == "FAILED" and re.search("n2: task 3", output), output
    wait_until_idle(cluster, podman_hpc=True)


@pytest.mark.parametrize("launchers", [("srun", "torchrun", "mpirun"), ("srun + PMI", "horovodrun")], ids=" and ".join)
def test_a_rank_that_hangs_at_start_fails_the_job_and_is_named(cluster, launchers):
    hang = folder(cluster, "hang")
    hang.mkdir(exist_ok=True)
    # Python reads it before anything else
    (hang / "sitecustomize.py").write_text(
        "import os, sys, time\nif os.environ.get('RANK') == '3' and 'train_ddp' in sys.orig_argv: time.sleep(1000)\n"
    )
    since = time.monotonic()
    numbers = []
    for launcher in launchers:
        command, *options = LAUNCHERS[launcher]
        env = {"APPTAINERENV_PYTHONPATH": f"{HOME}/hang"}
        numbers.append(cluster.submit(command, *options, "train_ddp", cwd=HOME, env=env))
    for number, launcher in zip(numbers, launchers, strict=True):
        ended = cluster.wait(number)
        output = folder(cluster, f"slurm-{number}.out").read_text()
        assert ended.state == "FAILED" and time.monotonic() - since < 90, f"{launcher}: {output}"
        assert re.search(r"hpctrain: error: rank 3 of 4 did not come to n1:\d+ within 60 s", output), f"{launcher}: {output}"
    wait_until_idle(cluster)


# ---- every script ----


@pytest.mark.parametrize("script", sorted((REPOSITORY / "launch").glob("[!lt]*.sh")), ids=lambda path: path.name)
def test_help_and_nonsense(script, tmp_path):
    done = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and re.match(r"[A-Z](.|\n)*usage: (sbatch|qsub) ", done.stdout) and done.stderr == ""
    done = subprocess.run([script, "--nonsense"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.parametrize("site", sorted((REPOSITORY / "launch/sites").glob("*.env")), ids=lambda path: path.stem)
def test_a_site_sets_nothing_that_the_user_has_set(site):
    """Each line `export NAME=...` gives way to a value that is there, and the site's file can be read with nothing set."""
    names = re.findall(r"^export (\w+)=", site.read_text(), re.M)
    show = f"set -eu; source {site}; env"
    bare = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
    done = subprocess.run(["bash", "-c", show], env=bare, capture_output=True, text=True, cwd="/tmp")
    assert done.returncode == 0 and f"HPCTRAIN_SITE={site.stem}" in done.stdout.splitlines(), done.stderr
    chosen = {name: "mine" for name in names if name not in ("HPCTRAIN_SITE", "HPCTRAIN_ROOT")}
    done = subprocess.run(["bash", "-c", show], env=bare | chosen, capture_output=True, text=True, cwd="/tmp")
    for name in chosen:
        assert f"{name}=mine" in done.stdout.splitlines()
