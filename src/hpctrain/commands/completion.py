"""hpctrain completion: shell completion, made from the argument parsers of all commands.

    source <(hpctrain completion bash)        complete hpctrain in this shell
    hpctrain completion --write ~/.local      install completion for bash and zsh

The build of the image writes the same files into the image, and `hpctrain completion bash` prints the one
that is there. Making them takes seconds, because it imports every command.
"""

import sys
from pathlib import Path

from hpctrain.cli import COMMANDS, load_command
from hpctrain.distributed.world import World
from hpctrain.errors import UsageError, explain_os_error
from hpctrain.files import atomic
from hpctrain.parser import Parser

# Where bash-completion and zsh look for a command that is in PREFIX/bin.
FILES = {"bash": "share/bash-completion/completions/hpctrain", "zsh": "share/zsh/site-functions/_hpctrain"}


def command_parsers() -> dict[str, Parser]:
    """The parser of every command, in the order of COMMANDS. The imports take seconds."""
    return {name: load_command(name).parser() for name in COMMANDS}


def shell_completion(shell: str, parsers: dict[str, Parser]) -> str:
    """The completion script of bash or zsh."""
    import shtab

    hpctrain = Parser(prog="hpctrain")
    hpctrain.add_argument("--version", action="store_true", help="print the version of hpctrain")
    commands = hpctrain.add_subparsers(metavar="COMMAND")
    for name, parser in parsers.items():
        for action in parser._actions:  # argparse has no public list of them
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads this attribute
        commands.add_parser(name, help=COMMANDS[name][2], parents=[parser], add_help=False)
    return shtab.complete(hpctrain, shell).rstrip("\n") + "\n"


def write_files(prefix: Path) -> None:
    """Write the scripts of both shells below `prefix`, and print their paths. Raises HpctrainError."""
    parsers = command_parsers()
    for shell, name in FILES.items():
        path = prefix / name
        with explain_os_error(
            f"{path}: cannot be written", "give a folder that you can write to, such as --write ~/.local"
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, shell_completion(shell, parsers))
        print(path)


def parser() -> Parser:
    parser = Parser(prog="hpctrain completion", description="Print or install shell completion.")
    parser.add_argument(
        "shell", nargs="?", choices=["bash", "zsh"], help="print the completion script of this shell"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PREFIX",
        help="write the completion scripts of both shells to PREFIX/share, such as ~/.local/share",
    )
    return parser


def main(world: World, arguments: list[str]) -> None:
    """Print the script of a shell, or write both."""
    args = parser().parse_args(arguments)
    if (args.shell is None) == (args.write is None):
        raise UsageError("completion takes bash, zsh or --write PREFIX: source <(hpctrain completion bash)")
    if args.write:
        write_files(args.write)
        return
    prepared = Path(sys.prefix, FILES[args.shell])
    try:
        text = prepared.read_text(encoding="utf-8")
    except OSError:  # not in the image
        text = shell_completion(args.shell, command_parsers())
    print(text, end="")
