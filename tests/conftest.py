"""What the tests share: the real data, the image, and a small supercomputer with the project in a user's home."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
import torch
from slurm_cluster import REPOSITORY, Cluster, bare_binds

SIF = REPOSITORY / "hpctrain-cpu.sif"
DATA = Path(os.environ.get("HPCTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
STANDINS = REPOSITORY / "tests/standins"
IMAGE_TAR = REPOSITORY / "build/hpctrain-cpu.tar"
# the Python environment of the image, outside of it: see the fixture `site`
BARE_PYTHON = "/opt/hpctrain/bin/python"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skip", action="store_true", help="a skipped test is a failure, as in .ci/run")
    parser.addoption("--write-table", action="store_true", help="test_matrix.py writes what it saw pass into README.md")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast ones first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.config.getoption("--no-skip"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skip forbids: {report.longrepr[2]}"


@pytest.fixture(scope="session")
def mnist() -> Path:
    """The folder of the real MNIST."""
    if not (DATA / "mnist").is_dir():
        pytest.skip(f"no MNIST in {DATA}: HPCTRAIN_TEST_DATA names a folder that has it as mnist/")
    return DATA / "mnist"


@pytest.fixture(scope="session")
def sif() -> Path:
    """The image, as make sif makes it."""
    if not SIF.exists():
        pytest.skip(f"{SIF.name} is not built: make sif")
    return SIF


@pytest.fixture(scope="session")
def site(sif: Path) -> Iterator[Cluster]:
    """Four nodes; alice has the project in ~/hpctrain with the image in it. The real data, if there are any, are /project/data.

    The nodes also have BARE_PYTHON, which `module load pytorch` puts on PATH, the archive of the image in /project
    for podman-hpc, and stand-ins of what cannot be had, in /opt/standins. /project/alice is a folder of alice.
    """
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    binds = {sif: f"/project/{sif.name}", STANDINS: "/opt/standins", **bare_binds(sif)}
    if IMAGE_TAR.exists():
        binds[IMAGE_TAR] = f"/project/{IMAGE_TAR.name}"
    if DATA.is_dir():
        binds[DATA] = "/project/data"
    with Cluster(nodes=4, binds=binds) as cluster:
        cluster.install("alice")
        cluster.exec("login", "mkdir", "/project/alice", user="alice")
        yield cluster


@pytest.fixture(scope="session")
def cluster(site: Cluster) -> Cluster:
    """The same under the name that most tests use."""
    return site


@pytest.fixture(scope="session")
def podman_image(site: Cluster) -> dict[str, str]:
    """Loads the image into podman-hpc, for alice, as hpctrain:cpu; the variables that jobs need to find it there."""
    if not IMAGE_TAR.exists():
        pytest.skip(f"no {IMAGE_TAR.name} for podman-hpc: make image")
    env = {"SCRATCH": "/project/alice"}
    site.exec("login", "podman-hpc", "load", "--quiet", f"--input=/project/{IMAGE_TAR.name}", user="alice", env=env)
    site.exec("login", "podman-hpc", "migrate", "hpctrain:cpu", user="alice", env=env)
    # migrate returns 0 even when it fails
    assert list(site.host_path("/project/alice/storage/overlay/l").glob("*.squash"))
    return env


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A tiny model gains nothing from more threads, and loses much where others want the cores, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
