"""Secrets that users have in options and in the environment, and that files and logs must not have."""

import os
import re
from pathlib import Path
from typing import Any

NAMES = Path(__file__).with_name("secret_names.txt").read_text(encoding="utf-8")
RULES = [line.split() for line in NAMES.splitlines() if not line.startswith("#")]
HIDDEN = "***"
# A shorter value of a variable is left in texts: it may be a part of anything.
MIN_LENGTH = 6


def hide_secrets(value: Any) -> Any:
    """A copy of a JSON value without secrets, which become "***".

    Secrets are: the values of keys and options (--NAME VALUE, NAME=VALUE) whose name is like TOKEN or
    PASSWORD, values of such environment variables wherever they stand, and user:password@ in URLs.
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
        for number, word in enumerate(value[:-1]):
            if isinstance(word, str) and word.startswith("--") and "=" not in word and is_secret(word):
                words[number + 1] = HIDDEN
        return words
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    value = re.sub(r"(?<=://)[^/\s@]+@", f"{HIDDEN}@", value)
    return re.sub(
        r"(?<![\w-])((?:--)?[\w-]+)=(\S+)", lambda m: f"{m[1]}={HIDDEN}" if is_secret(m[1]) else m[0], value
    )


def is_secret(name: str) -> bool:
    """Whether a variable, option or key of this name has a secret as its value."""
    name = name.upper().replace("-", "_")
    for rule, word in RULES:
        if rule == "ignore":
            name = name.replace(word, ".")
        elif word in name:
            return True
    return False
