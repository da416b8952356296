"""Folders that would not keep what is written to them."""

import os
from pathlib import Path

from hpctrain.errors import HpctrainError


def refuse_throw_away(folder: Path) -> None:
    """Raise HpctrainError if a folder is in the container's memory (--containall).

    Apptainer has such folders in the tmpfs of the lists of users and groups that it writes.
    """
    if not os.environ.get("APPTAINER_CONTAINER", os.environ.get("SINGULARITY_CONTAINER")):
        return
    of_container = {Path(path).stat().st_dev for path in ("/etc/passwd", "/etc/group")}
    if folder.stat().st_dev in of_container - {Path("/").stat().st_dev}:
        raise HpctrainError(
            f"{folder} would be gone at the end, as it is in the memory of the container: "
            "add --bind with a folder of the host, and use --out to name one in it"
        )
