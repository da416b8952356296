"""Fixtures of the tests of launch/: stand-ins for a cluster's programs, and jobs that run at one time."""

import functools
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.launch.helpers import BARE, Stranger, a_stranger, put

# jobs of one test function, beside those of the other test process: the cores import torch most of the time
IN_FLIGHT = 2


@pytest.fixture
def programs(tmp_path):
    """Programs of a cluster of two nodes that only say something; and the environment to find them."""
    put(
        tmp_path,
        apptainer="echo apptainer version 0",
        mpirun="echo 'mpirun (Open MPI) 5.0.7'",
        scontrol='[ -z "$3" ] || echo n1',
    )
    (tmp_path / "image").mkdir()
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    (tmp_path / "empty").write_text("")
    paths = {"HPCTRAIN_IMAGE": f"{tmp_path}/image", "HPCTRAIN_ROOT": str(REPOSITORY)}
    return BARE | paths | {"PATH": f"{tmp_path}:{BARE['PATH']}"}


@pytest.fixture
def project(tmp_path):
    """A copy of the project that may be changed, with a script that needs no torch."""
    copy = tmp_path / "hpctrain"
    for name in ("launch", "src"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TOY"]
    (copy / "mine.py").write_text(
        "import os, sys\n"  # in one write, because the ranks have one output
        f"sys.stdout.write(' '.join([str(os.environ.get(name)) for name in {names}]) + '\\n')\n"
    )
    return copy


@pytest.fixture
def below_var():
    """A folder that is bound by its own name, because images have a /var."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with a_stranger() as user:
        yield user


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


@pytest.fixture(scope="module")
def in_background(sif):
    """Starts a function that mostly waits in the background, once; returns its future.

    It uses a cluster of its own.
    """
    with ThreadPoolExecutor() as pool:
        yield functools.cache(lambda function: pool.submit(function, sif))


@pytest.fixture(scope="module")
def start_in_background(request):
    """Starts a function before the first test if this session runs its test: it has then ended earlier."""

    def start(test, function):
        if any(getattr(item, "function", None) is test for item in request.session.items):
            request.getfixturevalue("in_background")(function)

    return start
