"""hpctrain check: each problem is one line, which says where it is and what to do."""

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpctrain.commands.check import check
from hpctrain.distributed import gpu
from hpctrain.distributed.world import World
from tests.commands.check.helpers import CHECK, errors, full, rank, refused, run
from tests.helpers import run_command


def test_two_nodes_with_nothing_wrong(tmp_path):
    status, output = run(tmp_path, *(rank(number, size=4, per_node=2) for number in range(4)))
    assert (
        status == 0
        and "check passed: 4 ranks on 2 hosts (slurm), ring and all-reduce correct on cpu, 64 MB in" in output
    )
    assert errors(output) == []


@pytest.mark.slow
def test_a_rank_whose_peer_never_joins_reports_its_problems_too(tmp_path):
    """Rank 1 never joins; the problems of rank 0 may be the reason."""
    said = refused(tmp_path, rank(0, prepare=full("cache"), TORCH_HOME="cache"))
    assert (
        len(said) == 2 and "TORCH_HOME" in said[0] and "rank 1 of 2" in said[1] and "n1:29500" in said[1]
    ), said


# A private /dev, where the GPU is a /dev/null under another name.
GPU_DEVICE = (
    "mkdir dev; mount -t tmpfs -o mode=755 none dev; "
    "cp -a /dev/null /dev/zero /dev/urandom dev; mkdir -m 1777 dev/shm; "
    "mknod dev/nvidia0 c 1 3; mount --move dev /dev"
)


CPU_BUILD = f"torch {torch.__version__} is a CPU build"


GPUS = {
    "asked for and not in the container": (
        {"SLURM_GPUS_ON_NODE": "4"},
        ["SLURM_GPUS_ON_NODE=4", CPU_BUILD],
    ),
    "there without the driver's library": (
        {"prepare": GPU_DEVICE, "SLURM_GPUS_ON_NODE": "1"},
        ["libcuda.so.1", CPU_BUILD],
    ),
    "there, wanted and not asked for": (
        {"prepare": GPU_DEVICE, "SLURM_JOB_ID": "7", "arguments": ["--device", "cuda"]},
        ["--device cuda"],
    ),
    "wanted and not asked for": (
        {"arguments": ["--device", "cuda"]},
        ["--device cuda"],
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch can use GPUs")
@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_that_is_missing(tmp_path, name):
    wrong, words = GPUS[name]
    said = refused(tmp_path, rank(0, size=1, **wrong))
    assert [word in line for word, line in zip(words, said, strict=True)] == [True] * len(words), said
    assert all(line.startswith("rank 0 on n1: ") for line in said)


@pytest.mark.slow
def test_device_cpu_ignores_the_gpus_of_the_job(tmp_path):
    status, output = run(tmp_path, rank(0, size=1, SLURM_GPUS_ON_NODE="4", arguments=["--device", "cpu"]))
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch can use GPUs")
def test_gpus_that_a_job_of_slurm_has_not_requested_are_a_warning(tmp_path):
    """Where Slurm has no cgroups for devices, a job on CPUs sees the GPUs of others, and was refused."""
    status, output = run(tmp_path, rank(0, size=1, prepare=GPU_DEVICE, SLURM_JOB_ID="7"))
    assert status == 0 and "check passed" in output, output
    assert "warning: rank 0 on n1: GPUs " in output


def test_more_ranks_than_gpus_and_an_old_driver(monkeypatch):
    """Problems that need a GPU or its driver; torch's message is from a real driver."""
    four = World(0, 4, 0, 4, 0, 1, "slurm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for number, found in (("2", "2 GPUs"), ("1", "1 GPU ")):
        (said,) = gpu.gpu_problems(four, "auto", {"SLURM_GPUS_ON_NODE": number})
        assert "4 ranks" in said and found in said and "--ntasks-per-node" in said
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
    assert "/dev/nvidia0 (The NVIDIA driver on your system is too old (found version 11040).)" in said


@pytest.mark.slow
def test_ranks_that_differ(tmp_path):
    """Rank 1 has an older mpi4py, another image and other NCCL variables."""
    older = tmp_path / "older/mpi4py-3.1.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 3.1.0\n")
    other = {"PYTHONPATH": str(older.parent), "HPCTRAIN_IMAGE_DIGEST": "sha256:bb", "NCCL_NET": "Socket"}
    said = refused(tmp_path, rank(0, HPCTRAIN_IMAGE_DIGEST="sha256:aa"), rank(1, program=CHECK, **other))
    differing = [("image", "sha256:aa", "sha256:bb"), ("mpi4py", version("mpi4py"), "3.1.0")]
    differing.append(("NCCL_NET", "missing", "Socket"))
    for line, (name, first, second) in zip(said, differing, strict=True):
        assert line.startswith(name) and f"{first} for rank 0 on n1, {second} for rank 1 on n2" in line


@pytest.mark.slow
def test_wrong_ranks_per_node(tmp_path):
    packed = {"size": 4, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NTASKS_PER_NODE": "2"}
    ranks = [rank(number, node=0, SLURM_LOCALID=str(number), **packed) for number in range(3)]
    (said,) = refused(tmp_path, *ranks, rank(3, node=1, SLURM_LOCALID="0", **packed))
    assert "3 on n1, 1 on n2" in said and "--ntasks-per-node=2" in said


def placed(*places, nodes=2):
    """Reports of ranks at (host, local rank, node rank, GPU)."""
    return [
        {
            "rank": number,
            "launcher": "openmpi",
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
        placed(("n1", 0, 0, ""), ("n1", 1, 0, ""), ("n2", 0, 1, "")),
        {},
        ["2 on n1, 1 on n2: use srun --ntasks-per-node"],
    ),
    "a node of the job left idle": (
        placed(("n1", 0, 0, ""), ("n1", 1, 0, ""), nodes=1),
        {"SLURM_JOB_NUM_NODES": "2"},
        ["nodes: 1 instead of 2, 2 on n1"],
    ),
    "--hosts": (
        placed(("n1", 0, 0, ""), ("n1", 1, 0, ""), nodes=1),
        {"SLURM_JOB_NUM_NODES": "2", "HPCTRAIN_WORLD_SIZE": "2", "HPCTRAIN_TASKS_PER_NODE": "2"},
        [],
    ),
    "in turn": (
        placed(("n1", 0, 0, ""), ("n2", 0, 0, ""), ("n1", 1, 1, ""), ("n2", 1, 1, "")),
        {},
        ["(2 on n1, 2 on n2): use mpirun --map-by slot"],
    ),
    "a GPU for two": (
        placed(("n1", 0, 0, "GPU-a"), ("n1", 1, 0, "GPU-a"), nodes=1),
        {},
        ["ranks 0-1 on n1 share GPU-a"],
    ),
    "a local rank for two": (
        placed(("n1", 0, 0, ""), ("n1", 0, 0, ""), nodes=1),
        {},
        ["ranks 0-1 on n1 share local rank 0"],
    ),
}


def test_ranks_that_see_one_gpu_each_are_warned_of():
    """On a node with several; one rank on a node, or all GPUs in each rank, is as it should be."""

    def reports(visible, local_size):
        return [
            {"rank": rank, "host": f"n{rank // 2}", "local_size": local_size, "visible_gpus": visible}
            | {"others_gpus": []}
            for rank in range(4)
        ]

    (warning,) = check.gpu_warnings(reports(1, 2))
    assert "ranks 0-3 on n0, n1" in warning and "--gpus-per-task" in warning
    for usual in (reports(2, 2), reports(1, 1), reports(0, 2)):
        assert not list(check.gpu_warnings(usual))


def test_ranks_on_the_same_cpu_are_warned_of():
    """As after OMP_PROC_BIND, or with fewer CPUs than ranks."""

    def reports(*cpus, binding=()):
        return [
            {"rank": rank, "host": f"n{rank // 2}", "cpus": list(own), "binding": list(binding)}
            for rank, own in enumerate(cpus)
        ]

    (warning,) = check.cpu_warnings(reports([0], [0], [0], [1], binding=["OMP_PROC_BIND"]))
    assert "ranks 0-1 on n0 " in warning and warning.endswith("unset OMP_PROC_BIND")
    (warning,) = check.cpu_warnings(reports([0], [0]))
    assert "--cpus-per-task" in warning
    assert not list(check.cpu_warnings(reports([0, 1], [0, 1], [0], [1])))


def test_how_long_the_processes_took_to_start():
    def reports(*mounts):
        return [
            {"rank": n, "host": f"n{n}", "start": 2.0 + n, "mount": mount} for n, mount in enumerate(mounts)
        ]

    (line,) = check.describe_start(reports("", ""))
    assert line.endswith("2.0 to 3.0 s (rank 1 on n1)")
    (line,) = check.describe_start(reports("kernel", "squashfuse_ll"))
    assert line.endswith("kernel, squashfuse_ll")
    _, warning = check.describe_start(reports("squashfuse_ll", "squashfuse"))
    assert warning.startswith("warning: on n1 ") and "squashfuse" in warning


@pytest.mark.parametrize("name", MISPLACED)
def test_misplaced_ranks(name):
    reports, env, words = MISPLACED[name]
    said = [*check.placement_problems(reports, env)]
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True)), said


def test_a_network_that_delivers_wrong_numbers(monkeypatch):
    """Nothing arrives in the ring, and the sum is that of one rank."""
    torch_distributed = SimpleNamespace(
        P2POp=lambda *_: None,
        isend=None,
        irecv=None,
        batch_isend_irecv=lambda _: [],
        all_reduce=lambda values, group: None,
    )
    monkeypatch.setattr(check, "dist", torch_distributed)
    world, cpu = World(1, 2, 0, 1, 1, 2, "slurm"), torch.device("cpu")
    (said,) = check.ring_problems(world, cpu, None, ["n1", "n2"])
    assert "rank 0 on n1 sent 0, but -1 arrived" in said
    (said,) = check.all_reduce_problems(world, cpu, None)
    assert "2.0 instead of 3.0" in said


def test_a_place_is_short():
    hosts = [f"n{number // 4}" for number in range(400)]
    assert check.format_place([0, 1, 2, 7], hosts) == "ranks 0-2,7 on n0, n1"
    assert (
        check.format_place(list(range(400)), hosts)
        == "ranks 0-399 on n0, n1, n2, n3, n4, n5, ... and 94 more"
    )


def pip_install_user(home, package, python):
    """Install a package into this home as `pip install --user` does; returns its site-packages."""
    folder = home / ".local/lib" / python.name / "site-packages"
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("__version__ = '0.1'\n")
    return folder


@pytest.mark.slow
def test_a_library_hidden_by_the_home(tmp_path):
    """With a Python outside a venv, such as that of a site's module: it searches ~/.local first."""
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    where = run_command([python, "-c", "import site; print(site.getsitepackages()[0])"], check=True)
    ours = Path(torch.__file__).parents[1]
    home = tmp_path / "home"
    folder = pip_install_user(home, "yaml", python)
    pip_install_user(home, "a_package_of_mine", python)
    module = {
        "prepare": f"mount --bind {ours} {where.stdout.strip()}",
        "program": [str(python), *CHECK[1:]],
        "HOME": str(home),
    }
    (said,) = refused(tmp_path, rank(0, size=1, **module))
    assert f"{folder} hides yaml of {sys.base_prefix}" in said and "PYTHONNOUSERSITE=1" in said
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
    assert f"{tmp_path} hides aiohttp" in said[0]
    assert f"{tmp_path}/mine hides yaml" in said[1] and "PYTHONPATH" in said[1]
