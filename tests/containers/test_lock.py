"""Locks that do not fit pyproject.toml, and known holes of what they pin."""

import http.server
import json
import os
import re
import shutil
import threading

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command

pytestmark = pytest.mark.slow


def test_the_lock_of_a_build_is_the_same_for_arm64():
    """A lock has the hashes of all files of a version; a package for one platform only would change it."""
    check = ["containers/lock.sh", "--check", "--platform", "aarch64", "--flavor"]
    env = {**os.environ, "PATH": f"{REPOSITORY}/.venv/bin:{os.environ['PATH']}"}
    done = run_command([*check, "cu130-build"], cwd=REPOSITORY, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flavor", "versions"),
    [
        ("cpu", {"torch": "2.13.0+cpu", "torchaudio": ""}),
        ("cu130", {"torch": "2.13.0", "torchaudio": "2.11.1"}),
        ("cu128", {"torch": "2.10.0", "torchaudio": "2.10.0"}),
    ],
)
def test_packages_of_tutorials_fit_the_torch_of_the_flavor(flavor, versions):
    """torchaudio 2.11 is made for all later torch and for CUDA 13; beside torch for the CPU none loads."""
    lock = (REPOSITORY / f"containers/locks/{flavor}.lock").read_text()
    found = dict(re.findall(r"^([a-z-]+)==(\S+)", lock, re.M))
    assert {name: found.get(name, "") for name in versions} == versions and "ruamel-yaml" in found


def test_a_stale_lock_is_named(tmp_path):
    """With the shortest lock: whenever an index gets more files of a pinned version, a lock is stale."""
    env = {**os.environ, "PATH": f"{REPOSITORY}/.venv/bin:{os.environ['PATH']}"}
    check = ["containers/lock.sh", "--check", "--flavor", "cu130-build"]
    done = run_command(check, cwd=REPOSITORY, env=env)
    assert done.returncode == 0, done.stderr
    shutil.copytree(REPOSITORY / "containers", tmp_path / "containers")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    lock = tmp_path / "containers/locks/cu130-build.lock"
    lock.write_text(lock.read_text().replace("nvidia-nvvm==", "nvidia-old=="))
    before = lock.read_bytes()
    done = run_command(check, cwd=tmp_path, env=env)
    assert done.returncode == 1 and "containers/locks/cu130-build.lock " in done.stderr
    assert lock.read_bytes() == before


HOLES = {"horovod": "CVE-2024-10190", "torchmetrics": "CVE-2099-1"}


class OpenVulnerabilities(http.server.BaseHTTPRequestHandler):
    """A stand-in for osv.dev, which knows the HOLES."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, version = asked["package"]["name"], asked["version"]
        affected = {"package": {"name": name, "ecosystem": "PyPI"}, "versions": [version]}
        hole = {"id": "PYSEC-0", "aliases": [HOLES.get(name)], "summary": "", "affected": [affected]}
        answer = json.dumps({"vulns": [hole]} if name in HOLES else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_known_holes_are_listed_but_those_that_a_patch_closes():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OpenVulnerabilities) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = os.environ | {"PIP_AUDIT_OSV_URL": f"http://127.0.0.1:{server.server_port}"}
        done = run_command(["make", "audit"], cwd=REPOSITORY, env=env)
        server.shutdown()
    assert done.returncode != 0
    assert done.stdout.count("torchmetrics") == 3, done.stdout  # cpu, cu128 and cu130
    assert "horovod" not in done.stdout.replace("horovod.lock", "")
