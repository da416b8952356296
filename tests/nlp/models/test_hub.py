"""Models and data sets of the hub, and `hpctrain fetch`.

A stand-in for the hub serves its routes over real HTTP.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import transformers
from huggingface_hub import ModelCard, constants

from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.nlp.models.hub import find_model, resolve_data, resolve_model
from hpctrain.nlp.models.model_folder import save_model
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.vision.data import load_mnist
from tests.helpers import run_command
from tests.nlp.helpers import TEXTS, digests

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "beomi/kcbert-base"
# Files that repositories on the hub have and hpctrain does not need.
OTHERS = [
    "README.md",
    ".gitattributes",
    "tf_model.h5",
    "flax_model.msgpack",
    "rust_model.ot",
    "model.fp16.safetensors",
]
# `hpctrain fetch`, and `hpctrain resolve` for what trainers do, through main() of the command line.
PROGRAM = """
import sys, types
from hpctrain import __main__
from hpctrain.distributed import device, rendezvous
from hpctrain.nlp.models import hub

def resolve(here, arguments):
    with rendezvous.process_group(here, device.choose_device(here, "cpu")):
        print("FOUND", hub.resolve_model(arguments[0], here), flush=True)

sys.modules["probe"] = types.SimpleNamespace(parser=None, main=resolve)
__main__.COMMANDS["resolve"] = ("probe", *__main__.COMMANDS["fetch"][1:])
__main__.main()
"""


class Hub(ThreadingHTTPServer):
    """A stand-in for huggingface.co with one model or data set: only the routes that huggingface_hub uses to
    download it.

    `requests` counts the requests for files by method and name. `errors` maps a part of a path to the status
    and the X-Error-Code of the answer, and `breaks` a file to the number of bytes after which the connection
    breaks.
    """

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.requests, self.errors, self.breaks = files, Counter(), {}, {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        path = path.replace("/api/datasets/", "/api/models/").removeprefix("/datasets")
        for part, (status, code) in hub.errors.items():
            if part in path:
                return self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})
        if path.startswith(f"/api/models/{NAME}/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in hub.files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if path in (
            f"/api/models/{NAME}",
            f"/api/models/{NAME}/revision/main",
            f"/api/models/{NAME}/revision/{COMMIT}",
        ):
            return self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        if name not in hub.files:
            return self.answer(
                404, b"", {"X-Error-Code": "RevisionNotFound" if "revision" in path else "RepoNotFound"}
            )
        content = hub.files[name]
        hub.requests[self.command, name] += 1
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self.answer(
                206, content[start:], headers, max(0, hub.breaks.get(name, len(content)) - start)
            )
        self.answer(200, content, headers, hub.breaks.get(name))

    def answer(self, status, content, headers=(), at_most=None):
        self.send_response(status)
        for header, value in {"Content-Length": len(content), **dict(headers)}.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:at_most])


@pytest.fixture
def hub(bert):
    """The stand-in, with the BERT and other files that such repositories have."""
    files = {path.name: path.read_bytes() for path in bert.iterdir()}
    others = {
        name: b"not needed" for name in [*OTHERS, "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"]
    }
    hub = Hub({**files, **others})
    yield hub
    hub.shutdown()
    hub.server_close()


def start(*arguments, hub=None, home, cwd=None, **env):
    """Start `hpctrain ...` as a process with its cache in `home`.

    Without a hub, no server listens at the hub's address.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=cwd,
        env={
            **kept,
            "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",
            "HF_HOME": str(home),
            "NO_PROXY": "*",
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    out, err = process.communicate(timeout=300)
    return SimpleNamespace(status=process.returncode, out=out, err=err)


def run(*arguments, **where):
    return end(start(*arguments, **where))


def error_line(done):
    """The single line that a failed command prints."""
    assert done.status == 1 and done.out == "", done
    assert done.err.startswith("hpctrain: error: ") and done.err.count("\n") == 1, done.err
    return done.err


def ranks(name, hub, homes, per_node=2, **env):
    """Ranks on two nodes resolve a model; node i has its cache in homes[i]."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "TORCHELASTIC_RUN_ID": "1",
        "WORLD_SIZE": str(2 * per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_WORLD_SIZE": "2",
    }
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [
        {"RANK": str(r), "LOCAL_RANK": str(r % per_node), "GROUP_RANK": str(r // per_node)}
        for r in range(2 * per_node)
    ]
    processes = [
        start("resolve", name, hub=hub, home=homes[r // per_node], **job, **place, **env)
        for r, place in enumerate(places)
    ]
    return [end(process) for process in processes]


# --- the hub ---


@pytest.mark.slow
@pytest.mark.parametrize("nodes_share", [False, True])
def test_each_file_is_downloaded_once_per_cache_and_found_by_all_ranks(nodes_share, hub, bert, tmp_path):
    homes = [tmp_path / "a", tmp_path / ("a" if nodes_share else "b")]
    done = ranks(NAME, hub, homes)
    # torch's store may print warnings at the end of a busy job
    assert [d.status for d in done] == [0] * 4, done
    snapshots = [home / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT for home in homes]
    assert [d.out for d in done] == [f"FOUND {snapshots[r // 2]}\n" for r in range(4)]
    assert digests(snapshots[1]) == digests(bert)  # so neither pickles nor files for other frameworks
    # No file is requested more often: two ranks on a node would wait for each other's locks, which some file
    # systems lack.
    assert hub.requests == {
        (method, name): 1 if nodes_share else 2 for method in ("HEAD", "GET") for name in digests(bert)
    }


@pytest.mark.slow
def test_all_ranks_take_the_commit_of_rank_0(hub, bert, tmp_path):
    old = run("resolve", NAME, hub=hub, home=tmp_path / "b")
    assert old.status == 0
    # The second node's disk has it as another commit, which is its main.
    repository = tmp_path / "b/hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "snapshots" / COMMIT).rename(repository / "snapshots" / COMMIT[::-1])
    (repository / "refs/main").write_text(COMMIT[::-1])
    done = ranks(NAME, hub, [tmp_path / "a", tmp_path / "b"])
    assert [Path(d.out.strip()).name for d in done] == [COMMIT] * 4, done


@pytest.mark.slow
def test_hub_error_is_printed_once_for_all_ranks(tmp_path):
    done = ranks(NAME, None, [tmp_path / "a", tmp_path / "b"], per_node=1, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in error_line(done[0])
    assert (done[1].status, done[1].out, done[1].err) == (0, "", "")


@pytest.mark.slow
def test_cached_model_needs_no_hub(hub, tmp_path):
    found = run("resolve", NAME, hub=hub, home=tmp_path)
    hub.shutdown()
    assert run("resolve", NAME, hub=None, home=tmp_path).out == found.out
    assert run("resolve", NAME, hub=hub, home=tmp_path, HF_HUB_OFFLINE="1").out == found.out != ""


@pytest.mark.slow
def test_pickles_are_downloaded_if_there_are_no_safetensors(hub, tmp_path):
    hub.files.pop("model.safetensors")
    hub.files["vocab.txt"] = b"[PAD]\n"
    folder = Path(run("resolve", NAME, hub=hub, home=tmp_path).out.split()[1])
    wanted = {"config.json", "pytorch_model.bin", "vocab.txt", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == wanted


@pytest.mark.slow
def test_error_without_internet_names_fetch(tmp_path):
    remedy = f"hpctrain fetch {NAME} FOLDER), then give --model FOLDER"
    line = error_line(run("resolve", NAME, home=tmp_path, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set" in line and str(tmp_path) in line and remedy in line
    line = error_line(run("resolve", NAME, home=tmp_path))
    assert "the download from http://127.0.0.1:9 failed (ConnectError" in line and remedy in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "part", "status", "code", "message"),
    [
        (("resolve", NAME), "/resolve/", 403, "GatedRepo", "gated: accept its terms"),
        (("resolve", NAME), "/api/", 401, "RepoNotFound", "has no such model, or it is private"),
        (("fetch", NAME, "kc"), "/resolve/", 401, "GatedRepo", "gated: accept its terms"),
        (("fetch", NAME, "kc"), "/api/", 403, "Forbidden", "403 Forbidden"),
    ],
)
def test_refusal_by_the_hub_is_one_line(command, part, status, code, message, hub, tmp_path):
    hub.errors[part] = (status, code)
    line = error_line(run(*command, hub=hub, home=tmp_path / "home", cwd=tmp_path))
    assert (
        NAME in line and message in line and (command[0] == "fetch" or f"hpctrain fetch {NAME} DIR" in line)
    )
    assert not (tmp_path / "kc").exists()


# --- data sets of the hub ---


@pytest.mark.slow
def test_data_set_of_the_hub_is_downloaded_once_and_named_in_the_card(hub, tmp_path):
    """In the hub's layout, with a script that is not run, and with another part that has other files."""
    folder, kinds = tmp_path / "files", datasets.ClassLabel(names=["negative", "positive"])
    (folder / "films").mkdir(parents=True)
    for split, rows in (("train", 40), ("test", 8)):
        columns = {
            "review": [f"영화 {i} {'좋다' if i % 2 else '나쁘다'}" for i in range(rows)],
            "kind": [i % 2 for i in range(rows)],
        }
        table = datasets.Dataset.from_dict(columns).cast_column("kind", kinds)
        table.to_parquet(folder / f"films/{split}-00000-of-00001.parquet")
    hub.files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}
    hub.files |= {
        "README.md": b"---",
        "films.py": b"raise SystemExit(9)",
        "books/train-00000-of-00001.parquet": b"PAR1",
    }
    options = ("--columns", "text=review", "label=kind", "--from-scratch=tiny", "--epochs=1")
    options += ("--batch-size=8",)
    where = {"cwd": tmp_path, "home": tmp_path / "home", "HPCTRAIN_CACHE": str(tmp_path / "cache")}
    done = run("nlp.classify", "--data", f"{NAME}/films", *options, "--out", "online", hub=hub, **where)
    assert done.status == 0, done.err
    assert "2 labels: negative, positive" in done.out
    assert not any(name.endswith((".py", ".md")) for _, name in hub.requests)
    card = ModelCard.load(tmp_path / "online/model/README.md")
    assert card.data.datasets == [NAME] and f"fine-tuned on `{NAME}/films`" in card.text
    again = run(
        "nlp.classify",
        "--data",
        f"{NAME}/films",
        *options,
        "--out",
        "off line",
        hub=None,
        HF_HUB_OFFLINE="1",
        **where,
    )
    assert again.status == 0, again.err
    assert "use it: hpctrain predict 'off line/model' TEXT\n" in again.out
    sums = [
        json.loads((tmp_path / f"{name}/result.json").read_text())["weights_sha256"]
        for name in ("online", "off line")
    ]
    assert sums[0] == sums[1]
    line = error_line_of(
        run("nlp.classify", "--data", f"{NAME}/songs", *options, "--out", "no", hub=hub, **where)
    )
    assert f"{NAME}: no folder songs in this data set, but books, films: name one of them" in line


def error_line_of(done):
    """The last line of a run that has failed after it printed others."""
    assert done.status == 1 and "Traceback" not in done.err, done
    return done.err.splitlines()[-1]


@pytest.mark.parametrize("name", ["no", "/no/data", "a/b/c/d", "../no", "no one/x"])
def test_data_that_are_nowhere_are_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HpctrainError, match=r"No such file or directory.*--data"):
        resolve_data(Path(name), ALONE)


@pytest.mark.parametrize("name", ["models/x", "models/x/train"])
def test_data_that_may_be_a_path_or_of_the_hub_are_told_as_both(name, tmp_path, monkeypatch):
    """models/x is a folder in the second case."""
    (tmp_path / Path(name).parent).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HpctrainError) as caught:
        resolve_data(Path(name), ALONE)
    said = str(caught.value)
    assert said.startswith(
        f"{name} (no such file or folder here, so a data set on the hub): not in the cache "
    ), said
    assert said.endswith(
        ": correct the path, or download the data set where there is internet and give --data FOLDER"
    ), said


# --- hpctrain fetch ---


@pytest.mark.slow
def test_fetch_makes_a_model_folder_and_prints_how_to_use_it(hub, bert, tmp_path):
    done = run("fetch", NAME, "kc", "--revision", COMMIT, hub=hub, home=tmp_path / "home", cwd=tmp_path)
    size = sum(path.stat().st_size for path in bert.iterdir()) / 1e6
    assert (done.status, done.err) == (0, "")
    assert done.out == f"kc: {NAME} at commit {COMMIT}, {size:.1f} MB; use it with --model kc\n"
    assert digests(tmp_path / "kc") == digests(bert)
    assert [path.name for path in tmp_path.iterdir()] == ["kc"]
    assert resolve_model(str(tmp_path / "kc"), ALONE) == tmp_path / "kc"

    again = start("fetch", NAME, "kc", hub=hub, home=tmp_path / "home", cwd=tmp_path)
    assert "kc already exists: use it with --model kc" in error_line(end(again))
    other = start("fetch", NAME, "other", "--revision", "v2", hub=hub, home=tmp_path / "home", cwd=tmp_path)
    assert "has no such revision" in error_line(end(other))


@pytest.mark.slow
def test_interrupted_fetch_leaves_no_folder_and_continues_when_repeated(hub, bert, tmp_path):
    hub.breaks["model.safetensors"] = 1000
    broken = run("fetch", NAME, "kc", hub=hub, home=tmp_path / "home", cwd=tmp_path)
    line = error_line(broken)
    assert "failed (RemoteProtocolError" in line and "run the same command again, and it continues" in line
    assert not (tmp_path / "kc").exists()
    hub.breaks.clear()
    before = hub.requests.copy()
    assert run("fetch", NAME, "kc", hub=hub, home=tmp_path / "home", cwd=tmp_path).status == 0
    assert digests(tmp_path / "kc") == digests(bert)
    # the others are complete
    assert set(hub.requests - before) == {("HEAD", "model.safetensors"), ("GET", "model.safetensors")}


@pytest.fixture
def full_disk(tmp_path):
    """A folder on a disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = run_command(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder])
    if mounted.returncode:
        pytest.skip(f"a small disk needs root, who may mount one: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_full_disk_is_one_line_and_leaves_no_folder(hub, bert, full_disk):
    line = error_line(run("fetch", NAME, full_disk / "kc", hub=hub, home=full_disk.parent / "home"))
    assert "No space left on device" in line
    line = error_line(run("resolve", NAME, hub=hub, home=full_disk / "home"))
    assert "No space left on device" in line and "hpctrain fetch" in line
    shutil.rmtree(full_disk / "home")
    model = transformers.AutoModel.from_pretrained(bert)
    for write in (
        lambda: save_model(full_disk / "kc", model, load_tokenizer(bert), "card"),
        lambda: create_model(full_disk / "kc", "tiny", "bert", TEXTS, 1, 128),
    ):
        with pytest.raises(HpctrainError, match=r"disk/kc: .*No space left on device"):
            write()
        assert not [path for path in full_disk.iterdir() if not path.name.endswith(".partial")]


# --- folders ---


@pytest.mark.parametrize("name", ["/no/such/folder", "runs/17/model", "../model", "베르트", "model/"])
def test_invalid_model_name_is_refused(name):
    with pytest.raises(HpctrainError, match="neither a folder nor a model name"):
        resolve_model(name, ALONE)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make files of others")
@pytest.mark.parametrize("made", ["folder", "link", "parent"])
def test_a_folder_of_somebody_else_is_not_taken_for_a_model_of_the_hub(made, bert, tmp_path, monkeypatch):
    """In a folder that others can write, where they had put klue/bert-base."""
    monkeypatch.chdir(tmp_path)
    folder, name = tmp_path / "klue/bert-base", "klue/bert-base"
    shutil.copytree(bert, tmp_path / "bert/bert-base")
    if made == "parent":
        (tmp_path / "klue").symlink_to("bert")
    else:
        folder.parent.mkdir()
        folder.symlink_to(bert) if made == "link" else shutil.copytree(bert, folder)
    takes: list = [
        find_model,
        lambda name: resolve_model(name, ALONE),
        lambda name: resolve_data(Path(name), ALONE),
    ]
    for take in takes:
        assert take(name) == Path(name)
    os.chown(tmp_path / "klue" if made == "parent" else folder, 12345, -1, follow_symlinks=False)
    for take in takes:
        with pytest.raises(HpctrainError, match=f"that another user made.*: give its whole path, {folder}$"):
            take(name)
        assert take(str(folder)) == folder
    assert find_model(f"./{name}") == Path(name)


def test_a_folder_that_is_not_mounted_in_the_container(tmp_path, monkeypatch):
    """Outside it is there, and "no such folder" was hard to believe."""
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/hpctrain-cpu.sif")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("/scratch/data")
    hint = r"export HPCTRAIN_BIND=/scratch/data \(apptainer exec --bind /scratch/data\)$"
    for path in (Path("/scratch/data/mnist"), Path("link/mnist")):
        for load in (
            load_mnist,
            lambda path: resolve_data(path, ALONE),
            lambda path: resolve_model(str(path.absolute()), ALONE),
        ):
            with pytest.raises(HpctrainError, match=hint):
                load(path)
    with pytest.raises(HpctrainError, match=r"plain or \.gz$"):
        load_mnist(tmp_path / "nothing")
