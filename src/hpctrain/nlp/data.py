"""Read data sets as they are published: which file holds which split, and what the readers of the tasks have in common.

Each task reads its own formats (Task.read). Nothing is dropped silently: an example that a reader cannot understand is an
error that names the file and the line, either raised (--strict) or kept in a list `skipped` while reading continues. An error in
the file as a whole is always raised.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.nlp.task import Task

# Words in file names that identify the split, and the suffixes of data files.
SPLITS = {"train": "train", "dev": "validation", "val": "validation", "validation": "validation", "test": "test"}
SUFFIXES = {".txt", ".tsv", ".json", ".conll", ".bio", ".train", ".dev", ".test"}
NSMC_COLUMNS = ("id", "document", "label")

Example = TypeVar("Example")


# --- splits ---


def load_splits(task: Task, data: Path | None, skipped: list[HpctrainError] | None = None) -> dict[str, list[Any]]:
    """Read the examples of each split from the files in a folder, or from the task's sample data if `data` is None.

    A single file is read as "train", for split_examples() to divide. Raises HpctrainError; with a list `skipped`, errors in
    single examples go there instead. Raises UsageError if there is no `data` and the task has no sample data.
    """
    folder = data or task.samples
    if folder is None:
        raise UsageError(f"nlp.{task.name} has no sample data: give --data a folder or a file")
    if folder.is_file():
        return {"train": task.read(folder, skipped)}
    splits = find_split_files(folder)
    return {name: [example for path in paths for example in task.read(path, skipped)] for name, paths in splits.items()}


def describe_skipped(skipped: Sequence[HpctrainError]) -> str:
    """How many examples were skipped, and the error in the first one; "" if there are none."""
    if not skipped:
        return ""
    count = f"{len(skipped):,} examples" if len(skipped) > 1 else "1 example"
    return f"skipped {count} (an error with --strict); the first: {skipped[0]}"


def find_split_files(folder: Path) -> dict[str, list[Path]]:
    """Find the files of each split ("train", "validation", "test") by the names under which data sets are published.

    A file belongs to a split if its name contains the split as a word: ratings_train.txt, klue-ner-v1.1_dev.tsv,
    xnli.test.ko.tsv. Several files of one split, such as the two training files of KorNLI, are read one after the other. If a
    data set publishes dev files but no test set (KLUE, KorQuAD), dev is the test set.

    Raises HpctrainError that lists the files if there is no training or test file.
    """
    splits: dict[str, list[Path]] = {}
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    except OSError as error:
        raise HpctrainError(f"{folder}: cannot be read ({error.strerror}): give --data a folder or a file") from error
    for path in files:
        name = next((SPLITS[word] for word in re.split(r"[^a-z]+", path.name.lower()) if word in SPLITS), None)
        if name:
            splits.setdefault(name, []).append(path)
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    for name, such_as in (("train", "ratings_train.txt or klue-nli-v1.1_train.json"), ("test", "ratings_test.txt or *_dev.json")):
        if name not in splits:
            found = ", ".join(path.name for path in files) or "no data file"
            raise HpctrainError(
                f"{folder}: no {name} file, such as {such_as} (found {found}): "
                "add one, or give --data a single file, which is then split"
            )
    return splits


def split_examples(task: Task, examples: Sequence[Any], fraction: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Divide examples at random into a training and a validation part; validation gets `fraction` of them.

    The division depends on the seed alone, and both parts keep the order of the file. Examples of one group (Task.group) stay
    together, so that no paragraph of a question is in both parts; validation then gets at least its fraction.
    Raises UsageError if a part would be empty.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"--validation-split {fraction} is not between 0 and 1: give a fraction such as 0.1")
    groups: dict[tuple[bool, Hashable], list[int]] = {}
    for i, example in enumerate(examples):
        key = task.group(example)
        groups.setdefault((key is None, i if key is None else key), []).append(i)
    members = list(groups.values())
    wanted = round(fraction * len(examples))
    validation: set[int] = set()
    for group in torch.randperm(len(members), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(validation) >= wanted:
            break
        validation.update(members[group])
    if not 0 < len(validation) < len(examples):
        what = f"{len(examples)} examples" + (f" of {len(members)} {task.groups}" if len(members) < len(examples) else "")
        raise UsageError(f"--validation-split {fraction} of {what} leaves a part empty: give another fraction, or more data")
    return (
        [example for i, example in enumerate(examples) if i not in validation],
        [example for i, example in enumerate(examples) if i in validation],
    )


# --- what the readers have in common ---


def read_examples(
    path: Path, make: Callable[..., Example], items: Iterable[tuple[Any, ...]], skipped: list[HpctrainError] | None
) -> list[Example]:
    """Call `make` with each item of a file; if it raises HpctrainError, the example is skipped and the error kept in `skipped`.

    Without a list `skipped` the error is raised. Always raised are errors of `items` itself, and a file without any example.
    """
    examples, errors = [], []
    for item in items:
        try:
            examples.append(make(*item))
        except HpctrainError as error:
            if skipped is None:
                raise
            errors.append(error.with_traceback(None))  # a traceback would keep the text of the whole file in memory
    if errors and not examples:
        raise HpctrainError(f"{path}: none of its {len(errors):,} examples can be read; the first: {errors[0]}")
    if not examples:
        raise HpctrainError(f"{path}: the file has no examples: download it again")
    if errors:
        skipped += errors
    return examples


def line_error(location: str, problem: str) -> HpctrainError:
    """The error for a line of a text file, with advice."""
    return HpctrainError(f"{location}: {problem}: fix the line, or download the file again")


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises HpctrainError if it is empty or not UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HpctrainError(f"{path}: cannot be read ({error.strerror}): give --data a folder or a file") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise HpctrainError(f"{path}, line {number}: not UTF-8: convert the file, e.g. iconv -f cp949 -t utf-8") from error
    if not text.strip():
        raise HpctrainError(f"{path}: the file is empty: download it again")
    return text


def read_lines(path: Path) -> list[str]:
    """The lines of a file, without blank ones at its end."""
    # Not splitlines(): it also splits at U+2028 and others, which occur inside texts.
    text = read_text(path).replace("\r\n", "\n").rstrip("\n")
    return text.split("\n")


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The location and the text of each line below the header of a tsv."""
    header, *lines = read_lines(path)
    if header.split("\t") != list(columns):
        expected = f"expected the column names {', '.join(columns)}, separated by tabs"
        raise line_error(f"{path}, line 1", f"{expected}, but found {header[:80]!r}")
    for number, line in enumerate(lines, 2):
        yield f"{path}, line {number}", line


def split_fields(location: str, line: str, columns: tuple[str, ...]) -> list[str]:
    """The fields of a line of a tsv. There is no quoting: a quotation mark is text."""
    fields = line.split("\t")
    if len(fields) != len(columns):
        raise line_error(location, f"{len(fields)} fields, but the header has {len(columns)} ({', '.join(columns)})")
    return fields


def read_json(path: Path, type_: type, expected: str) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON value of a file, which must be of this type and not empty; `expected` describes it in errors."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise HpctrainError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}): download the file again") from error
    except RecursionError as error:
        raise HpctrainError(f"{path}: its JSON is nested too deeply: download the file again") from error
    if not isinstance(value, type_) or not value:
        raise HpctrainError(f"{path}: not {expected}: give --data a file in this format")
    return value


def get_field(location: str, item: object, key: str, type_: type, expected: str) -> Any:  # noqa: ANN401 - any JSON value
    """`item[key]`, which must be of this type; `expected` describes the whole format in errors."""
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, type_):
        raise HpctrainError(f"{location} has no {key!r} of type {type_.__name__}: expected {expected}")
    return value
