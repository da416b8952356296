"""Files that somebody else may have made, opened for reading."""

import errno
import os
import stat
from pathlib import Path
from typing import IO


def open_plain(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError, also for a pipe or a device (a link to /dev/zero)."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file")
    return file
