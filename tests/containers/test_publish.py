"""Pushing an image to a registry and pulling it, and an image on top of ours."""

import hashlib
import json
import re
import shutil
import subprocess

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import IMAGE_TAR, run_command

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
    pull = ["apptainer", "build", "--disable-cache", "--no-https"]
    pull += ["--mksquashfs-args", "-comp zstd -Xcompression-level 1"]
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
    assert f"error: {other}: " in site.host_path(f"{HOME}/slurm-{job}.out").read_text()


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
        pull = ["apptainer", "pull", "--force", "--disable-cache"]
        pull += ["--no-https", "/project/alice/oras.sif", name]
        site.exec("login", *pull, user="alice")
        sums = site.exec(
            "login", "sha256sum", "/project/hpctrain-cpu.sif", "/project/alice/oras.sif", user="alice"
        ).stdout
        assert len({line.split()[0] for line in sums.splitlines()}) == 1


# The options of a push, and what its error names.
REFUSED = {
    "no registry": ([], "--registry NAME"),
    "a tag": (["--registry", f"{NAME}:cpu"], f"--registry {NAME}:cpu "),
    "no path": (["--registry", "localhost:5000"], "--registry localhost:5000 "),
    "no image": (["--registry", NAME, "--flavor", "cu130"], "make image FLAVOR=cu130 MPI=openmpi"),
    "no such flavor": (["--registry", NAME, "--flavor", "cu999"], " cu999"),
    "nobody answers": (["--registry", "localhost:5999/hpctrain"], " localhost:5999 "),
    "no such host": (["--registry", "nowhere.example/hpctrain"], " nowhere.example "),
    "plain http from afar": (["--registry", "login:5000/hpctrain"], " http"),
    "not logged in": (["--registry", "localhost:5001/hpctrain"], "skopeo login localhost:5001"),
    "half an archive": (["--registry", NAME, "--mpi", "mpich"], " build/hpctrain-cpu-mpich.tar "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_push_that_fails_is_one_line(site, digest, name):
    arguments, message = REFUSED[name]
    if name == "half an archive":
        site.exec(
            "login",
            "sh",
            "-c",
            "head -c 9999999 build/hpctrain-cpu.tar >build/hpctrain-cpu-mpich.tar",
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
    pip = ["-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--require-hashes", "-r", requirements, "-d", wheels]
    subprocess.run([REPOSITORY / ".venv/bin/python", *pip], check=True)
    with requirements.open("a") as file:
        file.write("--no-index\n--find-links /mnt\n")
    return wheels


def buildah(*arguments):
    return run_command(["buildah", *arguments], check=True).stdout.strip()


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
    build = ["apptainer", "build", "--sandbox"]
    build += ["--bind", "/home/alice/wheels:/mnt", "/home/alice/on-top", "examples/on-top/on-top.def"]
    site.exec("login", *build, user="alice", cwd=HOME)
    done = site.exec("n1", "apptainer", "exec", "/home/alice/on-top", "python", "-c", UNCHANGED, user="alice")
    assert done.stdout == "added ['einops'] changed {} 0.8.1\n"
