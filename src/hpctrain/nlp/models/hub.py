"""Find or fetch a model or data set by a folder, or by its name on the Hugging Face hub."""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, constants, errors, snapshot_download

# a public name of a package without __all__
from huggingface_hub.utils import disable_progress_bars, validate_repo_id  # type: ignore[attr-defined]

from hpctrain.commands import data_sets
from hpctrain.distributed.rendezvous import all_or_none, gather
from hpctrain.distributed.world import World
from hpctrain.errors import HpctrainError, hint_missing
from hpctrain.files.download import complete_folder, partial_folder
from hpctrain.files.trust import refuse_foreign
from hpctrain.nlp.data.formats import TABLES
from hpctrain.nlp.data.splits import SUFFIXES
from hpctrain.nlp.models.model_folder import describe_error, is_disk_error, validate_folder
from hpctrain.parser import Parser

# huggingface_hub would log every retry on every rank. Errors are exceptions anyway.
huggingface_hub.utils.logging.set_verbosity_error()
disable_progress_bars()

# Only what from_pretrained() reads: no subfolders (onnx/), other frameworks or precisions ...
NEEDED = [
    "config.json", "generation_config.json", "tokenizer*.json", "vocab*", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model", "model.safetensors*",
    "model-?????-of-?????.safetensors",
]  # fmt: skip
# ... and pickled weights only if there are no others.
PICKLES = ["pytorch_model.bin*", "pytorch_model-?????-of-?????.bin"]
FILE_SUFFIXES = {".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt"}  # no name of a model ends so
DATA_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
DATA_FILES = ["*.parquet", "*.arrow", "*.csv", "*.tsv", "*.jsonl", "*.ndjson", "*.json", "*.txt"]


def resolve_model(name: str, world: World) -> Path:
    """The folder of a model on this node; `name` is a folder, or a name on the hub such as beomi/kcbert-base.

    What is both is a folder, unless another user made it. A collective call; see _resolve() for models of
    the hub. HpctrainError names the command to fetch it.
    """
    is_folder = gather(world, Path(name).is_dir())
    with all_or_none(world):
        if any(is_folder):
            if not is_folder[world.rank]:
                raise HpctrainError(
                    f"{name}: no such folder on {os.uname().nodename}: put it where all nodes can read it"
                )
            return _take_folder(name)
        _validate_name(name)
    return _resolve(name, world, _find_in_cache, _download_to_cache)


def resolve_data(path: Path, world: World) -> Path:
    """The folder or the file of a data set on this node; `path` is one, or a name on the hub.

    On the hub it is owner/name, or owner/name/folder if the data set has several parts: klue/klue/nli. What
    is both is as for resolve_model(). A collective call, see _resolve(). Raises HpctrainError that says what
    to give instead.
    """
    exists = gather(world, path.exists())
    owner, name, part = (*path.parts, "", "")[:3]
    is_file_name = path.suffix.lower() in SUFFIXES | TABLES  # no name on the hub ends so
    is_hub_name = not is_file_name and len(path.parts) <= 3 and DATA_NAME.fullmatch(f"{owner}/{name}")
    with all_or_none(world):
        if any(exists):
            if not exists[world.rank]:
                raise HpctrainError(
                    f"{path}: not on {os.uname().nodename}: put it where all nodes can read it"
                )
            if not (path.is_dir() or path.is_file()):
                raise HpctrainError(
                    f"{path}: a pipe or a device: write the data into a file, and give that to --data"
                )
            if is_hub_name:
                _prefer_hub(path)
            return path
        is_broken_link = path.resolve() != Path.cwd() / path
        if is_broken_link or not is_hub_name:
            hint = hint_missing(path) or data_sets.hint_fetch(path)
            raise HpctrainError(
                f"{path}: cannot be read (No such file or directory): give --data a folder or a file, or the "
                f"name of a data set on the hub (OWNER/NAME){hint}"
            )
    snapshot = _resolve(f"{owner}/{name}", world, _find_data_in_cache, partial(_download_data, path))
    with all_or_none(world):
        if not (snapshot / part).is_dir():
            found = ", ".join(sorted(each.name for each in snapshot.iterdir() if each.is_dir())) or "none"
            raise HpctrainError(
                f"{owner}/{name}: no folder {part} in this data set, but {found}: name one of them"
            )
    return snapshot / part


def _resolve(
    name: str,
    world: World,
    find: Callable[[str, str], Path | None],
    download: Callable[[str, str | None], Path],
) -> Path:
    """The folder of a repository on this node. A collective call.

    Rank 0 downloads it into the usual cache (HF_HOME). Then the first rank of each other node does so if it
    is not in the cache there, because a cache may be on a node's local disk. All use the same commit.
    """
    snapshot = None
    with all_or_none(world):
        if world.rank == 0:
            snapshot = download(name, None)
    commit = gather(world, snapshot.name if snapshot else "")[0]
    with all_or_none(world):
        if world.local_rank == 0 and world.rank != 0:
            snapshot = find(name, commit) or download(name, commit)
    with all_or_none(world):
        snapshot = snapshot or find(name, commit)
        if snapshot is None:
            raise HpctrainError(
                f"{name}: the first rank on {os.uname().nodename} has it in its cache, but this rank does "
                f"not find it in {constants.HF_HUB_CACHE}: "
                "set HF_HOME to the same folder for all ranks on a node"
            )
    return snapshot


def find_model(name: str, commit: str | None = None) -> Path:
    """The folder of a model for this process alone: `name` itself, or a folder of the cache.

    A commit in the cache is taken without network access. Raises HpctrainError with reason and remedy.
    """
    if Path(name).is_dir():
        return _take_folder(name)
    _validate_name(name)
    cached = _find_in_cache(name, commit) if commit else None
    return cached or _download_to_cache(name, commit)


def fetch_model(name: str, folder: Path, revision: str | None = None) -> str:
    """Download a model of the hub into a folder of its own, for nodes without internet. Returns its commit.

    The folder appears when the download is complete and validated. Until then the files are beside it, in a
    hidden folder named by the commit, where the next call continues. HpctrainError if the folder exists.
    """
    _validate_name(name)
    if folder.exists():
        raise HpctrainError(f"{folder} already exists: use it with --model {folder}, or give another folder")
    with _explain_errors(name, "check the name and the connection, then run the command again"):
        commit = HfApi().model_info(name, revision=revision).sha
    assert commit is not None  # the hub gives the commit with all other information
    unfinished = partial_folder(folder, commit)
    with (
        _explain_errors(name, f"run the same command again, and it continues from {unfinished}"),
        complete_folder(unfinished, folder),
    ):
        _download_snapshot(name, commit, local_dir=unfinished)
        shutil.rmtree(unfinished / ".cache")  # the hub's record of what has been downloaded
    return commit


def _take_folder(name: str) -> Path:
    with suppress(errors.HFValidationError):
        validate_repo_id(name)
        _prefer_hub(Path(name))
    return validate_folder(Path(name))


def _prefer_hub(path: Path) -> None:
    """Refuse a folder or a file of another user whose name can also be one of the hub."""
    refuse_foreign(path, advice=f"its name could be one of the hub: give its whole path, {path.absolute()}")


def _validate_name(name: str) -> None:
    if Path(name).is_file():
        folder = Path(name).parent
        is_model = (folder / "config.json").exists()
        advice = f"give {folder}" if is_model else "write one with save_pretrained() of transformers"
        raise HpctrainError(
            f"{name}: a file, but a model is a folder with config.json, model.safetensors and the tokenizer: "
            f"{advice}"
        )
    try:
        if Path(name).exists() or Path(name).suffix in FILE_SUFFIXES:
            raise errors.HFValidationError
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise HpctrainError(
            f"{name}: neither a folder nor a model name: give an existing folder, or a name on the hub such "
            f"as beomi/kcbert-base{hint_missing(name)}"
        ) from error


def _download_snapshot(name: str, commit: str | None = None, **where: Any) -> Path:
    """Download a repository's needed files unless they are there; returns their validated folder.

    In a cache, the folder is named by the commit.
    """
    folder = Path(
        snapshot_download(name, revision=commit, allow_patterns=NEEDED, ignore_patterns="*/*", **where)
    )
    if not any(folder.glob("*.safetensors")):
        snapshot_download(name, revision=commit, allow_patterns=PICKLES, ignore_patterns="*/*", **where)
    return validate_folder(folder)


def _find_in_cache(name: str, commit: str) -> Path | None:
    """The folder of a commit in the cache if it is complete, without any network access."""
    try:
        return _download_snapshot(name, commit, local_files_only=True)
    except (errors.LocalEntryNotFoundError, HpctrainError):
        return None


def _find_data_in_cache(name: str, commit: str | None) -> Path | None:
    """The folder of a commit of a data set in the cache if it is there, without any network access."""
    try:
        return Path(
            snapshot_download(
                name, repo_type="dataset", revision=commit, allow_patterns=DATA_FILES, local_files_only=True
            )
        )
    except errors.LocalEntryNotFoundError:
        return None


def _download_data(path: Path, name: str, commit: str | None = None) -> Path:
    """Download a data set into the cache; `path` is the --data argument, perhaps a path with a mistake."""
    remedy = "correct the path, or download the data set where there is internet and give --data FOLDER"
    remedy += data_sets.hint_fetch(path)
    with _explain_errors(
        f"{path} (no such file or folder here, so a data set on the hub)", remedy, "data set"
    ):
        folder = Path(
            snapshot_download(name, repo_type="dataset", revision=commit, allow_patterns=DATA_FILES)
        )
        if not any(path.is_file() for path in folder.rglob("*")):
            raise HpctrainError(
                f"{name}: this data set has no tables ({', '.join(DATA_FILES)}), and code of data sets is "
                "not run: download its files, and give --data FOLDER"
            )
        return folder


def _download_to_cache(name: str, commit: str | None = None) -> Path:
    remedy = (
        f"fetch it on a machine with internet access (hpctrain fetch {name} FOLDER), then give --model FOLDER"
    )
    with _explain_errors(f"{name} (no folder in {Path.cwd()})", remedy):
        return _download_snapshot(name, commit)


@contextmanager
def _explain_errors(what: str, remedy: str, kind: str = "model") -> Iterator[None]:
    """Turn any error of a download into an HpctrainError with its reason and the remedy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as too little space: if that is true, an error follows
            yield
    except HpctrainError:
        raise
    except Exception as error:  # of the HTTP library, the hub's library, its transport in Rust, or the disk
        hub = constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            reason = f"gated: accept its terms at {hub} and log in (hf auth login, or HF_TOKEN)"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = f"{hub} has no such {kind}, or it is private (then log in: hf auth login, or HF_TOKEN)"
        elif isinstance(error, errors.RevisionNotFoundError):
            reason = f"{hub} has no such revision of it"
        elif is_disk_error(error):
            reason = f"cannot be written ({describe_error(error)})"
        elif constants.is_offline_mode():
            reason = f"not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set"
        else:
            cause = describe_error(error.__cause__ or error)
            reason = (
                f"not in the cache ({constants.HF_HUB_CACHE}), and the download from {hub} failed ({cause})"
            )
        raise HpctrainError(f"{what}: {reason}: {remedy}") from error


def parser() -> Parser:
    options = Parser(
        prog="hpctrain fetch",
        description="Download a model from the Hugging Face hub into a folder, for nodes without internet. "
        "hpctrain fetch data downloads a data set (hpctrain fetch data --help).",
    )
    options.add_argument(
        "model", metavar="NAME", help="name of the model on the hub, such as beomi/kcbert-base"
    )
    options.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder to create; pass it to a trainer as --model FOLDER"
    )
    options.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit to download (default: main)"
    )
    return options


def main(world: World, arguments: list[str]) -> None:
    """Run `hpctrain fetch`, on one rank if a launcher started several."""
    if arguments[:1] == ["data"]:
        if world.rank == 0:
            data_sets.main(arguments[1:])
        return
    args = parser().parse_args(arguments)
    if world.rank == 0:
        commit = fetch_model(args.model, args.folder, args.revision)
        size = sum(path.stat().st_size for path in args.folder.iterdir())
        print(
            f"{args.folder}: {args.model} at commit {commit}, {size / 1e6:,.1f} MB; "
            f"use it with --model {args.folder}"
        )
