"""containers/install/step_functions.sh: compiled wheels that are kept, and files from Debian's archive."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command

pytestmark = pytest.mark.slow


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
        done = run_command(
            ["bash", "-c", command, containers / "install/step_functions.sh", folder, flavor, containers],
            env={**os.environ, "PATH": f"{debian.parent}:{os.environ['PATH']}"}, check=True
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


@pytest.mark.parametrize("there", [False, True])
def test_a_compiler_that_is_missing_or_changed_is_one_line(tmp_path, there):
    """nvcc.sh with a mirror that does not have the package, or has it with another content."""
    package = "pool/nvcc_12.4_amd64.deb"
    if there:
        (tmp_path / "mirror/pool").mkdir(parents=True)
        (tmp_path / "mirror" / package).write_text("another compiler")
    apt_get = tmp_path / "bin/apt-get"
    apt_get.parent.mkdir()
    apt_get.write_text(f"#!/bin/sh\necho \"'copy:{tmp_path}/mirror/dists/bookworm/InRelease' InRelease 0\"\n")
    apt_get.chmod(0o755)
    machine = run_command(["dpkg", "--print-architecture"], check=True).stdout.strip()
    (tmp_path / "lock").write_text(f"{machine} {package} {'0' * 64} 20260901T000000Z\n")
    done = run_command(
        [REPOSITORY / "containers/install/nvcc.sh", tmp_path / "lock", tmp_path / "home"],
        env={**os.environ, "PATH": f"{apt_get.parent}:{os.environ['PATH']}"}
    )  # fmt: skip
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said.startswith("nvcc.sh: ")
    assert str(tmp_path / "lock") in said and "nvcc_12.4_amd64.deb" in said
    assert ("SHA-256" in said) == there
    assert not (tmp_path / "home").exists()
