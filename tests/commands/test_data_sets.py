"""hpctrain fetch data: a data set by its name or by URLs, from a stand-in for the servers over real HTTP."""

import io
import os
import socket
import subprocess
import tarfile
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
import torch
from huggingface_hub import constants

from hpctrain.commands import data_sets
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.files.digests import check_digests, git_blob
from hpctrain.nlp.data.splits import describe_files
from hpctrain.nlp.models import hub
from hpctrain.vision.data import load_mnist
from hpctrain.vision.folder import load_folder
from tests.helpers import DATA

TRAIN, TEST = b"id\tdocument\tlabel\n1\tgood\t1\n" * 400, b"id\tdocument\tlabel\n2\tbad\t0\n"


class Server(ThreadingHTTPServer):
    """Files by their path, with an ETag each. `breaks`: after how many bytes the connection ends."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.breaks, self.ranges = {}, {}, []
        self.has_tags, self.refuses_ranges = True, False
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        server, name = self.server, self.path.partition("?")[0]
        if name not in server.files:
            return self.send_error(404, "Not Found")
        content = server.files[name]
        tag = f'"{sha256(content).hexdigest()}"'
        wanted, start = self.headers.get("Range"), 0
        server.ranges.append(wanted)
        if wanted and not server.refuses_ranges and self.headers.get("If-Range", tag) == tag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self.send_error(416, "Range Not Satisfiable")
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        if server.has_tags:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(content[start : server.breaks.get(name)])


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The stand-in, with the files of a data set at a mirror, and a first mirror that has none of them."""
    monkeypatch.chdir(tmp_path)
    server = Server()
    server.files = {"/b/ratings_train.txt": TRAIN, "/b/ratings_test.txt": TEST}
    facts = {"title": "reviews", "license": "CC0 1.0", "page": "https://example.org/nsmc"}
    known = {
        "ratings_train.txt": {"bytes": len(TRAIN), "sha256": sha256(TRAIN).hexdigest()},
        "ratings_test.txt": {"git_blob": "2a9b4c51e34b54ec0e52b0ee3e8e85a8f1ae1cc8"},
    }
    mirrors = [f"{server.url}/a/", f"{server.url}/b/"]
    monkeypatch.setitem(data_sets.SETS, "nsmc", facts | {"mirrors": mirrors, "files": known})
    (tmp_path / "test").write_bytes(TEST)
    known["ratings_test.txt"]["git_blob"] = git_blob(tmp_path / "test")
    (tmp_path / "test").unlink()
    yield server
    server.shutdown()
    server.server_close()


def fetch(*words):
    hub.main(ALONE, ["data", *map(str, words)])


def fails(*words):
    """The message of a command that leaves no folder."""
    with pytest.raises(HpctrainError) as caught:
        fetch(*words)
    assert not Path(words[-1]).exists()
    return str(caught.value)


def partial():
    return next(Path().glob(".*.partial"))


def test_a_data_set_is_verified_and_found_by_its_name(server, capsys):
    """From the second mirror, as the first one has no file, then as it has others."""
    fetch("nsmc")
    said = capsys.readouterr().out
    assert said.startswith("nsmc: reviews; license: CC0 1.0; https://example.org/nsmc\n"), said
    assert said.endswith("nsmc: 2 files, 0.0 MB; use it with --data nsmc\n"), said
    folder = hub.resolve_data(Path("nsmc"), ALONE)
    assert {path.name: path.read_bytes() for path in folder.glob("ratings*")} == {
        "ratings_train.txt": TRAIN,
        "ratings_test.txt": TEST,
    }
    check_digests(folder)
    assert [*describe_files(folder)] == []
    assert sorted(os.listdir()) == ["nsmc"]  # noqa: PTH208

    server.files |= {"/a/ratings_train.txt": TEST, "/a/ratings_test.txt": TRAIN}
    fetch("nsmc", "data/again")
    assert Path("data/again/SHA256SUMS").read_text() == (folder / "SHA256SUMS").read_text()
    with pytest.raises(HpctrainError, match="nsmc already exists: use it with --data nsmc"):
        fetch("nsmc")


@pytest.mark.parametrize("server_has", ["ranges", "no ranges", "another file"])
@pytest.mark.parametrize("by", ["name", "url"])
def test_an_interrupted_download_continues(server, server_has, by):
    """Without a digest, a part of another version of the file would not be noticed."""
    name = "/b/ratings_train.txt"
    words = ["nsmc"] if by == "name" else [f"{server.url}{name}", "nsmc"]
    server.breaks[name] = 1000
    said = fails(*words)
    assert f"{name}: the connection ended after 1,000 of 10,800 bytes" in said
    assert "run the same command again" in said and str(partial()) in said
    server.breaks.clear()
    expected = TRAIN
    if server_has == "no ranges":
        server.refuses_ranges = True
    if server_has == "another file" and by == "url":
        server.files[name] = expected = TRAIN[::-1]
    fetch(*words)
    assert Path("nsmc/ratings_train.txt").read_bytes() == expected
    assert server.ranges[:2] == [None, "bytes=1000-"]


def test_a_part_that_the_server_no_longer_has_is_downloaded_anew(server):
    name = "/b/ratings_train.txt"
    server.has_tags, server.breaks[name] = False, 1000
    fails(f"{server.url}{name}", "reviews")
    server.breaks.clear()
    fetch(f"{server.url}{name}", "reviews")  # of which version the part is, nobody knows
    assert server.ranges == [None, None] and Path("reviews/ratings_train.txt").read_bytes() == TRAIN
    fails("nsmc", "no/nsmc") if server.files.pop("/b/ratings_test.txt") else None
    part = next(Path("no").glob(".nsmc.*.partial")) / "ratings_train.txt"
    part.write_bytes(TRAIN + b"more")
    server.files["/b/ratings_test.txt"] = TEST
    assert "416" in fails("nsmc", "no/nsmc")
    fetch("nsmc", "no/nsmc")


def test_another_file_than_expected_is_refused(server):
    """From all mirrors, and by the SHA-256 in a URL."""
    server.files["/b/ratings_train.txt"] = server.files["/a/ratings_train.txt"] = TRAIN[:-1] + b"!"
    said = fails("nsmc")
    assert said.count("/ratings_train.txt: another file than expected") == 2, said
    assert not (partial() / "ratings_train.txt").exists()
    url = f"{server.url}/b/ratings_test.txt#sha256="
    assert "another file than expected" in fails(url + "0" * 64, "reviews")
    fetch(url + sha256(TEST).hexdigest().upper(), "reviews")


def test_what_no_one_confirms_is_recorded(server, capsys):
    fetch(f"{server.url}/b/ratings_train.txt?key=1", f"{server.url}/b/ratings_test.txt", "reviews")
    digest = sha256(TEST).hexdigest()
    assert f"ratings_test.txt: SHA-256 {digest}, not verified" in capsys.readouterr().out
    assert f"{digest}  ratings_test.txt\n" in Path("reviews/SHA256SUMS").read_text()


def test_no_network_is_one_line(server):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    data_sets.SETS["nsmc"]["mirrors"] = [f"http://127.0.0.1:{port}/"]
    said = fails("nsmc")
    assert "cannot be reached" in said and "where there is internet" in said


@pytest.mark.parametrize(
    "words",
    [["imdb"], ["nsmc", "mnist", "folder"], ["ftp://a/b", "folder"], ["https://a/", "folder"],
     ["https://a/b"], ["https://a/b", "https://c/b", "folder"], ["https://a/.b", "folder"],
     ["https://a/b#sha256=1", "folder"]],
)  # fmt: skip
def test_what_is_no_data_set_is_a_usage_error(words):
    with pytest.raises(UsageError):
        fetch(*words)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may mount a small disk")
def test_a_full_disk_is_one_line(server, tmp_path, known):
    """Said before the download if the size is known, and otherwise when the disk is full."""
    (disk := tmp_path / "disk").mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", disk]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this machine mounts no small disk")
    try:
        if not known:
            del data_sets.SETS["nsmc"]["files"]["ratings_train.txt"]["bytes"]
        said = fails("nsmc", disk / "nsmc")
        assert ("are needed" if known else "No space left on device") in said
        assert "run the same command again" in said
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of others")
def test_half_a_file_of_another_user_is_refused(server):
    server.breaks["/b/ratings_train.txt"] = 1000
    fails("nsmc")
    os.chown(partial(), 12345, -1)
    assert "another user" in fails("nsmc")


@pytest.mark.parametrize("load", [lambda path: hub.resolve_data(path, ALONE), load_mnist])
@pytest.mark.parametrize(
    ("path", "command"), [("mnist", "data mnist downloads"), ("a/mnist", "mnist a/mnist")]
)
def test_a_data_set_that_is_not_there_has_its_command(load, path, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HpctrainError, match=f"hpctrain fetch .*{command}"):
        load(Path(path))


def test_cifar10_becomes_tar_files_that_trainers_read(server, monkeypatch):
    """Each batch of the archive is one byte of class and 3 x 32 x 32 of pixels per image."""
    numbers = numpy.random.default_rng(1)
    batches = [numbers.integers(0, 256, (3, 3073), numpy.uint8) for _ in range(3)]
    for batch in batches:
        batch[:, 0] = [9, 0, 4]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, batch in zip(("data_batch_2", "test_batch", "data_batch_1"), batches, strict=True):
            data_sets.add_file(archive, f"cifar-10-batches-bin/{name}.bin", batch.tobytes())
        data_sets.add_file(archive, "cifar-10-batches-bin/readme.html", b"<p>")
    server.files["/c/cifar-10-binary.tar.gz"] = packed.getvalue()
    digest = sha256(packed.getvalue()).hexdigest()
    known = data_sets.SETS["cifar10"] | {"mirrors": [f"{server.url}/c/"]}
    known |= {"files": {"cifar-10-binary.tar.gz": {"sha256": digest}}}
    monkeypatch.setitem(data_sets.SETS, "cifar10", known)
    fetch("cifar10")
    train, test = load_folder(Path("cifar10"), 32, 1, 0)
    assert train.labels.tolist() == [9, 0, 4, 9, 0, 4] and len(train.classes) == 10
    own = [numpy.asarray(train._decode(number)) for number in range(6)]
    expected = numpy.concatenate([batches[2], batches[0]])[:, 1:].reshape(6, 3, 32, 32).transpose(0, 2, 3, 1)
    assert torch.equal(torch.tensor(numpy.array(own)), torch.tensor(expected.copy()))
    assert len(test) == 3 and sorted(os.listdir("cifar10")) == ["SHA256SUMS", "test", "train"]  # noqa: PTH208


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the real data")
@pytest.mark.parametrize(
    ("name", "folder"),
    [("nsmc", "nsmc"), ("klue-nli", "klue/klue-nli-v1.1"), ("klue-ner", "klue/klue-ner-v1.1"),
     ("korquad", "korquad_v1"), ("mnist", "mnist")],
)  # fmt: skip
def test_the_digests_are_those_of_the_files_as_published(name, folder):
    """Of those that are here; of MNIST, the training images are here in another .gz."""
    here = [file for file in data_sets.files_of([name]) if (DATA / folder / file.name).exists()]
    here = [file for file in here if file.name != "train-images-idx3-ubyte.gz"]
    assert here
    for file in here:
        assert file.is_at(DATA / folder / file.name), file.name
        assert file.bytes == (DATA / folder / file.name).stat().st_size
