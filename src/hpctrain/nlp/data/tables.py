"""Read tables with columns of any names (--columns): csv, tsv, JSON, Parquet and Arrow.

A task asks for fields, such as text and label, and --columns says in which column each of them is.
"""

import csv
import io
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.files.plain import open_plain
from hpctrain.nlp.data import formats
from hpctrain.nlp.data.formats import AnyExample
from hpctrain.text import first_line

ANSWERS = {"label", "tags", "answers", "completion", "output", "response"}  # the fields to be predicted
ROWS = 1_000  # of Parquet that are read at a time
# How much a Parquet or Arrow file may unpack to per byte, and what a row counts beside its texts.
MAX_RATIO, ROW = 1_000, 100


def read_columns(
    path: Path,
    columns: Mapping[str, str],
    make: Callable[[str, dict[str, Any]], AnyExample],
    skipped: list[HpctrainError] | None,
) -> list[AnyExample]:
    """read_examples() of the rows of a table; `make` gets the location of a row, and a value for each field.

    `columns` has the name of the column of each field. A value that is missing is an error of its row.
    Raises HpctrainError that lists the columns of the file if one of `columns` is missing.
    """
    if path.suffix.lower() in (".csv", ".tsv"):
        columns = {field: _normalize_name(column) for field, column in columns.items()}

    def make_from_row(location: str, row: Mapping[Any, Any]) -> AnyExample:
        return make(location, _pick_fields(location, row, columns))

    if path.suffix.lower() in formats.OBJECTS:
        return formats.read_objects(path, make_from_row, skipped)
    if path.suffix.lower() == ".csv":
        rows: Iterator[tuple[str, Any]] = _iterate_csv(path, columns)
    elif path.suffix.lower() == ".tsv":
        rows = _iterate_tsv(path, columns)
    elif path.suffix.lower() in formats.TABLES:
        rows = _iterate_arrow(path, columns)
    else:
        advice = formats.describe_packed(path) or (
            f"not a table that --columns reads ({', '.join(sorted(formats.TABLES))}): "
            "convert it, or leave out --columns"
        )
        raise HpctrainError(f"{path}: {advice}")
    return formats.read_examples(path, make_from_row, rows, skipped)


def _normalize_name(name: str) -> str:
    """A name in the header of a text, without white space around it, in NFC: see formats.get_label()."""
    return unicodedata.normalize("NFC", name.strip())


def _pick_fields(location: str, row: Mapping[Any, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The value of each field in a row. Raises HpctrainError for a row without one of them."""
    if None in row:  # csv.DictReader collects them there
        raise formats.line_error(
            location, "more fields than the header has: in a csv, quote a field that has a comma in it"
        )
    for field, column in columns.items():
        kind = _kind_of_error(field)
        if column not in row:
            raise kind(f"{location}: {_describe_columns(column, [str(name) for name in row])}: fix the line")
        if row[column] is None:
            raise kind(f"{location}: its column {column!r} has no value: add it, or leave the row out")
    return {field: row[column] for field, column in columns.items()}


def _check_columns(path: Path, columns: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise HpctrainError if a column is not among the `names` in a file, or is there twice."""
    for field, column in columns.items():
        if column not in names:
            kind = _kind_of_error(field)
            raise kind(
                f"{path}: {_describe_columns(column, names)}: give --columns FIELD=COLUMN with one of these, "
                "or add the header, if its first line has none"
            )
        if names.count(column) > 1:
            raise HpctrainError(f"{path}: it has several columns {column!r}: rename all but one")


def _kind_of_error(field: str) -> type[HpctrainError]:
    """The error for a field that is not there."""
    return formats.UnlabeledError if field in ANSWERS else HpctrainError


def _describe_columns(column: str, names: Sequence[str]) -> str:
    return f"no column {column!r}, but {formats.list_names(names) or 'no columns at all'}"


def _iterate_csv(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The location and the fields of each row below the header.

    Commas, else semicolons or tabs, separate fields; quoted ones may have separators and line breaks.
    """
    text, line = formats.read_text(path), 1
    header = text.partition("\n")[0]
    separator = next((each for each in ",;\t" if each in header), ",")
    # strict: otherwise a quotation mark that is not closed would make one field of the rest of the file.
    # Python's limit for the length of a field ends that early.
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        rows.fieldnames = [_normalize_name(name) for name in rows.fieldnames or []]
        _check_columns(path, columns, rows.fieldnames)
        line = rows.line_num + 1
        for row in rows:
            yield f"{path}, line {line}", row
            line = rows.line_num + 1
    except csv.Error as error:
        raise formats.line_error(
            f"{path}, line {line}",
            f"not valid csv ({error}): is a quotation mark not closed? (.jsonl has texts of any length)",
        ) from error


def _iterate_tsv(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str | None, Any]]]:
    """Location and fields of each row below the header. Quotation marks are text, as in XNLI and GLUE."""
    header, *lines = formats.read_lines(path)
    names = [_normalize_name(name) for name in header.split("\t")]
    _check_columns(path, columns, names)
    for number, line in enumerate(lines, 2):
        fields = line.split("\t")
        row: dict[str | None, Any] = dict(zip(names, fields, strict=False))
        yield f"{path}, line {number}", row | ({None: fields} if len(fields) > len(names) else {})


def _iterate_arrow(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Location and values of each row of a Parquet or Arrow file, read in parts; classes by name."""
    try:
        import pyarrow
    except ImportError as error:  # the images have it
        raise HpctrainError(
            f"{path}: reading it needs pyarrow: install pyarrow, or convert the file to .jsonl"
        ) from error
    names, number = list(columns.values()), 0
    room = MAX_RATIO * path.stat().st_size + 2**20
    try:
        with open_plain(path), pyarrow.OSFile(str(path)) as file:
            schema, batches = (
                _open_parquet(file, names) if path.suffix.lower() == ".parquet" else _open_arrow(file)
            )
            _check_columns(path, columns, schema.names)
            classes = {name: _find_class_names(schema.metadata, name) for name in names}
            for batch in batches:
                chosen = batch.select(names)
                chosen.validate(full=True)  # otherwise a damaged file could be read outside of its memory
                # one row at a time: a text may be there once for many rows
                for scalars in zip(*chosen.columns, strict=True):
                    row = dict(zip(names, (scalar.as_py() for scalar in scalars), strict=True))
                    number += 1
                    room -= ROW + _count_size(list(row.values()))
                    if room < 0:
                        raise HpctrainError(
                            f"{path}: unpacks to over {MAX_RATIO} times its size: "
                            "convert it to .jsonl, if it is right"
                        )
                    yield (
                        f"{path}, row {number}",
                        {name: _name_classes(row[name], classes[name]) for name in names},
                    )
    except HpctrainError:
        raise
    except Exception as error:  # pyarrow raises exceptions of many kinds for damaged files
        kind = path.suffix.removeprefix(".").capitalize()
        raise HpctrainError(
            f"{path}: not a file of {kind} that can be read ({first_line(error)[:200]}): "
            "download the file again"
        ) from error


def _count_size(value: Any) -> int:
    """About the memory that a value takes, in bytes."""
    if isinstance(value, list):
        return sum(map(_count_size, value))
    return len(value) if isinstance(value, str) else 8


def _open_parquet(file: Any, names: list[str]) -> tuple[Any, Iterable[Any]]:
    from pyarrow import parquet

    schema = parquet.ParquetFile(file).schema
    leaves = map(schema.column, range(len(schema)))
    # Otherwise a text that is stored once for many rows would be copied for each row. In lists this is slow.
    texts = [leaf.path for leaf in leaves if leaf.path in names and leaf.logical_type.type == "STRING"]
    table = parquet.ParquetFile(file, read_dictionary=texts)
    return table.schema_arrow, table.iter_batches(ROWS, columns=names, use_threads=False)


def _open_arrow(file: Any) -> tuple[Any, Iterable[Any]]:
    """The schema and the record batches of Arrow's IPC: a file, or a stream (the library datasets)."""
    from pyarrow import ipc

    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    if is_stream:
        stream = ipc.open_stream(file)
        return stream.schema, stream
    table = ipc.open_file(file)
    return table.schema, map(table.get_batch, range(table.num_record_batches))


def _find_class_names(metadata: Mapping[bytes, bytes] | None, column: str) -> list[str]:
    """The class names of a column, or of its lists, from the library datasets (ClassLabel); else []."""
    try:
        feature = json.loads((metadata or {})[b"huggingface"])["info"]["features"][column]
        names = feature.get("feature", feature)["names"]
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _name_classes(value: Any, names: list[str]) -> Any:
    """The names for numbers of classes, if any. None for a number without one: -1 stands for no label."""
    if isinstance(value, list):
        return [_name_classes(each, names) for each in value]
    if not names or type(value) is not int:
        return value
    return names[value] if 0 <= value < len(names) else None
