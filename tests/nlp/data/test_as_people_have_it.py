"""Data sets as people have them: any format, written in any way, is read or is one line that is true."""

import bz2
import gzip
import json
import lzma
import re
import unicodedata

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.nlp.data.splits import find_split_files, load_splits
from hpctrain.nlp.tasks import classify, generate, instruct, ner, pair, qa
from tests.nlp.data.test_formats import NSMC_HEADER, strip_id_and_location

COLUMNS = {"text": "글", "label": "감정"}
CHAT = {"messages": [{"role": "user", "content": "가?"}, {"role": "assistant", "content": "나."}]}
CONTEXT = "😀 대한민국의 수도는 서울이다. 부산은 크다."
START = CONTEXT.index("서울")
QUESTION = {"question": "수도?", "answers": [{"text": "서울", "answer_start": START}]}
# The records of each task, as objects.
OBJECTS = {
    "classify": [{"text": "좋다 1", "label": "긍정"}, {"text": "나쁘다 2", "label": "부정"}],
    "pair": [{"sentence1": "가 1", "sentence2": "나", "label": i} for i in range(2)],
    "ner": [{"tokens": ["서울", "에"], "tags": ["B-LC", "O"]}] * 2,
    "qa": [QUESTION | {"id": f"{i}", "context": CONTEXT} for i in range(2)],
    "generate": [{"text": "가 나 1"}, {"text": "다 라 2"}],
    "instruct": [CHAT, CHAT],
}
TASKS = {module.TASK.name: module.TASK for module in (classify, pair, ner, qa, generate, instruct)}
# The text of a file, by its suffix and its task; --columns for the last ones.
TEXTS = {
    (".txt", "classify"): NSMC_HEADER + "1\t좋다\t1\n2\t나쁘다\t0\n",
    (".tsv", "pair"): "sentence1\tsentence2\tgold_label\n가\t나\tneutral\n가\t다\tneutral\n",
    (".txt", "ner"): "서울 B-LC\n에 O\n\n부산 B-LC\n에 O\n",
    (".txt", "generate"): "가 나\n다 라\n",
    **{
        (".jsonl", task): "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in objects)
        for task, objects in OBJECTS.items()
    },
    (".csv", "classify"): "글,감정\n좋다,1\n나쁘다,0\n",
    (".tsv", "classify"): "글\t감정\n좋다\t1\n나쁘다\t0\n",
}
CASES = [pytest.param(*key, text, id=" ".join(key)) for key, text in TEXTS.items()]
# Ways to write a text that change nothing.
WAYS = {
    "utf-8 with a byte order mark": lambda text: text.encode("utf-8-sig"),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "no line break at the end": lambda text: text.rstrip("\n").encode(),
    "blank lines at the end": lambda text: f"{text}\n\n".encode(),
}
# Ways that are refused, and what the error says.
REFUSED = {
    **{
        name: (lambda text, name=name: text.encode(name), f"UTF-16, not UTF-8: .* iconv -f {name} ".lower())
        for name in ("utf-16", "utf-16le", "utf-16be")
    },
    "utf-32": (lambda text: text.encode("utf-32"), "utf-32, not utf-8: .* iconv -f utf-32 "),
    "cp949": (
        lambda text: text.replace("😀", "").encode("cp949"), "not utf-8: .* iconv -f cp949 -t utf-8",
    ),
    "latin-1": (
        lambda text: b"caf\xe9\n" + text.encode("ascii", "replace"), "not utf-8: .* iconv -f cp1252 -t utf-8",
    ),
    "a program": (lambda text: b"\x7fELF\n\xff\xff\xfe" + text.encode(), "neither utf-8 nor cp949"),
    "gzip": (lambda text: gzip.compress(text.encode()), "compressed with gzip"),
    "bzip2": (lambda text: bz2.compress(text.encode()), "compressed with bzip2"),
    "xz": (lambda text: lzma.compress(text.encode()), "compressed with xz"),
}  # fmt: skip


def read(task, path):
    """The examples of a file, without their places; a table has its columns in Korean."""
    is_table = "글" in (path.read_bytes().decode(errors="ignore") + path.name) or path.suffix == ".csv"
    with_columns = task == "classify" and path.suffix in (".csv", ".tsv") and is_table
    examples = TASKS[task].read(path, None, COLUMNS if with_columns else None)
    return [strip_id_and_location(example) for example in examples]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("suffix", "task", "text"), CASES)
def test_the_same_text_gives_the_same_examples(tmp_path, suffix, task, text, way):
    plain, other = tmp_path / f"plain{suffix}", tmp_path / f"other{suffix}"
    plain.write_text(text)
    other.write_bytes(WAYS[way](text))
    assert read(task, other) == read(task, plain)
    assert len(read(task, plain)) == 2


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize(("suffix", "task", "text"), CASES)
def test_a_file_that_is_no_utf8_is_one_true_line(tmp_path, suffix, task, text, way):
    encode, message = REFUSED[way]
    (tmp_path / f"data{suffix}").write_bytes(encode(text))
    with pytest.raises(HpctrainError) as error:
        read(task, tmp_path / f"data{suffix}")
    assert re.search(message, str(error.value).lower()) and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("task", OBJECTS)
def test_objects_are_a_list_or_lines_whatever_the_suffix(tmp_path, task, suffix):
    objects = OBJECTS[task]
    path = tmp_path / f"data{suffix}"
    found = []
    for text in ("\n".join(map(json.dumps, objects)), json.dumps(objects), json.dumps(objects, indent=1)):
        path.write_text(text)
        found.append(read(task, path))
    assert len(found[0]) == 2 and all(examples == found[0] for examples in found)


def by_column(rows):
    return {name: {str(i): row[name] for i, row in enumerate(rows)} for name in rows[0]}


# Other forms of JSON, such as those of DataFrame.to_json(orient=...), for the objects of a task.
SHAPES = {
    "columns": lambda rows: json.dumps(by_column(rows)),
    "columns, indented": lambda rows: json.dumps(by_column(rows), indent=4),
    "index": lambda rows: json.dumps({str(i): row for i, row in enumerate(rows)}),
    "by id": lambda rows: json.dumps({f"q-{i}": row for i, row in enumerate(rows)}),
    "split": lambda rows: json.dumps(
        {"columns": list(rows[0]), "index": [0, 1], "data": [list(row.values()) for row in rows]}
    ),
    "table": lambda rows: json.dumps({"schema": {"fields": []}, "data": rows}),
    "list": lambda rows: json.dumps({name: [row[name] for row in rows] for name in rows[0]}),
    "data": lambda rows: json.dumps({"version": "1.0", "data": rows}, indent=1),
    "examples": lambda rows: json.dumps({"examples": rows}),
    "indented objects": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows),
    "commas at the ends": lambda rows: ",\n".join(map(json.dumps, rows)),
    "indented, with commas": lambda rows: ",\n".join(json.dumps(row, indent=2) for row in rows),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", OBJECTS)
def test_json_of_another_shape_gives_the_same_examples(tmp_path, task, shape):
    (tmp_path / "plain.ndjson").write_text("\n".join(map(json.dumps, OBJECTS[task])))
    (tmp_path / "other.json").write_text(SHAPES[shape](OBJECTS[task]))
    assert read(task, tmp_path / "other.json") == read(task, tmp_path / "plain.ndjson")
    if task == "classify":
        columns = {"text": "text", "label": "label"}
        assert len(classify.TASK.read(tmp_path / "other.json", None, columns)) == 2


@pytest.mark.parametrize("task", OBJECTS)
def test_a_single_object_is_an_example(tmp_path, task):
    for indent in (None, 2):
        (tmp_path / "one.json").write_text(json.dumps(OBJECTS[task][0], indent=indent))
        assert len(read(task, tmp_path / "one.json")) == 1


@pytest.mark.parametrize(
    "content",
    [
        {"train": OBJECTS["classify"], "test": OBJECTS["classify"]},
        [["좋다", "1"], ["나쁘다", "0"]],
        ["좋다", "나쁘다"],
        {"rows": [{"row_idx": 0, "row": OBJECTS["classify"][0]}]},
        {"좋다": ["1", "2"], "나쁘다": ["0"]},
    ],
)
def test_json_of_an_unknown_shape_is_one_line_that_names_the_known(tmp_path, content):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(HpctrainError, match="write a list of objects, or an object in each line") as error:
        classify.TASK.read(tmp_path / "a.json", [])
    assert "download" not in str(error.value) and "\n" not in str(error.value)


TEXT = "Mina went to Busan"
# Entities of TEXT as tools for annotation export them.
EXPORTS = {
    "doccano": {"label": [[13, 18, "LOC"], [0, 4, "PER"]], "Comments": []},
    "doccano before 1.3": {"labels": [[0, 4, "PER"], [13, 18, "LOC"]]},
    "doccano with relations": {
        "entities": [
            {"id": 1, "label": "PER", "start_offset": 0, "end_offset": 4},
            {"id": 2, "label": "LOC", "start_offset": 13, "end_offset": 18},
        ],
        "relations": [],
    },
    "Prodigy": {
        "tokens": [{"text": "Mina", "start": 0, "end": 4, "id": 0}],
        "spans": [{"start": 0, "end": 4, "label": "PER"}, {"start": 13, "end": 18, "label": "LOC"}],
    },
    "Label Studio, JSON-MIN": {
        "label": [
            {"start": 0, "end": 4, "text": "Mina", "labels": ["PER"]},
            {"start": 13, "end": 18, "text": "Busan", "labels": ["LOC"]},
        ]
    },
    "a pipeline of transformers": {
        "entities": [
            {"entity_group": "PER", "score": 0.9, "word": "Mina", "start": 0, "end": 4},
            {"entity_group": "LOC", "score": 0.9, "word": "Busan", "start": 13, "end": 18},
        ]
    },
}


@pytest.mark.parametrize("tool", EXPORTS)
def test_entities_are_read_as_tools_export_them(tmp_path, tool):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": TEXT} | EXPORTS[tool]) + "\n" for i in range(2)))
    assert [sentence.entities for sentence in ner.TASK.read(path)] == [[(0, 4, "PER"), (13, 18, "LOC")]] * 2
    path.write_text(json.dumps({"text": TEXT, "label": [[0, 4, "PER"], [2, 8, "PER"]]}))
    with pytest.raises(HpctrainError, match="line 1: an entity is outside the text, overlaps another"):
        ner.TASK.read(path)


@pytest.mark.parametrize("tables", [False, True])
def test_splits_may_be_folders_and_hidden_files_are_no_data(tmp_path, tables):
    for name in ("Training/a.jsonl", "Validation/a.jsonl", "Training/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXTS[".jsonl", "classify"])
    (tmp_path / "Training/._a.jsonl").write_bytes(b"\0\5\x16\7")  # of macOS
    (tmp_path / "._train.jsonl").write_bytes(b"\0\5\x16\7")
    (tmp_path / ".train.jsonl.swp").touch()
    (tmp_path / "Training/state.json").write_text("{}")  # of datasets
    found = find_split_files(tmp_path, tables)
    names = {split: [str(path.relative_to(tmp_path)) for path in paths] for split, paths in found.items()}
    assert names == {"train": ["Training/a.jsonl", "Training/b.jsonl"], "test": ["Validation/a.jsonl"]}
    columns = {"text": "text", "label": "label"} if tables else None
    assert len(load_splits(classify.TASK, tmp_path, None, columns)["train"]) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train.tsv.gz", r"train\.tsv\.gz is compressed with gzip, not text: unpack the file first"),
        ("train.zip", r"train\.zip is compressed with zip"),
        ("train.xlsx", r"train\.xlsx is a workbook of Excel: save it as csv"),
        ("학습.jsonl", r"found 학습\.jsonl\): rename one, so that its name has one of the words train, "),
    ],
)
@pytest.mark.parametrize("tables", [False, True])
def test_a_folder_without_splits_says_what_to_do(tmp_path, name, message, tables):
    (tmp_path / name).write_bytes(b"PK\3\4")
    with pytest.raises(HpctrainError, match=message):
        find_split_files(tmp_path, tables)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_labels_and_columns_are_the_same_in_any_form_of_unicode(tmp_path, form):
    path = tmp_path / "data.csv"
    path.write_text(unicodedata.normalize(form, "글, 감정 \n좋다,긍정\n나쁘다,부정\n"))
    columns = {field: unicodedata.normalize("NFD", column) for field, column in COLUMNS.items()}
    for given in (COLUMNS, columns):
        assert [example.label for example in classify.TASK.read(path, None, given)] == ["긍정", "부정"]


@pytest.mark.parametrize(
    ("start", "answer", "reason"),
    [
        (len(CONTEXT[:START].encode("utf-16-le")) // 2, "서울", "it counts units of UTF-16"),
        (len(CONTEXT[:START].encode()), "서울", "it counts bytes"),
        (START, unicodedata.normalize("NFD", "서울"), "in another form of Unicode"),
        (START - 1, "서울", "where the context has ' 서': fix the file"),
    ],
)
def test_an_answer_at_another_offset_says_why(tmp_path, start, answer, reason):
    wrong = OBJECTS["qa"][0] | {"answers": [{"text": answer, "answer_start": start}]}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(wrong) + "\n" + json.dumps(OBJECTS["qa"][1]))
    skipped = []
    assert len(qa.TASK.read(path, skipped)) == 1
    assert reason in str(skipped[0])
