"""What torch and Lightning call in every process, by the entry points in pyproject.toml."""

import os
from pathlib import Path


def count_ranks() -> int:
    """How many ranks a launch script started; 1 without one.

    Also 1 for a value that is no number, which distributed.world.detect() refuses: `import torch` must work.
    """
    number = os.environ.get("HPCTRAIN_WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1


def is_child_of_rank() -> bool:
    """Whether a rank, or a child of it, has started this process, as for a trial of a search."""
    folder = Path(f"/proc/{os.getppid()}")
    try:
        while folder.name != "0":
            is_python = "python" in (folder / "exe").readlink().name
            if is_python and b"\0RANK=" in b"\0" + (folder / "environ").read_bytes():
                return True
            folder = folder.with_name((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # of another user
        pass
    return False
