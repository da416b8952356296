"""Find the files of each split of a data set by their published names, and divide a single file."""

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import HpctrainError, UsageError, explain_os_error
from hpctrain.files import digests
from hpctrain.files.plain import refuse_pointer
from hpctrain.files.trust import refuse_own_below_link
from hpctrain.nlp.data.formats import OBJECTS, TABLES, UnlabeledError, describe_packed, list_names
from hpctrain.text import counted

if TYPE_CHECKING:  # it imports all of transformers, and `hpctrain fetch` needs none
    from hpctrain.nlp.task import AnyExample, Task

# Words in file names that identify the split (testa and testb: CoNLL-2003), and the suffixes of data files.
SPLITS = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(("validation", "valid", "val", "dev", "testa"), "validation"),
    "test": "test",
    "testb": "test",
}
SUFFIXES = {".txt", ".tsv", *OBJECTS, ".conll", ".bio", *(f".{word}" for word in SPLITS)}
# What the library datasets writes beside the data that it saves.
OF_DATASETS = re.compile(r"state\.json|dataset_info\.json|dataset_dict\.json|cache-.*\.arrow")


def load_splits(
    task: "Task[AnyExample]",
    data: Path | None,
    skipped: list[HpctrainError] | None = None,
    columns: dict[str, str] | None = None,
    unlabeled: list[Path] | None = None,
) -> "dict[str, list[AnyExample]]":
    """Read the examples of each split from the files in a folder.

    Without `data` these are the task's sample data. A single file is read as "train", for split_examples() to
    divide. With `columns` the files are tables: see Task.read(). Raises HpctrainError; with a list `skipped`,
    errors in single examples go there instead, and with a list `unlabeled` the files for test and validation
    that have no label at all (GLUE, Kaggle). Without a test file, validation is the test set. Raises
    UsageError if there is no `data` and the task has no sample data.
    """
    folder = data or task.samples
    if folder is None:
        raise UsageError(f"nlp.{task.name} has no sample data: give --data a folder or a file")
    if folder.is_file():
        return {"train": task.read(folder, skipped, columns)}
    files = find_split_files(folder, tables=columns is not None)
    splits = {
        "train": [example for path in files.pop("train") for example in task.read(path, skipped, columns)]
    }
    all_labeled = all(map(task.has_answer, splits["train"]))
    for name, path in ((name, path) for name, paths in files.items() for path in paths):
        try:
            examples = task.read(path, skipped, columns)
            if all_labeled and not any(map(task.has_answer, examples)):
                raise UnlabeledError(f"{path}: its examples have no labels: leave it out")
        except UnlabeledError:
            if unlabeled is None or (skipped is None and _has_labels(task, path, columns)):
                raise
            unlabeled.append(path)
        else:
            splits.setdefault(name, []).extend(examples)
    return _with_test(splits)


def _has_labels(task: "Task[AnyExample]", path: Path, columns: dict[str, str] | None) -> bool:
    """Whether some examples of a file have a label. The first error of --strict does not tell."""
    try:
        return any(map(task.has_answer, task.read(path, [], columns)))
    except UnlabeledError:
        return False


def _with_test(splits: dict[str, Any]) -> dict[str, Any]:
    """The splits, with dev as the test set if there is none (KLUE, KorQuAD)."""
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    return splits


def find_split_files(folder: Path, tables: bool = False) -> dict[str, list[Path]]:
    """Find the files of each split ("train", "validation", "test") by their published names.

    A file belongs to a split if its name contains the split as a word: ratings_train.txt,
    klue-ner-v1.1_dev.tsv, xnli.test.ko.tsv. Several files of one split, such as the two training files of
    KorNLI, are read one after the other. If a data set publishes dev files but no test set (KLUE, KorQuAD),
    dev is the test set.

    With `tables` the files are TABLES. If none of them belongs to a split, the files one folder below are
    taken: train/reviews.txt, plain_text/train-00000-of-00001.parquet, train/data-00000-of-00001.arrow. Hidden
    files, such as those that macOS and editors leave, are no data.

    Raises HpctrainError that lists the files if there is no training file, if there is no test file but one
    that may be it, or if there are two of one name, such as train.csv and train.tsv: the same data in two
    formats.
    """
    suffixes = TABLES if tables else SUFFIXES
    with explain_os_error(f"{folder}: cannot be read", "give --data a folder or a file"):
        files = _list_data_files(folder.iterdir(), suffixes)
        splits = _group_by_split(folder, files)
        if not splits:
            files += _list_data_files(folder.glob("*/*"), suffixes)
            for path in files:
                refuse_own_below_link(path, folder)
            splits = _group_by_split(folder, files)
    _with_test(splits)
    for name, such_as in (
        ("train", "ratings_train.txt or klue-nli-v1.1_train.json"),
        ("test", "ratings_test.txt or *_dev.json"),
    ):
        if name not in splits:
            there = sorted(path for path in folder.iterdir() if path.is_file())
            used = {path for paths in splits.values() for path in paths}
            others = [path for path in there if path not in used and path.suffix.lower() in TABLES | SUFFIXES]
            if name == "test" and not others and not any(map(describe_packed, there)):
                break  # a part of the training data is the test set
            found = list_names([path.name for path in there]) or "no file"
            advice = (
                f"rename one, so that its name has one of the words {', '.join(SPLITS)}, "
                "or give --data a single file, which is then split"
            )
            if tables_there := [path.name for path in there if path.suffix.lower() in TABLES - suffixes]:
                advice = f"give --columns FIELD=COLUMN, which reads {list_names(tables_there)}, or {advice}"
            if packed := [f"{path.name} is {how}" for path in there if (how := describe_packed(path))]:
                advice = packed[0]
            raise HpctrainError(f"{folder}: no {name} file, such as {such_as} (found {found}): {advice}")
    return splits


def _list_data_files(paths: Iterable[Path], suffixes: Collection[str]) -> list[Path]:
    return [
        path
        for path in paths
        if path.suffix.lower() in suffixes
        and not path.name.startswith(".")
        and not OF_DATASETS.fullmatch(path.name)
        and not path.is_fifo()
    ]


def find_split(name: str) -> str | None:
    """The split that a word in the name of a file says; None if there is none."""
    return next((SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLITS), None)


def _group_by_split(folder: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    seen: dict[tuple[str, Path], Path] = {}
    for path in sorted(files):
        if name := find_split(str(path.relative_to(folder))):
            splits.setdefault(name, []).append(path)
            other = seen.setdefault((name, path.with_suffix("")), path)
            if other is not path:
                raise HpctrainError(
                    f"{folder}: {other.name} and {path.name} are the same data in two formats: "
                    "move one to another folder"
                )
    return splits


def refuse_pointers(path: Path, tables: bool = False) -> None:
    """Raise HpctrainError if the file --data, or a file in this folder that would be read, is of Git LFS."""
    files = [path]
    with suppress(OSError):  # what is wrong with the folder is said when it is read
        if path.is_dir():
            suffixes = TABLES if tables else SUFFIXES
            files = [file for file in _list_data_files(path.iterdir(), suffixes) if find_split(file.name)]
        for file in files:
            refuse_pointer(file)


def describe_files(folder: Path | None, tables: bool = False) -> Iterator[str]:
    """The splits in the folder --data that have several files, and the files that belong to no split."""
    if folder is None or not folder.is_dir():
        return
    splits = find_split_files(folder, tables)
    for name, paths in splits.items():
        if len(paths) > 1:
            names = [str(path.relative_to(folder)) for path in paths]
            yield f"{folder}: {len(paths)} files for {name}: {list_names(names)}"
    used = {path for paths in splits.values() for path in paths}
    unused = sorted(
        path.name
        for path in folder.iterdir()
        if path not in used and not path.is_dir() and path.name != digests.NAME
    )
    why = f"a data file has one of the words {', '.join(SPLITS)} in its name"
    if unused:
        yield f"{folder}: not used: {list_names(unused)} ({why})"


def split_examples(
    task: "Task[AnyExample]", examples: "Sequence[AnyExample]", fraction: float, seed: int
) -> "tuple[list[AnyExample], list[AnyExample]]":
    """Divide examples at random into a training and a validation part; validation gets `fraction` of them.

    The division depends on the seed alone, and both parts keep the order of the file. Examples of one group
    (Task.group) stay together, so that no paragraph of a question is in both parts; validation then gets at
    least its fraction. Raises UsageError if a part would be empty.
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
        what = counted(len(examples), "example")
        if len(members) < len(examples):
            what += f" of {len(members)} {task.groups}"
        if len(members) < 2:
            raise UsageError(
                f"--data has {what}, too few to split: "
                "add more, or a file for each of train, validation and test"
            )
        raise UsageError(
            f"--validation-split {fraction} of {what} leaves a part empty: "
            "give another fraction, or more data"
        )
    return (
        [example for i, example in enumerate(examples) if i not in validation],
        [example for i, example in enumerate(examples) if i in validation],
    )
