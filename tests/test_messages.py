"""The messages of hpctrain are those of tests/messages.txt, for a diff to show what users see.

`.venv/bin/python -m tests.test_messages >tests/messages.txt` writes it. Other tests assert the class, the
exit status and the names in a message (file, option, rank), not its sentence.
"""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = REPOSITORY / "tests/messages.txt"
# What is called with a message, or with a place and a message.
SHOWN = {"HpctrainError", "UsageError", "DivergedError", "line_error", "ArgumentTypeError", "ValueError"}
SHOWN |= {"error", "print_error", "fail", "_end", "UnlabeledError", "kind"}


def template(node: ast.AST) -> str:
    """The text of an expression, with braces around what is computed; "" if it has no text of its own."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.JoinedStr(values=parts):
            return "".join(map(template, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return "".join(template(side) or f"{{{ast.unparse(side)}}}" for side in (left, right))
    return ""


def texts(node: ast.AST) -> Iterator[str]:
    """The templates in an expression, such as those of both branches of an `if`."""
    if text := template(node):
        yield text
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def python_messages(source: str) -> Iterator[str]:
    """The messages of a module, and the texts of the variables and functions that they name."""
    nodes = [*ast.walk(ast.parse(source))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    shown = [
        argument for call in calls if ast.unparse(call.func).split(".")[-1] in SHOWN for argument in call.args
    ]
    names = {name.id for node in shown for name in ast.walk(node) if isinstance(name, ast.Name)} | {"REFUSED"}
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            shown += [node.value] * any(ast.unparse(target) in names for target in targets)
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            shown += [child for child in ast.walk(node) if isinstance(child, ast.Return)]
        elif isinstance(node, ast.Yield):  # such as the problems of a node
            shown.append(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "explain_os_error":
            yield " (why): ".join(map(template, node.args[:2]))
    for node in shown:
        yield from texts(node)


def shell_messages(source: str) -> Iterator[str]:
    """What a script prints by die and say, and what else it prints that has "error:" or "warning:"."""
    code = re.sub(r"^ *#.*\n", "", source, flags=re.M).replace("\\\n", " ")
    for line in re.findall(r"\b(?:die|say|(?=.*(?:error|warning):)(?:echo|printf)) (.*)", code):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split, lexer.commenters = True, ""
        yield " ".join(itertools.takewhile(lambda word: word[:1] not in (*";&|<>",), lexer))


def messages() -> list[str]:
    """Each message after the file that has it, of several files after the first."""
    found = {
        " ".join(text.split()): path.relative_to(REPOSITORY)
        for pattern, find in (("src/**/*.py", python_messages), ("launch/**/*.sh", shell_messages))
        for path in sorted(REPOSITORY.glob(pattern), reverse=True)
        for text in find(path.read_text())
    }
    return sorted(f"{path}: {text}\n" for text, path in found.items() if re.search("[a-z].* .*[a-z]", text))


def test_the_list_of_messages_is_up_to_date():
    command = ".venv/bin/python -m tests.test_messages >tests/messages.txt"
    if LIST.read_text() != "".join(messages()):
        pytest.fail(f"tests/messages.txt is out of date: {command}, and read the diff", pytrace=False)


if __name__ == "__main__":
    print(*messages(), sep="", end="")
