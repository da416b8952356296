"""Make each mistake of mutants.yaml in a copy of the project, and see whether a test of `make test` fails.

    make mutants                        all of them
    make mutants ONLY=run/best.py       those of the files whose path has this text

Tests that need the image or the cluster are skipped, as the copy has none.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".yaml")
NOTICED = 0.9  # at least this share
TIMEOUT = 900  # s; a mistake that lets a test run for longer is noticed, too


class Mutant(NamedTuple):
    """A mistake: in this file, `old` stands once and becomes `new`. `tests` are paths below tests/."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def place(self) -> str:
        """File and line."""
        before = (REPOSITORY / self.file).read_text().partition(self.old)[0]
        return f"{self.file}:{before.count(chr(10)) + 1}"


def read_mutants() -> list[Mutant]:
    """The mistakes in the order of the file."""
    modules = yaml.safe_load(LIST.read_text())
    return [
        Mutant(module["file"], old, new, tuple(module["tests"]))
        for module in modules
        for old, new in module["mutants"]
    ]


def copy_project(folder: Path) -> None:
    """Copy what git knows, and new files that it does not ignore."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    subprocess.run(["git", "init", "--quiet", folder], check=True)  # tests list the files of the project
    subprocess.run(["git", "-C", folder, "add", "--all"], check=True)


def run_tests(folder: Path, tests: Sequence[str]) -> str | None:
    """The first of these tests that fails in this copy, or what pytest says instead; None if they pass."""
    data = os.environ.get("HPCTRAIN_TEST_DATA", str(REPOSITORY.parent / "shared/data"))
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "HPCTRAIN_TEST_DATA": data}
    options = ["-n", "0", "-x", "-q", "-m", "not slow or main_road", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.M)
    return failed[1] if failed else (done.stdout + done.stderr).strip().rpartition("\n")[2]


def main() -> None:
    """Print a line for each mistake, and the share that is noticed; exit status 1 if it is below NOTICED."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="a part of the paths of files")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    args = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if args.only in mutant.file]
    folders: SimpleQueue[Path] = SimpleQueue()
    for number in range(args.jobs):
        copy_project(REPOSITORY / f"build/mutants/{number}")
        folders.put(REPOSITORY / f"build/mutants/{number}")

    def find_failure(mutant: Mutant) -> str | None:
        folder = folders.get()
        path = folder / mutant.file
        text = path.read_text()
        path.write_text(text.replace(mutant.old, mutant.new))
        failed = run_tests(folder, [f"tests/{name}" for name in mutant.tests])
        path.write_text(text)
        folders.put(folder)
        print(f"{mutant.place}: {mutant.new.strip()[:60]}: {failed or 'NOT NOTICED'}", flush=True)
        return failed

    with ThreadPoolExecutor(args.jobs) as pool:
        found = [*pool.map(find_failure, mutants)]
    # A test that fails without a mistake, too, notices none.
    if failed := run_tests(folders.get(), sorted({name for name in found if name and "::" in name})):
        sys.exit(f"mutants: {failed} fails without a mistake")
    noticed = len(mutants) - found.count(None)
    print(f"{noticed} of {len(mutants)} mistakes are noticed: {noticed / len(mutants):.0%}")
    sys.exit(noticed < NOTICED * len(mutants))


if __name__ == "__main__":
    main()
