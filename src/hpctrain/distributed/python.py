"""The Python of a rank: a command that imports no code of other users, and packages that hide others."""

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hpctrain.text import shorten

# This Python without the current folder on sys.path; files/trust.py says why.
SAFE_PYTHON = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]


def drop_current_folder() -> None:
    """Take the current folder from sys.path and PYTHONPATH.

    An empty entry of PYTHONPATH (":/mine") means the current folder, also to a Python with PYTHONSAFEPATH.
    """
    entries = os.environ.get("PYTHONPATH", "").split(":")
    named = [entry for entry in entries if entry]
    if len(named) < len(entries) > 1:
        os.environ["PYTHONPATH"] = ":".join(named)
        here = {"", str(Path.cwd())} - {*named}
        sys.path[:] = [entry for entry in sys.path if entry not in here]


def shadowed_packages() -> Iterator[str]:
    """Folders before site-packages on sys.path that hide one of its packages."""
    own = [Path(entry).resolve() for entry in site.getsitepackages()]
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    # Without hpctrain itself, which may run from a checkout.
    installed = set().union(sys.stdlib_module_names, *map(importable_names, own)) - {"hpctrain"}
    for entry in sys.path:
        folder = Path(entry).resolve()
        if folder in own:
            return
        if folder in standard or folder.parent in standard:
            continue
        if hidden := sorted(importable_names(folder) & installed):
            if folder == Path(site.getusersitepackages()).resolve():
                advice = "export PYTHONNOUSERSITE=1"
            elif entry in os.environ.get("PYTHONPATH", "").split(":"):
                advice = "remove that folder from PYTHONPATH, or the package from the folder"
            else:
                advice = "start from another folder, or rename the package"
            yield f"{folder} hides {shorten(hidden)} of {sys.prefix}: {advice}"


def importable_names(folder: Path) -> set[str]:
    """The names of the modules and packages in a folder, without namespace packages, which hide no other."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return set()
    return {
        entry.name.partition(".")[0]
        for entry in entries
        if entry.suffix in (".py", ".so") or (entry / "__init__.py").exists()
    }
