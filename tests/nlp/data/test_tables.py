"""Tables (--columns): each format, classes by name, missing columns, damaged files."""

import argparse
import csv
import io
import json
import re
import tracemalloc
from functools import partial

import datasets
import numpy
import pandas
import pyarrow
import pytest
from pyarrow import feather, parquet

from hpctrain.distributed.world import ALONE
from hpctrain.errors import HpctrainError
from hpctrain.nlp import predict
from hpctrain.nlp.data.bio import Entity
from hpctrain.nlp.data.splits import load_splits
from hpctrain.nlp.data.squad import UNANSWERABLE, Answer
from hpctrain.nlp.parser import parse_options
from hpctrain.nlp.tasks import classify, generate, instruct, ner, pair, qa
from hpctrain.nlp.tasks.pair import Pair
from hpctrain.nlp.training import finetune
from tests.nlp.data.test_formats import assert_error, write

COLUMNS = {"text": "review", "label": "stars"}
# Of every kind that csv has to quote, and two that it must not change.
TEXTS = ['좋다, "정말"', "두\n줄", "두\r\n줄", " 끝 ", "nan", "a\tb"]
ROWS = [{"n": i, "review": text, "stars": i % 2} for i, text in enumerate(TEXTS)]

WRITERS = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "csv with marks around all": lambda frame, path: frame.to_csv(
        path, index=False, quoting=csv.QUOTE_ALL, encoding="utf-8-sig"
    ),
    "csv with semicolons": lambda frame, path: frame.to_csv(path, index=False, sep=";"),
    "csv with tabs": lambda frame, path: frame.to_csv(path, index=False, sep="\t", lineterminator="\r\n"),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "json": lambda frame, path: frame.to_json(path, orient="records", indent=1),
    "json of lines": lambda frame, path: datasets.Dataset.from_pandas(frame).to_json(path),
    "parquet": lambda frame, path: frame.to_parquet(path),
    "parquet of datasets": lambda frame, path: datasets.Dataset.from_pandas(frame).to_parquet(path),
    "arrow": lambda frame, path: feather.write_feather(frame, path),
    "arrow of datasets": lambda frame, path: (
        datasets.Dataset.from_pandas(frame).save_to_disk(path.parent),
        (path.parent / "data-00000-of-00001.arrow").rename(path),
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_same_examples(name, tmp_path):
    path = tmp_path / f"a.{name.split()[0]}"
    WRITERS[name](pandas.DataFrame(ROWS), path)
    found = classify.TASK.read(path, None, COLUMNS)
    assert [(example.text, example.label) for example in found] == [
        (text, str(i % 2)) for i, text in enumerate(TEXTS)
    ]
    assert [example.id for example in found] == [
        example.location.removeprefix(f"{path}, ") for example in found
    ]
    of_capitals = path.rename(tmp_path / path.name.upper())
    assert [example.text for example in generate.TASK.read(of_capitals, None, {"text": "review"})] == TEXTS


def test_tsv_has_no_quotation_marks(tmp_path):
    """As the files of XNLI and GLUE, which have a mark at the beginning of a field."""
    path = tmp_path / "xnli.dev.tsv"
    path.write_bytes(
        b"\xef\xbb\xbflanguage\tgold_label\tsentence1\tsentence2\r\n"
        + 'en\tneutral\t"Mama\u2028, he said.\ta "b\r\n'.encode()
    )
    found = pair.TASK.read(path, None, {"first": "sentence1", "second": "sentence2", "label": "gold_label"})
    assert found == [Pair("line 2", '"Mama\u2028, he said.', 'a "b', "neutral", location=f"{path}, line 2")]
    for line, message in (
        ("en\tneutral\ta\tb\tc", "line 2: more fields than the header has"),
        ("en\tneutral\ta", "no column"),
    ):
        path.write_text(f"language\tgold_label\tsentence1\tsentence2\n{line}\n")
        with pytest.raises(HpctrainError, match=message):
            pair.TASK.read(path, None, {"first": "sentence1", "second": "sentence2", "label": "gold_label"})


def test_location_is_where_the_row_begins(tmp_path):
    """A field in quotation marks may have several lines."""
    frame = pandas.DataFrame(ROWS)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    frame.to_json(tmp_path / "a.json", orient="records")
    frame.to_parquet(tmp_path / "a.parquet")

    def places(name):
        return [example.id for example in classify.TASK.read(tmp_path / name, None, COLUMNS)]

    assert places("a.csv") == [f"line {n}" for n in (2, 3, 5, 7, 8, 9)]
    assert places("a.jsonl") == [f"line {n}" for n in range(1, 7)] and places("a.parquet") == [
        f"row {n}" for n in range(1, 7)
    ]
    assert places("a.json") == [f"[{n}]" for n in range(6)]


def make_dataset(rows, **features):
    """A data set as the library datasets makes it, with ClassLabel for the columns `features`."""
    made = datasets.Dataset.from_list(rows)
    for column, feature in features.items():
        made = made.cast_column(column, feature)
    return made


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_numbers_of_classes_get_their_names(suffix, tmp_path):
    """-1 is how published test sets say that there is no label."""
    rows = [{"premise": "가", "hypothesis": "나", "label": label} for label in (0, 2, -1, 1)]
    made = make_dataset(rows, label=datasets.ClassLabel(names=["entailment", "neutral", "contradiction"]))
    path = tmp_path / f"a.{suffix}"
    WRITERS[f"{suffix} of datasets"](made.to_pandas(), tmp_path / f"plain.{suffix}")
    made.to_parquet(path) if suffix == "parquet" else feather.write_feather(made.data.table, path)
    columns = {"first": "premise", "second": "hypothesis", "label": "label"}
    skipped = []
    found = pair.TASK.read(path, skipped, columns)
    assert [(one.first, one.second, one.label) for one in found] == [
        ("가", "나", name) for name in ("entailment", "contradiction", "neutral")
    ]
    assert [str(error) for error in skipped] == [
        f"{path}, row 3: its column 'label' has no value: add it, or leave the row out"
    ]
    assert {one.label for one in pair.TASK.read(tmp_path / f"plain.{suffix}", None, columns)} == {
        "0",
        "1",
        "2",
        "-1",
    }


def test_words_and_tags_and_answers_as_data_sets_of_the_hub_have_them(tmp_path):
    tags = datasets.List(datasets.ClassLabel(names=["O", "B-PER", "I-PER", "B-LOC"]))
    rows = [{"id": "0", "tokens": ["Anna", "Lee", "in", "Rome"], "ner_tags": [1, 2, 0, 3]}]
    make_dataset(rows, ner_tags=tags).to_parquet(tmp_path / "ner.parquet")
    (sentence,) = ner.TASK.read(tmp_path / "ner.parquet", None, {"tokens": "tokens", "tags": "ner_tags"})
    assert (sentence.text, sentence.by_token) == ("Anna Lee in Rome", True)
    assert sentence.entities == [Entity(0, 8, "PER"), Entity(12, 16, "LOC")]

    answers = [{"text": ["나"], "answer_start": [1]}, {"text": [], "answer_start": []}]
    rows = [
        {"id": str(i), "title": "t", "context": "가나다", "q": "?", "answers": each}
        for i, each in enumerate(answers)
    ]
    make_dataset(rows).to_parquet(tmp_path / "qa.parquet")
    found = qa.TASK.read(
        tmp_path / "qa.parquet", None, {"question": "q", "context": "context", "answers": "answers"}
    )
    assert [one.answers for one in found] == [[Answer("나", 1)], UNANSWERABLE] and all(
        one.optional for one in found
    )
    with pytest.raises(HpctrainError, match=r"\.parquet: .*\.jsonl"):
        list(predict.read_rows(argparse.Namespace(file=tmp_path / "qa.parquet"), qa.TASK))
    path = write(tmp_path / "qa.csv", "question,context,answers\n?,a,\"['a']\"\n")
    with pytest.raises(HpctrainError, match=r"line 2: its answers .*\.jsonl or \.parquet"):
        qa.TASK.read(path, None, {name: name for name in qa.TASK.fields})


def test_batches_and_row_groups_follow_each_other(tmp_path):
    """Of 2,500 rows, in parts of other sizes than those that are read at a time."""
    table = pyarrow.table({"text": [str(i) for i in range(2500)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    feather.write_feather(table, tmp_path / "a.arrow", chunksize=1700)
    for name in ("a.parquet", "a.arrow"):
        found = generate.TASK.read(tmp_path / name, None, {"text": "text"})
        assert [(one.text, one.location) for one in found] == [
            (str(i), f"{tmp_path}/{name}, row {i + 1}") for i in range(2500)
        ]


# --- invalid tables ---

read = partial(classify.TASK.read, columns=COLUMNS)
MISSING = r"no column 'stars', but review, sterne"


@pytest.mark.parametrize(
    ("name", "content", "message", "left"),
    [
        ("a.csv", "review,sterne\n좋다,1\n",
         rf"a\.csv: {MISSING}", 0),
        ("a.csv", "review|stars\n좋다|1\n", r"no column 'review', but review\|stars", 0),
        ("a.csv", "review,stars,stars\n좋다,1,1\n", "several columns 'stars'", 0),
        ("a.csv", "review,stars\n좋다,1\n\n나쁘다\n",
         "line 3: .*'stars'", 1),
        ("a.csv", "review,stars\n좋다,1\n좋다, 참,1\n",
         "line 3: more fields", 1),
        ("a.csv", "review,stars\n좋다,1\n좋다,\n", r"line 3: the label is empty", 1),
        ("a.csv", 'review,stars\n좋다,1\n"좋다,1\n나쁘다,0\n',
         "line 3: .*quotation mark", 0),
        ("a.csv", 'review,stars\n"' + "x\n" * 80_000,
         "line 2: .*field limit", 0),
        ("a.csv", "review,stars\n", "the file has no examples", 0),
        ("a.csv", "", "the file is empty", 0),
        ("a.csv", "review,stars\n좋다,1\n".encode("cp949"),
         "line 2: .*iconv -f cp949", 0),
        ("a.jsonl", '{"review": "a", "sterne": 1}\n', rf"a\.jsonl, line 1: {MISSING}", 0),
        ("a.jsonl", '{"review": "a", "stars": 1}\n{"review": "a", "stars": null}',
         "line 2: .*'stars'", 1),
        ("a.jsonl", '{"review": "a", "stars": 1}\n{"review": 3, "stars": 1}',
         "line 2 has no 'text'", 1),
        ("a.json", '[{"review": "a", "stars": 1}, 3]', r"a\.json, \[1\]: not a JSON object", 1),
        ("a.json", '[{"review": "a", "stars": 1}',
         "json, line 1: not valid JSON", 0),
        ("a.parquet", b"PAR1",
         r"a\.parquet: ", 0),
        ("a.arrow", b"",
         r"a\.arrow: ", 0),
        ("a.ods", b"PK", r"a\.ods: not a table that --columns reads "
         r"\(\.arrow, \.csv, \.json, \.jsonl, \.ndjson, \.parquet, \.tsv\)", 0),
    ],
)  # fmt: skip
def test_invalid_table_is_one_line(name, content, message, left, tmp_path):
    assert_error(read, write(tmp_path / name, content), message, left)


def test_missing_column_and_value_of_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pandas.DataFrame({"review": ["a"], "sterne": [1]}).to_parquet(path)
    assert_error(read, path, rf"a\.parquet: {MISSING}: give --columns", 0)
    parquet.write_table(pyarrow.table({"review": ["a", None], "stars": [1, 0]}), path)
    assert_error(read, path, "row 2: .*'review'", 1)
    parquet.write_table(pyarrow.table({"review": ["a"], "stars": [0.5]}), path)
    assert_error(read, path, "row 1: .* 0.5, .*--problem regression", 0)


def test_text_outside_of_its_memory_is_refused(tmp_path):
    """Arrow holds where each text ends. Of the last one it is changed to a place far behind the file."""
    path = tmp_path / "a.arrow"
    feather.write_feather(
        pyarrow.table({"review": ["aaaa", "bbbb"], "stars": [1, 0]}), path, compression="uncompressed"
    )
    ends = numpy.array([0, 4, 8], numpy.int32).tobytes()
    assert path.read_bytes().count(ends) == 1
    path.write_bytes(path.read_bytes().replace(ends, numpy.array([0, 4, 2**31 - 1], numpy.int32).tobytes()))
    assert_error(read, path, r"a\.arrow: ", 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one text in many rows", "many rows of nothing"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_small_file_is_not_unpacked_to_gigabytes(suffix, kind, tmp_path):
    """A kilobyte can give a million rows, or 20 GB of texts."""
    rows = 20_000 if kind == "one text in many rows" else 1_000_000
    texts = pyarrow.array(["x" * 1_000_000] if rows == 20_000 else [""])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array(numpy.zeros(rows, numpy.int32)), texts)
    table, path = pyarrow.table({"review": column, "stars": column}), tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path, compression="zstd")
    else:
        feather.write_feather(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(HpctrainError, match=rf"train.{suffix}: .*1000 times"):
        classify.TASK.read(path, [], COLUMNS)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_only_a_few_rows_are_in_memory_beside_the_examples(suffix, tmp_path):
    table = pyarrow.table({"text": [f"{i:08} 글" for i in range(20_000)]})
    path = tmp_path / f"a.{suffix}"
    parquet.write_table(table, path) if suffix == "parquet" else feather.write_feather(table, path)
    tracemalloc.start()
    found = generate.TASK.read(path, None, {"text": "text"})
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 20_000 and peak - current < 1e6


# --- --columns ---


def make_folder(folder, **splits):
    for name, rows in splits.items():
        pandas.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    return folder


def test_run_reads_the_tables_of_a_folder(tmp_path, capsys):
    """Beside them, the files that are read without --columns are not used."""
    make_folder(tmp_path, train=ROWS, dev=ROWS[:2], test=ROWS[:4])
    (tmp_path / "ratings_train.txt").write_text("id\tdocument\tlabel\n1\t글\t1\n")
    options = ["--data", str(tmp_path), "--model", "x", "--columns", "text=review", "label=stars"]
    examples = finetune.read_examples(classify.TASK, parse_options(classify.TASK, options), ALONE)
    assert {name: len(part) for name, part in examples.items()} == {"train": 6, "validation": 2, "test": 4}
    assert [example.text for example in examples["train"]] == TEXTS
    assert f"{tmp_path}: not used: ratings_train.txt" in capsys.readouterr().out
    alone = [*options[:1], str(tmp_path / "train.csv"), *options[2:], "--validation-split", "0.3"]
    examples = finetune.read_examples(classify.TASK, parse_options(classify.TASK, alone), ALONE)
    assert sorted(map(len, examples.values())) == [1, 2, 3]


KAGGLE = ["--columns", "text=review", "label=stars"]
LABELED = "id,review,stars\n" + "".join(f"{i},a film {i},{i % 2}\n" for i in range(40))
OBJECT = {"text": "a", "label": 1}
TAGGED = {"tokens": ["a", "b"], "tags": ["B-LC", "O"]}
QUESTION = {"question": "?", "context": "ab", "answers": [{"text": "a", "answer_start": 0}]}
TURN = {"messages": [{"role": "user", "content": "a"}]}


def as_lines(*objects):
    return "".join(json.dumps(each) + "\n" for each in objects)


# A test set without labels, by its name: the task, options, the training set, and the test set.
UNLABELED = {
    "Kaggle": (classify, KAGGLE, "train.csv", LABELED, "id,review\n1,a\n2,b\n"),
    "empty fields": (classify, KAGGLE, "train.csv", LABELED, "id,review,stars\n1,a,\n2,b,\n"),
    "-1 in a csv": (classify, KAGGLE, "train.csv", LABELED, "id,review,stars\n1,a,-1\n2,b,-1\n"),
    "GLUE's tsv": (
        pair, ["--columns", "first=s1", "second=s2", "label=label"], "train.tsv",
        "index\ts1\ts2\tlabel\n" + "0\ta\tb\t1\n" * 40, "index\ts1\ts2\n0\ta\tb\n",
    ),
    "NSMC's tsv": (
        classify, [], "train.txt", "id\tdocument\tlabel\n" + "1\ta\t1\n" * 40, "id\tdocument\n1\ta\n",
    ),
    "null": (classify, [], "train.jsonl", as_lines(OBJECT) * 40, as_lines({"text": "a", "label": None})),
    "no name": (classify, [], "train.jsonl", as_lines(OBJECT) * 40, as_lines({"text": "a"}) * 2),
    "-1 in JSON": (classify, [], "train.json", json.dumps([OBJECT] * 40),
                   json.dumps([OBJECT | {"label": -1}])),
    "a number": (classify, ["--problem", "regression"], "train.jsonl", as_lines(OBJECT) * 40,
                 as_lines({"text": "a"})),
    "several": (classify, ["--problem", "multi-label"], "train.jsonl", as_lines(OBJECT) * 40,
                as_lines({"text": "a", "label": []}) * 2),
    "tags": (ner, [], "train.jsonl", as_lines(TAGGED) * 40, as_lines({"tokens": ["a"], "tags": []})),
    "tags of -1": (ner, [], "train.jsonl", as_lines(TAGGED) * 40, as_lines({"tokens": ["a"], "tags": [-1]})),
    "answers": (qa, [], "train.jsonl", as_lines(*({**QUESTION, "title": f"{i}"} for i in range(40))),
                as_lines(QUESTION | {"answers": []})),
    "no answers": (qa, [], "train.jsonl", as_lines(*({**QUESTION, "title": f"{i}"} for i in range(40))),
                   as_lines({"question": "?", "context": "ab"})),
    "instructions": (instruct, [], "train.jsonl", as_lines({"instruction": "a", "output": "b"}) * 40,
                     as_lines({"instruction": "a"}, {"instruction": "a", "output": ""})),
    "messages": (instruct, [], "train.jsonl", as_lines({"prompt": "a", "completion": "b"}) * 40,
                 as_lines(TURN)),
}  # fmt: skip


@pytest.mark.parametrize("strict", [[], ["--strict"]])
@pytest.mark.parametrize("kind", UNLABELED)
def test_a_test_set_without_labels_is_left_out(tmp_path, capsys, kind, strict):
    module, options, name, training, test = UNLABELED[kind]
    write(tmp_path / name, training)
    unlabeled = write(tmp_path / name.replace("train", "test"), test)
    args = parse_options(module.TASK, ["--data", str(tmp_path), "--model", "x", *options, *strict])
    task = module.TASK.for_problem(args.problem)
    examples = finetune.read_examples(task, args, ALONE)
    assert {name: len(part) for name, part in examples.items()} == {"train": 32, "validation": 4, "test": 4}
    said = capsys.readouterr().out
    assert (
        f"{unlabeled}: not used, because it has no labels; test scores are of a part of the training" in said
    )
    # with a validation set, that is the test set
    write(tmp_path / name.replace("train", "dev"), training)
    examples = finetune.read_examples(task, args, ALONE)
    assert {name: len(part) for name, part in examples.items()} == {"train": 36, "validation": 4, "test": 40}


def test_a_test_set_that_lacks_some_labels_is_used(tmp_path):
    """-1 may be a class, and a question may have no answer."""
    for name, last in (("train", '{"text": "a", "label": -1}\n'), ("test", '{"text": "a"}\n')):
        write(tmp_path / f"{name}.jsonl", as_lines(OBJECT) * 4 + last)
    skipped, unlabeled = [], []
    found = load_splits(classify.TASK, tmp_path, skipped, None, unlabeled)
    assert (len(found["test"]), len(skipped), unlabeled) == (4, 1, [])
    with pytest.raises(HpctrainError, match=r"test\.jsonl, line 5 has no 'label'"):
        load_splits(classify.TASK, tmp_path, None, None, unlabeled)
    write(tmp_path / "test.jsonl", as_lines(OBJECT | {"label": -1}))
    assert len(load_splits(classify.TASK, tmp_path, None, None, unlabeled)["test"]) == 1


def test_a_folder_with_a_training_file_alone_is_split(tmp_path):
    """As doccano exports one file. Another file that may be the test set is not left out in silence."""
    write(tmp_path / "train.jsonl", as_lines(OBJECT) * 40)
    write(tmp_path / "README.md", "")
    args = parse_options(classify.TASK, ["--data", str(tmp_path), "--model", "x"])
    examples = finetune.read_examples(classify.TASK, args, ALONE)
    assert {name: len(part) for name, part in examples.items()} == {"train": 32, "validation": 4, "test": 4}


# --- tables for predict ---


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.json", "a.jsonl", "a.tsv"])
def test_predict_answers_a_table_as_kaggle_expects_it(tmp_path, name):
    """With the columns of the training data, and the id that --columns names."""
    rows = [{"Id": 7, "review": "좋다", "n": 1}, {"Id": 8, "review": 'a, "b"', "n": 2}]
    frame, path = pandas.DataFrame(rows), tmp_path / name
    if path.suffix == ".tsv":
        path.write_text('Id\treview\n7\t좋다\n8\ta, "b"\n')
    else:
        WRITERS[path.suffix[1:]](frame, path)
    args = argparse.Namespace(file=path, columns=["id=Id"])
    columns = predict.choose_columns(args, classify.TASK, {"columns": COLUMNS})
    assert predict.is_table(args) and columns == {"text": "review", "label": "stars", "id": "Id"}
    texts, ids = predict.read_table(path, classify.TASK, columns)
    assert (texts, [str(id_) for id_ in ids]) == ([("좋다",), ('a, "b"',)], ["7", "8"])
    out = io.StringIO()
    write_row = predict.make_csv_writer(out, classify.TASK, columns)
    for text, id_ in zip(texts, ids, strict=True):
        write_row({"id": id_, "text": text[0]}, {"label": "1", "probability": 0.5})
    assert out.getvalue() == "Id,stars\n7,1\n8,1\n"
    out = io.StringIO()  # without an id, and without the columns of the training
    predict.make_csv_writer(out, pair.TASK, {})({"first": "a", "second": "b, c"}, {"labels": ["x", "y"]})
    assert out.getvalue() == 'first,second,labels\na,"b, c","x,y"\n'


def test_folders_of_the_library_datasets_and_of_the_hub_are_read(tmp_path):
    """The splits are folders, beside files that are not data; or the files are in a folder."""
    splits = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(ROWS[i:]) for i, name in enumerate(("test", "train"))}
    )
    splits.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/train/cache-1.arrow").write_bytes(b"of another shape")
    (tmp_path / "hub/plain_text").mkdir(parents=True)
    for name, part in splits.items():
        part.to_parquet(tmp_path / f"hub/plain_text/{name}-00000-of-00001.parquet")
    for folder in ("saved", "hub"):
        found = load_splits(classify.TASK, tmp_path / folder, None, COLUMNS)
        assert {name: [example.text for example in part] for name, part in found.items()} == {
            "test": TEXTS,
            "train": TEXTS[1:],
        }


def test_without_columns_the_error_leads_to_the_option(tmp_path):
    make_folder(tmp_path, train=ROWS, test=ROWS)
    message = (
        r"\(found test\.csv, train\.csv\): give --columns FIELD=COLUMN, which reads test\.csv, train\.csv, or"
    )
    with pytest.raises(HpctrainError, match=message):
        load_splits(classify.TASK, tmp_path)
    with pytest.raises(HpctrainError, match=r"'n,review,stars' .*--columns"):
        load_splits(classify.TASK, tmp_path / "train.csv")
    for name, save in (("a.parquet", "parquet"), ("a.arrow", "arrow"), ("b.arrow", "arrow of datasets")):
        WRITERS[save](pandas.DataFrame(ROWS), tmp_path / name)
        with pytest.raises(HpctrainError, match=rf"{re.escape(name)}: .*--columns"):
            load_splits(pair.TASK, tmp_path / name)


def test_what_was_read_without_columns_stays_as_it_was(tmp_path):
    """A csv by name may have the columns of NSMC, separated by tabs; and plain text may be in it."""
    path = write(tmp_path / "a.csv", "id\tdocument\tlabel\n1\t좋다\t1\n")
    assert [example.text for example in load_splits(classify.TASK, path)["train"]] == ["좋다"]
    assert [
        example.text for example in load_splits(generate.TASK, write(tmp_path / "b.csv", "a,b\n"))["train"]
    ] == ["a,b"]
    path = write(tmp_path / "c.jsonl", json.dumps({"text": "a", "label": 1, "review": "b"}))
    assert load_splits(classify.TASK, path)["train"][0].text == "a"
    assert (
        load_splits(classify.TASK, path, None, {"text": "review", "label": "label"})["train"][0].text == "b"
    )
