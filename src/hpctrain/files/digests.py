"""SHA-256 of weights, and of the files in a folder: `sha256sum --check SHA256SUMS` reads these as well.

Neither safetensors nor numpy notices a flipped bit. A folder without SHA256SUMS is not checked.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy
import torch

from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files import atomic
from hpctrain.files.plain import MAX_BYTES, open_plain, read_text
from hpctrain.files.trust import is_below

NAME = "SHA256SUMS"
# A user may edit a model card, and name the new place of the model that an adapter is for.
NOT_CHECKED = (NAME, "README.md", "adapter_config.json")


def write_digests(folder: Path) -> None:
    """Write SHA256SUMS for the files of a folder, all at once. Raises OSError."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    lines = [f"{file_sha256(folder / name)}  {name}\n" for name in names if name not in NOT_CHECKED]
    atomic.write_text(folder / NAME, "".join(lines))


def check_digests(folder: Path) -> None:
    """Raise HpctrainError that names the first file with another digest than in SHA256SUMS, if any."""
    sums = folder / NAME
    with explain_os_error(f"{folder}: cannot be read", "copy it or make it again"):
        lines = read_text(sums, limit=MAX_BYTES, errors="replace").splitlines() if sums.exists() else []
        for line in lines:
            digest, between, name = line[:64], line[64:66], line[66:]
            # *: --binary
            known = between in ("  ", " *") and is_below(name) and (folder / name).is_file()
            if not known or file_sha256(folder / name) != digest:
                raise HpctrainError(
                    f"{folder / name}: not the file that was written, according to {NAME}: "
                    f"copy it or make it again, or remove {NAME} if you have changed it"
                )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as sha256sum prints it."""
    return _hash_file(path, hashlib.sha256())


def git_blob(path: Path) -> str:
    """The id of a file in a git repository, as git hash-object prints it: SHA-1 over its size and bytes."""
    return _hash_file(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size))


def _hash_file(path: Path, digest: "hashlib._Hash") -> str:
    with open_plain(path) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def arrays_sha256(*arrays: numpy.ndarray) -> str:
    """SHA-256 over the types, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(numpy.ascontiguousarray(array).data)
    return digest.hexdigest()


def items_sha256(what: str, *parts: Any) -> str:
    """SHA-256 over values, and over the items of lists, of `what`: their repr() has all of their content."""
    digest = hashlib.sha256(what.encode())
    for part in parts:
        # One item at a time: a single repr() of 150,000 texts would take as much memory as the texts.
        for item in part if isinstance(part, list) else [part]:
            digest.update(repr(item).encode(errors="surrogatepass") + b"\0")
        digest.update(b"\1")
    return digest.hexdigest()


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
