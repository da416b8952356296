"""Folders that would not keep what is written to them."""

import os
from pathlib import Path

from hpctrain.errors import HpctrainError


def refuse_throw_away(folder: Path) -> None:
    """Raise HpctrainError if the folder is in the memory of an Apptainer container, as with --containall.

    Apptainer has such folders in the same tmpfs as the lists of users and groups that it writes for the
    container.
    """
    if not os.environ.get("APPTAINER_CONTAINER", os.environ.get("SINGULARITY_CONTAINER")):
        return
    of_container = {Path(path).stat().st_dev for path in ("/etc/passwd", "/etc/group")}
    if folder.stat().st_dev in of_container - {Path("/").stat().st_dev}:
        raise HpctrainError(
            f"{folder} would be gone at the end, as it is in the memory of the container: "
            "add --bind with a folder of the host, and use --out to name one in it"
        )
