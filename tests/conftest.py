"""What the tests share: the real data, the image, and a small supercomputer with the project in a user's home."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import REPOSITORY, Cluster

SIF = REPOSITORY / "hpctrain-cpu.sif"
DATA = Path(os.environ.get("HPCTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
# This Python environment as the nodes borrow it, to run without a container; for lack of a Python 3.11 of their own.
BARE_PYTHON = "env PYTHONPATH=/opt/src /opt/venv/bin/python"
BARE_BINDS = {
    "/usr/bin/python3.11": "/usr/bin/python3.11",
    "/usr/lib/python3.11": "/usr/lib/python3.11",
    REPOSITORY / ".venv": "/opt/venv",
    REPOSITORY / "src": "/opt/src",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skip", action="store_true", help="a skipped test is a failure, as in .ci/run")


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
def cluster(sif: Path) -> Iterator[Cluster]:
    """Two nodes; alice has the project in ~/hpctrain with the image in it, and MNIST (if it is there) lies in /project.

    The nodes also have BARE_PYTHON, as a site's module would bring it.
    """
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    binds = {sif: f"/project/{sif.name}"}
    if (DATA / "mnist").is_dir():
        binds[DATA / "mnist"] = "/project/mnist"
    if all(Path(source).exists() for source in BARE_BINDS):
        binds |= BARE_BINDS
    with Cluster(nodes=2, binds=binds) as cluster:
        cluster.install("alice")
        yield cluster
