"""docs/guides/troubleshooting.md quotes messages of hpctrain as they are in the sources."""

import ast
import re

import pytest
from slurm_cluster import REPOSITORY

PAGE = (REPOSITORY / "docs/guides/troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M))
MESSAGES = {
    title: [
        message
        for cell in re.findall(r"^\| (`.*?) \| ", text, re.M)
        for message in re.findall(r"`([^`]+)`", cell)
    ]
    for title, text in SECTIONS.items()
}
OURS = [message for title, messages in MESSAGES.items() if "hpctrain" in title for message in messages]


def python_texts():
    """The texts of src/hpctrain: neighboring literals as one, and "..." for each value in them."""
    for path in (REPOSITORY / "src/hpctrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)


def shell_texts():
    """The sources of launch/, in which a message may have several arguments on several lines."""
    for path in (REPOSITORY / "launch").rglob("*.sh"):
        yield re.sub(r"""["'] *\\\n *["']""", " ", path.read_text())


TEXTS = "\n".join([*python_texts(), *shell_texts()])


def is_in_the_sources(message):
    """Whether all of a message is in one line of the sources, with anything in place of "..."."""
    parts = [re.escape(part.strip(" ")) for part in message.split("...")]
    return re.search(".*?".join(parts), TEXTS) is not None


def test_there_are_messages_of_all_kinds():
    assert len(OURS) >= 30 and sum(map(len, MESSAGES.values())) >= 45
    assert not is_in_the_sources("no such message in hpctrain")


@pytest.mark.parametrize("message", OURS)
def test_a_message_of_hpctrain_exists(message):
    assert is_in_the_sources(message)
