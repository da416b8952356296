#!/usr/bin/env python3
"""sif.py FILE.sif: rewrite the header of a SIF as a function of its content.

Then two builds give the same file. Apptainer writes the time, the user and a random UUID into the header. The
times become $SOURCE_DATE_EPOCH (seconds), the user becomes root, and the UUID a hash of the rest of the file.
Run it before signing: a signature covers these fields.

The layout is SIF version 1, as in github.com/apptainer/sif, pkg/sif/sif.go: a header of 128 bytes, then
descriptors.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAGIC, MAGIC_AT = b"SIF_MAGIC", 32
UUID_AT = 48
CREATED_AT = 64  # created, then modified: 8 bytes each
FREE_AT = 80  # number of free descriptors, number of all descriptors, offset of the first: 8 bytes each
DATA_SIZE_AT = 120
DESCRIPTOR = 585  # bytes per descriptor
TIMES_AT, OWNER_AT, NAME_AT = 41, 57, 73  # offsets in a descriptor
PARTITION, SIGNATURE = 0x4004, 0x4005  # kinds of descriptors


class Part(NamedTuple):
    """A descriptor in use: its offset in the file (`at`), and the range of bytes that it describes."""

    at: int
    kind: int
    offset: int
    size: int
    padded: int
    name: str


def is_sif(path: Path) -> bool:
    """Whether the header of a file has the magic bytes of a SIF. Raises OSError."""
    with path.open("rb") as file:
        return file.read(128)[MAGIC_AT:].startswith(MAGIC)


def parts(file: BinaryIO) -> Iterator[Part]:
    """Iterate over the descriptors in use.

    Raises ValueError if the file is not a SIF, or its header is damaged.
    """
    file.seek(0)
    header = file.read(128)
    if header[MAGIC_AT : MAGIC_AT + len(MAGIC)] != MAGIC:
        raise ValueError(f"{file.name} is not a SIF")
    total, begin = struct.unpack_from("<qq", header.ljust(128, b"\0"), FREE_AT + 8)
    data = begin + total * DESCRIPTOR
    if not (0 < total <= 1000 and 128 <= begin <= 1 << 20):
        raise ValueError(f"the header of {file.name} is damaged")
    for at in range(begin, data, DESCRIPTOR):
        file.seek(at)
        descriptor = file.read(DESCRIPTOR).ljust(DESCRIPTOR, b"\0")
        kind, used, *_, offset, size, padded = struct.unpack_from("<i?IIIqqq", descriptor)
        if used:
            if not (data <= offset and 0 <= size <= padded):
                raise ValueError(f"the header of {file.name} is damaged")
            name = descriptor[NAME_AT : NAME_AT + 128].rstrip(b"\0").decode(errors="replace")
            yield Part(at, kind, offset, size, padded, name)


def labels(path: Path) -> dict[str, str]:
    """The labels that Apptainer wrote into a SIF; an empty dict if there are none that can be read."""
    try:
        with path.open("rb") as file:
            for part in parts(file):
                if part.name == "inspect-metadata.json":
                    file.seek(part.offset)
                    return json.loads(file.read(part.size))["data"]["attributes"]["labels"]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        pass
    return {}


def squashfs(path: Path) -> int:
    """The offset of the file system in a SIF, in bytes. Raises ValueError if there is none."""
    with path.open("rb") as file:
        for part in parts(file):
            if part.kind == PARTITION:
                return part.offset
    raise ValueError(f"{path} contains no file system")


def sha256(file: BinaryIO) -> hashlib._Hash:
    """The hash of a file from its current position.

    Not hashlib.file_digest(): a login node may have a Python before 3.11.
    """
    digest = hashlib.sha256()
    for block in iter(lambda: file.read(1 << 20), b""):
        digest.update(block)
    return digest


def digest_of(content: bytes) -> str:
    """The SHA-256 of `content`, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def unsigned_sha256(path: Path) -> tuple[str, int]:
    """The SHA-256 that a normalized SIF had before it was signed (hexadecimal), and its number of signatures.

    Signing appends each signature, uses a free descriptor for it, and changes two sizes and the modification
    time in the header. The rest is hashed unchanged. Raises ValueError if `path` is not a SIF.
    """
    with path.open("rb") as file:
        everything = list(parts(file))
        signatures = [part for part in everything if part.kind == SIGNATURE]
        if not signatures:
            file.seek(0)
            return sha256(file).hexdigest(), 0
        end = max((part.offset + part.size for part in everything if part.kind != SIGNATURE), default=0)
        file.seek(0)
        head = bytearray(file.read(min(part.offset for part in everything)))
        head[CREATED_AT + 8 : CREATED_AT + 16] = head[CREATED_AT : CREATED_AT + 8]
        (free,), (data,) = (
            struct.unpack_from("<q", head, FREE_AT),
            struct.unpack_from("<q", head, DATA_SIZE_AT),
        )
        struct.pack_into("<q", head, FREE_AT, free + len(signatures))
        struct.pack_into("<q", head, DATA_SIZE_AT, data - sum(part.padded for part in signatures))
        for part in signatures:
            head[part.at : part.at + DESCRIPTOR] = bytes(DESCRIPTOR)
        digest = hashlib.sha256(head)
        for at in range(len(head), end, 1 << 20):
            digest.update(file.read(min(1 << 20, end - at)))
        return digest.hexdigest(), len(signatures)


def normalize(path: Path, epoch: int) -> None:
    """Rewrite the header of `path` in place, with `epoch` (seconds) as its times.

    Raises ValueError if it is not a SIF.
    """
    times = struct.pack("<qq", epoch, epoch)
    with path.open("r+b") as file:
        for part in list(parts(file)):
            file.seek(part.at + TIMES_AT)
            file.write(times)
            file.seek(part.at + OWNER_AT)
            file.write(struct.pack("<qq", 0, 0))
        file.seek(CREATED_AT)
        file.write(times)
        file.seek(UUID_AT)
        file.write(bytes(16))
        file.seek(0)
        digest = sha256(file).digest()
        file.seek(UUID_AT)
        file.write(uuid.UUID(bytes=digest[:16], version=5).bytes)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    try:
        normalize(Path(sys.argv[1]), int(os.environ["SOURCE_DATE_EPOCH"]))
    except (OSError, ValueError, KeyError, struct.error) as error:
        sys.exit(f"sif.py: {error}; give a SIF, and set SOURCE_DATE_EPOCH")
