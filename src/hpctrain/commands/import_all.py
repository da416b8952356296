"""A program for the Python of an image: import what a folder adds, then the packages that the image is for.

It prints a line for each name, and what failed. Some packages import parts only when these are used, so two
such parts are named here.
"""

import importlib
import importlib.metadata
import os
import re
import site
import sys

# pip is a program, and importing it changes setuptools. The others are no packages, but wheels may have them.
SKIPPED = {"pip", "test", "tests", "docs", "examples", "benchmarks"}


def find_modules(path: list[str], wanted: set[str] | None = None) -> dict[str, str]:
    """The modules in these folders, sorted, and the package of each; of the packages `wanted`, if given."""
    found = {}
    for distribution in importlib.metadata.distributions(path=path):
        if wanted is not None and distribution.name.lower() not in wanted:
            continue
        for file in distribution.files or []:
            name = file.parts[0] if len(file.parts) > 1 else file.name.partition(".")[0]
            if file.suffix in (".py", ".so") and name.isidentifier() and name[0] != "_":
                found[name] = distribution.name
    return {name: found[name] for name in sorted(found.keys() - SKIPPED)}


def main(added: str) -> None:
    """Import one module after the other, up to the first that fails."""
    site.addsitedir(added)
    required = [line.replace('"', "'") for line in importlib.metadata.requires("hpctrain") or []]
    wanted = {re.split(r"[^\w.-]", line)[0].lower() for line in required if "extra == 'dev'" not in line}
    wanted |= {"horovod", "hpctrain", "torchaudio", "torchmetrics", "torchvision"}
    modules = find_modules([path for path in sys.path if path != added], wanted)
    if "transformers" in modules:
        modules |= dict.fromkeys(
            ("transformers.models.bert.modeling_bert", "transformers.trainer"), "transformers"
        )
    for name, package in (find_modules([added]) | modules).items():
        print(f"importing {name}", flush=True)
        try:
            importlib.import_module(name)
        except BaseException as error:
            text = " ".join(str(error).split())
            print(f"failed {package}: import {name}: {type(error).__name__}: {text}"[:400], flush=True)
            break


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # what these packages do at the end of Python is not their import
