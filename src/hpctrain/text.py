"""How texts, paths and numbers are shown."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

# Paths as absolute() has made them, and as the user wrote them.
_given: dict[str, str] = {}


def absolute(path: str | Path) -> Path:
    """The absolute path: a script may change its folder. as_given() shows it as it was written."""
    given = Path(path).expanduser()
    made = given.absolute()
    show_as(made, given)
    return made


def show_as(made: Path, given: str | Path) -> None:
    """Let as_given() show the path `made` as `given`."""
    if str(made) != str(given):
        _given[str(made)] = str(given)


def as_given(text: str) -> str:
    """The text with paths of absolute() as the user wrote them."""
    for made, path in _given.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(made)}", path.replace("\\", r"\\"), text)
    return text


def one_line(text: str) -> str:
    r"""The text with \n for a line break and so on: file names may contain terminal control characters.

    Paths are as_given().
    """
    text = as_given(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str) -> None:
    """Print a line of one_line() at once."""
    print(one_line(text), flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def reason(error: BaseException) -> str:
    """Why something failed, without the file, the host and the number that str() of an OSError adds."""
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())[:200]


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 node" or "2 nodes"."""
    return f"{number} {noun}" + "s" * (number != 1)


def table(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> str:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(one_line("  ".join(map(align, row, widths)).rstrip()) for row in rows)


def shorten(words: list[str]) -> str:
    """Join the words; if there are more than eight, the first six and the number of the others."""
    return ", ".join(words if len(words) <= 8 else [*words[:6], f"... and {len(words) - 6} more"])
