"""Packages of your own on top of an image, without building another.

    export HPCTRAIN_PACKAGES=~/packages
    apptainer exec hpctrain-cpu.sif hpctrain add einops

usage: hpctrain add ARGUMENT...     what `pip install` takes: names, wheels, -r FILE, --require-hashes, ...

They go into a folder of HPCTRAIN_PACKAGES that is named by the Python and the torch of the image, since packages are built
for these; the launch scripts show it in the image. Python looks there last, so nothing in it takes the place of what the image
has, and what is there stays as it is: a package that needs other versions is refused. For other versions of what you
have added, remove the folder and add anew.
"""

import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.world import World

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def folder() -> Path | None:
    """The part of $HPCTRAIN_PACKAGES for this Python and this torch; None where that is not set."""
    root = os.environ.get("HPCTRAIN_PACKAGES")
    return Path(root, f"{PYTHON}-torch{version('torch')}") if root else None


def site_packages(folder: Path) -> Path:
    """Where pip puts modules below a prefix."""
    return folder / "lib" / PYTHON / "site-packages"


def show() -> None:
    """Put the user's packages at the end of sys.path; each Python of an image begins with this (hpctrain-packages.pth)."""
    if mine := folder():
        site.addsitedir(str(site_packages(mine)))


def problems() -> Iterator[str]:
    """Why the packages that HPCTRAIN_PACKAGES should bring are not there."""
    mine = folder()
    if mine and not mine.is_dir():
        others = ", ".join(sorted(path.name for path in mine.parent.glob("python*-torch*"))) or "nothing"
        yield f"HPCTRAIN_PACKAGES={mine.parent} holds {others}, and not {mine.name}: hpctrain add in this image, or unset it"


def main(world: "World", arguments: list[str]) -> None:
    """Install packages into `folder()` by pip; raises HpctrainError where it refuses."""
    from hpctrain.world import HpctrainError, UsageError

    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    mine = folder()
    if not arguments or world.size > 1:
        raise UsageError("add takes what pip install takes, in one process: hpctrain add einops")
    if not mine:
        raise UsageError("add needs a folder: export HPCTRAIN_PACKAGES=FOLDER, here and before you submit")
    if str(site_packages(mine)) not in sys.path:
        raise UsageError(f"{sys.executable} does not look into HPCTRAIN_PACKAGES, an image's does: pip install as usual")
    try:
        mine.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{mine}: {error.strerror}: name a folder that can be written here, or show it here (--bind)") from None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{dist.name}=={dist.version}\n" for dist in distributions())
        constraints.flush()
        pip = [sys.executable, "-m", "pip", "install", "--no-warn-script-location", "--prefix", mine]
        done = subprocess.run([*pip, "--constraint", constraints.name, *arguments])
    if done.returncode != 0:
        raise HpctrainError(f"pip added nothing to {mine}, for the reason above: what is there, and in the image, stays as it is")
