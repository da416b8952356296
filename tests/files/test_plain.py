"""A file that never ends is not opened."""

import errno
import os
import re
from pathlib import Path

import pytest

import hpctrain
from hpctrain.files.plain import open_plain, read_text


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(OSError) as error:
            open_plain(path)
        assert error.value.errno == errno.EINVAL


def test_a_small_text_is_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(b"text\xff")
    assert read_text(tmp_path / "file", limit=5, errors="replace") == "text\ufffd"
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "file")
    with pytest.raises(OSError, match="too large"):
        read_text(tmp_path / "file", limit=4)


def test_what_others_may_have_made_is_read_by_these_functions():
    """These files have the kernel, this process or its user made."""
    own = "hooks distributed servers commands/check commands/add commands/completion files/redaction"
    own += " run/owner run/config run/metrics transformers nlp/models/limits"
    source = Path(hpctrain.__file__).parent
    found = [
        path
        for path in source.rglob("*.py")
        if re.search(r"(?<!formats)\.read_(text|bytes)\(", path.read_text())
    ]
    names = [str(path.relative_to(source)) for path in found]
    assert not [name for name in names if not name.startswith(tuple(own.split()))]


def test_a_file_is_opened_to_be_read(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    with open_plain(tmp_path / "file") as file:
        assert file.read() == b"text"
