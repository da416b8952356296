"""Data files, model folders and checkpoints of any content are read, or refused in one line that names the
file.

Hypothesis makes the content: any bytes, real files with changes, and JSON with another value at any place.
HPCTRAIN_TEST_EXAMPLES=1000 tries that many of each.
"""

import argparse
import gzip
import io
import json
import os
import shutil
import signal
import struct
import tempfile
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import feather, ipc, parquet

from hpctrain.checkpoints import checkpoint
from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.nlp import predict
from hpctrain.nlp.models import memory
from hpctrain.nlp.models.model_folder import refuse_code, validate_folder
from hpctrain.nlp.models.scratch import create_model
from hpctrain.nlp.models.tokenizer import load_tokenizer
from hpctrain.nlp.task import SAMPLES
from hpctrain.nlp.tasks import classify, generate, ner, pair, qa
from hpctrain.nlp.training import tokenize
from hpctrain.vision import data as images
from tests.helpers import POSITION, examples

pytestmark = pytest.mark.slow

TASKS = [module.TASK for module in (classify, pair, ner, qa, generate)]
TASKS += [classify.TASK.for_problem("multi-label"), pair.TASK.for_problem("regression")]
FILES = sorted(path for path in SAMPLES.glob("*/*") if path.is_file())
BEGINNINGS = {path: path.read_bytes()[:2000] for path in FILES if path.suffix != ".json"}
BREAKS = [
    b"\0", b"\r", b"\r\n", b"\n\n", b"\t", b" ", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80",
    b"\xe2\x90\x9e", b"\xe2\x80\xa8", b"\x1b[2J", b"\x1c", b"<", b">:", b"{", b"[",
    b'"', b"B-", b"I-", b"## ", b"-DOCSTART-",
]  # fmt: skip


def read_or_refuse(read, path):
    """Read a file; an error must be one printable line of limited length that names the file."""
    try:
        return read(path)
    except HpctrainError as error:
        assert str(error).isprintable() and str(path) in str(error) and len(str(error)) < 2000, str(error)
        return None


def read_in_all_ways(content, suffix, tasks=TASKS, columns=False):
    """Read the content of a file as each task does, with and without --strict; as a table if `columns`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"train{suffix}")
        path.write_bytes(content)
        for task in tasks:
            more = [{field: field for field in task.fields}] if columns else []
            read_or_refuse(lambda path, task=task, more=more: task.read(path, None, *more), path)
            skipped = []
            for one in (
                read_or_refuse(lambda path, task=task, s=skipped, more=more: task.read(path, s, *more), path)
                or ()
            ):
                assert one.location.isprintable()
                assert all(type(text) is str and text.encode() is not None for text in task.get_texts(one))
            assert all(str(error).isprintable() for error in skipped)


@st.composite
def changed(draw, contents):
    """A content with bytes replaced, inserted and cut off."""
    content = draw(st.sampled_from(contents))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 0, 1, 5, len(content)]))
        content = (
            content[:place]
            + draw(st.sampled_from(BREAKS) | st.binary(max_size=4))
            + content[place + length :]
        )
    return content


# ---- texts ----


@examples(100)
@given(
    content=st.binary(max_size=60)
    | st.lists(st.sampled_from(BREAKS), max_size=6).map(b"".join)
    | changed(list(BEGINNINGS.values()))
)
def test_any_text_is_read_or_refused(content):
    read_in_all_ways(content, ".txt")


def make_tables():
    """The bytes of a table with the fields of all tasks, in each format, by suffix."""
    tokens = {"tokens": ["a", "b"], "tags": ["B-X", "O"], "answers": {"text": ["나"], "answer_start": [1]}}
    rows = [
        {
            "text": "나",
            "label": 1,
            "first": "a",
            "second": "b",
            "question": "?",
            "context": "가나다",
            **tokens,
        }
    ] * 3
    table = pyarrow.Table.from_pylist(rows)
    contents = {}
    for suffix, write in (
        ("parquet", parquet.write_table),
        ("arrow", write_stream),
        ("file.arrow", write_feather),
    ):
        sink = pyarrow.BufferOutputStream()
        write(table, sink)
        contents[f".{suffix}"] = sink.getvalue().to_pybytes()
    contents[".csv"] = 'text,label,first,second\n나,1,"a\nb","c,""d"\nb,2,x,y\n'.encode()
    contents[".tsv"] = 'text\tlabel\tfirst\tsecond\n나\t1\t"a\tb\nb\t2\tx\ty"\n'.encode()
    return contents | {
        ".json": json.dumps(rows).encode(),
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
    }


def write_stream(table, sink):
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def write_feather(table, sink):
    feather.write_feather(table, sink, compression="zstd")


TABLES = make_tables()


@examples(150)
@given(name=st.sampled_from(list(TABLES)), data=st.data())
def test_any_table_is_read_or_refused(name, data):
    read_in_all_ways(data.draw(changed([TABLES[name]])), name, columns=True)


def test_a_table_that_is_whole_is_read(tmp_path):
    for suffix, content in TABLES.items():
        (tmp_path / f"train{suffix}").write_bytes(content)
        for task in TASKS[:2] if suffix in (".csv", ".tsv") else TASKS:
            assert task.read(tmp_path / f"train{suffix}", None, {field: field for field in task.fields})


def make_pairs():
    return [
        {"guid": str(i), "premise": "한 줄", "hypothesis": "a", "gold_label": "neutral"} for i in range(2)
    ]


def make_questions():
    questions = [
        {"id": str(i), "question": "?", "answers": [{"text": "나", "answer_start": 1}]} for i in range(2)
    ]
    return {"version": "1", "data": [{"title": "t", "paragraphs": [{"context": "가나다", "qas": questions}]}]}


TEXTS = [
    "",
    " ",
    "나",
    "\n",
    "a\nb",
    "\x1b[2J",
    "\ud83d",
    "\udcff",
    "\0",
    "\ufeff",
    "\u2028",
    "x" * 5000,
    "$(touch canary)",
]
VALUES = (
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            10**400,
            1e308,
            float("inf"),
            float("nan"),
            [],
            {},
            [[]],
            [{}],
            {"": {}},
        ]
    )
    | st.sampled_from(TEXTS)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    )
)


def places(value, path=()):
    """The keys that lead to each value in a JSON value."""
    yield path
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*path, key))


def replace(value, path, new):
    """The JSON value with another one at this place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replace(copy[path[0]], path[1:], new)
    return copy


@st.composite
def another_value_somewhere(draw, value):
    for _ in range(draw(st.integers(1, 2))):
        value = replace(value, draw(st.sampled_from(list(places(value)))), draw(VALUES))
    return value


@examples(100)
@given(value=another_value_somewhere(make_pairs()) | another_value_somewhere(make_questions()))
@example(replace(make_pairs(), (0, "premise"), "\ud83d"))
@example(replace(make_pairs(), (0, "guid"), "a\nb\x1b[2J"))
@example(
    replace(make_questions(), ("data", 0, "paragraphs", 0, "qas", 0, "answers", 0, "answer_start"), True)
)
def test_any_json_is_read_or_refused(value):
    read_in_all_ways(json.dumps(value).encode(), ".json", [pair.TASK, qa.TASK])


LINES = [
    {"text": "나", "label": 1},
    {"premise": "나", "hypothesis": "a", "gold_label": "neutral"},
    {"tokens": ["a", "b"], "tags": ["B-X", "E-X"]},
    {
        "text": "가나다",
        "entities": [{"start": 0, "end": 1, "type": "X"}, {"start": 1, "end": 3, "type": "X"}],
    },
    {
        "id": "1",
        "question": "?",
        "context": "가나다",
        "answers": [{"text": "나", "answer_start": 1}],
        "is_impossible": False,
    },
    {"question": "?", "context": "가나다", "answers": {"text": ["나"], "answer_start": [1]}},
]


@examples(200)
@given(value=st.sampled_from(LINES).flatmap(another_value_somewhere))
def test_any_line_of_json_is_read_or_refused(value):
    read_in_all_ways(json.dumps(value).encode(), ".jsonl")


@pytest.mark.parametrize(
    "content",
    [b"[" + b"1" * 5000 + b"]", b'{"data": ' + b"1" * 5000 + b"}", b'[{"guid": ' * 3000,
     b'{"data": [' * 3000, b'{"a":1,"a":2}', b'{"data": [], "data": 1e999999}', b"[NaN, Infinity]", b'"' * 3,
     b"\xef\xbb\xbf" * 2 + b"[]", "[1]".encode("utf-16")],
)  # fmt: skip
def test_json_that_is_special(content):
    read_in_all_ways(content, ".json", [pair.TASK, qa.TASK])


def test_half_a_character_is_refused_and_a_whole_one_is_read(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(replace(make_pairs(), (0, "premise"), "\ud83d\ude00")))
    assert pair.TASK.read(path)[0].first == "😀"
    path.write_text(json.dumps(replace(make_pairs(), (0, "premise"), "\ud83d")))
    with pytest.raises(
        HpctrainError, match=r"train\.json, 0: 'premise' has half of a character, '\\ud83d': fix the file"
    ):
        pair.TASK.read(path)


def test_a_file_of_nothing_but_errors_takes_memory_in_proportion(tmp_path):
    """Its errors are counted, but not all of them are kept: they took 500 times the size of the file."""
    lines = 30_000
    (tmp_path / "a.tsv").write_text("id\tdocument\tlabel\n" + "\n" * lines + "x")
    (tmp_path / "b.json").write_text("[" + "{}," * lines + "{}]")
    for task, name in ((classify.TASK, "a.tsv"), (pair.TASK, "b.json")):
        tracemalloc.start()
        with pytest.raises(HpctrainError, match=f"{name}: none of its {lines + 1:,} examples can be read"):
            task.read(tmp_path / name, [])
        assert tracemalloc.get_traced_memory()[1] < 8e6
        tracemalloc.stop()


# ---- images ----


def idx(*sizes, content=bytes(7840)):
    return struct.pack(f">{len(sizes) + 1}I", 0x800 + len(sizes), *sizes) + content


SIZE = st.sampled_from([0, 1, 2, 10, 27, 28, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
IDX = [idx(10, 28, 28), idx(10, content=bytes(10))]


@examples(100)
@given(
    content=st.binary(max_size=40)
    | st.tuples(SIZE, SIZE, SIZE).map(lambda sizes: idx(*sizes))
    | st.lists(SIZE, max_size=4).map(lambda sizes: idx(*sizes, content=bytes(10)))
    | changed(IDX),
    packed=st.booleans(),
    cut=st.integers(0, 30),
    after=st.binary(max_size=20),
)
@example(idx(0, 2**32 - 1, 2**32 - 1), False, 0, b"")
@example(IDX[0], True, 0, bytes(20))
@example(IDX[0], True, 0, gzip.compress(b""))
def test_any_idx_file_is_read_or_refused(content, packed, cut, after):
    """Lying headers, cut files, bytes after the end, and several .gz one after the other."""
    content = (gzip.compress(content) if packed else content)[: -cut or None] + after
    with tempfile.TemporaryDirectory() as folder:
        for dimensions, name in ((3, "train-images-idx3-ubyte"), (1, "train-labels-idx1-ubyte")):
            path = Path(folder, name + ".gz" * packed)
            path.write_bytes(content)
            found = read_or_refuse(
                lambda path, n=dimensions: images._read_idx(
                    path.parent, path.stem if packed else path.name, n
                ),
                path,
            )
            assert found is None or (found.dim() == dimensions and found.numel() <= 10_000)
        for part in ("train", "t10k"):
            for name, good in zip(("images-idx3", "labels-idx1"), IDX, strict=True):
                if not (Path(folder) / f"{part}-{name}-ubyte{'.gz' * packed}").exists():
                    (Path(folder) / f"{part}-{name}-ubyte").write_bytes(good)
        read_or_refuse(images.load, Path(folder))


# ---- model folders ----


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model of nlp.classify, from elsewhere: without SHA256SUMS."""
    folder = tmp_path_factory.mktemp("model")
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 200,
    }
    (folder / "shape.json").write_text(json.dumps({"model_type": "bert", **shape}))
    create_model(
        folder / "model", str(folder / "shape.json"), "bert", ["한 줄", "두 줄"], seed=1, max_length=128
    )
    (folder / "model/SHA256SUMS").unlink()
    config = json.loads((folder / "model/config.json").read_text())
    config["hpctrain"] = {
        "task": "classify",
        "labels": ["0", "1"],
        "max_length": 128,
        "stride": 0,
        "settings": {},
    }
    (folder / "model/config.json").write_text(json.dumps(config))
    return folder / "model"


def predict_or_refuse(folder, capsys):
    try:
        predict.main(ALONE, [str(folder), "한 줄 x", "", "--device", "cpu"])
    except HpctrainError as error:
        assert str(error).isprintable() and str(folder) in str(error) and len(str(error)) < 2000, str(error)
    capsys.readouterr()


# The vocabulary is left out: docs/reference/security.md.
@pytest.mark.parametrize(
    "name", ["config.json", "config.json: hpctrain", "tokenizer.json", "tokenizer_config.json"]
)
def test_any_json_of_a_model_is_used_or_refused(model, name, capsys):
    path = model / name.split(":")[0]
    text = path.read_text()
    value = json.loads(text)
    choices = [
        place for place in places(value)
        if "vocab" not in place and (("hpctrain" in place) == name.endswith("hpctrain"))
    ]  # fmt: skip

    @examples(12)
    @given(
        place=st.sampled_from(choices),
        new=VALUES,
        raw=st.sampled_from([None, None, None, b"", b"\xff", b"[" * 3000]),
    )
    def check(place, new, raw):
        path.write_bytes(json.dumps(replace(value, place, new)).encode() if raw is None else raw)
        predict_or_refuse(model, capsys)

    try:
        check()
    finally:
        path.write_text(text)


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
PANICS = {
    "a pattern without end": {"pre_tokenizer": SPLIT},
    "a template of two texts": {
        "post_processor": {
            "type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [],
            "special_tokens": {},
        }
    },
    "a long prefix": {
        "model": {
            "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
            "continuing_subword_prefix": "x" * 10, "end_of_word_suffix": None,
            "dropout": None, "unk_token": None, "fuse_unk": True, "byte_fallback": False,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", PANICS)
def test_a_tokenizer_that_panics_is_one_line(model, tmp_path, kind, capfd):
    """The panics of its library in Rust are no subclasses of Exception."""
    folder = shutil.copytree(model, tmp_path / "model")
    for name, change in (
        ("tokenizer.json", PANICS[kind]),
        ("tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    text = "a" * 50 + "!"
    with pytest.raises(
        HpctrainError, match=r"its model cannot answer these texts|the tokenizer cannot be loaded"
    ) as error:
        predict.main(ALONE, [str(folder), text, "--device", "cpu"])
    assert str(error.value).isprintable()
    with pytest.raises(
        HpctrainError, match=r"its tokenizer cannot tokenize the data|the tokenizer cannot be loaded"
    ):
        args = argparse.Namespace(max_length=64, stride=0)
        tokenize._tokenize(
            classify.TASK, folder, load_tokenizer(folder), [classify.Document("", text, "0")], ["0"], args
        )


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_pipe_in_a_model_folder_is_not_waited_for(model, tmp_path, name):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    signal.alarm(60)
    for read in (validate_folder, lambda folder: predict.main(ALONE, [str(folder), "x", "--device", "cpu"])):
        with pytest.raises(HpctrainError, match=f"model/{name}: a pipe or a device"):
            read(folder)
    signal.alarm(0)


def test_only_the_files_of_weights_that_are_loaded_are_read(model, tmp_path):
    """Others, such as consolidated.safetensors of the hub, counted as memory.

    Their headers were read whole, however long they said that they are.
    """
    folder = shutil.copytree(model, tmp_path / "model")
    sizes = memory.read_sizes(folder)
    (folder / "consolidated.safetensors").write_bytes(b"\xff" * 7 + b"\x7f")
    assert memory.read_sizes(folder) == sizes and sum(sizes.values()) > 1000
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(sizes, "model-00001-of-00001.safetensors")}))
    assert memory.read_sizes(validate_folder(folder)) == sizes
    (folder / "parts").mkdir()
    os.mkfifo(folder / "parts/pipe.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(sizes, "parts/pipe.safetensors")}))
    signal.alarm(60)
    with pytest.raises(HpctrainError, match=r"pipe.safetensors, a part of the weights, is missing"):
        validate_folder(folder)
    signal.alarm(0)


def test_an_answer_controls_no_terminal():
    """A label of somebody else's model, or a text that it generates."""
    label, out = "\x1b[2J\x9b2J\x7f", io.StringIO()
    task = SimpleNamespace(inputs=("text",), answer=lambda *_: ([{"label": label}], 0))
    predict.write_answers(task, None, None, {}, [("a",)], argparse.Namespace(batch_size=1), out)
    assert out.getvalue()[:-1].isprintable() and json.loads(out.getvalue()) == {"text": "a", "label": label}


@pytest.mark.parametrize(
    ("key", "new"), [("labels", []), ("labels", 1), ("settings", [1]), ("max_length", "x")]
)
def test_a_configuration_that_does_not_fit_is_refused(model, key, new, capsys):
    path = model / "config.json"
    text = path.read_text()
    try:
        path.write_text(json.dumps(replace(json.loads(text), ("hpctrain", key), new)))
        with pytest.raises(
            HpctrainError, match=r"its model cannot answer these texts .*: copy the folder again"
        ) as error:
            predict.main(ALONE, [str(model), "한 줄", "두 줄", "세 줄", "--device", "cpu"])
        assert str(error.value).isprintable()
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": ["b"], "c": None}}]
)
def test_a_list_of_weights_that_is_broken(tmp_path, index):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HpctrainError, match=r"model\.safetensors\.index\.json: .*fetch or copy it again"):
        validate_folder(tmp_path)


@pytest.mark.parametrize("kind", [[], {}, 1, None])
def test_a_model_with_code_and_a_broken_type(tmp_path, kind):
    with pytest.raises(HpctrainError, match="code of models is not run"):
        refuse_code(tmp_path, {"auto_map": {}, "model_type": kind})


@pytest.mark.parametrize(
    "line", ['{"text": "\\ud83d"}', "[" * 3000, '{"text": ' + "1" * 5000 + "}", '{"text": true}', '"', "null"]
)
def test_a_line_to_answer_is_read_or_refused(model, tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(
        HpctrainError, match=r"rows\.jsonl, line 1: expected a JSON object with text: fix the line"
    ):
        predict.main(ALONE, [str(model), "--file", str(tmp_path / "rows.jsonl"), "--device", "cpu"])
    with pytest.raises(HpctrainError, match="TEXT is not UTF-8"):
        predict.main(ALONE, [str(model), "a\udcff", "--device", "cpu"])


# ---- checkpoints ----


def make_checkpoint():
    """The bytes of a checkpoint, small."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.path_of(Path(folder), 1)
        path.parent.mkdir()
        checkpoint.save(path, POSITION | {"model": torch.nn.Linear(2, 1).state_dict(), "optimizer": {}})
        return path.read_bytes()


CHECKPOINT = make_checkpoint()


@examples(150)
@given(
    st.lists(st.tuples(st.integers(0, len(CHECKPOINT) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_a_checkpoint_with_any_changes_is_skipped_or_loads(changes, end):
    """Most often in the directory at the end of the archive, which no checksum covers."""
    content = bytearray(CHECKPOINT)
    for place, value in changes:
        content[place if end == 0 else -1 - place % 900] = value
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.path_of(Path(folder), 1)
        path.parent.mkdir()
        path.write_bytes(content)
        try:
            newest = checkpoint.find_newest(Path(folder))
            state = checkpoint.load(
                checkpoint.find_fitting(newest, torch.nn.Linear(2, 1), "optimizer"), torch.device("cpu")
            )
        except HpctrainError as error:
            assert str(error).isprintable() and folder in str(error)
        else:
            assert state["epoch"] == 1 and state["model"]["weight"].shape == (1, 2)


def test_a_checkpoint_that_is_compressed_is_not_unpacked(tmp_path):
    """A hundred kilobytes could become a hundred megabytes; torch.save() compresses nothing."""
    path = checkpoint.path_of(tmp_path, 1)
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000_000))
    tracemalloc.start()
    assert not checkpoint.is_intact(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
