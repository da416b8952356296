"""The man page hpctrain(1), in the man macros of groff, made from the argument parsers of all commands.

It contains no date, so the same sources give the same bytes.
"""

import argparse
import re
from collections.abc import Iterator

from hpctrain import __version__
from hpctrain.cli import COMMANDS, GROUPS
from hpctrain.options import Parser


def man_page(parsers: dict[str, Parser]) -> str:
    """The whole page: a subsection with the options of each command, by group."""
    lines = [
        f'.TH HPCTRAIN 1 "" "hpctrain {__version__}" "User Commands"',
        ".nh",  # no hyphenation
        ".ad l",  # ragged right margin
        ".SH NAME",
        r"hpctrain \- distributed PyTorch training on supercomputers",
        ".SH SYNOPSIS",
        r"\fBhpctrain\fR \fICOMMAND\fR [\fIOPTION\fR]...",
        ".PP",
        r"\fBhpctrain\fR \fICOMMAND\fR \fB\-\-help\fR",
        ".PP",
        r"\fBhpctrain \-\-version\fR",
    ]
    for group, title in GROUPS.items():
        lines += [".SH COMMANDS: " + escape(group).upper(), escape(title.removesuffix(":") + ".")]
        for name, (_, where, _) in COMMANDS.items():
            if where == group:
                lines += [f".SS {escape(name)}", *_command(name, parsers[name])]
    lines += [".SH EXIT STATUS"]
    for status, text in (
        ("0", "Success."),
        ("1", "An error, described on stderr."),
        ("2", "An error in the command line."),
    ):
        lines += [".TP", f".B {status}", text]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text as groff prints it: backslashes and hyphens, and a line that would begin like a request."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


def _command(name: str, parser: Parser) -> Iterator[str]:
    """Synopsis, description and options of a command."""
    positionals = [action for action in parser._actions if not action.option_strings]
    synopsis = " ".join(rf"\fI{escape(_values(action))}\fR" for action in positionals)
    yield rf"\fBhpctrain {escape(name)}\fR [\fIOPTION\fR]... {synopsis}".rstrip()
    yield from _paragraphs(parser.description or "")
    for action in parser._actions:
        values = _values(action)
        if action.option_strings:
            value = rf" \fI{escape(values)}\fR" if values else ""
            term = ", ".join(rf"\fB{escape(option)}\fR{value}" for option in action.option_strings)
        else:
            term = rf"\fI{escape(values)}\fR"
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield from (".TP", term, escape(" ".join(text.split())))
    yield from _paragraphs(parser.epilog or "")


def _values(action: argparse.Action) -> str:
    """The values that an argument takes, such as FILE, {auto,cpu,cuda} or [TEXT ...]."""
    if action.nargs == 0:
        return ""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = str(action.metavar or choices or action.dest.upper())
    return {
        "?": f"[{value}]",
        "*": f"[{value} ...]",
        "+": f"{value} [{value} ...]",
        "...": f"{value} ...",
    }.get(str(action.nargs), value)


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, which empty lines separate; indented ones are examples and keep their lines."""
    for paragraph in filter(str.strip, re.split(r"\n\s*\n", text)):
        if paragraph.lstrip("\n").startswith(" "):
            yield from (
                ".PP",
                ".nf",
                ".RS",
                *(escape(line.strip()) for line in paragraph.strip("\n").splitlines()),
                ".RE",
                ".fi",
            )
        else:
            yield from (".PP", escape(" ".join(paragraph.split())))
