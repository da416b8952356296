"""A file or folder appears complete under its final name, or what was there before stays."""

import errno
import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpctrain.files import atomic
from tests.helpers import REPOSITORY, run_on_small_disk


def write(path, text):
    """Write a file, or a folder with a file "inside", by atomic.py."""
    if path.name == "folder":
        with atomic.folder(path) as folder:
            (folder / "below").mkdir()
            (folder / "below/inside").write_text(text)
    else:
        atomic.write_text(path, text)


def read(path):
    return (path / "below/inside" if path.is_dir() else path).read_text()


@pytest.fixture(params=["file", "folder"])
def path(request, tmp_path):
    """A place in a folder of its own; the test writes a file there, or a folder."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / request.param


def names(path):
    """All names in the folder of `path`, hidden ones as well."""
    return sorted(entry.name for entry in path.parent.iterdir())


def test_what_is_written_replaces_what_was_there(path):
    for text in ("first", "second, 훨씬 더 길다"):
        write(path, text)
        assert read(path) == text and names(path) == [path.name]


def test_nothing_has_the_final_name_before_the_block_ends(path):
    open_ = atomic.folder if path.name == "folder" else atomic.file
    with open_(path):
        assert not path.exists()
        assert [name for name in names(path) if not name.startswith(".")] == []
    assert path.exists()


def test_a_binary_file_can_be_checked_before_it_has_its_name(tmp_path):
    with atomic.file(tmp_path / "file", "wb") as opened:
        opened.write(b"\0\1")
        opened.flush()
        assert Path(opened.name).read_bytes() == b"\0\1" and Path(opened.name) != tmp_path / "file"
    assert (tmp_path / "file").read_bytes() == b"\0\1"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_block_leaves_what_was_there(path, error):
    open_ = atomic.folder if path.name == "folder" else atomic.file
    write(path, "first")
    with pytest.raises(error), open_(path):
        raise error
    assert read(path) == "first" and names(path) == [path.name]


@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_step_that_fails_leaves_what_was_there(path, monkeypatch, call, error):
    """The disk is full at fsync; a rename fails or is interrupted: for a folder the second of the two."""
    write(path, "first")
    real = os.rename

    def fail(source, target, **_):
        # the earlier folder, which gets its name back
        if call == "rename" and not str(source).endswith(".tmp"):
            return real(source, target)
        raise error

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", lambda _: fail("", ""))
    else:
        monkeypatch.setattr(os, call, fail)
    steps = {"file": {"fsync", "replace"}, "folder": {"fsync", "rename"}}
    if call in steps[path.name]:
        with pytest.raises(type(error)):
            write(path, "second")
        assert read(path) == "first"
    else:
        write(path, "second")
    assert names(path) == [path.name]


def test_a_disk_that_is_full(path, tmp_path):
    """A real one, of 1 MiB."""
    code = f"""
import sys; sys.path[:0] = [{str(REPOSITORY)!r}]
from pathlib import Path
from tests.files.test_atomic import names, read, write
path = Path("small", {path.name!r})
write(path, "first")
try:
    write(path, "x" * 2_000_000)
except OSError as error:
    print(error.strerror, read(path), names(path))
"""
    done = run_on_small_disk("1m", sys.executable, "-c", code, cwd=tmp_path)
    assert done.stdout == f"No space left on device first ['{path.name}']\n", done.stderr


@pytest.mark.parametrize("moment", ["written", "renaming"])
def test_a_process_that_is_killed_leaves_what_was_there(path, moment):
    """Before the rename; the temporary file or folder stays, under a hidden name."""
    write(path, "first")
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    half = "opened.write('half'); opened.flush()"
    if path.name == "folder":
        half = "(opened / 'inside').write_text('half')"
    code = f"""
import os, signal
from pathlib import Path
from hpctrain.files import atomic
path = Path({str(path)!r})
if {moment!r} == "renaming":
    def die(*_):
        {kill}
    os.replace = os.rename = die
with {"atomic.folder" if path.name == "folder" else "atomic.file"}(path) as opened:
    {half}
    if {moment!r} == "written":
        {kill}
"""
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGKILL
    assert read(path) == "first"
    assert len(names(path)) == 2 and names(path)[0].startswith(f".{path.name}.")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(path, mask):
    before = os.umask(mask)
    try:
        write(path, "text")
    finally:
        os.umask(before)
    everything = 0o777 if path.is_dir() else 0o666
    assert stat.S_IMODE(path.stat().st_mode) == everything & ~mask


def test_a_link_stays_and_what_it_points_to_is_replaced(path, tmp_path):
    """A folder of the user's home is often a link to scratch, where there is room."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path.symlink_to(scratch / path.name)
    for text in ("first", "second"):
        write(path, text)
        assert path.is_symlink() and read(scratch / path.name) == text
    assert names(path) == [path.name] and names(scratch / path.name) == [path.name]


def test_a_name_of_full_length(tmp_path):
    """255 bytes, the limit of Linux file systems: the temporary name is not longer."""
    path = tmp_path / ("가" * 85)
    atomic.write_text(path, "text")
    assert path.read_text() == "text"
    path.unlink()
    with atomic.folder(path):
        pass
    assert path.is_dir()


def test_a_folder_does_not_replace_a_file(tmp_path):
    (tmp_path / "folder").write_text("mine")
    with pytest.raises(NotADirectoryError), atomic.folder(tmp_path / "folder"):
        pytest.fail("the block has run")
    assert (tmp_path / "folder").read_text() == "mine"


def test_parents(tmp_path):
    """Those of a folder are created, those of a file are not."""
    write(tmp_path / "new" / "folder", "text")
    assert read(tmp_path / "new" / "folder") == "text"
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "other" / "file", "text")


def test_a_folder_may_hold_links(tmp_path):
    """Also one that points nowhere, as in a copy of a cache."""
    with atomic.folder(tmp_path / "folder") as folder:
        (folder / "link").symlink_to("nowhere")
    assert (tmp_path / "folder/link").is_symlink()


def test_a_file_system_that_cannot_sync_folders(path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path, "text")
    assert read(path) == "text"


def test_a_folder_that_must_not_replace_another(tmp_path):
    """If two jobs make the same folder at a time, the second one leaves the first one's to its readers."""
    path = tmp_path / "folder"
    with pytest.raises(OSError), atomic.folder(path, replace=False) as second:
        (second / "inside").write_text("second")
        with atomic.folder(path, replace=False) as first:
            (first / "inside").write_text("first")
    assert (path / "inside").read_text() == "first" and names(path) == ["folder"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_finished_folder_gets_its_name(tmp_path, replace):
    finished, path = tmp_path / ".partial", tmp_path / "folder"
    path.mkdir()
    finished.mkdir()
    (finished / "inside").write_text("text")
    atomic.rename_folder(finished, path, replace)
    assert (path / "inside").read_text() == "text" and names(path) == ["folder"]


@pytest.mark.parametrize("kind", ["pipe", "descriptor", "link"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    """hpctrain predict --out /dev/null as root used to replace the device, and /dev/stdout did not work."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    path = {"pipe": pipe, "descriptor": Path(f"/dev/fd/{reader}"), "link": tmp_path / "link"}[kind]
    (tmp_path / "link").symlink_to(pipe)
    with atomic.file(path) as opened:
        opened.write("text")
    os.set_blocking(reader, False)
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo() and sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a link for another user")
def test_a_link_of_another_user_is_not_followed(tmp_path):
    """In a run folder of somebody else, metrics.csv could be a link to a file of the user who exports it."""
    own = tmp_path / "own"
    own.write_text("mine")
    link = tmp_path / "metrics.csv"
    link.symlink_to(own)
    atomic.write_text(link, "once")  # a link of one's own is followed
    os.chown(link, 1234, 1234, follow_symlinks=False)
    with pytest.raises(PermissionError):
        atomic.write_text(link, "again")
    with pytest.raises(PermissionError), atomic.folder(link):
        pass
    assert own.read_text() == "once"
    link.unlink()
    link.symlink_to("/dev/null")
    os.chown(link, 1234, 1234, follow_symlinks=False)
    with pytest.raises(PermissionError):
        atomic.write_text(link, "into a pipe, perhaps")


EXCHANGE = """
import os, sys
print(flush=True)
while True:
    os.symlink(sys.argv[1], "new")
    os.rename("new", "metrics.csv")
    open("new", "x").close()
    os.rename("new", "metrics.csv")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_a_link_of_another_user_who_exchanges_it_all_the_time_is_not_followed(tmp_path):
    """A third of the writes went to the file of this user."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    command = [sys.executable, "-c", EXCHANGE, tmp_path / "mine"]
    with subprocess.Popen(command, cwd=tmp_path / "shared", user=1234, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        for write in (atomic.write_text, lambda path, text: atomic.open_to_append(path).close()):
            for _ in range(100):
                with suppress(OSError):
                    write(tmp_path / "shared/metrics.csv", "written")
        assert other.poll() is None
        other.kill()
    assert (tmp_path / "mine").read_text() == "mine"
