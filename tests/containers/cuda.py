"""make test-cuda FLAVOR=cu130: an image with CUDA on the cluster.

There is no GPU here, so the ranks run on CPUs.

Not a part of `make test`, which would have to build another image.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY, Cluster

from tests.helpers import run_command

FLAVOR = os.environ["FLAVOR"]
SIF = REPOSITORY / f"hpctrain-{FLAVOR}.sif"
HOME = "/home/alice/hpctrain"
# maximum size in bytes; the architectures of torch's and Horovod's kernels
SIZE = {"cu130": 3.4e9, "cu128": 4.5e9}
ARCHITECTURES = {
    "cu130": {"sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"},
    "cu128": {"sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"},
}
# those that Horovod's compiler does not know, for which its library has PTX
NEWER_THAN_NVCC = {"cu130": set(), "cu128": {"sm_100", "sm_120"}}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, with the image in the project folder, where the scripts look for it."""
    with Cluster(nodes=2, binds={SIF: f"/project/{SIF.name}"}) as cluster:
        cluster.install("alice")
        yield cluster


def inside(cluster: Cluster, *command: str) -> str:
    """The output of a command in the image, run by alice on a node."""
    done = cluster.exec(
        "n1", "apptainer", "exec", f"/project/{SIF.name}", *command, user="alice", timeout=600
    )
    print(done.stdout)
    return done.stdout


def test_the_sif_is_no_larger_than_promised():
    assert SIF.stat().st_size <= SIZE[FLAVOR]


def test_it_holds_the_locked_versions(cluster):
    shown = json.loads(inside(cluster, "cat", "/opt/hpctrain/versions.json"))
    versions = {name.replace("_", "-"): version for name, version in shown.items()}
    lock = (REPOSITORY / f"containers/locks/{FLAVOR}.lock").read_text()
    locked = dict(re.findall(r"^([a-z0-9.-]+)==([^ ]+)", lock, re.M))
    assert len(locked) > 90
    assert {name: versions.get(name) for name in locked} == locked


def test_it_passes_its_check(cluster):
    """Packages import, each CUDA library exists once, torch, MPI and Horovod sum, and more."""
    shown = inside(cluster, "/opt/hpctrain/libexec/check_image.sh")
    assert "one libnccl, libcudart, libcudnn and libcublas" in shown
    assert "check: Horovod has PyTorch MPI Gloo NCCL" in shown and "check: the image works" in shown
    assert "check: torch.compile on the CPU" in shown


KERNEL = """
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, 2 * tl.load(x + i))

source = ASTSource(double, signature={"x": "*fp32", "n": "constexpr"}, constexprs={"n": 128})
target = GPUTarget("cuda", int(sys.argv[1]), 32)
print("cubin", len(triton.compile(source, target=target).asm["cubin"]))
"""


def test_triton_compiles_a_kernel_and_what_loads_it(cluster):
    """As torch.compile for a GPU: PTX and machine code for the oldest GPU, and Triton's driver, by gcc."""
    cluster.host_path("/home/alice/kernel.py").write_text(KERNEL)
    oldest = min(int(name[3:]) for name in ARCHITECTURES[FLAVOR])
    assert int(inside(cluster, "python", "/home/alice/kernel.py", str(oldest)).split()[1]) > 1000
    code = (
        "import sysconfig, triton.backends.nvidia as n\n"
        "print(n.__path__[0], sysconfig.get_paths()['include'])"
    )
    triton, python = inside(cluster, "python", "-c", code).split()
    inside(
        cluster,
        "gcc",
        "-c",
        "-fPIC",
        f"-I{triton}/include",
        f"-I{python}",
        f"{triton}/driver.c",
        "-o",
        "/tmp/driver.o",
    )


def test_horovod_names_nccl_mpi_and_gloo(cluster):
    shown = inside(cluster, "horovodrun", "--check-build")
    for part in ("PyTorch", "NCCL", "MPI", "Gloo"):
        assert f"[X] {part}" in shown


def test_kernels_are_for_the_documented_architectures(cluster, tmp_path):
    """torch's from its own build flags; Horovod's with NVIDIA's cuobjdump."""
    shown = inside(cluster, "python", "-c", "import torch; print(torch._C._cuda_getArchFlags())")
    assert set(shown.split()) >= ARCHITECTURES[FLAVOR]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--target", tmp_path]
    subprocess.run([*pip, "nvidia-cuda-cuobjdump==13.2.86"], check=True)
    (library,) = inside(
        cluster, "find", "/opt/hpctrain/lib", "-path", "*/horovod/torch/*", "-name", "*.so"
    ).split()
    inside(cluster, "cp", library, "/home/alice/kernels.so")
    (cuobjdump,) = tmp_path.glob("**/bin/cuobjdump")
    copy = cluster.host_path("/home/alice/kernels.so")
    kernels, ptx = (
        set(
            re.findall(
                r"sm_\d+",
                run_command([cuobjdump, what, copy], check=True).stdout,
            )
        )
        for what in ("--list-elf", "--list-ptx")
    )
    assert kernels == ARCHITECTURES[FLAVOR] - NEWER_THAN_NVCC[FLAVOR]
    assert ptx == {max(kernels, key=lambda name: int(name[3:]))}


def test_crafted_checkpoints_with_its_torch(cluster):
    target = cluster.host_path("/home/alice/pytest")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", target, "pytest"], check=True
    )
    test = f"cd {HOME} && PYTHONPATH=/home/alice/pytest python -m pytest -p no:cacheprovider"
    test += " tests/checkpoints/test_corruption.py -k crafted"
    assert " 1 passed" in inside(cluster, "bash", "-c", test)


@pytest.mark.parametrize(
    "command",
    [
        ["launch/check.sh"],
        ["launch/apptainer_ddp.sh", "train_ddp", "--epochs", "3"],
        ["launch/apptainer_torchrun.sh", "train_ddp", "--epochs", "3"],
        ["launch/apptainer_mpi.sh", "train_horovod", "--epochs", "3"],
        ["launch/apptainer_horovod.sh", "train_horovod", "--epochs", "3"],
        ["launch/apptainer_ddp.sh", "train_lightning", "--epochs", "3"],
    ],
    ids=lambda command: "-".join(Path(word).stem for word in command[:2]),
)
def test_four_ranks_on_two_nodes(cluster, command):
    number = cluster.submit(*command, cwd=HOME, env={"HPCTRAIN_FLAVOR": FLAVOR})
    ended = cluster.wait(number, timeout=600)
    output = cluster.host_path(f"{HOME}/slurm-{number}.out").read_text(errors="replace")
    print(output)
    assert ended.state == "COMPLETED", output
    if command == ["launch/check.sh"]:
        assert "check passed: 4 ranks" in output
    else:
        assert float(re.findall(r"test_accuracy (0\.\d+)", output)[-1]) > 0.9, output
