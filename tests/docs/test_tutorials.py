"""docs/guides/tutorials.md: each command on its right side is one that hpctrain accepts.

A launch script runs with --dry-run, without a container: it resolves the job and prints its commands. The
parser of a command of hpctrain reads its options. The scripts themselves run in tests/launch/test_launch.py.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY

from hpctrain.cli import COMMANDS, load_command
from tests.helpers import run_command

PAGE = (REPOSITORY / "docs/guides/tutorials.md").read_text().partition("## What changed in the libraries")[0]
OURS = [
    command.replace("\\|", "|")
    for row in re.findall(r"^\|(.*)\|$", PAGE, re.M)
    for command in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[1])
]
LAUNCHED = [command for command in OURS if re.search(r"^(sbatch|salloc|echo) .*launch/", command)]
COMMANDS_OF_HPCTRAIN = [command for command in OURS if command.startswith("hpctrain ")]


def test_each_tutorial_has_a_table():
    assert len(re.findall(r"^## ", PAGE, re.M)) == 7 and len(LAUNCHED) > 20 and len(COMMANDS_OF_HPCTRAIN) > 3
    for word in ("sbatch", "salloc", "qsub"):
        assert any(word in command for command in LAUNCHED)


def check_command(words):
    """The parser of a command of hpctrain accepts the words after it."""
    name, *arguments = words
    assert name in COMMANDS
    load_command(name).parser().parse_args(arguments)


@pytest.mark.parametrize("command", COMMANDS_OF_HPCTRAIN)
def test_a_command_of_hpctrain(command):
    check_command(shlex.split(command)[1:])


@pytest.fixture
def programs(tmp_path):
    """The environment of a site with every runtime and launcher that the page needs, as programs that only
    answer what the launch scripts ask.
    """
    answers = {
        "podman-hpc": f"echo sha256:{'0' * 64}",
        "podman": "echo podman version 4",
        "shifter": "",
        "shifterimg": f"echo {'0' * 64}",
        "mpirun": "echo mpirun Open MPI 4.1.4",
        "srun": "echo MPI plugin types are... none pmix pmi2",
        "horovodrun": "",
    }
    (tmp_path / "bin").mkdir()
    for name, answer in answers.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "PBS_", "HPCTRAIN_"))
    }
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
    return environment | {"PATH": path, "HPCTRAIN_ROOT": str(REPOSITORY)}


@pytest.mark.parametrize("command", LAUNCHED)
def test_a_launch_script(command, programs, tmp_path):
    """With the options of the page; those of sbatch are Slurm's."""
    words = shlex.split(command.partition(" | ")[0].removeprefix("echo ").strip('"').replace("$PWD/", ""))
    place = next(number for number, word in enumerate(words) if word.startswith("launch/"))
    script, *arguments = words[place:]
    for word in arguments:
        if word.endswith(".py"):
            (tmp_path / word).parent.mkdir(exist_ok=True)
            (tmp_path / word).touch()
        elif word.startswith("nlp.") or word == "train_ddp":
            check_command(arguments[arguments.index(word) :])
    if not script.startswith(("launch/podman", "launch/shifter")):
        programs["HPCTRAIN_RUNTIME"] = "none"
    done = run_command([REPOSITORY / script, "--dry-run", *arguments], cwd=tmp_path, env=programs, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hpctrain: command: " in done.stdout + done.stderr
