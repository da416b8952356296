"""A file that never ends is not opened."""

import errno
import os
from pathlib import Path

import pytest

from hpctrain.files.plain import open_plain


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(OSError) as error:
            open_plain(path)
        assert error.value.errno == errno.EINVAL


def test_a_file_is_opened_to_be_read(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    with open_plain(tmp_path / "file") as file:
        assert file.read() == b"text"
