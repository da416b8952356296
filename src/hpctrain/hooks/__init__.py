"""What torch and Lightning call in every process, by the entry points in pyproject.toml."""

import os


def count_ranks() -> int:
    """How many ranks a launch script started; 1 without one.

    Also 1 for a value that is no number, which distributed.world.detect() refuses: `import torch` must work.
    """
    number = os.environ.get("HPCTRAIN_WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1
