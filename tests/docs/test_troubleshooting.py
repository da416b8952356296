"""docs/guides/troubleshooting.md quotes messages of hpctrain as the sources have them and users see them."""

import os
import re
import shutil

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command, write_digits
from tests.test_messages import LIST
from tests.tools import warm_start

PAGE = (REPOSITORY / "docs/guides/troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M))
MESSAGES = {
    title: [
        message
        for cell in re.findall(r"^\| (`.*?) \| ", text, re.M)
        for message in re.findall(r"`([^`]+)`", cell)
    ]
    for title, text in SECTIONS.items()
}
OURS = [message for title, messages in MESSAGES.items() if "hpctrain" in title for message in messages]


def is_in(text, message):
    """Whether all of a message is in one line of a text, with anything in place of "..."."""
    parts = [re.escape(part.strip(" ")) for part in message.split("...")]
    return re.search(".*?".join(parts), text) is not None


def test_there_are_messages_of_all_kinds():
    assert len(OURS) >= 25 and sum(map(len, MESSAGES.values())) >= 45
    assert not is_in(LIST.read_text(), "no such message in hpctrain")


@pytest.mark.parametrize("message", OURS)
def test_a_message_of_hpctrain_exists(message):
    assert is_in(LIST.read_text(), message)


# Programs of a cluster, and what they say where something is wrong
PROGRAMS = {
    "apptainer": "echo apptainer version 1",
    "nvidia-smi": "[ $1 = --list-gpus ] && echo 'GPU 0: NVIDIA (UUID: GPU-0)' || echo 550.54.15",
    "podman-hpc": "echo 'image not known' >&2; exit 125",
    "srun": "echo 'MPI plugin types are... none pmix'",
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The commands of this machine without those."""
    folder = tmp_path_factory.mktemp("commands")
    for command in os.scandir("/usr/bin"):
        if command.name not in ("singularity", *PROGRAMS):
            (folder / command.name).symlink_to(command.path)
    return folder


@pytest.fixture
def launch(tmp_path, commands):
    """Start a script of a copy of launch/, beside two images, with some of PROGRAMS; returns its output."""
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    shutil.copytree(REPOSITORY / "containers/locks", tmp_path / "containers/locks")
    for flavor in ("cpu", "cu130"):
        (tmp_path / f"hpctrain-{flavor}.sif").touch()
    (tmp_path / "bin").mkdir()

    def start(line, programs, flavor):
        for name in programs.split():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{PROGRAMS[name]}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        env = {"PATH": f"{tmp_path}/bin:{commands}", "HOME": str(tmp_path), "HPCTRAIN_FLAVOR": flavor}
        done = run_command(["bash", "-c", line], cwd=tmp_path, env=env)
        return done.stdout + done.stderr

    return start


DRY = "launch/apptainer_ddp.sh --dry-run"


@pytest.mark.parametrize(
    ("message", "line", "programs", "flavor"),
    [
        ("submit from the hpctrain folder", "cp launch/check.sh mine.sh && ./mine.sh", "", "cpu"),
        ("no such image: run ...", DRY, "apptainer", "cu128"),
        ("neither apptainer nor singularity", DRY, "", "cpu"),
        ("HPCTRAIN_FLAVOR is", DRY, "apptainer", "cu999"),
        ("needs NVIDIA's driver", "launch/local.sh --dry-run", "apptainer nvidia-smi", "cu130"),
        ("is for CPUs, and", "launch/local.sh --dry-run", "apptainer nvidia-smi", "cpu"),
        ("srun does not offer", "launch/apptainer_mpi.sh --dry-run --mpi=pmi2", "apptainer srun", "cpu"),
        ("podman-hpc has no such image", "launch/podman_hpc_ddp.sh --dry-run", "podman-hpc", "cpu"),
    ],
)
def test_a_launch_script_says_so(launch, message, line, programs, flavor):
    assert is_in(launch(line, programs, flavor), full(message))


def full(beginning):
    """The message of the page that begins so."""
    (found,) = [message for message in OURS if message.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data and a run."""
    folder = tmp_path_factory.mktemp("trained")
    write_digits(folder / "digits", train=64, test=16)
    assert hpctrain(folder, "train_ddp --data digits --epochs 1 --out first").returncode == 0
    return folder


def hpctrain(folder, line, number=1, **env):
    return warm_start.run(warm_start.torchrun_ranks(number, line.split(), env), folder)


@pytest.mark.parametrize(
    ("message", "line", "number"),
    [
        ("holds a run already", "train_ddp --data digits --out first", 1),
        ("no checkpoint to resume from", "train_ddp --resume digits", 1),
        ("was saved with other options", "train_ddp --data digits --resume first --batch-size 16", 1),
        ("is the global batch", "train_ddp --data digits --batch-size 3", 2),
        ("training diverged", "train_ddp --data digits --lr 1e30", 1),
        ("but rank ... sees no GPU", "train_ddp --data digits --device cuda", 1),
        ("neither a folder nor a model name", "nlp.classify --model ./nothing", 1),
    ],
)  # fmt: skip
def test_a_trainer_says_so(trained, message, line, number):
    (trained / "file").touch()
    done = hpctrain(
        trained, line, number, CUDA_VISIBLE_DEVICES="", HPCTRAIN_CACHE=str(trained / "file/cache")
    )
    assert done.returncode in (1, 2) and is_in(done.stderr, full(message)), done
