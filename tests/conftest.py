"""Shared fixtures: the real data, the image, and a test cluster with the project in a user's home folder."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import BUILD, REPOSITORY, Cluster, bare_binds

SIF = REPOSITORY / "hpctrain-cpu.sif"
DATA = Path(os.environ.get("HPCTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
STANDINS = REPOSITORY / "tests/standins"
IMAGE_TAR = REPOSITORY / "build/hpctrain-cpu.tar"
# the Python environment of the image on a node without a container: see the fixture `site`
BARE_PYTHON = "/opt/hpctrain/bin/python"

# Before a test imports torch. Threads that wait for a core that another test uses spin, and a run takes three times as long.
# The launch scripts set the other two as well.
os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "536870912"}


# What a checkpoint says of its run.
POSITION = {"epoch": 1, "step": 0, "steps": 4, "best": [1, [0.5], 0, 1, 1, [1, 0]], "losses": [0.0], "unlogged": 0, "skipped": 0}
POSITION |= {"lines": 0, "seconds": 1.5, "options": {}}


def write_digits(folder: Path, train: int = 320, test: int = 80) -> Path:
    """Write some of the bundled digits in the format of MNIST, for runs that are not about the accuracy."""
    from hpctrain.vision.data import load_digits

    return write_images(folder, load_digits(), train, test)


def write_images(folder: Path, both: tuple, train: int, test: int) -> Path:
    """Write the first images of a training set and of a test set in the format of MNIST."""
    folder.mkdir()
    for part, images, n in zip(("train", "t10k"), both, (train, test), strict=True):
        for name, values in (("images-idx3", images.pixels[:n]), ("labels-idx1", images.labels[:n].to(images.pixels.dtype))):
            header = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(header + values.numpy().tobytes())
    return folder


def write_fewer(source: Path, target: Path) -> None:
    """Write a part of the bundled digits, or one of four examples of a file of samples."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".gz":
        lines = gzip.decompress(source.read_bytes()).splitlines(keepends=True)
        target.write_bytes(gzip.compress(b"".join(lines[:640])))  # 16 steps an epoch: --profile needs 15
    elif source.suffix == ".json":
        content = json.loads(source.read_text())
        few = content | {"data": content["data"][::4]} if isinstance(content, dict) else content[::4]
        target.write_text(json.dumps(few, ensure_ascii=False))
    else:
        end = "\n\n" if source.suffix == ".tsv" else "\n"
        head, *examples = source.read_text().strip().split(end)
        target.write_text(end.join([head, *examples[::4]]) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skip", action="store_true", help="treat a skipped test as a failure, as .ci/run does")
    parser.addoption("--write-table", action="store_true", help="let test_matrix.py write its results into README.md")


# The files that take longest, first: otherwise the last of them would run alone. Of the fast tests, launch_library takes longest.
LONG_FILES = [
    "launch",
    "image",
    "matrix",
    "readme",
    "nlp_cluster",
    "requeue",
    "publish",
    "gpu_benchmark",
    "launch_library",
    "train",
    "watchdog",
    "notebooks",
    "security",
    "resume",
    "nlp_models",
    "check",
    "wandb",
    "install",
    "sweep",
    "contributing",
    "own_script",
    "sanity",
    "world",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the fast tests first; where several files run at a time, the files that take minutes."""

    def order(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.stem.removeprefix("test_")
        place = LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)
        return place if hasattr(config, "workerinput") else 0, item.get_closest_marker("slow") is not None

    items.sort(key=order)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.config.getoption("--no-skip"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skip forbids: {report.longrepr[2]}"


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
    """A cluster of four nodes. alice has the project in ~/hpctrain, with the image in it, and owns /project/alice.

    The nodes also have BARE_PYTHON, which `module load pytorch` puts on PATH, the archive of the image in /project for
    podman-hpc, stand-ins for software that is not available in /opt/standins, and the real data, if any, in /project/data.
    ~/hpctrain/digits is a small data set.
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


@pytest.fixture(scope="session")
def few_examples(site: Cluster) -> dict[str, str]:
    """The variable with which the image has a part of its digits and samples, for jobs that are not about the scores."""
    packages = "opt/hpctrain/lib/python3.11/site-packages"
    digits, samples = "sklearn/datasets/data/digits.csv.gz", "hpctrain/nlp/samples"
    for pattern in (digits, *(f"{samples}/{task}/*" for task in ("classify", "generate", "instruct", "ner", "pair", "qa"))):
        for source in (BUILD / "bare" / packages).glob(pattern):
            write_fewer(source, site.host_path("/project/few") / source.relative_to(BUILD / "bare" / packages))
    return {"APPTAINER_BIND": ",".join(f"/project/few/{path}:/{packages}/{path}" for path in (digits, samples))}


@pytest.fixture(scope="session")
def podman_image(site: Cluster) -> dict[str, str]:
    """Load the image into podman-hpc as hpctrain:cpu for alice; the value is the variables that select it in jobs."""
    if not IMAGE_TAR.exists():
        pytest.skip(f"there is no {IMAGE_TAR.name} for podman-hpc; run make image")
    return slurm_cluster.load_for_podman_hpc(site, IMAGE_TAR)
