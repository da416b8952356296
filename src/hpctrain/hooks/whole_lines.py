"""Lets print() of a rank write whole lines, at once.

torch calls write_whole_lines() by its entry point (see pyproject.toml), in every script that imports it.
"""

import io
import os
import sys


def write_whole_lines() -> None:
    """For `import torch`: the launch scripts set PYTHONUNBUFFERED, so what a rank has printed is in the log.

    Python then writes each word of print() by itself, and lines of ranks with a common output are mixed.
    """
    if "HPCTRAIN_WORLD_SIZE" in os.environ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=False, line_buffering=True)
