"""The install steps on their own: what they take from Debian, what they say of it, and where they take it from."""

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
# mounts that are gone when the command has ended
ENTER = 'mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"'


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[Path]:
    """The plain Debian that an image begins with, and the recipe in it."""
    subprocess.run(["make", "base"], cwd=REPOSITORY, check=True)
    unpack = "tar -xOf build/base-bookworm.tar layer.tar | tar -xC $0"
    subprocess.run(["sh", "-c", unpack, tmp_path], cwd=REPOSITORY, check=True)
    (tmp_path / "dev").mkdir()
    for folder in ("install", "locks"):
        shutil.copytree(REPOSITORY / "containers" / folder, tmp_path / "src/containers" / folder)
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep three times 120 MB


def enter(root: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, root, *command],
        env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def empty_archive() -> Iterator[tuple[str, list[str]]]:
    """A proxy by which nothing can be had; its address, and the addresses that it was asked for."""
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


def test_a_snapshot_is_asked_for_its_time_and_one_that_does_not_answer_ends_the_build(debian, empty_archive):
    proxy, asked = empty_archive
    sources = (debian / "etc/apt/sources.list").read_text()
    done = enter(debian, INSTALL, "runtime", http_proxy=proxy, DEBIAN_SNAPSHOT="20261101T000000Z")
    archive = "http://snapshot.debian.org/archive"
    assert f"{archive}/debian/20261101T000000Z/dists/bookworm/InRelease" in asked
    assert f"{archive}/debian-security/20261101T000000Z/dists/bookworm-security/InRelease" in asked
    assert all("/20261101T000000Z/" in address for address in asked)
    message = f"debian.sh: no package lists from {archive}; leave DEBIAN_SNAPSHOT out where it cannot be reached"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == message
    assert (debian / "etc/apt/sources.list").read_text() == sources
    assert not list((debian / "tmp").iterdir()) and not (debian / "usr/share/hpctrain").exists()


def test_an_archive_that_nobody_can_reach_ends_the_build(debian):
    """apt itself takes that for a passing trouble, and goes on with the lists that it has: none."""
    done = enter(debian, INSTALL, "runtime", http_proxy="http://127.0.0.1:9")
    assert done.returncode == 1 and done.stderr.endswith("\ndebian.sh: no package lists from the sources of the base image\n")


@pytest.mark.parametrize("name, value", [("MPI", "lam"), ("DEBIAN_SNAPSHOT", "yesterday")])
def test_a_setting_that_means_nothing_is_one_line(name, value):
    done = subprocess.run(
        [REPOSITORY / "containers/install/debian.sh", "runtime"],
        env={**os.environ, name: value}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and value in done.stderr


def test_versions_that_are_not_as_recorded_are_named(debian):
    """Nothing is installed: apt-get, and the Python it would bring, do nothing here, so what the base has is compared."""
    record = next((debian / "src/containers/locks").glob("openmpi-amd64.debian"))
    bash = next(line for line in record.read_text().splitlines() if line.startswith("bash "))
    record.write_text(record.read_text().replace(f"{bash}\n", "bash 1.0\n").replace("\ndash ", "\nno-dash "))
    for program in ("apt-get", "python3.11"):
        (debian / "usr/local/bin" / program).symlink_to("/bin/true")
    done = enter(debian, INSTALL, "runtime", PATH="/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    assert done.returncode == 0, done.stderr
    installed = dict(line.split("\t")[:2] for line in (debian / "usr/share/hpctrain/debian.tsv").read_text().splitlines())
    said = done.stdout.splitlines()
    assert f"bash: recorded 1.0, installed {installed['bash']}" in said
    assert f"dash: recorded nothing, installed {installed['dash']}" in said
    others = [line for line in said if ": recorded " in line]
    assert said[-1] == f"debian: {len(others)} of {len(installed)} packages are not as recorded"
