"""hpctrain add: Python packages of your own on top of an image, without building another image.

Python reads this at its start in an image (hpctrain-packages.pth): import the standard library and hpctrain.
"""

import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.distributed.python import SAFE_PYTHON

if TYPE_CHECKING:
    from hpctrain.distributed.world import World
    from hpctrain.parser import Parser

PROGRESS_EVERY = 5.0  # s
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

DESCRIPTION = """\
Install Python packages into a folder, on top of the image, with uv.

    export HPCTRAIN_PACKAGES=~/packages
    apptainer exec hpctrain-cpu.sif hpctrain add einops

The packages go into a subfolder of HPCTRAIN_PACKAGES named after the Python and the torch of the image, since
packages are built for these. The launch scripts mount it into the container. Python searches it last, so
nothing in it replaces a package of the image. These packages are refused: one that needs other versions of
the image's packages, one that cannot be imported, and one with which the image's own packages cannot be
imported any more. To change the version of a package that you have added, remove the folder and add your
packages again.
"""


def folder() -> Path | None:
    """The subfolder of $HPCTRAIN_PACKAGES for this Python and this torch; None if the variable is not set."""
    root = os.environ.get("HPCTRAIN_PACKAGES")
    return Path(root, f"{PYTHON}-torch{version('torch')}") if root else None


def site_packages(folder: Path) -> Path:
    """The folder in which `pip install --prefix folder` puts modules."""
    return folder / "lib" / PYTHON / "site-packages"


def add_to_sys_path() -> None:
    """Append the user's packages to sys.path, in every Python of an image (hpctrain-packages.pth)."""
    if added := folder():
        site.addsitedir(str(site_packages(added)))


def problems() -> Iterator[str]:
    """Yield why the packages in HPCTRAIN_PACKAGES are not available in this image."""
    wanted = folder()
    if wanted and not wanted.is_dir():
        others = ", ".join(sorted(path.name for path in wanted.parent.glob("python*-torch*"))) or "nothing"
        yield (
            f"HPCTRAIN_PACKAGES={wanted.parent} holds {others}, not {wanted.name}: "
            "use hpctrain add in this image, or unset it"
        )


def import_problems() -> Iterator[str]:
    """Yield which package cannot be imported, first of HPCTRAIN_PACKAGES, then of the image."""
    wanted = folder()
    if wanted and wanted.is_dir() and (failure := failed_import(site_packages(wanted))):
        yield (
            f"with the packages in {wanted}: {failure}: "
            "remove the one that is wrong, or unset HPCTRAIN_PACKAGES"
        )


def failed_import(added: Path, progress: bool = False) -> str | None:
    """ "PACKAGE: ERROR" of the first import that fails, the folder's packages first; None if all work."""
    command = [*SAFE_PYTHON, "-W", "ignore", "-m", "hpctrain.commands.import_all", str(added)]
    last, printed = "importing nothing", time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            if not line.startswith(("importing ", "failed ")):
                continue
            last = line.rstrip()
            if progress and time.monotonic() - printed > PROGRESS_EVERY:
                printed = time.monotonic()
                print(f"hpctrain: {last}", flush=True)
    if last.startswith("failed "):
        return last.removeprefix("failed ")
    return f"{last} ended Python with status {process.returncode}" if process.returncode != 0 else None


def parser() -> "Parser":
    from argparse import REMAINDER, RawDescriptionHelpFormatter

    from hpctrain.parser import Parser

    parser = Parser(prog="hpctrain add", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "arguments",
        nargs=REMAINDER,
        metavar="ARGUMENT",
        help="argument of uv pip install: a package name, a wheel, -r FILE, --require-hashes, "
        "--index-url URL, ...",
    )
    return parser


def main(world: "World", arguments: list[str]) -> None:
    """Install packages into folder(). Nothing changes if uv refuses or an import fails (HpctrainError)."""
    from hpctrain.errors import UsageError

    if arguments[:1] in (["-h"], ["--help"]):  # all other arguments are uv's
        parser().print_help()
        return
    target = folder()
    if not arguments or world.size > 1:
        raise UsageError(
            "add takes the arguments of uv pip install, and runs in one process: hpctrain add einops"
        )
    if not target:
        raise UsageError(
            "add needs a folder: export HPCTRAIN_PACKAGES=FOLDER, here and before you submit jobs"
        )
    if {",", ":"} & set(os.path.realpath(target)):  # PYTHONPATH cannot name it, and no container can mount it
        raise UsageError(
            f"HPCTRAIN_PACKAGES={target.parent}: give a folder whose path holds no comma or colon"
        )
    if str(site_packages(target)) not in sys.path:
        raise UsageError(
            f"{sys.executable} does not search HPCTRAIN_PACKAGES, as an image's Python does: use pip install"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=".add.", dir=target.parent)
    except OSError as error:
        raise UsageError(
            f"{target}: {error.strerror}: set HPCTRAIN_PACKAGES to a writable folder, and bind mount it"
        ) from None
    with work as name:
        install(arguments, Path(name), target)


def install(arguments: list[str], work: Path, target: Path) -> None:
    """Install packages into `work`, an empty folder of the same file system, then move them to `target`."""
    from hpctrain.errors import HpctrainError

    prefix = work / "prefix"
    there = list({dist.name: dist for dist in distributions() if dist.name}.values())
    _describe(there, site_packages(prefix))
    constraints = work / "constraints.txt"
    constraints.write_text("".join(f"{dist.name}=={dist.version}\n" for dist in there))
    uv = [*SAFE_PYTHON, "-m", "uv", "--no-config", "pip", "install", "--python", sys.executable]
    uv += ["--compile-bytecode"]
    uv += ["--prefix", str(prefix), "--constraint", str(constraints), *arguments]
    # With a cache on the same file system, uv moves files instead of copying them.
    done = subprocess.run(uv, env=os.environ | _user_config() | {"UV_CACHE_DIR": str(work / "cache")})
    if done.returncode != 0:
        raise HpctrainError(
            f"uv could not install this into {target}, see above; the folder and the image are unchanged"
        )
    for dist in there:
        shutil.rmtree(site_packages(prefix) / _info(dist))
    added = [dist.name for dist in distributions(path=[str(site_packages(prefix))])]
    if replaced := sorted({dist.name for dist in there} & set(added)):
        raise HpctrainError(
            f"{', '.join(replaced)} would be installed a second time; the folder and the image are unchanged"
        )
    print("hpctrain: importing the new packages, then those of the image", flush=True)
    if failure := failed_import(site_packages(prefix), progress=True):
        raise HpctrainError(f"{failure}; the folder and the image are unchanged")
    _move_files(prefix, target)
    print(
        f"hpctrain: added {', '.join(sorted(added)) or 'nothing, as all is there'}; in {target}", flush=True
    )


def _user_config() -> dict[str, str]:
    """UV_CONFIG_FILE with the user's own uv.toml, which --no-config leaves out like those of other users.

    uv would otherwise obey uv.toml and pyproject.toml of the current folder and of its parents, and an index
    named there installs any code.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    own = Path(home, "uv", "uv.toml")
    return {"UV_CONFIG_FILE": str(own)} if own.exists() and "UV_CONFIG_FILE" not in os.environ else {}


def _info(distribution: Distribution) -> str:
    """The name of the folder in site-packages that describes a package."""
    return f"{distribution.name.replace('-', '_')}-{distribution.version}.dist-info"


def _describe(there: list[Distribution], folder: Path) -> None:
    """Write what uv reads of installed packages, so that uv neither installs nor replaces them."""
    for dist in there:
        info = folder / _info(dist)
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            dist.read_text("METADATA")
            or f"Metadata-Version: 2.1\nName: {dist.name}\nVersion: {dist.version}\n"
        )
        (info / "RECORD").touch()


def _move_files(source: Path, target: Path) -> None:
    """Move all files into another folder, the *.dist-info last: a package without one is not installed."""
    files = [path for path in source.rglob("*") if path.is_symlink() or not path.is_dir()]
    for path in sorted(files, key=lambda path: path.parent.suffix == ".dist-info"):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        path.replace(to)
