"""The install step for Debian's packages, and the key under which a compiled Horovod is kept."""

import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

pytestmark = pytest.mark.slow

INSTALL = "/src/containers/install/debian.sh"
# the mounts end with the command
ENTER = 'mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"'


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[Path]:
    """The root of the plain Debian that an image starts from, with the recipe in /src."""
    subprocess.run(["make", "base"], cwd=REPOSITORY, check=True)
    unpack = "tar -xOf build/base-bookworm.tar layer.tar | tar -xC $0"
    subprocess.run(["sh", "-c", unpack, tmp_path], cwd=REPOSITORY, check=True)
    (tmp_path / "dev").mkdir()
    for folder in ("install", "locks"):
        shutil.copytree(REPOSITORY / "containers" / folder, tmp_path / "src/containers" / folder)
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest keeps the folders of three runs, 120 MB each


def enter(root: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, root, *command],
        env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def empty_archive() -> Iterator[tuple[str, list[str]]]:
    """A proxy that answers every request with 404; gives its address and the list of requested addresses."""
    asked = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_a_snapshot_is_requested_by_its_time_and_the_build_ends_if_it_does_not_answer(debian, empty_archive):
    proxy, asked = empty_archive
    sources = (debian / "etc/apt/sources.list").read_text()
    done = enter(debian, INSTALL, "runtime", http_proxy=proxy, DEBIAN_SNAPSHOT="20261101T000000Z")
    archive = "http://snapshot.debian.org/archive"
    assert f"{archive}/debian/20261101T000000Z/dists/bookworm/InRelease" in asked
    assert f"{archive}/debian-security/20261101T000000Z/dists/bookworm-security/InRelease" in asked
    assert all("/20261101T000000Z/" in address for address in asked)
    message = (
        f"debian.sh: cannot get package lists from {archive}; check the network, or unset DEBIAN_SNAPSHOT"
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == message
    assert (debian / "etc/apt/sources.list").read_text() == sources
    assert not list((debian / "tmp").iterdir()) and not (debian / "usr/share/hpctrain").exists()


def test_the_build_ends_if_the_archive_cannot_be_reached(debian):
    """By default apt-get update succeeds here, and continues with the lists that it has: none."""
    done = enter(debian, INSTALL, "runtime", http_proxy="http://127.0.0.1:9")
    message = "debian.sh: cannot get package lists from the sources of the base image; check the network"
    assert done.returncode == 1 and done.stderr.endswith(f"\n{message}\n")


@pytest.mark.parametrize("name, value", [("MPI", "lam"), ("DEBIAN_SNAPSHOT", "yesterday")])
def test_an_invalid_setting_is_one_line(name, value):
    done = subprocess.run(
        [REPOSITORY / "containers/install/debian.sh", "runtime"],
        env={**os.environ, name: value}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and value in done.stderr


def test_versions_that_differ_from_the_record_are_printed(debian):
    """apt-get and python3.11 do nothing here, so the packages of the base are compared."""
    record = next((debian / "src/containers/locks").glob("openmpi-amd64.debian"))
    bash = next(line for line in record.read_text().splitlines() if line.startswith("bash "))
    record.write_text(record.read_text().replace(f"{bash}\n", "bash 1.0\n").replace("\ndash ", "\nno-dash "))
    for program in ("apt-get", "python3.11"):
        (debian / "usr/local/bin" / program).symlink_to("/bin/true")
    done = enter(debian, INSTALL, "runtime", PATH="/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    assert done.returncode == 0, done.stderr
    installed = dict(
        line.split("\t")[:2] for line in (debian / "usr/share/hpctrain/debian.tsv").read_text().splitlines()
    )
    said = done.stdout.splitlines()
    assert f"bash: recorded 1.0, installed {installed['bash']}" in said
    assert f"dash: recorded nothing, installed {installed['dash']}" in said
    others = [line for line in said if ": recorded " in line]
    assert said[-1] == f"debian: {len(others)} of {len(installed)} packages differ from the record"


def test_a_compiled_wheel_is_kept_under_a_key_of_its_inputs(tmp_path):
    """The key depends on recipe, torch, flavor, prefix and each Debian package, not on other wheels."""
    containers, prefix = tmp_path / "containers", tmp_path / "prefix"
    for folder in ("install", "locks", "patches"):
        shutil.copytree(REPOSITORY / "containers" / folder, containers / folder)
    wheels = prefix / "wheels.tsv"
    prefix.mkdir()
    before = "nvidia-nccl-cu13\t2\tc\tn.whl\nrich\t15\ta\trich.whl\ntorch\t2.13.0\tb\ttorch.whl\n"
    wheels.write_text(before)
    debian = tmp_path / "bin/dpkg-query"
    debian.parent.mkdir()
    debian.write_text("#!/bin/sh\necho g++ 12.2.0\n")
    debian.chmod(0o755)

    def key(flavor: str = "cpu", folder: Path = prefix) -> str:
        command = f'set -euo pipefail; source "$0"; compiled_key horovod "$@" {" ".join(recipe)}'
        done = subprocess.run(
            ["bash", "-c", command, containers / "install/step_functions.sh", folder, flavor, containers],
            env={**os.environ, "PATH": f"{debian.parent}:{os.environ['PATH']}"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    recipe = ["install/horovod.sh", *(f"patches/{path.name}" for path in (containers / "patches").iterdir())]
    first = key()
    assert first.startswith("horovod-") and len(first) == 24
    wheels.write_text(before.replace("rich\t15", "rich\t16"))
    assert key() == first
    seen = {first, key("cu130")}
    for old, new in (("torch\t2.13.0\tb", "torch\t2.13.0\tx"), ("nccl-cu13\t2", "nccl-cu13\t3")):
        wheels.write_text(before.replace(old, new))
        seen.add(key())
    wheels.write_text(before)
    (tmp_path / "other").mkdir()
    shutil.copy(wheels, tmp_path / "other")
    seen.add(key(folder=tmp_path / "other"))
    debian.write_text("#!/bin/sh\necho g++ 12.2.1\n")
    seen.add(key())
    debian.write_text("#!/bin/sh\necho g++ 12.2.0\n")
    assert key() == first
    for file in [containers / name for name in recipe]:
        text = file.read_text()
        file.write_text(text + "#")
        seen.add(key())
        file.write_text(text)
    assert len(seen) == 6 + len(recipe)
    recipe.append("patches/missing")
    with pytest.raises(subprocess.CalledProcessError):
        key()
