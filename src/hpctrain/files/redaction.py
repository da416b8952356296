"""Secrets that users have in options and in the environment, and that files and logs must not have."""

import os
import re
from typing import Any

# Not max_new_tokens or a tokenizer, and not NCCL_IB_PKEY, which is a number of InfiniBand.
SECRET_NAME = re.compile(r"TOKEN(?!S|IZ)|(?<!P)KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.I)
HIDDEN = "***"
# A shorter value of a variable is left in texts: it may be a part of anything.
SHORTEST = 6


def hide_secrets(value: Any) -> Any:
    """A copy of a JSON value without secrets, which become "***".

    Secrets are: the values of keys and options (--NAME VALUE, NAME=VALUE) whose name is like TOKEN or
    PASSWORD, the values of environment variables of such names wherever they stand, and user:password@ in
    URLs.
    """
    values = {text for name, text in os.environ.items() if SECRET_NAME.search(name) and len(text) >= SHORTEST}
    return _hide(value, sorted(values, key=len, reverse=True))


def _hide(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if item and _is_secret(key) else _hide(item, secrets) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        words = [_hide(item, secrets) for item in value]
        for number, word in enumerate(value[:-1]):
            if isinstance(word, str) and word.startswith("--") and "=" not in word and _is_secret(word):
                words[number + 1] = HIDDEN
        return words
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    value = re.sub(r"(?<=://)[^/\s@]+@", f"{HIDDEN}@", value)
    return re.sub(
        r"(?<![\w-])((?:--)?[\w-]+)=(\S+)", lambda m: f"{m[1]}={HIDDEN}" if _is_secret(m[1]) else m[0], value
    )


def _is_secret(name: object) -> bool:
    return bool(SECRET_NAME.search(str(name)))
