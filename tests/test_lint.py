"""Every file is clean, and every script answers --help and refuses nonsense."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

FILES = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    check=True,
).stdout.split("\0")
TEXTS = {name: (REPOSITORY / name).read_text(errors="replace") for name in FILES if name and (REPOSITORY / name).is_file()}
SHELL = sorted(
    name for name, text in TEXTS.items() if text.startswith("#!/bin/bash") or re.search("^# shellcheck shell=bash$", text, re.M)
)
SCRIPTS = [name for name in SHELL if TEXTS[name].startswith("#!") and name != ".ci/run"]
TOOLS = Path(sys.executable).parent


def run(*command):
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


def test_ruff():
    for arguments in (["check"], ["format", "--check"]):
        done = run(TOOLS / "ruff", *arguments, ".")
        assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck():
    assert "launch/apptainer_ddp.sh" in SHELL and "launch/lib.sh" in SHELL
    done = run(TOOLS / "shellcheck", "--external-sources", *SHELL)
    assert done.returncode == 0, done.stdout


def test_actionlint():
    """With shellcheck over the commands in them; without pyflakes, as there is no Python."""
    workflows = [name for name in TEXTS if name.startswith(".github/workflows/")]
    assert len(workflows) >= 2
    done = run(TOOLS / "actionlint", f"-shellcheck={TOOLS / 'shellcheck'}", "-pyflakes=", *workflows)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in workflows:
        for action in re.findall(r"uses: (\S+)", TEXTS[name]):
            assert action.startswith("./") or re.search("@[0-9a-f]{40}$", action), f"{name}: {action} is not pinned"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_nonsense(script):
    done = run(f"./{script}", "--help")
    assert done.returncode == 0 and Path(script).name in done.stdout and not done.stderr
    done = run(f"./{script}", "--nonsense")
    assert done.returncode != 0 and done.stderr.strip()


def test_no_path_of_this_machine():
    here = str(REPOSITORY.parent) + "/"
    if len(REPOSITORY.parts) < 3:
        here = str(REPOSITORY) + "/build/"
    for name, text in TEXTS.items():
        assert here not in text, f"{name} holds {here}"


def test_versions_agree():
    version = re.search(r'^version = "(.*)"', TEXTS["pyproject.toml"], re.M)[1]
    assert f"## {version}" in TEXTS["CHANGELOG.md"]


def test_both_recipes_start_from_the_same_debian():
    base = re.search("ARG BASE_IMAGE=(.*@sha256:[0-9a-f]{64})", TEXTS["containers/Dockerfile"])[1]
    assert TEXTS["apptainer/hpctrain.def"].count(f"from={base}\n") == 2  # Apptainer reads the arguments of each stage
