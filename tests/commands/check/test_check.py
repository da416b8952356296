"""`hpctrain check` on faulty nodes: each fault gives one line, which says where it is and what to do.

The nodes are namespaces of this machine, each with its own host name, /etc/hosts and mounts, in one private
network.
"""

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import slurm_cluster
import torch

from hpctrain.commands.check import check, node
from hpctrain.distributed import gpu
from hpctrain.distributed.world import World
from tests.tools import warm_start

CHECK = [sys.executable, "-m", "hpctrain", "check"]
HOSTS = "127.0.0.1 localhost\n10.9.9.1 n1\n10.9.9.2 n2\n"


def rank(
    number, *, node=None, size=2, per_node=1, prepare="", hosts=HOSTS, program=None, arguments=(), **env
):
    """A rank as srun starts it, on node n1, n2, ...; `prepare` is a command that breaks the node.

    `program` is what starts it, if that matters: it is a process with its imports behind it otherwise.
    """
    node = number // per_node if node is None else node
    env = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % per_node),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{-(-size // per_node)})",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **env,
    }
    lines = [
        f"hostname n{node + 1}",
        "mkdir -p private",
        "mount -t tmpfs none private",
        f"printf %s {shlex.quote(hosts)} >private/hosts",
        "mount --bind private/hosts /etc/hosts",
        prepare,
    ]
    return SimpleNamespace(
        prepare="\n".join(lines), env=env, program=program, arguments=["check", *arguments]
    )


def run(tmp_path, *ranks):
    """Run the ranks in a network with the addresses of n1 and n2; returns the worst exit status and all output."""
    if os.geteuid() != 0:
        pytest.skip("nodes of namespaces need root")
    with network() as path:
        # The dynamic loader reads LD_LIBRARY_PATH when a process starts only.
        if any(each.program or "LD_LIBRARY_PATH" in each.env for each in ranks):
            return run_programs(tmp_path, path, *ranks)
        warm = [
            warm_start.Rank(each.arguments, clean_environment() | each.env, path, each.prepare)
            for each in ranks
        ]
        done = warm_start.run(warm, tmp_path)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def network():
    """The path of a network namespace with the addresses of n1 and n2."""
    script = "ip link set lo up; ip addr add 10.9.9.1/32 dev lo; ip addr add 10.9.9.2/32 dev lo; echo ready; exec cat"
    with subprocess.Popen(
        ["unshare", "--net", "bash", "-ec", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "ready\n"
        yield f"/proc/{holder.pid}/ns/net"
        holder.stdin.close()


def run_programs(tmp_path, path, *ranks):
    """Start each rank by its program."""
    started = ""
    for each in ranks:
        command = each.program or [*CHECK, *each.arguments[1:]]
        words = shlex.join(["env", *(f"{name}={value}" for name, value in each.env.items()), *command])
        node = shlex.join(
            ["unshare", "--mount", "--uts", "bash", "-c", f"set -e\n{each.prepare}\nexec {words}"]
        )
        started += f"{node} & pids+=($!)\n"
    script = f'{started}worst=0\nfor pid in "${{pids[@]}}"; do wait "$pid" || worst=$?; done; exit $worst'
    command = ["nsenter", f"--net={path}", "bash", "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=clean_environment()
    )
    return done.returncode, done.stdout + done.stderr


def clean_environment():
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "PYTHON", "HF_", "CUDA_"))
    }


def errors(output):
    assert "Traceback" not in output, output
    return [
        line.removeprefix("hpctrain: error: ")
        for line in output.splitlines()
        if line.startswith("hpctrain: error: ")
    ]


def refused(tmp_path, *ranks):
    """The errors of the check on these ranks, whose exit status has to be 1."""
    status, output = run(tmp_path, *ranks)
    assert status == 1, output
    return errors(output)


def test_two_nodes_with_nothing_wrong(tmp_path):
    status, output = run(tmp_path, *(rank(number, size=4, per_node=2) for number in range(4)))
    assert (
        status == 0
        and "check passed: 4 ranks on 2 hosts (slurm), ring and all-reduce correct on cpu, 64 MB in" in output
    )
    assert errors(output) == []


NO_RENDEZVOUS = {
    "a name that does not resolve": (
        {"hosts": "10.9.9.2 n2\n"},
        "rank 1 on n2: MASTER_ADDR n1 does not resolve: ",
    ),
    "no way to the address": (
        {"hosts": "10.9.9.2 n2\n203.0.113.1 n1\n"},
        "rank 1 on n2: MASTER_ADDR n1 cannot be reached (203.0.113.1: Network is unreachable): ",
    ),
    "a firewall that drops everything": (
        {
            "hosts": "10.9.9.2 n2\n203.0.113.1 n1\n",
            "prepare": "ip link add hole type veth peer name end; ip addr add 203.0.113.2/24 dev hole\n"
            "ip link set hole up; ip link set end up; ip neigh add 203.0.113.1 lladdr 02:00:00:00:00:01 dev hole",
        },
        "rank 1 on n2: MASTER_ADDR n1 cannot be reached (203.0.113.1: timed out): ",
    ),
    "IPv6 only": (
        {"hosts": "10.9.9.2 n2\nfd00:9::1 n1\n"},
        "rank 1 on n2: MASTER_ADDR n1 has IPv6 addresses only, and this node cannot reach them (fd00:9::1: ",
    ),
    "a loopback address of another node": (
        {"hosts": "10.9.9.2 n2\n127.0.1.1 n1\n"},
        "rank 1 on n2: MASTER_ADDR n1 is 127.0.1.1, which is this node and not that of rank 0: ",
    ),
    "its own name at a loopback address": (
        {"hosts": "127.0.1.1 n2\n10.9.9.1 n1\n"},
        "rank 1 on n2: this node's own name, n2, is 127.0.1.1, where no other node reaches it: ",
    ),
    "its own name with no address": (
        {"hosts": "10.9.9.1 n1\n"},
        "rank 1 on n2: this node's own name, n2, has no address: ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_RENDEZVOUS)
def test_a_node_without_a_rendezvous_reports_why_at_once(tmp_path, name):
    wrong, message = NO_RENDEZVOUS[name]
    said = refused(tmp_path, rank(1, **wrong))
    assert len(said) == 1 and said[0].startswith(message), said


@pytest.mark.slow
def test_rank_0_on_another_node_than_the_address(tmp_path):
    said = refused(tmp_path, rank(0, hosts=HOSTS + "203.0.113.1 n7\n", MASTER_ADDR="n7"))
    assert said == ["rank 0 on n1: MASTER_ADDR n7 (203.0.113.1) is not an address of this node, where rank 0 runs: "
                    "export the name of this node"]  # fmt: skip


@pytest.mark.slow
def test_a_rank_without_a_rendezvous_reports_its_other_problems_too(tmp_path):
    said = refused(tmp_path, rank(1, hosts="10.9.9.2 n2\n", prepare=full("cache"), TORCH_HOME="cache"))
    assert len(said) == 2 and "the file system is full" in said[0] and "does not resolve" in said[1]


@pytest.mark.slow
def test_a_rank_whose_peer_never_joins_reports_its_problems_too(tmp_path):
    """Rank 1 never joins; the problems of rank 0 may be the reason."""
    said = refused(tmp_path, rank(0, prepare=full("cache"), TORCH_HOME="cache"))
    assert (
        len(said) == 2
        and "TORCH_HOME" in said[0]
        and "rank 1 of 2 did not join at n1:29500 within 60 s" in said[1]
    ), said


def full(folder, options="size=1m"):
    return f"mkdir -p {folder}\nmount -t tmpfs -o {options} none {folder}"


NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
FOLDERS = {
    "a full cache": (
        {"prepare": full("cache"), "TORCH_HOME": "cache/torch"},
        "TORCH_HOME ({cwd}/cache): the file system is full (1 MiB and ",
    ),
    "a full home": (
        {"prepare": full("home"), "HOME": "home"},
        "home ({cwd}/home): the file system is full (",
    ),
    "a full home with a cache in it": (
        {"prepare": full("home"), "HOME": "home", "HF_HOME": "home/.cache/huggingface"},
        "home, HF_HOME ({cwd}/home): the file system is full (",
    ),
    "no inode left": (
        {"prepare": full("cache", "nr_inodes=1"), "XDG_CACHE_HOME": "cache"},
        "XDG_CACHE_HOME ({cwd}/cache): the file system is full (",
    ),
    "a cache beyond the quota": (
        {
            "prepare": "truncate -s 128M img; mkfs.btrfs -q img; mkdir cache; mount -o loop img cache; "
            "btrfs quota enable cache; btrfs qgroup limit 2M cache",
            "HF_HOME": "cache",
        },
        "HF_HOME ({cwd}/cache): your quota is used up (the file system has ",
    ),
    "a read-only cache": (
        {"prepare": full("cache", "ro"), "MPLCONFIGDIR": "cache"},
        "MPLCONFIGDIR ({cwd}/cache): the file system is read-only: bind mount it writable",
    ),
    "somebody else's cache": (
        {"prepare": full("/mnt", "mode=1777") + "; mkdir -m 755 /mnt/cache; cd /mnt", "program": [*NOBODY, *CHECK],
         "TMPDIR": "/mnt/cache", "HOME": "/mnt"},
        "TMPDIR (/mnt/cache): user 65534 may not write there: ",
    ),
    "no room in shared memory": (
        {"prepare": full("/dev/shm")},
        "shared memory (/dev/shm): the file system is full (",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a full cache" else pytest.mark.slow) for name in FOLDERS]
)
def test_a_folder_that_cannot_be_written(tmp_path, name):
    wrong, message = FOLDERS[name]
    if "mkfs.btrfs" in wrong["prepare"] and not shutil.which("mkfs.btrfs"):
        pytest.skip("no mkfs.btrfs for a file system with a quota: apt-get install btrfs-progs")
    said = refused(tmp_path, rank(0, size=1, **wrong))
    assert len(said) == 1 and said[0].startswith("rank 0 on n1: " + message.format(cwd=tmp_path)), said


@pytest.mark.slow
def test_a_home_that_is_read_only_and_holds_no_cache_is_no_problem(tmp_path):
    status, output = run(tmp_path, rank(0, size=1, prepare=full("home", "ro"), HOME="home"))
    assert status == 0, output


# A private /dev, where the GPU is a /dev/null under another name.
GPU_DEVICE = (
    "mkdir dev; mount -t tmpfs -o mode=755 none dev; cp -a /dev/null /dev/zero /dev/urandom dev; mkdir -m 1777 dev/shm; "
    "mknod dev/nvidia0 c 1 3; mount --move dev /dev"
)
CPU_BUILD = f"rank 0 on n1: torch {torch.__version__} is a CPU build, on a node with a GPU: "
GPUS = {
    "asked for and not in the container": (
        {"SLURM_GPUS_ON_NODE": "4"},
        ["rank 0 on n1: the job has a GPU (SLURM_GPUS_ON_NODE=4), but there is no /dev/nvidia* here that this user may open: ",
         CPU_BUILD],
    ),
    "there without the driver's library": (
        {"prepare": GPU_DEVICE, "SLURM_GPUS_ON_NODE": "1"},
        ["rank 0 on n1: /dev/nvidia0 is visible, but libcuda.so.1 is not found: start the container with --gpu ", CPU_BUILD],
    ),
    "wanted and not asked for": (
        {"arguments": ["--device", "cuda"]},
        ["rank 0 on n1: --device cuda, but there is no /dev/nvidia* here: request a GPU from the scheduler (--gpus-per-node)"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch can use GPUs")
@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_that_is_missing(tmp_path, name):
    wrong, messages = GPUS[name]
    said = refused(tmp_path, rank(0, size=1, **wrong))
    assert len(said) == len(messages) and all(map(str.startswith, said, messages)), said


@pytest.mark.slow
def test_device_cpu_ignores_the_gpus_of_the_job(tmp_path):
    status, output = run(tmp_path, rank(0, size=1, SLURM_GPUS_ON_NODE="4", arguments=["--device", "cpu"]))
    assert status == 0, output


def test_more_ranks_than_gpus_and_an_old_driver(monkeypatch):
    """Problems that need a GPU or its driver; torch's message is from a real driver."""
    four = World(0, 4, 0, 4, 0, 1, "slurm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert list(gpu.gpu_problems(four, "auto", {"SLURM_GPUS_ON_NODE": "2"})) == [
        "4 ranks on a node with 2 GPUs for this job: start one rank per GPU (--ntasks-per-node)"
    ]
    assert next(gpu.gpu_problems(four, "auto", {"SLURM_GPUS_ON_NODE": "1"})).startswith(
        "4 ranks on a node with 1 GPU for"
    )
    assert list(gpu.gpu_problems(four, "auto", {"SLURM_GPUS_ON_NODE": "4"})) == []

    def init():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(gpu, "gpu_devices", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(gpu, "has_driver", lambda: True)
    (said,) = gpu.gpu_problems(four, "auto", {})
    assert (
        "cannot use /dev/nvidia0 (The NVIDIA driver on your system is too old (found version 11040).): use an image"
        in said
    )


@pytest.mark.slow
def test_ranks_that_differ(tmp_path):
    """Rank 1 has an older mpi4py, another image and other NCCL variables."""
    older = tmp_path / "older/mpi4py-3.1.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 3.1.0\n")
    other = {"PYTHONPATH": str(older.parent), "HPCTRAIN_IMAGE_DIGEST": "sha256:bb", "NCCL_NET": "Socket"}
    said = refused(tmp_path, rank(0, HPCTRAIN_IMAGE_DIGEST="sha256:aa"), rank(1, program=CHECK, **other))
    image = "run the same image or environment on every node"
    assert said == [
        f"image differs: sha256:aa for rank 0 on n1, sha256:bb for rank 1 on n2: {image}",
        f"mpi4py differs: {version('mpi4py')} for rank 0 on n1, 3.1.0 for rank 1 on n2: {image}",
        "NCCL_NET differs: missing for rank 0 on n1, Socket for rank 1 on n2: set it before the launcher starts the ranks, and "
        "not in a file of one node",
    ]


@pytest.mark.slow
def test_wrong_ranks_per_node(tmp_path):
    packed = {"size": 4, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NTASKS_PER_NODE": "2"}
    ranks = [rank(number, node=0, SLURM_LOCALID=str(number), **packed) for number in range(3)]
    said = refused(tmp_path, *ranks, rank(3, node=1, SLURM_LOCALID="0", **packed))
    assert said == [
        "wrong ranks per node: 3 on n1, 1 on n2, but --ntasks-per-node=2 was requested: pass that to srun, too",
    ]


def placed(*places, launcher="openmpi", nodes=2):
    """Reports of ranks at (host, local rank, node rank, GPU)."""
    return [
        {
            "rank": number,
            "launcher": launcher,
            "nodes": nodes,
            "host": host,
            "local_rank": local,
            "node_rank": node,
            "gpu": gpu,
        }
        for number, (host, local, node, gpu) in enumerate(places)
    ]


MISPLACED = {
    "even": (placed(("n1", 0, 0, ""), ("n2", 0, 1, "")), {}, []),
    "uneven": (
        placed(("n1", 0, 0, ""), ("n1", 1, 0, ""), ("n2", 0, 1, "")), {},
        ["wrong ranks per node: 2 on n1, 1 on n2: use srun --ntasks-per-node, or mpirun --map-by ppr:N:node"],
    ),
    "a node of the job left idle": (
        placed(("n1", 0, 0, ""), ("n1", 1, 0, ""), nodes=1), {"SLURM_JOB_NUM_NODES": "2"},
        ["wrong number of nodes: 1 instead of 2, 2 on n1: pass the list of all nodes to the launcher"],
    ),
    "in turn": (
        placed(("n1", 0, 0, ""), ("n2", 0, 0, ""), ("n1", 1, 1, ""), ("n2", 1, 1, "")), {},
        ["the ranks do not fill one node after the other (2 on n1, 2 on n2): use mpirun --map-by slot"],
    ),
    "a GPU for two": (
        placed(("n1", 0, 0, "GPU-a"), ("n1", 1, 0, "GPU-a"), nodes=1), {},
        ["ranks 0-1 on n1 share GPU-a: start one task per GPU (--ntasks-per-node)"],
    ),
    "a local rank for two": (
        placed(("n1", 0, 0, ""), ("n1", 0, 0, ""), nodes=1), {},
        ["ranks 0-1 on n1 share local rank 0: start one task per GPU (--ntasks-per-node)"],
    ),
}  # fmt: skip


def test_ranks_that_see_one_gpu_each_are_warned_of():
    """On a node with several; one rank on a node, or all GPUs in each rank, is as it should be."""

    def reports(visible, local_size):
        return [
            {"rank": rank, "host": f"n{rank // 2}", "local_size": local_size, "visible_gpus": visible}
            for rank in range(4)
        ]

    (warning,) = check.isolation_warnings(reports(1, 2))
    assert warning.startswith(
        "warning: ranks 0-3 on n0, n1 see one GPU each (--gpus-per-task), so NCCL does not use NVLink"
    )
    for usual in (reports(2, 2), reports(1, 1), reports(0, 2)):
        assert not list(check.isolation_warnings(usual))


def test_what_mounts_the_image(tmp_path):
    env = {"APPTAINER_CONTAINER": "/images/hpctrain-cpu.sif"}

    def mount(names, env=env):
        proc = tmp_path / "-".join(names)
        for number, name in enumerate(names, start=1):
            (proc / str(number)).mkdir(parents=True)
            (proc / str(number) / "comm").write_text(f"{name}\n")
        return node.image_mount(env, proc)

    assert mount(["init", "squashfuse_ll", "python"]) == "squashfuse_ll"
    assert mount(["systemd", "squashfuse"]) == "squashfuse"
    assert mount(["systemd", "python"]) == "kernel"
    assert mount(["appinit", "python"]) == "" and mount([]) == ""  # hidden
    assert (
        mount(["bash", "squashfuse_ll"], {}) == "" == mount(["bash"], {"APPTAINER_CONTAINER": str(tmp_path)})
    )


def test_how_long_the_processes_took_to_start():
    def reports(*mounts):
        return [
            {"rank": n, "host": f"n{n}", "start": 2.0 + n, "mount": mount} for n, mount in enumerate(mounts)
        ]

    text = "from the start of Python to the end of its imports: 2.0 to 3.0 s (rank 1 on n1)"
    assert list(check.describe_start(reports("", ""))) == [text]
    assert list(check.describe_start(reports("kernel", "squashfuse_ll"))) == [
        f"{text}; the image is mounted by kernel, squashfuse_ll"
    ]
    assert list(check.describe_start(reports("squashfuse_ll", "squashfuse")))[1].startswith(
        "warning: on n1 the image is mounted by "
    )
    assert 0 < node.seconds_since_start() < 3600


@pytest.mark.parametrize("name", MISPLACED)
def test_misplaced_ranks(name):
    reports, env, problems = MISPLACED[name]
    assert list(check.placement_problems(reports, env)) == problems


def test_a_network_that_delivers_wrong_numbers(monkeypatch):
    """Faults that a healthy network does not have: nothing arrives in the ring, and the sum is that of one rank."""
    torch_distributed = SimpleNamespace(
        P2POp=lambda *_: None,
        isend=None,
        irecv=None,
        batch_isend_irecv=lambda _: [],
        all_reduce=lambda values, group: None,
    )
    monkeypatch.setattr(check, "dist", torch_distributed)
    world, cpu = World(1, 2, 0, 1, 1, 2, "slurm"), torch.device("cpu")
    assert list(check.ring_problems(world, cpu, None, ["n1", "n2"])) == [
        "in the ring, rank 0 on n1 sent 0, but -1 arrived: do not train on these nodes"
    ]
    assert list(check.all_reduce_problems(world, cpu, None)) == [
        "the all-reduce gave 2.0 instead of 3.0: do not train on these nodes"
    ]


def test_a_place_is_short():
    hosts = [f"n{number // 4}" for number in range(400)]
    assert check.format_place([0, 1, 2, 7], hosts) == "ranks 0-2,7 on n0, n1"
    assert (
        check.format_place(list(range(400)), hosts)
        == "ranks 0-399 on n0, n1, n2, n3, n4, n5, ... and 94 more"
    )


def pip_install_user(home, package, python):
    """Install a package into ~/.local of this home, as `pip install --user` does; returns its site-packages."""
    folder = home / ".local/lib" / python.name / "site-packages"
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("__version__ = '0.1'\n")
    return folder


@pytest.mark.slow
def test_a_library_hidden_by_the_home(tmp_path):
    """With a Python outside a venv, such as that of a site's module: it searches ~/.local first."""
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    where = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = Path(torch.__file__).parents[1]
    home = tmp_path / "home"
    folder = pip_install_user(home, "yaml", python)
    pip_install_user(home, "a_package_of_mine", python)
    module = {
        "prepare": f"mount --bind {ours} {where.stdout.strip()}",
        "program": [str(python), *CHECK[1:]],
        "HOME": str(home),
    }
    said = refused(tmp_path, rank(0, size=1, **module))
    assert said == [f"rank 0 on n1: {folder} hides yaml of {sys.base_prefix}: export PYTHONNOUSERSITE=1"]
    status, output = run(tmp_path, rank(0, size=1, **module, PYTHONNOUSERSITE="1"))
    assert status == 0, output


@pytest.mark.slow
def test_a_library_hidden_by_pythonpath_or_by_the_current_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/yaml.py").write_text("")
    (tmp_path / "mine/an_addition.py").write_text("")
    (tmp_path / "aiohttp.py").write_text("")
    said = refused(tmp_path, rank(0, size=1, program=CHECK, PYTHONPATH=str(tmp_path / "mine")))
    assert len(said) == 2, said
    assert f"{tmp_path} hides aiohttp of" in said[0] and "start from another folder" in said[0]
    assert f"{tmp_path}/mine hides yaml of" in said[1] and "from PYTHONPATH" in said[1]


# --- in the image, which has MPI ---


def in_the_image(*command, **env):
    """Run a command in the image, with this checkout of hpctrain."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    source = slurm_cluster.REPOSITORY / "src"
    apptainer = [
        "apptainer",
        "exec",
        "--env",
        f"PYTHONPATH={source}",
        *options,
        slurm_cluster.REPOSITORY / "hpctrain-cpu.sif",
    ]
    done = subprocess.run(
        [slurm_cluster.CLUSTER_SH, "run", "--", *apptainer, *command],
        cwd=slurm_cluster.REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
MEET = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_ring_and_all_reduce_over_mpi(sif):
    status, output = in_the_image(*MPIRUN, "python", "-m", "hpctrain", "check", MASTER_PORT="29511", **MEET)
    assert status == 0 and "check passed: 2 ranks on 1 host (openmpi)" in output, output
    assert "correct over MPI, too (Open MPI v4" in output


MISMATCHES = {
    "and gives up": (
        "for name in ${!PMIX_*} OMPI_MCA_ess; do unset $name; done",
        "started 2 ranks, but Open MPI v4.1.4 did not get through MPI_Init: use an mpirun of the same MPI and version",
    ),
    "and takes each rank for a world of its own": (
        "for name in ${!PMIX_*} ${!OMPI_MCA_*}; do unset $name; done",
        "started 2 ranks, but Open MPI v4.1.4 gives each of them a world of 1: use an mpirun of the same MPI and version",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", MISMATCHES)
def test_an_mpi_of_another_version_than_its_mpirun(sif, how):
    """Simulated: the ranks lose the variables that mpirun has set."""
    forget, message = MISMATCHES[how]
    command = [*MPIRUN, "bash", "-c", f"{forget}; exec python -m hpctrain check"]
    status, output = in_the_image(*command, MASTER_PORT="29512", **MEET)
    said = errors(output)
    assert status != 0 and len(said) == 1 and "PMI mismatch: mpirun" in said[0] and message in said[0], output
