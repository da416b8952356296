"""Make each mistake of mutants.yaml in a copy of the project, and see whether a test of `make test` fails.

    make mutants                        all of them
    make mutants ONLY=run/best.py       those of the files whose path has this text

The tests of a module have to pass without a mistake. Those that need the image or the cluster are skipped, as
the copy has none.
"""

import argparse
import os
import shutil
import subprocess
import sys
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


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Whether these tests pass in this copy, and the first line of pytest that says what failed."""
    data = os.environ.get("HPCTRAIN_TEST_DATA", str(REPOSITORY.parent / "shared/data"))
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "HPCTRAIN_TEST_DATA": data}
    options = ["-n", "0", "-x", "-q", "-m", "not slow or main_road", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{path}" for path in tests)]
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return False, "no end"
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    first = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), "")
    return done.returncode == 0, first or (lines or [""])[-1]


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

    def judge(mutant: Mutant | tuple[str, ...]) -> tuple[bool, str]:
        folder = folders.get()
        try:
            if not isinstance(mutant, Mutant):
                return run_tests(folder, mutant)
            text = (folder / mutant.file).read_text()
            (folder / mutant.file).write_text(text.replace(mutant.old, mutant.new))
            passes, why = run_tests(folder, mutant.tests)
            (folder / mutant.file).write_text(text)
            word = "NOT NOTICED" if passes else "noticed"
            print(
                f"{word:11}  {mutant.place}: {mutant.new.strip()[:60]}  {'' if passes else why}", flush=True
            )
            return passes, why
        finally:
            folders.put(folder)

    with ThreadPoolExecutor(args.jobs) as pool:
        groups = [*dict.fromkeys(mutant.tests for mutant in mutants)]
        for tests, (passes, why) in zip(groups, pool.map(judge, groups), strict=True):
            if not passes:
                sys.exit(f"mutants: {' '.join(tests)} fail without a mistake: {why}")
        noticed = [not passes for passes, _ in pool.map(judge, mutants)]
    share = sum(noticed) / len(noticed)
    print(f"{sum(noticed)} of {len(noticed)} mistakes are noticed: {share:.0%}")
    sys.exit(share < NOTICED)


if __name__ == "__main__":
    main()
