"""The digests of the files in a folder, in SHA256SUMS: `sha256sum --check SHA256SUMS` reads it as well.

Neither safetensors nor numpy notices a flipped bit in its data. A folder without SHA256SUMS, such as one from elsewhere, is not
checked.
"""

import hashlib
from pathlib import Path

from hpctrain.errors import HpctrainError

NAME = "SHA256SUMS"
NOT_CHECKED = (NAME, "README.md")  # a user may edit a model card


def write_digests(folder: Path) -> None:
    """Write SHA256SUMS for the files of a folder that is not in use yet. Raises OSError."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    lines = [f"{_digest(folder / name)}  {name}\n" for name in names if name not in NOT_CHECKED]
    (folder / NAME).write_text("".join(lines), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """Raise HpctrainError that names the first file that is not as SHA256SUMS says. Nothing is checked without that file."""
    sums = folder / NAME
    try:
        lines = sums.read_bytes().decode(errors="replace").splitlines() if sums.exists() else []
        for line in lines:
            digest, name = line[:64], line[66:]  # between them two blanks, or with sha256sum --binary a blank and an asterisk
            if ".." in Path(name).parts or not (folder / name).is_file() or _digest(folder / name) != digest:
                raise HpctrainError(
                    f"{folder / name}: not the file that was written, according to {NAME}: copy it or make it again, or remove "
                    f"{NAME} if you have changed it"
                )
    except OSError as error:
        raise HpctrainError(f"{folder}: cannot be read ({error.strerror}): copy it or make it again") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
