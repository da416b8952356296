"""make venv, and what the builds check before their long work. Nothing of the user's is removed."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command

NOBODY = [shutil.which("setpriv") or "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
# What a script needs of the system, without the tools that build images.
TOOLS = [
    "awk", "bash", "basename", "cat", "chmod", "cp", "date", "df", "diff", "dirname", "find", "flock", "git",
    "grep", "head", "id", "make", "mkdir", "mktemp", "mv", "python3", "realpath", "rm", "sed", "sh", "sleep",
    "sort", "stat", "tail", "tar", "touch", "tr", "true", "uname",
]  # fmt: skip


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users may read; those of pytest are for root alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def project(public: Path) -> Path:
    """A copy of what builds, below a path with a space."""
    folder = public / "a project"
    for name in ("containers", "apptainer", "launch", "cluster", "src/hpctrain/files"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("Makefile", "pyproject.toml", "LICENSE", ".gitignore", ".dockerignore"):
        shutil.copy(REPOSITORY / name, folder)
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    return folder


def tool(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def path(public: Path) -> Path:
    """A folder for PATH with TOOLS alone."""
    folder = public / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name, path="/usr/bin:/bin"))
    return folder


def run(project: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # make sets some for another make in it, which then prints more lines
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | variables
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    return run_command(command, cwd=project, env=env, **streams)


def test_a_venv_of_the_user_stays(project):
    """make venv, and so lint and test, removed it; make clean did, too."""
    (project / ".venv").mkdir()
    (project / ".venv/mine").touch()
    (project / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests/dev.lock", project / "tests")
    done = run(project, "make", "venv")
    assert done.returncode != 0 and re.search(r"^venv.sh: .* \.venv ", done.stdout, re.M)
    assert run(project, "make", "clean").returncode == 0
    assert (project / ".venv/mine").exists()


@pytest.mark.parametrize("version", ["3.6", ""])
def test_an_old_or_missing_python_is_named_before_anything_is_removed(project, path, version):
    (project / ".venv").mkdir()
    (project / ".venv/ready").touch()
    tool(path, "old", f"echo {version}; exit {int(not version)}")
    done = run(project, "containers/venv.sh", PYTHON=str(path / "old"))
    assert done.returncode == 1 and re.match(f"venv.sh: .*{path}/old is {version or 'missing'};", done.stdout)
    assert (project / ".venv/ready").exists()


def test_a_second_make_venv_says_that_there_is_one(project):
    with subprocess.Popen(
        ["flock", project / "containers/venv.sh", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE
    ) as first:
        first.stdout.readline()
        done = run(project, "containers/venv.sh")
        first.terminate()
    assert done.returncode == 1 and "make venv" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_build_with_all_that_it_started(project, tmp_path, number):
    """pip lived on beside the next make venv, and mksquashfs for 40 s."""
    tool(
        project / "containers",
        "toy.sh",
        "set -euo pipefail\nsource containers/build_functions.sh\nattend containers/toy.sh\n"
        f"trap 'touch \"{tmp_path}/cleaned\"' EXIT\n"
        f"output=$(bash -c 'echo $$ >\"$0\"; exec sleep 600' '{tmp_path}/pid' 2>&1 | sed 'w /dev/stderr')",
    )
    # nohup and the & of scripts ignore some of them, and so would all that they start
    command = ["env", "--default-signal", "containers/toy.sh"]
    with subprocess.Popen(command, cwd=project, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(60) == (130 if number == signal.SIGINT else 143)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "cleaned").exists()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@needs_root
@pytest.mark.parametrize("target", ["sif", "sif-from-def", "reproduce"])
def test_a_user_without_apptainer_is_told_so_first(project, path, target):
    done = run(project, *NOBODY, "make", target, PATH=str(path))
    assert done.returncode != 0 and done.stdout.startswith("make: apptainer "), done.stdout


@needs_root
def test_missing_host_packages_are_named_at_once(project, path):
    done = run(project, *NOBODY, "make", "image", PATH=str(path), BASE_IMAGE="")
    said = next(line for line in done.stdout.splitlines() if line.startswith("install_host_packages.sh: "))
    assert all(f" {name}" in said for name in ("curl", "buildah", "mmdebstrap")), said


@needs_root
@pytest.mark.parametrize("prefix", ["", "/proc/none"])
def test_prefix_is_checked_before_the_image_is_built(project, prefix):
    done = run(project, "make", "install", f"PREFIX={prefix}")
    assert done.returncode != 0 and "install.sh: " in done.stdout.splitlines()[-2], done.stdout
    assert "PREFIX" in done.stdout and not (project / "build").exists()


def test_an_old_python_is_named_before_the_image_is_built(project, path):
    """On RHEL 8 the last step failed: "the disk is full, of build/"."""
    (path / "python3").unlink()
    tool(path, "python3", "exit 1")
    tool(path, "buildah", "exit 0")
    done = run(project, "containers/build_image.sh", "--tool", "buildah", PATH=str(path))
    assert re.fullmatch(r"build_image.sh: python3 .*3\.9.*\n", done.stdout)


@needs_root
@pytest.mark.parametrize(
    ("buildah", "words"),
    [
        ("[[ $1 != unshare ]]", "user namespace"),
        (
            "[[ $1 != info ]] || { [[ $3 == *Root* ]] && echo /; } || echo vfs",
            " vfs ",
        ),
    ],
)
def test_rootless_buildah_without_space_or_namespaces_is_one_line(project, path, buildah, words):
    tool(path, "buildah", buildah)
    (path / "df").unlink()
    tool(path, "df", "echo 20G")
    done = run(project, *NOBODY, "containers/build_image.sh", "--tool", "buildah", PATH=str(path))
    assert re.fullmatch(f"build_image.sh: .*{words}.*\n", done.stdout), done.stdout
