"""The command line: `hpctrain COMMAND ...`, or `python -m hpctrain COMMAND ...`."""

# ruff: noqa: E402
from hpctrain.distributed.python import drop_current_folder

drop_current_folder()  # before further imports

import gc
import sys
from pathlib import Path

from hpctrain import __version__
from hpctrain.cli import COMMANDS, GROUPS, load_command
from hpctrain.parser import did_you_mean


def help_text() -> str:
    """The text of `hpctrain --help`."""
    lines = [
        f"hpctrain {__version__}: distributed PyTorch training on supercomputers",
        "",
        "usage: hpctrain COMMAND [OPTION]...",
    ]
    lines += ["       hpctrain COMMAND --help    list the options of a command", "       hpctrain --version"]
    for group, title in GROUPS.items():
        lines += [
            "",
            title,
            *(f"  {name:17}{text}" for name, (_, where, text) in COMMANDS.items() if where == group),
        ]
    return "\n".join(lines)


def suggest(name: str, arguments: list[str]) -> str:
    """What to write instead of a command that there is not."""
    name = name.lower()
    family = [command for command in COMMANDS if command.startswith(name)]
    if len(family) > 1 and not arguments:
        return f"choose from {', '.join(family)}"
    both = f"{name}.{arguments[0].lower()}" if arguments else name
    guess = did_you_mean(both, COMMANDS) or did_you_mean(name, COMMANDS)
    return guess or "hpctrain --help lists all commands"


def main() -> None:
    """Run the command. A user's error is one line and exit status 1, or 2 for an error of usage."""
    # With the default of 700 objects between collections, these take a tenth of torch's import.
    gc.set_threshold(100_000, 50, 100)
    arguments = sys.argv[1:]
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        sys.exit(0 if arguments else 2)
    if arguments[0] in ("--version", "-V", "version"):
        print(__version__)
        return

    from hpctrain.distributed import entry
    from hpctrain.distributed.world import ALONE, World
    from hpctrain.errors import UsageError, missing_extra_as_error

    name = arguments.pop(0)

    def run(world: World) -> None:
        try:
            Path.cwd()  # without it, torch does not find its libraries, and ends the process
        except FileNotFoundError as error:
            raise UsageError("the current folder has been removed: change to another one") from error
        if name not in COMMANDS:
            choices = suggest(name, arguments)
            if name.endswith(".py"):
                choices = "start a script of your own by python, by torchrun, or by a launch script"
            raise UsageError(f"there is no command {name!r}: {choices}")
        with missing_extra_as_error():
            load_command(name).main(world, arguments)

    # A shell runs this when it starts, also inside a job, where detect() could raise an error.
    entry.main(run, ALONE if name == "completion" else None)


if __name__ == "__main__":
    main()
