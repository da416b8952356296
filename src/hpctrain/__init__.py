"""Distributed PyTorch training from containers on supercomputers."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hpctrain")
except PackageNotFoundError:  # run from a source tree without an installation
    __version__ = "0+unknown"
