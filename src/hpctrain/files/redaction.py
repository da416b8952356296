"""Secrets that users have in options and in the environment, and that files and logs must not have.

launch/lib/redaction.awk does the same for the lines of the launch scripts, with the same secret_names.txt.
"""

import os
import re
from pathlib import Path
from typing import Any

NAMES = Path(__file__).with_name("secret_names.txt").read_text(encoding="utf-8")
RULES = [line.split() for line in NAMES.splitlines() if not line.startswith("#")]
HIDDEN = "***"
# A shorter value of a variable is left in texts: it may be a part of anything.
MIN_LENGTH = 6
OPTION = re.compile(r"(?<![\w-])(?:[\w-]+=|--[\w-]+\s+)")
VALUE = re.compile(r"(?:\\.|[^\s\\])+", re.DOTALL)  # a word, in which the shell's \ may quote spaces


def hide_secrets(value: Any) -> Any:
    """A copy of a JSON value without secrets, which become "***".

    Secrets are: the values of keys and options (--NAME VALUE, NAME=VALUE) whose name is like TOKEN or
    PASSWORD, values of such environment variables wherever they stand, and user:password@ in URLs. A password
    may have / and @, so that a URL with a port is hidden up to a later @.
    """
    values = {text for name, text in os.environ.items() if is_secret(name) and len(text) >= MIN_LENGTH}
    return _hide(value, sorted(values, key=len, reverse=True))


def _hide(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if item and is_secret(str(key)) else _hide(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        words = [_hide(item, secrets) for item in value]
        for number, word in enumerate(value):
            name, equals, _ = word.partition("=") if isinstance(word, str) else ("", "", "")
            if not is_secret(name) or not re.fullmatch(r"[\w-]+", name):
                continue
            if equals:
                words[number] = f"{name}={HIDDEN}"  # also where the value has spaces
            elif name.startswith("--") and number + 1 < len(words):
                words[number + 1] = HIDDEN
        return words
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    value = re.sub(r"(?<=://)([^\s/@:]*:\S*|[^\s/@]+)@", f"{HIDDEN}@", value)
    done, end = "", 0
    for option in OPTION.finditer(value):
        if option.start() >= end and is_secret(option[0]) and (text := VALUE.match(value, option.end())):
            done, end = done + value[end : option.end()] + HIDDEN, text.end()
    return done + value[end:]


def is_secret(name: str) -> bool:
    """Whether a variable, option or key of this name has a secret as its value."""
    name = name.upper().replace("-", "_")
    for rule, word in RULES:
        if rule == "ignore":
            name = name.replace(word, ".")
        elif word in name:
            return True
    return False
