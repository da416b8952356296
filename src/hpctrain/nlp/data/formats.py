"""What the readers of data sets share; splits.py finds the file of each split.

Each task reads its own formats (Task.read). Nothing is dropped silently: an example that a reader cannot
understand is an error that names the file and the line, either raised (--strict) or kept in a list `skipped`
while reading continues. An error in the file as a whole is always raised.
"""

import codecs
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from hpctrain.errors import HpctrainError, explain_os_error
from hpctrain.files.plain import open_plain
from hpctrain.text import first_line, one_line

JSON_LINES = {".jsonl", ".ndjson"}  # a JSON object in each line
OBJECTS = {".json", *JSON_LINES}
TABLES = {".csv", ".tsv", ".parquet", ".arrow", *OBJECTS}  # what --columns reads, see tables.py
# The names under which an object has a list of all examples.
CONTAINERS = ("data", "examples", "rows", "records", "items")
# What an error about the shape of a file of JSON says.
SHAPE = (
    "write a list of objects, or an object in each line, as "
    'DataFrame.to_json(path, orient="records", lines=True) does'
)
NSMC_COLUMNS = ("id", "document", "label")
LABEL_COLUMNS = {"label", "gold_label", "score"}  # of the tsv of NSMC, KorNLI and KorSTS
# the first bytes of Parquet, of a file and of a stream of Arrow
MAGIC_OF_TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
# Their first bytes, their suffix, and what made them.
PACKED = (
    (b"\x1f\x8b", ".gz", "gzip"),
    (b"PK\x03\x04", ".zip", "zip"),
    (b"BZh", ".bz2", "bzip2"),
    (b"\xfd7zXZ\0", ".xz", "xz"),
    (b"(\xb5/\xfd", ".zst", "zstd"),
)
# The first bytes that say an encoding which is not read; that of UTF-16 is the beginning of UTF-32's.
MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
MAX_ERRORS = 100  # of a file that are kept
# What an error about the names in an object adds.
OTHER_NAMES = "; --columns FIELD=COLUMN reads other names"
BLANKS = re.compile(r"[\s,]*")  # between two objects
CONTROLS = re.compile(rb"[\0-\x08\x0e-\x1f\x7f]")  # bytes that no text has
SURROGATE = re.compile(r"[\ud800-\udfff]")  # half of a character, which is no text

AnyExample = TypeVar("AnyExample")
Located: TypeAlias = tuple[str, Callable[[], Any]]  # where a value is, and what returns it


class UnlabeledError(HpctrainError):
    """An example, or a file of them, without what is to be predicted, as the test sets of GLUE and Kaggle."""


def list_names(names: Sequence[str]) -> str:
    """Names for a line of the log: the first 20, and how many more there are."""
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(map(excerpt, names[:20])) + more


def describe_skipped(skipped: Sequence[HpctrainError]) -> str:
    """How many examples were skipped, and the error in the first one; "" if there are none."""
    if not skipped:
        return ""
    count = f"{len(skipped):,} examples" if len(skipped) > 1 else "1 example"
    return f"skipped {count} (an error with --strict); the first: {skipped[0]}"


def find_language(texts: Iterable[str]) -> str | None:
    """ "ko" if most letters of the texts are Hangul. Other scripts are of several languages, so None."""
    return "ko" if are_most_letters(texts, lambda letter: "\uac00" <= letter <= "\ud7a3") else None


def are_most_letters(texts: Iterable[str], of_script: Callable[[str], bool]) -> bool:
    """Whether more than half of the letters of the texts are of a script."""
    letters = Counter(of_script(letter) for text in texts for letter in text if letter.isalpha())
    return letters[True] > letters[False]


def read_examples(
    path: Path,
    make: Callable[..., AnyExample],
    items: Iterable[tuple[Any, ...]],
    skipped: list[HpctrainError] | None,
) -> list[AnyExample]:
    """Call `make` with each item of a file. Its HpctrainError skips the example, into the list `skipped`.

    Without a list it is raised, as are errors of `items` and a file without any example.
    """
    examples: list[AnyExample] = []
    errors: list[HpctrainError] = []
    for item in items:
        try:
            examples.append(make(*item))
        except HpctrainError as error:
            if skipped is None:
                raise
            # A traceback would keep the text of the whole file in memory, and the errors of a file of blank
            # lines would take hundreds of times its size. The number of errors stays right.
            errors.append(error.with_traceback(None) if len(errors) < MAX_ERRORS else errors[0])
    if errors and not examples:
        kind = UnlabeledError if all(isinstance(error, UnlabeledError) for error in errors) else HpctrainError
        raise kind(f"{path}: none of its {len(errors):,} examples can be read; the first: {errors[0]}")
    if not examples:
        raise HpctrainError(f"{path}: the file has no examples: download it again")
    if skipped is not None:
        skipped += errors
    return examples


def line_error(location: str, problem: str) -> HpctrainError:
    """The error for a line of a text file, with advice."""
    return HpctrainError(f"{location}: {problem}: fix the line, or download the file again")


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises HpctrainError if it is empty or not UTF-8."""
    with (
        explain_os_error(f"{path}: cannot be read", "give --data a folder or a file"),
        open_plain(path) as file,
    ):
        if os.fstat(file.fileno()).st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise HpctrainError(f"{path}: larger than the memory: split the file, or download it again")
        content = file.read()
    text = decode_text(path, content)
    if not text.strip():
        raise HpctrainError(f"{path}: the file is empty: download it again")
    return text


def decode_text(
    path: Path, content: bytes, for_tables: str = "name its columns with --columns FIELD=COLUMN"
) -> str:
    """The text in a file with this content, without a byte order mark.

    Raises HpctrainError if it is not UTF-8. `for_tables` is the advice for a table of Parquet or Arrow.
    """
    if how := describe_packed(path, content):
        raise HpctrainError(f"{path}: {how}")
    if content.startswith(MAGIC_OF_TABLES):
        raise HpctrainError(f"{path}: a table of Parquet or Arrow, not text: {for_tables}")
    marked = next((name for mark, name in MARKS if content.startswith(mark)), _find_utf16(content[:1000]))
    location = f"{path}"
    try:
        if not marked:
            return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        location += f", line {number}"
    encoding = marked or "cp949"
    try:
        content.decode(encoding)
    except UnicodeDecodeError:
        if marked or CONTROLS.search(content):
            raise HpctrainError(
                f"{location}: neither UTF-8 nor {encoding}: not a text, or damaged: download the file again"
            ) from None
        encoding = "cp1252"
    found = f"{marked[:6].upper()}, " if marked else ""
    advice = f"convert the file, e.g. iconv -f {encoding} -t utf-8"
    if encoding == "cp949":
        advice += " if it is Korean, or -f cp1252 if it is of Western Europe"
    raise HpctrainError(f"{location}: {found}not UTF-8: {advice}")


def _find_utf16(beginning: bytes) -> str | None:
    """The encoding of a text of UTF-16 without a byte order mark; None if it is another.

    Each digit, space and line break has a zero byte there, before it or after it. Few other characters have
    one on the other side: U+AC00 is a syllable of Hangul.
    """
    before, after = beginning[::2].count(0), beginning[1::2].count(0)
    if max(before, after) <= 3 * min(before, after) or before + after < max(2, len(beginning) / 20):
        return None
    return "utf-16be" if before > after else "utf-16le"


def describe_packed(path: Path, content: bytes = b"") -> str:
    """What a compressed file is, and what to do, by its suffix or its content; "" for other files."""
    suffix = path.suffix.lower()
    if suffix in (".xls", ".xlsx"):
        return "a workbook of Excel: save it as csv (UTF-8)"
    for magic, packed, name in PACKED:
        if suffix == packed or content.startswith(magic):
            return f"compressed with {name}, not text: unpack the file first"
    return ""


def read_lines(path: Path) -> list[str]:
    """The lines of a file, without blank ones at its end."""
    # Not splitlines(): it also splits at U+2028 and others, which occur inside texts.
    text = read_text(path).replace("\r\n", "\n")
    if "\n" not in text:  # Excel's csv and text "(Macintosh)"
        text = text.replace("\r", "\n")
    return text.rstrip("\n").split("\n")


def read_objects(
    path: Path, make: Callable[[str, dict[str, Any]], AnyExample], skipped: list[HpctrainError] | None
) -> list[AnyExample]:
    """read_examples() of JSON objects; `make` gets the location and the object.

    They are in a list, or follow each other, usually one on each line (JSON Lines), whatever the name of the
    file says: pandas and datasets write lines into .json as well. Blank lines are skipped. A single object
    that is no example may be a table: see _unfold().
    """

    def make_from_item(location: str, get: Callable[[], Any]) -> AnyExample:
        value = get()
        if not isinstance(value, dict):
            raise HpctrainError(f"{location}: not a JSON object: {SHAPE}")
        return make(location, value)

    def is_example(item: Located) -> bool:
        try:
            make_from_item(*item)
        except HpctrainError as error:
            return isinstance(error, UnlabeledError)
        return True

    if has_list(path):
        items = _enumerate(path, read_json(path, list, "a list of objects"))
    elif len(items := _list_values(path)) == 1:
        try:
            return [make_from_item(*items[0])]
        except HpctrainError as error:
            value = items[0][1]()
            tables = (_enumerate(path, rows) for rows in _unfold(value))
            table = next((rows for rows in tables if not rows or any(map(is_example, rows[:10]))), None)
            if table is None:
                is_nested = isinstance(value, dict) and any(
                    isinstance(each, list | dict) for each in value.values()
                )
                raise type(error)(
                    f"{error}; for several examples, {SHAPE}" if is_nested else f"{error}"
                ) from error
            items = table
    return read_examples(path, make_from_item, items, skipped)


def has_list(path: Path) -> bool:
    """Whether a file of JSON has a list, and not objects."""
    return read_text(path).lstrip().startswith("[")


def _return(value: Any) -> Any:
    return value


def _skip_blanks(text: str, at: int) -> int:
    match = BLANKS.match(text, at)
    return match.end() if match else at


def _enumerate(path: Path, values: Sequence[Any]) -> list[Located]:
    return [(f"{path}, [{i}]", partial(_return, value)) for i, value in enumerate(values)]


def _list_values(path: Path) -> list[Located]:
    """The location of each value that a file of JSON has one after the other, and a function that returns it.

    If the first one has a line to itself, so have all, and the function raises HpctrainError for a line that
    is not valid. Otherwise values have several lines, as json.dump(indent=2) writes them.
    """
    lines = read_lines(path)
    text, decoder = "\n".join(lines), json.JSONDecoder()
    at, number = _skip_blanks(text, 0), 1
    with suppress(ValueError, RecursionError):
        if "\n" in text[at : decoder.raw_decode(text, at)[1]]:
            values: list[Located] = []
            counted = 0
            while at < len(text):
                number, counted = number + text.count("\n", counted, at), at
                location = f"{path}, line {number}"
                try:
                    value, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    raise HpctrainError(
                        f"{location}: not valid JSON ({first_line(error)}): {SHAPE}"
                    ) from error
                values.append((location, partial(_return, value)))
                at = _skip_blanks(text, end)
            return values
    return [
        (location := f"{path}, line {i}", partial(_parse_line, location, line))
        for i, line in enumerate(lines, 1)
        if line.strip()
    ]


def _unfold(value: Any) -> Iterator[list[Any]]:
    """The lists of examples that one object may hold, as pandas and others write tables.

    DataFrame.to_json() writes a column after the other, with orient="index" a row after the other, with
    "split" and "table" the rows in "data".
    """
    table = value if isinstance(value, dict) else {}
    columns, names, parts = table.get("columns"), list(table), list(table.values())
    for rows in map(table.get, CONTAINERS):
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            yield rows
        elif isinstance(rows, list) and isinstance(columns, list):
            names, parts = [str(name) for name in columns], [list(part) for part in zip(*rows, strict=False)]
    if parts and all(isinstance(part, dict) for part in parts):
        yield parts
        parts = [[part[key] for key in parts[0]] for part in parts if part.keys() == parts[0].keys()]
    if (
        parts
        and len(parts) == len(names)
        and all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts)
    ):
        yield [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)]


def _parse_line(location: str, line: str) -> Any:
    try:
        return json.loads(line.strip().removesuffix(","))
    except (ValueError, RecursionError) as error:
        raise line_error(location, f"not valid JSON ({first_line(error)})") from error


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The location and the text of each line below the header of a tsv."""
    header, *lines = read_lines(path)
    if header.split("\t") != list(columns):
        expected = f"expected the column names {', '.join(columns)}, separated by tabs"
        hint = " (--columns FIELD=COLUMN reads a table with others)" if path.suffix.lower() in TABLES else ""
        is_unlabeled = header.split("\t") == [name for name in columns if name not in LABEL_COLUMNS]
        error = line_error(f"{path}, line 1", f"{expected}, but found {header[:80]!r}{hint}")
        raise UnlabeledError(f"{error}") if is_unlabeled else error
    for number, line in enumerate(lines, 2):
        yield f"{path}, line {number}", line


def split_fields(location: str, line: str, columns: tuple[str, ...]) -> list[str]:
    """The fields of a line of a tsv. There is no quoting: a quotation mark is text."""
    fields = line.split("\t")
    if len(fields) != len(columns):
        raise line_error(
            location, f"{len(fields)} fields, but the header has {len(columns)} ({', '.join(columns)})"
        )
    return fields


def read_json(path: Path, type_: type, expected: str) -> Any:
    """The JSON value of a file, of this type and not empty; `expected` describes it in errors."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}: not valid JSON ({error.msg})"
        is_lines = error.msg == "Extra data"
        advice = "rename a file of JSON Lines to .jsonl" if is_lines else "download the file again"
        raise HpctrainError(f"{path}, {problem}: {advice}, or give --data {expected}") from error
    except ValueError as error:  # a number of more than 4,300 digits
        raise HpctrainError(
            f"{path}: not valid JSON ({first_line(error)}): download the file again"
        ) from error
    except RecursionError as error:
        raise HpctrainError(f"{path}: its JSON is nested too deeply: download the file again") from error
    if not isinstance(value, type_) or not value:
        raise HpctrainError(f"{path}: not {expected}: give --data a file in this format")
    return value


def get_field(location: str, item: object, key: str, type_: type, expected: str) -> Any:
    """`item[key]`, which must be of this type; `expected` describes the whole format in errors.

    JSON can escape half of a character ("\\ud83d"), which is no text and which no tokenizer takes.
    """
    value: Any = item.get(key) if isinstance(item, dict) else None
    if type(value) is not type_:  # true is an int to isinstance()
        raise HpctrainError(f"{location} has no {key!r} of type {type_.__name__}: expected {expected}")
    if isinstance(value, str) and SURROGATE.search(value):
        raise HpctrainError(f"{location}: {key!r} has half of a character, {value[:80]!r}: fix the file")
    return value


def get_answer(location: str, item: object, key: str, type_: type, expected: str) -> Any:
    """get_field() of what is to be predicted. Raises UnlabeledError if it is not there."""
    if not isinstance(item, dict) or item.get(key) is None:
        raise UnlabeledError(f"{location} has no {key!r} of type {type_.__name__}: expected {expected}")
    return get_field(location, item, key, type_, expected)


def get_label(location: str, item: object, key: str, expected: str) -> str:
    """`item[key]`, a text that is not empty, an integer, or true or false, without white space around it.

    In the form of Unicode that keyboards write (NFC): Hangul in names of folders of macOS has another (NFD).
    """
    value = item.get(key) if isinstance(item, dict) else None
    if isinstance(value, list):
        raise HpctrainError(f"{location}: the {key} is a list, not one class: give --problem multi-label")
    if isinstance(value, float):
        raise HpctrainError(
            f"{location}: the {key} is the number {value}, not one class: give --problem regression, "
            "or write classes as integers or texts"
        )
    text = str(value) if isinstance(value, int) else get_answer(location, item, key, str, expected)
    label = unicodedata.normalize("NFC", text.strip())
    if not label:
        raise UnlabeledError(f"{location}: the {key} is empty: add it, or remove the example from the file")
    return label


def excerpt(text: str) -> str:
    """The beginning of a text of a file, in one line."""
    return one_line(text if len(text) <= 80 else f"{text[:80]}...")
