"""The command line: `hpctrain COMMAND ...`, or `python -m hpctrain COMMAND ...`."""

import gc
import os
import sys
from importlib import import_module

from hpctrain import __version__
from hpctrain.cli import COMMANDS, GROUPS


def help_text() -> str:
    """The text of `hpctrain --help`."""
    lines = [f"hpctrain {__version__}: distributed PyTorch training on supercomputers", "", "usage: hpctrain COMMAND [OPTION]..."]
    lines += ["       hpctrain COMMAND --help    list the options of a command", "       hpctrain --version"]
    for group, title in GROUPS.items():
        lines += ["", title, *(f"  {name:17}{text}" for name, (_, where, text) in COMMANDS.items() if where == group)]
    return "\n".join(lines)


def print_shadowed_packages() -> None:
    """Print which packages hide those of the environment: they may be why an import or an attribute failed."""
    from hpctrain.node_checks import shadowed_packages

    for text in shadowed_packages():
        print(f"hpctrain: error: {text}", file=sys.stderr)


def main() -> None:
    """Run the command that the command line names.

    An error that the user can fix ends it with one line and exit status 1, or 2 where the command line is wrong.
    """
    # With the default of 700 new objects between collections, they take a tenth of the time that torch needs to be imported.
    gc.set_threshold(100_000, 50, 100)
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(__version__)
        return

    rank = 0
    try:
        from hpctrain.errors import HpctrainError, UsageError
        from hpctrain.redaction import hide_secrets
        from hpctrain.world import ALONE, detect
    except (ImportError, AttributeError):
        print_shadowed_packages()
        raise
    try:
        name = arguments.pop(0)
        # A shell runs this command when it starts, also a shell inside a job, where detect() could raise an error.
        world = ALONE if name == "completion" else detect()
        rank = world.rank
        if name not in COMMANDS:
            raise UsageError(
                f"there is no command {name!r}: choose from {', '.join(COMMANDS)}, or give a launch script a .py file"
            )
        import_module(COMMANDS[name][0]).main(world, arguments)
        status = 0
    except UsageError as error:
        # Every rank has the same command line. Rank 0 prints the error and fails; the others exit with status 0, because
        # srun kills all ranks at the first failure, perhaps before rank 0 has printed its error.
        status = 0
        if rank == 0:
            print(f"hpctrain: error: {hide_secrets(str(error))}", file=sys.stderr)
            status = 2
    except HpctrainError as error:
        print(f"hpctrain: error: {hide_secrets(str(error))}", file=sys.stderr)
        status = 1
    except (ImportError, AttributeError):
        print_shadowed_packages()
        raise
    except SystemExit as end:
        status = int(end.code or 0)
    # Skip the finalization of the interpreter. DDP keeps threads of Gloo beyond destroy_process_group(), and a thread that
    # frees its last tensor during finalization aborts the process: seen in 3 of 30 runs on a busy machine with torch 2.13;
    # github.com/pytorch/pytorch/pull/179291 describes the same.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
