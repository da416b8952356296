"""Distributed PyTorch training on supercomputers, from a container, the same everywhere."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hpctrain")
except PackageNotFoundError:  # run from a source tree that nobody installed
    __version__ = "0+unknown"
