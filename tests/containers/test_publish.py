"""Pushing an image to a registry and pulling it, an image on top of ours, and packages on top of it without an image."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.commands import add
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError
from tests.helpers import IMAGE_TAR

pytestmark = pytest.mark.slow

HOME = "/home/alice/hpctrain"
NAME = "localhost:5000/hpctrain"
VERSION = re.search(r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text(), re.M)[1]
REGISTRY = """version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: ":{port}"}}
{auth}"""


@pytest.fixture(scope="module")
def registries(site):
    """Debian's docker-registry on the login node: port 5000 is open, 5001 has a password nobody knows."""
    auth = "auth: {htpasswd: {realm: us, path: /project/registry.passwords}}\n"
    site.host_path("/project/registry.passwords").write_text("")
    started = []
    try:
        for port, who in ((5000, ""), (5001, auth)):
            file = f"/project/registry-{port}.yml"
            site.host_path(file).write_text(
                REGISTRY.format(folder=f"/project/registry-{port}", port=port, auth=who)
            )
            started.append(site.start("login", "docker-registry", "serve", file))
        both = "until : <>/dev/tcp/localhost/5000 && : <>/dev/tcp/localhost/5001; do sleep 0.1; done"
        site.exec("login", "bash", "-c", both, timeout=300)
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait()


def push(site, *arguments, **options):
    """containers/push.sh as alice, in her hpctrain folder."""
    return site.exec("login", "containers/push.sh", *arguments, user="alice", cwd=HOME, **options)


@pytest.fixture(scope="module")
def digest(site, registries):
    """Push the image; the value is its digest."""
    if not IMAGE_TAR.exists():
        pytest.skip(f"no {IMAGE_TAR.name} to push: make image")
    site.exec(
        "login",
        "sh",
        "-c",
        f"mkdir -p build && ln -sf /project/{IMAGE_TAR.name} build/",
        user="alice",
        cwd=HOME,
    )
    pushed = push(site, "--registry", NAME).stdout.splitlines()[-1]
    name, digest = pushed.split("@")
    assert name == NAME and re.fullmatch("sha256:[0-9a-f]{64}", digest)
    return digest


def skopeo(site, tag):
    done = site.exec(
        "login", "skopeo", "inspect", "--tls-verify=false", f"docker://{NAME}:{tag}", user="alice"
    )
    return json.loads(done.stdout)


def test_both_names_are_what_was_built(site, digest):
    assert digest == IMAGE_TAR.with_suffix(".digest").read_text().strip()
    for tag in ("cpu", f"cpu-{VERSION}"):
        found = skopeo(site, tag)
        assert found["Digest"] == digest
        assert found["Labels"]["org.opencontainers.image.version"] == VERSION


def test_pushed_again_it_is_the_same(site, digest):
    assert push(site, "--registry", NAME).stdout.splitlines()[-1] == f"{NAME}@{digest}"


@pytest.fixture(scope="module")
def weights():
    """The hash of the weights by launch script: all pulled images must train to the same weights."""
    return {}


def train(site, script, image, env, weights):
    job = site.submit(
        script, "train_ddp", "--data=digits", "--epochs", "1", cwd=HOME, env={"HPCTRAIN_IMAGE": image} | env
    )
    ended = site.wait(job)
    output = site.host_path(f"{HOME}/slurm-{job}.out").read_text(errors="replace")
    assert ended.state == "COMPLETED", output
    run = site.host_path(f"{HOME}/runs/train_ddp/{job}")
    weights[script] = json.loads((run / "result.json").read_text())["weights_sha256"]
    assert len(set(weights.values())) == 1
    return json.loads((run / "config.json").read_text())


def test_apptainer_pulls_what_was_pushed_and_trains(site, digest, weights):
    """`apptainer pull docker://` does the same without zstd, and takes a minute longer."""
    pull = [
        "apptainer",
        "build",
        "--disable-cache",
        "--no-https",
        "--mksquashfs-args",
        "-comp zstd -Xcompression-level 1",
    ]
    site.exec("login", *pull, "/project/alice/pulled.sif", f"docker://{NAME}@{digest}", user="alice")
    labels = site.exec(
        "login", "apptainer", "inspect", "--json", "/project/alice/pulled.sif", user="alice"
    ).stdout
    assert f"{NAME}@{digest}" in labels
    config = train(site, "launch/apptainer_ddp.sh", "/project/alice/pulled.sif", {}, weights)
    assert config["world"]["size"] == 4


def test_podman_hpc_pulls_what_was_pushed_and_trains(site, digest, podman_image, weights):
    """`podman-hpc pull` is `podman pull` and `podman-hpc migrate`."""
    image = f"{NAME}@{digest}"
    site.exec(
        "login", "podman-hpc", "pull", "--quiet", "--tls-verify=false", image, user="alice", env=podman_image
    )
    config = train(site, "launch/podman_hpc_ddp.sh", image, podman_image, weights)
    assert config["image_digest"] == digest
    other = f"{NAME}@sha256:{64 * '0'}"
    job = site.submit(
        "launch/podman_hpc_ddp.sh", "check", cwd=HOME, env={"HPCTRAIN_IMAGE": other} | podman_image
    )
    assert site.wait(job).state == "FAILED"
    assert "podman-hpc has no such image" in site.host_path(f"{HOME}/slurm-{job}.out").read_text()


def test_the_sif_itself_in_the_registry(site, registries):
    """As in the release workflow; a pull by name or by digest gives the same file."""
    there = f"oras://{NAME}:cpu-{VERSION}-sif"
    site.exec(
        "login",
        "apptainer",
        "push",
        "--allow-unsigned",
        "--no-https",
        "/project/hpctrain-cpu.sif",
        there,
        user="alice",
    )
    raw = ["skopeo", "inspect", "--raw", "--tls-verify=false", there.replace("oras", "docker")]
    digest = hashlib.sha256(site.exec("login", *raw, user="alice").stdout.encode()).hexdigest()
    for name in (there, f"oras://{NAME}@sha256:{digest}"):
        pull = [
            "apptainer",
            "pull",
            "--force",
            "--disable-cache",
            "--no-https",
            "/project/alice/oras.sif",
            name,
        ]
        site.exec("login", *pull, user="alice")
        sums = site.exec(
            "login", "sha256sum", "/project/hpctrain-cpu.sif", "/project/alice/oras.sif", user="alice"
        ).stdout
        assert len({line.split()[0] for line in sums.splitlines()}) == 1


REFUSED = {
    "no registry": ([], "give --registry NAME"),
    "a tag": (["--registry", f"{NAME}:cpu"], "is not HOST[:PORT]/PATH"),
    "no path": (["--registry", "localhost:5000"], "is not HOST[:PORT]/PATH"),
    "no image": (
        ["--registry", NAME, "--flavor", "cu999"],
        "there is no build/hpctrain-cu999.tar; build it with",
    ),
    "nobody answers": (
        ["--registry", "localhost:5999/hpctrain"],
        "localhost:5999 does not answer: connection refused",
    ),
    "no such host": (
        ["--registry", "nowhere.example/hpctrain"],
        "the registry nowhere.example does not answer",
    ),
    "plain http from afar": (
        ["--registry", "login:5000/hpctrain"],
        "login:5000 uses plain http, which is for localhost only",
    ),
    "not logged in": (["--registry", "localhost:5001/hpctrain"], "localhost:5001 denies a push to"),
    "half an archive": (["--registry", NAME, "--flavor", "half"], "cannot push build/hpctrain-half.tar to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_push_that_fails_is_one_line(site, digest, name):
    arguments, message = REFUSED[name]
    if name == "half an archive":
        site.exec(
            "login",
            "sh",
            "-c",
            "head -c 9999999 build/hpctrain-cpu.tar >build/hpctrain-half.tar",
            user="alice",
            cwd=HOME,
        )
    done = push(site, *arguments, check=False, timeout=300)
    assert done.returncode != 0 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "@sha256:" not in done.stdout


# ---- on top of the image ----

UNCHANGED = """
import importlib.metadata, json
recorded = json.load(open("/opt/hpctrain/versions.json"))
found = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions()}
changed = {
    name: (version, recorded[name])
    for name, version in found.items()
    if recorded.get(name, version) != version
}
import einops, torch
print("added", sorted(found.keys() - recorded), "changed", changed, einops.__version__)
"""


@pytest.fixture(scope="module")
def on_top(site):
    """The folder of wheels to mount at /mnt, where pip looks for those of alice's examples/on-top."""
    wheels = site.host_path("/home/alice/wheels")
    requirements = site.host_path(f"{HOME}/examples/on-top/requirements.txt")
    pip = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "-r",
        requirements,
        "-d",
        wheels,
    ]
    subprocess.run([REPOSITORY / ".venv/bin/python", *pip], check=True)
    with requirements.open("a") as file:
        file.write("--no-index\n--find-links /mnt\n")
    return wheels


def buildah(*arguments):
    return subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def test_a_dockerfile_on_top(site, on_top):
    if not shutil.which("buildah"):
        pytest.skip("buildah is not there: apt-get install buildah")
    if subprocess.run(["buildah", "images", "localhost/hpctrain:cpu"], capture_output=True).returncode != 0:
        buildah("pull", "--quiet", f"oci-archive:{IMAGE_TAR}")
    build = ["build", "--quiet", "--isolation=chroot", f"--volume={on_top}:/mnt:ro"]
    image = buildah(*build, site.host_path(f"{HOME}/examples/on-top"))
    try:
        container = buildah("from", image)
        said = buildah("run", "--isolation=chroot", container, "python", "-c", UNCHANGED)
    finally:
        buildah("rmi", "--force", image)
    assert said == "added ['einops'] changed {} 0.8.1"


def test_a_definition_on_top_by_an_ordinary_user(site, on_top):
    """As a sandbox, which skips the compression; its content is the same."""
    build = [
        "apptainer",
        "build",
        "--sandbox",
        "--bind",
        "/home/alice/wheels:/mnt",
        "/home/alice/on-top",
        "examples/on-top/on-top.def",
    ]
    site.exec("login", *build, user="alice", cwd=HOME)
    done = site.exec("n1", "apptainer", "exec", "/home/alice/on-top", "python", "-c", UNCHANGED, user="alice")
    assert done.stdout == "added ['einops'] changed {} 0.8.1\n"


def wheel(folder: Path, name: str, version: str, modules: dict[str, str], requires: str = "") -> str:
    """Write a wheel with these modules; return its file name."""
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = modules | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    files[f"{info}/RECORD"] = record
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path.name


@pytest.fixture(scope="module")
def added(site):
    """A function that runs `hpctrain add` as alice, after it has added a package that contains another numpy."""
    folder = site.host_path("/project/alice")
    env = {"HPCTRAIN_PACKAGES": "/project/alice/packages"}

    def add(*arguments, check=True, env=env):
        command = [
            "apptainer",
            "exec",
            "--bind",
            "/project",
            "/project/hpctrain-cpu.sif",
            "hpctrain",
            "add",
            *arguments,
        ]
        return site.exec("login", *command, user="alice", cwd="/project/alice", env=env, check=check)

    modules = {"extra/__init__.py": "name = 'extra 1'\n", "numpy.py": "raise SystemExit('the wrong numpy')\n"}
    add("--no-index", f"./{wheel(folder, 'extra', '1.0', modules)}")
    return add


@pytest.mark.parametrize("runtime", ["apptainer", "podman-hpc", "shifter"])
def test_packages_on_top_are_found_on_every_rank_and_hide_nothing(site, added, podman_image, runtime):
    site.host_path(f"{HOME}/uses.py").write_text(
        "import os, extra, numpy, torch\nprint('rank', os.environ['RANK'], extra.name, extra.__file__, numpy.__file__)\n"
    )
    env = {"HPCTRAIN_RUNTIME": runtime, "HPCTRAIN_PACKAGES": "/project/alice/packages"}
    if runtime == "podman-hpc":
        env |= podman_image
    if runtime == "shifter":
        env |= {
            "PATH": "/opt/standins:/usr/local/bin:/usr/bin:/bin",
            "SHIFTER_SIF": "/project/hpctrain-cpu.sif",
        }
        env["APPTAINER_BIND"] = "/project"  # the real shifter mounts all file systems of the site
    job = site.submit("launch/apptainer_ddp.sh", "uses.py", cwd=HOME, env=env)
    ended = site.wait(job)
    output = site.host_path(f"{HOME}/slurm-{job}.out").read_text(errors="replace")
    found = re.findall(
        r"rank (\d) extra 1 /project/alice/packages/(python3.11-torch[^/]*)/\S* /opt/hpctrain/\S*/numpy/",
        output,
    )
    assert ended.state == "COMPLETED" and sorted(rank for rank, _ in found) == ["0", "1", "2", "3"], output


def test_packages_that_do_not_fit_the_image_are_refused(site, added):
    folder = site.host_path("/project/alice")
    before = sorted(folder.glob("packages/**/*"))
    other = wheel(folder, "needy", "1.0", {"needy.py": ""}, "torch<2")
    newer = wheel(folder, "extra", "2.0", {"extra/__init__.py": ""})
    for arguments, message in (
        (["--no-index", f"./{other}"], "the folder and the image are unchanged"),
        (["--no-index", f"./{newer}"], "the folder and the image are unchanged"),
        ([], "add takes the arguments of uv pip install"),
    ):
        done = added(*arguments, check=False)
        said = [line for line in done.stderr.splitlines() if "hpctrain: error:" in line]
        assert done.returncode != 0 and len(said) == 1 and message in said[0], done.stderr
        assert "Traceback" not in done.stderr
    for env, message in (
        ({}, "add needs a folder: export HPCTRAIN_PACKAGES=FOLDER"),
        ({"HPCTRAIN_PACKAGES": "/usr/packages"}, "set HPCTRAIN_PACKAGES to a writable folder"),
    ):
        done = added("einops", check=False, env=env)
        assert done.returncode != 0 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert sorted(folder.glob("packages/**/*")) == before


def test_packages_in_a_folder_that_no_container_can_mount_are_refused(monkeypatch, tmp_path):
    for name in ("a:b", "a,b"):
        monkeypatch.setenv("HPCTRAIN_PACKAGES", str(tmp_path / name))
        with pytest.raises(UsageError, match=f"/{name}: give a folder whose path holds no comma or colon"):
            add.main(World(0, 1, 0, 1, 0, 1, "single"), ["einops"])


def test_a_package_that_cannot_be_imported_or_breaks_the_image_is_refused(site, added):
    """torchaudio's wheel of PyPI needs torch with CUDA."""
    folder = site.host_path("/project/alice")
    pip = [
        REPOSITORY / ".venv/bin/python",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        folder / "wheels",
    ]
    subprocess.run([*pip, "torchaudio==2.11.0"], check=True)
    ends = wheel(folder, "ends", "1.0", {"ends.py": "import os\nos._exit(3)\n"})
    breaks = wheel(folder, "breaks", "1.0", {"breaks.py": "import sys\nsys.modules['lightning'] = None\n"})
    before = sorted(folder.glob("packages/**/*"))
    for arguments, message in (
        (
            ["--no-index", "--find-links", "wheels", "torchaudio"],
            "torchaudio: import torchaudio: OSError: Could not load this library",
        ),
        (
            ["--no-index", f"./{ends}"],
            "importing ends ended Python with status 3; the folder and the image are unchanged",
        ),
        (
            ["--no-index", f"./{breaks}"],
            "lightning: import lightning: ModuleNotFoundError: import of lightning halted",
        ),
    ):
        done = added(*arguments, check=False)
        said = [line for line in done.stderr.splitlines() if "hpctrain: error:" in line]
        assert done.returncode == 1 and len(said) == 1 and message in said[0], done.stderr
    assert sorted(folder.glob("packages/**/*")) == before


# What users of such images add, in versions that need a recent release of what both have.
ADDED = """\
accelerate>=1.14 albumentations boto3>=1.43 dask datasets>=5 diffusers>=0.42 einops evaluate>=0.4 fastapi gradio>=6 h5py
jupyterlab>=4 lightgbm mlflow>=3.10 monai numba>=0.60 nvidia-ml-py opencv-python-headless optuna>=4 pandas>=2 peft>=0.20 plotly
polars pyarrow>=20 ray>=2.50 s3fs>=2026 scikit-image sentence-transformers>=5 sentencepiece spacy>=3.8 streamlit>=1.50 timm>=1
torch-geometric>=2.7 torchaudio trl>=1 wandb>=0.30 webdataset xarray zarr>=3
"""


def test_the_packages_that_people_add_fit_the_versions_of_the_image(tmp_path):
    """All of them at once, as they were in November 2026."""
    wanted, pins = tmp_path / "wanted.txt", tmp_path / "pins.txt"
    wanted.write_text("\n".join(ADDED.split()))
    lock = (REPOSITORY / "containers/locks/cpu.lock").read_text()
    # The CPU build of torch is not on PyPI, and its version fits where 2.13.0 does.
    pins.write_text("\n".join(re.findall(r"^[a-z0-9-]+==[^ +]+", lock, re.M)))
    uv = [
        REPOSITORY / ".venv/bin/uv",
        "pip",
        "compile",
        "--no-config",
        "--no-build",
        "--python-version",
        "3.11",
    ]
    uv += [
        "--python-platform",
        "x86_64-manylinux_2_28",
        "--exclude-newer",
        "2026-11-20",
        "--constraint",
        pins,
        wanted,
    ]
    done = subprocess.run(uv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"HPCTRAIN_PACKAGES": "/project/nothing"},
            "HPCTRAIN_PACKAGES=/project/nothing is not a folder on n1",
        ),
        (
            {"HPCTRAIN_PACKAGES": "/project", "HPCTRAIN_RUNTIME": "none"},
            "HPCTRAIN_PACKAGES is for images: unset it",
        ),
        (
            {"HPCTRAIN_PACKAGES": "/project/other"},
            "/project/other holds python3.11-torch1, not python3.11-torch2",
        ),
        (
            {"HPCTRAIN_PACKAGES": "/project/broken"},
            "/python3.11-torch2.13.0+cpu: broken: import broken: RuntimeError: no GPU: remove",
        ),
    ],
    ids=["no folder", "no image", "another image's", "a package that fails"],
)
def test_an_invalid_folder_of_packages_ends_the_job_with_one_line(site, env, message):
    site.host_path("/project/other/python3.11-torch1").mkdir(parents=True, exist_ok=True)
    packages = site.host_path("/project/broken/python3.11-torch2.13.0+cpu/lib/python3.11/site-packages")
    packages.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(
        packages / wheel(packages, "broken", "1.0", {"broken.py": "raise RuntimeError('no GPU')\n"})
    ) as archive:
        archive.extractall(packages)
    job = site.submit(
        "--nodes=1", "--ntasks-per-node=1", "launch/apptainer_ddp.sh", "check", cwd=HOME, env=env
    )
    ended = site.wait(job)
    output = site.host_path(f"{HOME}/slurm-{job}.out").read_text(errors="replace")
    assert ended.state == "FAILED" and sum(message in line for line in output.splitlines()) == 1, output
