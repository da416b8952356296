"""The options of all commands and launch scripts are those of tests/options.txt: adding one is a decision.

`.venv/bin/python -m tests.test_options >tests/options.txt` records it.
"""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from hpctrain.cli import COMMANDS
from tests.helpers import run_command

pytestmark = pytest.mark.main_road

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = REPOSITORY / "tests/options.txt"


def options():
    """Each option, and the commands and launch scripts that have it."""
    from hpctrain.commands.completion import command_parsers

    found = defaultdict(list)
    for command, parser in command_parsers().items():
        for action in parser._actions:  # argparse has no public list of them
            for option in action.option_strings:
                found[option].append(command)
    for script in sorted(path for path in REPOSITORY.glob("launch/*.sh") if os.access(path, os.X_OK)):
        text = run_command([script, "--help"], check=True).stdout
        for option in re.findall(r"^  (--[a-z-]+)", text, re.M):
            found[option].append(script.name)
    return {
        option: sorted(names) for option, names in sorted(found.items()) if option not in ("-h", "--help")
    }


def lines(options):
    return [f"{option}: {' '.join(names)}" for option, names in options.items()]


def difference(recorded, found):
    """One line that names the options that were added and removed; "" if none was."""
    pairs = [
        {(option, name) for option, names in each.items() for name in names} for each in (recorded, found)
    ]
    changes = [
        f"{what} {option} of {name}"
        for what, each in (("added", pairs[1] - pairs[0]), ("removed", pairs[0] - pairs[1]))
        for option, name in sorted(each)
    ]
    return ", ".join(changes)


@pytest.mark.slow  # it imports all commands
def test_an_option_is_added_or_removed_by_decision():
    recorded = dict(line.split(": ") for line in LIST.read_text().splitlines())
    change = difference({option: names.split() for option, names in recorded.items()}, options())
    record = ".venv/bin/python -m tests.test_options >tests/options.txt"
    assert not change, f"{change}: if that is decided, say why in CHANGELOG.md, and record it: {record}"


def test_the_launch_scripts_know_the_commands():
    assert (REPOSITORY / "launch/lib/commands.txt").read_text().split() == [*COMMANDS]


def test_the_difference_is_one_line():
    change = difference({"--a": ["x"], "--b": ["x", "y"]}, {"--b": ["y"], "--c": ["x"]})
    assert change == "added --c of x, removed --a of x, removed --b of x"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines(options()))
