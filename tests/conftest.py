"""Shared fixtures: the real data, the image, and a test cluster with the project in a user's home folder."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import BUILD, REPOSITORY, Cluster, bare_binds

from tests.helpers import DATA, IMAGE_TAR, MEMORY_AND_THREADS, SIF, STANDINS, write_digits, write_fewer

# Before a test imports torch.
os.environ |= MEMORY_AND_THREADS
# With it each worker would rewrite every assertion again, and each command compile the project.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skip", action="store_true", help="treat a skipped test as a failure, as .ci/run does"
    )
    parser.addoption(
        "--write-table", action="store_true", help="let tests write their tables of docs/reference"
    )


FAILED = pytest.StashKey[bool]()
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # also what -m leaves out
# The files that take longest, first: otherwise the last of them would run alone. Of the fast tests,
# launch/test_options and nlp/training/test_finetune do.
LONG_FILES = [
    "launch/test_launch.py",
    "containers/test_image.py",
    "launch/test_matrix.py",
    "docs/test_readme.py",
    "nlp/test_cluster.py",
    "launch/test_requeue.py",
    "launch/test_failures.py",
    "containers/test_publish.py",
    "benchmarks/test_gpu.py",
    "launch/test_other_users.py",
    "launch/test_options.py",
    "nlp/training/test_finetune.py",
    "vision/test_train.py",
    "distributed/test_watchdog.py",
    "docs/test_notebooks.py",
    "distributed/test_strangers.py",
    "run/test_resume.py",
    "nlp/models/test_hub.py",
    "commands/check/test_check.py",
    "run/test_wandb.py",
    "containers/test_build_errors.py",
    "commands/sweep/test_sweep.py",
    "docs/test_contributing.py",
    "test_own_script.py",
    "containers/test_image_files.py",
    "distributed/test_rendezvous.py",
]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the fast tests first; where several files run at a time, the files that take minutes.

    A test that needs the image or the cluster is slow.
    """

    def order(item: pytest.Item) -> tuple[int, bool, bool]:
        slow = item.get_closest_marker("slow") is not None
        if not hasattr(config, "workerinput"):
            return 0, slow, False
        name = str(item.path.relative_to(REPOSITORY / "tests"))
        place = LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)
        # The last tests of a file are those that wait for jobs that its first test has started.
        return place, slow, "in_background" in getattr(item, "fixturenames", ())

    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "sif" in fixtures:
            item.add_marker(pytest.mark.slow)
        if fixtures & {"site", "in_background"}:  # those with a cluster
            item.add_marker(pytest.mark.flaky(reruns=1))  # and no other test
    config.stash[COLLECTED] = [*items]
    items.sort(key=order)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.config.getoption("--no-skip"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skip forbids: {report.longrepr[2]}"
    item.stash[FAILED] = report.failed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give the second try of a test a cluster of its own, where no job of the first one runs."""
    if item.stash.get(FAILED, False) and item.get_closest_marker("flaky"):
        item.session._setupstate.teardown_exact(None)  # as pytest does after the last test


@pytest.fixture(scope="module", autouse=True)
def without_curves(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw curves.png, which takes half the time of a small run, where a test looks at it."""
    record = sys.modules.get("hpctrain.run.record")
    with pytest.MonkeyPatch.context() as patch:
        if record and "curves.png" not in Path(request.module.__file__).read_text():
            patch.setattr(record, "try_to_plot", lambda folder: None)
        yield


@pytest.fixture(scope="session")
def mnist() -> Path:
    """The folder of the real MNIST data."""
    if not (DATA / "mnist").is_dir():
        pytest.skip(f"there is no MNIST in {DATA}; set HPCTRAIN_TEST_DATA to a folder with mnist/")
    return DATA / "mnist"


@pytest.fixture(scope="session")
def sif() -> Path:
    """The SIF that make sif builds."""
    if not SIF.exists():
        pytest.skip(f"there is no {SIF.name}; run make sif")
    return SIF


@pytest.fixture(scope="session")
def site(sif: Path) -> Iterator[Cluster]:
    """A cluster of four nodes. alice has the project in ~/hpctrain, with the image in it, and owns
    /project/alice.

    The nodes also have BARE_PYTHON, which `module load pytorch` puts on PATH, the archive of the image in
    /project for podman-hpc, stand-ins for software that is not available in /opt/standins, and the real data,
    if any, in /project/data. ~/hpctrain/digits is a small data set.
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
        write_digits(cluster.host_path("/home/alice/hpctrain/digits"))
        yield cluster


@pytest.fixture(scope="session")
def cluster(site: Cluster) -> Cluster:
    """The fixture `site` under the name that most tests use."""
    return site


@pytest.fixture(autouse=True)
def settled_nodes(request: pytest.FixtureRequest) -> None:
    """A test on the shared cluster begins when no job of an earlier one is ending.

    Slurm would place its jobs on other nodes. Jobs that tests of a file have submitted ahead may run.
    """
    if "site" in request.fixturenames:
        request.getfixturevalue("site").wait_until_settled()


@pytest.fixture(scope="session")
def few_examples(site: Cluster) -> dict[str, str]:
    """The variable that gives the image a part of its digits and samples, where scores do not matter."""
    packages = "opt/hpctrain/lib/python3.11/site-packages"
    digits, samples = "sklearn/datasets/data/digits.csv.gz", "hpctrain/nlp/samples"
    for pattern in (
        digits,
        *(f"{samples}/{task}/*" for task in ("classify", "generate", "instruct", "ner", "pair", "qa")),
    ):
        for source in (BUILD / "bare" / packages).glob(pattern):
            write_fewer(
                source, site.host_path("/project/few") / source.relative_to(BUILD / "bare" / packages)
            )
    return {
        "APPTAINER_BIND": ",".join(f"/project/few/{path}:/{packages}/{path}" for path in (digits, samples))
    }


@pytest.fixture(scope="session")
def podman_image(site: Cluster) -> dict[str, str]:
    """The variables that select the image in jobs: podman-hpc has loaded it for alice as hpctrain:cpu."""
    if not IMAGE_TAR.exists():
        pytest.skip(f"there is no {IMAGE_TAR.name} for podman-hpc; run make image")
    return slurm_cluster.load_for_podman_hpc(site, IMAGE_TAR)


@pytest.fixture(scope="session")
def pyxis(site: Cluster, sif: Path) -> dict[str, str]:
    """The variables by which jobs run in the image with the stand-in for Pyxis."""
    slurm_cluster.unpack_for_pyxis(site, sif)
    return {
        "PATH": "/opt/standins/pyxis:/usr/local/bin:/usr/bin:/bin",
        "UNPACKED_IMAGES": "/project/unpacked",
        "HPCTRAIN_RUNTIME": "pyxis",
        "HPCTRAIN_IMAGE": f"/project/{sif.stem}.sqsh",
    }


@pytest.fixture
def check_table(request: pytest.FixtureRequest) -> Callable[[Path, str, list[str]], None]:
    """Compare the table after a comment of a page with what a test saw; with --write-table, write it."""

    def check(page: Path, begin: str, lines: list[str]) -> None:
        table, end = "\n".join(lines) + "\n", "<!-- end -->\n"
        before, _, rest = page.read_text().partition(begin)
        shown, _, after = rest.partition(end)
        if request.config.getoption("--write-table"):
            page.write_text(before + begin + table + end + after)
        else:
            assert shown == table, "--write-table writes what was seen"

    return check


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Give a file, a link, or a folder to another user; returns it. The file `mine` stays as it is."""

    def give(path: Path) -> Path:
        for each in [path, *path.rglob("*")]:
            os.chown(each, 1234, 1234, follow_symlinks=False)
        return path

    (tmp_path / "mine").write_text("mine")
    yield give
    assert (tmp_path / "mine").read_text() == "mine"
