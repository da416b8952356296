"""Answer texts with a fine-tuned model: `hpctrain predict FOLDER TEXT...` prints one JSON object per line.

hpctrain predict runs/nlp.classify/17/model "다시 보고 싶은 영화"
hpctrain predict runs/nlp.qa/18/model "수도는?" "대한민국의 수도는 서울이다."
hpctrain predict runs/nlp.classify/17/model --file reviews.txt --out answers.jsonl
hpctrain predict runs/nlp.classify/17/model --file test.csv --columns id=id --out submission.csv
"""

import argparse
import codecs
import csv
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hpctrain.cli import COMMANDS
from hpctrain.distributed.device import choose_device
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, UsageError, explain_os_error, panics_as_errors
from hpctrain.files import atomic
from hpctrain.files.plain import open_plain
from hpctrain.nlp.data.formats import JSON_LINES, SURROGATE, TABLES, decode_text, get_field
from hpctrain.nlp.data.tables import read_columns
from hpctrain.nlp.models.lora import load_adapter
from hpctrain.nlp.models.model_folder import (
    ADAPTER_CONFIG,
    describe_error,
    describe_pickle_error,
    read_json_object,
    refuse_foreign_files,
)
from hpctrain.nlp.models.tokenizer import fit_together, load_tokenizer
from hpctrain.nlp.task import Task
from hpctrain.parser import Parser, add_device, positive
from hpctrain.text import counted, first_line, one_line

ID = "id"  # a field of --columns: what names a row
CHUNK = 2048  # texts that are sorted by length together and answered at a time
# Characters that control a terminal and that json.dumps() does not escape: DEL and the C1 set.
CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}

Write: TypeAlias = Callable[[dict[str, Any], dict[str, Any]], None]


def main(world: World, arguments: list[str]) -> None:
    world.refuse_several("predict")
    args = parser().parse_args(arguments)
    if args.file and args.text:
        raise UsageError("TEXT and --file exclude each other: give only one")
    device = choose_device(world, args.device)
    folder = find_model_folder(args.folder)
    task, config = find_task(folder)
    columns = choose_columns(args, task, config)
    rows, ids = read_table(args.file, task, columns) if is_table(args) else (list(read_rows(args, task)), [])

    tokenizer = load_tokenizer(folder)
    model = load_model(task, folder, device)
    fit_together(task, folder, model, tokenizer)
    try:
        if args.out:
            with (
                explain_os_error(f"{args.out}: cannot be written", "give another --out"),
                atomic.file(args.out) as out,
            ):
                is_csv = args.out.suffix.lower() == ".csv"
                write = make_csv_writer(out, task, columns) if is_csv else make_json_writer(out)
                truncated = write_answers(task, model, tokenizer, config, rows, ids, args, write)
        else:
            write = make_json_writer(sys.stdout)
            truncated = write_answers(task, model, tokenizer, config, rows, ids, args, write)
    except (HpctrainError, OSError):
        raise
    # Configuration, tokenizer and weights may not belong together, or the memory may be too small.
    except Exception as error:
        raise HpctrainError(
            f"{folder}: its model cannot answer these texts ({describe_error(error)}): "
            "copy the folder again, or give a smaller --batch-size"
        ) from error
    if truncated:
        limit = config["max_length"]
        print(
            f"truncated {truncated:,} of {len(rows):,} texts, which are longer than {limit} tokens",
            file=sys.stderr,
        )


def write_answers(
    task: Task[Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    config: dict[str, Any],
    rows: list[tuple[str, ...]],
    ids: list[Any],
    args: argparse.Namespace,
    write: Write,
) -> int:
    """Write one line for each row, in their order. Returns how many texts were truncated.

    `ids` has what the column id of a table says, for each row; it is empty without such a column.
    """
    truncated = 0
    with tqdm(
        total=len(rows),
        desc="predict",
        unit="text",
        disable=len(rows) <= args.batch_size,
        mininterval=0.1 if sys.stderr.isatty() else 30,
    ) as bar:
        for first in range(0, len(rows), CHUNK):
            chunk = rows[first : first + CHUNK]
            with panics_as_errors():
                answers, cut = task.answer(model, tokenizer, chunk, config, args, first)
            truncated += cut
            for number, (row, answer) in enumerate(zip(chunk, answers, strict=True), first):
                given = {ID: ids[number]} if ids else {}
                write(given | dict(zip(task.inputs, row, strict=True)), answer)
            bar.update(len(chunk))
    return truncated


def make_json_writer(out: IO[str]) -> Write:
    """A function that writes a JSON object: what was given, and its answer."""
    # a terminal in EUC-KR lacks characters
    escaped = codecs.lookup(getattr(out, "encoding", None) or "utf-8").name != "utf-8"

    def write(given: dict[str, Any], answer: dict[str, Any]) -> None:
        line = json.dumps(given | answer, ensure_ascii=escaped, default=str)
        out.write(line.translate(CONTROLS) + "\n")

    return write


def make_csv_writer(out: IO[str], task: Task[Any], columns: dict[str, str]) -> Write:
    """A function that writes a row as Kaggle expects it: the id, or without one the texts, and the answer.

    The columns have the names of the data.
    """
    rows = csv.writer(out, lineterminator="\n")
    names = [ID] if ID in columns else task.inputs
    header = [columns.get(name, name) for name in names]

    def write(given: dict[str, Any], answer: dict[str, Any]) -> None:
        key, value = next(iter(answer.items()))
        if header:
            rows.writerow([*header, columns.get("label", key)])
            header.clear()
        if isinstance(value, list):
            is_plain = all(isinstance(each, str) for each in value)
            value = ",".join(value) if is_plain else json.dumps(value, ensure_ascii=False)
        rows.writerow([*(given[name] for name in names), value])

    return write


def find_model_folder(folder: Path) -> Path:
    """The model folder of a run folder, else `folder`.

    Raises HpctrainError for a pipe or a device, and for a run without a model.
    """
    found = folder / "model" if (folder / "model/config.json").exists() else folder
    config = folder / "config.json"
    if found == folder and config.is_file() and (trainer := read_json_object(config).get("trainer")):
        raise HpctrainError(
            f"{folder}: a run of {one_line(str(trainer))} that has no model/: "
            "a fine-tuning (nlp.*) writes it when its training has ended"
        )
    refuse_foreign_files(found)
    return found


def find_task(folder: Path) -> tuple[Task[Any], dict[str, Any]]:
    """The task of a fine-tuned model, and config.json's "hpctrain" part. Raises HpctrainError."""
    try:
        config = read_json_object(folder / "config.json")["hpctrain"]
        command = f"nlp.{config['task']}"
        if command in COMMANDS:
            return import_module(COMMANDS[command][0]).TASK.for_problem(config.get("problem", "")), config
    except (HpctrainError, KeyError, TypeError):
        pass
    raise HpctrainError(
        f"{folder}: not a model fine-tuned by hpctrain: "
        "give the model folder of a run, such as runs/nlp.classify/17/model"
    )


def load_model(task: Task[Any], folder: Path, device: torch.device) -> PreTrainedModel:
    """The model in a folder, in fp32. Raises HpctrainError if it is incomplete or damaged."""
    model: Any  # a PreTrainedModel, or an adapter of peft over one
    try:
        if (folder / ADAPTER_CONFIG).exists():
            model = load_adapter(task, folder)
        else:
            model = task.model.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    except HpctrainError:
        raise
    except Exception as error:  # the loaders of the many file formats raise exceptions of many kinds
        raise HpctrainError(
            describe_pickle_error(folder, error)
            or f"{folder}: the model cannot be loaded ({first_line(error)}): copy the folder again"
        ) from error
    return model.to(device).eval()


def is_table(args: argparse.Namespace) -> bool:
    """Whether --file is read as a table. A .tsv may also have two texts on each line, without a header."""
    if not args.file:
        return False
    return bool(args.columns) or args.file.suffix.lower() in TABLES - JSON_LINES - {".tsv"}


def choose_columns(args: argparse.Namespace, task: Task[Any], config: dict[str, Any]) -> dict[str, str]:
    """The columns of a table, by field: those of the training data, unless --columns names others."""
    saved = config.get("columns")
    columns = {name: name for name in task.inputs}
    if isinstance(saved, dict):
        columns |= {name: str(saved[name]) for name in (*task.inputs, "label") if name in saved}
    fields = (*task.inputs, ID)
    for text in args.columns or ():
        field, _, column = text.partition("=")
        if field not in fields or not column:
            raise UsageError(f"--columns {text}: give FIELD=COLUMN; fields are {', '.join(fields)}")
        columns[field] = column
    if args.columns and not args.file:
        raise UsageError("--columns needs --file: give the table")
    return columns


def read_table(
    path: Path, task: Task[Any], columns: dict[str, str]
) -> tuple[list[tuple[str, ...]], list[Any]]:
    """The texts of each row of a table, task.inputs, and its id, if `columns` has one."""

    def make(location: str, row: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
        for name in task.inputs:
            if isinstance(row[name], list) and all(isinstance(word, str) for word in row[name]):
                row[name] = " ".join(row[name])  # the tokens of nlp.ner
        expected = f"a row with {' and '.join(task.inputs)}"
        return tuple(get_field(location, row, name, str, expected) for name in task.inputs), row.get(ID)

    wanted = {name: column for name, column in columns.items() if name in (*task.inputs, ID)}
    found = read_columns(path, wanted, make, None)
    return [row for row, _ in found], [id_ for _, id_ in found] if ID in columns else []


def read_rows(args: argparse.Namespace, task: Task[Any]) -> Iterator[tuple[str, ...]]:
    """The texts of each answer, task.inputs: from the command line, or from the lines of --file."""
    names = task.inputs
    if not args.file:
        if not args.text or len(args.text) % len(names):
            raise UsageError(
                f"{counted(len(args.text), 'text')} given, but each answer of {task.name} needs "
                f"{' and '.join(names)}: give them one after the other, or use --file"
            )
        if any(map(SURROGATE.search, args.text)):  # Python's form of bytes that are not UTF-8
            raise UsageError("TEXT is not UTF-8: set the locale of the terminal to UTF-8, or use --file")
        yield from (tuple(args.text[i : i + len(names)]) for i in range(0, len(args.text), len(names)))
        return
    with (
        explain_os_error(f"{args.file}: cannot be read", "give --file a text file in UTF-8"),
        # <(COMMAND) of a shell is a pipe.
        open_plain(args.file) if args.file.is_file() else args.file.open("rb") as file,
    ):
        text = decode_text(args.file, file.read(), for_tables="convert it to .jsonl")
    lines = text.removesuffix("\n").split("\n") if text else []  # an empty line is a text too
    if not lines:
        raise HpctrainError(f"{args.file}: the file is empty: put one text on each line")
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if args.file.suffix.lower() in JSON_LINES:
            try:
                values = json.loads(line)
                row = tuple(values[name] for name in names)
                valid = all(isinstance(text, str) and not SURROGATE.search(text) for text in row)
            except (ValueError, KeyError, TypeError, RecursionError):
                valid = False
            expected = f"a JSON object with {' and '.join(names)}"
        else:
            row = tuple(line.split("\t"))
            valid, expected = len(row) == len(names), f"{' and '.join(names)}, separated by a tab"
            if len(names) == 1:  # a table, whose labels would become part of the texts
                expected = "a text without tabs, or --columns FIELD=COLUMN for a table"
        if not valid:
            raise HpctrainError(f"{args.file}, line {number}: expected {expected}: fix the line")
        yield row


def add_model_folder(options: Parser) -> None:
    """Add the folder of the model, which `hpctrain serve` has as well."""
    options.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="run folder of a fine-tuning, such as runs/nlp.classify/17, or its model/",
    )


def add_answer_options(options: Parser) -> None:
    """Add the options of Task.answer() that `hpctrain serve` has as well."""
    add = options.add_argument
    add(
        "--batch-size",
        type=positive(int),
        default=32,
        metavar="N",
        help="texts per forward pass (default: %(default)s)",
    )
    add(
        "--max-new-tokens",
        type=positive(int),
        default=64,
        metavar="N",
        help="maximum length of a generated text, nlp.generate and nlp.instruct (default: %(default)s)",
    )
    add_device(options)


def parser() -> Parser:
    options = Parser(
        prog="hpctrain predict",
        description="Answer texts with a fine-tuned model. Prints one JSON object per line.",
    )
    add_model_folder(options)
    add = options.add_argument
    add(
        "text",
        nargs="*",
        metavar="TEXT",
        help="text to answer; nlp.pair needs FIRST SECOND for each answer, nlp.qa QUESTION CONTEXT",
    )
    add(
        "--file",
        type=Path,
        help="answer each line of this file: a text, or two texts separated by a tab; in .jsonl, an object; "
        "or each row of a table",
    )
    add(
        "--columns",
        nargs="+",
        metavar="FIELD=COLUMN",
        help="read --file as a table, each text in the column of this name (default: those of the training "
        "data); id=COLUMN copies a column into the answers",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the answers to this file, which appears when complete; .csv: a table with the id, or the "
        "texts, and the answer (default: stdout)",
    )
    add_answer_options(options)
    add(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed for sampling, nlp.generate and nlp.instruct (default: %(default)s)",
    )
    return options
