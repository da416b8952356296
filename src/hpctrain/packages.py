"""hpctrain add: Python packages of your own on top of an image, without building another image.

Python reads this module at its start in an image (hpctrain-packages.pth), so it imports the standard library only.
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
    from hpctrain.cli import Parser
    from hpctrain.world import World

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

DESCRIPTION = """\
Install Python packages into a folder, on top of the image, with pip.

    export HPCTRAIN_PACKAGES=~/packages
    apptainer exec hpctrain-cpu.sif hpctrain add einops

The packages go into a subfolder of HPCTRAIN_PACKAGES named after the Python and the torch of the image, since packages
are built for these. The launch scripts mount it into the container. Python searches it last, so nothing in it replaces a
package of the image. A package that needs other versions of these is refused. To change the version of a package that you
have added, remove the folder and add your packages again.
"""


def folder() -> Path | None:
    """The subfolder of $HPCTRAIN_PACKAGES for this Python and this torch; None if the variable is not set."""
    root = os.environ.get("HPCTRAIN_PACKAGES")
    return Path(root, f"{PYTHON}-torch{version('torch')}") if root else None


def site_packages(folder: Path) -> Path:
    """The folder in which `pip install --prefix folder` puts modules."""
    return folder / "lib" / PYTHON / "site-packages"


def add_to_sys_path() -> None:
    """Append the user's packages to sys.path. Every Python of an image calls this at its start (hpctrain-packages.pth)."""
    if added := folder():
        site.addsitedir(str(site_packages(added)))


def problems() -> Iterator[str]:
    """Yield why the packages in HPCTRAIN_PACKAGES are not available in this image."""
    wanted = folder()
    if wanted and not wanted.is_dir():
        others = ", ".join(sorted(path.name for path in wanted.parent.glob("python*-torch*"))) or "nothing"
        yield (
            f"HPCTRAIN_PACKAGES={wanted.parent} holds {others}, not {wanted.name}: use hpctrain add in this image, or unset it"
        )


def parser() -> "Parser":
    """The arguments of `hpctrain add`, which are those of `pip install`."""
    from argparse import REMAINDER, RawDescriptionHelpFormatter

    from hpctrain.cli import Parser

    parser = Parser(prog="hpctrain add", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "arguments", nargs=REMAINDER, metavar="ARGUMENT",
        help="argument of pip install: a package name, a wheel, -r FILE, --require-hashes, ...",
    )  # fmt: skip
    return parser


def main(world: "World", arguments: list[str]) -> None:
    """Install packages into folder(). Raises HpctrainError if pip refuses."""
    from hpctrain.errors import HpctrainError, UsageError

    if arguments[:1] in (["-h"], ["--help"]):  # all other arguments are pip's
        parser().print_help()
        return
    target = folder()
    if not arguments or world.size > 1:
        raise UsageError("add takes the arguments of pip install, and runs in one process: hpctrain add einops")
    if not target:
        raise UsageError("add needs a folder: export HPCTRAIN_PACKAGES=FOLDER, here and before you submit jobs")
    if str(site_packages(target)) not in sys.path:
        raise UsageError(f"{sys.executable} does not search HPCTRAIN_PACKAGES, only an image's Python does: use pip install")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}: set HPCTRAIN_PACKAGES to a writable folder, and bind mount it") from None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{dist.name}=={dist.version}\n" for dist in distributions())
        constraints.flush()
        pip = [sys.executable, "-m", "pip", "install", "--no-warn-script-location", "--prefix", target]
        done = subprocess.run([*pip, "--constraint", constraints.name, *arguments])
    if done.returncode != 0:
        raise HpctrainError(f"pip could not install this into {target}, see above; the folder and the image are unchanged")
