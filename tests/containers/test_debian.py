"""containers/install/debian.sh, the install step for Debian's packages."""

import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command

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
    return run_command(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, root, *command],
        env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
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
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said.startswith("debian.sh: ")
    assert archive in said and "DEBIAN_SNAPSHOT" in said
    assert (debian / "etc/apt/sources.list").read_text() == sources
    assert not list((debian / "tmp").iterdir()) and not (debian / "usr/share/hpctrain").exists()


def test_the_build_ends_if_the_archive_cannot_be_reached(debian):
    """By default apt-get update succeeds here, and continues with the lists that it has: none."""
    done = enter(debian, INSTALL, "runtime", http_proxy="http://127.0.0.1:9")
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said.startswith("debian.sh: ") and "DEBIAN_SNAPSHOT" not in said


def test_an_invalid_snapshot_is_one_line():
    done = run_command(
        [REPOSITORY / "containers/install/debian.sh", "runtime"],
        env={**os.environ, "DEBIAN_SNAPSHOT": "yesterday"}
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "yesterday" in done.stderr


def test_versions_that_differ_from_the_record_are_printed(debian):
    """apt-get and python3.11 do nothing here, so the packages of the base are compared."""
    record = debian / "src/containers/locks/amd64.debian"
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
