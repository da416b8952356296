"""Parts of the Makefile that need no build."""

import os

import pytest
from slurm_cluster import REPOSITORY

from tests.helpers import run_command

TOY = """
include Makefile
.PHONY: toy broken
toy:
	@for i in 1 2 3 4 5 6 7 8 9; do echo "Get:$$i a package"; done
	@echo "[2/5] STEP 3/9: COPY $$(printf %200s | tr ' ' x)"
	@echo "build: made a toy"
broken:
	@echo "a package"; echo "toy.sh: the disk is full" >&2; exit 3
try-%:
	+@$(call build_quietly,$*)
	@echo "$* is built"
"""


@pytest.fixture
def toy(tmp_path):
    """A folder with a copy of the Makefile, and targets that print what builds print."""
    (tmp_path / "Makefile").write_text((REPOSITORY / "Makefile").read_text())
    (tmp_path / "src").mkdir()
    (tmp_path / "toy.mk").write_text(TOY)

    # Not as a part of the make that may run this test, which would name the folders that it enters.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}

    def run(target, **env):
        command = ["make", "-f", "toy.mk", "MAKE=make -f toy.mk", target]
        return run_command(command, cwd=tmp_path, env=outside | env, timeout=60)

    return run


def test_a_quiet_build_has_a_line_for_each_step_and_a_log(toy, tmp_path):
    """`make demo` printed 2,493 lines, mostly of apt and pip."""
    done = toy("try-toy")
    assert done.returncode == 0, done.stderr
    head, copy, made, built = done.stdout.splitlines()
    assert "build/make.log" in head and built == "toy is built"
    assert copy.startswith("  [2/5] STEP 3/9: COPY xxx") and len(copy) < 120 and made == "  build: made a toy"
    assert (tmp_path / "build/make.log").read_text().count("a package") == 9


def test_a_quiet_build_that_fails_shows_its_error_at_once_and_the_end_of_its_log(toy):
    """An old Python was named after the other target, which had gone on for a minute."""
    done = toy("try-broken")
    assert "  toy.sh: the disk is full\n" in done.stdout
    assert done.returncode == 2 and "broken is built" not in done.stdout
    assert "toy.sh: the disk is full\n" in done.stderr
    assert toy("try-toy").returncode == 0


def test_a_disk_that_is_too_small_is_said_with_its_size(toy, tmp_path):
    df = tmp_path / "bin/df"
    df.parent.mkdir()
    df.write_text("#!/bin/sh\necho Filesystem Blocks Used Available Use Mounted\necho d 9 9 $FREE 9% /\n")
    df.chmod(0o755)
    small = toy(".room", PATH=f"{df.parent}:{os.environ['PATH']}", FREE="7340032")
    assert small.returncode and "need 20 GB" in small.stderr and "has 7 GB free" in small.stderr
    assert toy(".room", PATH=f"{df.parent}:{os.environ['PATH']}", FREE="25000000").returncode == 0
