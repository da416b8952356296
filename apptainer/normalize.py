#!/usr/bin/env python3
"""normalize.py FILE.sif: make the header of a SIF a function of its content, so that two builds are the same file.

Apptainer writes the time, the user and a random UUID there. The times become $SOURCE_DATE_EPOCH (seconds), the user root, the
UUID a hash of all the rest. Only before signing: a signature holds these.

The layout is that of SIF version 1, as in github.com/apptainer/sif, pkg/sif/sif.go: a header of 128 bytes, and descriptors.
"""

import hashlib
import os
import struct
import sys
import uuid
from pathlib import Path

MAGIC, MAGIC_AT = b"SIF_MAGIC", 32
UUID_AT = 48
CREATED_AT = 64  # and modified, 8 bytes each
DESCRIPTORS_AT = 88  # their free number, total number and where they begin: after the UUID and the times
DESCRIPTOR = 585  # bytes of one
USED_AT, TIMES_AT, OWNER_AT = 4, 41, 57  # in a descriptor


def normalize(path: Path, epoch: int) -> None:
    """Rewrite the header of `path` in place. Raises ValueError where it is not a SIF."""
    with path.open("r+b") as file:
        header = file.read(128)
        if header[MAGIC_AT : MAGIC_AT + len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} is not a SIF")
        total, offset = struct.unpack_from("<qq", header, DESCRIPTORS_AT)
        times = struct.pack("<qq", epoch, epoch)
        file.seek(CREATED_AT)
        file.write(times)
        for at in range(offset, offset + total * DESCRIPTOR, DESCRIPTOR):
            file.seek(at)
            if file.read(DESCRIPTOR)[USED_AT]:
                file.seek(at + TIMES_AT)
                file.write(times)
                file.seek(at + OWNER_AT)
                file.write(struct.pack("<qq", 0, 0))
        file.seek(UUID_AT)
        file.write(bytes(16))
        file.seek(0)
        digest = hashlib.sha256()
        for block in iter(lambda: file.read(1 << 20), b""):  # not file_digest(): the Python of a login node may be old
            digest.update(block)
        file.seek(UUID_AT)
        file.write(uuid.UUID(bytes=digest.digest()[:16], version=5).bytes)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    try:
        normalize(Path(sys.argv[1]), int(os.environ["SOURCE_DATE_EPOCH"]))
    except (OSError, ValueError, KeyError, struct.error) as error:
        sys.exit(f"normalize.py: {error}: give a SIF, and SOURCE_DATE_EPOCH")
