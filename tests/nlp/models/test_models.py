"""Models from a folder, from the hub and from scratch; saving them.

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
import torch
import transformers
from huggingface_hub import ModelCard, constants, metadata_load

from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError
from hpctrain.files.digests import weights_sha256
from hpctrain.nlp.batches import features
from hpctrain.nlp.data import formats
from hpctrain.nlp.models.hub import resolve_data, resolve_model
from hpctrain.nlp.models.model_folder import check_sizes, load_tokenizer, make_card, save_model
from hpctrain.nlp.models.scratch import LONGEST_WORD, SIZES, create_model, cut_words, make_config
from hpctrain.nlp.tasks import classify, ner, qa
from hpctrain.vision.data import load_mnist
from tests.helpers import DATA

ALONE = World(0, 1, 0, 1, 0, 1, "single")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "beomi/kcbert-base"
TEXTS = [document.text for document in formats.load_splits(classify.TASK, None)["train"]] * 2
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


@pytest.fixture(scope="session")
def small_config(tmp_path_factory):
    """The config.json of a very small BERT."""
    path = tmp_path_factory.mktemp("config") / "config.json"
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 900,
    }
    path.write_text(json.dumps({"model_type": "bert", **shape, "max_position_embeddings": 300}))
    return path


@pytest.fixture(scope="session")
def bert(small_config, tmp_path_factory):
    """The folder of a BERT from scratch; tests must not change it."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    create_model(folder, str(small_config), "bert", TEXTS, seed=1, max_length=128)
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    create_model(folder, "tiny", "gpt2", TEXTS, seed=1, max_length=128)
    return folder


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
    """Start `hpctrain ...` as a process with its cache in `home`; without a hub, no server listens at its address."""
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


def contents(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    }


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
    assert contents(snapshots[1]) == contents(bert)  # so neither pickles nor files for other frameworks
    # No file is requested more often: two ranks on a node would wait for each other's locks, which some file
    # systems lack.
    assert hub.requests == {
        (method, name): 1 if nodes_share else 2 for method in ("HEAD", "GET") for name in contents(bert)
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


def test_pickles_are_downloaded_if_there_are_no_safetensors(hub, tmp_path):
    hub.files.pop("model.safetensors")
    hub.files["vocab.txt"] = b"[PAD]\n"
    folder = Path(run("resolve", NAME, hub=hub, home=tmp_path).out.split()[1])
    wanted = {"config.json", "pytorch_model.bin", "vocab.txt", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == wanted


@pytest.mark.slow
def test_error_without_internet_names_fetch(tmp_path):
    remedy = f"hpctrain fetch {NAME} DIR), then give --model DIR"
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
    """In the hub's layout, with a script that is not run, and with another part whose files are not this one's."""
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
    options = (
        "--columns",
        "text=review",
        "label=kind",
        "--from-scratch",
        "tiny",
        "--epochs",
        1,
        "--batch-size",
        8,
    )
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
    with pytest.raises(
        HpctrainError,
        match=r"cannot be read \(No such file or directory\): give --data a folder or a file, or",
    ):
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
        ": correct the path, or download the data set where there is internet and give --data DIR"
    ), said


# --- hpctrain fetch ---


@pytest.mark.slow
def test_fetch_makes_a_model_folder_and_prints_how_to_use_it(hub, bert, tmp_path):
    done = run("fetch", NAME, "kc", "--revision", COMMIT, hub=hub, home=tmp_path / "home", cwd=tmp_path)
    size = sum(path.stat().st_size for path in bert.iterdir()) / 1e6
    assert (done.status, done.err) == (0, "")
    assert done.out == f"kc: {NAME} at commit {COMMIT}, {size:.1f} MB; use it with --model kc\n"
    assert contents(tmp_path / "kc") == contents(bert)
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
    assert contents(tmp_path / "kc") == contents(bert)
    # the others are complete
    assert set(hub.requests - before) == {("HEAD", "model.safetensors"), ("GET", "model.safetensors")}


@pytest.fixture
def full_disk(tmp_path):
    """A folder on a disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk needs root, who may mount one: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_full_disk_is_one_line_and_leaves_no_folder(hub, bert, full_disk):
    line = error_line(run("fetch", NAME, full_disk / "kc", hub=hub, home=full_disk.parent / "home"))
    assert "cannot be written (OSError [Errno 28] No space left on device" in line
    line = error_line(run("resolve", NAME, hub=hub, home=full_disk / "home"))
    assert (
        "cannot be written (OSError [Errno 28] No space left on device" in line and "hpctrain fetch" in line
    )
    shutil.rmtree(full_disk / "home")
    model = transformers.AutoModel.from_pretrained(bert)
    for write in (
        lambda: save_model(full_disk / "kc", model, load_tokenizer(bert), "card"),
        lambda: create_model(full_disk / "kc", "tiny", "bert", TEXTS, 1, 128),
    ):
        with pytest.raises(
            HpctrainError, match=r"disk/kc: the model cannot be written .*No space left on device"
        ):
            write()
        assert not [path for path in full_disk.iterdir() if not path.name.endswith(".partial")]


# --- folders ---


def test_model_folder_is_validated_and_missing_parts_are_named(bert, tmp_path):
    assert resolve_model(str(bert), ALONE) == bert
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    with pytest.raises(
        HpctrainError, match=rf"a run folder, whose model is one folder below: give {folder}$"
    ):
        resolve_model(str(tmp_path), ALONE)
    (folder / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(HpctrainError, match=r"model/model\.safetensors: damaged .*: fetch or copy it again"):
        resolve_model(str(folder), ALONE)
    (folder / "model.safetensors").unlink()
    with pytest.raises(HpctrainError, match=r"model: no model\.safetensors in it"):
        resolve_model(str(folder), ALONE)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )
    with pytest.raises(
        HpctrainError, match=r"model-00001-of-00002\.safetensors, a part of the weights, is missing"
    ):
        resolve_model(str(folder), ALONE)
    (folder / "config.json").write_text("{")
    with pytest.raises(HpctrainError, match=r"model/config\.json: cannot be read as JSON"):
        resolve_model(str(folder), ALONE)
    (folder / "config.json").unlink()
    with pytest.raises(HpctrainError, match=r"model: no config\.json in it: give a folder with config\.json"):
        resolve_model(str(folder), ALONE)


@pytest.mark.parametrize("name", ["/no/such/folder", "runs/17/model", "../model", "베르트", "model/"])
def test_invalid_model_name_is_refused(name):
    with pytest.raises(HpctrainError, match="neither a folder nor a model name"):
        resolve_model(name, ALONE)


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


# --- from scratch ---


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("bert", "SequenceClassification"), ("bert", "TokenClassification"), ("bert", "QuestionAnswering"),
        ("gpt2", "CausalLM"), ("gpt2", "SequenceClassification"),
    ],
)  # fmt: skip
def test_model_from_scratch_loads_with_every_head(kind, head, bert, gpt2):
    folder = bert if kind == "bert" else gpt2
    loader = getattr(transformers, f"AutoModelFor{head}")
    model, info = loader.from_pretrained(folder, output_loading_info=True)
    assert all(name.split(".")[0] in ("classifier", "qa_outputs", "score") for name in info["missing_keys"])
    tokenizer = load_tokenizer(folder)
    batch = tokenizer(["정말 재미있다", "별로"], padding=True, return_tensors="pt")
    assert (
        model(**batch).logits.isfinite().all()
        if head != "QuestionAnswering"
        else model(**batch).start_logits.isfinite().all()
    )


def test_bert_from_scratch_keeps_hangul_case_and_accents(tmp_path, small_config):
    texts = ["가나다 Café 가나다 Café", "마바 ABC"] * 3
    pieces = create_model(tmp_path / "m", str(small_config), "bert", texts, 1, 128)
    tokenizer = load_tokenizer(tmp_path / "m")
    assert pieces == len(tokenizer) < 900  # there are no more in such a short text
    assert tokenizer("가나다 Café", "ABC!").tokens() == [
        "[CLS]",
        "가나다",
        "Café",
        "[SEP]",
        "ABC",
        "[UNK]",
        "[SEP]",
    ]
    assert tokenizer("가나다 Café", "ABC!")["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert set(tokenizer.all_special_tokens) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    # A token within words is not a special one: it is decoded, and its spelling in a text is not recognized.
    ids = tokenizer("가나마", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) in ("가나마", "[UNK]", "")
    assert "##나" not in tokenizer("##나").tokens()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_tokenizer_trained_on_a_million_characters_without_white_space(kind, tmp_path):
    """The trainers of tokenizers would take hours for such a word, such as an image in base64."""
    long = "가나" * 500_000
    create_model(tmp_path / "m", "tiny", kind, ["가나 다라", long], 1, 128)
    tokenizer = load_tokenizer(tmp_path / "m")
    assert "가나" in tokenizer.decode(tokenizer("가나")["input_ids"])
    assert (
        cut_words(long).replace("\n", "") == long
        and max(map(len, cut_words(long).split("\n"))) == LONGEST_WORD
    )
    assert [cut_words(text) for text in (*TEXTS, "가" * LONGEST_WORD, " ")] == [
        *TEXTS,
        "가" * LONGEST_WORD,
        " ",
    ]


def test_gpt2_from_scratch_encodes_any_text_and_has_its_own_padding_token(gpt2):
    tokenizer = load_tokenizer(gpt2)
    text = "처음 보는 글: Ünïcödé 🎬 龍!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>" != tokenizer.pad_token
    config = transformers.AutoConfig.from_pretrained(gpt2)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert config.vocab_size == len(tokenizer)


SCRATCH = """
import sys
from pathlib import Path
from hpctrain.nlp.models.scratch import create_model

texts = Path(sys.argv[1]).read_text().splitlines()
for kind in ("bert", "gpt2"):
    create_model(Path(sys.argv[2]) / kind, "tiny", kind, texts, 1, 600)
"""


@pytest.mark.slow
def test_same_texts_and_seed_give_the_same_files_in_another_process(tmp_path):
    texts = [
        word
        for question in formats.load_splits(qa.TASK, None)["train"]
        for word in (question.context, question.question)
    ]
    (tmp_path / "texts").write_text("\n".join(texts))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRATCH, tmp_path / "texts", tmp_path / name],
            env={**os.environ, "PYTHONHASHSEED": number, "OMP_NUM_THREADS": number},
        )
        for name, number in (("a", "1"), ("b", "2"))
    ]
    assert [process.wait(300) for process in processes] == [0, 0]
    for kind in ("bert", "gpt2"):
        create_model(tmp_path / "c" / kind, "tiny", kind, texts, 2, 600)
        a, b, c = (contents(tmp_path / name / kind) for name in "abc")
        assert a == b
        # another seed, the same tokenizer
        assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}
        config = transformers.AutoConfig.from_pretrained(tmp_path / "a" / kind)
        assert (
            config.max_position_embeddings == load_tokenizer(tmp_path / "a" / kind).model_max_length == 1024
        )


def test_own_config_gets_more_positions_only_if_needed(bert, small_config, tmp_path):
    config = transformers.AutoConfig.from_pretrained(bert)
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (32, 1, 300)
    create_model(tmp_path / "long", str(small_config), "bert", TEXTS, 1, 301)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "long").max_position_embeddings == 512


def test_sizes_match_the_paper(tmp_path):
    for name, millions in (("tiny", 4.4), ("mini", 11.2), ("small", 28.8), ("medium", 41.4), ("base", 109.5)):
        settings = make_config(name, "bert")
        settings.vocab_size = 30522
        with torch.device("meta"):
            parameters = sum(p.numel() for p in transformers.BertModel(settings).parameters())
        assert round(parameters / 1e6, 1) == pytest.approx(millions, abs=0.11), name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**63),
        ("num_hidden_layers", 1001),
        ("hidden_size", 10**9),
        ("text_config", {"vocab_size": 2**40}),
    ],
)
def test_absurd_size_is_refused_before_the_model_is_built(bert, key, value, tmp_path):
    """transformers would build layer after layer."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "bert", "max_position_embeddings": 10_000_000, "seed": 2**40, key: value})
    )
    most = "1,000" if "layers" in key else "100,000,000"
    for refuse in (lambda: make_config(str(path), "bert"), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(
            HpctrainError, match=rf"config\.json: its \w+ is over {most}, which no model has: fix the file"
        ):
            refuse()
    for folder in (bert, tmp_path):
        check_sizes(folder / "config.json", json.loads((bert / "config.json").read_text()))


def test_unusable_config_or_texts_are_named(small_config, tmp_path):
    def make(config, kind="bert", texts=TEXTS):
        create_model(tmp_path / "m", str(config), kind, texts, 1, 128)

    with pytest.raises(
        HpctrainError,
        match=r"--from-scratch big: no such size or file: give tiny, mini, small, medium, base, or",
    ):
        make("big")
    with pytest.raises(
        HpctrainError, match=r"config\.json: its model_type is 'bert', but this task needs 'gpt2'"
    ):
        make(small_config, "gpt2")
    with pytest.raises(HpctrainError, match=r"all of them are empty"):
        make("tiny", texts=["", " "])
    broken = tmp_path / "config.json"
    broken.write_text('{"model_type": "bert", "hidden_size": 33, "num_attention_heads": 2}')
    with pytest.raises(HpctrainError, match=r"config\.json: .*33"):
        make(broken)
    broken.write_text("[1]")
    with pytest.raises(HpctrainError, match=r"config\.json: not a JSON object"):
        make(broken)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_tokenizer_trained_on_150_000_reviews(small_config, tmp_path):
    path = DATA / "nsmc/ratings_train.txt"
    if not path.exists():
        pytest.skip(f"no nsmc in {DATA}: HPCTRAIN_TEST_DATA names a folder that has it")
    texts = [document.text for document in classify.TASK.read(path)]
    # The vocabulary of "small", but not its 29 million weights.
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(json.loads(small_config.read_text()) | {"vocab_size": SIZES["small"].vocabulary})
    )
    assert create_model(tmp_path / "m", str(config), "bert", texts, 1, 128) == 16000  # in 6 s on two cores
    tokenizer = load_tokenizer(tmp_path / "m")
    ids = [i for encoding in features.encode_texts(tokenizer, texts, None) for i in encoding.ids]
    assert len(ids) / len(texts) < 17  # 16.0 measured
    assert ids.count(tokenizer.unk_token_id) / len(ids) < 1e-4


# --- tokenizers ---


def test_vocabulary_file_alone_is_a_tokenizer_as_in_kcbert(bert, tmp_path):
    vocabulary = sorted(load_tokenizer(bert).get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece, _ in vocabulary))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "model_max_length": 300}')
    shutil.copy(bert / "config.json", tmp_path)
    for text in ("정말 재미있다 Wow", "별로!"):
        assert load_tokenizer(tmp_path)(text)["input_ids"] == load_tokenizer(bert)(text)["input_ids"]


def test_missing_padding_token_becomes_the_end_token(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "m")
    config = json.loads((gpt2 / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "m/SHA256SUMS").unlink()
    assert load_tokenizer(tmp_path / "m").pad_token == "<|endoftext|>"


def test_slow_or_missing_tokenizer_is_an_error(bert, tmp_path):
    shutil.copy(bert / "config.json", tmp_path)
    with pytest.raises(HpctrainError, match=r"no tokenizer in it \(tokenizer.json or vocab.txt\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(HpctrainError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "canine"}')
    with pytest.raises(HpctrainError, match=r"its tokenizer \(CanineTokenizer\) is not a fast one"):
        load_tokenizer(tmp_path)


# --- saving ---


TASK = SimpleNamespace(
    name="classify",
    pipeline_tag="text-classification",
    model=transformers.AutoModelForSequenceClassification,
    inputs=("text",),
    card_text="",
)


def test_saved_model_loads_unchanged_and_its_card_is_valid(bert, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        bert, num_labels=3, id2label={0: "a", 1: "b", 2: "c"}
    )
    tokenizer = load_tokenizer(bert)
    scores = {"accuracy": 0.9123456, "f1": torch.tensor(0.5).item(), "f1/PS": 0.25}
    options = {"lr": 5e-5, "data": Path("../nsmc"), "name": "한글"}
    card = make_card(
        "Reviews: good or bad?",
        TASK,
        NAME,
        "../data/nsmc",
        "ko",
        scores,
        options,
        {"torch": torch.__version__},
    )
    save_model(tmp_path / "out" / "model", model, tokenizer, card)

    folder = tmp_path / "out" / "model"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert weights_sha256(again) == weights_sha256(model)
    text = "정말 재미있다 Wow"
    assert load_tokenizer(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.config.id2label == {0: "a", 1: "b", 2: "c"}
    # no file names the temporary folder, .model.<random>
    assert not [
        path.name
        for path in folder.glob("*.json")
        if str(tmp_path) in path.read_text() or ".model." in path.read_text()
    ]

    for base in ("from scratch (sizes/own.json)", str(tmp_path), "../models/kc"):
        assert "base_model" not in make_card("x", TASK, base, "data", None, {}, {}, {}).split("---")[1]
    metadata = metadata_load(folder / "README.md")
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-classification"
    assert metadata["base_model"] == NAME and metadata["language"] == "ko"
    results = metadata["model-index"][0]["results"][0]
    assert (
        results["dataset"]["name"] == "nsmc"
        and {m["type"]: m["value"] for m in results["metrics"]}["accuracy"] == 0.9123456
    )
    text = (folder / "README.md").read_text()
    assert (
        "| f1/PS | 0.2500 |" in text and "hpctrain predict FOLDER TEXT" in text and '"name": "한글"' in text
    )
    assert "AutoModelForSequenceClassification.from_pretrained" in text
    # A pipeline of transformers finds another F1 for named entities, so the card says which call gives the
    # score.
    assert "pipeline(" not in text
    card = make_card("x", ner.TASK, NAME, "data", None, {}, {}, {})
    assert (
        "hpctrain predict FOLDER TEXT\n```\n\n`hpctrain predict` gives the scores above. `pipeline(" in card
    )


def test_earlier_model_stays_until_the_new_one_is_complete(bert, tmp_path, monkeypatch):
    model, tokenizer = transformers.AutoModel.from_pretrained(bert), load_tokenizer(bert)
    folder = tmp_path / "model"
    save_model(folder, model, tokenizer, "first")
    before = contents(folder)

    def fail(*args, **kwargs):
        assert contents(folder) == before  # the new one is written beside it
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(tokenizer, "save_pretrained", fail)
        with pytest.raises(HpctrainError, match="model: the model cannot be written"):
            save_model(folder, model, tokenizer, "second")
    assert contents(folder) == before and [path.name for path in tmp_path.iterdir()] == ["model"]
    save_model(folder, model, tokenizer, "third")
    assert (folder / "README.md").read_text() == "third" and [path.name for path in tmp_path.iterdir()] == [
        "model"
    ]


def test_folder_without_a_model_is_not_replaced(bert, tmp_path):
    (tmp_path / "thesis.txt").write_text("five years")
    with pytest.raises(HpctrainError, match="is not empty and not a model, so it is not replaced"):
        save_model(tmp_path, transformers.AutoModel.from_pretrained(bert), load_tokenizer(bert), "card")
    assert (tmp_path / "thesis.txt").exists()
