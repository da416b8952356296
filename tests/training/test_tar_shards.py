"""Examples in tar files: order, content, workers, a resume; damaged and other tar files."""

import io
import os
import signal
import subprocess
import tarfile

import pytest

from hpctrain import HpctrainError, TarShards, data_loader
from hpctrain.distributed.world import ALONE


def write(path, names, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            content = f"content of {name}".encode()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def shards(tmp_path):
    """5 and 3 examples."""
    numbers = {"train-000000.tar": range(5), "train-000001.tar": range(5, 8)}
    return [
        write(tmp_path / name, [f"a/{n:03d}.{end}" for n in own for end in ("seg.png", "cls")])
        for name, own in numbers.items()
    ]


def test_examples_are_read_by_number(shards):
    dataset = TarShards(shards)
    assert len(dataset) == 8 and dataset.extensions == ["cls", "seg.png"]
    assert dataset[6] == {
        "__key__": "a/006",
        "cls": b"content of a/006.cls",
        "seg.png": b"content of a/006.seg.png",
    }


def test_workers_and_a_resume_see_the_same_examples(shards):
    def keys(workers, skip=0):
        loader = data_loader(TarShards(shards), 2, 1, 3, ALONE, skip, num_workers=workers, collate_fn=list)
        return [[example["__key__"] for example in batch] for batch in loader]

    whole = keys(0)
    assert sorted(key for batch in whole for key in batch) == [f"a/{n:03d}" for n in range(8)]
    assert keys(2) == whole and keys(1, skip=2) == whole[2:]


def test_files_that_belong_to_no_example_are_left_out(tmp_path):
    path = write(tmp_path / "one.tar", ["._a.jpg", "README", "a.jpg"])
    assert [TarShards([path])[n]["__key__"] for n in range(len(TarShards([path])))] == ["a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "cannot be read as an uncompressed tar file .*No such file"),
        (
            lambda path: path.write_bytes(b"<html>404</html>" * 100),
            "cannot be read as an uncompressed tar file",
        ),
        (lambda path: write(path, ["a.cls"], "w:gz"), "cannot be read as an uncompressed tar file .*gunzip"),
        (lambda path: write(path, ["a.cls"]), "a has cls, but the first example has cls, seg.png"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:700]),
            "cannot be read as an uncompressed tar file|first example has",
        ),
    ],
)
def test_a_wrong_tar_file_is_named(shards, change, message):
    change(shards[1])
    with pytest.raises(HpctrainError, match=message) as error:
        TarShards(shards)
    assert str(error.value).startswith(f"{shards[1]}: ") and "\n" not in str(error.value)


def header(name, content=b"", size=None, kind=tarfile.REGTYPE, charge=0):
    """A member of a tar file, whose header may lie about its size, in the form for numbers of any size."""
    member = tarfile.TarInfo(name)
    member.size, member.type = len(content), kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT)[-512:])
    if size is not None:
        block[124:136] = (size + (1 << 95 if size >= 0 else 1 << 96)).to_bytes(12, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % (sum(block) + charge)
    return bytes(block) + content + bytes(-len(content) % 512)


LYING = {
    "negative size": header("x.cls", size=-512),
    "negative size of a header": header("x", size=-1024, kind=tarfile.XHDTYPE),
    "size beyond the end": header("x.cls", size=2**50),
    "endless header": header("x", b"99999999999 size=1\n", kind=tarfile.XHDTYPE)
    + header("x.cls", size=2**50),
    "sparse": header("x", b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n", kind=tarfile.XHDTYPE)
    + header("x.cls", b"a"),
    "chain": header("././@LongLink", b"a\0", kind=tarfile.GNUTYPE_LONGNAME) * 3000,
    "damaged header": header("x.cls", b"1", charge=1) + header("y.cls", b"1"),
}


@pytest.mark.parametrize("kind", LYING)
def test_a_tar_file_that_lies_is_one_line(tmp_path, kind):
    """tarfile itself reads forever, raises a traceback, or takes a damaged header for the end."""
    path = tmp_path / "a.tar"
    path.write_bytes(header("w.cls", b"0") + LYING[kind] + bytes(1024))
    signal.alarm(60)
    with pytest.raises(HpctrainError, match="cannot be read as an uncompressed tar file") as error:
        TarShards([path])
    signal.alarm(0)
    assert str(error.value).startswith(f"{path}: ") and str(error.value).isprintable()


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    signal.alarm(60)
    with pytest.raises(HpctrainError, match="not a plain file"):
        TarShards([tmp_path / "a.tar"])
    signal.alarm(0)


def test_a_tar_file_without_examples(tmp_path):
    with pytest.raises(HpctrainError, match="has no examples"):
        TarShards([write(tmp_path / "none.tar", [])])


def test_a_tar_file_that_was_cut_after_the_start(shards):
    dataset = TarShards(shards)
    shards[1].write_bytes(shards[1].read_bytes()[:520])
    with pytest.raises(HpctrainError, match=r"train-000001\.tar: ends within a/005.cls"):
        dataset[5]


def test_a_sparse_file_is_refused(tmp_path):
    """Its size, here 4 TB, is not what the tar file has of it."""
    with (tmp_path / "0.jpg").open("wb") as file:
        file.truncate(2**42)
    subprocess.run(["tar", "--sparse", "-cf", "train.tar", "0.jpg"], cwd=tmp_path, check=True)
    with pytest.raises(
        HpctrainError, match=r"train\.tar: 0\.jpg is a sparse file: make this tar file without --sparse"
    ):
        TarShards([tmp_path / "train.tar"])
